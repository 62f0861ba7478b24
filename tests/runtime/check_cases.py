"""Checks of plans for a GPT, of a right engine and of wrong ones, in one launch.

`python -m tests.runtime.check_cases FILE` writes what rank 0 found in each to FILE.
"""

from __future__ import annotations

import contextlib
import pickle
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch.distributed as dist

from partopt import Job, solve
from partopt.documents.plan import Plan
from partopt.documents.profile import Profile
from partopt.documents.training_run import Check
from partopt.profiler import measure_source
from partopt.profiler.source import find_model
from partopt.runtime.check import check_first
from partopt.runtime.context import Context
from partopt.runtime.processes import run_local
from partopt.runtime.training import PlannedTraining
from partopt.runtime.updates import Sum
from partopt.runtime.versions import Versions
from tests.helpers import flat

RANKS = 3
MICROBATCHES = 13  # a last round is not whole, whatever the replicas are

MODEL = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.query, self.key, self.out = (nn.Linear(width, width) for _ in range(3))
        nn.init.zeros_(self.key.bias)  # whose gradient is nothing but rounding

    def forward(self, x):
        y = self.norm(x)
        mixed = nn.functional.scaled_dot_product_attention(
            self.query(y), self.key(y), y, None, 0.2, is_causal=True)
        return x + nn.functional.dropout(nn.functional.gelu(self.out(mixed)), p=0.1)


class GPT(nn.Module):
    def __init__(self, tied):
        super().__init__()
        self.tokens = nn.Embedding(19, 8)
        self.blocks = nn.ModuleList(Block(8) for _ in range(2))
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(8, 19, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids):
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.drop(x))


def build(tied=False):
    return GPT(tied)


def example_inputs(size):
    return torch.randint(19, (size, 6))


def loss_fn(output, inputs):
    return nn.functional.cross_entropy(output[:, :-1].flatten(0, 1), inputs[:, 1:].flatten())


def optimizer(parameters):
    return torch.optim.AdamW(parameters)
"""


class Case(NamedTuple):
    """A plan, and what is wrong with the engine that runs it."""

    replicas: list[int]
    schedule: str = "pipedream"
    allreduce: str = "overlap"
    recompute: str = "never"
    tied: bool = False
    shard: str = "none"
    fault: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext


RIGHT = {
    "a pipeline that recomputes": Case([1, 1, 1], recompute="always"),
    "replicas that share": Case([2, 1], shard="optimizer"),
    "an exchange that blocks": Case([1, 2], allreduce="blocking"),
    "2BW": Case([1, 2], "pipedream-2bw"),
    "2BW of replicas that share": Case([2, 1], "pipedream-2bw", shard="optimizer"),
    "a flush": Case([2, 1], "1f1b"),
    "a flush of replicas that share": Case([2, 1], "1f1b", tied=True, shard="optimizer"),
}


def on_rank(rank: int, owner: type, name: str, wrong: Callable[..., Any]) -> Callable[[], Any]:
    """A fault: on that rank `wrong(right, *arguments)` runs in the place of the right method."""
    right = getattr(owner, name)

    def run(*arguments: Any) -> Any:
        return wrong(right, *arguments) if dist.get_rank() == rank else right(*arguments)

    return lambda: mock.patch.object(owner, name, run)


def forgets_last(right: Any, own: Versions, number: int) -> None:
    """The last round is not stepped by."""
    if number == MICROBATCHES - 1:
        own._drop_gradients()
    else:
        right(own, number)


def off(right: Any, own: Sum) -> None:
    """What the replicas add up is a hundredth more in one parameter."""
    right(own)
    own.buckets[0][-1].grad.mul_(1.01)


WRONG = {
    "a missing update": Case([1, 1, 1], fault=on_rank(1, Versions, "end_round", forgets_last)),
    "a sum that is off": Case([2, 1], fault=on_rank(1, Sum, "finish", off)),
    **{
        f"of a flush, on rank {rank}": Case([2, 1], "1f1b", fault=on_rank(rank, Sum, "finish", off))
        for rank in range(2)
    },
}
CASES = RIGHT | WRONG


class Main(NamedTuple):
    """What every process runs: the plans of the cases, for the model of this file."""

    plans: dict[str, Plan]
    model: str

    def __call__(self, context: Context) -> dict[str, Check | None]:
        """What each check came to, on rank 0."""
        found = {}
        for name, plan in self.plans.items():
            source = find_model(self.model, {"tied": CASES[name].tied})
            asked = PlannedTraining(plan, source, plan.microbatches or MICROBATCHES)
            with CASES[name].fault():
                found[name] = check_first(asked, context, context.device)
        return found


def plan_of(case: Case, profile: Profile) -> Plan:
    options = case._asdict() | {"cuts": [2, 3][: len(case.replicas) - 1]}
    options = {key: each for key, each in options.items() if key not in ("fault", "tied")}
    options["facts"] = {"allreduce": options.pop("allreduce")}
    microbatches = 8 if case.schedule == "1f1b" else None
    return solve(Job(profile, flat(sum(case.replicas)), microbatches=microbatches, **options)).plan


def main() -> dict[str, Check]:
    """What each check came to."""
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model.py"
        model.write_text(MODEL)
        options = {"microbatch_sizes": [2], "steps": 1, "granularity": "block"}
        profiles = {
            tied: measure_source(str(model), arguments={"tied": tied}, **options)
            for tied in (False, True)
        }
        plans = {name: plan_of(case, profiles[case.tied]) for name, case in CASES.items()}
        return run_local(RANKS, Main(plans, str(model)))[0]


if __name__ == "__main__":
    from tests.runtime import check_cases as cases_  # under the name by which it is unpickled

    Path(sys.argv[1]).write_bytes(pickle.dumps(cases_.main()))
