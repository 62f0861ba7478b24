"""What a machine is and can do (`partopt.doctor/1`): one file that tells it to somebody else."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from partopt import documents
from partopt.documents.plan import Plan
from partopt.documents.profile import Bytes, Count, Device, Environment, Index, Profile, Seconds
from partopt.documents.training_run import Run

SCHEMA = "partopt.doctor/1"
_SCHEMA = msgspec.Meta(extra_json_schema={"default": SCHEMA})


class Machine(documents.StrictStruct, frozen=True, kw_only=True, omit_defaults=True):
    """The host: its system, and its processors' name, number and memory."""

    system: str
    processor: Device
    cores: Count


class Accelerator(documents.StrictStruct, frozen=True, kw_only=True, omit_defaults=True):
    """A GPU that torch sees; `reaches` are those whose memory it reads without the host.

    `capability` is that of CUDA, such as 9.0.
    """

    device: Device
    capability: str = ""
    processors: Index = 0
    reaches: list[Index] = []


class Check(documents.StrictStruct, frozen=True, kw_only=True, omit_defaults=True):
    """Something that was tried, or looked for: `text` says what came of it.

    `output` are the last lines that a command wrote which failed.
    """

    name: str
    status: Literal["ok", "missing", "failed"]
    text: str = ""
    seconds: Seconds | None = None
    output: list[str] = []


class Exchange(documents.StrictStruct, frozen=True, kw_only=True, omit_defaults=True):
    """One kind of exchange between two ranks: seconds of the first, and of one after it."""

    kind: str
    bytes: Bytes
    first_s: Seconds | None = None
    seconds: Seconds | None = None
    error: str = ""


class Diagnosis(documents.Document, frozen=True, kw_only=True, omit_defaults=True):
    """A machine, what was tried on it, and the documents that came of that.

    `backend` is that of the exchanges and the run; `links` the figures of measured links
    (`partopt.links/1`). What failed, or could not be tried, is absent.
    """

    schema: Annotated[str, _SCHEMA] = msgspec.field(default_factory=lambda: SCHEMA)
    environment: Environment
    machine: Machine
    devices: list[Accelerator] = []
    backend: str
    checks: list[Check]
    exchanges: list[Exchange] = []
    links: dict[str, Any] | None = None
    profile: Profile | None = None
    plan: Plan | None = None
    run: Run | None = None

    @property
    def failed(self) -> list[str]:
        """The names of the checks that failed."""
        return [check.name for check in self.checks if check.status == "failed"]
