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
from partopt.search.ranking import TIE, complexity, is_as_good, layout_complexity, rate
from partopt.transformer.as_profile import estimate_again
from partopt.transformer.faults import find_faults
from partopt.transformer.iteration import Estimate, estimate

LEAST, ROW = 0.995, 0.99  # of the narrower answer
FASTER = 0.01  # of a layout's time: by so much a narrower answer may be faster
NOTHING = 0.0  # samples/s of a question to which nothing was found that fits


class Case(NamedTuple):
    """A model on a cluster, asked for a trainer or for `partopt run`, and what is fixed in turn."""

    profile: str
    topology: str
    servers: int | None
    trainer: str | None
    free: dict[str, Any]
    narrower: list[dict[str, Any]]


def layout(text: str) -> dict[str, Any]:
    """The option that fixes parts of a layout."""
    return {"layout": partopt.Layout.parse(text)}


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
    topology = topology or Topology.load(case.topology, case.servers)
    try:
        job = Job(Profile.load(case.profile), topology, **options)
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
    if case.free["schedule"] == "auto" and case.trainer is None:
        for row in beside:
            alone = samples_per_s(ask(case, case.free | {"schedule": row.schedule}))
            yield f"row {row.schedule}", row.predicted.samples_per_s, alone, ROW


def with_less(case: Case) -> Iterator[tuple[str, float, float, float]]:
    """As `compared`, with less of one thing after another."""
    whole = Topology.load(case.topology, case.servers)
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
FAILURES = ("loses", "exotic", "violated", "unsaid", "fails", "not kept", "not exported")
SAME = 1.01  # of the bytes: they are as many
LARGE = 5e10  # parameters: such models are asked on more servers
UNSAID = 0.02  # of the time: a switch that saves more is on the page
# what is no question of speed alone, or is worth more as computed than published runs say
NO_LEVERS = {"routing", "muon", "attention", "graphs", "fused-experts", "exchange-overlap"}
# what is said of a part that a person fixed, where it cannot be
REFUSALS = ("unsupported-layout", "invalid-option", "no-plan")


def drawn_layout(rng: random.Random) -> partopt.Job:
    """A free question: of a model, a cluster, a trainer, a format, a batch."""
    model = partopt.find_transformer(rng.choice(shipped_names("models")))
    large = model.parameters > LARGE
    cluster, servers = rng.choice(
        [
            ("dgx-h100", rng.choice([4, 8, 16] if large else [1, 2, 3, 4, 6])),
            ("dgx-a100", rng.choice([8, 16] if large else [1, 2, 4])),
            ("gb200-nvl72", rng.choice([1, 2])),
        ]
    )
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
        topology=Topology.load(cluster, servers),
        trainer=trainer,
        global_batch=rng.choice([64, 96, 128, 256, 512, 1024, 1536]),
        sequence=rng.choice([1024, 2048, 4096, 6144, 8192, 16384]),
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


def compare_layouts(rng: random.Random, counts: Counter[str]) -> None:
    """Ask freely, then with one part fixed after another, and count."""
    asked, picked = drawn_layout(rng), {name: rng.choice(own) for name, own in VALUES.items()}
    print(
        f"\n{asked.model.name} {asked.topology.name} {asked.topology.devices} {asked.trainer} "
        f"{asked.dtype} {asked.global_batch} x {asked.sequence} {asked.facts}"
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
            lacks = "it has no model of such blocks" in error.message
            counts["refused" if lacks else "not exported"] += 1
            print(f"  NOT EXPORTED {error.message}")
    else:
        counts["does not fit"] += 1
    for what in find_violations(asked, best) if best.fits else ():
        counts["violated"] += 1
        print(f"  VIOLATED {what}")
    for what in find_unsaid(rng, asked, best) if best.fits else ():
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
    for row in about.beside:
        alone = search_layouts(asked.with_(layout=row.layout))[0] if row.fits else None
        if alone and not 1 / SAME < needed_bytes(alone) / row.memory_bytes < SAME:
            yield f"{row.memory_bytes:.4g} B of {row.layout}, which takes {needed_bytes(alone):.4g}"
        break  # the others are alike, and take as long


def find_unsaid(rng: random.Random, asked: partopt.Job, best: Plan) -> Iterator[str]:
    """Switches that are open, of two that are drawn, with which a layout is faster, unsaid."""
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
    for name in rng.sample(open_, min(2, len(open_))):
        value = rng.choice(switches[name])
        try:
            found = estimate_layouts(asked.with_(facts={**asked.facts, name: value})).fitting
        except PartoptError:  # as of a kernel that the device is not known to have
            continue
        if found and found[0].seconds < usual * (1 - UNSAID):
            yield f"{name}={value} is faster: {found[0].seconds:.4g} s of {usual:.4g}"


def draw_layouts(draws: int, seed: int) -> int:
    """Print every draw, and the table."""
    counts, began = Counter[str](), time.perf_counter()
    for number in range(draws):
        compare_layouts(random.Random(f"{seed} {number}"), counts)
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
    parser.add_argument("--less", action="store_true", help="with less of everything in turn")
    arguments = parser.parse_args()
    if arguments.layouts:
        print(describe(), flush=True)
        return draw_layouts(arguments.layouts, arguments.seed)
    rng = random.Random(arguments.seed)
    cases = [drawn(rng) for _ in range(arguments.draw)] if arguments.draw else CASES
    print(describe(), flush=True)
    asked, lost = 0, 0
    for case in cases:
        words = [
            case.profile,
            case.topology,
            case.servers or "",
            f"for {case.trainer or 'partopt'}",
        ]
        print(f"\n{' '.join(map(str, words))}, {case.free}")
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
