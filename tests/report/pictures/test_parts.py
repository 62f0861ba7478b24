"""What pictures are made of: folded columns, ports, boxes of a cluster, fronts, shortened text."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

import partopt as po
from partopt.report.folds import Fold
from partopt.report.pictures.cluster import boxes_of, cut_use, port_use
from partopt.report.pictures.profile_sheet import columns_from, columns_of
from partopt.report.pictures.sheet import fit, pack, text_width
from partopt.report.pictures.tables import PlanPoint, pareto
from partopt.simulator.execution import execute
from tests.helpers import flat, two_level, uniform_profile
from tests.report.pictures import cases


@pytest.mark.parametrize(
    "layers, folds",
    [
        ("EABABABH", [Fold(1, 2, 3)]),
        ("EAAAAH", [Fold(1, 1, 4)]),
        ("ABCD", []),
        ("AABAABC", [Fold(0, 3, 2)]),
        ("AAAABCBCBC", [Fold(0, 1, 4), Fold(1, 2, 3)]),
    ],
)
def test_repeated_blocks_are_columns_once(layers, folds):
    assert columns_from(layers).folds == folds


@given(st.text("AB", max_size=14))
def test_columns_hold_every_layer_once_with_its_like(layers):
    columns = columns_from(layers)
    assert sorted(itertools.chain(*columns.layers)) == list(range(len(layers)))
    assert all(len({layers[layer] for layer in own}) == 1 for own in columns.layers)
    for own in columns.folds:
        for place in range(own.start, own.start + own.length):
            assert len(columns.layers[place]) == own.times


def test_two_hundred_layers_are_a_few_columns():
    columns = columns_of(cases.many_layers(50))
    assert len(columns.layers) == 6
    assert columns.folds == [Fold(1, 4, 50)]


CLUSTERS = [
    flat(4),
    two_level(2, 2, 2e9, 1e9),
    two_level(2, 4, 2e9, 1e9, outer_links=2),
    two_level(2, 4, 2e9, 1e9, outer_bus=True),
]
PLANS = [
    {"planner": "straight", "schedule": "pipedream"},
    {"planner": "straight", "schedule": "1f1b", "microbatches": 16},
    {"cuts": [3], "replicas": [3, 1]},
    {"cuts": [4], "replicas": [2, 2]},
]


@pytest.mark.parametrize("options", PLANS)
@pytest.mark.parametrize("cluster", CLUSTERS, ids=lambda cluster: cluster.name)
def test_ports_are_as_busy_as_they_are_in_the_simulator(cluster, options):
    """Of the busiest port of each level: transfers and all-reduces may be at two ports."""
    plan = po.solve(po.Job(uniform_profile(8), cluster, **options)).plan
    used = port_use(plan)
    for k, simulated in enumerate(execute(plan).level_use, 1):
        most = max((share for (level, _), share in used.items() if level == k), default=0.0)
        both = simulated.transfer_share, simulated.allreduce_share
        assert max(both) * 0.999 <= most <= sum(both) * 1.001


@pytest.mark.parametrize(
    ("algorithm", "moved"), [("ring", 2 * 3 / 4), ("tree", 2.0), ("hierarchical", 2 * 1 / 2)]
)
def test_an_all_reduce_takes_ports_as_its_algorithm_does_whatever_the_order(algorithm, moved):
    cluster = replace(two_level(2, 2), allreduce=algorithm)
    plan = po.solve(po.Job(uniform_profile(8), cluster, planner="data_parallel")).plan
    [stage] = plan.stages
    turned = replace(plan, stages=[replace(stage, ranks=[0, 2, 1, 3])])
    assert port_use(turned) == port_use(plan)
    seconds = moved * stage.trained_bytes / 4 / 1e9  # of every round of four, over 1 GB/s
    assert port_use(plan)[2, 0] == pytest.approx(seconds / plan.predicted.period_s)


def test_a_cut_is_as_busy_as_its_port():
    plan = po.solve(po.Job(uniform_profile(8), flat(2), planner="straight")).plan
    assert cut_use(plan) == {1: pytest.approx(port_use(plan)[1, 0])}


@pytest.mark.parametrize("ranks, shown", [(4, 4), (32, 32)])
def test_every_device_is_drawn_inside_of_its_server_and_beside_the_others(ranks, shown):
    box = boxes_of(cases.plan_of(ranks)[0], 7.0)
    assert box.width <= 7.0
    devices = [each for each in box.within() if each.k == 0]
    assert [each.c for each in devices] == list(range(shown))
    for outer in box.within():
        for each in itertools.chain(*outer.rows):
            assert outer.left < each.left and each.left + each.width < outer.left + outer.width
            assert outer.top < each.top and each.top + each.height < outer.top + outer.height
        for one, other in itertools.combinations(itertools.chain(*outer.rows), 2):
            apart = one.left + one.width <= other.left or other.left + other.width <= one.left
            assert apart or one.top + one.height <= other.top


def test_equal_servers_are_drawn_once():
    box = boxes_of(cases.replicated(16), 7.0)
    servers = list(itertools.chain(*box.rows))
    assert [(each.c, each.times) for each in servers] == [(0, 8), (8, 8)]


@pytest.mark.slow
@given(
    st.lists(
        st.builds(
            PlanPoint,
            st.just(""),
            st.integers(1, 5).map(float),
            st.just("samples"),
            st.integers(1, 5),
            st.booleans(),
        ),
        max_size=8,
    )
)
def test_the_front_is_what_no_other_beats(points):
    def beaten(own):
        return any(
            other.fits
            and other.speed >= own.speed
            and other.memory_bytes <= own.memory_bytes
            and other != own
            for other in points
        )

    assert set(pareto(points)) == {own for own in points if own.fits and not beaten(own)}


@pytest.mark.parametrize("inches", [0.1, 0.3, 1.0, 3.0])
def test_texts_are_shortened_to_their_room(inches):
    for text in ("a", "model.layers.12.attention", "m" * 10_000, "i" * 40):
        short = fit(text, inches, 6.0)
        assert text_width(short, 6.0) <= inches
        assert short in ("", text) or (short[0], short[-1]) == (text[0], text[-1])
    for line in pack(["model.layers"] * 9, inches, 6.0):
        assert text_width(line, 6.0) <= inches
