"""Measures the layers of a PyTorch model. This package and partopt.runtime are the only ones that import torch."""
