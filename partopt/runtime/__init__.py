"""Executes a plan on torch.distributed.

This package and partopt.profiler are the only ones that import torch.
"""
