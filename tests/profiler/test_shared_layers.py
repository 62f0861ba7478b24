"""Of a model larger than memory a few layers of each kind run, on weights that the kind shares."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from partopt.documents.profile import Profile
from partopt.errors import PartoptError
from partopt.profiler import larger
from partopt.profiler.free_memory import Memory
from tests.profiler.helpers import FakeClock, Parts, example, linear, not_run, shared


def chain(*blocks: nn.Module) -> nn.Module:
    """A model of these blocks, which all get inputs with a gradient."""
    return nn.Sequential(nn.LayerNorm(4), *blocks)


def notes(profile: Profile) -> list[str]:
    return [note.code for note in profile.notes if note.code != "hook-overhead"]


def test_the_first_three_and_the_last_of_a_kind_run() -> None:
    profile = shared(chain(*(linear() for _ in range(8))))
    assert not_run(profile) == dict.fromkeys([4, 5, 6, 7], 2)
    [measured] = profile.measurements
    for layer, ran in not_run(profile).items():
        same = measured.layers[ran]
        assert measured.layers[layer].forward_s == same.forward_s > 0
        assert measured.layers[layer].backward_s == same.backward_s > 0


def test_layers_that_do_not_run_are_not_called() -> None:
    ran: list[int] = []

    class Named(nn.Module):
        def __init__(self, index: int) -> None:
            super().__init__()
            self.index = index
            self.part = linear()

        def forward(self, x: Tensor) -> Tensor:
            if type(x) is Tensor:  # not a fake
                ran.append(self.index)
            return self.part(x)  # type: ignore[no-any-return]

    shared(chain(*(Named(index) for index in range(8))), granularity="auto")
    assert set(ran) == {0, 1, 2, 7}


def kinds(*blocks: nn.Module, **options: Any) -> dict[int, int]:
    return not_run(shared(chain(*blocks), granularity="auto", **options))


class Block(nn.Module):
    def __init__(self, rate: float = 0.1, **attributes: Any) -> None:
        super().__init__()
        self.part, self.dropout = linear(), nn.Dropout(rate)
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.part(x))  # type: ignore[no-any-return]


def test_layers_configured_otherwise_are_of_another_kind() -> None:
    assert kinds(*(Block() for _ in range(6))) == {4: 2, 5: 2}
    assert kinds(*(Block(0.1 if index != 4 else 0.2) for index in range(6))) == {4: 2}
    assert kinds(*(Block(0.01 * index) for index in range(6))) == {}


def test_layers_with_other_attributes_are_of_another_kind_but_for_their_number() -> None:
    numbered = (Block(index=index, window=[None, 4]) for index in range(6))
    assert kinds(*numbered) == {4: 2, 5: 2}
    alternating = (Block(index=index, window=[None, 4][index % 2]) for index in range(10))
    assert kinds(*alternating) == {7: 3, 8: 4}


def test_layers_that_train_less_are_of_another_kind() -> None:
    blocks = [Block() for _ in range(7)]
    blocks[3].part.weight.requires_grad_(False)
    assert kinds(*blocks) == {5: 2, 6: 2}


def test_layers_of_other_inputs_are_of_another_kind() -> None:
    def forward(self: Parts, x: Tensor) -> Tensor:
        for index in range(6):
            x = getattr(self, f"b{index}")(x)
            if index == 2:
                x = torch.cat([x, x])
        return x

    assert not_run(shared(Parts(forward, **{f"b{k}": linear() for k in range(6)}))) == {}
    # the first linear layer has no gradient to pass back
    assert not_run(shared(nn.Sequential(*(linear() for _ in range(6))))) == {4: 2}


def test_a_module_called_twice_always_runs() -> None:
    def forward(self: Parts, x: Tensor) -> Tensor:
        for _ in range(8):
            x = self.a(x)
        return x

    profile = shared(Parts(forward, a=linear()))
    assert len(profile.layers) == 8
    assert not_run(profile) == {}


def test_layers_of_another_output_pass_gradients_back() -> None:
    # none of the layers that do not run has an output like its input
    profile = shared(chain(*(part for _ in range(6) for part in (linear(4, 8), linear(8, 4)))))
    [measured] = profile.measurements
    assert set(not_run(profile).values()) == {3, 4}
    assert all(layer.backward_s > 0 for layer in measured.layers)
    assert notes(profile) == ["larger-than-memory"]


def test_one_set_of_weights_for_each_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    source = example("gpt", layers=6, width=32, heads=4, context=16, vocabulary=64)
    model, seen = source.build(), []
    run = larger.LargeMeasurer._time

    def look(self: larger.LargeMeasurer, *given: Any) -> Any:
        with self._running():
            seen.append({name: each.data_ptr() for name, each in named(self.subject.model)})
        return run(self, *given)

    def named(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
        return list(module.named_parameters(remove_duplicate=False))

    monkeypatch.setattr(larger.LargeMeasurer, "_time", look)
    before = dict(named(model))
    profile = shared(model, source.example_inputs, source.loss_fn, granularity="auto")
    [weights] = seen
    blocks = {weights[f"blocks.{index}.up.weight"] for index in range(6)}
    assert len(blocks) == 1
    assert weights["head.weight"] == weights["tokens.weight"]
    inner = {name.split(".", 2)[2] for name in weights if name.startswith("blocks.")}
    outer = {name for name in weights if not name.startswith("blocks.")} - {"head.weight"}
    assert len(set(weights.values())) == len(inner) + len(outer)
    # and the user's model is as it was
    assert all(each is before[name] for name, each in named(model))
    assert profile.parameter_bytes() == sum(each.nbytes for each in model.parameters())


def test_the_optimizer_is_counted_as_often_as_its_weights_occur() -> None:
    class Ticks(FakeClock):
        def intervals_s(self, stamps: Any) -> list[float]:
            return [1.0] * (len(stamps) - 1)

    for count in (5, 9):
        model = nn.Sequential(*(linear() for _ in range(count)), nn.LayerNorm(4))
        [measured] = shared(model, clock=Ticks()).measurements
        assert measured.optimizer_s == count + 1  # a tick for each linear layer, one for the norm


def test_a_profile_says_how_it_was_measured() -> None:
    profile = shared(chain(*(linear() for _ in range(8))))
    note = profile.notes[0]
    assert note.code == "larger-than-memory"
    assert note.fields == {"parameter_bytes": 32 + 512, "real_bytes": 32 + 64, "layers_not_run": 4}
    assert "544 B of weights only 96 B were in memory" in note.text
    assert "4 of 9 layers did not run" in note.text
    assert profile.measurements[0].peak_memory_bytes is None


def test_a_kind_that_does_not_fit_alone_is_an_error() -> None:
    model = nn.Sequential(*(linear(100, 100) for _ in range(8)))

    def inputs(size: int) -> Tensor:
        return torch.randn(size, 100)

    assert shared(model, inputs, within=Memory(1e5, 1e5, 4))
    with pytest.raises(PartoptError) as failed:
        shared(model, inputs, within=Memory(8e4, 8e4, 4))
    assert failed.value.code == "out-of-memory"
    assert failed.value.message == (
        "the weights of one layer of each kind take 88 kB with their gradients, 80 kB are free"
    )
    assert "bfloat16" in failed.value.hint
    assert not any(each.is_meta or type(each) is not nn.Parameter for each in model.parameters())


def test_a_size_whose_layers_keep_too_much_is_out_of_memory() -> None:
    model = nn.Sequential(*(linear(100, 100) for _ in range(8)))
    profile = shared(
        model,
        lambda n: torch.randn(n, 100),
        within=Memory(2e5, 2e5, 4),
        microbatch_sizes=[1, 1000],
    )
    assert [each.out_of_memory for each in profile.measurements] == [False, True]


def test_moments_that_do_not_fit_leave_the_optimizer_out() -> None:
    model = nn.Sequential(*(linear(100, 100) for _ in range(8)))
    profile = shared(model, lambda n: torch.randn(n, 100), within=Memory(1e5, 1e5, 4))
    assert profile.measurements[0].optimizer_s is None


def test_weights_outside_of_modules_are_an_error_and_no_measurement() -> None:
    def forward(self: Parts, x: Tensor) -> Tensor:
        return self.a(x) @ self.kept[0]  # type: ignore[no-any-return]

    model = Parts(forward, a=linear())
    with torch.device("meta"):
        model.kept = [nn.Parameter(torch.randn(4, 4))]  # type: ignore[assignment]
    with pytest.raises(PartoptError) as failed:
        shared(model)
    assert failed.value.code == "model-code-failed"


def test_lazy_modules_are_an_error() -> None:
    with pytest.raises(PartoptError) as failed:
        shared(nn.Sequential(nn.LazyLinear(4)))
    assert failed.value.code == "lazy-parameter"


def test_an_error_of_the_model_is_explained_as_ever() -> None:
    def forward(_self: Parts, _x: Tensor) -> Tensor:
        raise ValueError("no such thing")

    with pytest.raises(PartoptError, match="the training step raised ValueError: no such thing"):
        shared(Parts(forward, a=linear()))
