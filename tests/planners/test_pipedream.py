from dataclasses import replace
from functools import cache
from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partopt import planners
from partopt.cost.chain import Chain
from partopt.cost.problem import Partition, Problem
from partopt.cost.ranges import RangeSum
from partopt.documents.topology import Level, Topology
from partopt.errors import PartoptError
from partopt.planners import pipedream
from tests.examples import examples
from tests.planners.problems import chain, chains, problem, proven, topologies, topology


def recurrence(given: Problem) -> float:
    """The recurrence as printed, evaluated directly: every split, every count of workers, no bounds
    and no tables.
    """
    W, a, levels = given.chain.parameter_bytes, given.chain.a, given.topology.levels

    @cache
    def A(k: int, i: int, j: int, m: int) -> float:
        if k == 0:
            return given.chain.compute_s(i, j, given.recompute_by_default)
        B = levels[k - 1].bandwidth_bytes_per_s * levels[k - 1].links
        splits = (
            max(A(k, i, s, m - last), 2 * a[s] / B, T(k, s, j, last))
            for s in range(i + 1, j)
            for last in range(1, m)
        )
        return min([T(k, i, j, m), *splits])

    @cache
    def T(k: int, i: int, j: int, m: int) -> float:
        inner = levels[k - 2].size if k > 1 else 1
        return (
            max(
                A(k - 1, i, j, inner),
                2 * (m - 1) * W(i, j) / (levels[k - 1].bandwidth_bytes_per_s * levels[k - 1].links),
            )
            / m
        )

    return A(len(levels), 0, given.chain.layers, levels[-1].size)


def objective_of(partition: Partition, given: Problem) -> float:
    """What the recurrence charges for a partition, read from its layers and ranks alone."""
    topology = given.topology

    def charge(stages: list[tuple[int, int, frozenset[int]]], k: int) -> float:
        """Bottleneck of stages on devices inside one level-k component; outer stages are those that
        share their members.
        """
        if k == 0:
            assert len(stages) == 1
            return given.chain.compute_s(*stages[0][:2], given.recompute_by_default)
        level = topology.levels[k - 1]
        size, B = topology.group_size(k - 1), level.bandwidth_bytes_per_s * level.links
        worst, cuts = 0.0, []
        for members, run in groupby(
            stages, key=lambda stage: frozenset(rank // size for rank in stage[2])
        ):
            block = list(run)
            first = min(members)
            inside = [
                (start, stop, frozenset(rank for rank in ranks if rank // size == first))
                for start, stop, ranks in block
            ]
            weights = given.chain.parameter_bytes(block[0][0], block[-1][1])
            worst = max(
                worst,
                max(charge(inside, k - 1), 2 * (len(members) - 1) * weights / B) / len(members),
            )
            cuts.append(block[0][0])
        return max([worst, *(2 * given.chain.a[cut] / B for cut in cuts[1:])])

    stages = [(stage.start, stage.stop, frozenset(stage.ranks)) for stage in partition.stages]
    return charge(stages, len(topology.levels))


@pytest.mark.slow
@examples(400)
@given(chains(), topologies(), st.booleans())
def test_equals_the_recurrence_evaluated_directly(model, cluster, recompute):
    given = problem(model, cluster, recompute="always" if recompute else "never")
    partition, certificate = proven(pipedream.plan(given))
    assert certificate.objective_s == recurrence(given)
    assert objective_of(partition, given) == pytest.approx(certificate.objective_s, rel=1e-12)
    assert sorted(rank for stage in partition.stages for rank in stage.ranks) == list(
        range(cluster.devices)
    )


@pytest.mark.slow
@examples(50)
@given(chains(), topologies(levels=2), st.sampled_from([2, 8]))
def test_more_bandwidth_is_never_slower(model, cluster, factor):
    faster = topology(
        *[(level.size, level.bandwidth_bytes_per_s * factor) for level in cluster.levels]
    )
    [wide, narrow] = [
        proven(pipedream.plan(problem(model, on)))[1].objective_s for on in (faster, cluster)
    ]
    assert wide <= narrow


def scaled(model: Chain, times: int, sizes: int) -> Chain:
    """The chain with its times and its bytes multiplied."""
    weights = RangeSum(
        [sizes * model.parameter_bytes(layer, layer + 1) for layer in range(model.layers)]
    )
    return replace(
        model,
        f=times * model.f,
        g=times * model.g,
        a=sizes * model.a,
        back=sizes * model.back,
        trained_bytes=weights,
    )


@pytest.mark.slow
@examples(100)
@given(chains(), topologies(levels=2))
def test_times_and_bytes_scale_the_answer_and_bytes_with_bandwidths_leave_it(model, cluster):
    model = scaled(model, 1, 1)
    before, value = proven(pipedream.plan(problem(model, cluster)))
    larger, slower = proven(pipedream.plan(problem(scaled(model, 4, 4), cluster)))
    assert (slower.objective_s, larger.stages) == (4 * value.objective_s, before.stages)
    wider = [
        Level(
            name=level.name,
            size=level.size,
            bandwidth_bytes_per_s=4 * level.bandwidth_bytes_per_s,
            links=level.links,
        )
        for level in cluster.levels
    ]
    on = Topology(name="wider", device=cluster.device, levels=wider)
    same, equal = proven(pipedream.plan(problem(scaled(model, 1, 4), on)))
    assert (equal.objective_s, same.stages) == (value.objective_s, before.stages)


@pytest.mark.slow
@examples(50)
@given(chains(), st.integers(1, 8), st.sampled_from([1.0, 4.0]))
def test_an_outer_level_of_one_changes_nothing(model, devices, bandwidth):
    flat = pipedream.plan(problem(model, topology((devices, bandwidth))))
    wrapped = pipedream.plan(problem(model, topology((devices, bandwidth), (1, 1.0))))
    assert wrapped == flat


def test_equal_layers_without_weights_are_replicated_whole():
    model = chain([1] * 4, [2] * 4, [0] * 3, [0] * 4)
    partition = pipedream.plan(problem(model, topology((4, 1.0)))).partition
    assert [(stage.start, stage.stop, list(stage.ranks)) for stage in partition.stages] == [
        (0, 4, [0, 1, 2, 3])
    ]


def test_of_equal_plans_the_one_with_fewer_stages_and_then_the_later_cut_is_chosen():
    model = chain([4, 1, 4], [0] * 3, [0, 0], [100] * 3)
    partition, certificate = proven(pipedream.plan(problem(model, topology((2, 1.0)))))
    assert certificate.objective_s == 5.0
    assert [(stage.start, stage.stop) for stage in partition.stages] == [(0, 2), (2, 3)]


def test_copies_of_an_inner_pipeline_take_turns_by_server():
    """Two servers of two, slow links between layers' weights inside: a pipeline 1-1 in each server,
    replicated over the servers.
    """
    model = chain([2, 2], [4, 4], [1], [50, 50])
    partition = pipedream.plan(problem(model, topology((2, 10.0), (2, 100.0)))).partition
    assert [list(stage.ranks) for stage in partition.stages] == [[0, 2], [1, 3]]
    assert partition.family == "nested"
    stated = problem(model, topology((2, 10.0), (2, 100.0)))
    assert planners.decide("pipedream", stated).partition.family == "nested"


def test_tables_of_as_many_layers_as_may_be_are_made(monkeypatch):
    model = chain([1] * 5, [1] * 5, [1] * 4, [1] * 5)
    stated = problem(model, topology((2, 1.0)))
    monkeypatch.setattr(pipedream, "LAYER_LIMIT", 5)
    assert pipedream.plan(stated).partition.stages
    monkeypatch.setattr(pipedream, "LAYER_LIMIT", 4)
    with pytest.raises(PartoptError, match="5 layers and a level of 2; its tables outgrow memory"):
        pipedream.plan(stated)


def test_too_many_layers_for_the_tables_is_said_before_they_are_made():
    count = pipedream.LAYER_LIMIT + 1
    model = chain([1] * count, [1] * count, [1] * (count - 1), [1] * count)
    with pytest.raises(
        PartoptError, match="5001 layers and a level of 2; its tables outgrow memory"
    ):
        pipedream.plan(problem(model, topology((2, 1.0))))


def test_progress_is_told_and_can_stop_the_work():
    told = []
    pipedream.plan(
        problem(
            chain([1] * 3, [1] * 3, [1] * 2, [1] * 3),
            topology((2, 1.0), (2, 1.0)),
            progress=lambda *call: told.append(call),
        )
    )
    assert told[0] == ("pipedream: inside a level1", 1, 3)
    assert told[-1] == ("pipedream: plan", 2, 2)

    def interrupt(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pipedream.plan(
            problem(
                chain([1] * 3, [1] * 3, [1] * 2, [1] * 3), topology((2, 1.0)), progress=interrupt
            )
        )
