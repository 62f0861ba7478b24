"""No field of a transformer's plan can be changed unseen."""

import json
from functools import cache

import msgspec
import pytest

from partopt import documents, verify
from partopt.documents.engine import Layout
from partopt.documents.plan import Plan
from partopt.documents.topology import Topology
from partopt.documents.transformer import Calibration, MeasuredBlock
from partopt.errors import PartoptError
from partopt.importers.hugging_face import load_transformer
from partopt.job import Job
from partopt.search import verify as verifying
from partopt.search.judging import judge_layout, plan_layout
from partopt.search.solve import solve
from partopt.transformer.as_profile import find_profile
from tests.search.alterations import alterations
from tests.transformer.helpers import EXPERTS, LLAMA

pytestmark = pytest.mark.levers

BLOCK = MeasuredBlock(microbatch_size=1, forward_s=1e-3, backward_s=2e-3, kept_bytes=2 * 10**8)


DGX = Topology.load("dgx-h100")
PAIRS = msgspec.structs.replace(  # two servers of two devices
    DGX, devices=4, levels=[msgspec.structs.replace(level, size=2) for level in DGX.levels]
)


def asked(model=LLAMA, trainer="megatron", layout="", **options):
    return Job(
        model=model,
        topology=PAIRS,
        trainer=trainer,
        global_batch=16,
        sequence=2048,
        layout=Layout.parse(layout) if layout else Layout(),
        **{"facts": {}} | options,
    )


MEASURED = Calibration(name="block", sha256="0" * 64, blocks=[BLOCK])
KINDS = {
    "best": lambda: solve(asked(layout="pp=2", memory="9 GB")).plan,
    "over servers": lambda: plan_layout(asked(layout="tp=2,pp=2")),
    "of experts": lambda: solve(asked(EXPERTS, layout="ep=2", dtype="fp8")).plan,
    "of experts that leave room": lambda: (
        solve(asked(msgspec.structs.replace(load_transformer("qwen3-30b-a3b"), blocks=16))).plan
    ),
    "of shares": lambda: solve(asked(trainer="torchtitan", facts={"compile": "no"})).plan,
    "beside the best": lambda: (
        judge_layout(asked(layout="tp=2", facts={"sequence-parallel": "no", "bucket": 10**7})).plan
    ),
    "of one layout, measured": lambda: plan_layout(asked(layout="dp=4", calibrate={"": MEASURED})),
}
make = cache(lambda kind: KINDS[kind]())

# Fields that may say something else, and why nothing is wrong then.
UNCLAIMED = {
    "topology.name": "a label",
    "topology.levels.name": "a label",
    "topology.levels.link": "a label",
    "topology.group.levels.name": "a label",
    "topology.group.levels.link": "a label",
    "transformer.calibration.name": "a label",
    "transformer.calibration.sha256": "of a file that is not there",
    "transformer.model.numerics.epsilon": "of the model, which the plan takes as it is told",
    "topology.device.memory_bytes": "the same layouts fit",
    "topology.devices": "0 is what the levels have",
}
LINKS = {  # some of them hold nothing up, and then say nothing
    f"topology.{place}levels.{name}"
    for place in ("", "group.")
    for name in (
        *("bandwidth_bytes_per_s", "allreduce.bandwidth_bytes_per_s"),
        *("links", "latency_s", "bus"),
    )
}


def notices(document):
    """Whether an altered plan is refused, or a check of it fails."""
    try:
        plan = Plan.parse(json.dumps(document).encode())
        profile = find_profile(plan)
        with pytest.MonkeyPatch.context() as patched:  # the question takes longest
            patched.setattr(verifying, "_answer", lambda _: (True, "", []))
            if profile is None or not verify(plan, profile).verified:
                return True
        return not verify(plan, profile).verified
    except PartoptError:
        return True


@pytest.fixture
def each_question_once(monkeypatch):
    """Questions are answered once: most alterations are of what the answer says."""
    for ask in (solve, judge_layout, plan_layout):
        answers = {}

        def answer(job, *_, ask=ask, answers=answers, **progress):
            key = repr(job)
            if key not in answers:
                try:
                    answers[key] = ask(job)
                except PartoptError as error:
                    answers[key] = error
            if isinstance(answers[key], PartoptError):
                raise answers[key]
            return answers[key]

        monkeypatch.setattr(verifying, ask.__name__, answer)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("each_question_once")
def test_every_field_that_is_altered_is_noticed(kind):
    """Of a list the first and the last entry are altered, numbers by a thousandth or by one; every
    second kind alters every second field, the others the rest.
    """
    document, turn = json.loads(documents.encode(make(kind))), list(KINDS).index(kind) % 2
    every = list(alterations(document, [1.001]))[turn::2]
    if "experts" in kind:  # whose question takes seconds
        every = every[::16]
    passed = [which for which, altered in every if not notices(altered)]
    assert {which.name for which in passed} - LINKS <= UNCLAIMED.keys()


@pytest.mark.parametrize("level", [0, 1])
def test_a_link_that_holds_something_up_is_noticed(level):
    document = json.loads(documents.encode(KINDS["over servers"]()))
    document["topology"]["group"]["levels"][level]["bandwidth_bytes_per_s"] *= 1.001
    assert notices(document)


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_is_the_answer_to_its_question(kind):
    """Also where it was written and read again."""
    plan = Plan.parse(documents.encode(make(kind)))
    profile = find_profile(plan)
    found = verify(plan, profile)
    assert found.verified and found.checks[-1].check == "answer"
    assert found.checks[-1].text.endswith(" fields, the question asked again")
    assert plan.transformer.beside or kind in ("over servers", "of one layout, measured")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tried": 7}, "1 of"),
        ({"facts": {"bucket": 2 * 10**7}}, "fields differ, asked again"),
        ({"asked": Layout(tp=3)}, "the question has no answer: `layout=tp=3"),
        ({"facts": {"bucket": "x"}}, "the question has no answer: `bucket`: 'x'"),
    ],
)
def test_what_is_not_the_answer_is_told(change, message):
    plan = make("best")
    about = msgspec.structs.replace(plan.transformer, **change)
    altered = msgspec.structs.replace(plan, transformer=about)
    found = verify(altered, find_profile(plan))
    assert not found.verified and found.failed == ["answer"] and found.claim == ""
    assert message in found.checks[-1].text
