"""Megatron Core's own models: what each rank builds of a small GPT, all ranks in one process."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from tests.trainers.own_code import as_rank

SMALL = {"num_layers": 12, "hidden_size": 8, "num_attention_heads": 2}
ON_CPU = {"use_cpu_initialization": True, "pipeline_dtype": torch.float32}


class Chunk(NamedTuple):
    """What one rank builds for one of its stages."""

    rank: int
    stage: int
    holds: list[str]
    parameters: int


def configured(**fields: Any):
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(**SMALL, **ON_CPU, **fields)


def build(fields: dict[str, Any], replicas: int, ranks_order: str) -> list[Chunk]:
    """The stages that Megatron Core builds, as `configured` is made from `fields`."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    P = fields["pipeline_model_parallel_size"]
    made = []
    for rank in range(P * replicas):
        with as_rank(rank, P * replicas):
            config = configured(**fields)
            chunks = config.virtual_pipeline_model_parallel_size
            parallel_state.initialize_model_parallel(
                pipeline_model_parallel_size=P,
                virtual_pipeline_model_parallel_size=chunks,
                order=ranks_order,
                create_gloo_process_groups=False,
            )
            for chunk in range(chunks or 1):
                place = {"ignore_virtual": False, "vp_stage": chunk}
                model = GPTModel(
                    config,
                    get_gpt_layer_local_spec(),
                    vocab_size=32,
                    max_sequence_length=4,
                    pre_process=parallel_state.is_pipeline_first_stage(**place),
                    post_process=parallel_state.is_pipeline_last_stage(**place),
                    vp_stage=chunk if chunks else None,
                )
                stage = chunk * P + parallel_state.get_pipeline_model_parallel_rank()
                size = sum(parameter.numel() for parameter in model.parameters())
                made.append(Chunk(rank, stage, held_by(model), size))
            parallel_state.destroy_model_parallel()
    return made


def held_by(model) -> list[str]:
    """What a part of a GPT holds, in the words of plans."""
    blocks = [str(layer.layer_number - 1) for layer in model.decoder.layers]
    norm = ["norm"] if model.decoder.final_layernorm is not None else []
    embedding = ["embedding"] if hasattr(model, "embedding") else []
    return [*embedding, *blocks, *norm, *(["head"] if hasattr(model, "output_layer") else [])]
