from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from partopt.cost.chain import Chain, chain_of, coarsen
from partopt.cost.microbatch import measurement_at
from partopt.documents.profile import LayerMeasurement, Measurement, StashGroup, Tensor
from partopt.errors import PartoptError
from tests.examples import examples
from tests.helpers import measurement, out_of_memory, profile_of, with_memory_of
from tests.planners.problems import block_bounds, stashed, with_memory


def test_compute_is_forward_and_backward_and_the_forward_again_where_recomputed():
    chain = chain_of(profile_of([measurement([1.0, 2.0, 4.0], [10.0, 20.0, 40.0])]))
    assert chain.compute_s(0, 3) == 77
    assert chain.compute_s(1, 2) == 22
    assert chain.compute_s(1, 3, recompute=True) == 66 + 6


def test_backwards_in_two_parts_pass_gradients_on_before_those_of_weights_come():
    """Half of each backward is for the weights; what is made again comes before either."""
    chain = chain_of(profile_of([measurement([1.0, 2.0, 4.0], [10.0, 20.0, 40.0])]))
    for split, passing in ((False, [0, 10, 30, 70]), (True, [0, 5, 15, 35])):
        assert chain.gradients_prefix(split).tolist() == passing
        assert chain.passing_prefix(split, recompute=False).tolist() == passing
        again = [own + made for own, made in zip(passing, [0, 1, 3, 7], strict=True)]
        assert chain.passing_prefix(split, recompute=True).tolist() == again


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


def test_a_port_carries_the_mean_of_what_goes_forth_and_what_comes_back():
    """The 4 bytes of indices that layer 0 sends beside 8 of numbers have no gradient."""
    measured = measurement([1.0] * 3, tensors=[(0, [1], 8), (0, [2], 4), (1, [2], 2)])
    numbers, indices, last = measured.tensors
    tensors = [numbers, structs.replace(indices, gradient=False), last]
    chain = chain_of(profile_of([structs.replace(measured, tensors=tensors)]))
    assert (chain.a.tolist(), chain.back.tolist()) == ([0, 12, 6, 0], [0, 8, 2, 0])
    assert chain.traffic.tolist() == [0, 10, 4, 0]


def test_blocks_that_are_made_again_are_all_that_recomputation_adds():
    """Of layers of 1, 2, 4 and 8 s the second and the third are blocks."""
    chain = chain_of(profile_of([measurement([1.0, 2.0, 4.0, 8.0], [1.0] * 4)]))
    of_blocks = chain.with_blocks([1, 2, 3])
    for own, again in ((chain, [0, 1, 3, 7, 15]), (of_blocks, [0, 0, 2, 6, 6])):
        assert own.again_prefix.tolist() == again
        added = own.busy_prefix(recompute=True) - own.busy_prefix(recompute=False)
        assert added.tolist() == again
        assert own.compute_s(1, 4, recompute=True) == 14 + 3 + again[4] - again[1]


@pytest.mark.parametrize(
    ("i", "j", "first", "kept", "peak"),
    [
        (0, 4, None, 10 + 8 + 4 + 40, 10 + 100),
        (0, 4, 1, 10 + 8 + 30 + 40, 10 + 100),
        (0, 3, None, 10 + 8 + 4, 10 + 100),
        (1, 4, None, 4 + 40, 4 + 40 + 7),  # the input of a stage is in a receive buffer
        (1, 4, 1, 30 + 40, 30 + 40 + 7),
        (1, 3, None, 4, 4 + 30 + 5),
        (0, 1, None, 10, 10 + 100),
    ],
)
def test_what_a_backward_takes_at_its_fullest_where_blocks_are_made_again(i, j, first, kept, peak):
    """Layers keep 10 to 40 bytes and take 100, 5, 5 and 7 more; the second and third are blocks."""
    measured = measurement(
        [1.0] * 4,
        output_bytes=[8, 4, 2, 0],
        stash_groups=[([n], 10 * (n + 1)) for n in range(4)],
    )
    chain = chain_of(with_memory_of(profile_of([measured]), [0] * 4, [100, 5, 5, 7]))
    found = chain.with_blocks([1, 2, 3]).blocks.remade(i, j, first)
    assert (found.stash_bytes, found.stash_bytes + found.transient_bytes) == (kept, peak)


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


def linear(b: int) -> Measurement:
    """Two layers of which every quantity grows with the microbatch size, each at its own rate."""
    of_layers = [
        LayerMeasurement(
            forward_s=1 + n * b,
            backward_s=20 + 7 * n * b,
            backward_input_s=3 + 2 * n * b,
            output_bytes=10 + 11 * n * b,
            transient_bytes=20 + 13 * n * b,
            split_stash_bytes=30 + 17 * n * b,
            forward_flops=40 + 19 * n * b,
        )
        for n in (1, 2)
    ]
    return Measurement(
        microbatch_size=b,
        layers=of_layers,
        tensors=[Tensor(producer=0, consumers=[1], bytes=5 + 23 * b, gradient=False)],
        stash_groups=[
            StashGroup(layers=[0, 1], bytes=6 + 29 * b),
            StashGroup(layers=[1], bytes=31 * b),
        ],
        optimizer_s=2 + 5 * b,
    )


@pytest.mark.parametrize("size", [3, 4, 5, 7])
def test_what_grows_evenly_is_between_two_sizes_what_it_would_be_there(size):
    profile = profile_of([linear(2), linear(4), linear(8)], parameter_bytes=[1, 1])
    assert measurement_at(profile, size) == linear(size)
    chain = chain_of(profile, size)
    assert chain.gw.tolist() == [20 + 7 * n * size - (3 + 2 * n * size) for n in (1, 2)]


def test_backwards_in_parts_that_one_size_lacks_are_halves_between():
    without = structs.replace(
        linear(4), layers=[structs.replace(own, backward_input_s=None) for own in linear(4).layers]
    )
    for sizes in ([linear(2), without], [without, linear(6)]):
        chain = chain_of(profile_of(sizes, parameter_bytes=[1, 1]), sum_of(sizes) // 2)
        assert chain.gw.tolist() == (chain.g / 2).tolist()


def sum_of(sizes: list[Measurement]) -> int:
    return sum(measured.microbatch_size for measured in sizes)


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


def sums(chain: Chain, i: int, j: int) -> list[object]:
    """All that is added up, or chosen, over layers [i, j), and what crosses their ends."""
    prefixes = [
        *(chain.busy_prefix(again) for again in (False, True)),
        *(chain.passing_prefix(split, again) for split in (False, True) for again in (False, True)),
        *(chain.gradients_prefix(split) for split in (False, True)),
    ]
    return [
        *(prefix[j] - prefix[i] for prefix in prefixes),
        *(chain.forward_s(i, j), chain.compute_s(i, j), chain.compute_s(i, j, recompute=True)),
        *(chain.gw[i:j].sum(), chain.steps_s(i, j), chain.split_stash(i, j)),
        *(chain.trained_bytes(i, j), chain.frozen_bytes(i, j), chain.parameter_bytes(i, j)),
        *(chain.stash_bytes(i, j), chain.layer_bytes(i, j)),
        *(chain.transient(split)(i, j) for split in (False, True)),
        *(float(value) for c in (i, j) for value in (chain.a[c], chain.back[c])),
        *chain.tensors[:, [i, j]].ravel().tolist(),
        *([] if chain.blocks is None else map(float, chain.blocks.remade(i, j))),
    ]


@pytest.mark.slow
@examples(60)
@given(st.data())
def test_merged_layers_are_what_they_are_together(data):
    """Between cuts that are kept nothing changes: of seconds, of bytes, of steps and blocks, of
    backwards in one part and in two.
    """
    fine = data.draw(stashed(7))
    N = fine.layers
    if data.draw(st.booleans()):
        fine = data.draw(with_memory(fine))
    parts = data.draw(st.lists(st.integers(0, 9), min_size=N, max_size=N))
    fine = replace(fine, gw=fine.gw + parts, g=fine.g + parts, optimizer_s=3.0)
    fine = fine.with_steps() if data.draw(st.booleans()) else fine
    kept = sorted({0, N, *data.draw(st.lists(st.integers(0, N), max_size=4))})
    bounds = data.draw(block_bounds(N))
    if bounds is not None and {*bounds} <= {*kept}:
        fine = fine.with_blocks(bounds)
    coarse = coarsen(fine, kept)
    assert coarse.names == [fine.names[start] for start in kept[:-1]]
    for i, j in combinations(range(len(kept)), 2):
        assert sums(coarse, i, j) == pytest.approx(sums(fine, kept[i], kept[j]), abs=1e-9)
