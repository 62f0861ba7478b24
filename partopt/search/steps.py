"""Random steps from one partition to another, for annealing.

Coarse steps move a cut or whole groups of devices. Fine ones change one or two things of a small
problem: a cut, the replicas of two stages, the number of stages.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace

from partopt.search.moves import Moves, Shape, shape_of

# S   stages of a shape

_REACH = 40  # boundaries within which a cut moves
_STEPS = (1, 2, 3, 6, 12)  # boundaries by which it moves, whatever is cut there
_GIVEN = (0.5, 1, 1, 1, 2, 4)  # units that a stage gives to another
_TWICE = 0.4  # of the fine steps: they change two things
_BALANCED = 0.4  # of those that change replicas: cut anew where the slowest stage is fastest


class Steps:
    """Steps by `unit` devices; `fine` ones also change the number of stages."""

    def __init__(self, moves: Moves, unit: int, fine: bool) -> None:
        self.moves, self.bounds = moves, moves.bounds
        self.unit, self.fine = unit, fine
        self.index = {bound: place for place, bound in enumerate(self.bounds)}
        self.random = random.Random(0)

    def near(self, shape: Shape, share: float) -> Shape | None:
        """A shape a step away, of the kind `share`, from 0 to 1; None where it leads to none."""
        if not self.fine:
            cuts = len(shape.replicas) > 1 and share < 0.5
            return self._cut(shape) if cuts else self._give(shape)
        changed = self._change(shape, share)
        if changed is not None and self.random.random() < _TWICE:
            changed = self._change(changed, self.random.random())
        if changed is None or changed.replicas == shape.replicas:
            return changed
        if self.random.random() < _BALANCED:
            balanced = [shape_of(each) for each in self.moves.balanced(changed)]
            return self.random.choice(balanced) if balanced else changed
        return changed

    def _change(self, shape: Shape, share: float) -> Shape | None:
        """A cut, the replicas or the number of stages changed."""
        S = len(shape.replicas)
        if share < 0.45:
            return self._cut(shape) if S > 1 else None
        if share < 0.8:
            return self._alike(shape) if self.moves.alike else self._give(shape)
        if share < 0.87:
            return self._swap(shape) if S > 1 else None
        s = self.random.randrange(S)
        splits = share < 0.935 or s == S - 1
        others = list(self.moves.split(shape, s) if splits else self.moves.merge(shape, s))
        return self.moves.settle(self.random.choice(others)) if others else None

    def _cut(self, shape: Shape) -> Shape | None:
        """A cut moved: to where less crosses it than on the way, or by a few boundaries."""
        c = self.random.randrange(1, len(shape.replicas))
        at, sign = self.index[shape.bounds[c]], self.random.choice((-1, 1))
        if self.random.random() < 0.6:
            places = self._cheaper(at, sign)
        else:
            places = [at + sign * self.random.choice(_STEPS)]
        low, high = (self.index[shape.bounds[other]] for other in (c - 1, c + 1))
        places = [place for place in places if low < place < high]
        if not places:
            return None
        cut = self.bounds[self.random.choice(places)]
        return replace(shape, bounds=(*shape.bounds[:c], cut, *shape.bounds[c + 1 :]))

    def _cheaper(self, at: int, sign: int) -> list[int]:
        """The boundaries in a direction over which less is sent than over all before them."""
        least, found, traffic = math.inf, [], self.moves.problem.chain.traffic
        for step in range(1, _REACH):
            place = at + sign * step
            if not 0 < place < len(self.bounds) - 1:
                break
            if traffic[self.bounds[place]] < least:
                least = traffic[self.bounds[place]]
                found.append(place)
        return found

    def _give(self, shape: Shape) -> Shape | None:
        """Units of one stage given to another, or taken from idle devices, or left idle."""
        S, idle = len(shape.replicas), self.moves.P - sum(shape.replicas)
        counts = [*shape.replicas, idle]
        source, to = self.random.sample(range(S + 1), 2)
        given = math.ceil(self.unit * self.random.choice(_GIVEN))
        counts[source] -= given
        counts[to] += given
        if counts[S] < 0:
            return None
        return self.moves.settle(replace(shape, replicas=tuple(counts[:S])))

    def _alike(self, shape: Shape) -> Shape | None:
        """One replica of every stage more or fewer."""
        own = shape.replicas[0] + self.random.choice((-1, 1))
        return self.moves.settle(replace(shape, replicas=(own,) * len(shape.replicas)))

    def _swap(self, shape: Shape) -> Shape | None:
        """The replicas of two stages, exchanged."""
        replicas = list(shape.replicas)
        one, other = self.random.sample(range(len(replicas)), 2)
        replicas[one], replicas[other] = replicas[other], replicas[one]
        return self.moves.settle(replace(shape, replicas=tuple(replicas)))
