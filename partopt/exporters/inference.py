"""What vLLM and SGLang read alike: how many blocks each stage has."""

from __future__ import annotations

from collections.abc import Sequence

from partopt.documents.plan import Plan
from partopt.exporters.blocks import Part, count_blocks
from partopt.exporters.target import BLOCKS, Target, Text

_NOTE = "the plan balances forward and backward passes; a server runs forwards alone"


def blocks_of_stages(plan: Plan, parts: Sequence[Part]) -> list[int]:
    """How many blocks each stage has."""
    return [count_blocks(parts[stage.start : stage.stop]) for stage in plan.stages]


def partition_target(
    name: str, title: str, variable: str, flags: tuple[str, str], tried: str
) -> Target:
    """The target whose environment variable `variable` has the blocks of each stage.

    `flags` of its server give the sizes of the pipeline and of tensor parallel groups.
    """

    def write(plan: Plan, parts: Sequence[Part], stem: str) -> Text:
        counts = ",".join(map(str, blocks_of_stages(plan, parts)))
        sizes = (len(plan.stages), plan.topology.group_ranks)
        given = " ".join(f"{flag} {size}" for flag, size in zip(flags, sizes, strict=True))
        start = f"start the server with {given}"
        return Text(f"export {variable}={counts}\n", notes=[start, _NOTE])

    return Target(
        name=name,
        summary=f"{title}: {variable}, the blocks of each stage",
        tried=tried,
        write=write,
        suffix=".sh",
        schedules=None,
        cuts=BLOCKS,
        replicas="one",
        recompute="each",
        shards=("none", "optimizer", "gradients", "parameters"),
        ranks=(),
        groups=True,
        faults=_one_stage_each,
    )


def _one_stage_each(plan: Plan) -> list[str]:
    held = {tuple(stage.ranks) for stage in plan.stages}
    return ["devices hold several stages"] if len(held) < len(plan.stages) else []
