"""A transformer's layout as its trainer runs it: the closed form, and the plan that is simulated.

A layout becomes an ordinary plan, of a profile that was computed for it: whatever takes plans takes
it, and `partopt show --verify` makes it again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from msgspec import structs

from partopt import planners
from partopt.documents.engine import Engine, Layout
from partopt.documents.plan import Plan
from partopt.documents.profile import Profile
from partopt.documents.stage import Reserve
from partopt.documents.topology import Topology
from partopt.documents.transformer import Format, Modelled, Practice, Transformer
from partopt.errors import PartoptError, did_you_mean
from partopt.job import Job
from partopt.options import FACTS, MANUAL, invalid, parse_bytes, with_facts
from partopt.simulator.execution import simulate_plan
from partopt.trainers import TRAINERS
from partopt.trainers.trainer import Trainer
from partopt.transformer.as_profile import profile_of, training_of
from partopt.transformer.block import Training
from partopt.transformer.iteration import Degrees, Estimate, estimate, find_faults, stage_counts
from partopt.transformer.rates import PLANNED


@dataclass(frozen=True, kw_only=True)
class Laid:
    """A simulated plan, the profile that was computed for it, and the closed form beside it."""

    plan: Plan
    profile: Profile
    estimate: Estimate
    training: Training


@dataclass(frozen=True, kw_only=True)
class Laying:
    """The question: a transformer, on a cluster, as a trainer runs it in a layout.

    `global_batch` is in samples of `sequence` tokens; `facts` replace some of the trainer's, as
    `with_facts` and its `choices` name them; `memory` is the limit of a device, by default
    `PLANNED` of what its name says. PartoptError for what the trainer, the device or the model does
    not have.
    """

    model: Transformer
    topology: Topology
    trainer: str
    global_batch: int
    sequence: int
    format: Format = "bfloat16"
    layout: Layout = dataclasses.field(default_factory=Layout)
    facts: Mapping[str, object]
    memory: str | int | None = None

    @property
    def training(self) -> Training:
        """All that seconds and bytes follow from, beside the layout."""
        trainer = TRAINERS.lookup(self.trainer)
        practice, rest = _chosen(trainer, self.facts)
        return training_of(
            Modelled(
                model=self.model,
                sequence=self.sequence,
                format=self.format,
                practice=practice,
                layout=self.layout,
                closed_s=0.0,
                closed_bytes=1,
            ),
            with_facts(trainer.engine, rest),
            self.topology,
        )

    @property
    def limit_bytes(self) -> int | None:
        """Bytes that a device may need."""
        if self.memory is not None:
            return parse_bytes("memory", self.memory)
        own = self.topology.device.memory_bytes
        return None if own is None else round(PLANNED * own)

    def fill(self, training: Training) -> Layout:
        """The layout with all its parts: what is left open is 1, and devices that are left share.

        PartoptError where it does not lie on the devices, or the model or the batch cannot.
        """
        given, devices = self.layout, self.topology.cluster.devices
        degrees = {name: getattr(given, name) or 1 for name in ("tp", "cp", "ep", "pp", "chunks")}
        pipeline = degrees["tp"] * degrees["cp"] * degrees["pp"]
        dp = given.dp or max(1, devices // pipeline)
        if dp * pipeline != devices:
            raise invalid(
                "layout",
                ",".join(f"{name}={degrees[name]}" for name in ("tp", "cp", "pp")) + f",dp={dp}",
                f"tp x cp x pp x dp are {dp * pipeline} devices, and the cluster has {devices}",
                "use all devices; ep lies within tp x cp x dp",
            )
        shards = [name for name in training.engine.shard if name != "none"]
        full = structs.replace(
            given,
            **degrees,
            dp=dp,
            microbatch=given.microbatch or 1,
            recompute=given.recompute or "never",
            shard=given.shard or (shards[-1] if shards else "none"),
            schedule="interleaved" if degrees["chunks"] > 1 else "1f1b",
        )
        if full.recompute == "auto":
            raise invalid("layout", "recompute=auto", "it is not chosen", "write recompute=never")
        faults = list(find_faults(training, full, self.global_batch))
        if faults:
            raise PartoptError.together(faults)
        return full


def _chosen(trainer: Trainer, facts: Mapping[str, object]) -> tuple[Practice, dict[str, object]]:
    """How a trainer runs a transformer, with some of the facts replaced; and facts of its engine.

    PartoptError for a trainer of which it is not known, and for unknown facts and values.
    """
    if trainer.practice is None:
        able = [name for name, own in TRAINERS.items() if own.practice is not None]
        raise PartoptError(
            f"how {trainer.name} runs a transformer is not known",
            f"choose {', '.join(able)}; or give a profile",
            code="target-cannot-say",
            target=trainer.name,
        )
    practice, rest = trainer.practice, dict[str, object]()
    for name, value in facts.items():
        choice = trainer.choices.get(name)
        if choice is None and name not in {*FACTS, *Engine.__struct_fields__}:
            hint = did_you_mean(name, [*trainer.choices, *FACTS])
            raise PartoptError(f"no fact `{name}` of {trainer.name}", hint, code="unknown-fact")
        if choice is None:
            rest[name] = value
        elif str(value) not in choice:
            raise invalid(name, value, f"unknown {name}", did_you_mean(str(value), choice))
        else:
            practice = structs.replace(practice, **choice[str(value)])
    return practice, rest


def lay(asked: Laying) -> Laid:
    """The plan of a layout: simulated, and as many bytes reserved as the closed form counts more.

    Raises PartoptError where the layout cannot be run.
    """
    training = asked.training
    layout = asked.fill(training)
    found = estimate(training, layout, asked.global_batch)
    profile = profile_of(training, layout, asked.global_batch)
    about = Modelled(
        model=asked.model,
        sequence=asked.sequence,
        format=asked.format,
        practice=training.practice,
        layout=layout,
        closed_s=found.seconds,
        closed_bytes=round(found.memory_bytes),
    )
    problem = Job(profile, asked.topology, **_options(asked, training, found)).problem
    problem = problem.with_(transformer=about)
    plan = simulate_plan(planners.plan(MANUAL, problem))
    more = max(0, round(found.memory_bytes) - plan.peak_memory_bytes)
    limit = asked.limit_bytes
    if more and limit is not None:
        reserve = Reserve(size_bytes=more, basis="computed")
        problem = problem.with_(reserve=reserve, memory_bytes=max(1, limit - more))
        plan = simulate_plan(planners.plan(MANUAL, problem))
    return Laid(plan=plan, profile=profile, estimate=found, training=training)


def _options(asked: Laying, training: Training, found: Estimate) -> dict[str, Any]:
    """The options of the job whose plan is the layout."""
    layout, memory = found.layout, found.memory
    counts = stage_counts(training, Degrees.of(training, layout, asked.global_batch))
    n, v = layout.dp or 1, layout.chunks or 1
    # of a parameter of a rank, before replicas share it: context parallel ranks do, too
    if "in shares" in memory:
        state = 16.0 / (layout.cp or 1) - 2 - training.gradient_bytes
    else:
        state = memory["optimizer"] / (memory["parameters"] / 2)
        state *= n if layout.shard == "optimizer" else 1
    return {
        "trainer": asked.trainer,
        "engine": structs.replace(training.engine, optimizer_bytes=max(0.0, state)),
        "schedule": layout.schedule,
        "chunks": v if v > 1 else None,
        "planner": MANUAL,
        "cuts": [1 + count for count in accumulate(counts[:-1])],
        "replicas": [n] * len(counts),
        "microbatch_size": layout.microbatch,
        "global_batch": asked.global_batch,
        "shard": layout.shard,
        "recompute": "never",
        "memory": asked.limit_bytes,
    }
