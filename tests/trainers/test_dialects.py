"""Scripts of ms-swift, verl and slime: read as the same training is in Megatron's words."""

from __future__ import annotations

import functools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partopt.documents.topology import Topology
from partopt.errors import PartoptError
from partopt.search.changes import change_text
from partopt.search.jobs import read_job
from partopt.search.judging import judge_layout
from partopt.search.layout_questions import training_for
from partopt.trainers import TRAINERS
from partopt.transformer.iteration import estimate

SWIFT = """
NPROC_PER_NODE=8 \\
megatron sft \\
    --model Qwen/Qwen2.5-7B-Instruct \\
    --dataset 'mine/chats#500' 'mine/others' \\
    --tensor_model_parallel_size 2 \\
    --pipeline_model_parallel_size 2 \\
    --sequence_parallel true \\
    --packing true \\
    --max_length 4096 \\
    --micro_batch_size 1 \\
    --global_batch_size 32 \\
    --recompute_granularity full --recompute_method uniform --recompute_num_layers 1 \\
    --finetune true \\
    --model_name mine
"""
VERL = """
MODEL_PATH=${MODEL_PATH:-$HOME/models/Qwen3-8B}
ACTOR=(
    actor_rollout_ref.model.path="$MODEL_PATH"
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2
    actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2
    actor_rollout_ref.actor.ppo_mini_batch_size=64
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2
    actor_rollout_ref.actor.use_dynamic_bsz=${DYNAMIC:-False}
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8192
    +actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity=full
    +actor_rollout_ref.actor.megatron.override_transformer_config.recompute_method=uniform
    +actor_rollout_ref.actor.megatron.override_transformer_config.recompute_num_layers=1
)
python3 -m verl.trainer.main_ppo --config-name='ppo_megatron_trainer.yaml' \\
    algorithm.adv_estimator=grpo data.max_prompt_length=1024 data.max_response_length=3072 \\
    "${ACTOR[@]}" actor_rollout_ref.ref.megatron.tensor_model_parallel_size=8 \\
    actor_rollout_ref.rollout.n=4 trainer.nnodes=1 trainer.n_gpus_per_node=8 "$@"
"""
TUNES = """
torchrun --nnodes=1 --nproc_per_node=8 -m verl.trainer.sft_trainer engine=megatron \\
    data.train_batch_size=64 data.max_length=2048 data.use_dynamic_bsz=False \\
    data.micro_batch_size_per_gpu=2 model.path=Qwen/Qwen3-8B \\
    engine.tensor_model_parallel_size=2 engine.use_mbridge=True
"""
SHAPE = """
    --num-layers 36 --hidden-size 4096 --ffn-hidden-size 12288 --num-attention-heads 32
    --group-query-attention --num-query-groups 8 --kv-channels 128 --qk-layernorm --swiglu
    --normalization RMSNorm --norm-epsilon 1e-6 --position-embedding-type rope
    --rotary-base 1000000 --disable-bias-linear --untie-embeddings-and-output-weights
    --vocab-size 151936 --attention-dropout 0.0 --hidden-dropout 0.0
"""
SLIME = f"""
MODEL_ARGS=({SHAPE})
PERF_ARGS=(
   --tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 2
   # --micro-batch-size 1
   --use-dynamic-batch-size --max-tokens-per-gpu 4096
)
ray job submit -- python3 train.py --actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate \\
   ${{MODEL_ARGS[@]}} ${{PERF_ARGS[@]}} --rollout-batch-size 32 --n-samples-per-prompt 8 \\
   --rollout-max-response-len 6144 --rollout-max-prompt-len 1024 --hf-checkpoint /mine/x
"""
# the same trainings in words of Megatron's
SAME = {
    "ms-swift": (SWIFT, "qwen2.5-7b", 4096, 32, "--tensor-model-parallel-size 2 "
    "--pipeline-model-parallel-size 2 --micro-batch-size 1 --cross-entropy-loss-fusion "
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"),
    "verl": (VERL, "qwen3-8b", 4096, 256, "--tensor-model-parallel-size 2 "
    "--pipeline-model-parallel-size 2 --micro-batch-size 2 "
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"),
    "slime": (SLIME, "qwen3-8b", 8192, 256, "--tensor-model-parallel-size 2 "
    "--context-parallel-size 2 --micro-batch-size 1"),
}  # fmt: skip


@functools.cache
def topology(servers=1):
    return Topology.load("dgx-h100", servers)


def read(name, text, **arguments):
    return read_job(name, text, topology(), {key: str(value) for key, value in arguments.items()})


def refused(name, text, **arguments):
    with pytest.raises(PartoptError) as error:
        read(name, text, **arguments)
    return error.value


@pytest.mark.parametrize("name", SAME)
def test_a_training_is_read_as_it_is_in_the_words_of_megatron(name):
    text, model, sequence, batch, flags = SAME[name]
    job, _ = read(name, text, **({"tokens_per_sample": "max"} if name == "slime" else {}))
    other = f"python pretrain_gpt.py --model-name {model} --seq-length {sequence} --bf16"
    other += f" --global-batch-size {batch} {flags} --sequence-parallel --use-distributed-optimizer"
    same, _ = read_job("megatron", other, topology())
    if name == "ms-swift":  # whose loss torch compiles, or TransformerEngine has
        assert job.facts["loss"] == "compiled"
        job, _ = read(name, f"{text.rstrip()} --cross_entropy_fusion_impl te\n")
    if name == "slime":  # whose samples of 7,168 tokens fill up to 8,192
        assert job.global_batch == math.ceil(256 * 7168 / 8192 / 2) * 2 == 224
        same = same.with_(global_batch=224, facts={**same.facts, "documents": 7168})
    assert job.with_(trainer="megatron") == same
    assert (job.model.name, job.sequence, job.trainer) == (model, sequence, name)


def test_adapters_of_ms_swift_are_facts_with_its_defaults():
    plain = dict(read("ms-swift", SWIFT)[0].facts)
    for flag in ("--tuner_type lora", "--train_type lora"):
        facts = dict(read("ms-swift", f"{SWIFT.rstrip()} {flag}\n")[0].facts)
        assert facts == plain | {"lora": 8, "lora-dropout": "yes"}
    more = "--tuner_type lora --lora_rank 32 --lora_dropout 0 --target_modules"
    facts = dict(read("ms-swift", f"{SWIFT.rstrip()} {more} linear_qkv linear_proj\n")[0].facts)
    assert facts == plain | {"lora": 32, "lora-targets": "qkv+proj"}
    assert dict(read("ms-swift", f"{SWIFT.rstrip()} {more} all-linear\n")[0].facts)["lora"] == 32
    assert read("ms-swift", f"{SWIFT.rstrip()} --tuner_type full\n")[0].facts == plain
    added = "actor_rollout_ref.model.lora.rank=16 actor_rollout_ref.model.lora.alpha=32"
    assert dict(read("verl", VERL.replace('"$@"', added))[0].facts)["lora"] == 16


@pytest.mark.parametrize(
    ("name", "text", "what"),
    [
        ("ms-swift", f"{SWIFT.rstrip()} --tuner_type lora_llm\n", "--tuner_type: training of few"),
        ("ms-swift", f"{SWIFT.rstrip()} --freeze_llm true\n", "--freeze_llm: frozen weights"),
        (
            "ms-swift",
            f"{SWIFT.rstrip()} --tuner_type lora --modules_to_save word_embeddings\n",
            "--modules_to_save: training of modules beside adapters",
        ),
        ("ms-swift", f"{SWIFT.rstrip()} --quant_bits 4\n", "--quant_bits: weights in few bits"),
        ("ms-swift", f"{SWIFT.rstrip()} --adapters saved/x\n", "--lora_rank: the configuration"),
        ("verl", VERL.replace("_batch_size_per_gpu=2", "_batch_size=8"), "batch_size_per_gpu: the"),
        ("ms-swift", SWIFT.replace("2.5-7B-Instruct", "3.5-9B"), "no shape of Qwen/Qwen3.5-9B"),
        ("ms-swift", SWIFT.replace("megatron sft", "megatron export"), "nothing in it is of ms"),
        ("verl", TUNES.replace("megatron", "fsdp").replace("engine.t", "engine.u"), "another eng"),
        ("verl", VERL.replace('"$@"', "actor_rollout_ref.actor.qat.enable=True"), "qat.enable"),
        ("slime", SLIME.replace("--swiglu", "--swiglu --spec plugins.qwen3_5 get"), "--spec: blo"),
        ("verl", VERL.replace('"$@"', "actor_rollout_ref.model.lora.rank=4 "
         "actor_rollout_ref.model.lora.type=dora"), "lora.type: training of few weights"),
    ],
)  # fmt: skip
def test_what_is_not_planned_is_refused_by_its_name(name, text, what):
    assert what in refused(name, text, tokens_per_sample=512).message


def test_pairs_count_as_two_samples_and_completions_as_they_are():
    way = SWIFT.replace("megatron sft", "megatron rlhf").replace("--packing true", "{}")
    job, notes = read("ms-swift", way.format("--rlhf_type dpo"))
    assert (job.layout.microbatch, job.global_batch, job.sequence) == (2, 64, 4096)
    assert any("dpo is a pair" in note for note in notes)
    packed, _ = read("ms-swift", way.format("--rlhf_type dpo --packing true"))
    assert (packed.layout.microbatch, packed.global_batch) == (1, 32)
    answers = "--rlhf_type grpo --max_completion_length 2048 --offload_model true"
    job, notes = read("ms-swift", way.format(answers))
    assert (job.layout.microbatch, job.global_batch, job.sequence) == (1, 32, 6144)
    assert any("--offload_model: what is trained is on the host" in note for note in notes)
    assert any("not generation, rewards" in note for note in notes)
    job, notes = read_job("ms-swift", way.format(answers), topology(), sequence=1000)
    assert job.sequence == 1000
    assert not any("the longest" in note for note in notes)


@pytest.mark.parametrize("said", ["sft --task_type seq_cls", "rlhf --rlhf_type rm"])
def test_a_head_that_is_not_the_vocabulary_has_no_logits(said):
    job, notes = read("ms-swift", SWIFT.replace("megatron sft", f"megatron {said}"))
    assert job.facts["loss"] == "none"
    assert any("no logits" in note for note in notes)
    layout, batch = job.layout, job.global_batch
    few, all_of_them = (
        estimate(training_for(one), layout, batch).memory
        for one in (job, job.with_(facts={**job.facts, "loss": "compiled"}))
    )
    assert few["logits"] == 0 < all_of_them["logits"]


@pytest.mark.parametrize("lever", TRAINERS["ms-swift"].levers, ids=lambda lever: lever.flag)
def test_switches_of_ms_swift_are_read_as_the_facts_that_they_stand_for(lever):
    if not lever.flag.startswith("--") or lever.flag.startswith("--dtype"):
        return  # options of partopt
    lever = lever.at(lever.values[-1]) if lever.values else lever
    text = SWIFT.replace("Qwen2.5-7B-Instruct", "Qwen3-30B-A3B").rstrip()
    text = text.replace("--pipeline_model", "--expert_model")
    job, _ = read("ms-swift", f"{text} {lever.flag}\n")
    fact, value = lever.facts[-1]
    stated = job.facts[fact]
    assert f"{stated:g}" == value if isinstance(stated, float) else stated == value


def test_microbatches_of_tokens_ask_how_long_samples_are():
    error = refused("verl", VERL, DYNAMIC=True)
    assert "ppo_max_token_len_per_gpu: microbatches are of 8,192 tokens" in error.message
    assert "`arguments=tokens_per_sample=N`" in error.hint
    assert "4,096, the longest: `arguments=tokens_per_sample=max`" in error.hint
    for mean, count in ((4096, 128), ("max", 128), (1000, 32), (1024, 32), (1025, 34), (1, 2)):
        job, notes = read("verl", VERL, DYNAMIC=True, tokens_per_sample=mean)
        assert (job.global_batch, job.sequence, job.layout.microbatch) == (count, 8192, 1)
        assert any(f"counted as {count} full microbatches of 8,192" in note for note in notes)
        assert job.facts.get("documents") == (4096 if mean == "max" else mean)
    assert any("over the whole of what is packed" in note for note in read("ms-swift", SWIFT)[1])
    packed, notes = read("ms-swift", SWIFT, tokens_per_sample=700)
    assert packed == read("ms-swift", SWIFT)[0].with_(facts={**packed.facts})
    assert packed.facts["documents"] == 700
    assert not any("over the whole" in note for note in notes)
    # ranks of a context parallel group take their part each
    cp = VERL.replace("pipeline_model_parallel_size", "context_parallel_size")
    job, _ = read("verl", cp, DYNAMIC=True, tokens_per_sample="max")
    assert (job.sequence, job.global_batch) == (16384, 64)


@given(samples=st.integers(1, 300), mean=st.integers(1, 4096), per_rank=st.integers(4096, 40_000))
def test_as_many_microbatches_are_counted_as_the_samples_fill(samples, mean, per_rank):
    text = VERL.replace("ppo_mini_batch_size=64", f"ppo_mini_batch_size={samples}")
    text = text.replace("rollout.n=4", "rollout.n=1").replace("per_gpu=8192", f"per_gpu={per_rank}")
    job, _ = read("verl", text, DYNAMIC=True, tokens_per_sample=mean)
    on_replica, room = samples * mean / 2, 0
    while room * per_rank < on_replica:  # of two replicas
        room += 1
    assert job.global_batch == 2 * room


def test_examples_of_verl_are_counted_as_the_longest_or_by_their_tokens():
    job, notes = read("verl", TUNES)
    assert (job.global_batch, job.sequence, job.layout.microbatch) == (64, 2048, 2)
    assert not any("update by" in note for note in notes)
    packed = TUNES.replace("data.use_dynamic_bsz=False", "")
    job, _ = read("verl", packed, tokens_per_sample=512)  # of 8,192 tokens by default
    assert (job.global_batch, job.sequence) == (4, 8192)


def test_the_shape_of_a_model_is_read_in_a_file_beside(tmp_path):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "mine.sh").write_text(f"MODEL_ARGS=({SHAPE})\n")
    text = SLIME.replace(f"MODEL_ARGS=({SHAPE})", 'source "${DIR}/models/mine.sh"')
    arguments = {"tokens_per_sample": "900"}
    job, _ = read_job("slime", text, topology(), arguments, folder=tmp_path)
    assert job == read_job("slime", SLIME, topology(), arguments)[0]
    assert "--num-layers" in refused("slime", text, **arguments).message


def test_what_depends_on_an_unknown_branch_is_asked_for():
    text = VERL.replace("python3 -m", 'if [ "$KIND" = x ]; then ACTOR+=(a.b=1); fi\npython3 -m')
    text = text.replace("ACTOR=(", "KIND=${KIND:-$(detect || echo y)}\nACTOR=(", 1)
    error = refused("verl", text)
    assert error.message.startswith("what ACTOR has depends on KIND")
    assert read("verl", text, KIND="y") == read("verl", VERL)
    more = "actor_rollout_ref.actor.megatron.context_parallel_size={}"
    lines = f'if $(detect); then MORE="{more.format(2)}"; else MORE="{more.format(4)}"; fi\n'
    asked = refused("verl", VERL.replace("python3", f"{lines}python3").replace('"$@"', "\\\n$MORE"))
    assert "MORE" in asked.message


def test_other_devices_than_the_script_has_are_noted():
    _, notes = read_job("verl", VERL, topology(2))
    assert "the script trains on 8 devices, this is on 16" in notes
    assert not any("devices" in note for note in read("verl", VERL)[1])


def test_a_model_of_pictures_is_said_to_be_its_text():
    pictures = SWIFT.replace("Qwen2.5-7B-Instruct", "Qwen3-VL-30B-A3B-Instruct")
    job, notes = read("ms-swift", pictures)
    assert job.model.experts == 128
    assert any("not what reads pictures: `arguments=images=N`" in note for note in notes)
    _, notes = read("ms-swift", SWIFT.replace("Qwen2.5-7B-Instruct", "InternVL3_5-8B"))
    assert "--model: its text alone is planned, not what reads pictures" in notes
    for freezes, tower in (("", "frozen"), ("--freeze_vit false", "trained")):
        job, notes = read("ms-swift", f"{pictures.rstrip()} {freezes}\n", images=512)
        assert (job.facts["images"], job.facts["tower"]) == (512, tower)
        assert training_for(job).pictures.trained_parameters == (tower == "trained") * 538_177_536
        assert not any("reads pictures" in note for note in notes)
    learned = VERL.replace("Qwen3-8B", "Qwen3-VL-8B-Instruct")
    assert read("verl", learned, images=512)[0].facts["tower"] == "trained"
    frozen = learned.replace('"$@"', "actor_rollout_ref.actor.freeze_vision_tower=True")
    assert read("verl", frozen, images=512)[0].facts["tower"] == "frozen"


def test_a_model_may_be_a_configuration_that_lies_there(tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "config.json").write_text(
        '{"model_type": "qwen3", "hidden_size": 256, "num_hidden_layers": 4, "vocab_size": 1024,'
        '"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 512}'
    )
    assert read("ms-swift", SWIFT, model=folder)[0].model.hidden == 256


@pytest.mark.parametrize("name", SAME)
def test_the_script_of_one_trainer_is_no_other_trainers(name):
    text = SAME[name][0]
    for other in ({"megatron", *SAME}) - {name}:
        error = refused(other, text)
        assert error.message == f"the configuration is of {name}"
        assert error.hint == f"partopt import {name}"
    plain = "python pretrain_gpt.py --model-name qwen3-8b --seq-length 4096 --bf16"
    plain += " --micro-batch-size 1 --load /x/verl/y"
    assert refused(name, plain).message == f"nothing in it is of {name}"
    assert read("megatron", plain)[0].model.name == "qwen3-8b"  # whatever its paths are called


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("ms-swift", "--recompute_granularity none"),
        ("verl", "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=1"),
        ("slime", "--context-parallel-size 1"),
    ],
)
def test_a_better_layout_is_set_in_the_words_of_the_script(name, changed):
    text, arguments = SAME[name][0], {"tokens_per_sample": "1024"}
    job, _ = read_job(name, text, topology(), arguments)
    judged = judge_layout(job, None)
    assert judged.best is not None
    changes = change_text(text, judged.plan, judged.best, arguments)
    assert changed in changes.text
    assert changes.says_all or changes.by_hand == ()
    again, _ = read_job(name, changes.text, topology(), arguments)
    for part in ("tp", "cp", "pp", "recompute"):
        assert getattr(again.layout, part) == getattr(judged.best.layout, part)
    assert not any("hidden" in row[0] for row in changes.rows)
