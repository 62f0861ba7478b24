from partopt.cost.problem import Decision
from partopt.planners import lingvo
from tests.planners.problems import chain, problem, topology


def decision(costs: list[int], K: int) -> Decision:
    model = chain(costs, [0] * len(costs), [0] * (len(costs) - 1), [0] * len(costs))
    return lingvo.plan(problem(model, topology((K, 1.0))))


def stages_of(decision: Decision) -> list[tuple[int, int]]:
    return [(stage.start, stage.stop) for stage in decision.partition.stages]


def test_a_layer_goes_to_the_stage_of_its_cumulative_cost():
    """Prefixes 1 2 3 4 of 4, times 2: 0.5 1 1.5 2, so stages 0 1 1 1: the layer that ends at one
    half already belongs to the second.
    """
    found = decision([1, 1, 1, 1], 2)
    assert stages_of(found) == [(0, 1), (1, 4)]
    assert list(found.notes) == []


def test_empty_stages_are_left_out_and_counted():
    """Prefixes 1 9 10 of 10, times 4: 0.4 3.6 4, so stages 0 3 3: two are empty."""
    found = decision([1, 8, 1, 0], 4)
    assert stages_of(found) == [(0, 1), (1, 4)]
    [note] = found.notes
    assert (note.code, note.fields) == ("empty-stages", {"empty": 2, "stages": 4})
    assert note.text == "lingvo: 2 of 4 stages are empty: their devices stay idle"
