import pytest

from partopt.cost.chain import chain_of, coarsen
from partopt.cost.microbatch import measurement_at
from partopt.errors import PartoptError
from tests.helpers import measurement, out_of_memory, profile_of, with_memory_of


def test_compute_is_forward_and_backward_and_the_forward_again_where_recomputed():
    chain = chain_of(profile_of([measurement([1.0, 2.0, 4.0], [10.0, 20.0, 40.0])]))
    assert chain.compute_s(0, 3) == 77
    assert chain.compute_s(1, 2) == 22
    assert chain.compute_s(1, 3, recompute=True) == 66 + 6


def test_without_tensors_a_cut_carries_the_output_before_it():
    chain = chain_of(profile_of([measurement([1.0] * 3, output_bytes=[5, 7, 9])]))
    assert chain.a.tolist() == [0, 5, 7, 0]


def test_a_skip_connection_is_carried_through_every_cut_that_it_spans_and_once():
    """Layer 0's 5 bytes go to layers 1 and 3, layer 1's 7 to layer 2, layer 2's 9 to layer 3: cuts
    of 5, 5+7 and 5+9.
    """
    tensors = [(0, [1, 3], 5), (1, [2], 7), (2, [3], 9)]
    chain = chain_of(profile_of([measurement([1.0] * 4, tensors=tensors)]))
    assert chain.a.tolist() == [0, 5, 12, 14, 0]


def test_a_tied_parameter_counts_once_in_a_stage_that_holds_both_ends():
    """An embedding of 100 bytes used by layers 0 and 2, which hold 100 and 130; layer 1 holds
    40.
    """
    profile = profile_of(
        [measurement([1.0] * 3)], parameter_bytes=[100, 40, 130], shared=[("wte", [0, 2], 100)]
    )
    weights = chain_of(profile).parameter_bytes
    assert (weights(0, 1), weights(1, 3), weights(0, 3)) == (100, 170, 170)


def test_stash_groups_are_charged_once_to_a_stage_that_touches_them():
    chain = chain_of(profile_of([measurement([1.0] * 3, stash_groups=[([0, 1], 8), ([2], 3)])]))
    assert (chain.stash_bytes(0, 1), chain.stash_bytes(0, 2), chain.stash_bytes(0, 3)) == (8, 8, 11)


def test_without_stash_groups_what_crosses_layers_is_kept_by_both_sides():
    chain = chain_of(profile_of([measurement([1.0] * 3, output_bytes=[5, 7, 9])]))
    assert (chain.stash_bytes(0, 1), chain.stash_bytes(1, 2), chain.stash_bytes(0, 3)) == (
        5,
        12,
        12,
    )


def test_by_default_the_size_that_is_fastest_per_sample():
    profile = profile_of(
        [
            measurement([3.0], microbatch_size=1),
            measurement([4.0], microbatch_size=2),
            measurement([9.0], microbatch_size=4),
        ]
    )
    assert chain_of(profile).microbatch_size == 2


def test_between_two_measured_sizes_every_layer_is_interpolated():
    low = measurement([1.0, 10.0], [2.0, 20.0], output_bytes=[100, 0], microbatch_size=2)
    high = measurement([3.0, 10.0], [4.0, 40.0], output_bytes=[200, 0], microbatch_size=4)
    chain = chain_of(profile_of([low, high]), 3)
    assert (chain.f.tolist(), chain.g.tolist(), chain.a.tolist()) == ([2, 10], [3, 30], [0, 150, 0])


def test_what_backwards_take_is_interpolated():
    sizes = [measurement([1.0] * 2, microbatch_size=b) for b in (2, 4)]
    low, high = (
        with_memory_of(profile_of([measured]), [0, 0], taken).measurements[0]
        for measured, taken in zip(sizes, ([100, 7], [300, 7]), strict=True)
    )
    chain = chain_of(profile_of([low, high]), 3)
    assert [chain.transient_bytes(i, i + 1) for i in range(2)] == [200, 7]


@pytest.mark.parametrize(("size", "seconds"), [(2, 0.5), (3, 0.75), (4, 1.0), (6, 2.0), (8, 3.0)])
def test_the_optimizer_step_is_interpolated_where_it_was_measured_on_both_sides(size, seconds):
    """Measured at 2, 4 and 8: 0.5, 1 and 3 s."""
    steps = {2: 0.5, 4: 1.0, 8: 3.0}
    sizes = [measurement([1.0], microbatch_size=b, optimizer_s=step) for b, step in steps.items()]
    assert measurement_at(profile_of(sizes), size).optimizer_s == seconds


@pytest.mark.parametrize("steps", [(None, 1.0), (0.5, None), (None, None)])
def test_without_the_optimizer_step_of_one_side_there_is_none_between(steps):
    sizes = [
        measurement([1.0], microbatch_size=b, optimizer_s=step)
        for b, step in zip((2, 4), steps, strict=True)
    ]
    assert measurement_at(profile_of(sizes), 3).optimizer_s is None


@pytest.mark.parametrize(
    "size, message, hint, exit_code",
    [
        (1, "microbatch size 1 was not measured", "choose from 2 to 4", 2),
        (5, "microbatch size 5 was not measured", "choose from 2 to 4", 2),
        (8, "microbatch size 8 does not fit", "choose at most 4", 1),
        (9, "microbatch size 9 does not fit", "choose at most 4", 1),
    ],
)
def test_sizes_are_never_extrapolated(size, message, hint, exit_code):
    profile = profile_of(
        [
            measurement([1.0], microbatch_size=2),
            measurement([1.0], microbatch_size=4),
            out_of_memory(8),
        ]
    )
    with pytest.raises(PartoptError, match=message) as raised:
        chain_of(profile, size)
    assert (raised.value.hint, raised.value.exit_code) == (hint, exit_code)


def test_sizes_whose_layers_exchange_other_tensors_are_not_interpolated():
    low = measurement([1.0] * 3, microbatch_size=2, tensors=[(0, [1], 5)])
    high = measurement([1.0] * 3, microbatch_size=4, tensors=[(0, [2], 5)])
    with pytest.raises(PartoptError, match="cannot be interpolated"):
        chain_of(profile_of([low, high]), 3)


def test_a_coarsened_chain_sums_what_it_merges():
    """Layers 0-1 and 2-3 merged; a tied parameter of 7 in layers 1 and 2, a stash of 3 kept by
    layers 0 and 1.
    """
    sizes = measurement(
        [1.0, 2.0, 4.0, 8.0],
        [1.0] * 4,
        output_bytes=[5, 6, 7, 8],
        stash_groups=[([0, 1], 3), ([2], 9)],
    )
    fine = chain_of(
        profile_of([sizes], parameter_bytes=[1, 12, 17, 2], shared=[("tied", [1, 2], 7)])
    )
    coarse = coarsen(fine, [0, 2, 4])
    assert (coarse.f.tolist(), coarse.g.tolist(), coarse.a.tolist()) == ([3, 12], [2, 2], [0, 6, 0])
    for i, j in [(0, 1), (1, 2), (0, 2)]:
        assert (
            coarse.parameter_bytes(i, j)
            == coarse.trained_bytes.table[i, j]
            == fine.parameter_bytes(2 * i, 2 * j)
        )
        assert coarse.stash_bytes(i, j) == fine.stash_bytes(2 * i, 2 * j)
