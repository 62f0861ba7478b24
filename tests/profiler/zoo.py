"""The zoo: small models of many kinds, and what a profile of each must say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from partopt.documents.profile import Profile
from tests.profiler import zoo_language as language
from tests.profiler import zoo_odd as odd
from tests.profiler import zoo_vision as vision
from tests.profiler.helpers import structure


@dataclass(frozen=True)
class Animal:
    """A model, its inputs for a microbatch, and what its profile must say."""

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[int], Any]
    layers: int = 0
    producers: int = 0  # the most layers whose results cross one cut; 1 in a chain
    heaviest: str = ""  # the first of the layers of most operations
    size: int = 2
    loss_fn: Any = None
    random_states: int = 0  # that checkpoints keep, which are no tensors that an operation makes
    sparse: bool = False  # has gradients that grow from step to step

    def observe(self) -> tuple[nn.Module, Any, Profile]:
        """The model, its inputs, and its profile at one microbatch size, without real time."""
        torch.manual_seed(0)
        model, inputs = self.build().train(), self.inputs(self.size)
        sizes = {"granularity": "auto", "microbatch_sizes": [self.size]}
        return model, inputs, structure(model, lambda _: inputs, self.loss_fn, **sizes)


def pictures(side: int) -> Callable[[int], Tensor]:
    return lambda size: torch.randn(size, 3, side, side)


def named_pictures(size: int) -> dict[str, Tensor]:
    return {"pixel_values": pictures(32)(size), "labels": torch.zeros(size, dtype=torch.long)}


def noisy(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 3, 32, 32), torch.arange(size) * 10.0


def vectors(*shape: int) -> Callable[[int], Tensor]:
    return lambda size: torch.randn(size, *shape)


def sentences(size: int) -> tuple[Tensor, Tensor]:
    return torch.arange(size * 12).reshape(size, 12) % 97, torch.ones(size, 9, dtype=torch.long)


def clicks(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 8), (torch.arange(size * 12) * 41 % 500).reshape(size, 4, 3)


def observations(size: int) -> dict[str, Tensor]:
    return {"features": torch.randn(size, 16), "mask": torch.ones(size, 1)}


def vision_model(name: str, **options: Any) -> Callable[[], nn.Module]:
    return partial(vision.torchvision_model, name, **options)


def chain(name: str, build: Callable[[], nn.Module], **options: Any) -> Animal:
    """A stem, three blocks and a head."""
    given = {"inputs": vectors(16), "size": 64, **options}
    return Animal(name, build, layers=5, producers=1, heaviest="blocks.0", **given)


def of_blocks(block: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return partial(odd.Chain, block)


INCEPTION = {"aux_logits": False, "init_weights": False}
ZOO = [
    Animal("resnet", vision.resnet, pictures(32), 11, 1, "layer2.0"),
    Animal("densenet", vision.densenet, pictures(32), 18, 4, "features.denseblock1.denselayer3"),
    Animal("googlenet", vision_model("googlenet", **INCEPTION), pictures(64), 19, 1, "conv3"),
    Animal("mobilenet", vision_model("mobilenet_v3_small"), pictures(64), 18, 1, "features.10"),
    Animal("convnext", vision.convnext, pictures(64), 15, 1, "features.1.0"),
    Animal("swin", vision.swin, pictures(32), 13, 1, "features.1.0"),
    Animal("unet", vision.UNet, pictures(32), 10, 3, "up2"),
    Animal("diffusion_unet", vision.DiffusionUNet, noisy, 10, 3, "up.1"),
    Animal("gpt2", language.gpt2, language.ids, 8, 1, "transformer.h.0"),
    Animal("bert", language.bert, language.masked_ids, 6, 1, "bert.encoder.layer.0"),
    Animal(
        "albert",
        language.albert,
        language.masked_ids,
        6,
        1,
        "albert.encoder.albert_layer_groups.0.albert_layers.0",
    ),
    Animal("mistral", language.mistral, language.ids, 7, 2, "model.layers.0"),
    Animal("mixtral", language.mixtral, language.ids, 7, 4, "model.layers.0"),
    Animal(
        "checkpointed_llama",
        language.checkpointed_llama,
        language.ids,
        7,
        2,
        "model.layers.0",
        random_states=3,
    ),
    Animal("t5", language.t5, language.ids, 13, 2, "decoder.block.0"),
    Animal("whisper", language.whisper, language.sounds, 12, 2, "model.decoder.layers.0"),
    Animal("vit", language.vit, named_pictures, 6, 1, "vit.layers.0"),
    Animal(
        "clip", language.clip, language.pictures_and_ids, 11, 2, "vision_model.encoder.layers.0"
    ),
    Animal("seq2seq", odd.Seq2Seq, sentences, 5, 2, "head"),
    Animal("encoder", odd.Encoder, vectors(16, 32), 4, 1, "encoder.layers.0"),
    Animal("dlrm", odd.Recommender, clicks, 10, 5, "bottom.2", size=16, sparse=True),
    Animal(
        "two_heads", odd.TwoHeads, observations, 5, 2, "trunk.1", size=64, loss_fn=odd.two_head_loss
    ),
    chain("routed_experts", of_blocks(odd.Routed)),
    chain("lora", of_blocks(odd.Adapter)),
    chain("autocast_inside", of_blocks(odd.InAutocast)),
    chain("dropout", of_blocks(odd.Dropping)),
    chain("checkpointed", odd.Checkpointed, random_states=3),
    chain("reentrant", of_blocks(odd.InnerCheckpoint), random_states=3),
    chain("own_function", of_blocks(odd.OwnFunction)),
    chain("complex_views", of_blocks(odd.Fourier), inputs=vectors(8, 16), size=8),
    chain("compiled_whole", partial(odd.compiled, True)),
    chain("compiled_blocks", partial(odd.compiled, False)),
]
