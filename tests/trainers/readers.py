"""Exports read back, by code that shares nothing with what wrote them.

Each reader gives the stages of an export as far as the trainer's terms go: what they hold, as
`tests.trainers.plans.contents` says it, or how many layers.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Callable
from typing import Any


def assigned(text: str, name: str) -> Any:
    """The value that a Python text assigns to `name`: literals, and `dict(...)` of them."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return _literal(node.value)
    raise KeyError(name)


def _literal(node: ast.expr) -> Any:
    if isinstance(node, ast.Call):
        return {keyword.arg: ast.literal_eval(keyword.value) for keyword in node.keywords}
    return ast.literal_eval(node)


def torch_stages(text: str) -> list[list[str]]:
    """The modules of torchtitan."""
    kinds = {"tok_embeddings": "embedding", "norm": "norm", "lm_head": "head"}
    return [
        [kinds.get(name) or name.removeprefix("layers.") for name in stage]
        for stage in assigned(text, "STAGES")
    ]


def megatron_stages(layout: str) -> list[list[str]]:
    """A layout of Megatron, whose `L` is the norm and the head."""
    blocks = iter(range(10**6))
    found = []
    whole = re.sub(r"\(([^)]*)\)\*([0-9]+)", lambda own: own[1] * int(own[2]), layout)
    for segment in whole.split("|"):
        stage: list[str] = []
        for letter, times in re.findall(r"([EtL])(?:\*([0-9]+))?", segment):
            for _ in range(int(times or 1)):
                words = {"E": ["embedding"], "L": ["norm", "head"]}
                stage += words.get(letter) or [str(next(blocks))]
        found.append(stage)
    return found


def layout_of_shell(text: str) -> str:
    """The layout among the arguments of Megatron-LM."""
    [layout] = re.findall(r"--pipeline-model-parallel-layout '([^']*)'", text)
    return str(layout)


def counted(counts: list[int]) -> list[list[str]]:
    """Stages of so many blocks each, the embedding before and the head behind them."""
    blocks = iter(range(sum(counts)))
    stages = [[str(next(blocks)) for _ in range(count)] for count in counts]
    stages[0].insert(0, "embedding")
    stages[-1] += ["norm", "head"]
    return stages


def partition(text: str) -> list[list[str]]:
    """The variable of vLLM or SGLang."""
    [counts] = re.findall(r"^export [A-Z_]+=([0-9,]+)$", text, re.MULTILINE)
    return counted([int(count) for count in counts.split(",")])


# what each stage holds
HOLDS: dict[str, Callable[[str], list[list[str]]]] = {
    "torchtitan": torch_stages,
    "megatron": lambda text: megatron_stages(layout_of_shell(text)),
    "megatron-bridge": lambda text: megatron_stages(
        assigned(text, "config.model.pipeline_model_parallel_layout")
    ),
    "colossalai": lambda text: counted(assigned(text, "ARGUMENTS")["num_layers_per_stage"]),
    "vllm": partition,
    "sglang": partition,
}


def differences(bounds: list[int]) -> list[int]:
    """How many layers lie between each two bounds."""
    return [after - before for before, after in itertools.pairwise(bounds)]


# how many layers each stage has
COUNTS: dict[str, Callable[[str], list[int]]] = {
    "deepspeed": lambda text: differences(assigned(text, "BOUNDS")),
    "torchgpipe": lambda text: assigned(text, "ARGUMENTS")["balance"],
}
