"""The best plan that a trainer can say: it can be said, and hardly any is faster."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

import partopt as po
from partopt.cost.pricing import price
from partopt.cost.problem import CONTIGUOUS, NESTED, Assignment, Partition, ignore_progress
from partopt.documents.profile import SharedParameter
from partopt.errors import PartoptError
from partopt.schedules import SCHEDULES
from partopt.search.solve import solve
from partopt.search.trainer_limits import Expressible, restrict
from partopt.simulator.execution import simulate_plan
from partopt.trainers import TRAINERS, export_plan, writers
from partopt.trainers.parts import find_parts
from partopt.trainers.says import find_faults, may_begin
from tests.examples import examples
from tests.helpers import chain_profile, flat, two_level

NAMES = ["wte", "wpe", *(f"h.{i}.{part}" for i in range(3) for part in ("attn", "mlp")), "ln", "lm"]
WRITERS = writers()


def model(seed: int) -> po.Profile:
    """Three blocks of two layers each, an embedding of two, a norm and a head."""
    draw = np.random.default_rng(seed)
    profile = chain_profile(
        draw.uniform(0.5e-3, 4e-3, len(NAMES)).tolist(),
        output_bytes=draw.integers(1, 5_000_000, len(NAMES)).tolist(),
        parameter_bytes=draw.integers(1, 20_000_000, len(NAMES)).tolist(),
    )
    layers = [replace(layer, name=name) for layer, name in zip(profile.layers, NAMES, strict=True)]
    return replace(profile, layers=layers)


def stated(seed: int, to: str, profile: po.Profile | None = None, **options) -> po.Job:
    schedule = "gpipe" if to == "torchgpipe" else "1f1b"
    clusters = [flat(4, bandwidth=2e9), two_level(2, 2)]
    options = {"schedule": schedule, "microbatches": 8, **options}
    return po.Job(profile or model(seed), clusters[seed % 2], trainer=to, **options)


@pytest.mark.slow
@examples(15)
@given(st.integers(0, 10**6), st.sampled_from(WRITERS))
def test_it_can_be_said(seed, to):
    result = solve(stated(seed, to))
    for plan in (result.plan, *result.alternatives):
        assert export_plan(plan, to).main
        assert [name for stage in plan.stages for name in stage.modules] == NAMES


@pytest.mark.slow
@examples(8)
@given(st.integers(0, 10**6), st.sampled_from(["megatron", "torchtitan", "deepspeed", "vllm"]))
def test_hardly_any_other_that_can_be_said_is_faster(seed, to):
    job = po.job_for(stated(seed, to), to)
    best = min(plan.predicted.period_s for plan in sayable(job, to))
    assert solve(job.with_(trainer=to)).plan.predicted.period_s <= 1.01 * best


def sayable(job, to):
    """All plans of straight pipelines that the trainer can say, simulated."""
    target = TRAINERS[to]
    parts = find_parts(NAMES) if target.says.cuts != "anywhere" else []
    places = may_begin(parts or find_parts(NAMES), target.says.cuts)
    if target.says.cuts == "anywhere":
        places = list(range(len(NAMES)))
    for S in range(1, 5):
        for inside in itertools.combinations(places[1:], S - 1):
            cuts = [0, *inside, len(NAMES)]
            for d in range(1, 4 // S + 1):
                for family, ranks in (
                    (CONTIGUOUS, [range(s * d, s * d + d) for s in range(S)]),
                    (NESTED, [range(s, S * d, S) for s in range(S)]),
                ):
                    if family == NESTED and 1 in (S, d):
                        continue
                    stages = [
                        Assignment(a, b, own)
                        for (a, b), own in zip(itertools.pairwise(cuts), ranks, strict=True)
                    ]
                    plan = price(Partition(family, stages), job.problem, "manual")
                    if not list(find_faults(plan, target, parts)):
                        yield simulate_plan(plan)


def test_where_stages_may_begin():
    parts = find_parts(NAMES)
    assert may_begin(parts, "anywhere") == list(range(10))
    assert may_begin(parts, "parts") == [0, 2, 4, 6, 8, 9]
    assert may_begin(parts, "heads") == [0, 2, 4, 6, 8]
    assert may_begin(parts, "blocks") == [0, 4, 6]


@pytest.mark.slow
@pytest.mark.parametrize("to", ["megatron", "torchtitan"])
def test_schedules_are_chosen_among_those_of_the_trainer(to):
    job = stated(1, to, schedule="auto", microbatches=8)
    result = solve(job.with_(trainer=to))
    names = [plan.schedule for plan in (result.plan, *result.alternatives)]
    assert {*names} <= {*TRAINERS[to].schedules}
    assert len({*names}) == len(names)
    assert len(names) > 1
    assert result.plan.predicted.samples_per_s == max(
        plan.predicted.samples_per_s for plan in (result.plan, *result.alternatives)
    )


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_cuts_that_the_simulator_moved_are_verified(seed):
    plan = solve(stated(seed, "megatron", schedule="interleaved", chunks=2)).plan
    assert plan.planner == "grid"
    assert po.verify(plan, model(seed)).verified


@pytest.mark.slow
def test_all_stages_recompute_or_none_does():
    job = stated(2, "megatron", recompute="auto", memory=60_000_000, optimizer="sgd")
    plan = solve(job).plan
    assert len({stage.recompute for stage in plan.stages}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("to", [name for name in WRITERS if not TRAINERS[name].says.ties])
def test_layers_that_share_a_parameter_stay_together_where_a_trainer_parts_none(to):
    shared = SharedParameter(name="w", bytes=100)
    profile = model(8)
    layers = [
        replace(layer, shared_parameters=[shared] * (n in (0, 4)), parameter_bytes=1000)
        for n, layer in enumerate(profile.layers)
    ]
    plan = solve(stated(8, to, replace(profile, layers=layers))).plan
    assert len(plan.stages) > 1
    assert plan.stages[0].stop > 4
    assert export_plan(plan, to).main


def test_places_to_cut_of_ones_own_are_kept():
    job = stated(3, "megatron", cut_at=["h.2.*", "h.1.mlp"])
    plan = solve(job).plan
    assert {stage.start for stage in plan.stages} <= {0, 6}


def test_where_no_stage_may_begin_as_is_asked_there_is_one():
    plan = solve(stated(3, "megatron", cut_at=["h.1.mlp"])).plan
    assert [stage.start for stage in plan.stages] == [0]


@pytest.mark.parametrize(
    ("to", "family", "ranks"),
    [("megatron", "nested", [[0, 2], [1, 3]]), ("torchtitan", "contiguous", [[0, 1], [2, 3]])],
)
def test_ranks_of_pipelines_are_numbered_as_the_trainer_has_them(to, family, ranks):
    """Pipelines inside servers are the faster: torchtitan has the replicas of a stage there."""
    seconds = [1e-3, 4e-3, 2e-3, 1e-3, 3e-3, 1e-3]
    names = ["wte", *(f"h.{n}" for n in range(4)), "lm_head"]
    sizes = {"output_bytes": [5 * 10**6] * 6, "parameter_bytes": [10**5] * 6}
    options = {"planner": "optimal", "stages": 2, "replication": "uniform"}
    job = stated(1, to, chain_profile(seconds, names=names, **sizes), **options)
    plan = solve(job.with_(trainer=to)).plan
    assert (plan.family, [list(stage.ranks) for stage in plan.stages]) == (family, ranks)
    assert po.verify(plan, job.profile).verified


def test_a_stage_that_recomputes_does_so_once_its_ranks_are_in_a_row():
    """Of accelerate, whose stages choose by themselves, and lie on devices in their order."""
    trainer, job = TRAINERS["accelerate"], stated(1, "accelerate", recompute="auto")
    job = po.job_for(job, "accelerate")
    for again in itertools.product([True, False], repeat=2):
        stages = [
            Assignment(a, b, range(rank, rank + 1), recompute=recompute)
            for (a, b), rank, recompute in zip([(0, 4), (4, 10)], [1, 0], again, strict=True)
        ]
        plan = simulate_plan(price(Partition(CONTIGUOUS, stages), job.problem, "manual"))
        [said] = Expressible(job, trainer, [], ignore_progress).put_all([plan])
        assert [[*stage.ranks] for stage in said.stages] == [[0], [1]]
        assert tuple(stage.recompute for stage in said.stages) == again
        assert Expressible(job, trainer, [], ignore_progress).put_all([said]) == [said]


@pytest.mark.parametrize("to", TRAINERS)
@pytest.mark.parametrize("layout", [po.Layout(), po.Layout(dp=2), po.Layout(dp=1)])
def test_replicas_are_restricted_to_what_the_trainer_has(to, layout):
    """One a stage, or equally many where a planner is named; what the job states stays."""
    trainer, own = TRAINERS[to], {"layout": layout, "planner": "optimal"}
    job, within = restrict(stated(1, to, **own), trainer, find_parts(NAMES))
    one, equal = (trainer.says.replicas == word for word in ("one", "equal"))
    assert within.equal == equal
    assert job.layout.dp == (1 if one and layout.dp is None else layout.dp)
    stated_words = {None: "free", 1: "none", 2: "uniform"}
    restricted = {"one": "none", "equal": "uniform"}.get(trainer.says.replicas, "free")
    assert job.replication == (stated_words[layout.dp] if layout.dp else restricted)


def test_a_split_of_ones_own_is_taken_or_refused():
    taken = solve(stated(4, "megatron", cuts=[4], replicas=[2, 2])).plan
    assert [stage.start for stage in taken.stages] == [0, 4]
    with pytest.raises(PartoptError, match="inside block 0"):
        solve(stated(4, "megatron", cuts=[3], replicas=[2, 2]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "zb-h1"}, "`schedule=zb-h1`: megatron has 1f1b, interleaved"),
        ({"schedule": "pipedream", "microbatches": None}, "`schedule=pipedream`"),
        ({"shard": "gradients"}, "`shard=gradients`: megatron has none, optimizer"),
    ],
)
def test_what_a_trainer_cannot_do_is_refused(options, message):
    with pytest.raises(PartoptError, match=message):
        solve(stated(5, "megatron", **options))


@pytest.mark.parametrize("kind", ["embedding", "head"])
def test_a_model_without_a_part_is_told_which_and_how_to_name_it(kind):
    names = [f"h.{i}" for i in range(len(NAMES))]
    names[0 if kind == "head" else -1] = "wte" if kind == "head" else "lm_head"
    layers = [replace(own, name=name) for own, name in zip(model(1).layers, names, strict=True)]
    with pytest.raises(PartoptError) as caught:
        solve(stated(1, "megatron", replace(model(1), layers=layers)))
    assert caught.value.message == f"the model has no {kind}, and megatron asks for one"
    assert caught.value.hint == f"say which layers it is: `map=NAME={kind}`"


def test_layers_that_share_over_the_whole_model_are_named_by_the_widest():
    """Of two parameters the one whose layers lie farthest apart, by its first and last layer."""
    shared = {"near": [1, 2], "wide": [0, 3, len(NAMES) - 1], "inner": [2, 6]}
    layers = [
        replace(
            own,
            shared_parameters=[
                SharedParameter(name=name, bytes=8) for name, at in shared.items() if i in at
            ],
        )
        for i, own in enumerate(model(1).layers)
    ]
    with pytest.raises(PartoptError) as caught:
        solve(stated(1, "torchtitan", replace(model(1), layers=layers)), "torchtitan")
    assert caught.value.message == (
        f"torchtitan has what layers share in one stage: {NAMES[0]} and {NAMES[-1]} share wide, "
        "which leaves no pipeline"
    )
    assert caught.value.hint.startswith("profile the model without tied parameters")


@pytest.mark.parametrize("to", ["torchtitan", "deepspeed", "torchgpipe", "torch", "partopt"])
def test_numbers_of_blocks_are_refused_where_they_cannot_be_said(to):
    with pytest.raises(PartoptError, match="`recompute=2`: ") as caught:
        solve(stated(5, to, recompute=2))
    assert "recompute=always" in caught.value.hint


@pytest.mark.slow
def test_the_commands(partopt, profile_file, topology_file, tmp_path):
    given = (profile_file(model(6)), "--topology", topology_file(flat(4)))
    given += ("--schedule", "1f1b", "--microbatches", 8)
    path = tmp_path / "plan.json"
    made = partopt("plan", *given, "--for", "megatron", "-o", path)
    assert made.code == 0
    assert f"next:    partopt export {path} --to megatron" in made.err
    assert partopt("export", path, "--to", "megatron").code == 0
    shown = partopt("plan", *given, "--for", "megatron", "--map", "ln=head")
    assert "--for megatron --map ln=head" in shown.err
    compared = partopt("compare", *given, "--for", "megatron", "--for", "deepspeed", "--json")
    rows = {row["planner"]: row for row in json.loads(compared.out)["rows"]}
    best = min(row["period_s"] for row in rows.values() if row["fits"])
    for name in ("for megatron", "for deepspeed"):
        assert rows[name]["price"] == pytest.approx(rows[name]["period_s"] / best - 1)
    assert "price" not in rows["gpipe"]
    table = partopt("compare", *given, "--for", "torchtitan").out
    assert "PRICE" in table
    assert "for torchtitan" in table


@pytest.mark.parametrize(
    ("trainers", "options", "several", "chosen"),
    [
        (["megatron"], {}, True, "auto"),
        (["megatron"], {"stages": 2}, True, "1f1b"),
        (["megatron"], {"replication": "uniform"}, True, "1f1b"),
        (["megatron"], {"chunks": 2}, True, "interleaved"),
        (["torchtitan", "deepspeed"], {}, False, "1f1b"),
        (["torchgpipe"], {"cuts": [3]}, True, "gpipe"),
        (["vllm"], {}, True, None),
        (["vllm"], {"global_batch": 8}, True, "auto"),
        (["partopt"], {"microbatches": 8}, False, "1f1b"),
    ],
)
def test_the_schedule_of_a_trainer(trainers, options, several, chosen):
    assert po.schedule_for(trainers, options, several) == chosen


def test_trainers_without_a_common_schedule_are_refused():
    with pytest.raises(PartoptError, match="torchgpipe and megatron have no schedule in common"):
        po.schedule_for(["torchgpipe", "megatron"], {})


@pytest.mark.slow
def test_a_command_for_a_trainer_chooses_its_schedule(partopt, profile_file, topology_file):
    given = (profile_file(model(6)), "--topology", topology_file(flat(4)))
    batch = ("--global-batch", 8)
    plan = partopt("plan", *given, *batch, "--for", "megatron", "--json").document
    assert plan["layout"]["schedule"] in TRAINERS["megatron"].schedules
    looped = partopt("plan", *given, *batch, "--for", "megatron", "--chunks", 2, "--json")
    assert looped.document["layout"]["schedule"] == "interleaved"
    compared = partopt("compare", *given, *batch, "--for", "torchgpipe")
    assert compared.code == 0
    assert "gpipe" in compared.out
    served = partopt("plan", *given, "--for", "vllm", "--json").document
    assert served["layout"]["schedule"] == "pipedream"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--map", "ln=head"], "--map: goes with --for"),
        (["--for", "megatron", "--scaling", "2,4"], "--for: --scaling prints a table"),
        (["--for", "megatorn"], 'unknown trainer "megatorn"'),
        (["--for", "megatron", "--map", "nope*=head"], "--map nope*=head: no layer"),
    ],
)
def test_what_cannot_be_asked(partopt, profile_file, topology_file, options, message):
    given = (profile_file(model(6)), "--topology", topology_file(flat(4)))
    outcome = partopt("plan", *given, "--schedule", "1f1b", "--microbatches", 8, *options)
    assert outcome.code == 2
    assert message in outcome.err


# of each family of shipped profiles one that is quick, on two of the devices that it is of
SHIPPED = {
    "gpt.cpu.float32": "workstation-2",
    "mlp.cpu.float32": "workstation-2",
    "resnet50.cpu.float32": "workstation-2",
    "gnmt.v100-published.float32": "v100-nvlink",
    "llama-7b.h100-estimated.bfloat16": "dgx-h100",
    "mixtral-8x7b.h100-estimated.bfloat16": "dgx-h100",
    "t5-11b.h100-estimated.bfloat16": "dgx-h100",
}
# the model that a trainer plans whose search takes seconds; the others plan every model
TAKEN = {
    "megatron-bridge": "gpt.cpu.float32",
    "torchtitan": "mixtral-8x7b.h100-estimated.bfloat16",
    "torch": "resnet50.cpu.float32",
    "torch-csv": "gnmt.v100-published.float32",
    "partopt": "gnmt.v100-published.float32",
    "vllm": "gpt.cpu.float32",
    "sglang": "gpt.cpu.float32",
    "accelerate": "gpt.cpu.float32",
}
WITHOUT_BLOCKS = ("mlp", "resnet50", "gnmt", "t5-11b")  # refused at once where blocks are needed


def asked_of_trainers():
    """Each model for each trainer that plans it quickly or refuses it, and one for the others."""
    for model, name in itertools.product(SHIPPED, TRAINERS):
        refused = TRAINERS[name].says.cuts != "anywhere" and model.startswith(WITHOUT_BLOCKS)
        if refused or TAKEN.get(name, model) == model:
            yield model, name


@pytest.mark.slow
@pytest.mark.parametrize(("model", "name"), list(asked_of_trainers()))
def test_every_trainer_takes_a_shipped_model_or_says_why_not(model, name):
    """A batch is all that it needs to be told; the plan is for it, whole."""
    cluster, asked = po.Topology.load(SHIPPED[model]), {"global_batch": 512}
    pair = replace(cluster, devices=0, levels=[replace(cluster.levels[0], size=2)])
    found = po.schedule_for([name], asked) or "1f1b"
    job = po.Job(po.Profile.load(model), pair, schedule=found, effort="quick", **asked)
    try:
        plan = po.solve(job.with_(trainer=name)).plan
    except PartoptError as error:
        assert error.code in ("no-blocks", "target-cannot-say")
        assert error.hint
        return
    trainer = TRAINERS[name]
    assert (plan.trainer, plan.engine) == (name, trainer.engine)
    assert plan.schedule in (trainer.schedules or SCHEDULES)
    if trainer.write is not None:
        assert export_plan(plan, name).main


@pytest.mark.slow
@pytest.mark.parametrize(
    ("to", "text", "found"),
    [
        ("megatron", "pp=4", {"pp": 4}),
        (None, "pp=2,chunks=2,microbatch=1", {"pp": 2, "chunks": 2, "microbatch": 1}),
        ("megatron", "pp=2,dp=1", {"pp": 2, "dp": 1}),
        ("megatron", "dp=2, recompute=always", {"dp": 2, "recompute": "always"}),
        *(
            (to, "schedule=1f1b,pp=2,shard=optimizer", {"schedule": "1f1b", "shard": "optimizer"})
            for to in ("megatron", None)
        ),
    ],
)
def test_any_part_of_a_layout_is_fixed_and_the_rest_is_found(
    partopt, profile_file, topology_file, text, found, to
):
    given = (profile_file(model(7)), "--topology", topology_file(flat(4)), "--layout", text)
    given += ("--for", to) if to else ("--schedule", "auto") if "schedule=" not in text else ()
    outcome = partopt("plan", *given, "--global-batch", 8, "--json")
    assert (outcome.code, outcome.document["layout"] | found) == (0, outcome.document["layout"])


def test_a_number_of_stages_follows_from_a_layout_under_a_schedule():
    layout = po.Layout(pp=2, chunks=2, microbatch=1, dp=2)
    job = stated(7, "megatron", schedule="interleaved", layout=layout)
    assert (job.stages, job.chunks, job.microbatch_size, job.replication) == (4, 2, 1, "uniform")
    plan = po.solve(stated(7, "partopt", layout=po.Layout(pp=2, dp=1))).plan
    assert plan.shape == "1-1"
    assert po.verify(plan, model(7)).verified


@pytest.mark.parametrize(
    ("options", "message", "hint"),
    [
        (["--layout", "pp=2,stage=1"], "--layout stage=1: no part of a layout", "known: tp, cp, "),
        (["--layout", "chunk=2"], "--layout chunk=2: no part of a layout", '"chunks"'),
        (["--layout", "pp"], "each part once, with a value", "write pp=4,chunks=2"),
        (["--layout", "pp=0"], "pp: expected a whole number >= 1", ""),
        (["--layout", "pp=two"], "pp: expected a whole number", ""),
        (["--layout", "shard=all"], "shard: invalid enum value 'all'", ""),
        (["--layout", "pp=4,dp=2"], "8 devices needed, 4 there", "write pp=2"),
        (["--layout", "tp=2"], "the profile is of tp=1", "write tp=1"),
        (["--layout", "ep=2"], "the profile is of ep=1", "write ep=1"),
        (["--layout", "chunks=2"], "1f1b has 1 on each device", "chunks=1"),
        (["--layout", "pp=2", "--stages", "3"], "--stages 3: --layout says 2", "drop one"),
        (["--layout", "microbatch=1", "--microbatch-size", "2"], "--layout says 1", "drop one"),
        (["--layout", "pp=3", "--cuts", "4"], "pp=3 requested, 2 planned", "fix less of it"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(
    partopt, profile_file, topology_file, options, message, hint
):
    given = (profile_file(model(6)), "--topology", topology_file(flat(4)))
    outcome = partopt("plan", *given, "--schedule", "1f1b", "--microbatches", 8, *options)
    assert outcome.code in (1, 2)
    assert message in outcome.err
    assert hint in outcome.err
