"""The file of a fitted cluster, and what is said of the fit."""

from partopt.documents.topology import Topology
from partopt.links.cluster_file import cluster_text, quality
from partopt.links.errors import compare
from partopt.links.fit import fit_topology
from partopt.links.fitted import FittedLinks, notes_of
from partopt.links.layout import ALL, SERVERS, levels_of
from partopt.report.clusters import render_links as render
from tests.links.synthetic import SWITCHED, level_samples, measurement

LEVELS = [level_samples(level, {**SWITCHED, SERVERS: 2, ALL: 2}) for level in levels_of(4, 2)]
MEASURED = measurement(*LEVELS)
TOPOLOGY = fit_topology(MEASURED, "two-by-two")
FOUND = compare(MEASURED, TOPOLOGY)


def test_the_file_is_the_topology_with_the_errors_beside_each_level():
    text = cluster_text(TOPOLOGY, FOUND, ["the machine is busy"])
    assert Topology.parse(text.encode()) == TOPOLOGY
    lines = text.splitlines()
    assert lines[0] == "# the machine is busy"
    assert lines[1].startswith("# good fit: largest error 0% (")
    place = lines.index("- name: cluster")
    assert lines[place - 5 : place] == [
        "# one message: 4 kB +0%, 64 kB +0%, 1 MB +0%, 4 MB +0%, 16 MB +0%",
        "# both directions: 4 kB +0%, 64 kB +0%, 1 MB +0%, 4 MB +0%, 16 MB +0%",
        "# two servers: 4 kB +0%, 64 kB +0%, 1 MB +0%, 4 MB +0%, 16 MB +0%",
        "# its sender: 4 kB +0%, 64 kB +0%, 1 MB +0%, 4 MB +0%, 16 MB +0%",
        "# all-reduce of 2: 4 kB +0%, 64 kB +0%, 1 MB +0%, 4 MB +0%, 16 MB +0%",
    ]


def test_a_poor_fit_says_where_it_fails():
    kinked = level_samples(
        levels_of(2, 2)[0], SWITCHED, seconds_of=lambda x: 1e-3 if x == 64_000 else 5e-5 + x / 3e9
    )
    measured = measurement(kinked, ranks=2)
    topology = fit_topology(measured, "kinked")
    found = compare(measured, topology)
    assert quality(found).startswith("POOR FIT: largest error ")
    assert "; over 15% off at server, one message: 64 kB" in quality(found)
    assert cluster_text(topology, found, []).startswith("# POOR FIT: ")
    assert " poor\n" in render(FittedLinks(measured, topology, found, []))


def test_the_report_has_a_row_for_every_figure():
    text = render(FittedLinks(MEASURED, TOPOLOGY, FOUND, []))
    rows = [line for line in text.splitlines() if line.startswith(("server ", "cluster "))]
    assert len(rows) == len(FOUND) + 2 * 5 + 2  # late receives, and the levels themselves
    assert max(map(len, text.splitlines())) <= 100
    assert "ranks    4 on 1 host, gloo" in text


def test_what_makes_figures_doubtful():
    busy = measurement(*LEVELS, load=0.6, cores=2)
    assert [note.code for note in notes_of(busy, 2)] == ["busy-host", "shared-cores", "one-host"]
    assert next(notes_of(busy, 2)).text == (
        "the machine is busy: a load of 1.2 on 2 cores before the measurement"
    )
    assert not list(notes_of(measurement(*LEVELS, hosts=("a", "a", "b", "b")), 2))
    split = measurement(*LEVELS, hosts=("a", "b", "b", "b"))
    assert "split-server" in [note.code for note in notes_of(split, 2)]
