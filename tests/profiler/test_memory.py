"""A model is refused before it takes more than is free, and an estimate builds it without weights.

The memory of the machine is a number that the tests give.
"""

from pathlib import Path

import pytest
import torch
from torch import nn

from partopt import measure_source
from partopt.errors import PartoptError
from partopt.profiler import device, measure
from partopt.profiler.device import HEADROOM, build_within_memory, is_stepped
from partopt.profiler.weightless import LARGE, build_without_weights, fake_mode, is_fake
from tests.profiler.helpers import (
    FakeClock,
    Parts,
    example,
    linear,
    needs_transformers,
    structure,
)

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
ROWS = LARGE // 64  # of 64 floats: as many as count as large
MODEL_BYTES = 8 * 16 * 4  # of the eight layers below


@pytest.fixture
def limit(monkeypatch):
    return lambda free: monkeypatch.setattr(device, "free_host_bytes", lambda: free)


def eight():
    return nn.Sequential(*(linear() for _ in range(8)))


def fits(build, device=CPU, dtype=torch.float32):
    try:
        build_within_memory(build, device, dtype)
    except PartoptError as error:
        assert error.code == "out-of-memory"
        assert "repeat" in error.hint
        return False
    return True


def test_the_boundary_is_weights_gradients_moments_and_headroom(limit):
    for copies, on, dtype in (
        (4, CPU, torch.float32),
        (2, CPU, torch.bfloat16),
        (1, CUDA, torch.float32),  # a GPU says itself when it is full
    ):
        needed = HEADROOM * copies * MODEL_BYTES
        limit(needed + 1)
        assert fits(eight, on, dtype)
        limit(needed - 1)
        assert not fits(eight, on, dtype)


def test_numbers_of_their_own_format_and_layers_without_weights_yet(limit):
    class Indexed(nn.Module):
        def __init__(self):
            super().__init__()
            self.places = nn.Parameter(torch.zeros(8, dtype=torch.int64), requires_grad=False)
            self.lazy, self.weight = nn.LazyLinear(4), nn.Parameter(torch.zeros(16))

    needed = HEADROOM * (8 * 8 + 4 * 16 * 2)  # in bfloat16 the weights alone
    for free, enough in ((needed + 1, True), (needed - 1, False)):
        limit(free)
        assert fits(Indexed, dtype=torch.bfloat16) is enough


def test_blocks_share_gradients_and_one_parameter_at_a_time_has_moments(limit):
    def build():
        blocks = nn.ModuleList(nn.Sequential(linear(), linear()) for _ in range(3))
        return nn.ModuleDict({"blocks": blocks, "others": nn.ModuleList([linear(), linear()])})

    # of eight matrices two of a block and two others have gradients of their own
    needed = HEADROOM * (8 + 4 + 2) / 8 * MODEL_BYTES
    for free, fit in ((needed + 1, True), (needed - 1, False)):
        limit(free)
        if fit:
            build_within_memory(build, CPU, torch.float32, ["blocks"])
            continue
        with pytest.raises(PartoptError):
            build_within_memory(build, CPU, torch.float32, ["blocks"])


@pytest.mark.slow
def test_a_profile_of_blocks_has_no_more_gradients_than_are_counted():
    """At each size the list has one memory for its gradients, and each backward adds to it."""
    held = []

    class Kept(FakeClock):
        def stamp(self):
            gradients = [each.grad for each in model.parameters() if each.grad is not None]
            held.append((len(gradients), len({each.data_ptr() for each in gradients})))
            return super().stamp()

    model = Parts(lambda self, x: self.last(self.h(x)), h=eight(), last=linear())
    profile = structure(model, blocks=["h"], clock=Kept(), microbatch_sizes=[1, 2])
    assert set(held) == {(9, 2), (1, 1)}  # the latter while the second block is stepped
    alone = structure(model, microbatch_sizes=[1, 2])
    for one, other in zip(profile.measurements, alone.measurements, strict=True):
        assert one.stash_groups == other.stash_groups
        assert [each.transient_bytes for each in one.layers] == [
            each.transient_bytes for each in other.layers
        ]


@pytest.mark.slow
def test_the_optimizer_is_timed_on_the_second_block_for_all(monkeypatch):
    stepped = []

    class Counted(torch.optim.AdamW):
        def __init__(self, parameters, **options):
            stepped.append(sum(each.numel() for each in parameters))
            super().__init__(parameters, **options)

    class Paced(FakeClock):
        def intervals_s(self, stamps):
            return [1.0] * (len(stamps) - 1)

    monkeypatch.setattr(torch.optim, "AdamW", Counted)
    model = Parts(lambda self, x: self.h(x), h=eight())
    [measured] = structure(model, blocks=["h"], clock=Paced()).measurements
    assert (stepped, measured.optimizer_s) == ([16], 8.0)
    assert structure(model, clock=Paced()).measurements[0].optimizer_s == 1.0
    # one after the other; a list that is not there is refused where it would be repeated
    assert structure(model, blocks=["others"], clock=Paced()).measurements[0].optimizer_s == 8.0
    pairs = nn.Sequential(*(nn.Sequential(linear(), linear()) for _ in range(3)))
    model, stepped[:] = Parts(lambda self, x: self.h(x), h=pairs), []
    [measured] = structure(model, blocks=["h"], clock=Paced()).measurements
    assert (stepped, measured.optimizer_s) == ([16, 16], 6.0)


def test_a_model_of_28_billion_in_80_blocks_is_measured_within_6_gib(limit):
    shape = {"layers": 2, "width": 5376, "heads": 42, "vocabulary": 8192}

    def build():
        with build_without_weights(fake_mode()):
            return example("gpt", **shape).build()

    for dtype, gib in ((torch.float32, 5.8), (torch.bfloat16, 3.5)):
        limit(gib * 2**30)
        model = build_within_memory(build, CPU, dtype, ["blocks"])
        assert 80 * sum(each.numel() for each in model.blocks[1].parameters()) > 27e9
        with pytest.raises(PartoptError):
            build_within_memory(build, CPU, dtype)


@pytest.mark.slow
@needs_transformers
def test_two_blocks_of_llama_405b_are_measured_on_one_device_of_80_gb():
    source = example("llama", size="405b", layers=2)
    with build_without_weights(fake_mode()):
        model = source.build()
    parameters = dict(model.named_parameters())
    assert parameters["model.layers.1.mlp.up_proj.weight"].shape == (53248, 16384)
    held = sum(2 * 2 * each.numel() for each in parameters.values())  # bfloat16, with gradients
    moments = sum(
        2 * 2 * each.numel()
        for name, each in parameters.items()
        if is_stepped(name, ["model.layers"])
    )
    block = moments / 4
    assert block == pytest.approx(3.19e9, rel=0.01)
    assert HEADROOM * (held + moments) < 80e9


def test_a_model_that_does_not_fit_is_left_early(limit):
    made = []

    def build():
        while len(made) < 8:
            made.append(linear())
        return nn.Sequential(*made)

    before = nn.Module.register_parameter
    limit(3 * 64 * HEADROOM)
    assert not fits(build)
    assert len(made) == 3
    with pytest.raises(ZeroDivisionError):
        build_within_memory(lambda: 1 / 0, CPU, torch.float32)
    assert nn.Module.register_parameter is before


def test_what_is_frozen_or_shared_counts_once(limit):
    def tied():
        model = eight()
        for layer in model:
            layer.weight = model[0].weight
        return model

    limit(HEADROOM * MODEL_BYTES + 1)  # of what is built; of what is trained there is an eighth
    assert fits(tied)
    assert fits(lambda: eight().requires_grad_(False))


def test_a_model_without_weights_is_not_measured():
    with torch.device("meta"):
        model = eight()
    with pytest.raises(PartoptError, match="it has no weights to measure") as failed:
        measure(model, lambda size: torch.randn(size, 4), device="cpu", steps=1)
    assert failed.value.code == "no-weights"


def test_measure_source_refuses_what_does_not_fit(tmp_path, limit):
    (tmp_path / "net.py").write_text(
        "import torch\nfrom torch import nn\n"
        "build = lambda: nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(9)))\n"
        "example_inputs = lambda size: torch.randn(size, 4)\n"
    )
    limit(MODEL_BYTES)
    with pytest.raises(PartoptError, match=r"net\.py: training the model takes 512 B or more"):
        measure_source(tmp_path / "net.py", steps=1, device="cpu")


# --- builds that look at their weights --------------------------------------------------------


class Trap(nn.Module):
    """A large weight, and something that its initialisation does."""

    def __init__(self, does):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(ROWS, 64).normal_())
        self.drawn = nn.Parameter(torch.randn(ROWS, 64) * 0.02)
        self.register_buffer("table", 1.0 / 10 ** torch.arange(4))
        self.register_buffer("drawn_small", torch.randn(8))
        does(self)


def fill_part(trap):
    trap.weight.data[:2] = torch.ones(2, 64)
    trap.weight.data[1].zero_()
    with torch.no_grad():
        trap.weight[0].fill_(float(trap.table[0].item()))


def initialise(trap):
    nn.init.trunc_normal_(trap.weight, std=0.02)
    nn.init.orthogonal_(trap.weight)
    nn.init.uniform_(trap.weight, -1 / trap.table.sum().item(), 1)


def convert(trap):
    trap.to(torch.bfloat16).to(torch.float32)
    trap.requires_grad_(False).requires_grad_(True)


def tie(trap):
    trap.again = trap.weight
    trap.list = nn.ParameterList([trap.weight, trap.drawn])


def on_meta(trap):
    with torch.device("meta"):
        trap.other = nn.Linear(2**20, 2**20)


def copy(trap):
    trap.weight.data.copy_(torch.ones(ROWS, 64))
    trap.load_state_dict(trap.state_dict())


def test_initialisation_is_no_obstacle():
    before = nn.Module.register_parameter, dict(vars(nn.init))
    for does in (fill_part, initialise, convert, tie, on_meta, copy):
        with build_without_weights(fake_mode()):
            model = Trap(does)
        assert all(map(is_fake, model.parameters()))
        torch.testing.assert_close(model.table, 1.0 / 10 ** torch.arange(4), rtol=0.01, atol=0)
        assert model.drawn_small.abs().sum() > 0  # random numbers that fit are drawn
        assert model.weight.requires_grad
        if does is tie:
            assert model.again is model.weight is model.list[0]
    assert (nn.Module.register_parameter, dict(vars(nn.init))) == before


def test_what_keeps_an_initialisation_while_a_model_is_built_has_it_later():
    """As transformers does where it is imported by the build function."""
    with build_without_weights(fake_mode()):
        kept = torch.nn.init.zeros_
        assert kept(torch.ones(3)).tolist() == [1, 1, 1]
    assert kept(torch.ones(3)).tolist() == [0, 0, 0]


# --- memory -----------------------------------------------------------------------------------


def test_a_containers_limit_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(device, "_CGROUP", tmp_path)
    words = Path("/proc/meminfo").read_text().split()
    whole = 1024 * int(words[words.index("MemTotal:") + 1])
    assert 0 < device.free_host_bytes() < whole
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("700\n")
    assert device.free_host_bytes() > 1000
    (tmp_path / "memory.max").write_text("1000\n")
    assert device.free_host_bytes() == 300
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 200\n")
    assert device.free_host_bytes() == 500
