"""Models that two ranks run together, over gloo: what is one rank's, and what is refused."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from partopt.documents.profile import Profile
from partopt.profiler.group import RankGroup
from tests.forked import start_ranks
from tests.helpers import ROOT
from tests.profiler.group_models import Transformer, example_inputs, loss_fn
from tests.profiler.helpers import flows, structure

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
MEASURED = ["by_hand", "by_dtensor", "over_the_sequence", "over_the_context"]
REFUSED = {
    "other_layers": "the ranks of the group have other layers: layer 3 is head call 0 on rank 0, "
    "end call 0 on rank 1",
    "data_parallel": "DDP exchanges gradients in each backward, a pipeline once a batch",
    "sharded": "FSDP gathers parameters for each microbatch, which a pipeline does not",
    "whole": "the ranks of the group exchange nothing in a step: each runs the whole model",
    "experts": "example_inputs(2) is not the same on rank 1 as on rank 0",
    "of_experts": 'lies on a mesh with the dimension "ep", ranks with other data',
}
# bytes: samples of 2, sequences of 16, width 32 and 4 bytes a number; 64 words
HIDDEN, LOGITS = 2 * 16 * 32 * 4, 2 * 16 * 64 * 4
TABLE, NORMS = 64 * 32 * 4, 4 * 32 * 4
CUT = (4 * 32 * 32 + 8 * 32 * 32) * 4 // 2  # the matrices of a block, half of them


@pytest.fixture(scope="session")
def written(tmp_path_factory):
    """The folder with what each of two processes, ranks 0 and 1, wrote of each model."""
    folder = tmp_path_factory.mktemp("group")
    arguments = [str(folder), *MEASURED, *REFUSED]
    ranks = start_ranks(2, str(HERE / "group_rank.py"), arguments, ROOT)
    for number, rank in enumerate([each.wait() for each in ranks]):
        assert rank.returncode == 0, rank.stderr
        (folder / f"printed.{number}").write_text(rank.stdout)
    return folder


@pytest.fixture
def measured(written):
    return lambda name: Profile.parse((written / f"{name}.0").read_bytes(), name)


def outputs(profile):
    return [layer.output_bytes for layer in profile.measurements[0].layers]


def weights(profile):
    return [layer.parameter_bytes for layer in profile.layers]


def kept_alone(profile):
    """Bytes that one layer keeps and no other."""
    groups = profile.measurements[0].stash_groups
    return {group.layers[0]: group.bytes for group in groups if len(group.layers) == 1}


def flops(profile):
    return [layer.forward_flops for layer in profile.measurements[0].layers]


def test_dtensors_are_measured_as_layers_cut_by_hand_to_the_byte(measured):
    by_hand, by_dtensor = measured("by_hand"), measured("by_dtensor")
    assert by_dtensor.layers == by_hand.layers
    own, other = by_hand.measurements[0], by_dtensor.measurements[0]
    assert (other.tensors, other.stash_groups) == (own.tensors, own.stash_groups)
    assert (outputs(by_dtensor), flops(by_dtensor)) == (outputs(by_hand), flops(by_hand))


def test_a_rank_of_tensor_parallelism_holds_its_part_and_sends_all(measured):
    profile = measured("by_dtensor")
    assert profile.group_ranks == 2
    assert [layer.name for layer in profile.layers] == ["embed", "blocks.0", "blocks.1", "head"]
    assert weights(profile) == [TABLE, CUT + NORMS, CUT + NORMS, TABLE]
    assert flows(profile) == [(0, [1], HIDDEN), (1, [2], HIDDEN), (2, [3], HIDDEN)]
    assert outputs(profile) == [HIDDEN, HIDDEN, HIDDEN, LOGITS]


def test_a_sequence_cut_over_the_ranks_sends_a_part(measured):
    profile, half = measured("over_the_sequence"), HIDDEN // 2
    assert weights(profile) == [TABLE // 2, CUT + NORMS, CUT + NORMS, TABLE // 2]
    assert flows(profile) == [(0, [1], half), (1, [2], half), (2, [3], half)]
    assert outputs(profile) == [half, half, half, LOGITS]
    # the gather of a block's input is its own: it computes as much as without
    assert flops(profile)[1:3] == flops(measured("by_dtensor"))[1:3]


def test_a_rank_of_context_parallelism_holds_all_weights_and_a_part_of_the_sequence(measured):
    profile, half = measured("over_the_context"), HIDDEN // 2
    sizes = {"granularity": "auto", "microbatch_sizes": [2]}
    whole = structure(Transformer(), example_inputs, loss_fn, **sizes)
    assert weights(profile) == [TABLE, 2 * CUT + NORMS, 2 * CUT + NORMS, TABLE] == weights(whole)
    assert flows(profile) == [(0, [1], half), (1, [2], half), (2, [3], half)]
    assert outputs(profile) == [half, half, half, LOGITS // 2]
    # half of the queries, each with all keys
    assert [2 * each for each in flops(profile)] == flops(whole)
    # half of all that a block keeps, but for keys and values: those of all ranks
    own, all_of_it = kept_alone(profile), kept_alone(whole)
    for block in (1, 2):
        assert own[block] == all_of_it[block] // 2 + 2 * (HIDDEN - half)


def test_what_no_group_is_is_refused_on_every_rank(written):
    for name, what in REFUSED.items():
        assert all(what in (written / f"{name}.{rank}").read_text() for rank in range(2)), name


def test_all_ranks_draw_the_same_numbers_however_they_draw_them():
    def drawn(rank):
        RankGroup(rank, ranks=2).seed()
        return [random.random(), float(np.random.rand()), torch.rand(()).item()]

    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    assert drawn(0) == drawn(1)
    random.setstate(before[0])
    np.random.set_state(before[1])
    torch.set_rng_state(before[2])


def test_a_rank_without_memory_ends_the_run_with_what_is_finished_and_rank_0_writes(written):
    profile = Profile.load(written / "full.json")
    assert profile.group_ranks == 2
    found = {each.microbatch_size: each.out_of_memory for each in profile.measurements}
    assert found == {2: False, 4: True, 8: True}
    assert "MICROBATCH" in (written / "printed.0").read_text()
    assert (written / "printed.1").read_text() == ""
