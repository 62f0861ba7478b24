import pytest

from partopt.errors import PartoptWarning
from partopt.planners import lingvo
from tests.planners.problems import chain, problem, topology


def stages_of(costs: list[int], K: int) -> list[tuple[int, int]]:
    model = chain(costs, [0] * len(costs), [0] * (len(costs) - 1), [0] * len(costs))
    return [
        (stage.start, stage.stop)
        for stage in lingvo.plan(problem(model, topology((K, 1.0)))).stages
    ]


def test_a_layer_goes_to_the_stage_of_its_cumulative_cost():
    """Prefixes 1 2 3 4 of 4, times 2: 0.5 1 1.5 2, so stages 0 1 1 1: the layer that ends at one
    half already belongs to the second.
    """
    assert stages_of([1, 1, 1, 1], 2) == [(0, 1), (1, 4)]


def test_empty_stages_are_left_out_and_counted():
    """Prefixes 1 9 10 of 10, times 4: 0.4 3.6 4, so stages 0 3 3: two are empty."""
    with pytest.warns(PartoptWarning, match="2 of 4 stages are empty"):
        assert stages_of([1, 8, 1, 0], 4) == [(0, 1), (1, 4)]
