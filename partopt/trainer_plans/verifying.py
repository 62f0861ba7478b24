"""A plan verified; of a transformer it has to be the answer to its question, too."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from msgspec import structs

from partopt.cost.problem import Progress, ignore_progress
from partopt.documents.plan import Plan
from partopt.documents.profile import Profile
from partopt.documents.tables import Verification, VerificationRow
from partopt.documents.transformer import Modelled
from partopt.errors import PartoptError
from partopt.job import Job
from partopt.search import verify as search
from partopt.trainer_plans.judging import judge_layout, plan_layout
from partopt.trainer_plans.planning import solve
from partopt.transformer.rates import PLANNED


def verify(plan: Plan, profile: Profile, progress: Progress = ignore_progress) -> Verification:
    """Every check of `plan`, also where one fails.

    Those of `partopt.search.verify`; and of a transformer's plan that its question, asked again,
    has it as the answer, with all that stands beside it.
    """
    found = search.verify(plan, profile, progress)
    if not plan.transformer:
        return found
    began = time.perf_counter()
    passed, text, differences = _answer(plan, plan.transformer, progress)
    row = VerificationRow(
        check="answer",
        passed=passed,
        took_s=time.perf_counter() - began,
        text=text,
        differences=differences,
    )
    ok = found.verified and passed
    claim = found.claim if ok else ""
    return structs.replace(found, verified=ok, claim=claim, checks=[*found.checks, row])


def _answer(plan: Plan, about: Modelled, progress: Progress) -> tuple[bool, str, list[str]]:
    """Whether the plan is one of those that its question has, and else how it differs."""
    if not plan.trainer:
        return False, "the plan names no trainer", []
    limit = plan.memory_limit_bytes
    job = Job(
        about.model,
        plan.topology.cluster,
        trainer=plan.trainer,
        global_batch=plan.microbatch_size * (plan.microbatches or 1),
        sequence=about.sequence,
        dtype=about.format,
        layout=about.asked,
        facts=about.facts,
        calibrate={block.kind: block for block in about.calibration} or None,
    )
    memory = None if limit is None else limit + plan.reserve.size_bytes
    jobs = [job.with_(memory=memory)]
    if memory and about.model.experts:  # the plan does not say whether it had to leave room
        device = structs.replace(job.topology.device, memory_bytes=round(memory / PLANNED))
        jobs.insert(0, job.with_(topology=structs.replace(job.topology, device=device)))
    ways: list[Callable[[], Plan]] = []
    for asked in jobs:
        if not about.beside:
            ways.append(partial(plan_layout, asked))
        ways.append(partial(_solve, asked, progress))
        if about.beside:
            ways.append(partial(_judge, asked, progress))
    found, refused = list[tuple[int, list[str]]](), ""
    for way in ways:
        try:
            found.append(search.differences_of(plan, way()))
        except PartoptError as error:
            refused = error.message
            continue
        if not found[-1][1]:
            return True, f"{found[-1][0]} fields, the question asked again", []
    if not found:
        return False, f"the question has no answer: {refused}", []
    count, differences = min(found, key=lambda pair: len(pair[1]))
    return False, f"{len(differences)} of {count} fields differ, asked again", differences


def _solve(job: Job, progress: Progress) -> Plan:
    return solve(job, progress).plan


def _judge(job: Job, progress: Progress) -> Plan:
    return judge_layout(job, progress=progress).plan
