"""Links between devices on paper are measured to what the paper says, whatever the hosts do."""

from __future__ import annotations

from functools import partial

import pytest

from partopt.runtime import link_measurement, processes
from partopt.runtime.link_fit import fit_links
from partopt.runtime.link_measurement import SIZES, LinkRun, prepare_links
from tests.gpu.nccl import BYTES_PER_S, LATENCY_S, rehearse

LARGE = (64_000, 1_000_000, 4_000_000)


def measure(context, run):
    return link_measurement._measure(run, lambda _: None, context)


@pytest.mark.slow
def test_trips_are_timed_by_the_device():
    run = LinkRun(4, 4, LARGE, "nccl", 5)
    found = rehearse(partial(measure, run=run), 4, on_paper=True)[0]
    links = fit_links(found, "paper", 4)
    (level,) = links.topology.levels
    assert level.latency_s == pytest.approx(LATENCY_S, rel=0.01)
    assert level.bandwidth_bytes_per_s == pytest.approx(BYTES_PER_S, rel=0.01)
    assert not level.overhead_s and not level.copy_bytes_per_s
    (samples,) = found.levels
    for own in (samples.both, samples.ports):  # on paper nothing is shared
        seconds = [one.seconds for one in samples.messages]
        assert [each.seconds for each in own] == pytest.approx(seconds, rel=0.01)
    assert {note.code for note in links.notes} <= {"busy-host"}


@pytest.fixture
def eight_gpus(monkeypatch):
    monkeypatch.setattr(processes.dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(processes.torch.cuda, "device_count", lambda: 8)


@pytest.mark.usefixtures("eight_gpus")
def test_every_gpu_is_measured_up_to_large_messages():
    run = prepare_links()
    assert (run.ranks, run.per_server, run.backend) == (8, 8, "nccl")
    assert run.sizes == SIZES["nccl"] and max(run.sizes) == 256_000_000
    on_processors = prepare_links(ranks=2, backend="gloo")
    assert (on_processors.backend, max(on_processors.sizes)) == ("gloo", 16_000_000)
