"""The simulator: a plan and a schedule become a timeline, by discrete events, and the timeline the
numbers that the plan predicts.
"""

from partopt.simulator.execution import Execution, execute
from partopt.simulator.prediction import simulate_plan

__all__ = ["Execution", "execute", "simulate_plan"]
