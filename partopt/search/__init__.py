"""Searches over what only a simulation can judge.

These are the warm-up of a plan, the best of several planners, the schedule and the number of
devices.
"""
