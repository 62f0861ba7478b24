"""Links as measured, and the topology fitted to them: what people see of both, and the file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from partopt.documents import Note
from partopt.documents.topology import Topology
from partopt.links.cluster_file import cluster_text
from partopt.links.errors import Comparison, compare, worst
from partopt.links.fit import fit_topology
from partopt.links.samples import LinkMeasurement

_BUSY = 0.25  # runnable processes for each core, above which a host is busy


@dataclass(frozen=True)
class FittedLinks:
    """A measurement, the topology fitted to it, and how far off that is, size by size.

    `notes` say what makes the figures doubtful.
    """

    measurement: LinkMeasurement
    topology: Topology
    comparisons: Sequence[Comparison]
    notes: Sequence[Note]

    @classmethod
    def of(cls, measurement: LinkMeasurement, name: str, per_server: int) -> FittedLinks:
        """The topology `name` with so many ranks in a server."""
        topology = fit_topology(measurement, name)
        comparisons = compare(measurement, topology)
        return cls(measurement, topology, comparisons, list(notes_of(measurement, per_server)))

    @property
    def worst(self) -> Comparison:
        """Where the fit is furthest off."""
        return worst(self.comparisons)

    @property
    def text(self) -> str:
        """The file of the cluster, which `Topology.parse` reads, with the errors beside levels."""
        return cluster_text(self.topology, self.comparisons, [note.text for note in self.notes])

    @property
    def document(self) -> dict[str, Any]:
        """All figures, as JSON has them (`partopt.links/1`)."""
        return {
            "schema": "partopt.links/1",
            "topology": self.topology,
            "is_poor": self.worst.is_poor,
            "comparisons": self.comparisons,
            "measurement": self.measurement,
            "notes": self.notes,
        }


def notes_of(measurement: LinkMeasurement, per_server: int) -> Iterator[Note]:
    """What makes the figures doubtful: busy hosts, shared cores, servers that are not hosts."""
    cores, hosts = measurement.cores, measurement.hosts
    if measurement.load > _BUSY:
        load = measurement.load * cores
        yield Note(
            code="busy-host",
            text=f"the machine is busy: a load of {load:.1f} on {cores} cores before the "
            "measurement",
        )
    on_one = max(hosts.count(host) for host in hosts)
    if measurement.backend == "gloo" and on_one > cores:
        yield Note(code="shared-cores", text=f"{on_one} ranks share {cores} cores of a host")
    servers = [hosts[first : first + per_server] for first in range(0, len(hosts), per_server)]
    if any(len(set(server)) > 1 for server in servers):
        yield Note(code="split-server", text="ranks of one server lie on several hosts")
    if len(servers) > len({host for server in servers for host in server}):
        yield Note(
            code="one-host", text="servers lie on one host: the level between them is no network"
        )
