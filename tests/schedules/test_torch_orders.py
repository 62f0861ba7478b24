"""Orders against those that torch computes for its own schedule classes: an independent witness.

Left out: `Schedule1F1B`, whose printed order is wrong on the last rank (it runs another). With one
chunk a device torch's interleaved schedule is 1f1b-eager, and its interleaved zero-bubble schedule
zb-h1.
"""

import warnings

import pytest

from partopt.schedules import SCHEDULES, refusal
from tests.schedules.executed import built, chunks

CLASSES = {name: entry.torch_class for name, entry in SCHEDULES.items() if entry.torch_class}


def torch_order(name, P, v, M):
    """Compute actions of every rank, without idle slots; the class is given what its constructor
    would take from real stages.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.distributed.pipelining import schedules

    theirs = object.__new__(getattr(schedules, CLASSES[name]))
    theirs.pp_group_size, theirs.n_local_stages = P, v
    theirs._n_microbatches, theirs._num_stages, theirs.num_stages = M, P * v, P * v
    theirs.number_of_rounds = max(1, M // P)
    theirs.microbatches_per_round = M // theirs.number_of_rounds
    if name == "gpipe":
        rows = list(theirs._get_pipeline_order().values())
    else:
        rows = [theirs._calculate_single_rank_operations(rank) for rank in range(P)]
    return [
        [repr(action) for action in row if action is not None and action.is_compute_op]
        for row in rows
    ]


@pytest.mark.parametrize("name", CLASSES)
def test_the_order_is_torchs(name):
    tried = 0
    for P in (1, 2, 3, 4, 6, 8):
        for v in chunks(name):
            for M in (1, 2, 3, 4, 6, 8, 10, 12, 16, 24):
                if refusal(name, P, v, M) is None:
                    given = built(name, P, v, M)
                    ours = [
                        [action for action in given.names(rank) if not action.endswith("U")]
                        for rank in range(P)
                    ]
                    assert ours == torch_order(name, P, v, M), (P, v, M)
                    tried += 1
    assert tried >= 30
