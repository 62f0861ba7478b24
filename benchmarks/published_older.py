"""Older published tables of transformers, each beside what partopt says of its rows."""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from benchmarks.published_rows import LINK, OLD_NORMS, PORT, SCORES
from partopt.documents.device import shipped_file
from partopt.documents.engine import Layout
from partopt.documents.topology import Device, Level, Topology
from partopt.documents.transformer import Transformer
from partopt.errors import PartoptError
from partopt.trainers import TRAINERS
from partopt.trainers.megatron import FUSED
from partopt.trainers.torchtitan import COMPILED, COMPILED_LOSS, EAGER, EAGER_LOSS
from partopt.transformer.block import Shape, Training
from partopt.transformer.iteration import RESERVED, Estimate, estimate
from partopt.transformer.operations import model_flops
from partopt.transformer.rates import Rates

DATA = Path(__file__).resolve().parent.parent.parent / "shared/data/published"
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
    """Megatron of 2022 on A100: scores in memory, gradients in 16 bits."""
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
        # the backward of 2021 hides no exchange
        practice = replace(work.practice, tp_overlap="none")
        work = dataclasses.replace(work, practice=practice)
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
        flops = model_flops(model, s)
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
