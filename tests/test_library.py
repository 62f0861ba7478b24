"""The public library: what is in it, what it costs to import, and who uses nothing else."""

import subprocess
import sys

import pytest

import partopt
from tests.helpers import ROOT, flat, uniform_profile
from tests.test_architecture import imported

CLI = sorted((ROOT / "partopt/cli").rglob("*.py"))
EXAMPLES = sorted((ROOT / "examples").rglob("*.py"))
# Beside the names of `partopt` itself: documents as data, how they are read and rendered, and the
# options of a job, from which the flags are made.
PUBLIC = tuple(
    f"partopt.{part}"
    for part in ("cli", "documents", "errors", "options", "printable", "report", "units")
)


def is_public(name):
    return name.startswith(PUBLIC) or name.removeprefix("partopt.") in partopt.__all__


def test_the_command_line_and_the_examples_use_the_public_library_alone():
    for path in (*CLI, *EXAMPLES):
        names = {name for name in imported(path) if name.split(".")[0] == "partopt"} - {"partopt"}
        assert [name for name in sorted(names) if not is_public(name)] == [], path


@pytest.mark.slow
def test_every_public_name_is_there_and_described():
    for name in partopt.__all__:
        assert getattr(partopt, name) is not None
    assert set(partopt.__all__) <= set(dir(partopt))
    with pytest.raises(AttributeError, match="no attribute 'plan_it'"):
        partopt.plan_it  # noqa: B018


def test_importing_is_quick_and_imports_nothing_heavy():
    heavy = ["torch", "numba", "numpy", "matplotlib", "networkx", "rich", "yaml"]
    script = f"import sys, partopt; print([n for n in {heavy} if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


def test_a_result_holds_the_plan_the_others_and_what_to_know():
    job = partopt.Job(uniform_profile(6), flat(4, 10e9, memory_bytes=10**9), planner="optimal")
    result = partopt.solve(job)
    assert result.plan.planner == "optimal"
    assert result.certificate is result.plan.certificate
    assert {plan.planner for plan in result.alternatives} == {"gpipe", "data_parallel"}
    assert result.fits
    name, speed, beside = repr(result).splitlines()
    assert f"on 4 devices of {job.topology.name}: {result.plan.shape}, pipedream" in name
    assert f"{result.plan.predicted.samples_per_s:.1f}"[:3] in speed and speed.endswith(": fits")
    assert beside.strip() == "2 alternatives, 0 notes"


@pytest.mark.slow
def test_the_alternatives_of_a_transformer_are_other_layouts():
    job = partopt.Job(
        partopt.find_transformer("llama3-8b"),
        partopt.Topology.load("dgx-h100", servers=1),
        trainer="megatron",
        global_batch=64,
        sequence=4096,
    )
    result = partopt.solve(job)
    plans = [result.plan, *result.alternatives]
    assert len({plan.layout for plan in plans}) == len(plans) > 3
    times = [plan.predicted.iteration_s for plan in plans if plan.fits]
    assert times == sorted(times)
    assert "llama3-8b on 8 devices of dgx-h100: " in repr(result).splitlines()[0]


def test_what_does_not_fit_is_told_what_would():
    job = partopt.Job(uniform_profile(6), flat(1), memory="20 MB")
    result = partopt.solve(job)
    assert not result.fits
    fitting = partopt.find_fitting(job)
    changed = partopt.solve(job.with_(**fitting.options))
    assert changed.fits
    assert changed.plan.predicted.samples_per_s == pytest.approx(fitting.samples_per_s)


def test_progress_is_told_of_long_work():
    told = []
    job = partopt.Job(uniform_profile(6), flat(4))
    partopt.solve(job, lambda what, done, total: told.append(what))
    assert "simulating gpipe" in told


def test_ranks_that_are_not_there_or_left_idle():
    job = partopt.Job(uniform_profile(6), flat(4), cuts=[3], replicas=[1, 1])
    plan = partopt.solve(job).plan
    assert plan.stages_of(3) == []
    for rank, code in ((-1, "unknown-rank"), (4, "unknown-rank"), (3, "idle-rank")):
        with pytest.raises(partopt.PartoptError) as raised:
            plan.stage_of(rank)
        assert (raised.value.code, raised.value.fields) == (code, {"rank": rank})


def test_stages_of_a_rank_under_a_schedule_with_several():
    job = partopt.Job(uniform_profile(8), flat(2), schedule="interleaved", microbatches=4)
    plan = partopt.solve(job.with_(planner="gpipe")).plan
    held = plan.stages_of(1)
    assert [plan.stages.index(stage) for stage in held] == [1, 3]
    assert plan.stage_of(1) == held[0]
    assert plan.stage_of(1, chunk=1) == held[1]
    with pytest.raises(partopt.PartoptError, match="rank 1 holds 2 stages, none of number 2"):
        plan.stage_of(1, chunk=2)


@pytest.mark.slow
def test_a_simulation_is_saved_by_its_extension(tmp_path):
    job = partopt.Job(uniform_profile(6), flat(4), cuts=[3], replicas=[2, 2])
    plan = partopt.solve(job).plan
    first, second = (partopt.simulate(plan, microbatches=M) for M in (8, 6))
    begins = {"json": b'{"', "csv": b"0F0,0F1", "svg": b"<?xml", "pdf": b"%PDF", "png": b"\x89PNG"}
    for ending, begin in begins.items():
        path = tmp_path / f"trace.{ending}"
        first.save(str(path))
        written = path.read_bytes()
        assert written.startswith(begin)
        with pytest.raises(partopt.PartoptError, match="already exists"):
            second.save(str(path))
        assert path.read_bytes() == written
        second.save(str(path), force=True)
        assert path.read_bytes() != written
    assert first.form_of("-") == ".json"
    with pytest.raises(partopt.PartoptError, match="unsupported format") as raised:
        first.save(str(tmp_path / "trace.txt"))
    assert raised.value.code == "unsupported-format"


def test_conditions_that_cannot_be():
    plan = partopt.solve(partopt.Job(uniform_profile(6), flat(4))).plan
    for conditions, code, option in (
        ({"bandwidth": {"all": 0}}, "invalid-option", None),
        ({"bandwidth": {"rack": "1 GB/s"}}, "unknown-level", "bandwidth"),
        ({"latency": {"all": -1}}, "invalid-option", None),
        ({"links": {"all": 0}}, "invalid-option", None),
        ({"microbatches": 0}, "invalid-option", "microbatches"),
        ({"facts": {"waits": "sometimes"}}, "invalid-option", "waits"),
        ({"facts": {"messages": "split"}}, "invalid-option", "messages"),
        ({"warmup": "3"}, "invalid-option", "warmup"),
        ({"warmup": [1.5]}, "invalid-option", "warmup"),
        ({"memory": 0}, "invalid-option", "memory"),
        ({"schedule": "1f2b"}, "unknown-schedule", None),
    ):
        with pytest.raises(partopt.PartoptError) as raised:
            partopt.simulate(plan, **conditions)
        assert (raised.value.code, raised.value.fields.get("option")) == (code, option)
