"""Freer questions beside narrower ones: where does leaving a part open, or having more, lose?

    python benchmarks/questions.py [--draw N | --layouts N] [--less] [--seed S]

Each case is a model on a cluster, asked as freely as can be, and with one part fixed after another.
A freer answer must reach `LEAST` of the narrower one; a row beside a plan under "auto" must be as
good as that schedule by name; and no narrower one may be simpler and as good. With `--less` it is
asked with fewer servers, less memory, slower links and a smaller batch instead: none of these may
be faster. Without `--draw` the cases are those below; drawn ones have other models, clusters,
batches and trainers. The exit code is 1 where one loses.

With `--layouts` the questions are of layouts of transformers, for trainers that run them. A free
one stands beside narrower ones, in which a part has another value that exists. Counted are narrower
answers that are faster by 1 %, unless the plan names the layout that was left out by rule; those
that are as good and simpler; questions that partopt itself fails at; parts that were not kept; and
best plans that the trainer cannot say. Of the best layout what must hold is counted where it does
not: no way to cut of the trainer is faster, more words are not faster, what is made again or goes
to the host takes no more bytes, and a row has the bytes of its layout. Two switches that are drawn
of those that the question leaves open are faster by no more than 2 %, or on the page.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

from msgspec import structs

import partopt
from benchmarks.machine import describe
from partopt import Job, PartoptError, Plan, Profile, Topology
from partopt.documents.files import shipped_names
from partopt.documents.plan import needed_bytes, seconds_of
from partopt.documents.transformer import Transformer
from partopt.search.layout_plans import as_planned, search_layouts
from partopt.search.layout_questions import batch_of, estimate_layouts, training_for
from partopt.search.levers import take_best
from partopt.search.ranking import TIE, complexity, is_as_good, layout_complexity, rate
from partopt.transformer.as_profile import estimate_again
from partopt.transformer.faults import find_faults
from partopt.transformer.iteration import Estimate, estimate
from tests.helpers import measurement, profile_of, two_level

LEAST, ROW = 0.995, 0.99  # of the narrower answer
FASTER = 0.01  # of a layout's time: by so much a narrower answer may be faster
NOTHING = 0.0  # samples/s of a question to which nothing was found that fits


class Case(NamedTuple):
    """A model on a cluster, asked for a trainer or for `partopt run`, and what is fixed in turn."""

    profile: str | Profile
    topology: str | Topology
    servers: int | None
    trainer: str | None
    free: dict[str, Any]
    narrower: list[dict[str, Any]]

    @property
    def cluster(self) -> Topology:
        """The topology as it is."""
        if isinstance(self.topology, Topology):
            return self.topology
        return Topology.load(self.topology, self.servers)

    def __str__(self) -> str:
        profile, topology = self.profile, self.topology
        words = [
            profile.model.name if isinstance(profile, Profile) else profile,
            topology.name if isinstance(topology, Topology) else topology,
            self.servers or "",
            f"for {self.trainer or 'partopt'}",
        ]
        return f"{' '.join(map(str, words))}, {self.free}"


def layout(text: str) -> dict[str, Any]:
    """The option that fixes parts of a layout."""
    return {"layout": partopt.Layout.parse(text)}


CLUSTERS = [(1, 2), (1, 3), (1, 4), (2, 2), (3, 2)]  # servers, devices of one
L70 = ("llama-70b.h100-estimated.bfloat16", "dgx-h100", 4)
BATCH, SMALL = {"schedule": "auto", "global_batch": 512}, {"schedule": "auto", "global_batch": 64}
CASES = [
    Case(
        *L70,
        "megatron",
        BATCH,
        [
            {"recompute": "auto"},
            {"shard": "optimizer"},
            layout("pp=16,dp=2,shard=optimizer,chunks=1,recompute=always"),
            layout("pp=32,chunks=1,recompute=always"),
        ],
    ),
    Case(
        *L70,
        "megatron",
        BATCH | layout("pp=32,chunks=1"),
        [layout("pp=32,chunks=1,recompute=always")],
    ),
    Case(*L70, "torchtitan", BATCH, [{"shard": "parameters"}]),
    Case(*L70, "deepspeed", BATCH, [{"recompute": "always", "shard": "optimizer"}]),
    Case(
        *L70,
        None,
        SMALL,
        [{"recompute": "always"}, {"schedule": "interleaved", "chunks": 3, "recompute": "always"}],
    ),
    Case("llama-7b.h100-estimated.bfloat16", "dgx-h100", 2, None, SMALL, [{"schedule": "1f1b"}]),
    Case(
        "gnmt.v100-published.float32",
        "v100-pcie",
        None,
        None,
        {"schedule": "auto", "global_batch": 2048},
        [{"schedule": "gpipe"}],
    ),
    Case(
        "gnmt.v100-published.float32",
        "v100-nvlink",
        None,
        None,
        {"schedule": "auto", "global_batch": 1024},
        [{"schedule": "zbv"}, {"schedule": "interleaved"}],
    ),
    Case(
        "gnmt.v100-published.float32",
        "v100-pcie",
        16,
        None,
        {"schedule": "1f1b", "global_batch": 4096},
        [{"microbatch_size": 32}],
    ),
    Case(
        "llama-70b.h100-estimated.bfloat16",
        "dgx-h100",
        16,
        None,
        {"schedule": "1f1b", "global_batch": 512},
        [{"recompute": "auto"}, {"recompute": "always"}],
    ),
]


def ask(
    case: Case, options: dict[str, Any], topology: Topology | None = None
) -> tuple[Plan | None, list[Plan]]:
    """The plan that fits, None where none was found, and the plans beside it."""
    profile = case.profile if isinstance(case.profile, Profile) else Profile.load(case.profile)
    try:
        job = Job(profile, topology or case.cluster, **options)
        found = partopt.solve(job.with_(trainer=case.trainer) if case.trainer else job)
    except PartoptError:
        return None, []
    return found.plan if found.fits else None, [own for own in found.alternatives if own.fits]


def drawn(rng: random.Random) -> Case:
    """A case of another model, cluster, batch or trainer."""
    profile, topology, servers = rng.choice(
        [
            ("llama-7b.h100-estimated.bfloat16", "dgx-h100", rng.choice([1, 2, 4])),
            ("llama-70b.h100-estimated.bfloat16", "dgx-h100", rng.choice([4, 8])),
            ("gpt3-6.7b.a100-estimated.bfloat16", "dgx-a100", rng.choice([1, 2, 4])),
            ("mixtral-8x7b.a100-estimated.bfloat16", "dgx-a100", rng.choice([2, 4])),
            ("t5-11b.a100-estimated.bfloat16", "dgx-a100", rng.choice([1, 2])),
            ("gnmt.v100-published.float32", rng.choice(["v100-pcie", "v100-nvlink"]), None),
            ("vgg16.v100-published.float32", rng.choice(["v100-pcie", "v100-nvlink"]), None),
        ]
    )
    published = "published" in profile
    batch = rng.choice([512, 1024, 2048] if published else [64, 128, 512])
    trainer = None if published else rng.choice([None, "megatron", "torchtitan", "deepspeed"])
    free = {"schedule": "auto", "global_batch": batch}
    narrower: list[dict[str, Any]] = [{"recompute": "always"}, {"recompute": "auto"}]
    narrower += [{"microbatch_size": rng.choice([1, 2] if not published else [32])}]
    if trainer is None:
        names = ["1f1b", "gpipe", "zb-h1", "interleaved", "zbv", "1f1b-eager"]
        narrower += [{"schedule": name} for name in rng.sample(names, 2)]
        narrower += [{"shard": name} for name in ("none", "optimizer")]
        narrower += [{"schedule": "1f1b", "planner": "data_parallel"}]
    else:
        narrower += [{"shard": rng.choice(partopt.TRAINERS[trainer].engine.shard)}]
        narrower += [layout(f"pp={rng.choice([2, 4, 8, 16])},chunks=1,recompute=always")]
    return Case(profile, topology, servers, trainer, free, narrower)


def drawn_chain(rng: random.Random) -> Case:
    """A case of a few layers on a few devices, which messages and gradients keep busy, too."""
    layers, (servers, size) = rng.randrange(4, 9), rng.choice(CLUSTERS)
    spread = rng.choice([0.1, 0.6])
    forward = [2e-3 * rng.lognormvariate(0, spread) for _ in range(layers)]
    backward = [seconds * rng.uniform(1.5, 2.5) for seconds in forward]
    inner = rng.choice([1e9, 1e10, 1e11])
    layer_bytes = inner * (sum(forward) + sum(backward)) / layers  # sent while one computes
    outputs, weights = (
        [int(layer_bytes * share * rng.lognormvariate(0, 0.6)) + 4 for _ in range(layers)]
        for share in (rng.choice([0.02, 0.1, 0.3]), rng.choice([0.1, 0.5, 2.0]))
    )
    stashes = [int(size_bytes * rng.uniform(1, 5)) for size_bytes in outputs]
    measured = [
        measurement(
            *([seconds * size**0.9 for seconds in times] for times in (forward, backward)),
            [own * size for own in outputs],
            size,
            stash_groups=[([place], own * size) for place, own in enumerate(stashes)],
        )
        for size in rng.choice([[1], [1], [1, 2], [2, 4]])
    ]
    whole_bytes = 4 * sum(weights) + 2 * sum(stashes)
    memory_bytes = int(whole_bytes * share) if (share := rng.choice([0, 1, 0.6, 0.4])) else None
    outer = inner / rng.choice([1, 4, 10])
    cluster = two_level(size, servers, inner, outer, 1e-5, 2e-5, memory_bytes=memory_bytes)
    free: dict[str, Any] = {"schedule": rng.choice(["auto", "auto", "1f1b", "pipedream-2bw"])}
    if free["schedule"] != "pipedream-2bw":
        free["global_batch"] = rng.choice([8, 12, 16, 24])
    shares: list[dict[str, Any]] = [{"shard": "none"}, {"shard": "optimizer"}]
    narrower: list[dict[str, Any]] = [{"recompute": how} for how in ("never", "always", "auto")]
    narrower += [layout("pp=1"), layout("pp=2"), {"shard": "optimizer", "recompute": "always"}]
    if len(measured) > 1:
        narrower += [{"microbatch_size": one.microbatch_size} for one in measured]
    if free["schedule"] == "auto":
        names = ["1f1b", "gpipe", "zb-h1", "interleaved", "zbv", "interleaved-zb", "dualpipe"]
        narrower += [{"schedule": name} for name in rng.sample(names, 3)]
        narrower += [{"schedule": "1f1b", "planner": "data_parallel"}]
    else:
        narrower += [{"planner": "data_parallel"}]
    asked = [*shares, *rng.sample(narrower, 4)]
    return Case(profile_of(measured, weights), cluster, None, None, free, asked)


def compared(case: Case) -> Iterator[tuple[str, float, float, float]]:
    """What is asked, the freer answer, the narrower one in samples/s, and the share to reach."""
    plan, beside = ask(case, case.free)
    free = samples_per_s((plan, beside))
    for part in case.narrower:
        narrow, others = ask(case, case.free | part)
        yield str(part), free, samples_per_s((narrow, others)), LEAST
        if plan and narrow and rate(narrow) >= (1 - TIE) * free:
            simpler = complexity(narrow) < complexity(plan)
            yield f"  simpler than {part}", 0.0 if simpler else free, rate(narrow), LEAST
    if case.free["schedule"] == "auto" and case.trainer is None and case.servers is not None:
        for row in beside:
            alone = samples_per_s(ask(case, case.free | {"schedule": row.schedule}))
            yield f"row {row.schedule}", row.predicted.samples_per_s, alone, ROW


def with_less(case: Case) -> Iterator[tuple[str, float, float, float]]:
    """As `compared`, with less of one thing after another."""
    whole = case.cluster
    free = samples_per_s(ask(case, case.free))
    batch, memory = case.free["global_batch"], whole.device.memory_bytes
    outer = whole.levels[-1]
    asked: list[tuple[str, dict[str, Any], Topology]] = [
        ("half of the batch", {"global_batch": batch // 2}, whole)
    ]
    if memory is not None:
        asked += [
            (f"{part:.0%} of the memory", {"memory": int(part * memory)}, whole)
            for part in (0.9, 0.7)
        ]
    for size in sorted({outer.size * 7 // 8, outer.size * 3 // 4, outer.size // 2} - {0}):
        fewer = whole.resize(whole.devices // outer.size * size)
        asked.append((f"{outer.name} of {size}", {}, fewer))
    for k, level in enumerate(whole.levels):
        slower = structs.replace(level, bandwidth_bytes_per_s=level.bandwidth_bytes_per_s / 2)
        levels = [*whole.levels[:k], slower, *whole.levels[k + 1 :]]
        asked.append((f"{level.name} at half", {}, structs.replace(whole, levels=levels)))
    for what, options, topology in asked:
        yield what, free, samples_per_s(ask(case, case.free | options, topology)), LEAST


def samples_per_s(found: tuple[Plan | None, list[Plan]]) -> float:
    """Of the fastest plan that is shown and fits; `NOTHING` where there is none."""
    first, beside = found
    return max(map(rate, [first, *beside])) if first else NOTHING


# what a narrower question may fix of a layout
VALUES: dict[str, tuple[Any, ...]] = {
    "tp": (1, 2, 3, 4, 6, 8),
    "cp": (1, 2, 3, 4, 8),
    "ep": (1, 2, 4, 8, 16),
    "pp": (1, 2, 3, 4, 6, 8, 16),
    "chunks": (1, 2, 3, 4, 5, 8),
    "microbatch": (1, 2, 3, 4, 8),
    "recompute": ("never", "selective", "always", 1, 2, 4),
    "shard": ("none", "optimizer", "gradients", "parameters"),
    "schedule": ("1f1b", "interleaved"),
}
# trainers, and facts that are asked with
FACTS: dict[str, list[dict[str, str]]] = {
    "megatron": [{}, {}, {"tp-overlap": "yes"}, {"exchange-overlap": "yes"}, {"ends": "stage"}],
    "megatron-bridge": [{}, {}, {"tp-overlap": "yes"}],
    "torchtitan": [{}, {"compile": "yes"}, {"compile": "yes", "async-tp": "yes"}],
    "deepspeed": [{}, {"attention": "flash"}],
}
# counts that are to be 0
# why a trainer has no such model: others are a fault of what is planned for it
LACKS = ("no model of such blocks", "predicts further tokens", "`causal` of the model is False")
FAILURES = ("loses", "exotic", "violated", "unsaid", "broken", "fails", "not kept", "not exported")
SAME = 1.01  # of the bytes: they are as many
LARGE = 5e10  # parameters: such models are asked on more servers
UNSAID = 0.02  # of the time: a switch that saves more is on the page
# what is no question of speed alone, or is worth more as computed than published runs say
NO_LEVERS = {"routing", "muon", "attention", "graphs", "fused-experts", "exchange-overlap"}
NO_LEVERS |= {"lora", "lora-targets"}
# what is said of a part that a person fixed, where it cannot be
REFUSALS = ("unsupported-layout", "invalid-option", "no-plan")


def drawn_layout(rng: random.Random, small: bool) -> partopt.Job:
    """A free question: of a model, a cluster, a trainer, a format, a batch.

    A `small` one is of a few blocks on a few devices, which may have less memory.
    """
    model = partopt.find_transformer(rng.choice(shipped_names("models")))
    large = model.parameters > LARGE
    cluster, servers = rng.choice(
        [
            ("dgx-h100", rng.choice([4, 8, 16] if large else [1, 2, 3, 4, 6])),
            ("dgx-a100", rng.choice([8, 16] if large else [1, 2, 4])),
            ("gb200-nvl72", rng.choice([1, 2])),
        ]
    )
    topology = Topology.load(cluster, servers)
    memory_bytes = topology.device.memory_bytes or 0
    if small:
        blocks = rng.choice([4, 6, 8, 12])
        dense = min(model.dense_first, 1)
        model = structs.replace(model, blocks=blocks, dense_first=dense)
        topology = Topology.load(cluster, 1).resize(rng.choice([2, 4, 8]))
        memory_bytes = int(memory_bytes * rng.choice([0.25, 0.5, 1]))
    trainer = rng.choice(list(FACTS))
    facts = rng.choice(FACTS[trainer])
    if "exchange-overlap" in facts and not model.experts:
        facts = {}
    if trainer == "deepspeed" and cluster == "gb200-nvl72":  # which flash attention is not known on
        facts = {}
    formats = {"dgx-a100": ["bfloat16"], "dgx-h100": ["bfloat16", "bfloat16", "float16", "fp8"]}
    known = formats.get(cluster, ["bfloat16", "bfloat16", "fp8", "mxfp8"])
    return partopt.Job(
        model=model,
        topology=topology,
        trainer=trainer,
        global_batch=rng.choice([16, 32, 64, 96] if small else [64, 96, 128, 256, 512, 1024, 1536]),
        sequence=rng.choice([1024, 2048, 4096, 6144, 8192, 16384]),
        memory=memory_bytes if memory_bytes != topology.device.memory_bytes else None,
        dtype=rng.choice(
            [None, *(own for own in known if own in partopt.TRAINERS[trainer].says.formats)]
        ),
        facts=facts,
    )


def ask_layout(asked: partopt.Job, counts: Counter[str], free: bool) -> partopt.Plan | None:
    """The best layout; None, counted, where there is no answer, and whose fault that is.

    What else helps is looked for in free questions alone, where it is most.
    """
    counts["free" if free else "narrower"] += 1
    try:
        return partopt.solve(asked).plan if free else search_layouts(asked)[0]
    except PartoptError as error:
        own = error.exit_code != 1 if free else error.code not in REFUSALS
        counts["no such layout" if error.exit_code == 1 else "refused"] += 1
        why = f"exit {error.exit_code}, {error.code}: {error.message}"
    except Exception:
        own, why = True, traceback.format_exc(limit=-3)
    if own:
        counts["fails"] += 1
        print(f"  FAILS {asked.layout}: {why}")
    return None


def compare_layouts(rng: random.Random, counts: Counter[str], small: bool = False) -> None:
    """Ask freely, then with one part fixed after another, and count."""
    asked = drawn_layout(rng, small)
    picked = {name: rng.choice(own) for name, own in VALUES.items()}
    print(
        f"\n{asked.model.name} {asked.topology.name} {asked.topology.devices} {asked.trainer} "
        f"{asked.dtype} {asked.global_batch} x {asked.sequence} {asked.facts} {asked.memory or ''}"
    )
    best = ask_layout(asked, counts, free=True)
    if best is None:
        return
    layout, about = best.layout, best.transformer
    print(f"  {layout} {seconds_of(best):.4g} s, closed form {about.closed_s:.4g} s", flush=True)
    if best.fits:
        try:
            partopt.export_plan(best, asked.trainer, stem="planned")
        except PartoptError as error:
            lacks = any(what in error.message for what in LACKS)
            counts["refused" if lacks else "not exported"] += 1
            print(f"  NOT EXPORTED {error.message}")
    else:
        counts["does not fit"] += 1
    for what in find_violations(asked, best) if best.fits else ():
        counts["violated"] += 1
        print(f"  VIOLATED {what}")
    for what in find_broken(asked, best) if best.fits else ():
        counts["broken"] += 1
        print(f"  BROKEN {what}")
    for what in find_unsaid(rng, asked, best, small) if best.fits else ():
        counts["unsaid"] += 1
        print(f"  UNSAID {what}")
    for name, value in picked.items():
        of_switch = name == "shard" and value not in partopt.TRAINERS[asked.trainer].engine.shard
        if getattr(layout, name) == value or of_switch:  # as FSDP, which is asked for
            continue
        part = partopt.Layout(**{name: value})
        found = ask_layout(asked.with_(layout=part), counts, free=False)
        if found is None:
            continue
        if getattr(found.layout, name) != value:
            counts["not kept"] += 1
            print(f"  NOT KEPT {name}={value}: {found.layout}")
        if not found.fits:
            continue
        counts["compared"] += 1
        simpler = layout_complexity(found.layout) < layout_complexity(layout)
        if simpler and best.fits and is_as_good(found, best):
            counts["exotic"] += 1
            print(f"  EXOTIC {name}={value}: {seconds_of(found):.4g} s, {found.layout}")
        least = seconds_of(best) * (1 - FASTER) if best.fits else float("inf")
        if about.left_out and seconds_of(found) < least:
            counts["said"] += 1
            least = about.left_out.iteration_s * (1 - FASTER)
        if seconds_of(found) < least:
            counts["loses"] += 1
            print(f"  LOSES {name}={value}: {seconds_of(found):.4g} s, {found.layout}")


def find_violations(asked: partopt.Job, best: Plan) -> Iterator[str]:
    """What does not hold of the best layout where one thing is otherwise, in closed form."""

    def found(model: Transformer, recompute: Any = None, **facts: str) -> Estimate | None:
        other = as_planned(asked, best).with_(model=model)
        other = other.with_(facts={**other.facts, **facts})
        layout = structs.replace(best.layout, recompute=recompute, modules=None)
        layout = best.layout if recompute is None else layout
        try:
            training = training_for(other)
        except PartoptError:
            return None
        wrong = any(find_faults(training, layout, batch_of(other)))
        return None if wrong else estimate(training, layout, batch_of(other))

    about = best.transformer
    assert about and isinstance(asked.model, Transformer)
    first = found(asked.model)
    more = structs.replace(asked.model, vocabulary=2 * asked.model.vocabulary)
    if first and (words := found(more)) and words.seconds < first.seconds * (1 - FASTER):
        yield f"more words are faster: {words.seconds:.4g} s of {first.seconds:.4g}"
    if "ends" not in asked.facts:
        for ends in ("stage", "blocks", "fewer"):
            cut = found(asked.model, ends=ends)
            roomy = cut and cut.memory_bytes <= (asked.limit_bytes or math.inf)
            if first and cut and roomy and cut.seconds < first.seconds * (1 - FASTER):
                yield f"ends={ends} is faster: {cut.seconds:.4g} s of {first.seconds:.4g}"
    never, always = found(asked.model, "never"), found(asked.model, "always")
    if never and always and always.memory_bytes > SAME * never.memory_bytes:
        yield f"blocks made again take {always.memory_bytes:.4g} B of {never.memory_bytes:.4g}"
    for modules in ("all", "attention", "experts"):
        host = found(asked.model, offload=modules)
        if first and host and host.memory_bytes > SAME * first.memory_bytes:
            yield f"offload={modules} takes {host.memory_bytes:.4g} B of {first.memory_bytes:.4g}"
    planned = as_planned(asked, best)  # without graphs that the plan gave up
    for row in about.beside:
        alone = search_layouts(planned.with_(layout=row.layout))[0] if row.fits else None
        if alone and not 1 / SAME < needed_bytes(alone) / row.memory_bytes < SAME:
            yield f"{row.memory_bytes:.4g} B of {row.layout}, which takes {needed_bytes(alone):.4g}"
        break  # the others are alike, and take as long


def find_broken(asked: partopt.Job, best: Plan) -> Iterator[str]:
    """Rows of switches that are not as fast as what is found with them, and where less is more."""
    about = best.transformer
    assert about
    rows = [*about.levers, *([about.together] if about.together else [])]
    least = min((row.iteration_s for row in rows), default=math.inf)
    for row in rows:
        stated = {**asked.facts, **row.facts, **({"graphs": row.graphs} if row.graphs else {})}
        facts = partopt.TRAINERS[asked.trainer].spell_recipe(stated, asked.model.name)
        found, *_ = search_layouts(asked.with_(facts=facts))
        if not found.fits or seconds_of(found) > row.iteration_s * SAME:
            yield f"{row.flags} takes {seconds_of(found):.4g} s of {row.iteration_s:.4g}"
    if about.together and about.together.iteration_s > least * SAME:
        yield f"together {about.together.iteration_s:.4g} s of {least:.4g}"
    if rows:
        found, *_ = search_layouts(take_best(asked, numbers=True))
        if not found.fits or seconds_of(found) > least * SAME:
            yield f"best takes {seconds_of(found):.4g} s of {least:.4g}"


def find_unsaid(
    rng: random.Random, asked: partopt.Job, best: Plan, small: bool = True
) -> Iterator[str]:
    """Switches that are open with which a layout is faster, unsaid; of two unless that is cheap."""
    trainer, about = partopt.TRAINERS[asked.trainer], best.transformer
    assert about
    rows = [*about.levers, *([about.together] if about.together else [])]
    said = {name for row in rows for name in row.facts} | {*asked.facts} | NO_LEVERS
    switches: dict[str, tuple[str, ...]] = {name: (*own,) for name, own in trainer.choices.items()}
    if trainer.name.startswith("megatron"):  # others have no setting for these
        switches |= {"gradients": ("parameters",), "optimizer_bytes": ("8",)}
    if asked.dtype is None:
        switches["dtype"] = tuple(trainer.says.formats)
    open_ = sorted(switches.keys() - said)
    usual = estimate_again(best).seconds
    brought = {
        key
        for row in rows
        for name, value in row.facts.items()
        for key in trainer.choices.get(name, {}).get(value, {})
    }
    facts = {
        name: {key for sets in own.values() for key in sets}
        for name, own in trainer.choices.items()
    }
    open_ = [name for name in open_ if not facts.get(name, {name}) <= brought]
    values = {name: rng.sample(switches[name], min(3, len(switches[name]))) for name in open_}
    every = [(name, value) for name in open_ for value in values[name]]
    for name, value in every if small else rng.sample(every, min(2, len(every))):
        try:
            found = estimate_layouts(asked.with_(facts={**asked.facts, name: value})).fitting
        except PartoptError:  # as of a kernel that the device is not known to have
            continue
        if found and found[0].seconds < usual * (1 - UNSAID):
            yield f"{name}={value} is faster: {found[0].seconds:.4g} s of {usual:.4g}"


def draw_layouts(draws: int, seed: int, small: bool) -> int:
    """Print every draw, and the table."""
    counts, began = Counter[str](), time.perf_counter()
    for number in range(draws):
        compare_layouts(random.Random(f"{seed} {number}"), counts, small)
    asked, took_s = counts["free"] + counts["narrower"], time.perf_counter() - began
    print(
        f"""
questions                                   {asked} ({counts["free"]} free), {took_s:.0f} s
no such layout, or a part that is refused   {counts["no such layout"]}, {counts["refused"]}
best layouts that do not fit                {counts["does not fit"]}
compared                                    {counts["compared"]}
  faster by {FASTER:.0%}, the page said so           {counts["said"]}
  faster by {FASTER:.0%}, unsaid                     {counts["loses"]}
  as good, and simpler                      {counts["exotic"]}
relations that do not hold                  {counts["violated"]}
switches that are faster by {UNSAID:.0%}, unsaid      {counts["unsaid"]}
rows of switches that are not kept          {counts["broken"]}
questions that partopt fails at             {counts["fails"]}
parts that are not kept                     {counts["not kept"]}
best layouts that are not exported          {counts["not exported"]}"""
    )
    return int(any(counts[name] for name in FAILURES))


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draw", type=int, metavar="N", help="so many drawn cases instead")
    parser.add_argument("--layouts", type=int, metavar="N", help="so many draws of transformers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--small", action="store_true", help="draws of few layers and devices")
    parser.add_argument("--less", action="store_true", help="with less of everything in turn")
    arguments = parser.parse_args()
    if arguments.layouts:
        print(describe(), flush=True)
        return draw_layouts(arguments.layouts, arguments.seed, arguments.small)
    rng = random.Random(arguments.seed)
    draw = drawn_chain if arguments.small else drawn
    cases = [draw(rng) for _ in range(arguments.draw)] if arguments.draw else CASES
    print(describe(), flush=True)
    asked, lost = 0, 0
    for case in cases:
        print(f"\n{case}")
        began = time.perf_counter()
        for what, free, narrow, least in (with_less if arguments.less else compared)(case):
            asked += 1
            lost += (worse := free < least * narrow)
            share = free / narrow if narrow else float("inf")
            print(
                f"  {what:64.64} {free:10.2f} {narrow:10.2f} {share:7.3f}{' LOSES' * worse}",
                flush=True,
            )
        print(f"  {time.perf_counter() - began:.0f} s")
    print(f"\n{lost} of {asked} lose")
    return int(lost > 0)


if __name__ == "__main__":
    sys.exit(main())
