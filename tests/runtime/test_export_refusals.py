"""What torch.export is not trusted with, how that is said, and which way is taken by itself."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from partopt.errors import BAD_INPUT, PartoptError
from partopt.runtime.crossings import check_cuts
from partopt.runtime.cutting import record_cut
from partopt.runtime.events import Record
from partopt.runtime.graph_recording import export_model
from partopt.runtime.units import number_calls
from tests.profiler import zoo_odd as odd
from tests.profiler.helpers import Parts, linear
from tests.runtime.replayed import replay_stage
from tests.runtime.test_replay_refusals import Keeping, Taking, chain, refusal

LAYERS = number_calls(["a", "b", "c"])


def model(forward: Callable[[Any, Tensor], Any] = chain, **modules: nn.Module) -> Parts:
    layers = {"a": linear(), "b": linear(), "c": linear(), **modules}
    return Parts(forward, **layers)


def export(whole: nn.Module) -> Record:
    return export_model(whole, torch.randn(2, 4), None, LAYERS)


def hooked(self: Any, x: Tensor) -> Tensor:
    made = self.a(x)
    made.register_hook(lambda gradient: gradient * 2)
    return self.c(self.b(made))


def checkpointed(self: Any, x: Tensor) -> Tensor:
    return self.c(checkpoint(self.b, self.a(x), use_reentrant=True))


def differentiated(self: Any, x: Tensor) -> Tensor:
    made = self.a(x)
    [gradient] = torch.autograd.grad(made.sum(), self.a.weight, create_graph=True)
    return self.c(self.b(made @ gradient))


def counting(self: Any, x: Tensor) -> Tensor:
    self.calls = self.__dict__.get("calls", 0) + 1
    return chain(self, x) * self.calls


def drawing(self: Any, x: Tensor) -> Tensor:
    return chain(self, x) * random.random()


def branching(self: Any, x: Tensor) -> Tensor:
    made = self.a(x)
    return self.c(self.b(made) if made.sum() > 0 else self.b(-made))


def growing(self: Any, x: Tensor) -> Tensor:
    self.b.table = torch.cat([self.b.table, self.b.table])
    return chain(self, x)


def clamping(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        self.b.weight[0].clamp_(-1.0, 1.0)
    return chain(self, x)


def inferring(self: Any, x: Tensor) -> Tensor:
    with torch.inference_mode():
        fixed = self.b(x)
    return self.c(self.b(self.a(x)) * fixed.clone())


def tabled() -> nn.Module:
    layer = linear()
    layer.register_buffer("table", torch.zeros(2))
    return layer


def backward_hooked() -> nn.Module:
    layer = linear()
    layer.register_full_backward_hook(lambda *_: None)
    return layer


@pytest.mark.parametrize(
    ("build", "why"),
    [
        (lambda: model(b=odd.OwnFunction(4)), "a graph loses the backward of _Square"),
        (lambda: model(hooked), "a graph loses a hook on a tensor"),
        (lambda: model(b=backward_hooked()), "a graph loses the backward of BackwardHookFunction"),
        (lambda: model(checkpointed), "a graph loses the backward of CheckpointFunction"),
        (lambda: model(differentiated), "a graph loses a backward within the forward"),
        (lambda: model(counting), 'the forward changes "calls", which a graph has only once'),
        (lambda: model(drawing), "the forward draws or seeds random numbers in Python"),
        (lambda: model(branching), "torch.export raised GuardOnDataDependentSymNode"),
        (lambda: model(clamping), 'the forward writes to "b.weight"'),
        (lambda: model(inferring), "a graph loses where inference mode begins"),
        (lambda: model(growing, b=tabled()), 'gives the buffer "b.table" another form'),
    ],
)
def test_what_a_graph_would_get_wrong(build: Callable[[], nn.Module], why: str) -> None:
    error = refusal(lambda: export(build()))
    assert why in error.message
    assert error.code == "cannot-export"


def test_processes_can_be_forked_afterwards() -> None:
    before = threading.active_count()
    export(model())
    assert threading.active_count() == before


def test_a_model_that_fails_is_left_as_it_was() -> None:
    apply, enter = vars(torch.autograd.Function)["apply"], torch.autocast.__enter__
    whole = model(hooked)
    refusal(lambda: export(whole))
    assert type(whole.a.weight) is nn.Parameter
    assert all("forward" not in vars(each) for each in whole.modules())
    assert vars(torch.autograd.Function)["apply"] is apply
    assert torch.autocast.__enter__ is enter


class Adding(nn.Module):
    """Adds to a buffer of another layer, or reads it."""

    def __init__(self, owner: nn.Module, writes: bool) -> None:
        super().__init__()
        self.owner, self.writes = [owner], writes

    def forward(self, x: Tensor) -> Tensor:
        [owner] = self.owner
        if self.writes:
            owner.table.add_(1.0)
        return x * owner.table.sum()


def test_a_buffer_that_one_layer_changes_and_another_reads() -> None:
    owner = tabled()
    layers = {"a": Adding(owner, True), "b": owner, "c": Adding(owner, False)}
    seen = export(model(lambda self, x: self.c(self.b(self.a(x @ self.b.weight))), **layers))
    message = refusal(lambda: check_cuts(seen, [2])).message
    assert 'layer 2 "c" reads the buffer "b.table", which layer 0 "a" changes' in message


def test_a_number_that_crosses() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        made = self.a(x)
        number = made.detach().mean().item()
        return self.c(self.b(made) * number)

    seen = export(model(forward))
    check_cuts(seen, [2])
    message = refusal(lambda: check_cuts(seen, [1])).message
    assert 'layer 1 "b" reads a number that layer 0 "a" computes' in message


def test_a_shape_that_depends_on_values() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        made = self.a(x)
        chosen = made[made[:, 0] > 0]
        return self.c(self.b(chosen))

    seen = export(model(forward))
    message = refusal(lambda: check_cuts(seen, [1])).message
    assert 'the shape of a tensor of layer 0 "a" depends on values' in message


def test_a_loss_of_a_layer_before_the_last() -> None:
    def forward(self: Any, x: Tensor) -> Any:
        loss = self.b(self.a(x)).sum()
        self.c(x)
        return SimpleNamespace(loss=loss)

    seen = export(model(forward))
    check_cuts(seen, [1])
    message = refusal(lambda: check_cuts(seen, [2])).message
    assert 'layer 2 "c" reads the loss, which layer 1 "b" computes' in message


def test_a_view_of_what_another_stage_writes_to() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        first = self.a(x)
        view = first[:, :1]
        first.add_(self.b(x))
        return self.c(first + view)

    seen = export(model(forward))
    check_cuts(seen, [2])
    assert "written to in place" in refusal(lambda: check_cuts(seen, [1])).message


@dataclass
class Held:
    x: Tensor


def test_inputs_that_torch_export_does_not_see() -> None:
    whole = model(lambda self, held: chain(self, held.x))
    error = refusal(lambda: export_model(whole, (Held(torch.randn(2, 4)),), None, LAYERS))
    assert error.message == "the inputs hold tensors in a Held, where torch.export sees none"


@pytest.mark.parametrize("inputs", [(torch.randn(3, 4), 2), (torch.randn(2, 4), 3)])
def test_a_microbatch_of_another_form(inputs: Any) -> None:
    whole = Parts(lambda self, x: chain(self, x), a=linear(), b=linear(), c=linear())
    whole.forward = lambda x, times: chain(whole, x * times)  # type: ignore[method-assign]
    seen = export_model(whole, (torch.randn(2, 4), 2), None, LAYERS)
    first = replay_stage(whole, seen, 0, 1, None, lambda _: inputs, 1.0)
    error = refusal(lambda: first.forward(0, []))
    assert error.code == "calls-vary"
    assert "inputs of another form" in error.message


def test_replay_is_taken_where_it_can() -> None:
    seen = record_cut(model(), torch.randn(2, 4), None, LAYERS, [1, 2])
    assert type(seen) is Record
    assert seen.replay_refused is None


def test_torch_export_is_taken_where_replay_refuses() -> None:
    box: dict[str, Tensor] = {}
    whole = model(a=Keeping(box), c=Taking(box))
    seen = record_cut(whole, torch.randn(2, 4), None, LAYERS, [1])
    assert seen.replay_refused is not None
    assert 'layer 2 "c" reads a tensor of layer 0 "a"' in seen.replay_refused


def test_where_both_refuse_both_reasons_are_given() -> None:
    with pytest.raises(PartoptError) as caught:
        record_cut(model(branching), torch.randn(2, 4), None, LAYERS, [1])
    error = caught.value
    assert 'Python reads the value of a tensor (__bool__) behind layer 0 "a"' in error.message
    assert "; nor by torch.export: torch.export raised GuardOnDataDependent" in error.message
    assert "test_export_refusals.py, line" in error.message
    assert (error.code, error.exit_code) == ("cannot-cut", BAD_INPUT)
