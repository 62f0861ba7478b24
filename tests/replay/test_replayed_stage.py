"""Three stages, each with its own parameters alone, against the model itself."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from partopt.cost.chain import chain_of
from partopt.replay.cuts import cut_before
from partopt.replay.recording import record_model
from tests.profiler import zoo_language as language
from tests.profiler import zoo_odd as odd
from tests.profiler import zoo_vision as vision
from tests.profiler.helpers import Parts, example, linear, needs_torchvision, needs_transformers
from tests.replay.replayed import error_of_stages, replayed

TOLERANCE = 1e-6


class Case(NamedTuple):
    build: Any
    inputs: Any
    loss_fn: Any = None
    granularity: str = "auto"


def ids(size):
    tokens = torch.randint(3, language.VOCABULARY, (size, language.LENGTH))
    return {"input_ids": tokens, "labels": tokens}


def masked_ids(size):
    lengths = torch.randint(4, language.LENGTH, (size, 1))
    return {**ids(size), "attention_mask": (torch.arange(language.LENGTH) < lengths).long()}


def pictures(size):
    return torch.randn(size, 3, 32, 32)


def vectors(size):
    return torch.randn(size, 4)


def small_gpt():
    return example("gpt", layers=3, width=16, heads=2, context=12, vocabulary=31).build()


def gpt_ids(size):
    return torch.randint(31, (size, 12))


def gpt_loss(output, inputs):
    return nn.functional.cross_entropy(output[:, :-1].flatten(0, 1), inputs[:, 1:].flatten())


def cached_llama():
    options = {**language._DECODER, "use_cache": True}
    return language.transformers_model("LlamaForCausalLM", "LlamaConfig", **options)


class Dense(nn.Module):
    """Each layer reads the results of all before it, and rectifies them in place."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4 * (n + 1), 4) for n in range(5))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        made = [x]
        for layer in self.layers:
            made.append(self.relu(layer(torch.cat(made, 1))))
        return torch.cat(made, 1).square().mean()


class Pyramid(nn.Module):
    """Goes down and up again, and returns a result of each level in a dict."""

    def __init__(self):
        super().__init__()
        self.down = nn.ModuleList(nn.Conv2d(3, 3, 3, stride=2, padding=1) for _ in range(2))
        self.up = nn.ModuleList(nn.ConvTranspose2d(3, 3, 2, stride=2) for _ in range(2))

    def forward(self, x):
        first = self.down[0](x)
        bottom = self.down[1](first)
        second = self.up[0](bottom) + first
        return {"levels": [bottom, second], "top": self.up[1](second).tanh()}


def pyramid_loss(output, inputs):
    return (output["top"] - inputs).square().mean() + sum(x.abs().mean() for x in output["levels"])


def thrice():
    def forward(self, x):
        x = self.stem(x)
        for _ in range(3):
            x = torch.tanh(self.block(x)) + x
        return self.head(x).square().mean()

    return Parts(forward, stem=linear(), block=nn.Linear(4, 4), head=linear())


def written_in_place():
    """Tensors of other stages are written to between layers, in part and through views."""

    def forward(self, x):
        kept = torch.zeros(len(x), 4)
        first = self.a(x)
        kept[:, :2] = first[:, 2:]
        second = self.b(first * 2.0) * 1.5
        first += second
        second[:, 0] = 0.0
        third = self.relu(self.c(first + second).mul_(2.0))
        return self.d(third + kept).square().mean()

    layers = {name: linear() for name in "abcd"}
    return Parts(forward, relu=nn.ReLU(inplace=True), **layers)


def two_outputs():
    """What the middle stage sends depends in one part on its weights alone."""

    def forward(self, x):
        first = self.a(x)
        free = self.table(torch.arange(4))
        second = self.b(first) @ self.b(free)
        return self.c(second + free[1] + first.mean()).square().mean()

    return Parts(forward, a=linear(), table=nn.Embedding(4, 4), b=linear(), c=linear())


def transposed():
    """A tensor that is laid out transposed crosses, and is viewed as it only then can be."""

    def forward(self, x):
        first = self.a(x).t()
        second = self.b(x)
        return self.c(second + first.t().view(-1).view_as(x)).square().mean()

    return Parts(forward, a=linear(), b=linear(), c=linear())


class Twice(nn.Linear):
    """Returns one tensor under two names."""

    def forward(self, x):
        made = super().forward(x)
        return {"one": made, "other": made}


def twice():
    def forward(self, x):
        both = self.a(x)
        second = self.b(both["other"])
        return self.c(second * both["one"] + both["other"]).square().mean()

    return Parts(forward, a=Twice(4, 4), b=linear(), c=linear())


CASES = {
    "gpt": Case(small_gpt, gpt_ids, gpt_loss),
    "gpt2": Case(language.gpt2, ids),
    "llama": Case(cached_llama, ids),
    "mixtral": Case(language.mixtral, ids),
    "t5": Case(language.t5, ids),
    "bert": Case(language.bert, masked_ids),
    "vit": Case(vision.vision_transformer, pictures),
    "resnet": Case(lambda: vision.torchvision_model("resnet18"), pictures),
    "unet": Case(vision.UNet, pictures),
    "dense": Case(Dense, vectors, granularity="leaf"),
    "pyramid": Case(Pyramid, pictures, pyramid_loss, "leaf"),
    "thrice": Case(thrice, vectors, granularity="leaf"),
    "written": Case(written_in_place, vectors, granularity="leaf"),
    "two outputs": Case(two_outputs, vectors, granularity="leaf"),
    "transposed": Case(transposed, vectors, granularity="leaf"),
    "twice": Case(twice, vectors, granularity="leaf"),
    "routed": Case(lambda: odd.Chain(odd.Routed), lambda size: torch.randn(size, 16)),
    "lstm": Case(odd.Seq2Seq, lambda size: (torch.randint(97, (size, 5)),) * 2),
}
# in a decoder, and where a layer has two outputs, some ways that part lead to no layer of the stage
# before, but to one in between
ASIDE = {"T5ForConditionalGeneration", "Parts"}
_MARKS = {
    **dict.fromkeys(["gpt2", "llama", "mixtral", "t5", "bert"], needs_transformers),
    **dict.fromkeys(["vit", "resnet"], needs_torchvision),
}


def without_dropout(build):
    """Stages draw other random numbers than the whole model."""
    model = build()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif isinstance(getattr(module, "dropout", None), float):
            module.dropout = 0.0
    return model


@pytest.fixture(
    scope="module", params=[pytest.param(n, marks=_MARKS.get(n, ())) for n in CASES], ids=str
)
def case(request):
    own = CASES[request.param]
    options = {"loss_fn": own.loss_fn, "granularity": own.granularity}
    return replayed(lambda: without_dropout(own.build), own.inputs, **options)


@pytest.mark.slow
def test_stages_do_what_the_model_does(case):
    assert error_of_stages(case) < TOLERANCE
    assert error_of_stages(case, split=True) < TOLERANCE
    # torch has kernels of its own, which round otherwise, where no gradient is needed
    tolerance = 1e-4 if isinstance(case.model, odd.Seq2Seq) else 3e-6
    assert error_of_stages(case, recompute=True, tolerance=tolerance) < tolerance
    if len(case.layers) < 9:  # each a stage
        assert error_of_stages(case, range(len(case.layers))) < TOLERANCE


@pytest.mark.slow
def test_profiles_say_what_a_backward_in_two_parts_keeps_between_them(case):
    """To the byte of the gradients that the first part of the last stage's backward keeps."""
    layers = case.profile.measurements[0].layers
    for start in sorted({1, len(layers) // 2, len(layers) - 1}):
        first, last = case.stages([0, start])
        last.forward(0, first.forward(0, []))
        last.backward_input(0, [])
        arrived = last._weight_parts[0]._arrived.values()
        storages = [
            each.untyped_storage() for tensors in arrived for each in tensors if each is not None
        ]
        kept = sum({each.data_ptr(): each.nbytes() for each in storages}.values())
        said = sum(each.split_stash_bytes for each in layers[start:])
        assert said == kept or (case.profile.model.name in ASIDE and kept < said < 1.4 * kept)


@pytest.mark.slow
def test_what_crosses_each_cut_is_what_the_planner_counts(case):
    cuts = [cut_before(case.record, layer).crossings for layer in range(len(case.layers) + 1)]
    found = [sum(math.prod(each.shape) * each.dtype.itemsize for each in cut) for cut in cuts]
    assert found == list(chain_of(case.profile).a)


@pytest.mark.slow
def test_a_record_leaves_the_model_as_it_was(case):
    """What a model adds to itself in its first forward is its own affair."""
    assert case.record.events
    before = {name: each.clone() for name, each in case.model.state_dict().items()}
    attributes = [set(vars(each)) for each in case.model.modules()]
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    assert record_model(case.model, case.inputs[0], case.loss_fn, case.layers).events
    assert torch.equal(torch.rand(1), expected)
    after = case.model.state_dict()
    assert all(torch.equal(each, after[name]) for name, each in before.items())
    assert [set(vars(each)) for each in case.model.modules()] == attributes
