"""Stages cut by torch.export, against the model itself; of some models replay makes none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from partopt.cost.chain import chain_of
from partopt.errors import PartoptError
from partopt.profiler.fake import build_without_weights, fake_mode
from partopt.profiler.precision import cast
from partopt.runtime.crossings import check_cuts, cut_before
from partopt.runtime.graph_recording import export_model
from partopt.runtime.recording import record_model
from tests.profiler.helpers import Parts, linear
from tests.runtime.replayed import (
    Exported,
    error_of_stages,
    replayed,
    run_backwards,
    run_forwards,
    summed_gradients,
    worst_error,
)
from tests.runtime.test_replay import (
    _MARKS,
    CASES,
    gpt_ids,
    gpt_loss,
    small_gpt,
    vectors,
    without_dropout,
)
from tests.runtime.test_replay_refusals import Keeping, Taking, chain

TOLERANCE = 1e-6
ZOO = [
    *["gpt", "gpt2", "bert", "t5", "vit", "resnet", "pyramid"],
    *["thrice", "written", "transposed", "twice", "routed"],
]


@pytest.fixture(
    scope="module", params=[pytest.param(n, marks=_MARKS.get(n, ())) for n in ZOO], ids=str
)
def case(request: pytest.FixtureRequest) -> Exported:
    own = CASES[request.param]
    build = without_dropout(own.build)
    return replayed(
        build, own.inputs, loss_fn=own.loss_fn, granularity=own.granularity, kind=Exported
    )


def test_stages_do_what_the_model_does(case: Exported) -> None:
    assert error_of_stages(case) < TOLERANCE


def test_what_crosses_each_cut_is_what_the_planner_counts(case: Exported) -> None:
    chain, record = chain_of(case.profile), case.record
    cuts = [cut_before(record, layer) for layer in range(len(case.layers) + 1)]
    assert [cut.bytes for cut in cuts] == list(chain.a)


def parts(forward: Callable[[Any, Tensor], Any], **modules: nn.Module) -> Exported:
    """A model of the layers "a", "b" and "c", of which `modules` are some."""
    layers = {"a": linear(), "b": linear(), "c": linear(), **modules}
    names = ["a", "b", "c"]
    return replayed(lambda: Parts(forward, **layers), vectors, units=names, kind=Exported)


def between(self: Any, x: Tensor) -> Tensor:
    return self.c(self.b(self.a(x))) + self.a.box["kept"].mean()


def handed_over(self: Any, x: Tensor) -> Tensor:
    return self.c(self.b(self.a(x)) + self.a.box["kept"])


def table_written(self: Any, x: Tensor) -> Tensor:
    table = torch.zeros(2, 4)
    row = table[:1]
    table += self.a(x)
    return self.c(self.b(x) + row)


class Boxed(nn.Linear):
    """Returns a tensor in an object of its own."""

    def forward(self, x: Tensor) -> Any:
        return type("Box", (), {"x": super().forward(x)})()


def scaled_between(self: Any, x: Tensor) -> Tensor:
    x = self.a(x)
    return self.c(self.b(x * x.detach().square().mean().item()))


class Box(dict[str, Tensor]):
    """A copy of it is empty: its tensors are of one forward."""

    def __deepcopy__(self, _memo: Any) -> Box:
        return Box()


def sharing(forward: Any = chain, taking: bool = False) -> Exported:
    """A model whose first layer leaves a tensor in an object."""
    box = Box()
    return parts(forward, a=Keeping(box), **({"c": Taking(box)} if taking else {}))


REFUSED = {
    "hidden": lambda: sharing(taking=True),
    "hidden, read between layers": lambda: sharing(between),
    "hidden, handed to a layer": lambda: sharing(handed_over),
    "in an object": lambda: parts(lambda self, x: self.c(self.b(self.a(x).x)), a=Boxed(4, 4)),
    "a number of one layer": lambda: parts(scaled_between),
    "a view": lambda: parts(table_written),
}


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_replay_refuses(name: str) -> None:
    case = REFUSED[name]()
    with pytest.raises(PartoptError) as refused:
        check_cuts(record_model(case.model, case.inputs[0], None, case.layers), [1])
    assert refused.value.code == "cannot-cut"
    check_cuts(case.record, [1, 2])
    assert error_of_stages(case) < TOLERANCE
    assert error_of_stages(case, split=True, recompute=True) < TOLERANCE


class Uncounted(nn.Module):
    """Switches gradients off within an autocast, and autocast off within that."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            x = self.first(x)
            with torch.no_grad():
                fixed = self.second(x)
                with torch.autocast("cpu", enabled=False):
                    fixed = fixed.float() @ self.second.weight
            return x * fixed


def frozen(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        fixed = self.b(self.a(x) * 2.0) * 2.0
    return self.c(fixed)


SWITCHED = {
    "gradients within autocast": lambda: parts(chain, a=Uncounted(), b=Uncounted()),
    "layers without gradients": lambda: parts(frozen),
    "a frozen layer": lambda: parts(chain, b=linear().requires_grad_(False)),
    "an identity": lambda: parts(lambda self, x: self.c(self.b(self.a(x)) * 3.0), b=nn.Identity()),
    "a parameter between": lambda: parts(lambda self, x: self.c(self.b(self.a(x) @ self.c.weight))),
}


@pytest.mark.parametrize("name", SWITCHED)
def test_what_is_switched_on_and_off(name: str) -> None:
    case = SWITCHED[name]()
    assert error_of_stages(case) < TOLERANCE
    assert error_of_stages(case, recompute=True) < TOLERANCE


def test_inputs_that_are_written_to_stay_as_they_are() -> None:
    case = parts(lambda self, x: self.c(self.b(self.a(x.mul_(2.0)) + x)))
    case.inputs = [torch.randn(2, 4) for _ in case.inputs]
    own = replace(case, inputs=[each.clone() for each in case.inputs])
    losses, gradients, _ = replace(case, inputs=[each.clone() for each in case.inputs]).reference
    stages = own.stages([0, 1, 2], recompute=True)
    assert run_forwards(stages) == losses
    run_backwards(stages, recompute=True)
    assert worst_error(summed_gradients(stages), gradients) < TOLERANCE
    assert all(map(torch.equal, own.inputs, case.inputs))


def test_the_autocast_of_a_plan() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.c(self.b(torch.tanh(self.a(x))))

    case = parts(cast(forward, torch.device("cpu"), torch.bfloat16), c=Uncounted())
    assert {each.dtype for each in cut_before(case.record, 1).likeness} == {torch.bfloat16}
    assert error_of_stages(case) < TOLERANCE


def test_a_module_says_each_time_what_it_drops() -> None:
    case = parts(chain, b=nn.Dropout(0.5))
    stages = case.stages([0, 1, 2])
    assert run_forwards(stages) != run_forwards(stages)
    for stage in stages:
        stage.model.b.p = 0.0
    losses = run_forwards(stages)
    case.model.b.p = 0.0
    assert losses == case.reference[0]


def test_a_model_without_weights_is_exported_as_one_with_them() -> None:
    case = replayed(small_gpt, gpt_ids, loss_fn=gpt_loss, kind=Exported)
    with build_without_weights(fake_mode()):
        empty = small_gpt().train()
    record, whole = export_model(empty, case.inputs[0], gpt_loss, case.layers), case.record
    assert [each.name for each in record.events] == [each.name for each in whole.events]
    assert record.holders == whole.holders
    for layer in range(1, len(case.layers)):
        assert cut_before(record, layer).crossings == cut_before(whole, layer).crossings


def test_the_model_is_left_as_it_was() -> None:
    layers = {"a": nn.BatchNorm1d(4), "b": nn.Sequential(nn.Dropout(0.5), linear())}
    case = parts(chain, **layers)
    attributes = [set(vars(each)) for each in case.model.modules()]
    state = {name: each.clone() for name, each in case.model.state_dict().items()}
    before = torch.get_rng_state()
    assert case.record.changed_buffers == {
        "a.running_mean",
        "a.running_var",
        "a.num_batches_tracked",
    }
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(each, state[name]) for name, each in case.model.state_dict().items())
    assert [set(vars(each)) for each in case.model.modules()] == attributes
