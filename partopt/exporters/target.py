"""What an export target is: a trainer, what it can say, and how a plan is written for it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from partopt.documents.files import check_writable, write_bytes
from partopt.documents.plan import Plan
from partopt.exporters.blocks import Part

# Where a trainer may begin a stage.
ANYWHERE: Final = "anywhere"  # with any layer
PARTS: Final = "parts"  # with a block, the final norm or the head; embedding and blocks stay whole
HEADS: Final = "heads"  # with a block or the head, of which the final norm is a part
BLOCKS: Final = "blocks"  # with a block, so that no stage is without one

Cuts = Literal["anywhere", "parts", "heads", "blocks"]
Replicas = Literal["one", "equal", "any"]
Recompute = Literal["never", "all", "each"]
Ranks = Literal["stages", "pipelines"]  # next to each other are those of a stage, of a pipeline


def plain(name: str) -> str:
    """A name from a file as a comment or a docstring may have it."""
    return re.sub(r"[^\w .,:/+-]", "_", name, flags=re.ASCII)


def arguments_text(model: str, callee: str, arguments: Mapping[str, object]) -> str:
    """A Python file whose `ARGUMENTS` are those of the pipeline of `model` for `callee`."""
    body = "".join(f"    {name}={value!r},\n" for name, value in arguments.items())
    head = f'"""The pipeline of {plain(model)}: arguments of {callee}."""\n'
    return f"{head}\nARGUMENTS = dict(\n{body})\n"


@dataclass(frozen=True)
class Text:
    """What is written for a trainer: `main`, and files that lie beside it, by what they end in."""

    main: str
    beside: Mapping[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()  # what a person has to know beside the text

    def save(self, path: str, force: bool = False) -> list[str]:
        """Write `main` to `path` and the others beside it; the names of the files.

        Raises PartoptError, and writes nothing, where a file exists and is not to be replaced, or
        cannot be written.
        """
        files = {path: self.main}
        for suffix, content in self.beside.items():
            files[str(Path(path).with_suffix(suffix))] = content
        for name in files:
            check_writable(name, force)
        for name, content in files.items():
            write_bytes(name, content.encode(), force)
        return list(files)


@dataclass(frozen=True, kw_only=True)
class Target:
    """A trainer: its name, what is written for it, and what it can say.

    `write(plan, parts, stem)` makes the text; `parts` say what each layer is, where `cuts` asks for
    it; `stem` names the file without its ending, for files that name each other. `others` write
    other forms, by the ending of the file. `schedules` has the trainer's name for each of the
    schedules that it runs, None where it is told the order; it is None for a trainer to which
    schedules do not matter. `recomputes` is what keeps its input
    where activations are recomputed; plans count the stage's. `least_stages` make a pipeline there;
    with `groups`, devices may be groups of ranks, which it takes to be tensor parallel. `faults`
    finds what else it cannot say.
    """

    name: str
    summary: str
    tried: str  # the version that the text was checked with, or that it was not
    write: Callable[[Plan, Sequence[Part], str], Text]
    suffix: str  # of a file
    others: Mapping[str, Callable[[Plan, Sequence[Part], str], Text]] = field(default_factory=dict)
    schedules: Mapping[str, str | None] | None
    cuts: Cuts
    replicas: Replicas
    recompute: Recompute
    recomputes: Literal["stages", "blocks"] = "stages"
    shards: Sequence[str] = ("none",)
    ranks: Sequence[Ranks] = ("stages", "pipelines")
    ties: bool = True  # stages may part layers that share parameters
    least_stages: int = 1
    groups: bool = False
    faults: Callable[[Plan], Sequence[str]] = lambda plan: ()
