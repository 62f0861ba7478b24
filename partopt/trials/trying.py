"""Schedules executed on equal stages, one with its timeline, or all side by side."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from partopt.documents.simulation import DrawnTimeline
from partopt.documents.trial import Refused, TrialDocument, Tried
from partopt.errors import PartoptError
from partopt.schedules import SCHEDULES, schedule
from partopt.schedules.layout import LOOPED
from partopt.simulation import Simulation, simulate
from partopt.simulator.document import drawn_timeline, drawn_windows
from partopt.simulator.execution import Execution
from partopt.simulator.memory import base_memory_bytes
from partopt.trials.expected import closed_form
from partopt.trials.uniform import Uniform


@dataclass(frozen=True, eq=False)
class Trial:
    """The schedule `name` on a pipeline of equal stages, executed."""

    name: str
    pipeline: Uniform
    simulation: Simulation

    @cached_property
    def document(self) -> TrialDocument:
        """What it takes, beside what its formulas say, and its timeline."""
        execution = self.simulation.execution
        drawn = drawn_timeline(execution.timeline, drawn_windows(execution))
        return _document(self.pipeline, [_tried(self)], [], drawn)

    def save(self, path: str, force: bool = False) -> None:
        """Write the timeline as `Simulation.save` does."""
        self.simulation.save(path, force)


def try_schedule(name: str, pipeline: Uniform, *, save_as: str | None = None) -> Trial:
    """Execute the schedule `name` on equal stages.

    `save_as` is where the timeline will be saved, if it will. Raises PartoptError for an unknown
    schedule, one that cannot run so, and where there is too much to simulate.
    """
    entry = schedule(name)
    if pipeline.chunks is not None and entry.shape != LOOPED:
        raise PartoptError(
            f"`chunks={pipeline.chunks}`: not for {name}",
            "drop it, or choose interleaved or interleaved-zb",
            code="conflicting-options",
            option="chunks",
        )
    return _execute(name, pipeline, save_as)


def _execute(name: str, pipeline: Uniform, save_as: str | None = None) -> Trial:
    return Trial(name, pipeline, simulate(pipeline.plan(name), save_as=save_as))


def try_schedules(pipeline: Uniform, names: Iterable[str] | None = None) -> TrialDocument:
    """The schedules `names`, by default all, on one pipeline of equal stages.

    Those that cannot run so are named with the reason; `chunks` are for looped ones alone.
    """
    tried: list[Tried] = []
    refused: list[Refused] = []
    for name in SCHEDULES if names is None else names:
        try:
            tried.append(_tried(_execute(name, pipeline)))
        except PartoptError as error:
            refused.append(Refused(schedule=name, message=error.message, hint=error.hint))
    return _document(pipeline, tried, refused, None)


def _document(
    pipeline: Uniform, tried: list[Tried], refused: list[Refused], timeline: DrawnTimeline | None
) -> TrialDocument:
    seconds = pipeline.seconds
    return TrialDocument(
        stages=pipeline.stages,
        microbatches=pipeline.microbatches,
        forward_s=seconds.forward,
        backward_s=seconds.backward,
        weight_gradient_s=seconds.weight_gradient,
        transfer_s=seconds.transfer,
        recompute=pipeline.recompute,
        tried=tried,
        refused=refused,
        timeline=timeline,
    )


def _tried(trial: Trial) -> Tried:
    execution, pipeline = trial.simulation.execution, trial.pipeline
    return Tried(
        schedule=trial.name,
        asynchronous=schedule(trial.name).asynchronous,
        chunks=pipeline.chunks_under(trial.name),
        waits=execution.plan.waits,
        iteration_s=execution.period_s * pipeline.microbatches,
        bubble=execution.bubble,
        in_flight=execution.peak_in_flight.tolist(),
        activations=_activations(execution, pipeline, trial.name),
        closed_form=closed_form(trial.name, pipeline, execution),
    )


def _activations(execution: Execution, pipeline: Uniform, name: str) -> list[float]:
    """The most that each device keeps for backwards, in what it keeps of one microbatch."""
    whole = pipeline.stage_activations(name) * pipeline.parts_under(name)
    kept = execution.peak_memory_bytes - base_memory_bytes(execution.plan)
    return [size / whole for size in kept.tolist()]
