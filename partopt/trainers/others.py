"""Trainers whose configurations are not read, by what only these have."""

from __future__ import annotations

import re
from collections.abc import Mapping

from partopt.configurations.settings import Settings
from partopt.errors import PartoptError

# names of settings, and programs or modules where the text has no shape
_OTHERS = {
    "GPT-NeoX": (
        r"pipe_parallel_size|pos_emb|gpt_j_residual|no_weight_tying",
        r"deepy\.py|gpt[-_]neox",
    ),
    "nanotron": (r"pp_engine|is_llama_config", r"nanotron"),
    "LLM Foundry": (
        r"sharding_strategy|train_loader|attn_config|expansion_ratio",
        r"llm-?foundry|composer",
    ),
    "lingua": (r"fsdp_type|dump_dir", r"lingua"),
    "InternEvo": (r"hybrid_zero_optimizer|interleaved_overlap", r"internlm|internevo"),
    "ColossalAI": (r"pp_style|num_ckpt_layers_per_stage", r"colossalai"),
    "OLMo-core": (r"d_model", r"olmo_core|olmo"),
    "Axolotl": (r"base_model|sequence_len", r"axolotl"),
    "LLaMA-Factory": (r"finetuning_type|cutoff_len", r"llama-?factory(-cli)?|train_bash\.py"),
    "torchtune": (r"_component_", r"torchtune|tune run"),
    "MaxText": (r"base_emb_dim|(ici|dcn)_\w*parallelism|per_device_batch_size", r"maxtext"),
    "Levanter": (r"axis_resources|num_train_steps", r"levanter"),
    "LitGPT": (r"litgpt\w*|initial_checkpoint_dir", r"litgpt|lit_gpt"),
    "ChatLearn": (r"runtime_args", r"chatlearn\w*"),
    "Megatron-FSDP": (r"fsdp_unit_modules|zero_dp_strategy", r"megatron_fsdp"),
    "FSDP2 in Megatron": (r"use_torch_fsdp2", r"torch_fsdp2"),
    "T5 in Megatron": (r"decoder_seq_length", r"pretrain_t5"),
    "Mamba in Megatron": (r"hybrid_(attention|mlp)_ratio", r"(?!)"),
    "a Trainer of transformers": (
        r"per_device_train_batch_size|fsdp_config|distributed_type",
        r"accelerate launch|run_clm\.py|trl|openrlhf",
    ),
}
# those whose engine is Megatron's, which are read in their words
_DIALECTS = {
    "ms-swift": (r"rlhf_type", r"_?megatron[\s/]+(sft|pt|rlhf)"),
    "verl": (r"actor_rollout_ref", r"verl\.(trainer|experimental|workers)"),
    "slime": (r"actor_num_(nodes|gpus_per_node)|num_rollout|rollout_batch_size", r"slime\.\w+"),
}
_HINT = (
    "partopt reads Megatron-LM, Megatron Bridge and NeMo, Megatron-DeepSpeed, torchtitan, "
    "ms-swift, verl and slime; of another say the model and the layout: partopt plan config.json "
    "--layout tp=8,pp=4 ..."
)


def refuse_others(settings: Settings, trainer: str) -> None:
    """Raise PartoptError, with its name, for the configuration of a trainer that is not read."""
    dialect = _find_trainer(settings, _DIALECTS)
    if trainer in _DIALECTS and dialect == trainer:
        return
    if dialect or trainer in _DIALECTS:
        what = f"the configuration is of {dialect}" if dialect else f"nothing in it is of {trainer}"
        hint = f"partopt import {dialect or 'megatron'}"
        raise PartoptError(what, hint, code="unsupported-trainer")
    if name := _find_trainer(settings, _OTHERS):
        what = f"the configuration is of {name}, which is not read"
        raise PartoptError(what, _HINT, code="unsupported-trainer")
    if trainer == "megatron" and settings.form == "script" and settings.has("deepspeed"):
        raise PartoptError(
            "--deepspeed: the script is of Megatron-DeepSpeed",
            "partopt import deepspeed",
            code="unsupported-trainer",
        )


def _find_trainer(settings: Settings, trainers: Mapping[str, tuple[str, str]]) -> str:
    """The name of the one of the trainers that the text is of; empty where it may be of others."""
    names = [path.rpartition(".")[2] for path, value in settings.values.items() if value]
    shaped = {"num_layers", "hidden_size", "hf_assets_path"} & {*names}
    begins = r"(?im)(^\s*(from|import)\s+|-m\s+|^\s*|/|\s)"  # whose paths may be called anything
    text = (
        "" if shaped or settings.form == "document" else re.sub(r"(?m)^\s*#.*", "", settings.text)
    )
    for name, (setting, programs) in trainers.items():
        if any(re.fullmatch(setting, stated) for stated in names):
            return name
        if re.search(rf"{begins}({programs})(?=[\s./:])", text):
            return name
    return ""
