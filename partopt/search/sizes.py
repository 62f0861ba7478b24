"""A transformer on clusters of several sizes, in closed form: where it fits, what is fastest."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from partopt.cost.problem import Progress, ignore_progress
from partopt.job import Job
from partopt.search.layout_questions import question_of, training_for, without_graphs
from partopt.transformer.block import Training
from partopt.transformer.iteration import Estimate
from partopt.transformer.layouts import any_fits, find_fastest

MOST = 16_384  # devices of the clusters that are tried


class Sizes:
    """A transformer's job on several numbers of devices, in closed form.

    Blocks are computed once. `inside` are the devices of a member of the outermost level.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._trainings = dict[int, Training]()  # the last of every way
        self.inside = job.topology.cluster.devices // job.topology.cluster.levels[-1].size

    def fits(self, devices: int) -> bool:
        """Whether a layout on so many devices fits, with graphs or without."""
        asked = question_of(self._job)._replace(devices=devices)
        return any(any_fits(one, asked) for one in self._ways(devices))

    def find_fastest(self, devices: int, beat_s: float = math.inf) -> Estimate | None:
        """The fastest layout on so many devices that fits, if it takes less than `beat_s`."""
        asked, fastest = question_of(self._job)._replace(devices=devices), None
        for training in self._ways(devices):
            if found := find_fastest([training], asked, beat_s):
                fastest, beat_s = found[0], found[0].seconds
        return fastest

    def _ways(self, devices: int) -> Iterator[Training]:
        """How so many devices are trained; and without the graphs that a plan has by itself."""
        job = self._job.with_(topology=self._job.topology.resize(devices))
        for place, way in enumerate(filter(None, (job, without_graphs(job)))):
            training = training_for(way)
            if place in self._trainings:
                training.share_blocks(self._trainings[place])
            self._trainings[place] = training
            yield training


def find_servers(job: Job, least: int = 1) -> int | None:
    """The least size of the outermost level, from `least` on, on which a transformer's layout fits.

    By bytes alone, in closed form. None where no layout fits on up to `MOST` devices, or on a size
    that is `least` doubled again and again.
    """
    sizes = Sizes(job)
    low, high, highest = least - 1, least, MOST // sizes.inside
    while high <= highest and not sizes.fits(sizes.inside * high):
        low, high = high, max(high + 1, min(2 * high, highest))
    if high > highest:
        return None
    # not bisected: a number of devices that is no multiple of much has few layouts
    return next(n for n in range(low + 1, high + 1) if sizes.fits(sizes.inside * n))


def find_frontier(
    sizes: Sizes, servers: Sequence[int], progress: Progress = ignore_progress
) -> list[int]:
    """The numbers of `servers`, ascending, that no other beats in both time and money.

    Larger ones come first. One that costs no less than a larger one is slower, too, and is left as
    soon as its layouts are seen to be.
    """
    cost, seconds = math.inf, dict[int, float]()
    for done, size in enumerate(reversed(servers)):
        progress("estimating sizes", done, len(servers))
        devices = sizes.inside * size
        if found := sizes.find_fastest(devices, cost / devices):
            cost, seconds[size] = devices * found.seconds, found.seconds
    return [n for n in sorted(seconds) if all(seconds[n] < seconds[o] for o in seconds if o < n)]
