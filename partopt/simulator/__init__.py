"""The simulator: a plan and a schedule become a timeline, by discrete events, and the timeline the
numbers that judge the plan.
"""

from partopt.simulator.judge import Simulation, judged, simulation_of

__all__ = ["Simulation", "judged", "simulation_of"]
