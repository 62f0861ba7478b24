"""What each heuristic of the search is worth: the plans that are found without it.

    python benchmarks/heuristics.py [NAME ...]

Every heuristic is left out, one at a time, of the questions whose answers the tests record and of
the draws of `benchmarks/planners.py`. Loss is of samples/s against the whole search: in the mean,
and at worst. A heuristic stays where leaving it out costs 0.1 % in the mean, or 1 % once.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from planners import draws  # noqa: E402

from partopt import cli, solve  # noqa: E402
from partopt.documents.plan import Plan  # noqa: E402
from partopt.job import Job  # noqa: E402
from partopt.planners import grids, optimal  # noqa: E402
from partopt.search import cuts, effort, evaluator, improve, steps  # noqa: E402
from partopt.search.variants import Variant  # noqa: E402
from tests.search.test_recorded import CASES  # noqa: E402

Patch = tuple[Any, str, Any]  # an object, the name of a part of it, and what replaces it


def _with_params(change: Callable[[effort.SearchParams], effort.SearchParams]) -> list[Patch]:
    """Every effort with other parameters."""
    found: dict[str, effort.SearchParams] = {}
    before = None
    for name, params in effort.BY_EFFORT.items():
        before = found[name] = replace(change(params), before=before)
    return [(effort, "BY_EFFORT", found)]


def _anneal(change: Callable[[effort.LocalParams], effort.LocalParams]) -> list[Patch]:
    """Every effort with other parameters of its local searches."""
    return _with_params(
        lambda params: replace(params, plans=change(params.plans), grids=change(params.grids))
    )


def _climb(params: effort.LocalParams) -> effort.LocalParams:
    """No step leads up."""
    return replace(params, annealing=replace(params.annealing, hot=1e-12, cold=1e-12))


def _without(*kinds: str) -> list[Patch]:
    return [(steps, "KINDS", tuple(kind for kind in steps.KINDS if kind not in kinds))]


HEURISTICS: dict[str, list[Patch]] = {
    "nothing": [],
    "annealing": _anneal(lambda params: replace(params, rounds=())),
    "steps up": _anneal(_climb),
    "several rounds": _anneal(lambda params: replace(params, rounds=(4,))),
    "plans of others": [(improve.Improvement, "_shapes_of", lambda self, others: ())],
    "equal pipelines": _with_params(lambda params: replace(params, equal=0)),
    "fewer servers": [(Variant, "fewer", [])],
    "several warm-ups": [(evaluator.PlanEvaluator, "warmup_rules", range(1))],
    "recut of steps": [(steps, "RECUT", 0.0)],
    "recut": [(optimal, "recut", lambda *_: None), (steps, "RECUT", 0.0)],
    "swap": _without("swap"),
    "split, merge": _without("split", "merge"),
    "two steps": [(steps, "TWICE", 0.0)],
    "nudge": [(steps, "NUDGED", 0.0)],
    "several cuts": [(cuts, "SEVERAL", 0.0)],
    "one more cut": [(cuts, "ONE_MORE", 0.0)],
    "balance": [(grids.GridPlan, "balanced", lambda self: self)],
    "every way to cut": [(grids, "EVERY", 0)],
}


def main(names: list[str]) -> None:
    """Print what is lost without the heuristics of these names, by default without any of them."""
    rates: dict[str, dict[str, float]] = {}
    print(f"{'without':18}{'mean':>9}{'worst':>9}{'seconds':>9}  where")
    for name in ["nothing", *(names or [name for name in HEURISTICS if name != "nothing"])]:
        begun = time.process_time()
        with contextlib.ExitStack() as stack:
            for part in HEURISTICS[name]:
                stack.enter_context(patch.object(*part))
            rates[name] = dict(answers())
        seconds, whole = time.process_time() - begun, rates["nothing"]
        losses = {key: rates[name][key] / rate - 1 for key, rate in whole.items() if rate}
        worst = min(losses, key=lambda key: losses[key])
        mean = sum(losses.values()) / len(losses)
        print(f"{name:18}{mean:9.3%}{losses[worst]:9.3%}{seconds:9.1f}  {worst}", flush=True)


def answers() -> Iterator[tuple[str, float]]:
    """Every question with the samples/s of its plan; 0 where none fits."""
    os.chdir(ROOT)  # where the paths of the arguments begin
    recorded = map(json.loads, (ROOT / "tests/golden/plans.jsonl").read_text().splitlines())
    commands = [line["arguments"] for line in recorded if "--planner" not in line["arguments"]]
    for words in [*commands, *draws()]:
        yield " ".join(words), _command_rate(words)
    for name, (profile, topology, options) in CASES.items():
        plan = solve(Job(profile, topology, **{"effort": "quick"} | options)).plan
        yield name, plan.predicted.samples_per_s if plan.fits else 0.0


def _command_rate(words: list[str]) -> float:
    """Samples/s of the plan of a command line."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        path = Path(folder) / "plan.json"
        with contextlib.redirect_stderr(io.StringIO()), contextlib.suppress(SystemExit):
            cli.main(["plan", *words, "-o", str(path)])
        plan = Plan.load(path) if path.exists() else None
    return plan.predicted.samples_per_s if plan and plan.fits else 0.0


if __name__ == "__main__":
    main(sys.argv[1:])
