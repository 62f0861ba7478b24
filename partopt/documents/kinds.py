"""Every kind of document, and which kind a file is."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from partopt.documents.device import DeviceFile, read_device
from partopt.documents.doctor import Diagnosis
from partopt.documents.plan import Plan
from partopt.documents.profile import Profile
from partopt.documents.simulation import SimulationDocument, TrialDocument
from partopt.documents.tables import Comparison, Flows, Scaling, Verification
from partopt.documents.topology import Topology, TopologyFile
from partopt.documents.training_run import Run
from partopt.errors import PartoptError

DOCUMENTS: dict[str, type[msgspec.Struct]] = {
    "profile": Profile,
    "plan": Plan,
    "topology": TopologyFile,
    "comparison": Comparison,
    "scaling": Scaling,
    "simulation": SimulationDocument,
    "verification": Verification,
    "device": DeviceFile,
    "run": Run,
    "flows": Flows,
    "trial": TrialDocument,
    "doctor": Diagnosis,
}
_WRITTEN = {"topology": Topology.parse, "device": read_device}  # by people, in YAML
_TOPOLOGY = re.compile(rb"""^["']?(name|device|levels)["']?\s*:""", re.MULTILINE)
_PEAKS = re.compile(rb'^ *"?peaks"?:', re.MULTILINE)
_SCHEMA = re.compile(rb'"schema"\s*:\s*"partopt\.([a-z]+)/')


def kind_of(content: bytes, where: str) -> str:
    """The kind of document in `content`, by its schema, even if the content is incomplete.

    A topology and a device have no schema. Raises PartoptError for what is of no kind.
    """
    for found in _SCHEMA.finditer(content):
        if found[1].decode() in DOCUMENTS:
            return found[1].decode()
    if _PEAKS.search(content):
        return "device"
    if not content.strip():
        raise PartoptError(
            f"{where}: the file is empty", "a partopt document is expected here", code="empty-file"
        )
    json = content.lstrip().startswith(b"{")
    if not (b'"levels"' in content if json else _TOPOLOGY.search(content)):
        raise PartoptError(
            f"{where}: not a partopt document: no schema that partopt knows, and no levels",
            'a document begins with {"schema": "partopt.plan/1"; '
            f"the kinds are {', '.join(DOCUMENTS)}",
            code="unknown-document",
        )
    return "topology"


def read_document(content: bytes, where: str) -> tuple[str, Any]:
    """The kind of the document in `content`, and the document. PartoptError as of its kind."""
    kind = kind_of(content, where)
    read: Any = _WRITTEN.get(kind) or DOCUMENTS[kind].parse  # type: ignore[attr-defined]
    return kind, read(content, where)
