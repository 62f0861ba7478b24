"""GiB that ms-swift's examples state, beside what is computed: `benchmarks/stated_memory.py`.

The rows are those of `../shared/data/published/post-memory.csv`, the arguments those of the
examples (modelscope/ms-swift at 3602360a, examples/megatron). What is stated is taken as all that a
device holds: its log has what torch reserves, to which a context and NCCL come. Of samples that are
not packed the lengths are not known: those rows are printed apart, with all as long as the longest.
`--parts` prints what is computed part by part.
"""

from __future__ import annotations

import csv
import statistics
import sys
from collections.abc import Mapping
from typing import NamedTuple

from benchmarks.dialects import cluster_of
from benchmarks.published_older import DATA
from partopt.search.jobs import read_job
from partopt.search.layout_questions import batch_of, fill_layout, training_for
from partopt.transformer.iteration import estimate

STATED = DATA / "post-memory.csv"
_GIB = 2**30
_ALL = "--sequence_parallel true --cross_entropy_loss_fusion true"
_FULL = "--recompute_granularity full --recompute_method uniform --recompute_num_layers 1"
_EXPERTS = "--moe_permute_fusion true --expert_model_parallel_size"
_ADAPTED = "--tuner_type lora --target_modules all-linear"
# of each example its devices, and what of its arguments memory depends on
ARGUMENTS: Mapping[str, tuple[int, str]] = {
    "base_to_chat": (
        8, "sft --model Qwen/Qwen2.5-14B --tensor_model_parallel_size 4 --packing true "
        "--recompute_granularity selective --max_length 8192"),
    "fp8_benchmark": (  # of which 16 bits are stated
        8, "sft --model Qwen/Qwen3-14B --tensor_model_parallel_size 4 --packing true "
        "--recompute_granularity selective --max_length 8192 --use_precision_aware_optimizer true "
        "--exp_avg_dtype bf16 --exp_avg_sq_dtype bf16"),
    "moe_deepseek_v3": (
        8, "sft --model moonshotai/Moonlight-16B-A3B-Instruct --pipeline_model_parallel_size 2 "
        f"--decoder_last_pipeline_num_layers 13 {_EXPERTS} 4 --packing true --max_length 8192 "
        f"{_FULL}"),
    "moe_qwen3_moe_offload": (
        4, f"sft --model Qwen/Qwen3-30B-A3B-Base {_EXPERTS} 4 --packing true --max_length 8192 "
        f"{_FULL} --optimizer_cpu_offload true --use_precision_aware_optimizer true "
        "--optimizer_offload_fraction 1"),
    "mcore_bridge_full_dense": (
        2, "sft --model Qwen/Qwen3-VL-8B-Instruct --tensor_model_parallel_size 2 --packing true "
        f"--global_batch_size 4 --max_length 2048 {_FULL}"),
    "sft": (
        2, "sft --model Qwen/Qwen2.5-7B-Instruct --tensor_model_parallel_size 2 "
        f"--micro_batch_size 16 --max_length 2048 {_FULL}"),
    "lora_mtp": (
        4, "sft --model ZhipuAI/GLM-4.5-Air --mtp_num_layers 1 --tuner_type lora --lora_rank 32 "
        f"--target_modules linear_qkv linear_proj --tensor_model_parallel_size 4 {_EXPERTS} 4 "
        f"--packing true --max_length 8192 {_FULL}"),
    "rlhf_rm_moe": (
        2, f"rlhf --rlhf_type rm --model Qwen/Qwen3-30B-A3B-Instruct-2507 {_ADAPTED} {_EXPERTS} 2 "
        f"--packing true --global_batch_size 4 --max_length 8192 {_FULL}"),
    "mcore_bridge_lora_seq_cls": (
        2, f"sft --model Qwen/Qwen3-VL-8B-Instruct {_ADAPTED} --tensor_model_parallel_size 2 "
        f"--packing true --global_batch_size 4 --max_length 2048 {_FULL} --task_type seq_cls"),
    "multimodal_omni_moe": (
        2, f"sft --model Qwen/Qwen3-Omni-30B-A3B-Instruct {_ADAPTED} {_EXPERTS} 2 --packing true "
        f"--global_batch_size 4 --max_length 4096 {_FULL}"),
    "lora_moe": (
        2, f"sft --model Qwen/Qwen3-30B-A3B {_ADAPTED} {_EXPERTS} 2 --micro_batch_size 8 "
        f"--max_length 2048 {_FULL}"),
    "lora_qwen3_235b": (
        8, f"sft --model Qwen/Qwen3-235B-A22B-Instruct-2507 {_ADAPTED} {_EXPERTS} 8 "
        f"--tensor_model_parallel_size 4 --micro_batch_size 8 --max_length 2048 {_FULL}"),
}  # fmt: skip


class Row(NamedTuple):
    """An example: GiB that it states, and those that are computed, by part."""

    name: str
    kind: str
    packed: bool
    stated: float
    memory: Mapping[str, float]

    @property
    def error(self) -> float:
        """What is computed over what is stated, less one."""
        return sum(self.memory.values()) / self.stated - 1


def read_rows() -> list[Row]:
    """All that are stated; those that train all weights of experts are a kind."""
    rows = []
    with STATED.open() as file:
        for name, kind, packed, stated, *_ in [*csv.reader(file)][1:]:
            devices, words = ARGUMENTS[name]
            images = {"images": "1024"} if "-VL-" in words else {}  # any number: it is frozen
            text = f"megatron {words} {_ALL}\n"
            job, _ = read_job("ms-swift", text, cluster_of(devices), images)
            work = training_for(job)
            memory = estimate(work, fill_layout(job, work), batch_of(job)).memory
            kind = "experts" if kind == "full" and work.model.experts else kind
            parts = {part: size / _GIB for part, size in memory.items()}
            rows.append(Row(name, kind, packed == "True", float(stated), parts))
    return rows


def main() -> None:
    """Print a line a row, and the mean of kinds."""
    rows = read_rows()
    for row in sorted(rows, key=lambda row: (not row.packed, row.kind)):
        unknown = "" if row.packed else ", not packed"
        sizes = f"{row.stated:3.0f} {sum(row.memory.values()):5.1f} {row.error:+6.1%}"
        print(f"{row.name:26} {sizes}  {row.kind}{unknown}")
        if "--parts" in sys.argv:
            parts = (f"{part} {size:.1f}" for part, size in row.memory.items() if size >= 0.05)
            print(f"    {', '.join(parts)}")
    packed = [row for row in rows if row.packed]
    for kind in dict.fromkeys(row.kind for row in packed):
        errors = [abs(row.error) for row in packed if row.kind == kind]
        print(f"{kind:8} {len(errors)} {statistics.mean(errors):5.1%}, worst {max(errors):.1%}")


if __name__ == "__main__":
    main()
