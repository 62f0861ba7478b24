"""Searches over what only a simulation sees: the warm-up of a plan, the best of several planners,
the schedule, the number of devices.
"""
