"""torchgpipe takes the exported arguments, and its pipeline's gradients are the model's own."""

import copy

import pytest
import torch
from torch import nn

from partopt import export_plan
from tests.trainers.own_code import needs
from tests.trainers.plans import planned
from tests.trainers.readers import assigned

pytestmark = [needs("torchgpipe"), pytest.mark.filterwarnings("ignore")]

LAYERS = 16


def arguments(**options):
    plan = planned(schedule="gpipe", **options)
    return assigned(export_plan(plan, "torchgpipe").main, "ARGUMENTS")


def model() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(3, 3) for _ in range(LAYERS)))


@pytest.mark.parametrize("recompute", ["never", "always"])
def test_a_pipeline_on_cpus_is_the_model(recompute):
    from torchgpipe import GPipe

    plain = model()
    piped = GPipe(copy.deepcopy(plain), devices=["cpu"] * 4, **arguments(recompute=recompute))
    assert [len(partition) for partition in piped.partitions] == [6, 3, 3, 4]
    assert piped.chunks == 8
    assert piped.checkpoint == recompute
    data = torch.randn(8, 3)
    for network in (plain, piped):
        network(data).square().sum().backward()
    for own, found in zip(plain.parameters(), piped.parameters(), strict=True):
        torch.testing.assert_close(found.grad, own.grad)


@pytest.mark.parametrize("balance", [[6, 3, 3, 3], [6, 3, 7, 0], [6, 3, 3, 5]])
def test_a_wrong_balance_is_refused(balance):
    from torchgpipe import GPipe

    with pytest.raises(ValueError, match="balance"):
        GPipe(model(), devices=["cpu"] * 4, **arguments() | {"balance": balance})


def test_a_moved_bound_is_noticed():
    from torchgpipe import GPipe

    piped = GPipe(model(), devices=["cpu"] * 4, **arguments() | {"balance": [6, 4, 2, 4]})
    assert [len(partition) for partition in piped.partitions] != [6, 3, 3, 4]


def test_it_refuses_layers_that_share_parameters_as_the_exporter_does():
    from torchgpipe import GPipe

    network = model()
    network[15].weight = network[0].weight
    with pytest.raises(ValueError, match="duplicate parameters"):
        GPipe(network, devices=["cpu"] * 4, **arguments())
