"""What grids need, by the formulas."""

from partopt.cost.problem import Problem, problem_of
from partopt.schedules import SCHEDULES
from partopt.schedules.layout import STRAIGHT
from partopt.search.candidates import candidates
from tests.helpers import chain_profile, flat, with_memory_of

TAKEN = 10**8  # bytes of every layer's backward while it runs


def stated(taken: int) -> Problem:
    """Eight unequal layers on four devices that have room for the same beside what is `taken`."""
    chain = chain_profile(
        [1e-3, 4e-3, 2e-3, 1e-3, 3e-3, 1e-3, 2e-3, 5e-3],
        output_bytes=[10**6] * 8,
        parameter_bytes=[10**6, 4 * 10**6] * 4,
        stash_groups=[((layer,), 10**6 * (1 + layer % 3)) for layer in range(8)],
    )
    on = flat(4, memory_bytes=25 * 10**6 + taken)
    return problem_of(
        with_memory_of(chain, [0] * 8, [taken] * 8), on, schedule="1f1b", microbatches=8
    )


def test_what_every_backward_takes_counts_once_on_a_device_of_a_grid():
    """So that grids need as much more, and are cut as they are without it on smaller devices."""
    pairs = list(zip(candidates([stated(TAKEN)]), candidates([stated(0)]), strict=True))
    moved = 0
    for loaded, light in pairs:
        assert loaded.needs_bytes == light.needs_bytes + TAKEN
        cut, as_before = loaded.within_memory(), light.within_memory()
        assert (cut is None) == (as_before is None)
        if cut is not None and as_before is not None:
            moved += SCHEDULES[cut.problem.schedule].shape != STRAIGHT
            assert list(cut.stages.bounds) == list(as_before.stages.bounds)
    assert moved > 10
