"""Links between real processes are measured; how fast they are is not asserted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from partopt.documents.topology import Topology
from tests.helpers import ROOT

ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}
SMALL = ["--sizes", "4kB,64kB", "--backend", "gloo", "--repetitions", "5"]


def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *command],
        cwd=ROOT,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        **options,
    )


def test_two_ranks_time_messages_and_allreduces():
    done = run(["tests.runtime.links"])
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout)
    assert (measured["ranks"], measured["backend"], measured["whole"]) == (2, "gloo", [])
    (level,) = measured["levels"]
    assert [each["size_bytes"] for each in level["messages"]] == [4096, 65536]
    assert [(each["ranks"], each["size_bytes"]) for each in level["allreduces"]] == [
        (2, 4096),
        (2, 65536),
    ]
    timed = [each["seconds"] for each in level["messages"] + level["allreduces"]]
    timed += [each["send_s"] for each in level["messages"]]
    assert min(timed) > 0
    assert done.stderr.splitlines() == [
        "server: messages",
        "all-reduce of 2",
    ]


def test_the_command_writes_a_file_that_loads(tmp_path: Path):
    path = tmp_path / "here.yaml"
    measure = ["partopt", "topology", "measure", "--ranks", "2", *SMALL, "-o", str(path)]
    done = run([*measure, "--accept-poor", "--json"])
    assert done.returncode == 0, done.stderr
    topology = Topology.load(path)
    assert (topology.name, topology.devices, topology.allreduce) == ("here", 2, "ring")
    document = json.loads(done.stdout)
    assert document["schema"] == "partopt.links/1"
    assert len(document["comparisons"]) == 6
    assert f"Wrote {path}\n" in done.stderr


@pytest.mark.parametrize("per_server", [None, 1])
def test_under_torchrun_all_its_ranks_take_part_and_one_writes(
    tmp_path: Path, per_server: int | None
):
    path = tmp_path / "here.yaml"
    given = [] if per_server is None else ["--per-server", str(per_server)]
    measure = ["partopt", "topology", "measure", *SMALL, "-o", str(path), "--accept-poor"]
    start = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    done = run([*start, *measure, *given])
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("LEVEL") == 2  # one table of figures, one of levels
    (level,) = Topology.load(path).levels
    assert (level.name, level.size) == ("server" if per_server is None else "cluster", 2)


@pytest.mark.usefixtures("heeded_signals")
def test_stopped_it_leaves_no_process_and_no_file(tmp_path: Path):
    path = tmp_path / "here.yaml"
    measure = ["partopt", "topology", "measure", "--ranks", "2", "-o", str(path)]
    process = subprocess.Popen(
        [sys.executable, "-m", *measure, "--repetitions", "1000000", "--sizes", "4kB,8kB"],
        cwd=ROOT,
        env=ENVIRONMENT,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stderr is not None
    assert process.stderr.readline() == "measuring server: messages\n"
    os.killpg(process.pid, 2)  # as Ctrl-C does, to all of the terminal's processes
    _, said = process.communicate(timeout=30)
    assert (process.returncode, said) == (130, "interrupted: nothing is written\n")
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
    assert not list(tmp_path.iterdir())
