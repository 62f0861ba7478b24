"""Tokens of a sample, from the inputs of a model."""

import pytest
import torch
from torch import nn

from partopt.profiler import measure
from partopt.profiler.tensors import tokens_per_sample


def ids(*shape, dtype=torch.int64):
    return torch.zeros(shape, dtype=dtype)


@pytest.mark.parametrize(
    ("inputs", "size", "tokens"),
    [
        (ids(4, 128), 4, 128),
        ({"input_ids": ids(4, 128), "labels": ids(4, 64)}, 4, 128),
        ((torch.zeros(4, 3, 8, 8), ids(4, 7, dtype=torch.int32)), 4, 7),
        (ids(1, 128), 1, 128),
        (torch.zeros(4, 128), 4, None),
        (ids(4), 4, None),
        (ids(4, 1), 4, None),
        (ids(8, 128), 4, None),
        (ids(4, 128, dtype=torch.bool), 4, None),
        (torch.zeros(4, 3, 8, 8), 4, None),
    ],
)
def test_they_are_the_length_of_the_first_integers(inputs, size, tokens):
    assert tokens_per_sample(inputs, size) == tokens


def test_a_profile_says_them_where_the_inputs_are_token_ids():
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 4))
    profile = measure(model, lambda size: ids(size, 6), microbatch_sizes=[1, 2], steps=1)
    assert profile.model.tokens_per_sample == 6
    dense = measure(
        nn.Linear(4, 4), lambda size: torch.ones(size, 4), microbatch_sizes=[1], steps=1
    )
    assert dense.model.tokens_per_sample is None
