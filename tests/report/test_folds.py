"""Lists folded into their repetitions, held against the lists themselves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partopt.report.folds import Fold, fold


@given(st.lists(st.sampled_from("ab"), max_size=40))
def test_the_folds_written_out_are_the_list(keys):
    folds = fold(keys)
    written = [keys[place] for each in folds for _ in range(each.times) for place in each.block]
    assert written == keys


@pytest.mark.parametrize(
    ("keys", "folds"),
    [
        ("eaaaah", [Fold(0, 1, 1), Fold(1, 1, 4), Fold(5, 1, 1)]),
        ("eabcabcabch", [Fold(0, 1, 1), Fold(1, 3, 3), Fold(10, 1, 1)]),
        ("eabab", [Fold(0, 1, 1), Fold(1, 2, 2)]),
        ("aab", [Fold(0, 3, 1)]),  # saves one row: not worth it
        ("abc", [Fold(0, 3, 1)]),
        ("", []),
    ],
)
def test_equal_elements_and_repeated_blocks_are_folded(keys, folds):
    assert fold(keys, least_saved=2) == folds
