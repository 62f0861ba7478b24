"""The cost model: every formula once.

Planners, the command line and the reports call these functions and compute nothing of their own.
"""
