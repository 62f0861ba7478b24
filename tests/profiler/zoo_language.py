"""Models of transformers, by tiny configurations with random weights.

`attn_implementation` is the library's own choice; what is random is drawn anew by each build.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from partopt.profiler.source import with_torchvision

VOCABULARY, LENGTH = 97, 16
_BLOCKS = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3}
_BLOCKS |= {"num_attention_heads": 4}
_ENCODER = {**_BLOCKS, "vocab_size": VOCABULARY, "max_position_embeddings": 32}
_DECODER = {**_ENCODER, "num_key_value_heads": 2, "use_cache": False}
_PICTURES = {**_BLOCKS, "image_size": 32, "patch_size": 8}


def transformers_model(kind: str, config: str, **options: Any) -> nn.Module:
    """The model class `kind` of transformers for the configuration class `config`."""
    import transformers

    made = with_torchvision(lambda: getattr(transformers, config)(**options))
    return with_torchvision(lambda: getattr(transformers, kind))(made)


def gpt2() -> nn.Module:
    sizes = {"n_positions": 32, "n_embd": 32, "n_layer": 3, "n_head": 4, "use_cache": False}
    return transformers_model("GPT2LMHeadModel", "GPT2Config", vocab_size=VOCABULARY, **sizes)


def bert() -> nn.Module:
    return transformers_model("BertForMaskedLM", "BertConfig", **_ENCODER)


def albert() -> nn.Module:
    """One block, called three times."""
    return transformers_model("AlbertForMaskedLM", "AlbertConfig", embedding_size=16, **_ENCODER)


def mistral() -> nn.Module:
    return transformers_model("MistralForCausalLM", "MistralConfig", sliding_window=8, **_DECODER)


def mixtral() -> nn.Module:
    options = {**_DECODER, "num_local_experts": 4, "output_router_logits": True}
    return transformers_model("MixtralForCausalLM", "MixtralConfig", **options)


def llama() -> nn.Module:
    return transformers_model("LlamaForCausalLM", "LlamaConfig", **_DECODER)


def checkpointed_llama() -> nn.Module:
    """LLaMA that computes its blocks again in the backward."""
    model = llama()
    model.gradient_checkpointing_enable()  # type: ignore[operator]
    return model


def t5() -> nn.Module:
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    sizes |= {"vocab_size": VOCABULARY, "decoder_start_token_id": 0, "use_cache": False}
    return transformers_model("T5ForConditionalGeneration", "T5Config", **sizes)


def whisper() -> nn.Module:
    sizes = {"vocab_size": VOCABULARY, "num_mel_bins": 8, "d_model": 32, "use_cache": False}
    for part in ("encoder", "decoder"):
        sizes |= {f"{part}_layers": 2, f"{part}_attention_heads": 4, f"{part}_ffn_dim": 64}
    sizes |= {"max_source_positions": 16, "max_target_positions": 32, "pad_token_id": 0}
    sizes |= {"bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    return transformers_model("WhisperForConditionalGeneration", "WhisperConfig", **sizes)


def vit() -> nn.Module:
    return transformers_model("ViTForImageClassification", "ViTConfig", **_PICTURES)


def clip() -> nn.Module:
    """Two towers of equal depth, the text's and the picture's."""
    return transformers_model(
        "CLIPModel",
        "CLIPConfig",
        text_config={**_ENCODER, "num_hidden_layers": 2, "eos_token_id": 2, "pad_token_id": 0},
        vision_config={**_PICTURES, "num_hidden_layers": 2},
        projection_dim=16,
    )


def ids(size: int) -> dict[str, Tensor]:
    """Token ids, and the same as labels."""
    tokens = torch.arange(size * LENGTH).reshape(size, LENGTH) % (VOCABULARY - 3) + 3
    return {"input_ids": tokens, "labels": tokens}


def masked_ids(size: int) -> dict[str, Tensor]:
    """Token ids of which the last quarter is padding."""
    mask = (torch.arange(LENGTH) < LENGTH * 3 // 4).long().expand(size, LENGTH).contiguous()
    return {**ids(size), "attention_mask": mask}


def sounds(size: int) -> dict[str, Tensor]:
    """Mel bins over time, and the tokens said."""
    return {"input_features": torch.randn(size, 8, 32), "labels": ids(size)["labels"]}


def pictures_and_ids(size: int) -> dict[str, Any]:
    """Pictures, and the tokens that describe them."""
    return {
        "input_ids": ids(size)["input_ids"],
        "pixel_values": torch.randn(size, 3, 32, 32),
        "return_loss": True,
    }
