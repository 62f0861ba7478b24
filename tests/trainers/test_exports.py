"""What is written for each trainer: twelve blocks in four stages of 4, 3, 3 and 2."""

import ast
import subprocess

import pytest
from msgspec.structs import replace

from partopt import TRAINERS, Job, PartoptError, export_plan, solve
from partopt.documents.profile import Group
from partopt.documents.stage import Flow
from partopt.profiler import measure_source
from partopt.schedules import SCHEDULES
from partopt.schedules.placement import placement_of
from partopt.schedules.torch_csv import from_csv
from partopt.trainers import writers
from tests.bash import run_bash
from tests.forked import Forked
from tests.helpers import flat
from tests.runtime.check_cases import MODEL
from tests.trainers.models import transformer
from tests.trainers.plans import LOOPS, PAIRS, contents, on_ranks, planned, recomputing
from tests.trainers.readers import COUNTS, HOLDS, assigned

UNEVEN = planned()
LOOPED = planned(**LOOPS)
INTERLEAVED = "Et*2|(t*2|)*4t|t|L"


def written(plan, to, **options):
    return export_plan(plan, to, **options).main


def flags(text: str) -> list[str]:
    """The words that a shell puts into the array of arguments."""
    script = f'{text}\nprintf "%s\\n" "${{PARTOPT_ARGS[@]}}"'
    done = run_bash(script, strict=True)
    done.check_returncode()
    return done.stdout.splitlines()


@pytest.mark.parametrize("to", HOLDS)
def test_the_stages_hold_what_those_of_the_plan_do(to):
    assert HOLDS[to](written(UNEVEN, to)) == contents(UNEVEN)


def test_trainers_that_count_layers_are_given_the_number_of_each_stage():
    assert COUNTS["deepspeed"](written(UNEVEN, "deepspeed")) == [6, 3, 3, 4]
    gpipe = planned(schedule="gpipe")
    assert COUNTS["torchgpipe"](written(gpipe, "torchgpipe")) == [6, 3, 3, 4]
    split = assigned(written(UNEVEN, "accelerate"), "ARGUMENTS")
    assert split == {"split_points": ["h.4", "h.7", "h.10"], "num_chunks": 4}


@pytest.mark.parametrize("to", writers())
def test_what_is_written_is_python_or_shell(to):
    plan = planned(schedule="gpipe") if to == "torchgpipe" else UNEVEN
    text, suffix = written(plan, to), TRAINERS[to].suffix
    if suffix == ".py":
        compile(text, to, "exec")
    elif suffix == ".sh":
        subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    else:
        assert suffix == ".csv"
    assert all(len(line) <= 150 for line in text.splitlines())


@pytest.mark.parametrize(
    "schedule", [name for name in SCHEDULES if SCHEDULES[name].shape == "straight"]
)
def test_the_order_of_torch_is_that_of_the_plan(schedule):
    if SCHEDULES[schedule].asynchronous:
        return
    plan = planned(schedule=schedule)
    found = from_csv(written(plan, "torch-csv"), placement_of(plan))
    cells = {name for rank in range(4) for name in found.names(rank)}
    assert {f"{s}F{m}" for s in range(4) for m in range(8)} <= cells


def test_every_pipeline_has_the_same_order():
    pair = planned(**PAIRS)
    assert written(pair, "torch-csv") == written(UNEVEN, "torch-csv")


def test_arguments_of_megatron():
    words = flags(written(UNEVEN, "megatron"))
    said = "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 4"
    said += " --pipeline-model-parallel-layout Et*4|t*3|t*3|t*2L"
    assert words == f"{said} --micro-batch-size 1 --global-batch-size 8".split()


def test_interleaved_stages_are_segments_in_their_order():
    assert INTERLEAVED in flags(written(LOOPED, "megatron"))
    fields = written(LOOPED, "megatron-bridge")
    for name, value in (
        ("pipeline_model_parallel_layout", INTERLEAVED),
        ("pipeline_model_parallel_size", 4),
        ("virtual_pipeline_model_parallel_size", 2),
    ):
        assert assigned(fields, f"config.model.{name}") == value
    assert HOLDS["torchtitan"](written(LOOPED, "torchtitan")) == contents(LOOPED)


def test_embedding_and_head_may_have_stages_of_their_own():
    plan = planned([2, 8, 14])
    assert "E|t*6|t*6|L" in flags(written(plan, "megatron"))
    assert HOLDS["torchtitan"](written(plan, "torchtitan")) == contents(plan)


def test_recomputation_and_shards():
    plan = planned(**PAIRS, recompute="always", shard="optimizer")
    words = flags(written(plan, "megatron"))
    assert words[-8:] == [
        *("--recompute-granularity", "full", "--recompute-method", "uniform"),
        *("--recompute-num-layers", "1", "--use-distributed-optimizer", "--overlap-grad-reduce"),
    ]
    fields = written(plan, "megatron-bridge")
    assert assigned(fields, "config.model.recompute_granularity") == "full"
    assert assigned(fields, "config.optimizer.use_distributed_optimizer") is True
    assert assigned(written(plan, "deepspeed"), "CONFIG") == {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 8,
        "zero_optimization": {"stage": 1},
    }
    assert "activation_checkpoint_interval=6," in written(plan, "deepspeed")
    assert assigned(written(plan, "colossalai"), "ARGUMENTS")["zero_stage"] == 1
    gpipe = recomputing(planned(schedule="gpipe"))
    assert assigned(written(gpipe, "torchgpipe"), "ARGUMENTS")["checkpoint"] == "always"


def test_a_recipe_of_megatron_bridge_is_left_nothing_that_the_plan_decides():
    grouped = replace(transformer(microbatch_size=3), group=Group(ranks=2))
    pair = planned(profile=grouped, cluster=flat(16), **PAIRS)
    for plan, ranks, size, batch in ((UNEVEN, 1, 1, 8), (pair, 2, 3, 48)):
        fields = written(plan, "megatron-bridge")
        for name, value in {
            "model.tensor_model_parallel_size": ranks,
            "model.context_parallel_size": 1,
            "model.pipeline_model_parallel_size": 4,
            "model.virtual_pipeline_model_parallel_size": None,
            "model.recompute_granularity": None,
            "model.recompute_method": None,
            "model.recompute_num_layers": None,
            "train.micro_batch_size": size,
            "train.global_batch_size": batch,
            "ddp.use_distributed_optimizer": False,
            "optimizer.use_distributed_optimizer": False,
            "dist.use_tp_pp_dp_mapping": False,
        }.items():
            assert assigned(fields, f"config.{name}") == value


def test_megatron_exchanges_gradients_as_the_plan_counts_it():
    """It does so behind the backward unless it is told, and Bridge's recipes tell it."""
    for allreduce, told in (("overlap", True), ("blocking", False)):
        pair = planned(**PAIRS, facts={"allreduce": allreduce})
        assert ("--overlap-grad-reduce" in flags(written(pair, "megatron"))) is told
        fields = written(pair, "megatron-bridge")
        assert assigned(fields, "config.ddp.overlap_grad_reduce") is told
    assert "--overlap-grad-reduce" not in flags(written(UNEVEN, "megatron"))


def test_recomputation_in_some_stages_is_for_colossalai():
    text = written(recomputing(UNEVEN, 0, 2), "colossalai")
    assert assigned(text, "CHECKPOINTS") == {"num_ckpt_layers_per_stage": [4, 0, 3, 0]}
    assert "CHECKPOINTS" not in written(UNEVEN, "colossalai")


def test_pipelines_whose_ranks_follow_each_other():
    pair = planned(**PAIRS)
    beside = on_ranks(pair, [[s, s + 4] for s in range(4)])
    assert "--use-tp-pp-dp-mapping" in flags(written(beside, "megatron"))
    assert "--use-tp-pp-dp-mapping" not in flags(written(pair, "megatron"))
    assert "axes=['data', 'pipe'], dims=[2, 4]" in written(beside, "deepspeed")
    assert "axes=['pipe', 'data'], dims=[4, 2]" in written(pair, "deepspeed")
    for plan, outside in ((beside, True), (pair, False)):
        assert assigned(written(plan, "colossalai"), "ARGUMENTS")["dp_outside"] is outside


def test_fields_of_torchtitan():
    plan = planned(profile=transformer(microbatch_size=2), **PAIRS, shard="gradients")
    text = written(plan, "torchtitan", stem="mine")
    for name, value in (
        ("config.training.local_batch_size", 16),
        ("config.training.global_batch_size", 32),
        ("config.activation_checkpoint", None),
        ("parallelism.pipeline_parallel_degree", 4),
        ("parallelism.pipeline_parallel_schedule", "1F1B"),
        ("parallelism.pipeline_parallel_schedule_csv", None),
        ("config.parallelism.pipeline_parallel_microbatch_size", 2),
        ("config.parallelism.num_pp_microbatches", 8),
        ("parallelism.data_parallel_replicate_degree", 1),
        ("parallelism.data_parallel_shard_degree", 2),
        ("parallelism.fsdp_reshard_after_forward", "never"),
    ):
        assert assigned(text, name) == value
    assert "--module mine --config planned" in ast.get_docstring(ast.parse(text))


@pytest.mark.parametrize(
    ("schedule", "cuts", "devices", "places"),
    [
        ("interleaved", [6, 9, 12], 2, "Interleaved1F1B"),
        ("zbv", [6, 9, 12], 2, "ZBVZeroBubble"),
        ("dualpipev", [6, 9, 12], 2, "ZBVZeroBubble"),
        ("zb-h1", [6, 9, 12], 4, "1F1B"),
        ("naive", [6, 9, 12], 4, "1F1B"),
    ],
)
def test_torchtitan_takes_other_orders_as_csv_beside_it(schedule, cuts, devices, places):
    plan = planned(cuts, cluster=flat(devices), schedule=schedule)
    text = export_plan(plan, "torchtitan", stem="mine")
    assert text.beside == {".csv": written(plan, "torch-csv")}
    assert assigned(text.main, "parallelism.pipeline_parallel_schedule") == places
    assert 'with_name("mine.csv")' in text.main


def test_an_order_without_a_name_there_is_a_csv_too():
    """Fewer microbatches than torch's own 1F1B takes."""
    for each, beside in ((3, {".csv"}), (4, set())):  # of each pipeline
        for plan in (planned(microbatches=each), planned(**PAIRS | {"microbatches": 2 * each})):
            assert export_plan(plan, "torchtitan").beside.keys() == beside


def test_groups_of_ranks_are_tensor_parallel():
    pair = planned(profile=replace(transformer(), group=Group(ranks=2)), cluster=flat(8))
    assert flags(written(pair, "megatron"))[:2] == ["--tensor-model-parallel-size", "2"]
    assert "on 8 devices of flat-8" in written(pair, "megatron")
    assert assigned(written(pair, "torchtitan"), "parallelism.tensor_parallel_degree") == 2
    assert assigned(written(pair, "colossalai"), "ARGUMENTS")["tp_size"] == 2
    assert "axes=['pipe', 'data', 'model'], dims=[4, 1, 2]" in written(pair, "deepspeed")
    text = export_plan(pair, "vllm")
    assert "start the server with --pipeline-parallel-size 4 --tensor-parallel-size 2" in text.notes
    assert "each device is a group of 2 ranks, taken to be tensor parallel" in text.notes


def test_notes_say_what_layers_are_and_where_the_trainer_differs():
    notes = export_plan(recomputing(UNEVEN), "megatron").notes
    assert notes[:4] == [
        "wte, wpe -> embedding",
        "h.0 .. h.11 -> blocks 0-11",
        "ln_f -> norm",
        "lm_head -> head",
    ]
    assert notes[-1].startswith("blocks one by one recompute")
    for plan, to in ((UNEVEN, "megatron"), (recomputing(UNEVEN), "deepspeed")):
        assert not any("recompute," in note for note in export_plan(plan, to).notes)


def test_a_file_is_written_with_those_beside_it_or_not_at_all(tmp_path):
    text = export_plan(planned(schedule="zb-h1"), "torchtitan", stem="mine")
    (tmp_path / "mine.csv").write_text("kept")
    with pytest.raises(PartoptError, match=r"mine\.csv"):
        text.save(str(tmp_path / "mine.py"))
    assert [path.name for path in tmp_path.iterdir()] == ["mine.csv"]
    names = text.save(str(tmp_path / "mine.py"), force=True)
    assert names == [str(tmp_path / "mine.py"), str(tmp_path / "mine.csv")]
    assert (tmp_path / "mine.csv").read_text() == text.beside[".csv"]


@pytest.mark.parametrize(
    ("dtype", "said"), [("bfloat16", {"bf16"}), ("float16", {"fp16"}), ("float32", set())]
)
def test_deepspeed_is_told_the_number_format(dtype, said):
    plan = replace(UNEVEN, profile=replace(UNEVEN.profile, dtype=dtype))
    config = assigned(written(plan, "deepspeed"), "CONFIG")
    assert {"bf16", "fp16"} & config.keys() == said
    assert all(config[name] == {"enabled": True} for name in said)
    assert "torch_autocast" not in config
    plan = replace(UNEVEN, profile=replace(UNEVEN.profile, autocast="bfloat16"))
    config = assigned(written(plan, "deepspeed"), "CONFIG")
    assert config["torch_autocast"] == {"enabled": True, "dtype": "bfloat16"}


def test_tied_layers_are_noted_where_stages_share_them_alone():
    def notes(plan):
        return [note for note in export_plan(plan, "deepspeed").notes if "Tied" in note]

    assert notes(UNEVEN) == []
    flow = Flow(
        kind="tied",
        stage=0,
        ranks=[0],
        bytes=8,
        per="iteration",
        level="server",
        parameters=["wte"],
    )
    tied = replace(UNEVEN, communication=[*UNEVEN.communication, flow])
    assert notes(tied) == ["wte: stages share it, so its layers go in as TiedLayerSpec"]


@pytest.mark.slow
def test_the_program_of_torch_says_what_to_do_under_a_wrong_number_of_processes(tmp_path):
    (tmp_path / "model.py").write_text(MODEL)
    source = str(tmp_path / "model.py")
    profile = measure_source(source, microbatch_sizes=[1], steps=1, granularity="block")
    options = {"cuts": [2], "replicas": [1, 1], "schedule": "1f1b", "microbatches": 2}
    plan = solve(Job(profile, flat(2), **options)).plan
    export_plan(plan, "torch", stem="planned").save(str(tmp_path / "planned.py"))
    world = {"RANK": "0", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    done = Forked(str(tmp_path / "planned.py"), [source], None, world).wait()
    assert done.returncode == 1
    error, hint = done.stderr.splitlines()
    assert error == f"error: {source}: the plan has 2 ranks, torchrun started 3"
    assert hint.startswith("hint:  ")
