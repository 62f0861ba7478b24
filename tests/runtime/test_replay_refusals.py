"""What replay refuses, and how it says so."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from partopt.errors import PartoptError
from partopt.profiler.layers import LayerKey
from partopt.profiler.weightless import build_without_weights, fake_mode
from partopt.runtime.cuts import check_cuts
from partopt.runtime.events import Record
from partopt.runtime.recording import record_model
from partopt.runtime.replay import ReplayStage
from partopt.runtime.units import number_calls
from tests.profiler.helpers import Parts, linear
from tests.runtime.replayed import replay_stage

LAYERS = number_calls(["a", "b", "c"])


def record(forward: Callable[[Any, Tensor], Any], **modules: nn.Module) -> tuple[Parts, Record]:
    layers = {"a": linear(), "b": linear(), "c": linear(), **modules}
    model = Parts(forward, **layers)
    return model, record_model(model, torch.randn(2, 4), None, LAYERS)


def refusal(call: Callable[[], object]) -> PartoptError:
    with pytest.raises(PartoptError) as caught:
        call()
    assert caught.value.hint
    return caught.value


def stage(model: nn.Module, seen: Record, start: int, stop: int, inputs: Any = None) -> ReplayStage:
    own = torch.randn(2, 4) if inputs is None else inputs
    return replay_stage(model, seen, start, stop, None, lambda _: own, 1.0)


class Keeping(nn.Module):
    """Leaves its result in an object."""

    def __init__(self, box: dict[str, Tensor]) -> None:
        super().__init__()
        self.inner, self.box = linear(), box

    def forward(self, x: Tensor) -> Tensor:
        self.box["kept"] = self.inner(x)
        return self.box["kept"] * 2


class Taking(nn.Module):
    """Adds what lies in an object."""

    def __init__(self, box: dict[str, Tensor]) -> None:
        super().__init__()
        self.box = box

    def forward(self, x: Tensor) -> Tensor:
        return x + self.box["kept"]


def chain(self: Any, x: Tensor) -> Tensor:
    return self.c(self.b(self.a(x)))


def test_a_tensor_hidden_in_an_object_keeps_layers_together() -> None:
    box: dict[str, Tensor] = {}
    model, seen = record(chain, a=Keeping(box), c=Taking(box))
    for cut in (1, 2):
        error = refusal(lambda cut=cut: check_cuts(seen, [cut]))  # type: ignore[misc]
        assert 'layer 2 "c" reads a tensor of layer 0 "a"' in error.message
        assert error.code == "cannot-cut"
        assert error.fields["layers"] == ["a", "c"]
    refusal(lambda: stage(model, seen, 1, 3))


def test_layers_that_share_an_object_may_be_in_one_stage() -> None:
    box: dict[str, Tensor] = {}
    _, seen = record(chain, b=Keeping(box), c=Taking(box))
    check_cuts(seen, [0, 1, 3])


def test_a_hidden_tensor_that_is_read_between_layers_is_found() -> None:
    box: dict[str, Tensor] = {}

    def forward(self: Any, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x))) + box["kept"].mean()

    _, seen = record(forward, a=Keeping(box))
    assert "hidden in an object" in refusal(lambda: check_cuts(seen, [1])).message


class Routing(nn.Module):
    """Keeps a loss of its own as an attribute, as layers with experts do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = linear()

    def forward(self, x: Tensor) -> Tensor:
        self.aux = self.inner(x).square().mean()
        return x + self.aux


@pytest.mark.parametrize("hidden", ["a", "b"])
def test_an_attribute_of_a_layer_is_not_there_behind_any_later_cut(hidden: str) -> None:
    """It is read before the last layer, and stages that begin there come past that, too."""

    def forward(self: Any, x: Tensor) -> Tensor:
        x = self.b(self.a(x))
        aux = getattr(self, hidden).aux
        return self.c(x).mean() + aux

    model, seen = record(forward, **{hidden: Routing()})
    error = refusal(lambda: check_cuts(seen, [2]))
    assert f'"{hidden}" between layers' in error.message
    assert error.fields["layers"] == [hidden]
    refusal(lambda: stage(model, seen, 2, 3))
    if hidden == "b":
        check_cuts(seen, [1])


def hooked(pre: bool = False) -> nn.Module:
    module = linear()
    if pre:
        module.register_full_backward_pre_hook(lambda *_: None)
    else:
        module.register_full_backward_hook(lambda *_: None)
    return module


@pytest.mark.parametrize("pre", [False, True])
def test_a_backward_hook_keeps_its_layer_and_all_before_it_in_one_stage(pre: bool) -> None:
    model, seen = record(chain, b=hooked(pre))
    for cut in (1, 2):
        error = refusal(lambda cut=cut: check_cuts(seen, [cut]))  # type: ignore[misc]
        assert (
            'a full backward hook on "b" wraps what layer 1 "b" gets and returns' in error.message
        )
        assert (error.code, error.fields["layers"]) == ("cannot-cut", ["b"])
    refusal(lambda: stage(model, seen, 2, 3))
    check_cuts(record(chain, c=hooked(pre))[1], [1])


def test_a_backward_hook_on_the_model_or_inside_of_a_layer() -> None:
    model = Parts(chain, a=linear(), b=linear(), c=linear())
    model.register_full_backward_hook(lambda *_: None)
    seen = record_model(model, torch.randn(2, 4), None, LAYERS)
    assert "hook on the model" in refusal(lambda: check_cuts(seen, [1])).message
    check_cuts(record(chain, b=nn.Sequential(hooked()))[1], [1, 2])


def test_a_hidden_tensor_that_is_handed_to_a_layer_is_found() -> None:
    box: dict[str, Tensor] = {}
    _, seen = record(lambda self, x: self.c(self.b(self.a(x)) * 0 + box["kept"]), a=Keeping(box))
    assert "hidden in an object" in refusal(lambda: check_cuts(seen, [1])).message


@pytest.mark.parametrize(
    ("ask", "name"),
    [
        (lambda x: x.sum().item(), "item"),
        (lambda x: bool(x.sum() > 0), "__bool__"),
        (lambda x: x.detach().flatten().tolist(), "tolist"),
        (lambda x: torch.equal(x, x), "equal"),
    ],
)
def test_a_value_used_in_python_between_layers(ask: Callable[[Tensor], Any], name: str) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        x = self.a(x)
        return self.c(self.b(x) if ask(x) is not None else x)

    model, seen = record(forward)
    error = refusal(lambda: stage(model, seen, 1, 3))
    assert f'Python reads the value of a tensor ({name}) behind layer 0 "a"' in error.message


def test_a_value_of_the_inputs_may_be_used() -> None:
    _, seen = record(lambda self, x: chain(self, x) if x.sum().item() < 1e9 else x)
    check_cuts(seen, [1, 2])


def test_a_value_behind_the_last_cut_may_be_used() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = chain(self, x)
        return y if y.sum().item() < 1e9 else -y

    _, seen = record(forward)
    check_cuts(seen, [1, 2])


def test_a_result_that_cannot_be_followed() -> None:
    class Boxed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = linear()

        def forward(self, x: Tensor) -> Any:
            return type("Box", (), {"x": self.inner(x)})()

    _, seen = record(lambda self, x: self.c(self.b(self.a(x).x)), a=Boxed())
    message = refusal(lambda: check_cuts(seen, [1])).message
    assert 'layer 0 "a" returns a Box, in which tensors cannot be followed' in message


def test_a_view_of_what_another_stage_writes_to() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        first = self.a(x)
        view = first[:, :1]
        second = self.b(x)
        first.add_(second)
        return self.c(first + view)

    _, seen = record(forward)
    check_cuts(seen, [2])
    assert "written to in place" in refusal(lambda: check_cuts(seen, [1])).message


def test_a_view_of_what_each_stage_makes_and_another_writes_to() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        table = torch.zeros(2, 4)
        row = table[:1]
        table += self.a(x)
        return self.c(self.b(x) + row)

    _, seen = record(forward)
    check_cuts(seen, [2])
    assert "written to in place" in refusal(lambda: check_cuts(seen, [1])).message


def test_a_forward_that_takes_another_way() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        x = self.a(x)
        return self.c(self.b(x) if self.straight else self.b(torch.tanh(x)))

    forward_straight = type("Switch", (Parts,), {"straight": True})
    model = forward_straight(forward, a=linear(), b=linear(), c=linear())
    seen = record_model(model, torch.randn(2, 4), None, LAYERS)
    own = stage(model, seen, 0, 3)
    model.straight = False
    error = refusal(lambda: own.forward(0, []))
    assert 'at layer 1 "b" it calls "tanh" and called "b"' in error.message
    assert error.code == "calls-vary"


def test_a_forward_that_ends_early() -> None:
    class Output:
        def __init__(self, loss: Tensor) -> None:
            self.loss = loss

    model, seen = record(lambda self, x: chain(self, x) if self.training else Output(self.a(x)))
    own = stage(model, seen, 1, 2)
    model.eval()
    error = refusal(lambda: own.forward(0, [torch.randn(2, 4)]))
    assert 'it ends before "b" of layer 1 "b"' in error.message


def test_a_module_that_the_model_does_not_call() -> None:
    def build() -> Record:
        return record(lambda self, x: self.c(self.a(x)))[1]

    error = refusal(build)
    assert error.message == 'the model calls "c" as layer 1, the plan calls "b" there'
    assert refusal(lambda: record(lambda self, x: self.b(self.a(x)))).message == (
        'layer 2 "c" (call 0) is not called by the model'
    )
    assert 'calls "b" as layer 3, the plan has no more layers' in (
        refusal(lambda: record(lambda self, x: self.b(chain(self, x)))).message
    )


def test_a_module_that_the_model_does_not_have() -> None:
    model = Parts(chain, a=linear(), b=linear(), c=linear())
    layers = [LayerKey("a", 0), LayerKey("bb", 0)]
    error = refusal(lambda: record_model(model, torch.randn(2, 4), None, layers))
    assert error.message == 'the model has no module "bb", which the plan names'
    assert error.hint == 'did you mean "b"?'


def test_a_forward_that_fails() -> None:
    error = refusal(lambda: record(lambda self, x: self.c(self.b(self.a(x)[:, :3]))))
    assert error.message.startswith("recording the forward: raised RuntimeError: mat1 and mat2")
    assert error.code == "model-code-failed"


def test_a_number_that_a_layer_returns_and_that_changes() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.calls = linear(), 0

        def forward(self, x: Tensor) -> tuple[Tensor, int]:
            self.calls += 1
            return self.inner(x), self.calls

    model, seen = record(lambda self, x: self.c(self.b(self.a(x)[0])), a=Counting())
    error = refusal(lambda: stage(model, seen, 0, 1).forward(0, []))
    assert 'layer 0 "a" returns 2 and returned 1, which other stages rely on' in error.message


@pytest.mark.parametrize("build", [torch.device("meta"), build_without_weights(fake_mode())])
def test_a_stage_without_values(build: Any) -> None:
    with build:
        model = Parts(chain, a=linear(), b=linear(), c=linear())
    seen = record_model(model, torch.randn(2, 4), None, LAYERS)
    error = refusal(lambda: stage(model, seen, 1, 2))
    assert error.message == 'the parameter "b.weight" of layers 1 to 1 has no values'


class Using(nn.Module):
    """Uses the buffer of a layer, by `use` before it computes."""

    def __init__(self, owner: nn.Module, use: Callable[[Any], Any]) -> None:
        super().__init__()
        self.inner, self.owner, self.use = linear(), [owner], use

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.use(self.owner[0])


def read(owner: Any) -> Tensor:
    return owner.table.sum()


def write(owner: Any) -> float:
    owner.table.mul_(0.5)
    return 1.0


def replace(owner: Any) -> float:
    owner.table = owner.table * 0.5
    return 1.0


def tabled() -> nn.Linear:
    owner = linear()
    owner.register_buffer("table", torch.ones(2))
    return owner


def of_a_buffer(first: Callable[[Any], Any], last: Callable[[Any], Any]) -> Record:
    """Layers a and c use the buffer of layer b."""
    owner = tabled()
    users = {"a": Using(owner, first), "c": Using(owner, last)}
    return record(lambda self, x: self.c(self.b(self.a(x))), b=owner, **users)[1]


@pytest.mark.parametrize(
    ("first", "last", "reason"),
    [
        (write, read, 'layer 2 "c" reads the buffer "b.table", which layer 0 "a" changes'),
        (read, write, 'layer 0 "a" reads the buffer "b.table", which layer 2 "c" changes'),
        (read, replace, 'layer 0 "a" reads the buffer "b.table", which layer 2 "c" changes'),
        (write, write, 'the buffer "b.table"'),
    ],
)
def test_a_buffer_that_one_stage_changes_and_another_uses(
    first: Callable[[Any], Any], last: Callable[[Any], Any], reason: str
) -> None:
    """Behind the writer, and before it, who would read what the microbatch before left."""
    for cut in (1, 2):
        assert (
            reason in refusal(lambda cut=cut: check_cuts(of_a_buffer(first, last), [cut])).message
        )


def test_running_statistics_of_one_module_in_two_stages() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.b(self.a(self.b(x)))

    model = Parts(forward, a=linear(), b=nn.BatchNorm1d(4, momentum=0.1))
    layers = number_calls(["b", "a", "b"])
    seen = record_model(model, torch.randn(2, 4), None, layers)
    assert 'reads the buffer "b.' in refusal(lambda: check_cuts(seen, [1])).message
    check_cuts(record_model(model.eval(), torch.randn(2, 4), None, layers), [1, 2])


@pytest.mark.parametrize("replaces", [False, True])
def test_a_buffer_that_changes_when_a_stage_has_ended(replaces: bool) -> None:
    """The first stage would never see it change."""

    def forward(self: Any, x: Tensor) -> Tensor:
        x = self.a(x * self.b.table.sum())
        (replace if replaces else write)(self.b)
        return self.c(self.b(x))

    _, seen = record(forward, b=tabled())
    assert (
        'reads the buffer "b.table", which changes behind it'
        in refusal(lambda: check_cuts(seen, [1])).message
    )
    check_cuts(seen, [2])  # both stages have seen it


@pytest.mark.parametrize("weights", [True, False])
def test_buffers_that_stages_may_have_each_for_itself(weights: bool) -> None:
    """Running statistics, a table that all read, a count of microbatches that none does."""

    def forward(self: Any, x: Tensor) -> Tensor:
        write(self.d)
        return self.c(self.b(self.a(x)))

    def build() -> nn.Module:
        owner, norm = tabled(), nn.Sequential(linear(), nn.BatchNorm1d(4))
        return Parts(forward, a=Using(owner, read), b=norm, c=Using(owner, read), d=tabled())

    with contextlib.nullcontext() if weights else build_without_weights(fake_mode()):
        model = build()
    check_cuts(record_model(model, torch.randn(2, 4), None, LAYERS), [1, 2])
