"""Links between real processes are measured; how fast they are is not asserted."""

import json
import os
import subprocess
import sys

import pytest
import torch

from partopt.documents.topology import Topology
from partopt.profiler.device import describe_device
from tests.forked import run_forked, start_ranks
from tests.helpers import ROOT
from tests.runtime.launched import run_python

MEASURE = ["-m", "partopt", "topology", "measure"]
SMALL = ["--sizes", "4kB,64kB", "--backend", "gloo", "--repetitions", "5", "--accept-poor"]


@pytest.mark.slow
def test_the_command_times_messages_and_allreduces_and_writes_a_file_that_loads(tmp_path):
    path = tmp_path / "here.yaml"
    done = run_forked("partopt", [*MEASURE[2:], "--ranks", "2", *SMALL, "-o", str(path), "--json"])
    assert done.returncode == 0, done.stderr
    topology = Topology.load(path)
    assert (topology.name, topology.devices, topology.allreduce) == ("here", 2, "ring")
    document = json.loads(done.stdout)
    assert document["schema"] == "partopt.links/1"
    assert len(document["comparisons"]) == 6
    assert f"Wrote {path}\n" in done.stderr
    found = [(each["level"], each["size_bytes"]) for each in document["comparisons"]]
    assert sorted(found) == [("server", 4000)] * 3 + [("server", 64000)] * 3
    assert min(each["measured_s"] for each in document["comparisons"]) > 0
    assert "measuring server: messages\nmeasuring all-reduce of 2\n" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("per_server", [None, 1])
def test_under_torchrun_all_its_ranks_take_part_and_one_writes(tmp_path, per_server):
    path = tmp_path / "here.yaml"
    measure = [*MEASURE, *SMALL, "-o", str(path)]
    if per_server is None:
        start = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"
        ended = [run_python(*start, *measure)]
    else:  # the ranks as torchrun starts them
        ranks = start_ranks(2, measure[1], [*measure[2:], "--per-server", str(per_server)])
        ended = [rank.wait() for rank in ranks]
    assert not any(done.returncode for done in ended), ended
    printed = "".join(done.stdout for done in ended)
    assert printed.count("LEVEL") == 2  # one table of figures, one of levels
    cluster, server = Topology.load(path), 2 if per_server is None else per_server
    (level,) = cluster.levels
    whole_bytes = describe_device(torch.device("cpu")).memory_bytes
    assert cluster.device.memory_bytes == whole_bytes // server  # the ranks of a server share it
    assert (level.name, level.size) == ("server" if per_server is None else "cluster", 2)


@pytest.mark.slow
@pytest.mark.usefixtures("heeded_signals")
def test_stopped_it_leaves_no_process_and_no_file(tmp_path):
    long = "--ranks", "2", "--repetitions", "1000000", "--sizes", "4kB,8kB"
    process = subprocess.Popen(
        [sys.executable, *MEASURE, *long, "-o", str(tmp_path / "here.yaml")],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stderr.readline() == "measuring server: messages\n"
    os.killpg(process.pid, 2)  # as Ctrl-C does, to all of the terminal's processes
    _, said = process.communicate(timeout=30)
    assert (process.returncode, said) == (130, "interrupted: nothing is written\n")
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
    assert not list(tmp_path.iterdir())
