"""A document with each of its values changed in turn."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, get_args

from partopt.documents.plan import Optimizer, Replication, Tied
from partopt.documents.stage import Shard
from partopt.planners import PLANNERS
from partopt.schedules import SCHEDULES
from partopt.trainers import writers

Path = tuple[Any, ...]
# every value of a text that is one of several, by the name of its field
CHOICES: dict[str, list[str]] = {
    "planner": [*PLANNERS, "grid"],
    "family": ["contiguous", "nested", "looped", "vee", "mirrored"],
    "schedule": list(SCHEDULES),
    "optimizer": list(get_args(Optimizer)),
    "messages": ["packed", "split"],
    "gradients": ["parameters", "float32"],
    "buffers": ["flight", "all", "one"],
    "shard": list(get_args(Shard)),
    "basis": ["none", "given", "measured", "assumed"],
    "allreduce": ["overlap", "blocking"],
    "replication": list(get_args(Replication)),
    "tied": list(get_args(Tied)),
    "kind": ["send", "allreduce", "tied"],
    "trainer": writers(),  # others are one of these in other words, whose plans are the same
}
# what stands in the place of a null, and is made null where it stands
OPTIONAL: dict[Path, list[Any]] = {
    ("microbatches",): [4],
    ("certificate",): [],
    ("predicted", "iteration_s"): [0.05],
    ("predicted", "formula_period_s"): [0.05],
    ("predicted", "estimate", "iteration_s"): [0.05],
    ("request", "stages"): [1, 2, 3, 4],
    ("request", "cut_at"): [[0], [0, 1, 2, 3, 4, 5]],
    ("request", "costs"): [[1.0] * 6, [1.0] * 8, [0.0, 0.0, 0.0, 1.0, 1.0, 1.0]],
    ("request", "cuts"): [[], [1]],
    ("request", "replicas"): [[1], [1, 1]],
    ("topology", "device", "memory_bytes"): [10**6, 10**12],
}


class Alteration(NamedTuple):
    """A value of a document, what it was, and what it is now."""

    path: Path
    old: Any
    new: Any

    @property
    def name(self) -> str:
        """The path in dots, without the numbers of list entries: `stages.memory.total_bytes`."""
        return ".".join(str(step) for step in self.path if isinstance(step, str))


def alterations(
    document: dict[str, Any], factors: Sequence[float] = (1.001, 0.999)
) -> Iterator[tuple[Alteration, dict[str, Any]]]:
    """Every alteration of a plan, each with the altered plan; the version of its format stays.

    Numbers that are not whole are altered by `factors`; of a list the first and the last entry are.
    """
    for path, old in _values(document):
        for new in _others(path, old, factors) if path != ("schema",) else []:
            yield Alteration(path, old, new), _with(document, path, new)


def _with(node: Any, path: Path, new: Any) -> Any:
    """A document, or a part of it, with another value at a path; it shares what is not altered."""
    step, *further = path
    changed = copy.copy(node)
    changed[step] = _with(node[step], tuple(further), new) if further else new
    return changed


def _values(node: Any, here: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every scalar in a document and its path; of what may be null the whole, too."""
    ends = sorted({0, len(node) - 1}) if node else []
    entries = node.items() if isinstance(node, dict) else [(place, node[place]) for place in ends]
    for key, value in entries:
        path = (*here, key)
        if isinstance(value, dict | list):
            if path in OPTIONAL:
                yield path, value
            yield from _values(value, path)
        else:
            yield path, value


def _others(path: Path, value: Any, factors: Sequence[float]) -> list[Any]:
    """Other values of the same type, and null where that may be."""
    others = [other for other in OPTIONAL.get(path, []) if other != value]
    if value is None:
        return others or [1]
    if path in OPTIONAL:
        others.append(None)
    choices = CHOICES.get(str(path[-1]))
    if path == ("request", "recompute"):
        choices = ["never", "always", "auto"]
    if isinstance(value, bool):
        others.append(not value)
    elif isinstance(value, int):
        others += [value + 1, value - 1]
    elif isinstance(value, float):
        others += [factor * value for factor in factors] if value > 1e-12 else [1e-8]
    elif isinstance(value, str):
        others += [f"{value}x", *(other for other in choices or [] if other != value)]
    return others
