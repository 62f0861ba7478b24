"""The CSV that torch executes: written, read back, understood by torch's own reader, and executed
by it on two processes.
"""

import subprocess
import sys
import warnings

import numpy as np
import pytest

from partopt.errors import PartoptError
from partopt.schedules import SCHEDULES, order, refusal
from partopt.schedules.layout import Layout
from partopt.schedules.torch_csv import from_csv, to_csv
from tests.helpers import ROOT
from tests.schedules.executed import built, chunks, layout_of, straight

WRITTEN = [name for name in SCHEDULES if name != "dualpipe"]
EXECUTED = {"1f1b": 1, "1f1b-eager": 1, "interleaved": 2, "zb-h1": 1, "zbv": 2, "dualpipev": 2}


def same(one, other):
    return all(
        np.array_equal(getattr(one, field), getattr(other, field))
        for field in ("kind", "stage", "microbatch", "joined", "rows")
    )


def test_a_row_a_rank_without_updates():
    layout = layout_of("1f1b", 2, 1, 3)
    assert (
        to_csv(order("1f1b", layout), layout)
        == "0F0,0F1,0B0,0F2,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n"
    )


def test_joined_actions_share_a_cell():
    layout = layout_of("dualpipev", 1, 2, 3)
    assert to_csv(order("dualpipev", layout), layout).startswith(
        "0F0,1F0,0F1,1B0,(1F1;0B0)OVERLAP_F_B,"
    )


def test_equal_replicas_share_a_file_with_their_own_numbers():
    layout = layout_of("interleaved", 2, 2, 4, 2)
    alone = layout_of("interleaved", 2, 2, 2)
    assert to_csv(order("interleaved", layout), layout) == to_csv(
        order("interleaved", alone), alone
    )


def test_recomputation_is_torchs_own():
    layout = layout_of("gpipe", 2, 1, 2, recompute=[True, True])
    assert to_csv(order("gpipe", layout), layout) == "0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n"


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("d", [1, 2])
def test_what_is_written_reads_back(name, d):
    for P, v, M in [(1, 1, 1), (2, 1, 5), (4, 1, 8), (1, 2, 2), (2, 2, 4), (4, 2, 8), (4, 3, 8)]:
        if v in chunks(name) and refusal(name, P, v, M) is None:
            layout = layout_of(name, P, v, M * d, d)
            given = order(name, layout)
            assert same(
                from_csv(to_csv(given, layout), layout, SCHEDULES[name].asynchronous), given
            )


@pytest.mark.parametrize("name", [name for name in WRITTEN if "pipedream" not in name])
def test_torchs_reader_understands_every_cell(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.distributed.pipelining.schedules import _Action

    v = chunks(name)[-1]
    layout = layout_of(name, 4, v, 8)
    for line in to_csv(built(name, 4, v, 8), layout).splitlines():
        for cell in line.split(","):
            assert repr(_Action.from_str(cell)) == cell


@pytest.mark.parametrize(
    "text, message",
    [
        ("0F0,0B0\n1F0,1B0,,,0X3\n", 'row 2, cell 5: unrecognised action "0X3"'),
        ("0F0,0B0\n1F0;1B0\n", 'row 2, cell 1: unrecognised action "1F0;1B0"'),
        ("0F0,0B0\n(1F0;1B0)\n", 'row 2, cell 1: unrecognised action "(1F0;1B0)"'),
        ("0F0,0B0,0REDUCE_GRAD\n1F0,1B0\n", 'row 1, cell 3: unrecognised action "0REDUCE_GRAD"'),
        ("0F,0B0\n1F0,1B0\n", 'row 1, cell 1: unrecognised action "0F"'),
        ("0F0,0B0\n", "1 rows for the 2 ranks"),
        ("1F0,1B0\n0F0,0B0\n", "rank 0: 1F0 is on the wrong rank"),
        ("0F0,0B0\n1F0\n", "rank 1: 1B0 is missing"),
        ("0F0,0B0\n1F0,(1F9;1B0)OVERLAP_F_B\n", "rank 1: 1F9 names an unknown microbatch"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_by_row_and_cell(text, message):
    with pytest.raises(PartoptError) as found:
        from_csv(text, Layout([[0], [1]], 2, 1))
    assert found.value.message.startswith(message)
    assert found.value.hint


def test_idle_cells_and_spaces_are_skipped():
    layout = Layout([[0], [1]], 2, 1)
    assert same(from_csv(" 0F0,,,0B0\n,1F0 ,1B0,\n", layout), order("1f1b", layout))


@pytest.mark.parametrize(
    "name, layout, message",
    [
        ("1f1b", straight("1f1b", [3, 1], 6), "unequal replicas: 3-1"),
        ("dualpipe", layout_of("dualpipe", 2, 2, 4), "two copies"),
        ("1f1b", straight("1f1b", [2, 2], 5), "pipelines 0 and 1 of 2 have different orders"),
    ],
)
def test_what_torch_cannot_execute_is_not_written(name, layout, message):
    with pytest.raises(PartoptError, match=message) as found:
        to_csv(order(name, layout), layout)
    assert found.value.hint


def test_torch_executes_what_is_written(tmp_path):
    """Two processes run a small model by each file; the gradients are those of the model run
    whole.
    """
    for name, v in EXECUTED.items():
        (tmp_path / f"{name}.csv").write_text(
            to_csv(built(name, 2, v, 4), layout_of(name, 2, v, 4))
        )
    command = [
        sys.executable,
        "-m",
        "tests.schedules.execute_csv",
        str(tmp_path),
        *(f"{name}:{v}" for name, v in EXECUTED.items()),
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [f"{rank}:{name}" for name in EXECUTED for rank in (0, 1)]
