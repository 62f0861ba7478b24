"""A topology as people read it, with what its engines do."""

from partopt.documents.topology import AllReduceRates, Device, Level, Topology
from partopt.report.clusters import render_topology as render


def test_what_engines_do_on_a_level_is_told():
    rates = AllReduceRates(bandwidth_bytes_per_s=5e8, latency_s=1e-4)
    one = Level(name="server", size=2, bandwidth_bytes_per_s=1e9, overhead_s=2e-5, allreduce=rates)
    two = Level(name="cluster", size=2, bandwidth_bytes_per_s=1e9, copy_bytes_per_s=1e11)
    on = Topology(name="t", device=Device(name="d"), levels=[one, two], allreduce="tree")
    assert render(on).splitlines()[-5:] == [
        "A message over server takes 20.00 us of both devices.",
        "An all-reduce over server goes at 500 MB/s, a step 100.0 us late.",
        "A message over cluster takes its bytes at 100 GB/s of both devices.",
        "All-reduces are tree.",
        "Bandwidth is of one link of one member, in one direction.",
    ]
