"""A row of a file of published runs as the program takes it: model, device, layout, practice.

What is known of trainers that partopt has no file for is here.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping

from msgspec.structs import replace

from partopt.documents.device import shipped_file
from partopt.documents.engine import Engine, Layout
from partopt.documents.topology import AllReduceRates, Device, Level, Topology
from partopt.documents.transformer import (
    Format,
    Kept,
    Latent,
    Loss,
    Passes,
    Practice,
    Scores,
    Transformer,
)
from partopt.errors import PartoptError
from partopt.importers.hugging_face import load_transformer
from partopt.job import Job
from partopt.search.layout_plans import simulate_layout
from partopt.trainers import TRAINERS
from partopt.trainers.megatron import FUSED, PLAIN
from partopt.trainers.megatron_model import SCORES as UNFUSED
from partopt.trainers.torchtitan import (
    CHUNKED_LOSS,
    COMPILED,
    COMPILED_LOSS,
    EAGER,
    EAGER_LOSS,
)
from partopt.transformer.block import Training
from partopt.transformer.iteration import Estimate, estimate
from partopt.transformer.rates import HOP_S, Port, Rates, clock

# what collectives achieve: of an NVLink, nccl-tests on servers of A100, H100 and H200 (78 to 82 %);
# of a port with messages of 256 MiB and more, four servers of 8 H100 with InfiniBand; of the link
# of a B200 SimuMax at 4dcaae5
LINK, PORT = 0.80, 0.82
LINKS = {"B200": 0.673}
ENOUGH = 10**15  # bytes of a device, where only seconds are asked for
DEVICES = {"V100": "v100", "A100": "a100", "H100": "h100", "B200": "gb200"}  # and their kernels
# whose products are as their files say: columns have a GB200's at another power limit
KNOWN = {"GB200": "gb200", "GB300": "gb300", "B200": "b200", "B300": "b300"}
DISPATCHES = {"deepep-fp8": "deepep"}
NEWER = {"H100": "cudnn-2025"}  # kernels of the years in which experts ran
GRAPHS = {"attn+router": "attention"}
ROUTING = {"capacity 1.0": "capacity", "unknown": "balanced", "dropless": "real"}
LOSSES = {"plain": PLAIN, "fused": FUSED, "eager": EAGER_LOSS, "compiled": COMPILED_LOSS}
SCORES = {
    "fused": UNFUSED,  # Megatron's kernel, with dropout
    "masked": Scores(forward=5, backward=6, kept=2, work=4),  # Aleph Alpha's: a mask, no dropout
    "torch": Scores(forward=29, backward=33, kept=7, work=14),  # torch, in float32
}
KERNELS = {"sdpa": "torch"}

# --- trainers that partopt has no file for --------------------------------------------------------

# Aleph Alpha's `scaling`, read in its code: gate and up are two products, nothing overlaps, every
# rank takes the whole loss; rotary turns halves by two products and a sum (20, 34), attention
# copies its inputs and its output; embedding, blocks, norm and head are cut evenly by count. A norm
# is eager, with a copy of its output in float32 (26; 50), or one kernel. What an eager one keeps is
# fitted to what ran out of memory: 8 bytes each, as input, float32 copy and what is normal
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
    flat_shards=False,
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


# what a column means that is empty, or not there
USUAL = {
    **dict.fromkeys(("head_dim", "experts", "experts_a_token", "expert_ffn", "shared_ffn"), "0"),
    **dict.fromkeys(("q_lora", "kv_lora", "qk_nope", "qk_rope", "v_dim"), "0"),
    **dict.fromkeys(("dense_first", "mtp", "window", "window_period"), "0"),
    **dict.fromkeys(("device_best8", "device_best4"), "0"),
    **dict.fromkeys(("llama", "rotary", "tied", "ends_are_blocks", "expert_overlap"), "no"),
    **dict.fromkeys(("fsdp", "hsdp", "grads_only", "early", "fp8_attention"), "no"),
    **dict.fromkeys(("fused_experts",), "no"),
    **dict.fromkeys(("dropout", "sequence_parallel", "compile", "overlap", "sharded"), "yes"),
    **dict.fromkeys(("tp", "cp", "pp", "chunks", "dp", "ep", "etp", "microbatch"), "1"),
    **dict.fromkeys(("dense_period",), "1"),
    **dict.fromkeys(("recompute_modules", "stages", "model", "state_bytes", "device_name"), ""),
    "other": "",
    **dict.fromkeys(("grad_bytes", "reduce_bytes"), "4"),
    "device_ring": "0.82",
    "device_kind": "H100",
    "server": "8",
    "bits": "16",
    "recompute": "none",
    "tp_overlap": "none",
    "loss": "plain",
    "dispatch": "alltoall",
    "kernel": "",
    "norm": "fused",
    "scales": "tensor",
    "graphs": "none",
    "routing": "balanced",
    "optimizer": "adam",
}
# what the program reads, and what is published beside it or says where a row is from
PUBLISHED = ("table", "run", "status", "step_s", "memory_bytes", "device_memory")
READ = {
    *USUAL,
    *PUBLISHED,
    *(f"device_{name}" for name in ["peak", "best16", "hbm", "link", "port", "tdp", "limit"]),
}
READ |= {"layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "sequence", "trainer", "gpus"}
READ |= {"global_batch"}
IGNORED = {"split", "tokens_gpu_s", "model_tflops", "memory_kind", "release", "facts", "source"}
# of recipes and of models, what no column says: MLPerf's and Bridge's have fp8_param_gather, and
# a training of experts in torchtitan takes its loss in parts
FP8_PARAMETERS = {"mlperf-405b", "blackwell"}
IN_PARTS = {"titan-issue"}
GROUPS = {"deepseek-v3": (8, 4)}


def practice_of(row: Mapping[str, str]) -> Practice:
    """What the trainer of a row does, with the facts that the row says."""
    trainer, kernel = row["trainer"], row["kernel"]
    others = {"scaling": SCALING, "fsdp1": FSDP1 if row["llama"] == "yes" else FOUNDRY}
    own = others.get(trainer) or TRAINERS[trainer].practice
    assert own is not None
    loss = LOSSES[row["loss"]]
    if own is SCALING or (own is FOUNDRY and row["loss"] == "fused"):
        loss = own.loss
    loss = CHUNKED_LOSS if row["table"] in IN_PARTS else loss
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
    if own.ends == "fewer":  # as people run it who do not plan it
        changes["ends"] = "blocks" if row["ends_are_blocks"] == "yes" else "stage"
    if int(row["experts"]) or row["model"].startswith("nemotron"):
        changes["ends"] = ends_of(row) if int(row["pp"]) > 1 else "stage"
        changes["attention"] = NEWER.get(row["device_kind"], own.attention)
    return replace(
        own,
        **changes
        | {
            "loss": loss,
            "sequence_parallel": row["sequence_parallel"] == "yes",
            "tp_overlap": own.tp_overlap if row["tp_overlap"] == "none" else row["tp_overlap"],
            "dispatch": DISPATCHES.get(row["dispatch"], row["dispatch"]),
            "dispatch_bytes": 1.5 if row["dispatch"] == "deepep-fp8" else 2,
            "graphs": GRAPHS.get(row["graphs"], row["graphs"]),
            "fused_experts": row["fused_experts"] == "yes",
            "routing": ROUTING.get(row["routing"], row["routing"]),
            "muon": row["optimizer"] == "muon",
            "dispatch_overlap": row["expert_overlap"] == "yes",
            "stops_early": row["early"] == "yes",
            "fp8_parameters": row["table"] in FP8_PARAMETERS,
            "shards": "server" if row["hsdp"] == "yes" else "all",
        },
    )


def engine_of(row: Mapping[str, str]) -> Engine:
    """What the engine of a row's trainer does."""
    shares = row["trainer"] in ("torchtitan", "fsdp1")
    size, overlaps = row["reduce_bytes" if shares else "grad_bytes"], row["overlap"] == "yes"
    own = ENGINES.get(row["trainer"]) or TRAINERS[row["trainer"]].engine
    if row["state_bytes"]:
        own = replace(own, optimizer_bytes=float(row["state_bytes"]))
    return replace(
        own,
        gradients="float32" if size == "4" else "parameters",
        allreduce="overlap" if overlaps else "blocking",
        waits=own.waits if overlaps else ("1f1b", "interleaved"),
    )


def ends_of(row: Mapping[str, str]) -> str:
    """Blocks of every stage: of a pipeline's layout, or evenly, ends as a block where that is even.

    `Et*4|(t*4|)*14tmL`: a group of letters or a letter is repeated, `|` ends a stage.
    """
    stages, layers = int(row["pp"]) * int(row["chunks"]), int(row["layers"])
    if not row["stages"]:
        return "blocks" if layers % stages and (layers + 2) % stages == 0 else "stage"
    text = re.sub(r"([Etm])\*([0-9]+)", lambda found: found[1] * int(found[2]), row["stages"])
    text = re.sub(r"\(([^()]*)\)\*([0-9]+)", lambda found: found[1] * int(found[2]), text)
    return "-".join(f"{stage.count('t')}{'m' * ('m' in stage)}" for stage in text.split("|"))


def rates_of(row: Mapping[str, str]) -> Rates:
    """The rates of a row's device, whose attention kernels are those of its kind."""
    number = {name: float(row[f"device_{name}"]) for name in ("peak", "hbm", "link", "port")}
    products = {"bfloat16": "best16", "float16": "best16", "fp8": "best8", "nvfp4": "best4"}
    found = shipped_file(KNOWN.get(row["device_name"]) or DEVICES[row["device_kind"]])
    assert found is not None and found[1].training is not None
    server, link = int(row["server"]), LINKS.get(row["device_name"], LINK) * number["link"]
    inner = Level(name="server", size=server, bandwidth_bytes_per_s=link)
    known = Rates.of(found[1], Topology(name="", device=Device(name=""), levels=[inner]))
    if row["device_name"] not in KNOWN:
        known = dataclasses.replace(
            known,
            peaks={"float16": number["peak"]},
            products={
                name: float(row[f"device_{column}"])
                for name, column in products.items()
                if float(row[f"device_{column}"])
            },
            clock=clock(float(row["device_limit"]) / float(row["device_tdp"])),
        )
    return dataclasses.replace(
        known,
        device=row["device_name"],
        bandwidth=number["hbm"],
        outer=(Port(1, PORT * number["port"], float(row["device_ring"]) * number["port"]),),
        sizes=(),
    )


_WIDTHS = ("hidden", "heads", "kv_heads", "head_dim", "ffn", "window", "window_period", "mtp")
_OF_EXPERTS = (
    *("experts", "experts_a_token", "expert_ffn", "shared_ffn", "dense_first", "dense_period"),
    *("q_lora", "kv_lora", "qk_nope", "qk_rope", "v_dim"),
)


def model_of(row: Mapping[str, str]) -> Transformer:
    """The model of a row; those with experts are gated, and have rotary positions.

    Of state spaces it is a shipped one, with as many further tokens as the run has.
    """
    if row["model"].startswith("nemotron"):
        shipped = load_transformer(row["model"])
        return replace(shipped, further=int(row["mtp"]), further_pattern="*E" * (row["mtp"] != "0"))
    number = {name: int(row[name]) for name in (*_WIDTHS, *_OF_EXPERTS)}
    llama = row["llama"] == "yes" or bool(number["experts"])
    groups, taken = GROUPS.get(row["model"], (0, 0))
    latent = Latent(
        queries=number["q_lora"],
        keys=number["kv_lora"],
        rotary=number["qk_rope"],
        values=number["v_dim"],
    )
    shape = {
        "experts": number["experts"],
        "experts_per_token": number["experts_a_token"],
        "expert_ffn": number["expert_ffn"],
        "shared_ffn": number["shared_ffn"],
        "dense_first": number["dense_first"],
        "experts_period": max(1, number["dense_period"]),
        "groups": groups,
        "groups_per_token": taken,
        "further": number["mtp"],
    }
    dense = not number["experts"] or number["dense_first"] or number["dense_period"] > 1
    return Transformer(
        name=row["run"],
        blocks=int(row["layers"]),
        hidden=number["hidden"],
        heads=number["heads"],
        kv_heads=number["kv_heads"],
        head_size=number["head_dim"] or number["hidden"] // number["heads"],
        ffn=number["ffn"] if dense else 0,
        vocabulary=int(row["vocab"]),
        gated=llama,
        rotary=llama or row["rotary"] == "yes",
        dropout=not llama and row["dropout"] == "yes",
        tied=row["tied"] == "yes",
        window=number["window"],
        full_period=number["window_period"] if number["window_period"] > 1 else 0,
        latent=latent if number["kv_lora"] else None,
        sinks=row["model"].startswith("gpt-oss"),
        **(shape if number["experts"] else {}),
    )


def format_of(row: Mapping[str, str]) -> Format:
    """The number format of a row's products."""
    if row["bits"] == "8":
        return "mxfp8" if row["scales"].startswith("block") else "fp8"
    return "nvfp4" if row["bits"] == "4" else "bfloat16"


def layout_of(row: Mapping[str, str]) -> Layout:
    """The layout of a row; half of the blocks of a stage where it recomputes every other one."""
    p, v = int(row["pp"]), int(row["chunks"])
    half = max(1, int(row["layers"]) // (2 * p * v))
    modules = row["recompute_modules"] if row["recompute"] == "selective" else ""
    recompute = {"none": "never", "full": "always", "other": half}
    if row["recompute"].isdecimal():
        recompute[row["recompute"]] = int(row["recompute"])
    shard = "optimizer" if row["sharded"] == "yes" else "none"
    if row["trainer"] in ("torchtitan", "fsdp1") or row["fsdp"] == "yes":
        shard = "gradients" if row["grads_only"] == "yes" else "parameters"
    return Layout(
        tp=int(row["tp"]),
        cp=int(row["cp"]),
        ep=int(row["ep"]),
        etp=int(row["etp"]),
        pp=p,
        chunks=v,
        dp=int(row["dp"]),
        microbatch=int(row["microbatch"]),
        recompute=recompute.get(row["recompute"], row["recompute"]),
        modules=modules or None,
        shard=shard,
    )


def training_of(row: Mapping[str, str]) -> Training:
    """The training of a row that has all columns."""
    return Training(
        model=model_of(row),
        sequence=int(row["sequence"]),
        format=format_of(row),
        practice=practice_of(row),
        engine=engine_of(row),
        rates=rates_of(row),
    )


def check_columns(names: Iterable[str]) -> list[str]:
    """The columns that are ignored. PartoptError for one that nothing here knows."""
    given = {*names}
    if unknown := sorted(given - READ - IGNORED):
        raise PartoptError(
            f"unknown columns: {', '.join(unknown)}",
            "what a column says may change the answer: teach benchmarks/published_rows.py it",
            code="unknown-column",
        )
    return sorted(given & IGNORED)


def _refuse_unknown(row: Mapping[str, str]) -> None:
    """PartoptError for what nobody knows the time of."""
    why = {
        "blocks of another kind: " + row["other"]: row["other"],
        "optimizers beside Adam and Muon": row["optimizer"] not in ("adam", "muon"),
    }
    for what, here in why.items():
        if here:
            raise PartoptError(what, "", code="unknown-rates")


def estimate_of(given: Mapping[str, str]) -> Estimate:
    """What partopt computes of a row. PartoptError where it does not know something."""
    row = USUAL | {name: value for name, value in given.items() if value}
    _refuse_unknown(row)
    return estimate(training_of(row), layout_of(row), int(row["global_batch"]))


def simulated_of(given: Mapping[str, str]) -> float:
    """Seconds of an iteration of a row's plan in the simulator.

    The plan is for Megatron where partopt has no file of the trainer: with the engine of the row
    it is the same. PartoptError where there is none.
    """
    row = USUAL | {name: value for name, value in given.items() if value}
    work, layout, batch = training_of(row), layout_of(row), int(row["global_batch"])
    asked = Job(
        model=work.model,
        topology=topology_of(row),
        trainer=row["trainer"] if row["trainer"] in TRAINERS else "megatron",
        global_batch=batch,
        sequence=work.sequence,
        dtype=work.format,
        memory=ENOUGH,
    )
    layout = replace(layout, schedule="interleaved" if (layout.chunks or 1) > 1 else "1f1b")
    return simulate_layout(asked, work, layout).predicted.iteration_s or 0.0


def topology_of(row: Mapping[str, str]) -> Topology:
    """A cluster of a row's devices, in servers of equal size, with links as its rates are."""
    gpus, rates = int(row["gpus"]), rates_of(row)
    server = max(n for n in range(1, min(gpus, rates.server) + 1) if gpus % n == 0)
    inner = Level(name="server", size=server, bandwidth_bytes_per_s=rates.link)
    (port,) = rates.outer
    outer = Level(
        name="cluster",
        size=gpus // server,
        bandwidth_bytes_per_s=port.message,
        links=server,
        latency_s=HOP_S,
        allreduce=AllReduceRates(bandwidth_bytes_per_s=port.ring, latency_s=0.0),
    )
    device = Device(name=row["device_name"])
    return Topology(name="published", device=device, levels=[inner, outer])
