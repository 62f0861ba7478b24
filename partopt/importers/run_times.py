"""Times of layers from a run of a plan, put into the profile that the plan was made from.

A run knows what every stage took; its layers are scaled alike. Bytes are the profile's.
"""

from __future__ import annotations

from partopt import documents
from partopt.cost.chain import chain_of
from partopt.cost.sharding import steps_in_backwards
from partopt.documents.profile import Device, Profile
from partopt.documents.training_run import Run
from partopt.errors import PartoptError
from partopt.importers.times import measurement_of, spread, with_times


def import_run(run: Run, onto: Profile, where: str = "run") -> Profile:
    """The profile `onto` at the microbatch size of `run`, with the times of its stages.

    The layers of a stage are scaled so that their sum is what the stage took: forward, backward
    less what it recomputed and less a step that ended it, as long as the profile has it, and the
    part of the backward for the weights where the schedule has it apart. `where` names the run in
    errors and notes. Raises PartoptError for a run of another model than the profile's, and for one
    on GPUs, where actions are timed as they are launched.
    """
    _check(run, onto, where)
    measured = measurement_of(onto, run.plan.microbatch_size)
    chain, layers = chain_of(onto, run.plan.microbatch_size), []
    if _counts_steps(run):
        chain = chain.with_steps()
    for stage in run.stages:
        stop = stage.start + len(stage.modules)
        # a recomputation that is not timed by itself is the forward that the backward begins with
        within = stage.recompute and stage.recompute_s is None
        backward_s = stage.backward_s - (stage.forward_s if within else 0.0)
        backward_s = max(0.0, backward_s - chain.steps_s(stage.start, stop))
        of_stage = measured.layers[stage.start : stop]
        layers += spread(of_stage, stage.forward_s, backward_s, stage.backward_weight_s)
    stepped = [stage.optimizer_s for stage in run.stages if stage.optimizer_s is not None]
    optimizer_s = sum(stepped) if len(stepped) == len(run.stages) else measured.optimizer_s
    same = onto.device.name == run.device
    device = onto.device if same else Device(name=run.device, type="cpu")
    profile = with_times(onto, measured, layers, optimizer_s, device, _notes(run, onto, where))
    documents.refuse(profile.faults(), where)
    return profile


def _counts_steps(run: Run) -> bool:
    """Whether plans count a backward with the step that ends it, as this run's did."""
    return steps_in_backwards(run.plan.schedule, run.plan.shard != "none")


def _check(run: Run, onto: Profile, where: str) -> None:
    if run.backend == "nccl":
        raise PartoptError(
            f"{where}: a run on GPUs: its actions are timed as they are launched, not as they run",
            "profile the model on a GPU, or run it on torch's engine and import the traces of "
            "torch.profiler",
            code="not-measurable",
        )
    ran, layers = run.plan, [name for stage in run.stages for name in stage.modules]
    differ = {
        "name": ran.model != onto.model.name,
        "bytes of parameters": ran.parameter_bytes != onto.parameter_bytes(),
        "number format": (ran.dtype, ran.autocast) != (onto.dtype, onto.autocast),
        "layers": layers != [layer.name for layer in onto.layers],
    }
    for what, differs in differ.items():
        if differs:
            raise PartoptError(
                f"{where}: a run of another model than {onto.model.name}: they differ in {what}",
                "give the profile that the plan was made from",
                code="run-of-another-model",
            )


def _notes(run: Run, onto: Profile, where: str) -> list[documents.Note]:
    """Where the times are from, and what makes them doubtful."""
    timed = run.steps - 1 - (run.counted_step is not None)
    steps = "a step" if run.steps == 1 else f"{timed} steps, the first left out,"
    text = (
        f"times are medians of {steps} in {where}, {run.plan.schedule} of {run.plan.shape} on "
        f"{run.device}; bytes are those of {onto.model.name} on {onto.device.name}"
    )
    fields = {"run": where, "plan": run.plan.sha256}
    notes = [documents.Note(code="times-of-a-run", text=text, fields=fields)]
    if run.steps == 1:
        text = f"{where} has one step, which warms up: what it took is longer than later ones"
        notes.append(documents.Note(code="first-step", text=text))
    if _counts_steps(run):
        text = (
            "its backwards end with the optimizer's step, taken off as the profile has it, not as "
            "it ran"
        )
        notes.append(documents.Note(code="optimizer-in-backward", text=text))
    elif any(stage.optimizer_s is None for stage in run.stages):
        text = "an asynchronous schedule steps within its backwards, which are longer by that"
        notes.append(documents.Note(code="optimizer-in-backward", text=text))
    return notes + [documents.Note(code="doubtful-run", text=text) for text in run.remarks]
