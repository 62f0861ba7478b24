"""A plan verified from the plan and its profile alone.

What is checked are its numbers, what was requested, and the bound of its certificate; and that the
question of a transformer, asked again, has the plan as its answer.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import msgspec
from msgspec import structs

from partopt.cost.memory import reserve_of
from partopt.cost.problem import Partition, Progress, ignore_progress
from partopt.documents.plan import Certificate, Plan, proof_of
from partopt.documents.profile import Profile
from partopt.documents.stage import Reserve
from partopt.documents.tables import Verification, VerificationRow
from partopt.errors import PartoptError
from partopt.job import Job
from partopt.planners import PLANNERS, required_features
from partopt.search.bound import proved_s
from partopt.search.contest import OPTIONS
from partopt.search.judging import judge_layout, plan_layout
from partopt.search.ranking import SEARCHED
from partopt.search.replanning import UNPROVED, Recomputation
from partopt.search.solve import solve
from partopt.trainers import TRAINERS
from partopt.transformer.rates import PLANNED
from partopt.units import format_bytes, format_seconds

SAME = 1e-9  # relative: times that differ by less are equal
# what `grid` looks at, as of a planner
_GRID_USES = frozenset({"stages", "uniform", "none", "auto"})
_NOISE = 1e-15  # seconds, or of 1: what is left of a difference of equal numbers


def verify(plan: Plan, profile: Profile, progress: Progress = ignore_progress) -> Verification:
    """Every check of `plan`, also where one fails.

    The checks: `profile` is the plan's, and its numbers, memory, request and certificate are
    right. The plan is computed again from what it records. Of a transformer it is the answer to its
    question, with all that stands beside it.
    """
    again, checks, asked = Recomputation(plan, profile, progress), [], _CHECKS
    if plan.transformer:
        asked = asked | {"answer": _answer}
    for name, check in asked.items():
        began = time.perf_counter()
        try:
            passed, text, differences = check(again)
        except PartoptError as error:
            passed, text, differences = False, f"cannot be recomputed: {error.message}", []
        checks.append(
            VerificationRow(
                check=name,
                passed=passed,
                took_s=time.perf_counter() - began,
                text=text,
                differences=differences,
            )
        )
    ok = all(row.passed for row in checks)
    computed = not (plan.transformer and plan.transformer.calibration)
    return Verification(
        estimated=plan.profile.estimated if computed else None,
        verified=ok,
        claim=claim(plan) if ok else "",
        checks=checks,
    )


def claim(plan: Plan) -> str:
    """What is known of a plan whose checks all hold."""
    proof = proof_of(plan)
    if proof is None:
        return f"the plan is as it says; {plan.planner} proves no bound"
    return proof.claim


_Found = tuple[bool, str, list[str]]


def _profile(again: Recomputation) -> _Found:
    recorded, found = again.plan.profile.sha256, again.profile.sha256()
    if recorded == found:
        return True, f"{again.plan.profile.name}, sha256 {found[:12]}..", []
    differs = _differs("sha256", f"{recorded[:12]}..", f"{found[:12]}..")
    return False, "the plan was made from another profile", [differs]


def differences_of(recorded: Plan, found: Plan, given: Sequence[str] = ()) -> tuple[int, list[str]]:
    """How many fields two plans have, and those that differ; paths that begin as `given` do not."""
    pairs = [dict(_leaves(msgspec.to_builtins(plan))) for plan in (recorded, found)]
    paths = [path for path in pairs[0] | pairs[1] if not path.startswith((".schema", *given))]
    return len(paths), [
        _differs(path[1:], *pair)
        for path in paths
        if not _same(*(pair := (pairs[0].get(path), pairs[1].get(path))))
    ]


def _numbers(again: Recomputation) -> _Found:
    """Of a transformer what was found beside the layout is of its question."""
    names = ["beside", "left_out", "tried", "by_count_s"]
    names += ["levers", "together", "challenger", "tie", "fits_chance"]
    beside = (f".transformer.{name}" for name in names)
    given = (".certificate", ".runners_up", *beside)
    count, differences = differences_of(again.plan, again.simulated, given)
    differences += _differences_of_runners_up(again.plan)
    if differences:
        text = f"{len(differences)} of {count} fields differ, priced and simulated again"
        return False, text, differences
    but = ", but not those of runners-up" if again.plan.runners_up else ""
    return True, f"{count} fields, priced and simulated again{but}", []


def _differences_of_runners_up(plan: Plan) -> Iterator[str]:
    """What runners-up say of themselves that does not follow from the rest that they say."""
    limit = plan.memory_limit_bytes
    for n, row in enumerate(plan.runners_up or []):
        found = {
            "samples_per_s": row.microbatch_size / row.period_s,
            "fits": limit is None or row.peak_memory_bytes <= limit,
        }
        for name, value in found.items():
            if not _same(recorded := getattr(row, name), value):
                yield _differs(f"runners_up[{n}].{name}", recorded, value)


def _memory(again: Recomputation) -> _Found:
    limit, peak = again.problem.memory_bytes, again.simulated.peak_memory_bytes
    recorded, reserve = again.plan.reserve, ""
    if recorded.basis != "computed":
        found = Reserve()
        if recorded.basis in ("assumed", "measured"):
            found = reserve_of(again.profile, (limit or 0) + recorded.size_bytes)
        elif recorded.basis == "given" and limit is not None:
            given = again.plan.engine.reserve_bytes
            found = Reserve() if given is None else Reserve(size_bytes=given, basis="given")
        if found != recorded:
            sizes = (format_bytes(reserved.size_bytes) for reserved in (recorded, found))
            return False, "{} reserved, {} found".format(*sizes), []
    if recorded.size_bytes:
        reserve = f", {format_bytes(recorded.size_bytes)} reserved"
    if limit is None:
        return True, f"{format_bytes(peak)} on the fullest device; no limit is known", []
    text = f"{format_bytes(peak)} of {format_bytes(limit)} on the fullest device{reserve}"
    return peak <= limit, text, []


def _request(again: Recomputation) -> _Found:
    plan, request = again.plan, again.plan.request
    features = PLANNERS[plan.planner].uses if plan.planner in PLANNERS else _GRID_USES
    broken = list(plan.find_deviations(fewer="fewer" in features))
    broken += [
        f"{OPTIONS[feature]} requested, which the planner {plan.planner} does not look at"
        for feature in sorted(required_features(again.problem) - features)
    ]
    parted = [
        f"{' and '.join(group.names)} parted at layer {stage.start}, which are to stay together"
        for stage in plan.stages
        if (group := again.problem.tied_group_across(stage.start)) is not None
    ]
    broken += parted
    if request.any_shard and plan.planner not in SEARCHED:
        broken.append(f"any shares requested, which the planner {plan.planner} does not look at")
    trainer = TRAINERS.get(plan.trainer)
    if trainer is None:
        broken.append(f"no trainer is called {plan.trainer}")
    elif trainer.schedules is not None and plan.schedule not in trainer.schedules:
        broken.append(f"{plan.trainer} runs {', '.join(trainer.schedules)}, not {plan.schedule}")
    stages = "any number of stages" if request.stages is None else f"{request.stages} stages"
    cuts = "" if request.cut_at is None else f", beginning with {len(request.cut_at)} layers"
    kept = f"{stages}{cuts}, replication {request.replication}, recompute {request.recompute}"
    return not broken, "; ".join(broken) or kept, []


def _objective(again: Recomputation) -> _Found:
    certificate, found = again.plan.certificate, again.objective_s
    if certificate is None or found is None:
        return _nothing(certificate, found, again.plan.planner)
    if _same(certificate.objective_s, found):
        return True, f"{format_seconds(found)}, computed again", []
    differs = _differs("certificate.objective_s", certificate.objective_s, found)
    return False, "another objective is found", [differs]


def _nothing(certificate: Certificate | None, objective_s: float | None, planner: str) -> _Found:
    """Where there is no certificate, or the planner gives none."""
    if certificate is not None:
        return False, f"the planner {planner} proves nothing, and the plan has a certificate", []
    missing = objective_s is not None
    return not missing, "the certificate is missing" if missing else "nothing to prove", []


def _bound(again: Recomputation) -> _Found:
    """Check the bound.

    That of `optimal` is computed again; of the other planners, which are quick, the decision must
    come out the same again.
    """
    plan, certificate = again.plan, again.plan.certificate
    if plan.planner == "optimal" and certificate is not None:
        lower_s = proved_s(again.problem) * (plan.microbatches or 1)
        if certificate.lower_bound_s > lower_s * (1 + SAME):
            differs = _differs("certificate.lower_bound_s", certificate.lower_bound_s, lower_s)
            return False, "another bound is found", [differs]
        return True, f"{format_seconds(certificate.lower_bound_s)}, computed again", []
    if plan.planner in UNPROVED or plan.planner == "optimal":
        return _nothing(certificate, again.objective_s, plan.planner)
    recorded, found = (
        _stages_of(partition) for partition in (again.partition, again.decision.partition)
    )
    if recorded != found:
        return False, f"{plan.planner} decides differently", [_differs("stages", recorded, found)]
    proved = again.decision.certificate
    lower = proved.lower_bound_s if proved else None
    if certificate is not None and not _same(certificate.lower_bound_s, lower):
        differs = _differs("certificate.lower_bound_s", certificate.lower_bound_s, lower)
        return False, "another bound is found", [differs]
    return True, f"{plan.planner} decides the same again", []


def _status(again: Recomputation) -> _Found:
    certificate = again.plan.certificate
    if certificate is None:
        return _nothing(certificate, again.objective_s, again.plan.planner)
    objective, lower = certificate.objective_s, certificate.lower_bound_s
    proved = again.certificate
    if proved is None:
        return False, "nothing is proved of this plan, and it has a certificate", []
    found = {name: getattr(proved, name) for name in ("gap", "status", "scope", "proof")}
    pairs = {name: (getattr(certificate, name), value) for name, value in found.items()}
    differences = [
        _differs(f"certificate.{name}", *pair) for name, pair in pairs.items() if not _same(*pair)
    ]
    if lower > objective:
        differences.append(
            f"certificate.lower_bound_s: {lower!r} is above the objective, {objective!r}"
        )
    return not differences, certificate.status, differences


def _answer(again: Recomputation) -> _Found:
    """Whether a transformer's plan is one of those that its question has, and how it differs."""
    plan, about, progress = again.plan, again.plan.transformer, again.progress
    assert about
    if not plan.trainer:
        return False, "the plan names no trainer", []
    limit = plan.memory_limit_bytes
    job = Job(
        about.model,
        plan.topology.cluster,
        trainer=plan.trainer,
        global_batch=plan.microbatch_size * (plan.microbatches or 1),
        sequence=about.sequence,
        layout=about.asked,
        facts=about.facts,
        calibrate={block.kind: block for block in about.calibration} or None,
    )
    memory = None if limit is None else limit + plan.reserve.size_bytes
    jobs = [job.with_(memory=memory)]
    if memory and about.model.experts:  # the plan does not say whether it had to leave room
        device = structs.replace(job.topology.device, memory_bytes=round(memory / PLANNED))
        jobs.insert(0, job.with_(topology=structs.replace(job.topology, device=device)))
    if about.facts.get("graphs") == "none":  # nor whether these were asked for, or given up
        facts = {name: value for name, value in about.facts.items() if name != "graphs"}
        jobs = [*(asked.with_(facts=facts) for asked in jobs), *jobs]
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
            found.append(differences_of(plan, way()))
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


_CHECKS: dict[str, Callable[[Recomputation], _Found]] = {
    "profile": _profile,
    "numbers": _numbers,
    "memory": _memory,
    "request": _request,
    "objective": _objective,
    "bound": _bound,
    "status": _status,
}


def _stages_of(partition: Partition) -> tuple[str, list[tuple[int, int, list[int]]]]:
    return partition.family, [
        (stage.start, stage.stop, list(stage.ranks)) for stage in partition.stages
    ]


def _leaves(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The values in a document by their paths, such as `.stages[0].start`; an empty list is one."""
    if isinstance(node, dict):
        for key, value in node.items():
            yield from _leaves(value, f"{path}.{key}")
    elif isinstance(node, list) and node:
        for index, value in enumerate(node):
            yield from _leaves(value, f"{path}[{index}]")
    else:
        yield path, node


def _same(recorded: Any, found: Any) -> bool:
    """Whether two values are equal: whole numbers and texts exactly, times to `SAME`."""
    if isinstance(recorded, float) and isinstance(found, float):
        return math.isclose(recorded, found, rel_tol=SAME, abs_tol=_NOISE)
    return bool(recorded == found)


def _differs(field: str, recorded: Any, found: Any) -> str:
    return f"{field}: {recorded!r} recorded, {found!r} found"
