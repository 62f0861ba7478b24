"""Which ranks exchange what."""

import pytest

from partopt.errors import PartoptError
from partopt.links.layout import levels_of


def test_one_server():
    (level,) = levels_of(5, 5)
    assert (level.name, level.size) == ("server", 5)
    assert [(each.label, each.pairs) for each in level.traffic] == [
        ("one message", ((0, 1),)),
        ("both directions", ((0, 1),)),
        ("all pairs", ((0, 1), (2, 3))),
    ]
    assert level.allreduces == ((0, 1), (0, 1, 2, 3), (0, 1, 2, 3, 4))


def test_servers():
    inside, between = levels_of(8, 2)
    assert (inside.size, between.size) == (2, 4)
    assert [(each.label, each.pairs) for each in between.traffic] == [
        ("one message", ((0, 2),)),
        ("both directions", ((0, 2),)),
        ("two servers", ((0, 2), (1, 3))),
        ("all pairs", ((0, 2), (1, 3), (4, 6), (5, 7))),
    ]
    assert between.allreduces == ((0, 2), (0, 2, 4, 6))


def test_a_rank_a_server():
    (level,) = levels_of(3, 1)
    assert (level.name, level.size, level.allreduces) == ("cluster", 3, ((0, 1), (0, 1, 2)))


@pytest.mark.parametrize(("ranks", "per_server"), [(1, 1), (0, 1), (4, 3), (4, 0), (4, 8)])
def test_no_levels(ranks, per_server):
    with pytest.raises(PartoptError):
        levels_of(ranks, per_server)
