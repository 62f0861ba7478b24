"""Which group: profiles of one model in groups of several sizes, the best plan of each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from partopt.cost.problem import Progress, ignore_progress
from partopt.documents import Note
from partopt.documents.plan import Plan
from partopt.documents.profile import Profile
from partopt.documents.tables import GroupComparison, GroupRow
from partopt.errors import PartoptError
from partopt.job import Job
from partopt.search.rows import order_of
from partopt.search.solve import solve

_ALIKE = ("dtype", "autocast", "compiled")  # of profiles of one model, or a note says so


def compare_groups(
    jobs: Mapping[str, Job], progress: Progress = ignore_progress
) -> tuple[GroupComparison, list[Note]]:
    """The best plan of each of `jobs`, by the names of their profiles: fitting ones first, fastest.

    The jobs are of one cluster. Their profiles are of one model, measured in groups of several
    sizes: PartoptError, before anything is planned, where the layers are others. The second value
    holds what to know, with a note for what differs beside the group.
    """
    profiles = {name: job.profile for name, job in jobs.items()}
    _check_same_layers(profiles)
    plans = {name: solve(job, _of_profile(name, progress)).plan for name, job in jobs.items()}
    first = next(iter(jobs.values()))
    found = GroupComparison(
        model=first.profile.model.name,
        layers=len(first.profile.layers),
        topology=first.topology.cluster,
        rows=[_row(name, plan) for name, plan in sorted(plans.items(), key=_order)],
    )
    own = {note.text: note for job in jobs.values() for note in job.notes}
    return found, [*own.values(), *_differences(profiles), *_batches(plans)]


def _order(item: tuple[str, Plan]) -> tuple[bool, float]:
    return order_of(item[1])


def _of_profile(name: str, progress: Progress) -> Progress:
    return lambda what, done, total: progress(f"{name}, {what}", done, total)


def _row(name: str, plan: Plan) -> GroupRow:
    return GroupRow(
        profile=name,
        estimated=plan.profile.estimated,
        ranks=plan.topology.group_ranks,
        microbatch_size=plan.microbatch_size,
        microbatches=plan.microbatches,
        schedule=plan.schedule,
        planner=plan.planner,
        shape=plan.shape,
        stages=len(plan.stages),
        samples_per_s=plan.predicted.samples_per_s,
        figures=plan.predicted.figures,
        peak_memory_bytes=plan.peak_memory_bytes,
        bound_by=plan.predicted.bound_by,
        fits=plan.fits,
    )


def _check_same_layers(profiles: Mapping[str, Profile]) -> None:
    (first, one), *others = profiles.items()
    own = [(layer.name, layer.call) for layer in one.layers]
    for name, other in others:
        found = [(layer.name, layer.call) for layer in other.layers]
        if found == own:
            continue
        index = next(
            (i for i, pair in enumerate(zip(own, found, strict=False)) if pair[0] != pair[1]),
            min(len(own), len(found)),
        )
        here, there = (
            f'"{layers[index][0]}"' if index < len(layers) else "none" for layers in (own, found)
        )
        raise PartoptError(
            f"{name}: not the model of {first}: layer {index} is {there}, and {here} there",
            "give profiles of one model, measured in groups of several sizes",
            code="other-layers",
            layer=index,
        )


def _differences(profiles: Mapping[str, Profile]) -> Iterator[Note]:
    """A note for each way, beside the group, in which profiles were measured differently."""
    for field in _ALIKE:
        values = {name: getattr(profile, field) for name, profile in profiles.items()}
        yield from _note(field, values)
    yield from _note("device", {name: each.device.name for name, each in profiles.items()})


def _batches(plans: Mapping[str, Plan]) -> Iterator[Note]:
    """A note where iterations have other numbers of samples: with few, a pipeline is emptier."""
    values = {
        name: plan.microbatch_size * plan.microbatches
        for name, plan in plans.items()
        if plan.microbatches is not None
    }
    yield from _note("samples of an iteration", values, "; `global_batch` makes them equal")


def _note(what: str, values: Mapping[str, object], hint: str = "") -> Iterator[Note]:
    if len(set(values.values())) > 1:
        text = ", ".join(f"{value} in {name}" for name, value in values.items())
        yield Note(code="differently-measured", text=f"{what}: {text}{hint}")
