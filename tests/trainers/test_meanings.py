"""What arguments of Megatron mean: the model, the layout, and what is said of the rest."""

from __future__ import annotations

import pytest

from partopt.documents.topology import Topology
from partopt.errors import PartoptError
from partopt.search.jobs import read_job
from partopt.search.judging import plan_layout
from partopt.search.layout_questions import fill_layout, training_for
from partopt.transformer.iteration import Degrees, stage_counts
from tests.helpers import rows

FLAGS = {
    "num-layers": 80, "hidden-size": 8192, "ffn-hidden-size": 28672, "num-attention-heads": 64,
    "num-query-groups": 8, "seq-length": 4096, "micro-batch-size": 1, "global-batch-size": 256,
    "tensor-model-parallel-size": 8, "pipeline-model-parallel-size": 4, "rotary-base": 10000,
}  # fmt: skip
ALONE = (
    "--group-query-attention --swiglu --untie-embeddings-and-output-weights --bf16 --use-rotary-"
    "position-embeddings --attention-dropout 0 --hidden-dropout 0 --sequence-parallel"
)


def script(changed="", without=(), program="pretrain_gpt.py"):
    """A script of the model of 70 billion parameters, with other flags."""
    said = {f"--{name}": value for name, value in FLAGS.items() if name not in without}
    flags = " ".join(f"{name} {value}" for name, value in said.items())
    rest = " ".join(flag for flag in ALONE.split() if flag[2:] not in without)
    return f"#!/bin/bash\ntorchrun {program} {flags} {rest} {changed}\n"


def read(changed="", *without, trainer="megatron", servers=4, **given):
    """The question of such a script, and notes."""
    text = script(changed, without)
    return read_job(trainer, text, Topology.load("dgx-h100", servers), given)


def facts_of(asked):
    training = training_for(asked)
    degrees = Degrees.of(training, fill_layout(asked, training), asked.global_batch)
    about = {"form": asked.dtype, "stages": stage_counts(training, degrees)}
    return {**asked.facts, **vars_of(asked.layout), **vars_of(asked.model), **about}


def vars_of(own):
    return {name: getattr(own, name) for name in own.__struct_fields__}


VOCABULARIES = [
    ("--vocab-size 1000", 1000),
    ("--vocab-size 1000 --make-vocab-size-divisible-by 128", 1024),
    ("--vocab-size 50000 --padded-vocab-size 50304", 50304),
    ("--pad-vocab-size-to 250880 --tokenizer-type GPT2BPETokenizer", 250880),
    ("--vocab-file /data/gpt2-vocab.json", 51200),  # 50,257 filled up to 8 x 128
    ("--vocab-file /data/gpt2-vocab.json --make-vocab-size-divisible-by 1", 50264),  # by 8
    ("--tokenizer-type GPT2BPETokenizer", 51200),
    ("--tokenizer-type Llama2Tokenizer --tokenizer-model /my/tokenizer.model", 32000),
    ("--tokenizer-type Llama3Tokenizer", 128256),
    ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model meta-llama/Llama-3.1-70B", 128256),
    ("--tokenizer-model Qwen/Qwen2.5-72B --make-vocab-size-divisible-by 1", 152064),
    ("--tokenizer-model Qwen/Qwen3-32B --make-vocab-size-divisible-by 1", 151936),
    ("--patch-tokenizer-type LLama3Tokenizer --extra-vocab-size 256", 128256),
    ("--patch-tokenizer-type LLamaTokenizer --extra-vocab-size 1", 32001),
    ("--patch-tokenizer-type Qwen2Tokenizer --extra-vocab-size 421", 152064),
    ("--tokenizer-type PretrainedFromHF --model-type-hf llama2", 32000),
    ("--patch-tokenizer-type BloomTokenizerFromHF", 250880),
]


def test_a_program_of_bert_attends_both_ways():
    cluster = Topology.load("dgx-h100", 4)
    for program, causal in (("pretrain_gpt.py", True), ("pretrain_bert.py", False)):
        text = script("--vocab-size 32000", program=program)
        assert read_job("megatron", text, cluster)[0].model.causal is causal


def test_a_constant_of_another_file_is_not_the_vocabulary_of_a_named_model():
    text = """from shared import NULL_WORDS

def recipe():
    cfg = common()
    cfg.model = AutoBridge.from_hf_pretrained("meta-llama/Meta-Llama-3-8B")
    cfg.tokenizer.vocab_size = NULL_WORDS
    cfg.model.seq_length = 4096
    cfg.train.global_batch_size = 64
    cfg.train.micro_batch_size = 1
    return cfg
"""
    asked, _ = read_job("megatron-bridge", text, Topology.load("dgx-h100", 1))
    assert asked.model.vocabulary == 128_256
    other = text.replace("tokenizer.vocab_size = NULL_WORDS", 'tokenizer.tokenizer_model = "gpt2"')
    asked, notes = read_job("megatron-bridge", other, Topology.load("dgx-h100", 1))
    assert asked.model.vocabulary == 50_304 and "by the name gpt2" in " ".join(notes)


@pytest.mark.parametrize(("flags", "words"), VOCABULARIES)
def test_the_vocabulary_follows_what_is_said(flags, words):
    asked, _ = read(flags)
    assert asked.model.vocabulary == words


@pytest.mark.parametrize(("base", "name"), [("10000", "llama2-70b"), ("500000.0", "llama3-70b")])
def test_the_rotary_base_tells_two_models_of_one_shape_apart(base, name):
    asked, notes = read(f"--rotary-base {base}", "rotary-base")
    assert asked.model.name == name
    assert f"as {name} of the same shape has" in notes[0]
    with pytest.raises(PartoptError, match=r"llama2-70b has 32,000, llama3-70b has 128,256"):
        read("", "rotary-base")


def test_the_words_of_an_unknown_tokenizer_are_asked_for():
    own = "--tokenizer-type HuggingFaceTokenizer --tokenizer-model our/words-of-250k"
    with pytest.raises(PartoptError, match="the words of our/words-of-250k are not known"):
        read(own)
    assert read(own, vocab_size="250000")[0].model.vocabulary == 250_000
    file = "--tokenizer-type Llama2Tokenizer --tokenizer-model /data/words-of-100k.model"
    with pytest.raises(PartoptError, match=r"the words of /data/words-of-100k\.model are"):
        read(file)  # whose class alone is that of Llama
    folder = "--tokenizer-type GPT2BPETokenizer --vocab-file /data/our_tokenizer_250000/vocab.json"
    with pytest.raises(PartoptError, match=r"the words of data/our_tokenizer_250000/vocab\.json"):
        read(folder)
    with pytest.raises(PartoptError, match="of the same shape llama2-70b has 32,000"):
        read("--tokenizer-type SentencePieceTokenizer --tokenizer-model $SPM")
    for nothing in ("/data/tokenizer.model", "'your tokenizer path'", "$TOKENIZER"):
        assert read(f"--tokenizer-model {nothing}")[0].model.vocabulary == 32_000


def test_which_of_several_runs_is_meant_is_asked_for():
    run = script("--vocab-size 1000", ["bf16"]).removeprefix("#!/bin/bash\n").strip()
    text = f"""#!/bin/bash
FP_TYPE=$1
if [ $FP_TYPE = bf16 ]; then {run} --bf16
elif [ $FP_TYPE = fp8 ]; then {run} --bf16 --fp8-format hybrid
else {run} --fp16
fi
"""
    with pytest.raises(PartoptError, match=r"--fp8-format: depends on \$1"):
        read_job("megatron", text, Topology.load("dgx-h100", 4))
    for given, form in (("bf16", "bfloat16"), ("fp8", "fp8"), ("other", "float16")):
        asked, _ = read_job("megatron", text, Topology.load("dgx-h100", 4), {"1": given})
        assert asked.dtype == form


# experts with biases are whole
UNCUT = "--num-experts 8 --expert-tensor-parallel-size 1"
MODELS = [
    ("--hidden-dropout 0.1", {"dropout": True}, ""),  # two unequal dropouts
    ("--attention-dropout 0.1", {"dropout": True}, ""),
    ("--window-size 1023,0 --window-attn-skip-freq 1", {"window": 0}, ""),
    ("--window-size 1023,0 --window-attn-skip-freq [1]*80", {"window": 1024}, ""),
    ("--window-size 7", {"window": 8}, ""),
    ("--num-experts 1", {"experts": 0, "ffn": 28672}, ""),
    (f"{UNCUT} --moe-layer-freq -1 --first-k-dense-replace -1", {"experts": 8}, ""),
    (f"{UNCUT} --moe-layer-freq '([1]*80)'", {"experts": 8, "ffn": 0}, ""),
    (f"{UNCUT} --first-k-dense-replace 3", {"dense_first": 3, "ffn": 28672}, ""),
    (f"{UNCUT} --moe-layer-freq [0]+[1]*79", {"dense_first": 1}, ""),
    ("--num-experts 8 --moe-layer-freq [0]*80", {"experts": 0, "ffn": 28672}, ""),
    (f"{UNCUT} --moe-shared-expert-intermediate-size 0", {"ffn": 0}, ""),
    ("--ffn-hidden-size 21824", {"ffn": 21824}, "ffn-hidden-size"),
    (f"{UNCUT} --moe-token-dispatcher-type alltoall", {"expert_ffn": 28672}, ""),
    ("", {"ffn": 8192 * 8 // 3 // 64 * 64}, "ffn-hidden-size"),
    ("--quick-geglu", {"ffn": 4 * 8192, "gated": True}, "ffn-hidden-size swiglu"),
    ("", {"ffn": 4 * 8192, "gated": False}, "ffn-hidden-size swiglu"),
    ("--encoder-num-layers 40", {"blocks": 40}, "num-layers"),
    ("--num_layers=40 --hidden_size 4096", {"blocks": 40, "hidden": 4096}, "num-layers"),
    ("--num-layers 82 --noop-layers 80,81", {"blocks": 80}, "num-layers"),
    ("--kv-channels 64", {"head_size": 64}, ""),
    ("--position-embedding-type yarn", {"rotary": True}, "use-rotary-position-embeddings"),
    ("--position-embedding-type none", {"rotary": False}, "use-rotary-position-embeddings"),
    ("--multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-pos-emb-head-dim 32",
     {"kv_heads": 64, "head_size": 192}, ""),
    ("--num-experts 8 --moe-intermediate-size 2048 --disable-bias-linear", {"expert_ffn": 2048},
     ""),  # MindSpeed's
    ("--t5-swiglu", {"gated": True, "ffn": 28672}, "swiglu"),  # OpenGPT-X's
    ("--hidden-size 4096 --multiple-of 256", {"ffn": 11008}, "ffn-hidden-size"),  # FlagScale's
    ("--hidden-size 2048 --multiple-of 256 --hidden-dim-multiplier 2", {"ffn": 11008},
     "ffn-hidden-size"),
    ("--attention-head-type multiquery --tensor-model-parallel-size 1", {"kv_heads": 1},
     "group-query-attention num-query-groups"),  # BigCode's
]  # fmt: skip


@pytest.mark.parametrize(("flags", "values", "without"), MODELS)
def test_the_model_is_as_its_arguments_say(flags, values, without):
    asked, _ = read(f"{flags} --vocab-size 32000", *without.split())
    assert {name: facts_of(asked)[name] for name in values} == values


TRAININGS = [
    ("--recompute-activations", {"recompute": "selective"}, ""),
    ("--recompute-granularity selective", {"recompute": "selective"}, ""),
    ("--recompute-granularity full --recompute-method uniform", {"recompute": "always"}, ""),
    ("--activations-checkpoint-method uniform", {"recompute": "always"}, ""),  # of 2021
    ("--activations-checkpoint-method block --activations-checkpoint-num-layers 3",
     {"recompute": 3}, ""),
    ("--recompute-method uniform", {"recompute": "never"}, ""),
    ("--checkpoint-activations", {"recompute": "always"}, ""),
    ("--recompute-granularity full --recompute-method block --recompute-num-layers 20",
     {"recompute": "always"}, ""),  # of 20 in a stage
    ("--recompute-granularity full --recompute-method block --recompute-num-layers 5"
     " --num-layers-per-virtual-pipeline-stage 10", {"recompute": 5, "chunks": 2}, ""),
    ("--recompute-granularity full --recompute-method block --recompute-num-layers 10"
     " --enable-recompute-layers-per-pp-rank --num-layers-per-virtual-pipeline-stage 10",
     {"recompute": 5, "chunks": 2}, ""),
    ("--account-for-embedding-in-pipeline-split --num-layers 79", {"stages": [19, 20, 20, 20]},
     "num-layers"),
    ("--num-layers-per-virtual-pipeline-stage 20", {"chunks": 1}, ""),
    ("--num-virtual-stages-per-pipeline-rank 5", {"chunks": 5}, ""),
    ("--num-layers-per-virtual-pipeline-stage 5", {"chunks": 4}, ""),
    ("--use-distributed-optimizer", {"shard": "optimizer"}, ""),
    ("", {"shard": "none"}, ""),
    ("--grad-reduce-in-bf16", {"gradients": "parameters"}, ""),
    ("--main-grads-dtype bf16", {"gradients": "parameters"}, ""),
    ("--fp16", {"gradients": "parameters", "form": "float16"}, "bf16"),
    ("--fp16 --accumulate-allreduce-grads-in-fp32", {"gradients": None}, "bf16"),
    ("--accumulate-allreduce-grads-in-fp32", {"gradients": None}, ""),
    ("--fp8-hybrid", {"form": "fp8"}, ""),
    ("", {"ends": "stage"}, ""),
    ("--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"
     " --num-layers 78", {"ends": "blocks"}, "num-layers"),
    ("--account-for-loss-in-pipeline-split --num-layers 79", {"stages": [20, 20, 20, 19]},
     "num-layers"),
    ("--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"
     " --num-layers 78 --num-layers-per-virtual-pipeline-stage 10", {"ends": "blocks", "chunks": 2},
     "num-layers"),
    ("--account-for-loss-in-pipeline-split --num-layers 79 --num-layers-per-virtual-pipeline-stage"
     " 10", {"chunks": 2, "stages": [10, 10, 10, 10, 10, 10, 10, 9]}, "num-layers"),
    ("--ddp-bucket-size 10000000", {"bucket": 40_000_000}, ""),
    ("--no-overlap-p2p-communication", {"waits": "1f1b,interleaved"}, ""),
    ("--tp-comm-overlap", {"tp-overlap": "yes"}, ""),
    ("", {"sequence-parallel": "no"}, "sequence-parallel"),
    ("--decoder-first-pipeline-num-layers 17", {"stages": [17, 21, 21, 21]}, ""),
    ("--decoder-last-pipeline-num-layers 14", {"stages": [22, 22, 22, 14]}, ""),
    ("--decoder-first-pipeline-num-layers 18 --decoder-last-pipeline-num-layers 18"
     " --num-virtual-stages-per-pipeline-rank 2", {"stages": [9, 11, 11, 9, 9, 11, 11, 9]}, ""),
    ("--num-layer-list 17,20,22,21", {"stages": [17, 20, 22, 21]}, ""),
    ("--pipeline-model-parallel-blocks 17,20,22,21", {"stages": [17, 20, 22, 21]}, ""),
    ("--noop-layers 79 --num-layers-per-virtual-pipeline-stage 10",
     {"stages": [10, 10, 10, 10, 10, 10, 10, 9], "chunks": 2}, ""),
]  # fmt: skip


@pytest.mark.parametrize(("flags", "values", "without"), TRAININGS)
def test_the_training_is_as_its_arguments_say(flags, values, without):
    asked, _ = read(f"{flags} --vocab-size 32000", *without.split())
    assert {name: facts_of(asked).get(name) for name in values} == values
    assert plan_layout(asked).layout.pp == 4


def test_the_stages_of_a_plan_are_those_that_are_listed():
    asked, _ = read("--num-layer-list 17,20,22,21")
    stages = plan_layout(asked).stages
    assert [stage.stop - stage.start for stage in stages] == [18, 20, 22, 23]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--num-layer-list 17,20,22,20", "17-20-22-20"),
        ("--num-layer-list 40,40", "40-40"),
        ("--num-layer-list x", "none"),
        ("--decoder-first-pipeline-num-layers 17 --num-layers 79", "17-20-20-20"),
        ("--decoder-last-pipeline-num-layers 100", "-7--7--7-100"),
    ],
)
def test_stages_that_do_not_make_the_model_are_refused(flags, said):
    with pytest.raises(PartoptError, match=f"stages of {said} blocks are not 4 x 1 of"):
        read(f"--vocab-size 32000 {flags}")


NOTES = rows("""
    --rampup-batch-size 16 16 1000 | --rampup-batch-size: the batch is taken to be whole
    --use-checkpoint-args | --use-checkpoint-args: the checkpoint says the shape
    --recompute-activations --recompute-modules mlp mhc | --recompute-modules: mhc is not
    --fine-grained-activation-offloading --offload-modules core_attn gdp_qkv |
        --offload-modules: gdp_qkv is not counted as offloaded
    --activation-offload-fraction 0.5 | all that modules save is counted as offloaded
    --recompute-granularity full --recompute-num-layers 4 | recomputed one by one
    --num-experts 8 --moe-expert-capacity-factor 1.25 | spread evenly over experts
    --fancy-kernels 3 | not read, and may change time, memory or the model: --fancy-kernels
    --fp32-residual-connection | may change time, memory or the model: --fp32-residual
    --no-bias-swiglu-fusion | model: --no-bias-swiglu-fusion
    --optimizer lion | --optimizer: its state is counted as Adam's
    --num-experts 8 | --moe-token-dispatcher-type: allgather is counted as alltoall
    --fp8-format hybrid --use-megatron-fsdp | gathered in the format of products
    --transformer-impl local | no scores, but with `attention=scores`
    --attention-backend unfused | no scores, but with `attention=scores`
    --msamp | --msamp: formats of MS-AMP are not counted
    --use-lf-gate | --use-lf-gate: convolutions beside attention are not counted
    --position-embedding-type alibi | --position-embedding-type: alibi is counted as learned
""")


@pytest.mark.parametrize(("flags", "words"), NOTES)
def test_what_is_not_read_is_named(flags, words):
    _, notes = read(f"{flags} --vocab-size 32000")
    assert words in " / ".join(notes)


HUGE = "99999999999"


@pytest.mark.parametrize(
    "flags",
    [
        f"--num-layers {HUGE} --num-experts 8 --moe-layer-freq 2",
        f"--num-layers {HUGE} --pipeline-model-parallel-size {HUGE} --noop-layers 3",
        f"--num-layers {HUGE} --num-virtual-stages-per-pipeline-rank 9999999 --noop-layers 3",
        "--num-experts 8 --moe-layer-freq " + "+".join(["[0]*9999"] * 999 + ["[1]"]),
    ],
)
def test_huge_numbers_are_refused_at_once(flags):
    with pytest.raises(PartoptError):
        plan_layout(read(f"{flags} --vocab-size 1000")[0])


SILENT = (
    "--lr 1e-4 --min-lr 0 --adam-beta1 0.9 --weight-decay 0.1 --clip-grad 1 --seed 3 --log-interval"
    " 1 --save /x --load /x --save-interval 5 --tensorboard-dir /t --wandb-project p"
    " --train-iters 9"
    " --eval-iters 3 --data-path /d --split 99,1,0 --num-workers 3 --init-method-std 0.01"
    " --distributed-timeout-minutes 3 --ckpt-format torch --norm-epsilon 1e-5 --optimizer adam"
    " --use-flash-attn --attention-softmax-in-fp32 --no-load-optim --exit-duration-in-mins 30"
    " --distributed-backend nccl --lr-warmup-fraction 0.1 --no-mmap-bin-files --log-throughput"
    " --log-memory-to-tensorboard --abort-on-unmet-fused-kernel-constraints"
    " --max-position-embeddings 4096 --disable-bias-linear --normalization RMSNorm --manual-gc"
)


def test_what_changes_nothing_is_passed_over():
    assert read(f"{SILENT} --vocab-size 32000")[1] == []


REFUSED = rows("""
    --tensor-model-parallel-size 0 | tensor-model-parallel-size | '0' is not a positive number
    --num-layers 0 | num-layers | --num-layers: '0' is not a positive number
    --micro-batch-size 0 | micro-batch-size | --micro-batch-size: '0' is not a positive number
    --window-size 9,0 --window-attn-skip-freq [0]+[1]*79 | | --window-attn-skip-freq: blocks
    --num-experts 8 --moe-layer-freq [1,0]*40 | | --moe-layer-freq: blocks of two kinds
    --num-experts 8 --moe-layer-freq some | | 'some' does not say which of 80 blocks
    --hybrid-layer-pattern M*D | | letters that are not planned: D
    --use-checkpoint-args | num-query-groups | the checkpoint says it
    --deepspeed --vocab-size 1000 | | --deepspeed: the script is of Megatron-DeepSpeed
    --num-layers 78 --vocab-size 1000 | num-layers | 78 blocks are not a multiple of 4 stages
    --num-virtual-stages-per-pipeline-rank 3 --vocab-size 1000 | | not a multiple of 12 stages
    --use-torch-fsdp2 | num-layers | FSDP2 in Megatron
""")


@pytest.mark.parametrize(("flags", "without", "words"), REFUSED)
def test_what_cannot_be_planned_is_refused(flags, without, words):
    with pytest.raises(PartoptError) as raised:
        read(flags, *without.split())
    assert words in raised.value.message


DEEPSPEED = """#!/bin/bash
cat <<EOT > ds.json
{"zero_optimization": {"stage": 0}, "bf16": {"enabled": true}}
EOT
"""
ZERO = [
    ("", "optimizer", "float32"),  # the optimizer of bfloat16 shares its state by itself
    ('"stage": 1', "optimizer", None),
    ('"fp16": {"enabled": true}', "none", None),
    ('"fp16": {"enabled": false}, "bf16": {"enabled": true}', "optimizer", "float32"),
]


@pytest.mark.parametrize(("changed", "shard", "gradients"), ZERO)
def test_what_replicas_share_in_deepspeed(changed, shard, gradients):
    config = DEEPSPEED
    if "stage" in changed:
        config = config.replace('"stage": 0', changed)
    elif changed:
        config = config.replace('"bf16": {"enabled": true}', changed)
    flags = "--deepspeed --vocab-size 32000 --no-query-key-layer-scaling"
    text = config + script(flags, ["bf16"]).replace("#!/bin/bash\n", "")
    asked, _ = read_job("deepspeed", text, Topology.load("dgx-h100", 4))
    assert (asked.layout.shard, asked.facts.get("gradients")) == (shard, gradients)
    assert asked.dtype == ("float16" if '"fp16": {"enabled": true}' in changed else "bfloat16")


def test_the_fused_kernel_of_habana_keeps_no_scores():
    asked, _ = read("--vocab-size 1000 --use-fused-sdpa 1", trainer="deepspeed")
    assert asked.facts["attention"] == "flash"


def test_stages_of_deepspeed_are_as_its_partition_method_says():
    flags = "--deepspeed --vocab-size 1000 --num-layers 78 --pp-partition-method"
    asked, _ = read(f"{flags} 'type:transformer|embedding'", "num-layers", trainer="deepspeed")
    assert facts_of(asked)["stages"] == [19, 20, 20, 19]
    flags = f"{flags} type:transformer"
    asked, _ = read(f"{flags} --pipeline-model-parallel-size 2 --pp-partition-method embed",
                    "num-layers", trainer="deepspeed")  # fmt: skip
    assert facts_of(asked)["stages"] == [39, 39] and asked.facts["ends"] == "blocks"
    asked, _ = read(flags, "num-layers", trainer="deepspeed")
    assert facts_of(asked)["stages"] == [20, 20, 19, 19]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--num-experts 8", "--expert-interval: blocks of two kinds"),
        ("--zero-stage 3", "ZeRO stage 3"),
    ],
)
def test_what_pipelines_of_deepspeed_do_not_have(flags, words):
    with pytest.raises(PartoptError, match=words):
        read(f"--deepspeed --vocab-size 1000 {flags}", trainer="deepspeed")


def test_a_configuration_of_deepspeed_alone_is_refused_by_its_stage_first():
    text = '{"zero_optimization": {"stage": 3}, "train_batch_size": 32}'
    with pytest.raises(PartoptError) as raised:
        read_job("deepspeed", text, Topology.load("dgx-h100", 1))
    assert raised.value.message.startswith("ZeRO stage 3")


RECIPE = """
from nemo.collections.llm.gpt.model.mixtral import MixtralConfig8x7B, MixtralModel


def model():
    return run.Config(MixtralModel, config=run.Config(MixtralConfig8x7B))


def trainer(tensor_parallelism: int = 2, pipeline_parallelism: int = 4, virtual: int = 8):
    strategy = run.Config(
        nl.MegatronStrategy,
        tensor_model_parallel_size=tensor_parallelism,
        pipeline_model_parallel_size=pipeline_parallelism,
        virtual_pipeline_model_parallel_size=virtual,
        expert_model_parallel_size=8,
        sequence_parallel=True,
        ddp=run.Config(DistributedDataParallelConfig, grad_reduce_in_fp32=True),
    )
    return run.Config(nl.Trainer, plugins=bf16_mixed(), strategy=strategy)


def recipe():
    return run.Partial(
        pretrain,
        model=model(),
        trainer=trainer(),
        data=run.Config(MockDataModule, seq_length=4096, global_batch_size=512, micro_batch_size=1),
    )
"""


def bridge(text, function=None, **given):
    return read_job(
        "megatron-bridge", text, Topology.load("dgx-h100", 16), given, function=function
    )


def test_a_recipe_of_nemo_names_its_model_by_a_class():
    asked, notes = bridge(RECIPE, "recipe")
    assert asked.model.name == "mixtral-8x7b" and asked.dtype == "bfloat16"
    own = asked.layout
    assert (own.tp, own.pp, own.chunks, own.shard) == (2, 4, 8, "optimizer")
    assert (own.ep, own.etp) == (8, 2)  # as many as the tensor parallel ranks by default
    assert "the shape of mixtral-8x7b, which MixtralConfig8x7B names" in notes
    assert asked.facts == {"ends": "stage", "graphs": "none"}


def test_arguments_of_a_recipe_that_is_imported_are_read_by_their_names():
    text = """
from nemo.collections import llm

recipe = llm.llama3_70b.trainer(tensor_parallelism=8, pipeline_parallelism=4,
    virtual_pipeline_parallelism=5, context_parallelism=2, sequence_parallelism=True)
data = Data(seq_length=8192, gbs=64, mbs=1)
"""
    asked, _ = bridge(text)
    own = asked.layout
    assert (asked.model.name, asked.global_batch) == ("llama3-70b", 64)
    assert (own.tp, own.pp, own.chunks, own.cp, own.microbatch) == (8, 4, 5, 2, 1)


def test_a_batch_that_is_nowhere_is_asked_for():
    for name in ("global_batch_size", "micro_batch_size", "seq_length"):
        text = RECIPE.replace(f"{name}=", "other=")
        with pytest.raises(PartoptError, match=f"{name}: the configuration does not say it"):
            bridge(text, "recipe")


@pytest.mark.parametrize(
    ("changed", "form"),
    [
        ("plugins=precision('fp8_cs')", "fp8"),
        ("plugins=bf16_with_mxfp8()", "mxfp8"),
        ("precision='16-mixed'", "float16"),
    ],
)
def test_the_format_is_that_of_a_recipe_of_precision(changed, form):
    assert bridge(RECIPE.replace("plugins=bf16_mixed()", changed), "recipe")[0].dtype == form


def test_float32_is_not_planned_unless_another_format_is_asked_for():
    recipe = RECIPE.replace("plugins=bf16_mixed()", "precision=32")
    with pytest.raises(PartoptError, match="precision 32: it trains in float32") as refused:
        bridge(recipe, "recipe")
    assert "`dtype=bfloat16`" in str(refused.value.hint)
    topology = Topology.load("dgx-h100", 4)
    for dtype in ("bfloat16", "fp8"):
        asked, _ = read_job("megatron", script("", ["bf16"]), topology, dtype=dtype)
        assert asked.dtype == dtype


@pytest.mark.parametrize(
    ("said", "facts"),
    [
        ("'none'", {}),
        ("'lora'", {"lora": 32}),
        ("LoRA(dim=8, dropout=0.1)", {"lora": 8, "lora-dropout": "yes"}),
        (
            "LoRA(target_modules=['linear_proj', 'linear_qkv'])",
            {"lora": 32, "lora-targets": "qkv+proj"},
        ),
    ],
)
def test_adapters_are_facts(said, facts):
    text = RECIPE.replace("trainer=trainer(),", f"trainer=trainer(), peft={said},")
    asked, _ = bridge(text, "recipe")
    assert {name: value for name, value in asked.facts.items() if "lora" in name} == facts


def test_a_packed_sample_is_said_to_be_counted_as_one():
    text = RECIPE.replace("trainer=trainer(),", "trainer=trainer(), packed_sequence_size=4096,")
    _, notes = bridge(text, "recipe")
    assert "packed_sequence_size: without `--with documents=` a sample is counted as one" in notes


@pytest.mark.parametrize(
    ("said", "what"),
    [
        ("peft='dora'", "peft: training of few weights, as LoRA: not planned"),
        ("peft=LoRA(target_modules=['experts'])", "target_modules: experts: not planned"),
        ("freeze_layers=4", "freeze_layers: frozen weights: not planned"),
    ],
)
def test_other_trainings_of_few_weights_are_refused(said, what):
    with pytest.raises(PartoptError, match=what):
        bridge(RECIPE.replace("trainer=trainer(),", f"trainer=trainer(), {said},"), "recipe")


@pytest.mark.parametrize("spec", ["a.mamba_layer_specs mamba_stack_spec", "b.qwen3_next get_spec"])
def test_a_specification_of_other_blocks_is_refused(spec):
    with pytest.raises(PartoptError, match="--spec: blocks of another kind: not planned"):
        read(f"--spec {spec}")
    assert read("--spec megatron.core.models.gpt.gpt_layer_specs get_spec")


def test_no_blocks_may_be_made_again():
    whole = "--recompute-granularity full --recompute-num-layers 0 --recompute-method"
    assert read(f"{whole} block")[0].layout.recompute == "never"
    assert read(f"{whole} uniform")[0].layout.recompute == "always"


@pytest.mark.parametrize(
    "said", ["--tuner_type lora", "--train_type lora", "--lora_rank 8", "--load_in_4bit true"]
)
def test_a_script_of_adapters_is_no_training_of_all_weights(said):
    with pytest.raises(PartoptError, match="not planned"):
        read(said)


def test_experts_of_a_model_that_has_none_are_as_its_feed_forward():
    text = RECIPE.replace("MixtralConfig8x7B", "Llama3Config8B")
    text = text.replace("sequence_parallel=True", "num_moe_experts=8")
    model = bridge(text, "recipe")[0].model
    assert (model.experts, model.expert_ffn, model.ffn) == (8, 14336, 0)


def test_the_name_of_a_run_is_not_its_model():
    asked, _ = read("--model-name llama3-8b --vocab-size 1000", "swiglu", "use-rotary")
    assert (asked.model.gated, asked.model.blocks) == (False, 80)


def test_a_model_is_named_on_the_command_line():
    asked, _ = read("", *FLAGS, *(name[2:] for name in ALONE.split() if "swiglu" in name),
                    model_name="llama3-8b", seq_length="2048", micro_batch_size="1")  # fmt: skip
    assert asked.model.name == "llama3-8b"


OTHERS = [
    ("pipe_parallel_size: 4\nmodel_parallel_size: 2\nnum_layers: 44\n", "GPT-NeoX"),
    ('{"pipe-parallel-size": 0, "pos-emb": "rotary",\n "num-layers": 44}\n', "GPT-NeoX"),
    (
        "max_seq_len: 2048\nmodel: {name: mpt_causal_lm, d_model: 768}\ntrain_loader: {x: 1}\n",
        "LLM Foundry",
    ),
    (
        "dump_dir: /x\nmodel: {dim: 2048, n_layers: 25}\ndistributed: {fsdp_type: full_shard}\n",
        "lingua",
    ),
    ("model_name: pythia-1b\ninitial_checkpoint_dir: x\ntrain: {micro_batch_size: 4}\n", "LitGPT"),
    (
        "JOB_NAME = '7b'\nmodel = dict(hidden_size=4096)\nhybrid_zero_optimizer = dict(x=1)\n",
        "InternEvo",
    ),
    (
        "#!/bin/bash\ncolossalai run --nproc_per_node 8 benchmark.py --plugin zero2 --tp 1\n",
        "ColossalAI",
    ),
    (
        "#!/bin/bash\npython src/train_bash.py --stage sft --cutoff_len 1024 --bf16\n",
        "LLaMA-Factory",
    ),
    ("parallelism: {pp: 2, pp_engine: 1f1b}\nmodel: {x: 1}\n", "nanotron"),
    (script("--decoder-seq-length 128"), "T5 in Megatron"),
    (script("--hybrid-attention-ratio 0.1"), "Mamba in Megatron"),
    ("from olmo_core.train import TrainerConfig\n\nrun = TrainerConfig(steps=3)\n", "OLMo-core"),
    ("base_model: meta-llama/Llama-3-8B\nmicro_batch_size: 2\n", "Axolotl"),
    ("stage: sft\nfinetuning_type: lora\n", "LLaMA-Factory"),
    ("model:\n  _component_: torchtune.models.llama3.llama3_8b\n", "torchtune"),
    ("#!/bin/bash\npython3 -m maxtext.train base.yml ici_fsdp_parallelism=8\n", "MaxText"),
    ("trainer:\n  train_batch_size: 512\nnum_train_steps: 9\n", "Levanter"),
    ("#!/bin/bash\naccelerate launch run.py --per-device-train-batch-size 1\n", "a Trainer of"),
    ("#!/bin/bash\ntorchrun -m megatron_fsdp.train a=1\n", "Megatron-FSDP"),
]


@pytest.mark.parametrize(("text", "name"), OTHERS, ids=lambda own: own[:12])
@pytest.mark.parametrize("trainer", ["megatron", "torchtitan"])
def test_another_trainer_is_refused_by_its_name(text, name, trainer):
    with pytest.raises(PartoptError, match=f"the configuration is of {name}") as raised:
        read_job(trainer, text, Topology.load("dgx-h100", 1))
    assert "partopt reads Megatron-LM, Megatron Bridge and NeMo" in raised.value.hint


def test_a_path_that_is_called_as_another_trainer_is_none():
    assert read("--vocab-size 32000 --data-path /home/nanotron/data --save /verl/x")[0]
