"""Inference: vLLM and SGLang, which read how many blocks stages have, and Accelerate's PiPPy.

A plan balances forward and backward passes; these run forwards alone. Embedding and head stay with
the first and the last stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

from partopt.configurations.settings import Settings
from partopt.documents.engine import Engine, Layout
from partopt.documents.plan import Plan
from partopt.documents.stage import Shard
from partopt.errors import PartoptError, unknown
from partopt.trainers.parts import Part, count_blocks
from partopt.trainers.reading import cuts_of_blocks, find_value, malformed, read_numbers
from partopt.trainers.trainer import BLOCKS, Asked, Says, Stated, Text, Trainer, arguments_text

_BALANCED = "inference runs forwards alone; the plan balances forwards and backwards"
_SPLITS = "transformer.h.4,transformer.h.8"
_COUNTS = "4,3,3,2"
# neither recomputation nor shards matter to what runs forwards alone
_ENGINE = Engine(recompute=("none", "selective", "blocks", "stage"), shard=get_args(Shard))
_SOURCES = dict.fromkeys(Engine.__struct_fields__, "inference: forwards alone, no gradients")


def _shared_ranks(plan: Plan) -> list[str]:
    held = {tuple(stage.ranks) for stage in plan.stages}
    return ["devices hold several stages"] if len(held) < len(plan.stages) else []


def _server(name: str, title: str, tried: str, flags: tuple[str, str], source: str) -> Trainer:
    """The server whose environment variable has the blocks of every stage.

    `flags` give the sizes of the pipeline and of tensor parallel groups.
    """
    variable = f"{name.upper()}_PP_LAYER_PARTITION"

    def write(plan: Plan, parts: Sequence[Part], stem: str) -> Text:
        blocks = [count_blocks(parts[stage.start : stage.stop]) for stage in plan.stages]
        sizes = (len(plan.stages), plan.topology.group_ranks)
        given = " ".join(f"{flag} {size}" for flag, size in zip(flags, sizes, strict=True))
        notes = [f"start the server with {given}", _BALANCED]
        return Text(f"export {variable}={','.join(map(str, blocks))}\n", notes=notes)

    def read(settings: Settings, asked: Asked) -> Stated:
        counts = read_numbers(settings, variable, _COUNTS)
        tp = settings.number(flags[1].removeprefix("--").replace("-", "_"))
        return Stated(cuts=cuts_of_blocks(counts, asked.parts), layout=Layout(tp=tp))

    return Trainer(
        name=name,
        summary=f"{title}: {variable}, the blocks of each stage",
        tried=tried,
        schedules=None,
        says=Says(
            cuts=BLOCKS,
            replicas="one",
            recomputed="each",
            orders=(),
            degrees={"tp": "divides the attention heads"},
        ),
        engine=_ENGINE,
        trains=False,
        sources=_SOURCES | {"cuts": source, "degrees": f"its flag {flags[1]}"},
        write=write,
        suffix=".sh",
        faults=_shared_ranks,
        read=read,
        reads=f"{title}: {variable}, the blocks of each stage",
        example=_COUNTS,
    )


def _write_splits(plan: Plan, parts: Sequence[Part], stem: str) -> Text:
    """A file with the arguments of `prepare_pippy`."""
    arguments = {
        "split_points": [stage.modules[0] for stage in plan.stages[1:]],
        "num_chunks": len(plan.stages),
    }
    return Text(
        arguments_text(plan.profile.name, "accelerate.prepare_pippy", arguments),
        notes=[_BALANCED],
    )


def _split_faults(plan: Plan) -> list[str]:
    names = [name for stage in plan.stages for name in stage.modules]
    firsts = dict.fromkeys(stage.modules[0] for stage in plan.stages[1:])
    several = [name for name in firsts if names.count(name) > 1]
    found = [f"{name} runs several times, and a split names a module" for name in several]
    return found + _shared_ranks(plan)


def _read_splits(settings: Settings, asked: Asked) -> Stated:
    """The cuts before the first layers of these names."""
    layers, value = asked.layers, find_value(settings, "split_points")
    names = settings.text.replace(",", " ").split() if value is None else value
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise malformed(f"split_points is {names!r}", _SPLITS)
    cuts: list[int] = []
    for name in names:
        inside = [
            i for i, layer in enumerate(layers) if layer == name or layer.startswith(f"{name}.")
        ]
        if not inside:
            raise unknown(
                f"{name}: the profile has no such layer", name, layers, code="no-such-layer"
            )
        cuts.append(inside[0])
    if cuts != sorted(set(cuts)) or 0 in cuts:
        raise PartoptError(
            f"{', '.join(names)}: stages do not begin in the order of the layers",
            "name each layer once, in the order of the profile, and not the first",
            code="parts-out-of-order",
        )
    return Stated(cuts=cuts)


VLLM = _server(
    "vllm",
    "vLLM",
    "vLLM 0.33.0",
    ("--pipeline-parallel-size", "--tensor-parallel-size"),
    "distributed/utils.py, get_pp_indices",
)
SGLANG = _server(
    "sglang",
    "SGLang",
    "SGLang 0.5.23",
    ("--pp-size", "--tp-size"),
    "distributed/utils.py, get_pp_indices",
)
ACCELERATE = Trainer(
    name="accelerate",
    summary="Accelerate: arguments of prepare_pippy, split points (inference)",
    tried="Accelerate 1.15.0",
    schedules=None,
    says=Says(replicas="one", recomputed="each", orders=("stages",)),
    engine=_ENGINE,
    trains=False,
    sources=_SOURCES | {"cuts": "inference.py, build_pipeline: SplitPoint.BEGINNING"},
    write=_write_splits,
    suffix=".py",
    faults=_split_faults,
    read=_read_splits,
    reads="Accelerate: split_points, the modules with which stages begin",
    example=_SPLITS,
)
