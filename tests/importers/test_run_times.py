"""Times of a run put into a profile: stages add up to what they took, and the loop closes."""

import msgspec
import pytest
from msgspec.structs import replace

from partopt import Job, import_run, solve
from partopt.documents.actions import B, F, I, U, W
from partopt.documents.training_run import Run, StageSeconds
from partopt.errors import PartoptError
from partopt.importers.times import spread
from partopt.schedules import schedule
from partopt.simulator.runs import work_of
from tests.helpers import flat, measurement, profile_of

ONTO = profile_of(
    [
        measurement([1.0, 3.0, 2.0, 0.0], [2.0, 4.0, 4.0, 0.0], [8] * 4, microbatch_size=2),
        measurement([2.0] * 4, microbatch_size=4),
    ],
    [4, 8, 8, 0],
)
STEPPING = replace(
    ONTO, measurements=[replace(each, optimizer_s=0.25) for each in ONTO.measurements]
)
# what each stage of two layers takes, as the simulator has it: a backward without the forward
TAKEN = [(0.5, 1.5, 0.25, 0.1), (0.125, 0.75, 0.25, 0.2)]


def plan_of(profile=ONTO, **options):
    given = {"cuts": [2], "replicas": [1, 1], "microbatches": 4, "microbatch_size": 2} | options
    return solve(Job(profile, flat(2), **given)).plan


def run_of(plan, **fields):
    """The document of a run in which the stages took as long as `TAKEN` says."""
    entry = schedule(plan.schedule)
    stages = []
    for stage, (forward, backward, weight, step) in zip(plan.stages, TAKEN, strict=True):
        within = forward if stage.recompute and not entry.recomputes else 0.0
        stages.append(
            StageSeconds(
                start=stage.start,
                modules=stage.modules,
                recompute=stage.recompute,
                forward_s=forward,
                backward_s=backward + within,
                backward_weight_s=weight if entry.split else None,
                recompute_s=forward if stage.recompute and entry.recomputes else None,
                optimizer_s=None if entry.asynchronous else step,
            )
        )
    own = plan.profile
    names = {"schedule": plan.schedule, "shape": plan.shape, "topology": "flat", "sha256": "0" * 64}
    model = {"model": own.name, "parameter_bytes": own.parameter_bytes, "dtype": own.dtype}
    sizes = {"microbatch_size": plan.microbatch_size, "microbatches": 4, "shard": plan.shard}
    seconds = ("predicted_s", "measured_s", "own_times_s", "samples_per_s")
    whole = dict.fromkeys(seconds, 1.0) | {
        "plan": names | model | sizes,
        "engine": "partopt",
        "backend": "gloo",
        "device": "a CPU",
        "ranks_per_core": 0.5,
        "steps": 3,
        "steps_s": [1.0] * 3,
        "losses": [1.0] * 3,
        "machine": {"before": 0.0, "after": 0.0, "cores": 4},
        "stages": stages,
        "ranks": [],
    }
    return msgspec.convert(msgspec.to_builtins(whole | fields), Run)


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb-h1", "pipedream", "pipedream-2bw"])
@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.parametrize("shard", ["none", "optimizer"])
def test_planning_again_and_simulating_takes_what_the_run_took(name, recompute, shard):
    options = {"schedule": name, "recompute": recompute, "shard": shard}
    if asynchronous := schedule(name).asynchronous:
        options["microbatches"] = None
    before = plan_of(**options)
    again = import_run(run_of(before), STEPPING if asynchronous else ONTO)
    plan = plan_of(again, **options)
    seconds = work_of(plan).seconds
    for s, (forward, backward, weight, _) in enumerate(TAKEN):
        within = forward if plan.stages[s].recompute and not schedule(name).recomputes else 0.0
        assert plan.stages[s].recompute == (recompute == "always")
        assert seconds[F, s] == pytest.approx(forward)
        assert seconds[B, s] == pytest.approx(backward + within)
        if schedule(name).split:
            assert seconds[I, s] == pytest.approx(backward - weight + within)
            assert seconds[W, s] == pytest.approx(weight)
    if asynchronous:
        assert "optimizer-in-backward" in [note.code for note in again.notes]
        assert again.measurements[0].optimizer_s == 0.25
    else:
        assert seconds[U].sum() == pytest.approx(0.3)


def test_the_layers_of_a_stage_are_scaled_alike():
    [found] = import_run(run_of(plan_of(schedule="1f1b")), ONTO).measurements
    assert found.microbatch_size == 2
    forward = [layer.forward_s for layer in found.layers]
    assert forward == pytest.approx([0.125, 0.375, 0.125, 0.0])
    backward = [layer.backward_s for layer in found.layers]
    assert backward == pytest.approx([0.5, 1.0, 0.75, 0.0])
    assert {layer.backward_input_s for layer in found.layers} == {None}
    stdevs = {(layer.forward_stdev_s, layer.backward_stdev_s) for layer in found.layers}
    assert stdevs == {(0.0, 0.0)}
    assert [layer.output_bytes for layer in found.layers] == [8] * 4


def test_weights_keep_their_share_of_a_backward_that_was_not_split():
    """Thirds and halves of layers of 3 and 2 s; a stage without seconds parts evenly."""
    own = [measurement([1.0, 1.0], [3.0, 2.0]).layers, measurement([0.0], [0.0]).layers]
    own[0] = [replace(each, backward_input_s=1.0) for each in own[0]]
    own[1] = [replace(each, backward_input_s=0.0) for each in own[1]]
    found = spread(own[0], 2.0, 10.0)
    assert [layer.forward_s for layer in found] == pytest.approx([1.0, 1.0])
    assert [layer.backward_s for layer in found] == pytest.approx([6.0, 4.0])
    assert [layer.backward_input_s for layer in found] == pytest.approx([2.0, 2.0])
    [found] = spread(own[1], 2.0, 10.0)
    assert (found.backward_s, found.backward_input_s) == (10.0, 5.0)


def test_it_says_where_its_times_are_from_and_what_is_doubtful():
    run = run_of(plan_of(schedule="1f1b"), steps=1, remarks=["the machine was busy"])
    profile = import_run(run, ONTO, "run.json")
    assert [note.code for note in import_run(replace(run, steps=2, remarks=[]), ONTO).notes] == [
        "times-of-a-run"
    ]
    for steps, counted, told in ((1, None, "a step"), (4, None, "3 steps, the"), (4, 2, "2 steps")):
        note = import_run(replace(run, steps=steps, counted_step=counted), ONTO).notes[0]
        assert note.text.startswith(f"times are medians of {told}")
    own = replace(ONTO, device=replace(ONTO.device, name=run.device, memory_bytes=10**9))
    assert import_run(run, own).device == own.device
    assert (profile.device.name, profile.device.type) == ("a CPU", "cpu")
    notes = {note.code: note for note in profile.notes}
    assert set(notes) == {"times-of-a-run", "first-step", "doubtful-run"}
    assert notes["times-of-a-run"].fields == {"run": "run.json", "plan": "0" * 64}
    assert "bytes are those of chain on test device" in notes["times-of-a-run"].text
    assert notes["doubtful-run"].text == "the machine was busy"


OTHERS = {
    "name": {"model": replace(ONTO.model, name="other")},
    "bytes of parameters": {
        "layers": [replace(ONTO.layers[0], parameter_bytes=5), *ONTO.layers[1:]]
    },
    "number format": {"dtype": "bfloat16"},
    "layers": {"layers": [replace(ONTO.layers[0], name="other"), *ONTO.layers[1:]]},
}


def test_a_run_of_another_model_is_refused():
    run = run_of(plan_of(schedule="1f1b"))
    for what, fields in OTHERS.items():
        with pytest.raises(PartoptError, match=f"r.json: .* they differ in {what}") as refused:
            import_run(run, replace(ONTO, **fields), "r.json")
        assert refused.value.code == "run-of-another-model"


def test_a_size_that_the_profile_has_not_and_a_run_on_gpus_are_refused():
    run = run_of(plan_of(schedule="1f1b"))
    with pytest.raises(PartoptError, match="not measured at a microbatch size of 2"):
        import_run(run, replace(ONTO, measurements=ONTO.measurements[1:]))
    with pytest.raises(PartoptError, match="timed as they are launched"):
        import_run(replace(run, backend="nccl"), ONTO)
