"""The plan whose slowest stage is fastest, by dynamic programming over layers and places.

For every layout of the devices (`partopt.planners.layouts`) and every number of stages,

    T(s, i, q) = min over j, r of max( cost of [i, j) on r places, T(s - 1, j, q - r) )

is the time of the slowest stage of layers from i on, in s stages on the last q places. Costs are
arrays over all [i, j) (`partopt.planners.costs`). Places may stay idle: T(s, i, q - 1) counts too.

    layers    0 . . . i . . . . j . . . . . . N
                      [ stage   )[ s - 1 more  )
    places    0 . . . . U-q . . . U-q+r . . . U       the stage takes the first r that are left

T is filled from the end of the chain: for s = 1 the last stage takes all layers from i on; for each
s more every cut j and every r is tried, and the best is kept with its j and r. The plan is read off
from T(S, 0, U) forward. A place is some ranks of the cluster in a fixed order, so that what a cut
costs follows from where U - q lies: inside a server, or between two.

    N, S   layers, stages
    U, q   places of the layout, and those that are left
    r      places of a stage
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from partopt.cost.problem import NONE, Decision, Problem, ReportShare, ignore_share, share_of
from partopt.errors import ANSWER_IS_NO, PartoptError
from partopt.planners.costs import StageCosts
from partopt.planners.kernels import extend, relax
from partopt.planners.layouts import Places, Shape, layouts_of
from partopt.planners.placing import stage_count
from partopt.schedules.entry import Replicas

MANY = 64  # devices: on more there is most to be won
CELLS = 256  # layers that are planned for, or ranges of them
# of the program, on up to MANY devices and above; in the arrays of stages of some replicas
ROUGH, NUMBERS = (160, 128), (2e5, 2e6)
STAGES = 128  # of a plan, at most
FAR = 32  # layers by which `recut` moves a cut, at most


def plan(problem: Problem) -> Decision:
    """The plan whose slowest stage is fastest, within the memory.

    Raises PartoptError where no plan fits.
    """
    stated, cells = coarsen(problem)
    costs = StageCosts(stated)
    found = plans(costs)
    if not found:
        raise nothing_fits(problem)
    return Decision(found[0].partition().on_layers(cells))


def coarsen(
    problem: Problem, most: int | None = None, kept: Sequence[int] = ()
) -> tuple[Problem, list[int]]:
    """The problem of a chain that is short enough to plan for, and its boundaries in layers.

    Of one of more than `most` layers the ranges take about equally long; boundaries that are `kept`
    are among theirs.
    """
    if problem.request.stages is not None:
        stage_count(problem)
    bounds = problem.boundaries()
    if most is None:
        most = max(CELLS, problem.request.stages or 1)
    if len(bounds) > most + 1:
        times = problem.chain.compute_prefix[bounds]
        shares = times[-1] * np.arange(most + 1) / most
        nearest = {bounds[int(np.abs(times - share).argmin())] for share in shares}
        bounds = sorted(nearest | {bounds[0], bounds[-1], *kept})
    return problem.with_(cut_at=bounds[:-1]).coarsen(), bounds


def plans(costs: StageCosts) -> list[Shape]:
    """Plans of all layouts and numbers of stages, those that are estimated to be fastest first.

    Those of a longer chain are cut between ranges of its layers.
    """
    problem, found = costs.problem, dict[Shape, float]()
    many, cells = are_many(problem), list(range(costs.N + 1))
    if (most := max(ROUGH[many], problem.request.stages or 1)) < costs.N:
        rough, cells = coarsen(problem, most)
        costs = StageCosts(rough)
    key = "layouts", id(problem.topology)
    layouts: list[Places] = problem.known.once(key, lambda: layouts_of(problem.topology))
    for done, places in enumerate(layouts):
        report_progress = share_of(problem.progress, "dynamic program", done, len(layouts))
        most = min(STAGES, int(NUMBERS[many]) // costs.N**2 + 8)
        for shape in layout_plans(costs, places, most, report_progress):
            found[shape] = costs.estimate_s(shape)
    best = sorted(found, key=lambda shape: found[shape])
    return [shape.on_cells(cells, range(problem.chain.layers + 1)) for shape in best]


def are_many(problem: Problem) -> bool:
    """Whether there are so many devices that plans begin with equal pipelines."""
    return problem.topology.devices > MANY


def layout_plans(
    costs: StageCosts, places: Places, most: int, report_progress: ReportShare = ignore_share
) -> Iterator[Shape]:
    """The best plans on one layout, of every number of stages up to `most` or of the one asked for.

    Where all stages have as many replicas, of every number of them too.
    """
    request, U = costs.problem.request, len(places)
    most = min(most if request.stages is None else request.stages, costs.N, U)
    least = costs.problem.least_stages if request.stages is None else request.stages
    numbers = range(least, most + 1)
    widths = {len(place) for place in places}
    sizes: Sequence[int] = range(1, U + 1)
    every: Sequence[int | None] = [None]
    if request.replication == NONE:
        every, sizes = ([1], range(1, 2)) if widths == {1} else ([], sizes)
    elif costs.even:
        every = sorted({width * r for width in widths for r in sizes})
        every = [r for r in every if request.layout.dp in (None, r)]
    apart = costs.even and costs.entry.split  # whose stages have room for as many as there are
    for replicas in every:
        if replicas is not None and len(widths) == 1:
            sizes = [replicas // max(widths)]
        r = replicas or 1
        fitting = [S for S in numbers if r * S <= U * max(widths)]
        if apart:
            runs = [[S] for S in fitting if costs.fewest_stages(r, S) <= S]
        else:
            runs = [fitting] if fitting else []
        for stages in runs:
            yield from slowest_fastest(costs, places, sizes, stages, replicas, report_progress)


def slowest_fastest(
    costs: StageCosts,
    places: Places,
    sizes: Sequence[int],
    stages: Sequence[int],
    replicas: int | None = None,
    report_progress: ReportShare = ignore_share,
) -> Iterator[Shape]:
    """For every number of `stages` the plan on `places` whose slowest stage is fastest.

    A stage has one of `sizes` places, and as many `replicas` where that is given; with one size
    idle places come in as many.
    """
    N, U, S, step = costs.N, len(places), max(stages), math.gcd(*sizes)
    T = np.full((U + 1, S + 1, N + 1), np.inf)
    # the end of the stage, its places, whether it recomputes; 0 places: the place stays idle
    choice = np.zeros((U + 1, 3, S + 1, N + 1), dtype=np.int32)
    T[:, 0, N], suffix = 0.0, np.empty(N + 1)
    for q in range(step, U + 1, step):
        report_progress(q / U)
        T[q, 1:] = T[q - step, 1:]
        for r in _widths(places[U - q :], sizes, replicas):
            for again in costs.modes:
                table = costs.parts(places, U - q, U - q + r, again, S)
                most, taken = min(S, q - r + 1), (r, int(again))
                relax(table, taken, T[q - r], T[q], choice[q], most, suffix)
    for wanted in stages:
        if T[U // step * step, wanted, 0] < np.inf:
            yield from _fitting(
                costs, _backtrack(choice, places, wanted, len(costs.modes) > 1, step)
            )


def _fitting(costs: StageCosts, shape: Shape) -> Iterator[Shape]:
    """The plan; with other cuts, or all recomputed, where later stages have too little room."""
    if not costs.entry.split or costs.slowest_s(shape) < np.inf:
        yield shape
        return
    again = (True,) * shape.stages
    modes = [shape.recompute, again] if costs.chooses_recompute else [shape.recompute]
    recuts = (recut(costs, replace(shape, recompute=mode)) for mode in modes)
    yield from islice((other for other in recuts if other is not None), 1)


def _widths(places: Places, sizes: Sequence[int], replicas: int | None) -> Iterator[int]:
    """The `sizes` that a stage on the first of the places may have: equally wide places alone."""
    width = len(places[0])
    equal = next((r for r, place in enumerate(places) if len(place) != width), len(places))
    return (r for r in sizes if r <= equal and replicas in (None, r * width))


def _backtrack(
    choice: np.ndarray[tuple[int, ...], np.dtype[np.int32]],
    places: Places,
    stages: int,
    chosen: bool,
    step: int = 1,
) -> Shape:
    """The plan behind `choice[U, :, stages, 0]`; `chosen`: its stages choose to recompute."""
    bounds, counts, idle, modes = [0], [], [], []
    spare, s, N = len(places) % step, stages, choice.shape[3] - 1
    q = len(places) - spare
    while bounds[-1] < N:
        end, r, again = map(int, choice[q, :, s, bounds[-1]])
        if r == 0:
            q, spare = q - step, spare + step
            continue
        bounds.append(end)
        counts.append(r)
        idle.append(spare)
        modes.append(bool(again) if chosen else None)
        q, s, spare = q - r, max(0, s - 1), 0
    return Shape(places, tuple(bounds), tuple(counts), tuple(idle), tuple(modes))


def recut(
    costs: StageCosts, shape: Shape, far: int = FAR, full: bool | None = None
) -> Shape | None:
    """The same stages on the same places, cut where the slowest is fastest; None if none fits.

    No cut moves by more than `far` layers. Stages recompute as they do. Where `full` is given it is
    chosen again, and stages have room for one microbatch or, `full`, for all of their schedule.
    """
    N, every = costs.N, list[NDArray[np.int64]]()
    near = [
        (max(s, cut - far), min(N, cut + far) + 1) if 0 < cut < N else (cut, cut + 1)
        for s, cut in enumerate(shape.bounds)
    ]
    slowest = np.zeros(1)  # of the stages so far, by where the last of them ends
    replicas = Replicas(map(len, shape.ranks)) if full else Replicas()
    stages = zip(shape.spans, costs.recomputes(shape), near[:-1], near[1:], strict=True)
    for s, (span, again, begins, ends) in enumerate(stages):
        longer = np.full(ends[1] - ends[0], np.inf)
        begun = np.zeros((2, len(longer)), dtype=np.int64)  # where it does, and its mode
        for mode in (again,) if full is None else costs.modes:
            table = costs.parts(shape.places, *span, mode, shape.stages, s)
            if full:
                usual = costs.entry.counts(s, replicas, costs.M).held
                table = table._replace(least=max(table.least, float(usual)))
            extend(table, int(mode), begins, ends, slowest, longer, begun)
        every.append(begun)
        slowest = longer
    if slowest[0] == np.inf:
        return None
    bounds, modes = [N], list[bool | None]()
    for begun, (first, _) in zip(reversed(every), reversed(near[1:]), strict=True):
        start, mode = begun[:, bounds[-1] - first].tolist()
        bounds.append(start)
        modes.append(bool(mode))
    chosen = tuple(modes[::-1]) if costs.chooses_recompute else shape.recompute
    return replace(shape, bounds=tuple(bounds[::-1]), recompute=chosen)


def nothing_fits(problem: Problem) -> PartoptError:
    """The error where no plan fits, with what would help."""
    request = problem.request
    if problem.memory_bytes is None:  # then it is the stages that cannot be
        asked = f"{request.stages} stages" if request.stages else "stages"
        return PartoptError(
            f"optimal: no plan of {asked} on {problem.topology.devices} devices was found",
            "ask for another number of stages, or for none: leave out `stages`",
            ANSWER_IS_NO,
            code="no-plan",
        )
    may_recompute = request.recompute != "never"
    more = "" if may_recompute else ", or let stages recompute (`recompute=auto`)"
    sizes = [m.microbatch_size for m in problem.profile.measured()] if problem.profile else []
    smaller = any(size < problem.chain.microbatch_size for size in sizes)
    return PartoptError(
        "optimal: no plan fits the memory",
        f"give {'smaller microbatches, ' if smaller else ''}larger devices or more of them{more}",
        ANSWER_IS_NO,
        code="no-plan-fits",
    )
