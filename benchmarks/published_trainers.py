"""Published runs of transformers, beside what partopt computes of the same configuration.

    python benchmarks/published_trainers.py [RUNS.csv] [--json] [--rows]

Each table in a line: rows, |error| of an iteration's seconds (mean, median, 95 %, worst), and bias;
then whether runs fit, which of the layouts of a sheet is picked, and the older tables. `--rows`
prints every row. RUNS.csv has a run a line, its device, model, layout and facts of its trainer;
without it the data of `../shared/data/published`, beside the repository, are read. `--json` prints
what is predicted alone, in the order of the file, with a reason where it is null.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

# a checkout in which nothing is installed
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from msgspec.structs import replace

from partopt.documents.device import shipped_file
from partopt.documents.engine import Engine, Layout
from partopt.documents.topology import Device, Level, Topology
from partopt.documents.transformer import Format, Kept, Loss, Passes, Practice, Scores, Transformer
from partopt.errors import PartoptError
from partopt.trainers import TRAINERS
from partopt.trainers.megatron import FUSED, PLAIN
from partopt.trainers.torchtitan import COMPILED, COMPILED_LOSS, EAGER, EAGER_LOSS
from partopt.transformer import block, iteration, rates
from partopt.transformer.block import Shape, Training
from partopt.transformer.iteration import RESERVED, Estimate, estimate
from partopt.transformer.rates import PLANNED, USABLE, Rates, clock

DATA = Path(__file__).resolve().parent.parent.parent / "shared/data/published"
# what collectives achieve: of an NVLink, nccl-tests on servers of A100, H100 and H200 (78 to 82 %);
# of a port with messages of 256 MiB and more, four servers of 8 H100 with InfiniBand
LINK, PORT = 0.80, 0.82
DEVICES = {"A100": "a100", "H100": "h100", "B200": "gb200"}  # whose attention kernels they have
LOSSES = {"plain": PLAIN, "fused": FUSED, "eager": EAGER_LOSS, "compiled": COMPILED_LOSS}
SCORES = {
    "fused": Scores(forward=9, backward=11, kept=5),  # Megatron's kernel, with dropout
    "masked": Scores(forward=5, backward=6, kept=2, work=4),  # Aleph Alpha's: a mask, no dropout
    "torch": Scores(forward=29, backward=33, kept=7, work=14),  # torch, in float32
}
KERNELS = {"sdpa": "torch"}

# --- trainers that partopt has no file for --------------------------------------------------------

# Aleph Alpha's `scaling`, read in its code: gate and up are two products, nothing overlaps, every
# rank takes the whole loss; rotary turns halves by two products and a sum (20, 34), attention
# copies its inputs and its output; embedding, blocks, norm and head are cut evenly by count. A norm
# is eager, with a copy of its input in float32 (26; 50): it keeps input, copy and what is normal
# (2 + 4 + 2); or one kernel
SCALING = Practice(
    passes=Passes(rotary=(20, 34), queries=(8, 8), keys=(4, 8), gated=(10, 18), dropout=(0, 0)),
    kept=Kept(hidden=4, whole=4, rotary=0, queries=8, keys=6, gated=8),
    loss=Loss(passes=40, held=14, gathers=True),
    attention="flash2",
    joined_gate=False,
    regathers=False,
    sums="autograd",
    exchange="float32",
    sends="whole",
    ends="layers",
)
# torch's first FSDP, as llm-foundry and others wrap their own fused blocks in it: parameters are
# flattened (4), gradients cast
FSDP1 = Practice(
    kept=Kept(rotary=0, grouped=4, gated=8, narrower=0),
    loss=FUSED,
    attention="flash2",
    regathers=False,
    shard_copies=(0, 4),
)
# MosaicML's llm-foundry: q, k, v are taken out of their padding (4 each,
# backward 6), the output is put back (6, 4). Two training metrics (`use_train_metrics`,
# LanguageCrossEntropy and LanguagePerplexity of composer) take the loss again under autocast, when
# activations are gone: each casts the logits (2 + 4) and takes a log-softmax (4 + 4)
FOUNDRY = replace(
    FSDP1,
    passes=Passes(queries=(10, 10), keys=(8, 12), dropout=(0, 0)),
    loss=Loss(passes=12 + 2 * 14, held=4),
    attention="flash1",
)
# torch's RMS norm before 2.8: a copy in float32, a square, a mean, two products, a cast
OLD_NORMS = (72, 128)
ENGINES = {
    "scaling": Engine(allreduce="blocking"),
    "fsdp1": Engine(allreduce="blocking"),
    "deepspeed": replace(TRAINERS["deepspeed"].engine, optimizer_bytes=16),
}


def practice_of(row: Mapping[str, str]) -> Practice:
    """What the trainer of a row does, with the facts that the row says."""
    trainer, kernel = row["trainer"], row["kernel"]
    others = {"scaling": SCALING, "fsdp1": FSDP1 if row["llama"] == "yes" else FOUNDRY}
    own = others.get(trainer) or TRAINERS[trainer].practice
    assert own is not None
    loss = LOSSES[row["loss"]]
    if own is SCALING or (own is FOUNDRY and row["loss"] == "fused"):
        loss = own.loss
    changes: dict[str, object] = {}
    if trainer == "torchtitan":
        changes |= COMPILED if row["compile"] == "yes" else EAGER
        if row["compile"] == "no" and row["norm"] != "kernel":
            changes["passes"] = replace(EAGER["passes"], norms=OLD_NORMS)
    if trainer == "scaling" and row["norm"] == "eager":
        changes["passes"] = replace(own.passes, norms=(52, 100))
        changes["kept"] = replace(own.kept, hidden=16)
    if row["fsdp"] == "yes":
        changes["regathers"] = True
    if kernel:
        changes |= {"scores": SCORES.get(kernel), "attention": KERNELS.get(kernel, kernel)}
    if row["ends_are_blocks"] == "yes":
        changes["ends"] = "blocks"
    return replace(
        own,
        **changes
        | {
            "loss": loss,
            "sequence_parallel": row["sequence_parallel"] == "yes",
            "tp_overlap": row["tp_overlap"],
            "dispatch": "rows" if row["dispatch"] == "alltoall" else "copies",
            "dispatch_overlap": row["expert_overlap"] == "yes",
            "stops_early": row["early"] == "yes",
            "shards": "server" if row["hsdp"] == "yes" else "all",
        },
    )


def engine_of(row: Mapping[str, str]) -> Engine:
    """What the engine of a row's trainer does."""
    shares = row["trainer"] in ("torchtitan", "fsdp1")
    size, overlaps = row["reduce_bytes" if shares else "grad_bytes"], row["overlap"] == "yes"
    own = ENGINES.get(row["trainer"]) or TRAINERS[row["trainer"]].engine
    return replace(
        own,
        gradients="float32" if size == "4" else "parameters",
        allreduce="overlap" if overlaps else "blocking",
        waits=own.waits if overlaps else ("1f1b", "interleaved"),
    )


def rates_of(row: Mapping[str, str]) -> Rates:
    """The rates of a row's device, whose attention kernels are those of its kind."""
    number = {name: float(row[f"device_{name}"]) for name in ("peak", "hbm", "link", "port")}
    products = {"bfloat16": "best16", "float16": "best16", "fp8": "best8", "nvfp4": "best4"}
    found = shipped_file(DEVICES[row["device_kind"]])
    assert found is not None and found[1].training is not None
    return Rates(
        device=row["device_name"],
        peak=number["peak"],
        products={
            name: float(row[f"device_{column}"])
            for name, column in products.items()
            if float(row[f"device_{column}"])
        },
        bandwidth=number["hbm"],
        attention=found[1].training.attention,
        clock=clock(float(row["device_limit"]) / float(row["device_tdp"])),
        link=LINK * number["link"],
        port=PORT * number["port"],
        ring=float(row["device_ring"]) * number["port"],
        server=int(row["server"]),
        multiprocessors=found[1].training.multiprocessors.value,
    )


def model_of(row: Mapping[str, str]) -> Transformer:
    """The model of a row."""
    heads, experts, llama = int(row["heads"]), int(row["experts"]), row["llama"] == "yes"
    return Transformer(
        name=row["run"],
        blocks=int(row["layers"]),
        hidden=int(row["hidden"]),
        heads=heads,
        kv_heads=int(row["kv_heads"]),
        head_size=int(row["head_dim"]) or int(row["hidden"]) // heads,
        ffn=0 if experts else int(row["ffn"]),
        vocabulary=int(row["vocab"]),
        gated=llama,
        rotary=llama or row["rotary"] == "yes",
        dropout=not llama and row["dropout"] == "yes",
        tied=row["tied"] == "yes",
        experts=experts,
        experts_per_token=int(row["experts_a_token"]) if experts else 0,
        expert_ffn=int(row["expert_ffn"]) if experts else 0,
    )


def format_of(row: Mapping[str, str]) -> Format:
    """The number format of a row's products."""
    if row["bits"] == "8":
        return "mxfp8" if row["scales"] == "block" else "fp8"
    return "nvfp4" if row["bits"] == "4" else "bfloat16"


def layout_of(row: Mapping[str, str]) -> Layout:
    """The layout of a row; half of the blocks of a stage where it recomputes every other one."""
    p, v = int(row["pp"]), int(row["chunks"])
    half = max(1, int(row["layers"]) // (2 * p * v))
    recompute = {"none": "never", "full": "always", "other": half}
    shard = "optimizer" if row["sharded"] == "yes" else "none"
    if row["trainer"] in ("torchtitan", "fsdp1") or row["fsdp"] == "yes":
        shard = "gradients" if row["grads_only"] == "yes" else "parameters"
    return Layout(
        tp=int(row["tp"]),
        cp=int(row["cp"]),
        ep=int(row["ep"]),
        pp=p,
        chunks=v,
        dp=int(row["dp"]),
        microbatch=int(row["microbatch"]),
        recompute=recompute.get(row["recompute"], row["recompute"]),
        shard=shard,
    )


def estimate_of(row: Mapping[str, str]) -> Estimate:
    """What partopt computes of a row. PartoptError where it does not know something."""
    work = Training(
        model=model_of(row),
        sequence=int(row["sequence"]),
        format=format_of(row),
        practice=practice_of(row),
        engine=engine_of(row),
        rates=rates_of(row),
    )
    return estimate(work, layout_of(row), int(row["global_batch"]))


# --- tables ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """A row and what partopt says of it; `why` it says nothing, or what is known to be off."""

    row: Mapping[str, str]
    estimate: Estimate | None
    why: str = ""

    @property
    def ran(self) -> bool:
        """Whether the run is known to have gone through."""
        return self.row["status"] == "ok"

    @property
    def error(self) -> float | None:
        """Of the seconds of an iteration, relatively."""
        if self.estimate is None or not self.row["step_s"]:
            return None
        return self.estimate.seconds / float(self.row["step_s"]) - 1

    def fits(self, share: float) -> bool:
        """Whether it needs no more than `share` of the memory in the device's name."""
        assert self.estimate is not None
        return self.estimate.memory_bytes <= share * float(self.row["device_memory"])


def read(path: Path) -> list[Found]:
    """Every run of a file, in its order."""
    if not path.exists():
        raise PartoptError(
            f"{path}: no such file",
            "published runs are not part of the repository: name a file of them",
            code="no-such-file",
        )
    with path.open(newline="") as file:
        return [find(row) for row in csv.DictReader(file)]


def find(row: Mapping[str, str]) -> Found:
    """What partopt says of a row."""
    try:
        return Found(row, estimate_of(row), known_to_be_off(row))
    except (PartoptError, KeyError) as error:
        return Found(row, None, getattr(error, "message", f"unknown: {error}"))


def known_to_be_off(row: Mapping[str, str]) -> str:
    """Why little is to be made of what partopt says of a row; nothing where there is no reason."""
    narrow = {int(row[name]) // int(row["tp"]) for name in ("hidden", "ffn") if int(row[name]) % 64}
    why = ["widths that are no multiple of 64"] if narrow else []
    why += ["fp8 with a scale a row"] if row["scales"] == "row" else []
    return "; ".join(why)


def line(name: str, errors: Sequence[float]) -> str:
    """A table in a line."""
    size = sorted(map(abs, errors))
    if not size:
        return f"{name:22}    0 rows"
    high = size[min(len(size) - 1, int(0.95 * len(size)))]
    return (
        f"{name:22} {len(size):4} rows  mean {statistics.mean(size):5.1%}  "
        f"median {statistics.median(size):5.1%}  95 % {high:5.1%}  worst {size[-1]:5.1%}  "
        f"bias {statistics.mean(errors):+5.1%}"
    )


def tables_of(found: Sequence[Found]) -> dict[str, list[Found]]:
    """The rows by table."""
    tables: dict[str, list[Found]] = {}
    for own in found:
        tables.setdefault(own.row["table"], []).append(own)
    return tables


def errors_of(found: Sequence[Found]) -> list[float]:
    """Errors of the runs that went through, where partopt knows them."""
    return [own.error for own in found if own.ran and own.error is not None]


def show_runs(found: Sequence[Found], rows: bool) -> None:
    """The tables, with all their rows if asked for."""
    means = []
    for name, own in tables_of(found).items():
        print(line(name, errors_of(own)))
        means += [statistics.mean(map(abs, errors_of(own)))] if errors_of(own) else []
        for each in own if rows else ():
            published = each.row["step_s"] or each.row["status"]
            said = "unknown" if each.estimate is None else f"{each.estimate.seconds:9.3f} s"
            size = "" if each.estimate is None else f"{each.estimate.memory_bytes / 1e9:7.1f} GB"
            print(f"    {each.row['run']:90} {published:>9} {said:>11} {size} {each.why}")
    errors = errors_of(found)
    print(line("all", errors))
    print(f"mean of the tables' means {statistics.mean(means):.1%}")
    for share in (0.05, 0.10, 0.20):
        print(f"  {sum(abs(e) <= share for e in errors) / len(errors):.0%} within {share:.0%}")
    if unknown := sum(own.estimate is None for own in found):
        print(f"  {unknown} unknown")


def show_fits(found: Sequence[Found]) -> None:
    """Whether partopt says rightly what ran out of memory, and bytes where they are published."""
    tables = tables_of([own for own in found if own.estimate])
    tried = [name for name, own in tables.items() if not all(each.ran for each in own)]
    own = [each for name in tried for each in tables[name]]
    counts = {
        (ran, fits): sum(each.ran == ran and each.fits(USABLE) == fits for each in own)
        for ran in (True, False)
        for fits in (True, False)
    }
    right = counts[True, True] + counts[False, False]
    if own:
        print(
            f"fits: {right / len(own):.1%} of {len(own)} tries said rightly ({', '.join(tried)}); "
            f"ran, said out {counts[True, False]}; out, said to fit {counts[False, True]}"
        )
    for name in tables.keys() - set(tried):
        fit = sum(each.fits(USABLE) for each in tables[name])
        print(f"fits: {fit} of {len(tables[name])} that ran ({name})")
    known = [each for each in found if each.ran and each.estimate and each.row["memory_bytes"]]
    sizes = [each.estimate.memory_bytes for each in known if each.estimate]
    print(
        line(
            "bytes",
            [s / float(o.row["memory_bytes"]) - 1 for s, o in zip(sizes, known, strict=True)],
        )
    )


SHEET = ("layers", "sequence", "gpus", "kernel", "norm", "sequence_parallel")


def show_ranking(found: Sequence[Found]) -> None:
    """Which layout of a sheet is picked: of all that its author tried of a model and a kernel."""
    sheets: dict[tuple[str, ...], list[Found]] = {}
    for own in found:
        if own.row["table"] == "hagemann" and own.estimate:
            sheets.setdefault(tuple(own.row[name] for name in SHEET), []).append(own)
    lost, out, taus = [], 0, []
    for own in sheets.values():
        ran = {float(each.row["step_s"]): each for each in own if each.ran}
        if len(ran) < 2:
            continue
        picked = [each for each in own if each.fits(PLANNED)]
        picked.sort(key=lambda each: each.estimate.seconds if each.estimate else 0.0)
        out += not picked or not picked[0].ran
        first = next((each for each in picked if each.ran), None)
        lost += [float(first.row["step_s"]) / min(ran) - 1] if first else []
        taus.append(
            kendall([(s, each.estimate.seconds) for s, each in ran.items() if each.estimate])
        )
    if taus:
        print(
            f"ranking: {len(taus)} sheets; the first pick runs out of memory in {out}; the first "
            f"that runs is slower than the best by {statistics.mean(lost):.1%} in the mean, "
            f"{max(lost):.1%} at worst; Kendall's tau {statistics.mean(taus):.2f}"
        )


def kendall(pairs: Sequence[tuple[float, float]]) -> float:
    """Kendall's tau: pairs in the right order less those in the wrong one, of all."""
    signs = [
        (a - c > 0) - (a - c < 0) if b > d else (c - a > 0) - (c - a < 0)
        for i, (a, b) in enumerate(pairs)
        for c, d in pairs[:i]
        if b != d
    ]
    return sum(signs) / len(signs)


# --- older tables ---------------------------------------------------------------------------------

LLAMA3 = {
    "llama3.1-8b": (32, 4096, 32, 14336),
    "llama3-405b": (126, 16384, 128, 53248),
}
# links and ports of a device, one direction, as its data sheet has them
SHEETS = {"A100-80GB": ("a100", 300e9, 25e9), "H100-80GB": ("h100", 450e9, 50e9)}
SHEETS |= {"H100-96GB": ("h100-96gb", 450e9, 50e9), "H200": ("h200", 450e9, 50e9)}
VOCABULARY, TOKENS = 51_200, 2048  # of GPT in the papers on Megatron


def shipped_rates(device: str) -> Rates:
    """The rates of a shipped device in servers of 8."""
    name, link, port = SHEETS[device]
    found = shipped_file(name)
    assert found is not None
    levels = [
        Level(name="server", size=8, bandwidth_bytes_per_s=LINK * link),
        Level(name="cluster", size=2, bandwidth_bytes_per_s=PORT * port, links=8),
    ]
    return Rates.of(found[1], Topology(name=name, device=Device(name=device), levels=levels))


def gpt(row: Mapping[str, str]) -> Transformer:
    """GPT of a paper on Megatron."""
    h, heads = int(row["hidden"]), int(row["heads"])
    return Transformer(
        name="gpt",
        blocks=int(row["layers"]),
        hidden=h,
        heads=heads,
        kv_heads=heads,
        head_size=h // heads,
        ffn=4 * h,
        vocabulary=VOCABULARY,
        gated=False,
        rotary=False,
        dropout=True,
    )


def llama(name: str) -> Transformer:
    """A Llama 3."""
    blocks, h, heads, f = LLAMA3[name]
    return Transformer(
        name=name,
        blocks=blocks,
        hidden=h,
        heads=heads,
        kv_heads=8,
        head_size=128,
        ffn=f,
        vocabulary=128_256,
    )


def old_megatron(model: Transformer, sequence_parallel: bool, overlap: bool = False) -> Training:
    """Megatron of 2021 and 2022 on A100: scores in memory, gradients in 16 bits."""
    own = TRAINERS["megatron"]
    assert own.practice is not None
    return Training(
        model=model,
        sequence=TOKENS,
        format="bfloat16",
        practice=replace(own.practice, scores=SCORES["fused"], sequence_parallel=sequence_parallel),
        engine=replace(
            own.engine,
            gradients="parameters",
            allreduce="overlap" if overlap else "blocking",
            waits=own.engine.waits if overlap else ("1f1b", "interleaved"),
        ),
        rates=shipped_rates("A100-80GB"),
    )


Row = tuple[str, float, float]  # a case, what is published, what partopt says


def rows_of(name: str) -> list[dict[str, str]]:
    """The rows of a file of the older tables."""
    path = DATA / name
    if not path.exists():
        raise PartoptError(f"{path}: no such file", "published runs are not part of the repository")
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def sc21() -> Iterator[Row]:
    """Tflop/s of a GPU; F = 96 B s l h^2 (1 + s/6h + V/16lh), whose recomputation counts."""
    for row in rows_of("sc21-table1.csv"):
        h, L, s = int(row["hidden"]), int(row["layers"]), TOKENS
        t, p, gpus, batch = (int(row[name]) for name in ("tp", "pp", "gpus", "batch"))
        layout = Layout(
            tp=t,
            pp=p,
            dp=gpus // (t * p),
            chunks=int(row["chunks"]),
            microbatch=int(row["microbatch"]),
            recompute="always",
        )
        work = old_megatron(gpt(row), False, row["gradients_overlap"] == "yes")
        flops = 96 * batch * s * L * h * h * (1 + s / 6 / h + VOCABULARY / 16 / L / h)
        found = flops / estimate(work, layout, batch).seconds / gpus / 1e12
        yield f"{row['billion_parameters']} B", float(row["tflops_per_gpu"]), found


def korthikanti_5() -> Iterator[Row]:
    """Iterations a second."""
    for row in rows_of("korthikanti-table5.csv"):
        t, p, batch = (int(row[name]) for name in ("tp", "pp", "batch"))
        chunks = 3 if row["model"] in ("175B", "530B") else 1
        for recompute, name in (
            ("always", "full_recompute_s"),
            ("selective", "selective_and_sequence_parallel_s"),
        ):
            layout = Layout(
                tp=t,
                pp=p,
                chunks=chunks,
                microbatch=int(row["microbatch"]),
                recompute=recompute,
            )
            work = old_megatron(gpt(row), recompute == "selective")
            found = 1 / estimate(work, layout, batch).seconds
            yield f"{row['model']} {recompute}", 1 / float(row[name]), found


def korthikanti_4() -> Iterator[Row]:
    """Blocks a second, forward and backward."""
    model = gpt({"hidden": "6144", "layers": "48", "heads": "64"})
    rows = {row["experiment"]: row for row in rows_of("korthikanti-table4.csv")}
    for name, parallel in (("no recomputation", False), ("sequence parallelism", True)):
        own = old_megatron(model, parallel).block(Shape(b=4, t=8))
        for way, seconds in (("forward", own.forward_s), ("backward", own.backward_s)):
            yield f"{name} {way}", 1e3 / float(rows[name][f"{way}_ms"]), 1 / seconds


FIGURE_1 = {"22B": (6144, 48, 64, 1, 1, 4), "175B": (12288, 96, 96, 8, 3, 1)}
FIGURE_1 |= {"530B": (20480, 105, 128, 35, 3, 1), "1T": (25600, 128, 160, 64, 1, 1)}


def korthikanti_1() -> Iterator[Row]:
    """GiB of a GPU."""
    for row in rows_of("korthikanti-figure1.csv"):
        h, L, heads, p, v, b = FIGURE_1[row["model"]]
        model = gpt({"hidden": str(h), "layers": str(L), "heads": str(heads)})
        work = old_megatron(model, True)
        work = dataclasses.replace(work, engine=replace(work.engine, gradients="float32"))
        layout = Layout(tp=8, pp=p, chunks=v, microbatch=b, recompute="selective")
        memory = estimate(work, layout, 8 * b * p).memory
        state = sum(memory[name] for name in ("parameters", "gradients", "optimizer"))
        kept, column = memory["activations"], "activations_selective_and_sequence_parallel_gib"
        for name, size in ((column, kept), ("parameters_and_optimizer_gib", state)):
            yield f"{row['model']} {name}", float(row[name]), size / RESERVED / 2**30


def torchtitan(name: str, memory: bool = False) -> Iterator[Row]:
    """Tokens a second of a GPU, or GiB of one."""
    for row in rows_of(name):
        own, numbers = titan_estimate(row), ("tokens_per_s_per_gpu", "memory_gib")
        case = " ".join(said for key, said in row.items() if key not in numbers)
        if memory:
            yield case, float(row["memory_gib"]), own.memory_bytes / 2**30
        else:
            samples = int(row["fsdp"]) * int(row["local_batch"])
            found = samples * int(row["sequence"]) / own.seconds / int(row["gpus"])
            yield case, float(row["tokens_per_s_per_gpu"]), found


def titan_estimate(row: Mapping[str, str]) -> Estimate:
    """What partopt says of a row of torchtitan's, of the end of 2024."""
    own, c = TRAINERS["torchtitan"], int(row.get("cp") or 1)
    assert own.practice is not None
    facts = (
        COMPILED
        if row["compile"] == "yes"
        else EAGER | {"passes": replace(EAGER["passes"], norms=OLD_NORMS)}
    )
    loss = COMPILED_LOSS if row.get("loss") == "compiled" else EAGER_LOSS
    work = Training(
        model=llama(row["model"]),
        sequence=int(row["sequence"]),
        format="fp8" if row["precision"] == "fp8" else "bfloat16",
        practice=replace(own.practice, **facts | {"loss": loss, "attention": "torch"}),
        engine=own.engine,
        rates=shipped_rates(row.get("device") or "H100-96GB"),
    )
    n, b = int(row["fsdp"]), int(row["local_batch"])
    recompute = {"full": "always"}.get(row["recompute"], row["recompute"])
    layout = Layout(cp=c, dp=n, microbatch=b, recompute=recompute, shard="parameters")
    return estimate(work, layout, n * b)


def llama3_405b() -> Iterator[Row]:
    """Tflop/s of a GPU, attention over half of the square; chunks are not published: 4."""
    own = TRAINERS["megatron"]
    assert own.practice is not None
    for row in rows_of("llama3-405b.csv"):
        model, gpus, s = llama(row["model"]), int(row["gpus"]), int(row["sequence"])
        work = Training(
            model=model,
            sequence=s,
            format="bfloat16",
            practice=replace(own.practice, loss=FUSED, ends="blocks"),
            engine=own.engine,
            rates=shipped_rates("H100-80GB"),
        )
        layout = Layout(tp=8, pp=16, chunks=4, dp=int(row["dp"]), microbatch=1, shard="optimizer")
        batch = int(row["global_batch"])
        flops = model.flops(s) - 6 * s**2 * model.q * model.blocks
        found = batch * flops / estimate(work, layout, batch).seconds / gpus / 1e12
        yield f"{gpus} GPUs", float(row["tflops_per_gpu"]), found


OLDER: dict[str, Callable[[], Iterator[Row]]] = {
    "SC 2021, table 1": sc21,
    "Korthikanti, table 5": korthikanti_5,
    "Korthikanti, table 4": korthikanti_4,
    "Korthikanti, figure 1": korthikanti_1,
    "torchtitan 8B": partial(torchtitan, "torchtitan-8b.csv"),
    "its memory": partial(torchtitan, "torchtitan-8b.csv", memory=True),
    "torchtitan 8B, more": partial(torchtitan, "torchtitan-8b-more.csv"),
    "their memory": partial(torchtitan, "torchtitan-8b-more.csv", memory=True),
    "Llama 3 405B": llama3_405b,
}


def show_older(rows: bool) -> None:
    """The older tables, with all their rows if asked for."""
    for name, table in OLDER.items():
        own = list(table())
        print(line(name, [found / published - 1 for _, published, found in own]))
        for case, published, found in own if rows else ():
            print(f"    {case:70} {published:9.4g} {found:9.4g} {found / published - 1:+6.1%}")


# --- constants ------------------------------------------------------------------------------------

# what was fitted, and the steps in which it is sought
FITTED = {
    "SUSTAINED": (rates, 0.005),
    "BLOCK_SCALES": (rates, 0.01),
    "CLOCK_POWER": (rates, 0.02),
    "STRAGGLER": (iteration, 0.001),
    "buffers": (block.HIDDEN, 0.05),
}


def cost(rows: Sequence[Mapping[str, str]]) -> float:
    """The mean of the tables' mean errors."""
    tables = tables_of([find(row) for row in rows if row["status"] == "ok"])
    return statistics.mean(statistics.mean(map(abs, errors_of(own))) for own in tables.values())


def constant(name: str, value: float | None = None) -> float:
    """What a fitted constant is; set to `value` first where that is given."""
    where, _ = FITTED[name]
    own = where if isinstance(where, dict) else vars(where)
    if value is not None:
        own[name] = value
    return float(own[name])


def fit(rows: Sequence[Mapping[str, str]]) -> dict[str, float]:
    """Seek constants, one after the other, until no step lowers the cost of `rows`."""
    best, moved = cost(rows), True
    while moved:
        moved = False
        for name, (_, step) in FITTED.items():
            for sign in (step, -step):
                while (now := constant(name)) is not None:
                    constant(name, now + sign)
                    if (tried := cost(rows)) >= best - 1e-6:
                        constant(name, now)
                        break
                    best, moved = tried, True
    return {name: constant(name) for name in FITTED}


def show_left_out(found: Sequence[Found]) -> None:
    """Each table with the constants that are fitted to the others."""
    rows, usual = [own.row for own in found], {name: constant(name) for name in FITTED}
    means, every = [], []
    for table in tables_of(found):
        fitted = fit([row for row in rows if row["table"] != table])
        errors = errors_of([find(row) for row in rows if row["table"] == table])
        means.append(statistics.mean(map(abs, errors)))
        every += errors
        said = ", ".join(f"{name} {value:.3g}" for name, value in fitted.items())
        print(f"{line(table, errors)}\n    {said}")
        for name, value in usual.items():
            constant(name, value)
    print(line("all, left out in turn", every))
    print(f"mean of the tables' means {statistics.mean(means):.1%}")


def main() -> None:
    """Print the tables, or what is predicted."""
    parser = argparse.ArgumentParser()
    parser.add_argument("runs", nargs="?", type=Path, help="a file of runs")
    parser.add_argument("--json", action="store_true", help="what is predicted alone")
    parser.add_argument("--rows", action="store_true", help="every row")
    parser.add_argument("--left-out", action="store_true", help="constants of the other tables")
    given = parser.parse_args()
    try:
        found = read(given.runs or DATA / "runs.csv")
    except PartoptError as error:
        sys.exit(f"error: {error.message}\nhint:  {error.hint}")
    if given.json:
        print(json.dumps({"rows": [document(own) for own in found]}, indent=1))
        return
    show_runs(found, given.rows)
    show_fits(found)
    show_ranking(found)
    if DATA.exists():
        print()
        show_older(given.rows)
    if given.left_out:
        print("\neach table left out in turn, the constants fitted to the others")
        show_left_out(found)


def document(own: Found) -> dict[str, object]:
    """A row as it is printed in JSON."""
    known = own.estimate
    return {
        "run": own.row["run"],
        "predicted_s": known.seconds if known else None,
        "predicted_bytes": known.memory_bytes if known else None,
        "why": own.why,
    }


if __name__ == "__main__":
    main()
