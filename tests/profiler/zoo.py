"""The zoo: small models of many kinds, and what a profile of each must say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from partopt.documents.profile import Profile
from tests.profiler import zoo_language as language
from tests.profiler import zoo_odd as odd
from tests.profiler import zoo_vision as vision
from tests.profiler.helpers import structure

# What a profile of each must say: layers; the most layers whose results cross one cut (1: a chain);
# the first of the layers of most operations
EXPECTED = """
resnet50               22   1  layer2.0
vgg16                  39   1  features.2
densenet121            67  24  features.denseblock1.denselayer6
googlenet              19   1  conv3
inception_v3           21   1  Conv2d_4a_3x3
mobilenet_v3           18   1  features.10
convnext               15   1  features.1.0
vit_torchvision         7   1  encoder.layers.encoder_layer_0
swin                   13   1  features.1.0
unet                   10   3  up2
diffusion_unet         10   3  up.1
gpt2                    8   1  transformer.h.0
bert                    6   1  bert.encoder.layer.0
albert                  6   1  albert.encoder.albert_layer_groups.0.albert_layers.0
llama                   7   2  model.layers.0
mistral                 7   2  model.layers.0
qwen2                   7   2  model.layers.0
mixtral                 7   4  model.layers.0
llama_checkpointed      7   2  model.layers.0
t5                     13   2  decoder.block.0
whisper                12   2  model.decoder.layers.0
vit                     6   1  vit.layers.0
clip                   11   2  vision_model.encoder.layers.0
seq2seq                 5   2  head
transformer_encoder     4   1  encoder.layers.0
dlrm                   10   5  bottom.2
two_heads               5   2  trunk.1
routed_experts          5   1  blocks.0
chain                   5   1  blocks.0
lora                    5   1  blocks.0
autocast_inside         5   1  blocks.0
dropout                 5   1  blocks.0
checkpointed            5   1  blocks.0
reentrant               5   1  blocks.0
own_function            5   1  blocks.0
complex_views           5   1  blocks.0
compiled_whole          5   1  blocks.0
compiled_blocks         5   1  blocks.0
"""


@dataclass(frozen=True)
class Animal:
    """A model, its inputs for a microbatch, and its loss."""

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[int], Any]
    size: int = 2
    loss_fn: Any = None
    random_states: int = 0  # that checkpoints keep, which are no tensors that an operation makes
    sparse: bool = False  # has gradients that grow from step to step

    @property
    def expected(self) -> Expected:
        """What its profile must say."""
        [row] = [row for row in map(str.split, EXPECTED.splitlines()) if row[:1] == [self.name]]
        return Expected(int(row[1]), int(row[2]), None if row[3] == "-" else row[3])

    def observe(self) -> Observed:
        """The model, its inputs, and its profile at one microbatch size, without real time."""
        torch.manual_seed(0)
        model, inputs = self.build().train(), self.inputs(self.size)
        sizes = {"granularity": "auto", "microbatch_sizes": [self.size]}
        return Observed(model, inputs, structure(model, lambda _: inputs, self.loss_fn, **sizes))


class Expected(NamedTuple):
    """A row of the table."""

    layers: int
    producers: int
    heaviest: str | None


class Observed(NamedTuple):
    """What an animal's memory is compared by."""

    model: nn.Module
    inputs: Any
    profile: Profile


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


def inception_model(name: str) -> Callable[[], nn.Module]:
    return vision_model(name, aux_logits=False, init_weights=False)


def chain(name: str, build: Callable[[], nn.Module], **options: Any) -> Animal:
    """A stem, three blocks and a head."""
    return Animal(name, build, **{"inputs": vectors(16), "size": 64, **options})


def of_blocks(block: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return partial(odd.Chain, block)


ZOO = [
    Animal("resnet50", vision_model("resnet50"), pictures(64)),
    Animal("vgg16", vision.vgg16, pictures(32)),
    Animal("densenet121", vision_model("densenet121"), pictures(64)),
    Animal("googlenet", inception_model("googlenet"), pictures(64)),
    Animal("inception_v3", inception_model("inception_v3"), pictures(96)),
    Animal("mobilenet_v3", vision_model("mobilenet_v3_small"), pictures(64)),
    Animal("convnext", vision.convnext, pictures(64)),
    Animal("vit_torchvision", vision.vision_transformer, pictures(32)),
    Animal("swin", vision.swin, pictures(32)),
    Animal("unet", vision.UNet, pictures(32)),
    Animal("diffusion_unet", vision.DiffusionUNet, noisy),
    Animal("gpt2", language.gpt2, language.ids),
    Animal("bert", language.bert, language.masked_ids),
    Animal("albert", language.albert, language.masked_ids),
    Animal("llama", language.llama, language.ids),
    Animal("mistral", language.mistral, language.ids),
    Animal("qwen2", language.qwen2, language.ids),
    Animal("mixtral", language.mixtral, language.ids),
    Animal("llama_checkpointed", language.checkpointed_llama, language.ids, random_states=3),
    Animal("t5", language.t5, language.ids),
    Animal("whisper", language.whisper, language.sounds),
    Animal("vit", language.vit, named_pictures),
    Animal("clip", language.clip, language.pictures_and_ids),
    Animal("seq2seq", odd.Seq2Seq, sentences),
    Animal("transformer_encoder", odd.Encoder, vectors(16, 32)),
    Animal("dlrm", odd.Recommender, clicks, size=16, sparse=True),
    Animal("two_heads", odd.TwoHeads, observations, size=64, loss_fn=odd.two_head_loss),
    chain("routed_experts", of_blocks(odd.Routed)),
    chain("chain", odd.Chain),
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
