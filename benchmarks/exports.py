"""Plans of transformers, exported and imported again: is it the same training?

    python benchmarks/exports.py [--draw N] [--seed S]

Each case is a model on a cluster, in a layout, a format and with facts that are drawn. Its plan is
written for its trainer, and what is written is read again from the text alone. The training that is
read has the plan's model, layout, seconds and bytes; or the export says in a note what it lacks, or
refuses what the trainer cannot say. The exit code is 1 where one is another without a word, or is
refused without a reason. Beside that, plans for one trainer are written for another.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import Counter
from typing import Any, NamedTuple

from msgspec import structs

import partopt
from partopt import Layout, PartoptError, Plan, Topology, export_plan
from partopt.documents.files import shipped_names
from partopt.documents.transformer import BITS, Transformer
from partopt.importers.hugging_face import load_transformer, read_transformer
from partopt.job import Job
from partopt.search.jobs import read_job
from partopt.search.judging import plan_layout

TRAINERS = ("megatron", "megatron-bridge", "torchtitan", "deepspeed")
TOPOLOGIES = ("dgx-h100", "dgx-a100", "gb200-nvl72")
# facts of engines, beside the trainer's choices
FACTS = {
    "allreduce": ("overlap", "blocking"),
    "gradients": ("float32", "parameters"),
    "bucket": ("160 MB", "40 MB"),
    "waits": ("none", "1f1b", "1f1b,interleaved"),
    "messages": ("packed", "split"),
    "buffers": ("all", "flight"),
    "optimizer_bytes": (8, 6, 12),
}
MODULES = ("moe_act+layernorm", "mla_up_proj+mlp", "mlp", "core_attn", "shared_experts", "moe")
KINDS = [
    *("llama", "mistral", "qwen2", "qwen3", "phi3", "granite", "olmo2", "gemma", "nemotron"),
    *("gpt_neox", "starcoder2", "bert", "gpt2", "mixtral", "qwen2_moe", "qwen3_moe"),
]
# what a trainer cannot say of plans that were made for it: nothing else may be refused
CANNOT = {
    **dict.fromkeys(
        ("megatron", "megatron-bridge"),
        (
            *("`causal` of the model is False", "`chunked` of the model is True"),
            *("it does not recompute m", "it does not recompute blocks"),
            *("it does not offload what experts save", "it does not cut experts"),
        ),
    ),
    "torchtitan": (
        *("(`tied=together`)", "(`shard`)", "what replicas share is none"),
        *("the format is float16", "it has no model of such blocks", "predicts further tokens"),
    ),
    "deepspeed": ("recomputation is selective", "the format is "),
}
_BY_FACT = ("gradients", "parameters")  # what replicas of Megatron share by a fact
SCALINGS: tuple[dict[str, Any] | None, ...] = (
    None,
    {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    | {"original_max_position_embeddings": 8192},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    {"type": "linear", "factor": 2.0},
)


class Case(NamedTuple):
    """The question, and for whom its plan is written."""

    asked: Job
    target: str

    def __str__(self) -> str:
        asked, said = self.asked, structs.asdict(self.asked.layout)
        words = ",".join(f"{name}={value}" for name, value in said.items() if value is not None)
        to = "" if self.target == asked.trainer else f" to {self.target}"
        where = f"{asked.topology.name} x{asked.topology.cluster.devices}"
        facts = " ".join(f"{name}={value}" for name, value in asked.facts.items())
        model = f"{asked.model.name} {where}"
        return f"{asked.trainer}{to} {model} {words} {asked.dtype} {asked.sequence} {facts}"


def drawn_model(rng: random.Random) -> Transformer:
    """One of `models/`, or another of a kind that is known."""
    if rng.random() < 0.7:
        return load_transformer(rng.choice(shipped_names("models")))
    heads, size = rng.choice([16, 32]), rng.choice([64, 128])
    raw: dict[str, Any] = {
        "model_type": rng.choice(KINDS),
        **dict.fromkeys(("num_hidden_layers", "n_layer"), rng.choice([8, 24, 30])),
        **dict.fromkeys(("hidden_size", "n_embd"), heads * size),
        **dict.fromkeys(("num_attention_heads", "n_head"), heads),
        "num_key_value_heads": rng.choice([8, heads]),
        "intermediate_size": rng.choice([2816, 8192, 11008]),
        "vocab_size": rng.choice([32_000, 50_000]),
        "rope_theta": rng.choice([10_000.0, 1e6, 123_456.5]),
        "num_local_experts": 8,
        "num_experts": 16,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 1024,
        "shared_expert_intermediate_size": rng.choice([0, 2816]),
        "tie_word_embeddings": rng.choice([True, False]),
        "attention_bias": rng.choice([None, True, False]),
        "mlp_bias": rng.choice([None, True, False]),
        "sliding_window": rng.choice([None, 1024]),
        "rope_scaling": rng.choice(SCALINGS),
    }
    return read_transformer(json.dumps(raw).encode(), "drawn", f"a-{raw['model_type']}")


def drawn(rng: random.Random) -> Case:
    """A case that may be impossible."""
    trainer = rng.choice(TRAINERS)
    own = partopt.TRAINERS[trainer]
    model = drawn_model(rng)
    topology = Topology.load(rng.choice(TOPOLOGIES), rng.choice([1, 2, 4]))
    devices = topology.cluster.devices
    t, c = rng.choice([1, 1, 2, 4, 8]), rng.choice([1, 1, 1, 2])
    p = rng.choice([1, 1, 2, 4, 8])
    batch = rng.choice([32, 64, 128])
    facts = {
        name: rng.choice(sorted(values))
        for name, values in {**own.choices, **FACTS}.items()
        if rng.random() < (0.25 if name in own.choices else 0.08)
    }
    experts = model.experts and "ep" in own.says.degrees
    again = rng.choice(["never", "always", "selective", 2])
    named = again == "selective" and own.says.degrees.get("etp")
    layout = Layout(
        tp=t,
        cp=c if "cp" in own.says.degrees else 1,
        ep=rng.choice([1, 2, 4, 8]) if experts else 1,
        etp=rng.choice([None, None, 2]) if experts and "etp" in own.says.degrees else None,
        pp=p,
        chunks=rng.choice([1, 1, 2, 4]) if p > 1 else 1,
        microbatch=rng.choice([1, 1, 2, 4]),
        recompute=again,
        modules=rng.choice([None, *MODULES]) if named else None,
        shard=rng.choice([None, *own.engine.shard, *_BY_FACT * ("fsdp" in own.choices)]),
    )
    asked = Job(
        model=model,
        topology=topology,
        trainer=trainer,
        global_batch=max(batch, devices),
        sequence=rng.choice([2048, 4096, 8192]),
        dtype=rng.choice(["bfloat16", "bfloat16", *BITS]),
        layout=layout,
        facts=facts,
    )
    return Case(asked, trainer if rng.random() < 0.85 else rng.choice(TRAINERS))


def differences(plan: Plan, asked: Job) -> dict[str, str]:
    """What of the training that was read is another, and what its note has to have."""
    about = plan.transformer
    assert about
    one, other = (
        structs.replace(own, name="", numerics=None, tower=None)
        for own in (about.model, asked.model)
    )
    layout = {
        name: getattr(plan.layout, name) or 1
        for name in ("tp", "cp", "ep", "etp", "pp", "chunks", "microbatch", "modules", "shard")
    }
    # blocks have numbers; as many as the largest stage has are all
    most = max(sum(name[-1].isdecimal() for name in stage.modules) for stage in plan.stages)
    recompute = [
        "always" if isinstance(again, int) and again >= most else again
        for again in (plan.layout.recompute, asked.layout.recompute)
    ]
    pairs = [
        ("model", one, other),
        ("format", about.format, asked.dtype),
        ("sequence", about.sequence, asked.sequence),
        ("batch", plan.microbatch_size * (plan.microbatches or 0), asked.global_batch),
        *((name, own, getattr(asked.layout, name) or 1) for name, own in layout.items()),
        ("recompute", *recompute),
    ]
    found = {name: f"{name} of the training" for name, own, read in pairs if own != read}
    planned, read = about.model.numerics, asked.model.numerics
    assert planned
    assert read
    for name, own in structs.asdict(planned).items():
        if own != getattr(read, name):
            found[name] = str(own) if name == "besides" else f"the model has {name} {own}"
    return found


def timed(plan: Plan, asked: Job) -> list[str]:
    """What is otherwise of the plan that the trainer's own reading makes."""
    again = plan_layout(asked)
    assert plan.transformer
    assert again.transformer
    pairs = [
        ("seconds", plan.predicted.iteration_s, again.predicted.iteration_s),
        ("bytes", plan.peak_memory_bytes, again.peak_memory_bytes),
        ("closed seconds", plan.transformer.closed_s, again.transformer.closed_s),
        ("closed bytes", plan.transformer.closed_bytes, again.transformer.closed_bytes),
    ]
    found = [name for name, one, other in pairs if one != other]
    cuts = [[stage.start for stage in own.stages] for own in (plan, again)]
    return found + ["stages"] * (cuts[0] != cuts[1])


def judge(case: Case) -> tuple[str, str]:
    """The outcome, in a word, and what is to be said of it."""
    try:
        plan = plan_layout(case.asked)
    except PartoptError as error:
        return "no plan", error.message
    try:
        text = export_plan(plan, case.target, stem="planned")
    except PartoptError as error:
        faults = [own.message for own in error.parts]
        able = case.target == case.asked.trainer and not all(
            any(why in fault for why in CANNOT[case.target]) for fault in faults
        )
        return "REFUSED" if able else "refused", "; ".join(faults)
    notes = " | ".join(text.notes)
    try:
        asked, said = read_job(case.target, text.main, case.asked.topology)
        lacking = differences(plan, asked)
        if case.target == case.asked.trainer and (other := timed(plan, asked)):
            lacking[" ".join(other)] = "the plan counts"
    except PartoptError as error:  # another trainer's kernels may not be known on a device
        return "no plan" if error.code == "unknown-rates" else "NOT READ", error.message
    silent = [name for name, note in lacking.items() if note not in notes]
    if silent:
        return "SILENT", f"{', '.join(silent)}; notes: {notes}; read: {said}"
    return ("noted", f"{', '.join(lacking)}: {notes}") if lacking else ("same", notes)


def main() -> int:
    """Print what was another, and the table."""
    from machine import describe  # tests have this module, and not its folder

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draw", type=int, default=400, metavar="N", help="so many plans")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--show", default="NOT READ,REFUSED,SILENT", help="outcomes to print")
    arguments = parser.parse_args()
    rng, counts = random.Random(arguments.seed), Counter[tuple[str, str]]()
    print(describe(), flush=True)
    plans = 0
    while plans < arguments.draw:
        case = drawn(rng)
        outcome, what = judge(case)
        counts[case.target, outcome] += 1
        plans += outcome != "no plan"
        if outcome in arguments.show.split(","):
            print(f"{outcome}: {case}\n    {what}", flush=True)
    names = ("same", "noted", "refused", "NOT READ", "REFUSED", "SILENT")
    print(f"\n{'':16}" + "".join(f"{name:>10}" for name in names))
    for trainer in TRAINERS:
        print(f"{trainer:16}" + "".join(f"{counts[trainer, name]:10}" for name in names))
    wrong = sum(counts[trainer, name] for trainer in TRAINERS for name in names[3:])
    print(f"\n{wrong} of {plans} plans are another training without a note, or refused for nothing")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
