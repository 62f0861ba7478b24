"""A transformer's layout as people read it: the plan, where its time goes, its arithmetic."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from partopt.documents.engine import Layout
from partopt.documents.plan import Plan
from partopt.documents.transformer import Modelled
from partopt.report.phrases import Lines, cluster_lines, price_lines, speed_lines, speed_text
from partopt.report.plan import memory_lines
from partopt.report.text import Column, label_lines, table_of
from partopt.transformer.as_profile import training_of
from partopt.transformer.block import Training
from partopt.transformer.iteration import AGREES, TRUST, Degrees, Estimate, estimate
from partopt.units import format_bytes, format_seconds

_LEAST = 0.005  # of an iteration: smaller parts are added up
_LACKING = 3  # layouts that are shown though they do not fit, those that need least
_AGAIN = {"never": "-", "always": "all", "selective": "some"}
_NAMES = {
    "tensor": "tensor exchange",
    "context": "context exchange",
    "passes": "passes over memory",
    "exchange": "experts' exchange",
    "replicas": "replicas' exchange",
    "step": "optimizer",
}


def render(plan: Plan, ascii_only: bool = False, arithmetic: bool = False) -> str:
    """The page of a plan of a transformer's layout; with `arithmetic` also that of a block."""
    about = plan.transformer
    assert about
    work = training_of(plan, about)
    batch = plan.microbatch_size * (plan.microbatches or 1)
    parts = estimate(work, about.layout, batch).parts
    lines = [*_head(plan, about), *_times(plan, about, batch)]
    lines += [("where", _where(parts))]
    held = enumerate(memory_lines(plan, ascii_only))
    lines += [("" if place else "memory", line) for place, line in held]
    lines += [("trust", text) for text in _trust(plan, about)]
    pages = [label_lines(lines)]
    if arithmetic:
        pages.append(_block(work, Degrees.of(work, about.layout, batch)))
    return "\n\n".join(pages)


def render_beside(
    best: Estimate,
    fitting: Sequence[Estimate],
    lacking: Sequence[Estimate],
    tried: int,
    simulated: Mapping[Layout, Plan],
) -> str:
    """The layouts beside the `best`, with what costs them more, and those that do not fit.

    Times are those of `simulated` plans where there are any, else of the closed form.
    """
    experts = any((own.layout.ep or 1) > 1 for own in fitting)
    rows = [*fitting, *lacking[:_LACKING]]

    def seconds(own: Estimate) -> str:
        plan = simulated.get(own.layout)
        known = plan and plan.predicted.iteration_s
        return format_seconds(known) if known else f"~{format_seconds(own.seconds)}"

    def why(own: Estimate) -> str:
        change = own.seconds / best.seconds - 1
        if own in lacking:
            name, size = max(own.memory.items(), key=lambda item: item[1])
            return f"{change:+.1%}, no room: {name} {format_bytes(round(size))}"
        return "" if own is best else f"{change:+.1%}: {_more(own, best)}"

    columns = [
        Column("TP", lambda own: str(own.layout.tp)),
        Column("CP", lambda own: str(own.layout.cp)),
        *([Column("EP", lambda own: str(own.layout.ep))] if experts else []),
        Column("PP", lambda own: _pipeline(own.layout)),
        Column("DP", lambda own: str(own.layout.dp)),
        Column("MB", lambda own: str(own.layout.microbatch)),
        Column(
            "AGAIN", lambda own: _AGAIN.get(str(own.layout.recompute), str(own.layout.recompute))
        ),
        Column("TIME", seconds),
        Column("MEMORY", lambda own: format_bytes(round(own.memory_bytes))),
        Column("AGAINST THE FIRST", why, "text"),
    ]
    note = f"{tried:,} layouts estimated, {len(simulated)} simulated; ~ is the closed form"
    return f"{table_of(rows, columns, gap=1)}\n{note}"


def render_compared(
    yours: tuple[Plan, Estimate],
    best: tuple[Plan, Estimate],
    loses: float,
    changes: Sequence[tuple[str, str, str]],
) -> str:
    """A layout beside the best one: times, what it `loses`, and `changes` of the configuration.

    Each is a plan and its estimate in closed form; a change is a name, the old and the new value.
    """
    lines = [("yours", _in_a_line(yours[0])), ("best", _in_a_line(best[0]))]
    if loses:
        lines.append(("loses", f"{loses:.1%}; in yours {_more(yours[1], best[1])}"))
    elif yours[0].fits:
        lines.append(("loses", "nothing: no layout that was found is faster"))
    else:
        lines.append(("loses", "no time, but yours does not fit"))
    if yours[0] != best[0]:
        for place, (name, old, new) in enumerate(changes):
            lines.append(("" if place else "change", f"{name}  {old} -> {new}"))
    return label_lines(lines)


def _in_a_line(plan: Plan) -> str:
    """Seconds, MFU and layout of a plan."""
    mfu = plan.predicted.figures.mfu if plan.predicted.figures else None
    simulated_s = plan.predicted.iteration_s or plan.predicted.period_s
    words = [format_seconds(simulated_s), f"MFU {mfu:.1%}" if mfu else "", layout_text(plan)]
    return ", ".join([own for own in words if own] + ([] if plan.fits else ["DOES NOT FIT"]))


def _pipeline(layout: Layout) -> str:
    return f"{layout.pp}x{layout.chunks}" if (layout.chunks or 1) > 1 else str(layout.pp)


def _more(own: Estimate, best: Estimate) -> str:
    """The part of an iteration that grew most."""
    names = dict.fromkeys([*own.parts, *best.parts])
    grown = {name: own.parts.get(name, 0.0) - best.parts.get(name, 0.0) for name in names}
    name, more = max(grown.items(), key=lambda item: item[1])
    return f"{_NAMES.get(name, name)} {more / best.seconds:+.1%}"


def layout_text(plan: Plan) -> str:
    """The layout of a plan in words: `tp 8, pp 4 x 5 chunks, dp 1, microbatch 1`."""
    own = plan.layout
    pipeline = f"pp {own.pp} x {own.chunks} chunks" if (own.chunks or 1) > 1 else f"pp {own.pp}"
    rare = [f"cp {own.cp}" * ((own.cp or 1) > 1), f"ep {own.ep}" * ((own.ep or 1) > 1)]
    again = own.recompute
    said = f"recompute {again} blocks" if isinstance(again, int) else f"recompute {again}"
    words = [f"tp {own.tp}", *rare, pipeline, f"dp {own.dp}", f"microbatch {own.microbatch}", said]
    return ", ".join([word for word in words if word] + [f"shard {own.shard}"])


def _head(plan: Plan, about: Modelled) -> Lines:
    model = about.model
    heads = f"{model.heads} heads"
    if model.kv_heads != model.heads:
        heads += f" ({model.kv_heads} of keys)"
    sizes = [f"{model.blocks} blocks", f"hidden {model.hidden:,}", heads]
    if model.experts:
        sizes.append(f"{model.experts_per_token} of {model.experts} experts")
    sizes.append(f"{model.parameters / 1e9:.1f} B parameters")
    return [
        ("model", f"{model.name}: {', '.join(sizes)}"),
        ("", f"sequence {about.sequence:,}, {about.format}"),
        *cluster_lines(plan.topology.cluster),
        ("plan", f"{plan.trainer}: {layout_text(plan)}"),
    ]


def _times(plan: Plan, about: Modelled, batch: int) -> Lines:
    predicted = plan.predicted
    simulated_s = predicted.iteration_s or predicted.period_s
    return [
        (
            "time",
            f"{format_seconds(simulated_s)} an iteration of {batch:,} samples, simulated; "
            f"closed form {format_seconds(about.closed_s)}",
        ),
        ("speed", speed_text(predicted.samples_per_s, plan.profile.tokens_per_sample)),
        *speed_lines(predicted),
        *price_lines(predicted.figures, plan.topology.cluster.devices),
    ]


def _where(parts: Mapping[str, float]) -> str:
    """Shares of the closed form's seconds, the largest first."""
    whole = sum(parts.values())
    shown = {name: own for name, own in parts.items() if own >= _LEAST * whole}
    ranked = sorted(shown.items(), key=lambda item: -item[1])
    words = [f"{_NAMES.get(name, name)} {seconds / whole:.1%}" for name, seconds in ranked]
    rest = 1 - sum(shown.values()) / whole
    return ", ".join([*words, f"other {rest:.1%}"] if rest > 0 else words)


def _trust(plan: Plan, about: Modelled) -> Iterator[str]:
    """How far to believe it, and where the closed form and the simulation part."""
    yield f"computed; {TRUST}"
    simulated_s = plan.predicted.iteration_s or plan.predicted.period_s
    change = simulated_s / about.closed_s - 1
    if abs(change) > AGREES:
        why = []
        if (about.layout.cp or 1) > 1:
            why.append("it exchanges over groups of ranks, not over all that share parameters")
        if about.model.experts:
            why.append("experts' gradients have more replicas there")
        why = why or ["stages and sends fall otherwise"]
        yield f"simulated {change:+.1%} against the closed form: {'; '.join(why)}"
    if about.model.experts:
        yield "layouts of experts are not verified: imbalance is not in the model"


def _block(work: Training, own: Degrees) -> str:
    """What a block takes of a microbatch on a rank, part by part."""
    block = work.block(own.shape)
    rows = [
        (_NAMES.get(name, name), format_seconds(each.forward), format_seconds(each.backward))
        for name, each in block.parts.items()
        if sum(each)
    ]
    if block.again_s:
        rows.append(("made again", "", format_seconds(block.again_s)))
    whole_s = block.backward_s + block.again_s
    rows.append(("a block", format_seconds(block.forward_s), format_seconds(whole_s)))
    products = [f"{each.n:,.0f} x {each.k:,.0f}" for each in work.products(own.shape)]
    ends_s = format_seconds(block.head_s), format_seconds(block.embedding_s)
    table = table_of(
        rows,
        [
            Column("A BLOCK, A MICROBATCH", lambda row: row[0], "whole"),
            Column("FORWARD", lambda row: row[1]),
            Column("BACKWARD", lambda row: row[2]),
        ],
    )
    return "\n".join(
        [
            table,
            "",
            label_lines(
                [
                    ("tokens", f"{work.tokens(own.shape):,.0f} of a rank"),
                    ("products", f"of these with weights {', '.join(products)}"),
                    ("kept", f"{format_bytes(round(block.saved_bytes))} of a microbatch"),
                    ("ends", f"head {ends_s[0]}, embedding {ends_s[1]}, forward and backward"),
                ]
            ),
        ]
    )
