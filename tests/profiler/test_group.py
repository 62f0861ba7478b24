"""Models that two ranks run together, over gloo: what is one rank's, and what is refused."""

from __future__ import annotations

import importlib.util
import os
import random
import re
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs

from partopt import PartoptError, estimate_source
from partopt.documents.profile import Profile
from partopt.documents.topology import Topology
from partopt.profiler.group import RankGroup
from tests.helpers import ROOT
from tests.profiler.group_models import Transformer, example_inputs, loss_fn
from tests.profiler.helpers import structure

HERE = Path(__file__).parent
LLAMA = ["llama"] if importlib.util.find_spec("transformers") else []
MEASURED = [
    "by_hand",
    "by_dtensor",
    "over_the_vocabulary",
    "over_the_sequence",
    "over_the_context",
    *LLAMA,
]
REFUSED = ["other_layers", "data_parallel", "sharded", "of_experts", "experts", "whole"]
# bytes: samples of 2, sequences of 16, width 32 and 4 bytes a number; 64 words
HIDDEN, LOGITS = 2 * 16 * 32 * 4, 2 * 16 * 64 * 4
TABLE, NORMS = 64 * 32 * 4, 4 * 32 * 4
CUT = (4 * 32 * 32 + 8 * 32 * 32) * 4 // 2  # the matrices of a block, half of them
WHOLE = {"granularity": "auto", "microbatch_sizes": [2]}  # how one device is measured


def run_ranks(command: Sequence[str | Path]) -> list[subprocess.CompletedProcess[str]]:
    """Two processes that run `command` as ranks 0 and 1."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    shared = os.environ | {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, *command],
            env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [each.communicate(timeout=300) for each in ranks]
    finally:
        for each in ranks:
            each.kill()
    return [
        subprocess.CompletedProcess(each.args, each.returncode, *output)
        for each, output in zip(ranks, outputs, strict=True)
    ]


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with what each rank wrote of each model."""
    folder = tmp_path_factory.mktemp("group")
    ranks = run_ranks([HERE / "group_rank.py", folder, *MEASURED, *REFUSED])
    for number, rank in enumerate(ranks):
        assert rank.returncode == 0, rank.stderr
        (folder / f"printed.{number}").write_text(rank.stdout)
    return folder


def measured(folder: Path, name: str) -> Profile:
    return Profile.parse((folder / f"{name}.0").read_bytes(), name)


def cuts(profile: Profile) -> list[tuple[int, list[int], int]]:
    return [(each.producer, each.consumers, each.bytes) for each in profile.measurements[0].tensors]


def outputs(profile: Profile) -> list[int]:
    return [layer.output_bytes for layer in profile.measurements[0].layers]


def weights(profile: Profile) -> list[int]:
    return [layer.parameter_bytes for layer in profile.layers]


def kept_alone(profile: Profile) -> dict[int, int]:
    """Bytes that one layer keeps and no other."""
    groups = profile.measurements[0].stash_groups
    return {group.layers[0]: group.bytes for group in groups if len(group.layers) == 1}


def flops(profile: Profile) -> list[int | None]:
    return [layer.forward_flops for layer in profile.measurements[0].layers]


def test_dtensors_are_measured_as_layers_cut_by_hand_to_the_byte(written: Path) -> None:
    by_hand, by_dtensor = (measured(written, name) for name in ("by_hand", "by_dtensor"))
    assert by_dtensor.layers == by_hand.layers
    own, other = by_hand.measurements[0], by_dtensor.measurements[0]
    assert other.tensors == own.tensors
    assert other.stash_groups == own.stash_groups
    assert outputs(by_dtensor) == outputs(by_hand)
    assert flops(by_dtensor) == flops(by_hand)


def test_a_rank_of_tensor_parallelism_holds_its_part_and_sends_all(written: Path) -> None:
    profile = measured(written, "by_dtensor")
    assert profile.group_ranks == 2
    assert [layer.name for layer in profile.layers] == ["embed", "blocks.0", "blocks.1", "head"]
    assert weights(profile) == [TABLE, CUT + NORMS, CUT + NORMS, TABLE]
    assert cuts(profile) == [(0, [1], HIDDEN), (1, [2], HIDDEN), (2, [3], HIDDEN)]
    assert outputs(profile) == [HIDDEN, HIDDEN, HIDDEN, LOGITS]


def test_a_vocabulary_cut_over_the_ranks(written: Path) -> None:
    profile = measured(written, "over_the_vocabulary")
    assert weights(profile) == [TABLE // 2, CUT + NORMS, CUT + NORMS, TABLE // 2]
    assert cuts(profile) == [(0, [1], HIDDEN), (1, [2], HIDDEN), (2, [3], HIDDEN)]
    assert outputs(profile) == [HIDDEN, HIDDEN, HIDDEN, LOGITS]


def test_a_sequence_cut_over_the_ranks_sends_a_part(written: Path) -> None:
    profile, whole = measured(written, "over_the_sequence"), measured(written, "by_dtensor")
    half = HIDDEN // 2
    assert weights(profile) == [TABLE // 2, CUT + NORMS, CUT + NORMS, TABLE // 2]
    assert cuts(profile) == [(0, [1], half), (1, [2], half), (2, [3], half)]
    assert outputs(profile) == [half, half, half, LOGITS]
    # the gather of a block's input is its own: it computes as much as without
    assert flops(profile)[1:3] == flops(whole)[1:3]


def test_a_rank_of_context_parallelism_holds_all_weights_and_a_part_of_the_sequence(
    written: Path,
) -> None:
    profile = measured(written, "over_the_context")
    whole = structure(Transformer(), example_inputs, loss_fn, **WHOLE)
    assert profile.group_ranks == 2
    assert [layer.name for layer in profile.layers] == ["embed", "blocks.0", "blocks.1", "head"]
    assert weights(profile) == [TABLE, 2 * CUT + NORMS, 2 * CUT + NORMS, TABLE] == weights(whole)
    half = HIDDEN // 2
    assert cuts(profile) == [(0, [1], half), (1, [2], half), (2, [3], half)]
    assert outputs(profile) == [half, half, half, LOGITS // 2]
    # half of the queries, each with all keys
    assert [2 * (each or 0) for each in flops(profile)] == flops(whole)
    # half of all that a block keeps, but for keys and values: those of all ranks
    own, all_of_it = kept_alone(profile), kept_alone(whole)
    for block in (1, 2):
        assert own[block] == all_of_it[block] // 2 + 2 * (HIDDEN - half)


@pytest.mark.skipif(not LLAMA, reason="transformers is not installed")
def test_a_llama_cut_by_its_own_plan(written: Path) -> None:
    profile = measured(written, "llama")
    matrices = (4 * 32 * 32 + 3 * 4 * 32 * 32) * 4 // 2
    blocks = [layer for layer in profile.layers if layer.type == "LlamaDecoderLayer"]
    assert [layer.parameter_bytes for layer in blocks] == [matrices + 2 * 32 * 4] * 2
    assert sum(weights(profile)) == 2 * (matrices + 2 * 32 * 4) + 2 * TABLE + 32 * 4
    # the angles of the positions, layer 1, go to both blocks
    assert {(2, (3,), HIDDEN), (3, (4,), HIDDEN), (4, (5,), HIDDEN)} <= {
        (producer, tuple(consumers), size) for producer, consumers, size in cuts(profile)
    }


@pytest.mark.parametrize(
    "name, what",
    [
        (
            "other_layers",
            "the ranks of the group have other layers: layer 3 is head call 0 on rank 0, end call "
            "0 on rank 1",
        ),
        ("data_parallel", "DDP exchanges gradients in each backward, a pipeline once a batch"),
        ("sharded", "FSDP gathers parameters for each microbatch, which a pipeline does not"),
        ("whole", "the ranks of the group exchange nothing in a step: each runs the whole model"),
        ("experts", "example_inputs(2) is not the same on rank 1 as on rank 0"),
        ("of_experts", 'lies on a mesh with the dimension "ep", ranks with other data'),
    ],
)
def test_what_no_group_is_is_refused_on_every_rank(written: Path, name: str, what: str) -> None:
    for rank in range(2):
        assert what in (written / f"{name}.{rank}").read_text()


def test_all_ranks_draw_the_same_numbers_however_they_draw_them() -> None:
    def drawn(rank: int) -> list[float]:
        RankGroup(rank, ranks=2).seed()
        return [random.random(), float(np.random.rand()), torch.rand(()).item()]

    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    assert drawn(0) == drawn(1)
    random.setstate(before[0])
    np.random.set_state(before[1])
    torch.set_rng_state(before[2])


def test_a_rank_without_memory_ends_the_run_with_what_is_finished(written: Path) -> None:
    profile = Profile.load(written / "full.json")
    assert profile.group_ranks == 2
    found = {each.microbatch_size: each.out_of_memory for each in profile.measurements}
    assert found == {2: False, 4: True, 8: True}


def test_only_rank_0_writes_and_prints(written: Path) -> None:
    first, second = ((written / f"printed.{rank}").read_text() for rank in range(2))
    assert "MICROBATCH" in first
    assert second == ""


@pytest.mark.parametrize("name", MEASURED)
def test_an_estimate_of_a_group_has_what_its_ranks_measure_but_the_times(
    written: Path, name: str
) -> None:
    real, made = measured(written, name), estimated(name)
    assert made.group_ranks == 2
    assert made.estimated is not None
    assert made.estimated.topology == "dgx-h100"
    assert made.layers == real.layers
    assert made.measurements[0].tensors == real.measurements[0].tensors
    assert outputs(made) == outputs(real)
    assert flops(made) == flops(real)


def estimated(name: str, **options: Any) -> Profile:
    return estimate_source(
        f"{HERE / 'group_models.py'}:{name}",
        "h100",
        microbatch_sizes=[2],
        dtype="float32",
        **{"group": 2, "topology": "dgx-h100", **options},
    )


def test_what_ranks_exchange_takes_time_on_the_links_between_them() -> None:
    """A block sums twice over the ranks in the forward, and the gradients as often."""
    fast = Topology.load("dgx-h100")
    [level, *outer] = fast.levels
    slow = structs.replace(
        fast, levels=[structs.replace(level, bandwidth_bytes_per_s=1e6, latency_s=1e-3), *outer]
    )
    one, other = (
        estimated("by_hand", topology=each).measurements[0].layers for each in (fast, slow)
    )
    own_s, more_s = (
        2 * (HIDDEN / each.levels[0].bandwidth_bytes_per_s + 2 * each.levels[0].latency_s)
        for each in (fast, slow)
    )
    for layer in (1, 2):
        assert other[layer].forward_s - one[layer].forward_s == pytest.approx(more_s - own_s)
        assert other[layer].backward_s - one[layer].backward_s == pytest.approx(more_s - own_s)
    assert other[0].forward_s == one[0].forward_s


@pytest.mark.skipif(not LLAMA, reason="transformers is not installed")
def test_a_model_of_transformers_is_cut_as_its_class_says() -> None:
    shape = {"layers": 2, "width": 32, "heads": 4, "ffn": 128, "vocabulary": 64, "context": 16}

    def of(ranks: int) -> Profile:
        return estimate_source(
            ROOT / "examples" / "llama.py",
            "h100",
            arguments=shape,
            microbatch_sizes=[2],
            dtype="float32",
            group=ranks,
            topology="dgx-h100" if ranks > 1 else None,
        )

    matrices = (4 * 32 * 32 + 3 * 4 * 32 * 32) * 4
    for ranks in (1, 2, 4):
        profile = of(ranks)
        norms = 2 * 32 * 4
        assert sum(weights(profile)) == (2 * matrices + 2 * TABLE) // ranks + 2 * norms + 32 * 4
    with pytest.raises(PartoptError, match="4 heads do not divide among 8 ranks"):
        of(8)


@pytest.mark.parametrize(
    ("name", "options", "what"),
    [
        ("by_hand", {"topology": None}, "exchange over the links of a topology"),
        ("by_hand", {"group": 1}, "says over which links a group of ranks exchanges"),
        ("by_hand", {"group": 3}, "groups of 3 ranks do not divide 8 to a server"),
        ("by_hand", {"group": 0}, "`group=0`: expected a whole number >= 1"),
        ("by_hand", {"topology": "dgx-h10"}, "no shipped topology of that name"),
        ("whole", {}, "the ranks of the group exchange nothing in a step"),
        ("of_experts", {}, 'lies on a mesh with the dimension "ep"'),
    ],
)
def test_what_no_group_is_is_not_estimated(name: str, options: dict[str, Any], what: str) -> None:
    with pytest.raises(PartoptError, match=re.escape(what)):
        estimated(name, **options)
