"""Documents to draw at 4 and at 32 ranks: of shipped profiles, and with names that are hostile."""

from __future__ import annotations

from functools import cache
from typing import Any

from msgspec import UNSET
from msgspec.structs import replace

import partopt as po
from partopt.documents.plan import Plan
from partopt.documents.profile import Profile
from partopt.documents.tables import (
    Comparison,
    ComparisonRow,
    Scaling,
    ScalingRow,
)
from partopt.documents.tables import Run as TokenRun
from partopt.documents.training_run import (
    MachineLoad,
    RankSeconds,
    RanPlan,
    Run,
    RunRank,
    StageSeconds,
)
from partopt.documents.transformer import Challenger, Worth
from tests.helpers import chain_profile, two_level, uniform_profile
from tests.transformer.helpers import LLAMA as TINY

HOSTILE = ["$x$", "a_b^{2}", "<&>\"'", "\x1b[31mred", "\\frac{1}{2}", "日本語 é ñ", "x" * 5000, " "]
LLAMA = "llama-7b.h100-estimated.bfloat16"


def hostile(count: int) -> list[str]:
    return [HOSTILE[place % len(HOSTILE)] + str(place) for place in range(count)]


@cache
def plan_of(ranks: int, schedule: str = "1f1b", chunks: int | None = None) -> tuple[Plan, Profile]:
    """A shipped profile on servers of eight devices, with `chunks` stages each."""
    profile = Profile.load(LLAMA)
    cluster = po.Topology.load("dgx-h100", servers=max(1, ranks // 8)).resize(ranks)
    options = {"microbatches": 2 * ranks, "stages": ranks * (chunks or 1), "chunks": chunks}
    job = po.Job(profile, cluster, schedule=schedule, microbatch_size=1, planner="gpipe", **options)
    return po.solve(job).plan, profile


@cache
def transformer() -> Plan:
    """Four blocks on four devices, as pipelines of two, with the layouts beside it."""
    asked = po.Job(
        model=TINY,
        topology=po.Topology.load("dgx-h100").resize(4),
        trainer="megatron",
        global_batch=16,
        sequence=2048,
        layout=po.Layout(pp=2),
    )
    return po.solve(asked).plan


def levered(flags: list[str], tried: float = 0.1) -> Plan:
    """A transformer whose switches have these flags, one of them worth more than the one before.

    The first makes a layout fit, every second changes numbers, every third is unverified. What is
    worth a try saves a share of `tried`; if that is negative it fits.
    """
    plan = transformer()
    assert plan.transformer
    layout, seconds = plan.transformer.layout, plan.transformer.closed_s

    def worth(flags: list[str], place: int) -> Worth:
        saved = 0.04 * place
        return Worth(
            facts={"loss": "fused"},
            flags=flags,
            iteration_s=(1 - saved) * seconds,
            saved=saved or UNSET,
            layout=layout,
            changes_numbers=place % 2 == 1,
            verified=place % 3 != 0,
        )

    other = {"iteration_s": (1 - tried) * seconds, "saved": tried, "layout": layout}
    needs = {"memory_bytes": 10**11, "fits_chance": 0.24 if tried > 0 else 1.0}
    about = replace(
        plan.transformer,
        levers=[worth([flag], place) for place, flag in enumerate(flags)],
        together=worth(flags, len(flags)),
        challenger=Challenger(**other, **needs),
    )
    return replace(plan, transformer=about)


def sizes(devices: list[int], price: float | None = 2.0) -> Scaling:
    """Sizes of a transformer with a run of 1 T tokens, at a price an hour; the last is chosen."""
    table, rows = scaling(devices), []
    for row in table.rows:
        hours = 1e12 / row.samples_per_s / 3600
        cost = UNSET if price is None else price * row.devices * hours
        taken = TokenRun(days=hours / 24, device_hours=row.devices * hours, cost=cost)
        layout = po.Layout(tp=1, pp=1, dp=row.devices, microbatch=1, recompute="never")
        rows.append(replace(row, layout=layout, run=taken))
    return replace(table, rows=rows, tokens=1e12, chosen=devices[-1])


def replicated(servers: int) -> Plan:
    """Two stages, half of the servers each, over links that are busy."""
    half = 4 * servers
    job = po.Job(
        uniform_profile(8), two_level(8, servers, 1e9, 1e8), cuts=[4], replicas=[half, half]
    )
    return po.solve(job).plan


def many_layers(blocks: int) -> Profile:
    """Blocks of four layers that differ, between an embedding and a head."""
    times = [1e-4, *[1e-3, 2e-3, 5e-4, 3e-3] * blocks, 9e-3]
    sizes = [10**7, *[10**6, 3 * 10**6, 0, 4 * 10**6] * blocks, 10**7]
    outputs = [10**6, *[10**6, 4 * 10**6, 4 * 10**6, 10**6] * blocks, 0]
    return chain_profile(times, [2 * each for each in times], outputs, sizes)


def hostile_profile(layers: int) -> Profile:
    times = [1e-3 * (1 + place % 5) for place in range(layers)]
    return chain_profile(times, None, [10**6] * layers, names=hostile(layers), name="\x1b$x$ <&> _")


def comparison(rows: int, **fields: Any) -> Comparison:
    """Rows of which some share a point, some lie close together, and some do not fit."""
    usual: dict[str, Any] = {"model": "chain", "layers": 8, "microbatch_size": 2}
    usual |= {"schedule": "1f1b", "topology": replicated(2).topology}
    made = [
        ComparisonRow(
            planner=name,
            shape="1x8",
            stages=8,
            period_s=1e-3 * (place + 1),
            samples_per_s=1000.0 / (1 + place // 3),
            speedup_over_one_device=2.0,
            speedup_over_data_parallel=None,
            peak_memory_bytes=10**9 * (1 + place % 4),
            fits=place % 5 != 0,
            stage_variance_s2=0.0,
        )
        for place, name in enumerate(hostile(rows))
    ]
    return Comparison(**usual | fields, rows=made)


def scaling(devices: list[int]) -> Scaling:
    return Scaling(
        rows=[
            ScalingRow(
                devices=count,
                planner="optimal",
                shape="-".join(["1"] * min(count, 40)),
                microbatch_size=1,
                microbatches=8,
                period_s=1e-3,
                samples_per_s=100.0 * count**0.8,
                speedup_over_one_device=count**0.8,
                efficiency=count**-0.2,
                bound_by="compute of stage 0",
                fits=count > 4,
            )
            for count in devices
        ]
    )


def run(ranks: int, model: str = "chain") -> Run:
    """What ranks took; the memory of some was counted."""

    def seconds(scale: float, memory: int | None) -> RankSeconds:
        took = {"forward_s": 1e-3, "backward_s": 2e-3, "transfer_s": 5e-4, "allreduce_s": 0.0}
        took = {name: scale * each for name, each in took.items()}
        return RankSeconds(**took, idle_s=3e-3, peak_memory_bytes=memory)

    sizes = {"parameter_bytes": 10**6, "microbatch_size": 1, "microbatches": 8}
    names = {"dtype": "float32", "sha256": "", "schedule": "1f1b", "topology": "flat"}
    names["measured_per"] = "iteration"
    measured = {"steps": 2, "steps_s": [0.1, 0.1], "losses": [1.0, 0.9], "samples_per_s": 80.0}
    measured |= {"predicted_s": 0.09, "measured_s": 0.1, "own_times_s": 0.095}
    took = {"modules": ["a"], "recompute": False, "forward_s": 1e-3, "backward_s": 2e-3}
    return Run(
        plan=RanPlan(model=model, shape=f"1x{ranks}", **sizes, **names),
        engine="partopt",
        backend="gloo",
        device="cpu",
        ranks_per_core=1.0,
        machine=MachineLoad(before=0.0, after=0.0, cores=2),
        stages=[StageSeconds(start=s, **took) for s in range(ranks)],
        ranks=[
            RunRank(
                rank=rank,
                stages=[rank],
                predicted=seconds(1.0, 10**8),
                measured=seconds(1.0 + 0.01 * rank, 11 * 10**7 if rank % 2 else None),
            )
            for rank in range(ranks)
        ],
        **measured,
    )


def hostile_plan() -> tuple[Plan, Profile]:
    """A plan whose model, layers, cluster, levels and binding load have hostile names."""
    profile = uniform_profile(8, names=["$x$", "<&>", "a_b", "x" * 999, "é", "語", "^", "\\frac"])
    plan = po.solve(po.Job(profile, two_level(4, 2), planner="gpipe", schedule="pipedream")).plan
    levels = [
        replace(level, name=name, link=name)
        for level, name in zip(plan.topology.levels, ["$s$", "c" * 300], strict=True)
    ]
    flows = [
        replace(flow, level={"server": "$s$", "cluster": "c" * 300}[flow.level])
        for flow in plan.communication
    ]
    topology = replace(plan.topology, levels=levels, name="<t>")
    predicted = replace(plan.predicted, bound_by="\x1b$x$" * 100)
    named = replace(plan, topology=topology, communication=flows, predicted=predicted)
    return named, profile
