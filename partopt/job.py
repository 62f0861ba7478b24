"""The question: a model, a cluster, and how it is to be trained there; checked once."""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from bisect import bisect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

from partopt.cost.devices import check_device
from partopt.cost.memory import reserve_of
from partopt.cost.microbatch import best_microbatch_size, measurement_at
from partopt.cost.problem import STATED, Known, Problem, problem_of
from partopt.documents import Note, refuse
from partopt.documents.engine import PARTOPT
from partopt.documents.profile import Profile
from partopt.documents.stage import Reserve
from partopt.documents.topology import Topology
from partopt.documents.transformer import Transformer
from partopt.errors import PartoptError, invalid, unknown, unknown_value
from partopt.options import (
    AUTO,
    CHUNKS,
    FOR_TRANSFORMERS,
    OF_TRANSFORMERS,
    Options,
    normalise,
    normalise_layout,
    parse_bytes,
)
from partopt.transformer.rates import PLANNED
from partopt.units import format_bytes

# M   microbatches of an iteration
# G   samples of an iteration
# b   samples of a microbatch
# v   stages that a device holds, its chunks

_COSTS = ("time", "flops", "parameters")
# options that a problem holds by the same names
_ALIKE = sorted(STATED & {field.name for field in dataclasses.fields(Options)})


@dataclass(frozen=True)
class _Question(Options):
    """Options, and what they are options of."""

    model: Profile | Transformer
    topology: Topology


@dataclass(frozen=True, init=False)
class Job(_Question):
    """A model on a cluster, and how it is to be trained there: the options of `Options`.

    The model is a profile; or a transformer, whose layout its trainer runs.

    Raises PartoptError, whose `fields["option"]` names the option, for options that are invalid or
    contradict each other, for those of the other kind of model, and for a profile that was
    estimated for another device.
    """

    if not TYPE_CHECKING:  # to whom the options are those of `_Question`, with their types

        def __init__(
            self, model: Profile | Transformer, topology: Topology, **options: object
        ) -> None:
            _check_documents(model, topology)
            stated = Options(**options)
            _refuse_others(model, options)
            self._state(model, topology, stated, Known())

    def _state(
        self, model: Profile | Transformer, topology: Topology, options: Options, known: Known
    ) -> None:
        """State the question; its problem is made once, so that what it refuses is known now."""
        object.__setattr__(self, "_known", known)
        if isinstance(model, Transformer):
            super().__init__(model, topology, **vars(normalise_layout(options)))
            missing = [n for n in ("global_batch", "sequence") if getattr(self, n) is None]
            if missing:
                raise PartoptError.together(map(self.lacks, missing))
            return
        super().__init__(model, topology, **vars(normalise(options)))
        self._check_degrees()
        if self.schedule != AUTO and not self._is_for_blocks:
            assert self.problem is not None

    def with_(self, **changes: Any) -> Self:
        """The job with some options changed, checked again. PartoptError for an unknown option."""
        names = [field.name for field in dataclasses.fields(self)]
        for name in changes.keys() - names:
            what = f"no option `{name}`"
            raise unknown(what, name, names, code="unknown-option", option=name)
        stated = {name: getattr(self, name) for name in names} | changes
        model, topology = stated.pop("model"), stated.pop("topology")
        known: Known = self.__dict__["_known"]
        if {"model", "topology"} & changes.keys():
            _check_documents(model, topology)
            known = Known()
        _refuse_others(model, changes.keys() - {"model", "topology"})
        other = object.__new__(type(self))
        other._state(model, topology, Options(**stated), known)
        return other

    @property
    def profile(self) -> Profile:
        """The model as a profile. PartoptError of a transformer: `solve` has its layouts."""
        if isinstance(self.model, Profile):
            return self.model
        if self.trainer == PARTOPT:
            raise self.lacks("for")
        what = f"{self.model.name} is a transformer's configuration, not a profile"
        raise PartoptError(what, "`solve` plans its layouts", code="not-a-profile")

    def lacks(self, option: str) -> PartoptError:
        """The error of an option without which a transformer is not planned."""
        assert isinstance(self.model, Transformer)
        return PartoptError(
            f"`{option}`: needed to plan {self.model.name}, a transformer's configuration",
            f"add `{option}`",
            code="missing-option",
            option=option,
        )

    @cached_property
    def memory_bytes(self) -> int | None:
        """Bytes of one device that plans may use; None where no limit is known.

        PartoptError where nothing is left beside the reserve.
        """
        limit, reserved = self.limit_bytes, self.reserve.size_bytes
        if limit is not None and reserved >= limit:
            raise invalid(
                "reserve",
                format_bytes(reserved),
                f"leaves nothing of {format_bytes(limit)}",
                "reserve less: `reserve=0`, or what is not the model's",
            )
        return None if limit is None else limit - reserved

    @property
    def limit_bytes(self) -> int | None:
        """The limit of one device, reserve included; a transformer's is `PLANNED` of the memory."""
        if self.memory is not None:
            return parse_bytes("memory", self.memory)
        device_bytes = self.topology.device.memory_bytes
        if device_bytes is None or isinstance(self.model, Profile):
            return device_bytes
        return round(PLANNED * device_bytes)

    @cached_property
    def reserve(self) -> Reserve:
        """What no plan may use of a device."""
        given = self.engine.reserve_bytes
        if given is not None and self.limit_bytes is not None:
            return Reserve(size_bytes=given, basis="given")
        return Reserve() if self.memory is not None else reserve_of(self.profile, self.limit_bytes)

    @cached_property
    def problem(self) -> Problem:
        """The job as planners see it, at the one of `sizes` with the most samples/s on one device.

        PartoptError of a transformer, and under `schedule="auto"`, which is several.
        """
        profile = self.profile
        if self.schedule == AUTO:
            raise PartoptError(
                "`schedule=auto`: a schedule is chosen by `solve` alone",
                "name a schedule: `schedule=1f1b`",
                code="schedule-needed",
                option="schedule",
            )
        if self._is_for_blocks:
            raise invalid(
                "recompute",
                self.first,
                f"{self.trainer} recomputes whole stages",
                "choose `recompute=always`, or a trainer that recomputes blocks: `for=megatron`",
            )
        bounds, layers = self.block_bounds, len(profile.layers)
        if bounds is not None:
            inside = len(bounds) > 1 and bounds[0] >= 0 and bounds[-1] <= layers
            if not inside or list(bounds) != sorted(set(bounds)):
                what, hint = "blocks lie between ascending layers", f"give numbers up to {layers}"
                raise invalid("block_bounds", list(bounds), what, hint)
        stated = problem_of(
            profile,
            self.topology,
            self._size(),
            self.__dict__["_known"],
            **{name: getattr(self, name) for name in _ALIKE}
            | {
                "recompute": self.recompute or "never",
                "shard": self.shard or "none",
                "chunks": self.chunks or CHUNKS,
                "cut_at": self._starts(),
                "reserve": self.reserve,
                "memory_bytes": self.memory_bytes,
            },
        )
        size = stated.chain.microbatch_size
        return stated.with_(microbatches=self._microbatches_of(size), costs=self._costs(size))

    @property
    def sizes(self) -> list[int]:
        """The microbatch sizes that may be planned for, ascending.

        The one that is given; else those that were measured and that the global batch is a multiple
        of, which may be none.
        """
        if self.microbatch_size is not None:
            return [self.microbatch_size]
        batch = self.global_batch or 0
        measured = [measurement.microbatch_size for measurement in self.profile.measured()]
        return [size for size in measured if batch % size == 0]

    def at_each_size(self) -> list[Self]:
        """The job at all `sizes`. PartoptError where there is none."""
        return [self.with_(microbatch_size=size) for size in self.sizes or [self._size()]]

    @property
    def notes(self) -> list[Note]:
        """What to know of the question itself, but for what the profile declares as known."""
        if isinstance(self.model, Transformer):
            return self.topology.notes()
        found = [note for note in self.profile.notes if not note.known] + self.topology.notes()
        if self.profile.estimated is None and self.profile.device.type == "cpu":
            name, device = self.profile.model.name, self.topology.device.name
            if device != self.profile.device.name and not re.search(r"(?i)\bcpus?\b", device):
                text = f"{name} was measured on a CPU, not on {device}"
                found.append(Note(code="measured-on-cpu", text=text))
        size = self.microbatch_size
        sizes = [measured.microbatch_size for measured in self.profile.measured()]
        if size is not None and size not in sizes and sizes[0] < size < sizes[-1]:
            above = bisect(sizes, size)
            low, high = sizes[above - 1 : above + 1]
            text = f"microbatch {size} was not measured: times between those of {low} and {high}"
            found.append(Note(code="interpolated", text=text))
        if self.trainer == PARTOPT and (self.shard or "none") not in self.engine.shard:
            text = (
                f"`partopt run` refuses `shard={self.shard}`: plan for a trainer, `for=torchtitan`"
            )
            found.append(Note(code="not-run", text=text))
        return found

    def _check_degrees(self) -> None:
        """Raise PartoptError for degrees that the profile or the devices do not have."""
        layout, ranks = self.layout, self.profile.group_ranks
        for name, there in (("tp", ranks), ("cp", 1), ("ep", 1), ("etp", 1)):
            if getattr(layout, name) not in (None, there):
                raise invalid(
                    "layout",
                    f"{name}={getattr(layout, name)}",
                    f"the profile is of {name}={there}",
                    f"write {name}={there}, or give a profile of such a group",
                )
        if layout.modules:
            what = "modules made again are of a transformer's layout"
            raise invalid("layout", f"modules={layout.modules}", what, "leave modules out")
        devices = self.topology.in_groups(ranks).devices
        pp, dp = layout.pp or 1, layout.dp or 1
        if pp * dp > devices:
            nearest = f"pp={max(1, devices // dp)}" if dp <= devices else f"dp={devices}"
            what = f"{pp * dp} devices needed, {devices} there"
            raise invalid("layout", f"pp={pp},dp={dp}", what, f"write {nearest}")

    @property
    def _is_for_blocks(self) -> bool:
        """Whether blocks are to be recomputed that the engine, as long as it is this, does not."""
        return self.first is not None and not self.engine.recomputes_blocks

    def _size(self) -> int:
        """The one of `sizes` with the most samples/s on one device, or of all if there is none."""
        return self.microbatch_size or best_microbatch_size(self.profile, self.sizes)

    def _microbatches_of(self, size: int) -> int | None:
        """M with microbatches of `size` samples."""
        batch = self.global_batch
        if batch is None:
            return self.microbatches
        if batch % size:
            raise PartoptError(
                f"`global_batch={batch}`: not a multiple of the microbatch size {size}",
                f"choose {batch // size * size or size}",
                code="not-a-multiple",
                option="global_batch",
                microbatch_size=size,
            )
        return batch // size

    def _starts(self) -> list[int] | None:
        """The first layer, and those that match `cut_at`; None without patterns."""
        names = [layer.name for layer in self.profile.layers]
        for pattern in self.cut_at:
            if not fnmatch.filter(names, pattern):
                raise unknown(
                    f"`cut_at={pattern}`: no layer of {self.profile.model.name} has such a name",
                    pattern,
                    names,
                    code="no-such-layer",
                    option="cut_at",
                )
        matching = {
            index
            for index, name in enumerate(names)
            if any(fnmatch.fnmatchcase(name, pattern) for pattern in self.cut_at)
        }
        return sorted({0, *matching}) if self.cut_at else None

    def _costs(self, size: int) -> list[float] | None:
        """What GPipe's heuristics balance, of every layer; None for the measured time."""
        if self.cost == "time":
            return None
        costs = list(self._costs_of_layers(size))
        if isinstance(self.cost, str) and not any(costs):
            raise PartoptError(
                f"`cost={self.cost}`: the profile has none",
                "balance the measured time: `cost=time`",
                code="no-costs",
                option="cost",
            )
        layers = len(self.profile.layers)
        if len(costs) != layers:
            raise PartoptError(
                f"`cost`: {len(costs)} costs for {layers} layers",
                "give one number for each layer",
                code="wrong-length",
                option="cost",
            )
        if not (all(0 <= cost < float("inf") for cost in costs) and sum(costs) > 0):
            raise PartoptError(
                "`cost`: must be finite and not negative, and not all zero",
                "give one number for each layer",
                code="invalid-option",
                option="cost",
            )
        return costs

    def _costs_of_layers(self, size: int) -> Iterator[float]:
        if not isinstance(self.cost, str):
            yield from _numbers(self.cost)
        elif self.cost == "flops":
            for measured in measurement_at(self.profile, size).layers:
                yield float(measured.forward_flops or 0)
        elif self.cost == "parameters":
            for layer in self.profile.layers:
                yield float(layer.parameter_bytes)
        else:
            raise unknown_value("cost", self.cost, _COSTS)


def _check_documents(model: object, topology: object) -> None:
    """Raise PartoptError unless they are documents without faults, for the same device."""
    of_model = Transformer if isinstance(model, Transformer) else Profile
    name_of_model = of_model.__name__.lower()
    for name, kind, given in ((name_of_model, of_model, model), ("topology", Topology, topology)):
        if not isinstance(given, kind):
            raise invalid(
                name,
                type(given).__name__,
                f"must be a {kind.__name__}",
                f"`{kind.__name__}.load` reads one from a file",
            )
        refuse(given.faults(), name)
    if isinstance(model, Profile):
        check_device(model, topology)  # type: ignore[arg-type]


def _refuse_others(model: Profile | Transformer, names: Iterable[str]) -> None:
    """Raise PartoptError for an option of the other kind of model."""
    for name in names:
        if isinstance(model, Transformer) and name not in FOR_TRANSFORMERS:
            what = f"{model.name} is a transformer's configuration, not a profile"
            hint = f"leave `{name}` out; `layout` fixes what its trainer can choose"
        elif isinstance(model, Profile) and name in OF_TRANSFORMERS:
            what = "goes with a transformer's configuration, not with a profile"
            hint = f"leave `{name}` out"
        else:
            continue
        raise PartoptError(f"`{name}`: {what}", hint, code="unused-option", option=name)


def _numbers(values: Sequence[float]) -> list[float]:
    try:
        return [float(value) for value in values]
    except (TypeError, ValueError):
        raise invalid("cost", values, "must be numbers", "give one number for each layer") from None
