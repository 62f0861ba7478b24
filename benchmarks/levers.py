"""The switches that a page says are the best, against all combinations of switches.

    python benchmarks/levers.py [--trainer megatron] [QUESTION ...]

Every combination is searched for its best layout in closed form, shares in halves. A line a
question: the defaults, the best of all combinations, what the page's best together takes, what it
loses, and the seconds that both searches took.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

# a checkout in which nothing is installed
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from partopt.documents.topology import Topology
from partopt.errors import PartoptError
from partopt.importers.hugging_face import load_transformer
from partopt.job import Job
from partopt.search.layout_questions import estimate_layouts
from partopt.search.levers import take_best

# cluster, servers, batch, sequence
QUESTIONS = {
    "llama3-8b": ("dgx-h100", 1, 128, 8192),
    "llama3-70b": ("dgx-h100", 4, 512, 8192),
    "qwen3-32b": ("dgx-h100", 8, 512, 4096),
    "gpt3-175b": ("dgx-a100", 128, 1536, 2048),
    "llama3-405b": ("dgx-h100", 64, 768, 8192),
    "llama3-405b/1024": ("dgx-h100", 128, 1536, 8192),
}
SWITCHES = {
    "megatron": {
        "gradients": ("float32", "parameters"),
        "tp-overlap": ("no", "yes"),
        "sequence-parallel": ("yes", "no"),
        "loss": ("plain", "fused"),
        "ends": ("fewer", "free"),
        "optimizer_bytes": ("12", "8"),
        "optimizer-offload": ("0", "0.5", "1"),
        "offload-overlap": ("yes",),
        "fsdp": ("no", "yes"),
        "offload": ("no", "all"),
        "dtype": ("bfloat16", "fp8"),
    },
    "torchtitan": {
        "compile": ("no", "yes"),
        "async-tp": ("no", "yes"),
        "dtype": ("bfloat16", "fp8"),
    },
}
SWITCHES["megatron-bridge"] = SWITCHES["megatron"]


def job_of(question: str, trainer: str) -> Job:
    """The job of a question, which leaves all switches open."""
    cluster, servers, batch, sequence = QUESTIONS[question]
    model, topology = load_transformer(question.partition("/")[0]), Topology.load(cluster, servers)
    return Job(model, topology, trainer=trainer, global_batch=batch, sequence=sequence)


def combinations(switches: Mapping[str, Sequence[str]]) -> Iterator[dict[str, str]]:
    """Every combination of switches."""
    for values in itertools.product(*switches.values()):
        yield dict(zip(switches, values, strict=True))


def best_of_all(
    job: Job, switches: Mapping[str, Sequence[str]] | None = None
) -> tuple[float, dict[str, str]]:
    """Seconds of the fastest layout with any combination of switches, and which that is."""
    best: tuple[float, dict[str, str]] = (float("inf"), {})
    for facts in combinations(switches or SWITCHES[job.trainer]):
        try:
            found = estimate_layouts(job.with_(facts=facts))
        except PartoptError:  # facts that contradict each other
            continue
        if found.fitting and found.fitting[0].seconds < best[0]:
            best = found.fitting[0].seconds, facts
    return best


def best_of_page(job: Job, numbers: bool = True) -> float:
    """Seconds with the switches that a page says are the best together.

    Without `numbers` those are left out that change what training computes.
    """
    found = estimate_layouts(take_best(job, numbers)).fitting
    return found[0].seconds if found else float("inf")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("questions", nargs="*", help=", ".join(QUESTIONS))
    parser.add_argument("--trainer", choices=list(SWITCHES), default="megatron")
    given = parser.parse_args()
    for question in given.questions or QUESTIONS:
        job = job_of(question, given.trainer)
        usual = estimate_layouts(job).fitting[0].seconds
        began = time.process_time()
        page_s = best_of_page(job)
        between = time.process_time()
        all_s, facts = best_of_all(job)
        took = between - began, time.process_time() - between
        said = ", ".join(f"{name}={value}" for name, value in facts.items())
        print(
            f"{question:18} {usual:7.2f} -> {all_s:7.2f} s, page {page_s:7.2f} s, loses "
            f"{page_s / all_s - 1:6.3%}; {took[0]:.1f} against {took[1]:.0f} s; {said}",
            flush=True,
        )


if __name__ == "__main__":
    main()
