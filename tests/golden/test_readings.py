"""What is read of scripts, programs and documents, whole: model, layout, facts, notes, refusals.

A reading that changes on purpose is recorded by `pytest tests/golden/test_readings.py --update`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from partopt.documents.topology import Topology
from partopt.errors import PartoptError
from partopt.search.jobs import read_job
from partopt.trainers.layout import read_layout
from tests.golden.records import beside, record_test
from tests.trainers import test_configured as configured
from tests.trainers import test_meanings as meanings
from tests.trainers import test_reading as layouts
from tests.trainers.models import transformer

Reading = tuple[str, str, Mapping[str, Any]]  # trainer, text, options


def _configured() -> Iterator[tuple[str, Reading]]:
    """Scripts of Megatron and DeepSpeed with other flags, forms of Bridge and torchtitan."""
    own, vocabulary = configured, {"arguments": {"vocab_size": "128256"}}
    yield "megatron", ("megatron", own.MEGATRON, {})
    for change, *_ in own.CHANGES:
        old, arrow, new = change.partition(" ->")
        old, new = (old, new.strip()) if arrow else ("--bf16", f"--bf16 {change}")
        yield change, ("megatron", own.MEGATRON.replace(old, new), vocabulary)
    for flags, *_ in own.FACTS:
        said = f"--bf16 --vocab-size 1000 --num-experts 8 {flags}"
        yield f"facts {flags}", ("megatron", own.MEGATRON.replace("--bf16", said), {})
    for flags, *_ in [*own.NOT_PLANNED, *own.IN_FSDP]:
        said = own.MEGATRON.replace("PP=2", "PP=1" if [flags] in own.IN_FSDP else "PP=2")
        yield f"also {flags}", ("megatron", said.replace("--bf16", f"--bf16 {flags}"), {})
    for layout in ("Et*20|t*12L", "E(t|)*31tL", "Et*16|t*16mL"):
        said = f"--bf16 --pipeline-model-parallel-layout '{layout}'"
        yield layout, ("megatron", own.MEGATRON.replace("--bf16", said), {})
    yield "bridge", ("megatron-bridge", own.BRIDGE, {})
    yield "nemo", ("megatron-bridge", own.NEMO, {})
    yield "recipe", ("megatron-bridge", own.RECIPE, {"function": "recipe"})
    yield "deepspeed", ("deepspeed", own.DEEPSPEED, {})
    yield "deepspeed 3", ("deepspeed", own.DEEPSPEED.replace("ZERO=1", "ZERO=3"), {})
    for name in ("TOML", "REGISTRY", "COMMAND", "TOKENS"):
        yield f"torchtitan {name}", ("torchtitan", getattr(own, name), {})
    for old, new, said, _ in own.TOML_CHANGES:
        text = own.TOML.replace(old, new.replace(r"\n", "\n"))
        yield f"torchtitan {new} {said}", ("torchtitan", text, {})


def _meant() -> Iterator[tuple[str, Reading]]:
    """Flags of Megatron, recipes of NeMo, and configurations of other trainers."""
    own = meanings
    yield "script", ("megatron", own.script("--vocab-size 32000"), {})
    for flags, _ in own.VOCABULARIES:
        yield flags, ("megatron", own.script(flags), {})
    for flags, _, without in [*own.MODELS, *own.TRAININGS]:
        said = own.script(f"{flags} --vocab-size 32000", without.split())
        yield f"{flags} without {without}", ("megatron", said, {})
    for flags, _ in [*own.NOTES, (own.SILENT, "")]:
        yield f"noted {flags}", ("megatron", own.script(f"{flags} --vocab-size 32000"), {})
    for flags, without, _ in own.REFUSED:
        yield f"refused {flags}", ("megatron", own.script(flags, without.split()), {})
    for stage in (0, 1, 2):
        config = own.DEEPSPEED.replace('"stage": 0', f'"stage": {stage}')
        text = config + own.script("--deepspeed --vocab-size 32000", ["bf16"])
        yield f"ZeRO {stage}", ("deepspeed", text, {})
    yield "recipe of NeMo", ("megatron-bridge", own.RECIPE, {"function": "recipe"})
    for text, name in own.OTHERS:
        yield f"of {name}", ("torchtitan", text, {})


def _laid_out() -> Iterator[tuple[str, Reading]]:
    """Layouts of a pipeline's stages, of every trainer that reads some."""
    for trainer, text, *_ in [*layouts.SAME, *layouts.REFUSED]:
        yield f"{trainer}: {text}", (trainer, text, {})


TABLES = {"configured": _configured, "meanings": _meant, "layouts": _laid_out}
READINGS = {
    f"{table}: {' '.join(name.split())[:150]}": (table, reading)
    for table, readings in TABLES.items()
    for name, reading in readings()
}


@functools.cache
def find(case: str) -> dict[str, object]:
    """All that a reading gives, a text for each part; or what is refused."""
    table, (trainer, text, options) = READINGS[case]
    try:
        if table == "layouts":
            layout = read_layout(trainer, text, transformer())
            said = {"cuts": [*layout.cuts], "pipeline": layout.pipeline_size}
            return {"layout": str(said | {"options": _words(layout.stated.layout)})}
        asked, notes = read_job(trainer, text, Topology.load("dgx-h100", 4), **options)
    except PartoptError as refused:
        return {"refused": [f"{part.message} ({part.code}) {part.hint}" for part in refused.parts]}
    rest = f"{asked.sequence} {asked.global_batch} {asked.dtype}"
    parts = {"model": _words(asked.model), "layout": _words(asked.layout), "training": rest}
    return {**parts, "facts": str(asked.facts), "notes": list(notes)}


def _words(value: msgspec.Struct) -> str:
    return re.sub(r"\b\w+=(None|0|False|''), ", "", repr(value))


def find_beside(case: str) -> dict[str, object]:
    """What a reading gives that the first of its table does not."""
    table = READINGS[case][0]
    first = next(name for name, (other, _) in READINGS.items() if other == table)
    return find(case) if case == first else beside(find(case), find(first))


test_readings_are_as_recorded = record_test(
    Path(__file__).with_name("readings.jsonl"), READINGS, find_beside
)
