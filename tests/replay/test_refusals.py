"""What replay refuses, and how it says so."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from partopt.errors import PartoptError
from partopt.profiler.layers import LayerKey
from partopt.profiler.weightless import build_without_weights, fake_mode
from partopt.replay.cuts import check_cuts
from partopt.replay.recording import record_model
from partopt.replay.unit_calls import number_calls
from tests.profiler.helpers import Parts, linear
from tests.replay.replayed import replay_stage

LAYERS = number_calls(["a", "b", "c"])


def parts(forward, **modules):
    return Parts(forward, **{"a": linear(), "b": linear(), "c": linear(), **modules})


def record_of(model, layers=LAYERS):
    return record_model(model, torch.randn(2, 4), None, layers)


def record(forward, **modules):
    return record_of(parts(forward, **modules))


def refusal(call):
    with pytest.raises(PartoptError) as caught:
        call()
    assert caught.value.hint
    return caught.value


def cut_refusal(seen, *cuts):
    return refusal(lambda: check_cuts(seen, list(cuts)))


def stage(model, seen, start, stop):
    inputs = torch.randn(2, 4)
    return replay_stage(model, seen, start, stop, None, lambda _: inputs, 1.0)


def chain(self, x):
    return self.c(self.b(self.a(x)))


class Keeping(nn.Module):
    """Leaves its result in an object."""

    def __init__(self, box):
        super().__init__()
        self.inner, self.box = linear(), box

    def forward(self, x):
        self.box["kept"] = self.inner(x)
        return self.box["kept"] * 2


class Taking(Keeping):
    """Adds what lies in an object."""

    def forward(self, x):
        return x + self.box["kept"]


def test_a_tensor_hidden_in_an_object_keeps_layers_together():
    box = {}
    model = parts(chain, a=Keeping(box), c=Taking(box))
    seen = record_of(model)
    for cut in (1, 2):
        error = cut_refusal(seen, cut)
        assert 'layer 2 "c" reads a tensor of layer 0 "a"' in error.message
        assert (error.code, error.fields["layers"]) == ("cannot-cut", ["a", "c"])
    refusal(lambda: stage(model, seen, 1, 3))
    check_cuts(record(chain, b=Keeping(box), c=Taking(box)), [0, 1, 3])  # both in one stage
    for between in (
        lambda self, x: chain(self, x) + box["kept"].mean(),
        lambda self, x: self.c(self.b(self.a(x)) * 0 + box["kept"]),
    ):
        error = cut_refusal(record(between, a=Keeping(box)), 1)
        assert "hidden in an object" in error.message


class Routing(nn.Module):
    """Keeps a loss of its own as an attribute, as layers with experts do."""

    def __init__(self):
        super().__init__()
        self.inner = linear()

    def forward(self, x):
        self.aux = self.inner(x).square().mean()
        return x + self.aux


@pytest.mark.parametrize("hidden", ["a", "b"])
def test_an_attribute_of_a_layer_is_not_there_behind_any_later_cut(hidden):
    """It is read before the last layer, and stages that begin there come past that, too."""

    def forward(self, x):
        x = self.b(self.a(x))
        aux = getattr(self, hidden).aux
        return self.c(x).mean() + aux

    model = parts(forward, **{hidden: Routing()})
    seen = record_of(model)
    error = cut_refusal(seen, 2)
    assert f'"{hidden}" between layers' in error.message
    assert error.fields["layers"] == [hidden]
    refusal(lambda: stage(model, seen, 2, 3))
    if hidden == "b":
        check_cuts(seen, [1])


def hooked(module, pre=False):
    register = "register_full_backward_pre_hook" if pre else "register_full_backward_hook"
    getattr(module, register)(lambda *_: None)
    return module


@pytest.mark.parametrize("pre", [False, True])
def test_a_backward_hook_keeps_its_layer_and_all_before_it_in_one_stage(pre):
    model = parts(chain, b=hooked(linear(), pre))
    seen = record_of(model)
    for cut in (1, 2):
        error = cut_refusal(seen, cut)
        told = 'a full backward hook on "b" wraps what layer 1 "b" gets and returns'
        assert told in error.message
        assert (error.code, error.fields["layers"]) == ("cannot-cut", ["b"])
    refusal(lambda: stage(model, seen, 2, 3))
    check_cuts(record(chain, c=hooked(linear(), pre)), [1])
    assert "hook on the model" in cut_refusal(record_of(hooked(parts(chain))), 1).message
    check_cuts(record(chain, b=nn.Sequential(hooked(linear()))), [1, 2])  # inside of a layer


@pytest.mark.parametrize(
    ("ask", "name"),
    [
        (lambda x: x.sum().item(), "item"),
        (lambda x: bool(x.sum() > 0), "__bool__"),
        (lambda x: x.detach().flatten().tolist(), "tolist"),
        (lambda x: torch.equal(x, x), "equal"),
    ],
)
def test_a_value_used_in_python_between_layers(ask, name):
    def forward(self, x):
        x = self.a(x)
        return self.c(self.b(x) if ask(x) is not None else x)

    model = parts(forward)
    error = refusal(lambda: stage(model, record_of(model), 1, 3))
    assert f'Python reads the value of a tensor ({name}) behind layer 0 "a"' in error.message


def test_a_value_of_the_inputs_or_behind_the_last_cut_may_be_used():
    def behind(self, x):
        y = chain(self, x)
        return y if y.sum().item() < 1e9 else -y

    check_cuts(record(behind), [1, 2])
    check_cuts(record(lambda self, x: chain(self, x) if x.sum().item() < 1e9 else x), [1, 2])


class Boxed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = linear()

    def forward(self, x):
        return type("Box", (), {"x": self.inner(x)})()


def test_a_result_that_cannot_be_followed():
    message = cut_refusal(record(lambda self, x: self.c(self.b(self.a(x).x)), a=Boxed()), 1).message
    assert 'layer 0 "a" returns a Box, in which tensors cannot be followed' in message


def added_in_place(self, x):
    first = self.a(x)
    view = first[:, :1]
    second = self.b(x)
    first.add_(second)
    return self.c(first + view)


def made_by_each(self, x):
    table = torch.zeros(2, 4)
    row = table[:1]
    table += self.a(x)
    return self.c(self.b(x) + row)


@pytest.mark.parametrize("forward", [added_in_place, made_by_each])
def test_a_view_of_what_another_stage_writes_to(forward):
    seen = record(forward)
    check_cuts(seen, [2])
    assert "written to in place" in cut_refusal(seen, 1).message


def test_a_forward_that_takes_another_way_or_ends_early():
    def forward(self, x):
        x = self.a(x)
        return self.c(self.b(x) if self.training else self.b(torch.tanh(x)))

    model = parts(forward)
    own = stage(model, record_of(model), 0, 3)
    model.eval()
    error = refusal(lambda: own.forward(0, []))
    assert 'at layer 1 "b" it calls "tanh" and called "b"' in error.message
    assert error.code == "calls-vary"

    early = lambda self, x: chain(self, x) if self.training else Output(self.a(x))  # noqa: E731
    model = parts(early)
    own = stage(model, record_of(model), 1, 2)
    model.eval()
    error = refusal(lambda: own.forward(0, [torch.randn(2, 4)]))
    assert 'it ends before "b" of layer 1 "b"' in error.message


class Output(SimpleNamespace):
    def __init__(self, loss):
        super().__init__(loss=loss)


def test_modules_that_the_model_does_not_call_or_have():
    for forward, message in (
        (
            lambda self, x: self.c(self.a(x)),
            'the model calls "c" as layer 1, the plan calls "b" there',
        ),
        (lambda self, x: self.b(self.a(x)), 'layer 2 "c" (call 0) is not called by the model'),
        (lambda self, x: self.b(chain(self, x)), 'calls "b" as layer 3, the plan has no more'),
    ):
        error = refusal(lambda forward=forward: record(forward))
        assert message in error.message
    error = refusal(lambda: record_of(parts(chain), [LayerKey("a", 0), LayerKey("bb", 0)]))
    assert error.message == 'the model has no module "bb", which the plan names'
    assert error.hint == 'did you mean "b"?'


def test_a_forward_that_fails():
    error = refusal(lambda: record(lambda self, x: self.c(self.b(self.a(x)[:, :3]))))
    assert error.message.startswith("recording the forward: raised RuntimeError: mat1 and mat2")
    assert error.code == "model-code-failed"


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.calls = linear(), 0

    def forward(self, x):
        self.calls += 1
        return self.inner(x), self.calls


def test_a_number_that_a_layer_returns_and_that_changes():
    model = parts(lambda self, x: self.c(self.b(self.a(x)[0])), a=Counting())
    error = refusal(lambda: stage(model, record_of(model), 0, 1).forward(0, []))
    assert 'layer 0 "a" returns 2 and returned 1, which other stages rely on' in error.message


@pytest.mark.parametrize("build", [torch.device("meta"), build_without_weights(fake_mode())])
def test_a_stage_without_values(build):
    with build:
        model = parts(chain)
    error = refusal(lambda: stage(model, record_of(model), 1, 2))
    assert error.message == 'the parameter "b.weight" of layers 1 to 1 has no values'


# --- buffers ----------------------------------------------------------------------------------


class Using(nn.Module):
    """Uses the buffer of a layer, by `use` before it computes."""

    def __init__(self, owner, use):
        super().__init__()
        self.inner, self.owner, self.use = linear(), [owner], use

    def forward(self, x):
        return self.inner(x) * self.use(self.owner[0])


def read(owner):
    return owner.table.sum()


def write(owner):
    owner.table.mul_(0.5)
    return 1.0


def replace(owner):
    owner.table = owner.table * 0.5
    return 1.0


def tabled():
    owner = linear()
    owner.register_buffer("table", torch.ones(2))
    return owner


@pytest.mark.parametrize(
    ("first", "last", "reason"),
    [
        (write, read, 'layer 2 "c" reads the buffer "b.table", which layer 0 "a" changes'),
        (read, write, 'layer 0 "a" reads the buffer "b.table", which layer 2 "c" changes'),
        (read, replace, 'layer 0 "a" reads the buffer "b.table", which layer 2 "c" changes'),
        (write, write, 'the buffer "b.table"'),
    ],
)
def test_a_buffer_that_one_stage_changes_and_another_uses(first, last, reason):
    """Behind the writer, and before it, who would read what the microbatch before left."""
    for cut in (1, 2):
        owner = tabled()
        seen = record(chain, b=owner, a=Using(owner, first), c=Using(owner, last))
        assert reason in cut_refusal(seen, cut).message


def test_running_statistics_of_one_module_in_two_stages():
    norm = nn.BatchNorm1d(4, momentum=0.1)
    model = Parts(lambda self, x: self.b(self.a(self.b(x))), a=linear(), b=norm)
    layers = number_calls(["b", "a", "b"])
    assert 'reads the buffer "b.' in cut_refusal(record_of(model, layers), 1).message
    check_cuts(record_of(model.eval(), layers), [1, 2])


@pytest.mark.parametrize("change", [write, replace])
def test_a_buffer_that_changes_when_a_stage_has_ended(change):
    """The first stage would never see it change."""

    def forward(self, x):
        x = self.a(x * self.b.table.sum())
        change(self.b)
        return self.c(self.b(x))

    seen = record(forward, b=tabled())
    told = 'reads the buffer "b.table", which changes behind it'
    assert told in cut_refusal(seen, 1).message
    check_cuts(seen, [2])  # both stages have seen it


@pytest.mark.parametrize("weights", [True, False])
def test_buffers_that_stages_may_have_each_for_itself(weights):
    """Running statistics, a table that all read, a count of microbatches that none does."""

    def forward(self, x):
        write(self.d)
        return chain(self, x)

    with contextlib.nullcontext() if weights else build_without_weights(fake_mode()):
        owner, norm = tabled(), nn.Sequential(linear(), nn.BatchNorm1d(4))
        model = parts(forward, a=Using(owner, read), b=norm, c=Using(owner, read), d=tabled())
    check_cuts(record_of(model), [1, 2])
