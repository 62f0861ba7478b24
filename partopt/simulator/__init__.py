"""Discrete-event simulation of a plan under its schedule.

It yields a timeline, and the timeline the numbers that the plan predicts.
"""

from partopt.simulator.execution import Execution, execute, simulate_plan

__all__ = ["Execution", "execute", "simulate_plan"]
