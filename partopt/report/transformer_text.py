"""A transformer's layout as people read it: the plan, where its time goes, its arithmetic."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence

from msgspec import UNSET, UnsetType

from partopt.documents.engine import Layout
from partopt.documents.plan import Plan, needed_bytes, room_bytes, seconds_of
from partopt.documents.transformer import (
    BITS,
    OTHER_PARTS,
    BlockParts,
    ClosedForm,
    LayoutBeside,
    Modelled,
    Worth,
)
from partopt.report.layout_words import degree_columns, degrees_text, layout_name, layout_text
from partopt.report.phrases import Lines, cluster_lines, price_lines, speed_lines, speed_text
from partopt.report.plan_text import memory_lines
from partopt.report.text import (
    DOES_NOT_FIT,
    Column,
    label_lines,
    paragraph,
    style,
    table_of,
    with_label,
)
from partopt.units import format_bytes, format_seconds

ODD = "widths that are no multiple of 64"  # which kernels are slower at than is computed
AGREES = 0.02  # of the time: a simulation that is so near confirms the closed form
PUBLISHED_RANKS = 8  # over which experts lie in published runs, and more
_LEAST = 0.005  # of an iteration: smaller parts are added up
_APART = 0.002  # of an iteration: parts that differ less are not shown
_RULES = {"states": "state spaces", "delta": "a gated delta"}
_FEW = 3  # equal stages that are written out
_NAMES = {
    "tensor": "tensor exchange",
    "context": "context exchange",
    "passes": "passes over memory",
    "exchange": "experts' exchange",
    "replicas": "replicas' exchange",
    "launches": "waits for the host",
    "step": "optimizer",
}


def render(plan: Plan, arithmetic: bool = False) -> str:
    """The page of a plan of a transformer's layout; with `arithmetic` also that of a block."""
    about = plan.transformer
    assert about
    batch, form = plan.microbatch_size * (plan.microbatches or 1), about.form
    lines = [*_head(plan, about), *_times(plan, about, batch)]
    lines += [*_measured(about, form), *_cuts(plan, about)]
    if form:
        lines += with_label("where", _where(about, form))
    lines += with_label("memory", memory_lines(plan))
    if form and form.host_bytes:
        practice, what = about.practice, list[str]()
        if share := practice.optimizer_offload:
            what.append(f"{share:.0%} of the optimizer's state, with gradients")
        what += ["activations"] * bool(practice.offload) + ["all shares"] * practice.host_shards
        said = f"{format_bytes(form.host_bytes)} of a server's memory: {', '.join(what)}"
        lines.append(("host", said))
    lines += lever_lines(plan, about)
    lines += with_label("trust", _trust(plan, about))
    pages = [label_lines(lines)]
    rows, columns, notes = layout_table(plan)
    if rows:
        told = (paragraph(note, rest="  ") for note in notes)
        pages.append("\n".join([table_of(rows, columns, gap=1), *told]))
    if arithmetic and form:
        pages.append(_arithmetic(about, form))
    return "\n\n".join(pages)


def layout_table(plan: Plan) -> tuple[list[LayoutBeside], list[Column], list[str]]:
    """The plan's layout and those beside it: rows, columns with what costs more, and notes.

    Without layouts beside it there are no rows.
    """
    about = plan.transformer
    if not about or not about.beside:
        return [], [], []
    figures = plan.predicted.figures
    first = LayoutBeside(
        layout=about.layout,
        iteration_s=seconds_of(plan),
        simulated=True,
        memory_bytes=needed_bytes(plan),
        fits=plan.fits,
        part="",
        part_s=0.0,
    )
    rows, mfu = [first, *about.beside], figures.mfu if figures else None
    limit_bytes = room_bytes(plan) or 0

    def utilisation(row: LayoutBeside) -> str:
        return f"{(mfu or 0.0) * first.iteration_s / row.iteration_s:.1%}"

    def why(row: LayoutBeside) -> str:
        change = row.iteration_s / first.iteration_s - 1
        if not row.fits:
            return f"{change:+.1%}, no room: {format_bytes(row.memory_bytes - limit_bytes)} over"
        part = f"{_NAMES.get(row.part, row.part)} {row.part_s / first.iteration_s:+.1%}"
        return f"{change:+.1%}: {part}"

    columns = [
        *degree_columns(bool(about.model.experts)),
        Column(
            "TIME",
            lambda row: f"{'' if row.simulated else '~'}{format_seconds(row.iteration_s)}",
        ),
        *([Column("MFU", utilisation)] if mfu else []),
        Column("MEMORY", lambda row: format_bytes(row.memory_bytes)),
        Column("AGAINST THE FIRST", lambda row: "" if row is first else why(row), "text"),
    ]
    note = f"{about.tried:,} layouts estimated, the fastest simulated; ~ is the closed form"
    if about.calibration:
        note += "; blocks are measured, or scaled by what was measured"
    fits = [_fits(row.layout, row.fits_with, first) for row in rows if row.fits_with]
    return rows, columns, [*_tie(about, first), *fits, note]


def _tie(about: Modelled, first: LayoutBeside) -> Iterator[str]:
    """The layout that is faster than the first, which is simpler, by too little to be planned."""
    if about.tie:
        able = [row for row in about.beside if row.fits and row.simulated]
        fastest = min(able, key=lambda row: row.iteration_s)
        gain, name = 1 - fastest.iteration_s / first.iteration_s, layout_name(fastest.layout)
        yield (
            f"{fastest.layout.schedule}, {name}: {gain:.1%} faster; of layouts within "
            f"{about.tie:.1%} the simplest is planned"
        )


def _fits(layout: Layout, worth: Worth, first: LayoutBeside) -> str:
    """With which switch a layout fits, and what it then takes beside the first."""
    change = worth.iteration_s / first.iteration_s - 1
    doubt = ", changes numbers" * worth.changes_numbers
    return f"{layout_name(layout)} fits with {' '.join(worth.flags)}: {change:+.1%}{doubt}"


def render_change(plan: Plan, best: Plan, changes: Sequence[str]) -> str:
    """A layout beside the best one: times, what it loses, and `changes` of the configuration."""
    lines = [("yours", _in_a_line(plan)), ("best", _in_a_line(best))]
    loses = 1 - seconds_of(best) / seconds_of(plan)
    if loses > 0 and best.fits:
        lines.append(("loses", "; in yours ".join([f"{loses:.1%}", *_grown_part(plan, best)])))
    elif plan.fits:
        lines.append(("loses", "nothing: no layout that was found is faster"))
    else:
        lines.append(("loses", "no time, but yours does not fit"))
    if plan != best:
        lines += with_label("change", changes)
        if best.transformer:
            lines += with_label("also", map(style().spell, _also(best.transformer)))
        if abs(loses) >= _APART and _forms(plan, best):
            return f"{label_lines(lines)}\n\n{render_parts(plan, best, ('YOURS', 'BEST'))}"
    return label_lines(lines)


def render_parts(plan: Plan, other: Plan, names: tuple[str, str]) -> str:
    """The parts of two iterations side by side, in seconds, the largest difference first.

    The layouts have `names`; parts are by the closed form, and what differs little is left out.
    """
    rows: list[tuple[str, float, float]] = []
    for ours, theirs in _forms(plan, other):
        names_of = dict.fromkeys([*ours, *theirs])
        rows += [(_NAMES.get(n, n), ours.get(n, 0.0), theirs.get(n, 0.0)) for n in names_of]
    whole, others = (sum(seconds) for seconds in list(zip(*rows, strict=True))[1:] or ((), ()))
    rows = [row for row in rows if abs(row[2] - row[1]) >= _APART * whole]
    rows.sort(key=lambda row: -abs(row[2] - row[1]))
    rows.append(("all", whole, others))

    def more(row: tuple[str, float, float]) -> str:
        return f"{'-' if row[2] < row[1] else '+'}{format_seconds(abs(row[2] - row[1]))}"

    table = table_of(
        rows,
        [
            Column("PART", lambda row: row[0], "whole"),
            Column(names[0], lambda row: format_seconds(row[1])),
            Column(names[1], lambda row: format_seconds(row[2])),
            Column("MORE", more),
            Column("OF ALL", lambda row: f"{(row[2] - row[1]) / whole:+.1%}"),
        ],
    )
    layouts = [(names[0].lower(), _in_a_line(plan)), (names[1].lower(), _in_a_line(other))]
    return table if names[0] == "YOURS" else f"{label_lines(layouts)}\n\n{table}"


def _in_a_line(plan: Plan) -> str:
    """Seconds, MFU and layout of a plan."""
    mfu = plan.predicted.figures.mfu if plan.predicted.figures else None
    simulated_s = seconds_of(plan)
    words = [format_seconds(simulated_s), f"MFU {mfu:.1%}" if mfu else "", layout_text(plan.layout)]
    return ", ".join([word for word in words if word] + ([] if plan.fits else [DOES_NOT_FIT]))


def _forms(plan: Plan, other: Plan) -> Iterator[tuple[Mapping[str, float], Mapping[str, float]]]:
    """The parts of two iterations; nothing where one does not say them."""
    ours, theirs = plan.transformer, other.transformer
    if ours and theirs and ours.form and theirs.form:
        yield ours.form.parts, theirs.form.parts


def _grown_part(plan: Plan, best: Plan) -> Iterator[str]:
    """The part of an iteration of a plan that is longest beside that of the best."""
    for ours, theirs in _forms(plan, best):
        names = dict.fromkeys([*ours, *theirs])
        grown = {name: ours.get(name, 0.0) - theirs.get(name, 0.0) for name in names}
        name, more = max(grown.items(), key=lambda item: item[1])
        yield f"{_NAMES.get(name, name)} {more / sum(theirs.values()):+.1%}"


def _head(plan: Plan, about: Modelled) -> Lines:
    model = about.model
    heads = f"{model.heads} heads"
    if model.kv_heads != model.heads:
        heads += f" ({model.kv_heads} of keys)"
    sizes = [f"{model.blocks} blocks", f"hidden {model.hidden:,}", heads]
    if model.experts:
        sizes.append(f"{model.experts_per_token} of {model.experts} experts")
    if model.latent:
        sizes.append("latent keys")
    if model.indexer:
        sizes.append(f"sparse attention to {model.indexer.taken:,} keys")
    if model.recurrence:
        rest = sum(kind.is_recurrent for kind in model.kinds())
        sizes.append(f"{rest} blocks of {_RULES[model.recurrence.rule]}")
    if model.further:
        sizes.append(f"{model.further} further token{'s' * (model.further > 1)}")
    sizes.append(f"{model.parameters / 1e9:.1f} B parameters")
    practice = about.practice
    if practice.images and model.tower:
        state = "trained" if practice.tower_trained else "frozen"
        size = f"{model.tower.parameters / 1e9:.2f} B"
        sizes.append(f"a tower of {size}, {state}, for {practice.images:,} tokens of pictures")
    elif model.numerics and OTHER_PARTS in model.numerics.besides:
        sizes.append("its text alone")
    graphs = f", graphs {practice.graphs}" if practice.graphs != "none" else ""
    trained = ""
    if practice.adapters:
        beside = ", ".join(practice.adapted.split("+"))
        trained = f"; adapters of rank {practice.adapters} beside {beside} alone are trained"
    packed = f" packed of documents of {practice.documents:,}" if practice.documents else ""
    return [
        ("model", f"{model.name}: {', '.join(sizes)}"),
        ("", f"sequence {about.sequence:,}{packed}, {about.format}{trained}"),
        *cluster_lines(plan.topology.cluster),
        ("plan", f"{plan.trainer}: {layout_text(plan.layout)}{graphs}"),
    ]


def _times(plan: Plan, about: Modelled, batch: int) -> Lines:
    predicted = plan.predicted
    simulated_s = seconds_of(plan)
    products = "fp8" if about.format == "mxfp8" else about.format
    return [
        (
            "time",
            f"{format_seconds(simulated_s)} an iteration of {batch:,} samples, simulated; "
            f"closed form {format_seconds(about.closed_s)}",
        ),
        ("speed", speed_text(predicted.samples_per_s, plan.profile.tokens_per_sample)),
        *speed_lines(predicted, f" of the {products} peak" if BITS[about.format] < 16 else ""),
        *price_lines(predicted.figures, plan.topology.cluster.devices),
    ]


def _basis(form: ClosedForm) -> str:
    """Whether blocks are measured, scaled by what was, or computed; of several kinds the least."""
    found = {block.basis for block in form.blocks}
    if "computed" in found:
        return "computed" if len(found) == 1 else "partly scaled"
    return "measured" if found == {"measured"} else "scaled"


def _measured(about: Modelled, form: ClosedForm | UnsetType) -> Lines:
    """What was measured of blocks, and how much more it is than what is computed."""
    lines = list[tuple[str, str]]()
    for block in form.blocks if form and about.calibration else ():
        label = "" if lines else "block"
        of_kind = f"{block.kind}: " if form and len(form.blocks) > 1 else ""
        if block.scale is None:
            lines.append((label, f"{of_kind}computed"))
            continue
        scale = block.scale
        calibration = next(of for of in about.calibration if of.kind in ("", block.kind))
        known = f", bytes kept x {scale.kept:.3g}" if calibration.blocks[0].kept_bytes else ""
        sizes = ", ".join(str(measured.microbatch_size) for measured in calibration.blocks)
        over = f", ep {calibration.expert_ranks}" if calibration.expert_ranks > 1 else ""
        lines += [
            (
                label,
                f"{of_kind}{block.basis}: forward x {scale.forward:.3g}, backward x "
                f"{scale.backward:.3g}{known} of what is computed",
            ),
            (
                "",
                f"{calibration.name}, measured at tp {calibration.ranks}{over}, microbatch {sizes}",
            ),
        ]
    return lines


def _cuts(plan: Plan, about: Modelled) -> Lines:
    """The stages where these differ, and what they would take if they were cut by count."""
    stages, parts = about.form.stages if about.form else [], list[str]()
    counts = [stage.count("t") for stage in stages]
    runs = [(blocks, len(list(same))) for blocks, same in itertools.groupby(counts)]
    said = ", ".join(
        f"{blocks} in {many} stages" if many > 1 else f"{blocks}" for blocks, many in runs
    )
    if (about.model.is_unequal or about.practice.images) and len(stages) > 1:
        parts.append(cut_text(stages))
    elif len(runs) > 1:
        parts.append(f"blocks {said}")
    if other_s := about.by_count_s:
        change = other_s / seconds_of(plan) - 1
        parts.append(f"cut by count {format_seconds(other_s)}, {change:+.1%}")
    return [("cuts", "; ".join(parts))] if parts else []


def cut_text(stages: Sequence[str]) -> str:
    """Stages of letters as Megatron writes them: `Et*3|(tt|)*29m|L`."""
    short = [re.sub(r"(t)\1{2,}", lambda run: f"t*{len(run[0])}", stage) for stage in stages]
    runs = [(stage, len(list(run))) for stage, run in itertools.groupby(short[:-1])]
    several = (f"({stage}|)*{n}" if n > _FEW else f"{stage}|" * n for stage, n in runs)
    return "".join(several) + short[-1]


def _where(about: Modelled, form: ClosedForm) -> Iterator[str]:
    """Shares of the closed form's seconds, the largest first; apart what was scaled."""
    whole = sum(form.parts.values())
    shown = {name: seconds for name, seconds in form.parts.items() if seconds >= _LEAST * whole}
    groups: dict[str, list[str]] = {"scaled": [], "computed": []}
    for name, seconds in sorted(shown.items(), key=lambda item: -item[1]):
        basis = "scaled" if name in form.scaled else "computed"
        groups[basis].append(f"{_NAMES.get(name, name)} {seconds / whole:.1%}")
    rest = 1 - sum(shown.values()) / whole
    groups["computed"] += [f"other {rest:.1%}"] if rest > 0 else []
    for basis, words in groups.items():
        if words:
            yield ", ".join(words) if not about.calibration else f"{basis}: {', '.join(words)}"


def _trust(plan: Plan, about: Modelled) -> Iterator[str]:
    """How far to believe it, and where the closed form and the simulation part."""
    basis = _basis(about.form) if about.form else "scaled" if about.calibration else "computed"
    computed = basis == "computed"
    trust = "computed" if computed else f"blocks {basis}, exchanges and the rest computed"
    if about.form and (errors := about.form.errors):
        trust += "; " + "where all is, " * (not computed)
        fitted = "to which one constant is fitted" if about.model.sinks else "outside the fit"
        fitted = "to some of which one constant is fitted" if about.model.recurrence else fitted
        trust += (
            f"on {errors.runs} published runs like this ({errors.like}), {fitted}, half within "
            f"{100 * errors.half:.1f} %, one of twenty over {100 * errors.twentieth:.1f} %"
        )
    yield trust
    if about.form and not about.form.errors:
        state = about.model.recurrence
        what = _RULES[state.rule] if state else "sparse attention"
        what, whose = f"of {what}", "of such blocks"
        if about.practice.images:
            what, whose = "with pictures", "with them"
        yield f"no published run {what} is known: the seconds {whose} are unverified"
    if about.practice.adapters:
        yield "of adapters alone five published runs are known, 2 to 9 % off"
    simulated_s = seconds_of(plan)
    change = simulated_s / about.closed_s - 1
    if abs(change) > AGREES:
        yield f"simulated {change:+.1%} against the closed form"
    if about.form and about.form.odd_widths:
        yield f"{ODD}: kernels are slower at them than is computed"
    levels, layout = plan.topology.cluster.levels, about.layout
    sharing = (layout.cp or 1) * (layout.dp or 1)
    over_servers = sharing > 1 and (layout.tp or 1) * sharing > levels[0].size
    measured = any(
        level.allreduce and level.allreduce.bandwidth_bytes_per_s for level in levels[1:]
    )
    if over_servers and not measured:
        yield "exchanges between servers are taken to reach the rate of messages: measure theirs"
    spread = (layout.ep or 1) * (layout.etp or 1)
    if spread < min(PUBLISHED_RANKS, about.model.experts):
        yield (
            f"experts on fewer than {PUBLISHED_RANKS} ranks are not verified: no published run has "
            "them so, and they come out 5 to 10 % too fast"
        )
    if about.model.experts and layout.recomputation.is_whole and about.asked.recompute is None:
        yield "whole blocks are made again: no layout fits without"
    if not all(lever.verified for lever in about.levers):
        yield "no two published runs differ in a switch that is unverified, and in nothing else"
    if about.left_out:
        change = about.left_out.iteration_s / simulated_s - 1
        said = f"left out: {layout_name(about.left_out.layout)}, {change:+.1%} by computation"
        yield "; ".join(filter(None, [said, about.left_out.doubt or ""]))


def lever_lines(plan: Plan, about: Modelled) -> Lines:
    """What else is faster: switches of the trainer, a layout that is worth a try."""
    lines = [*with_label("also", _also(about))]
    if challenger := about.challenger:
        saved, chance = challenger.saved, challenger.fits_chance
        text = f"{abs(saved):.1%} {'faster' if saved > 0 else 'slower as computed'}, "
        text += f"if it fits ({chance:.0%})" if chance < 1 else "and it fits"
        lines.append(("try", f"{layout_name(challenger.layout)}: {text}"))
    return [(label, style().spell(line)) for label, line in lines]


def _also(about: Modelled) -> Iterator[str]:
    """What every switch of the trainer saves, with its best layout; and all together."""
    for lever in about.levers:
        yield ", ".join([f"{' '.join(lever.flags)} {worth_text(lever)}", *doubts_of(lever)])
    if together := about.together:
        option = "best,numbers" if together.changes_numbers else "best"
        yield f"together {', '.join(together.flags)}: {worth_text(together)}: `facts={option}`"


def doubts_of(lever: Worth) -> list[str]:
    """What to know of switches before they are taken."""
    return ["changes numbers"] * lever.changes_numbers + ["unverified"] * (not lever.verified)


def worth_text(lever: Worth) -> str:
    """`-13.4 %, 58.6 s (tp 8, pp 4)`; of what makes the first layout fit, that it does.

    And the graphs with which that is, where the plan has others.
    """
    saved = "fits" if lever.saved is UNSET else f"{-lever.saved:+.1%}"
    shape = degrees_text(lever.layout)
    if lever.graphs:
        shape += f", graphs {lever.graphs}"
    return f"{saved}, {format_seconds(lever.iteration_s)} ({shape})"


def _arithmetic(about: Modelled, form: ClosedForm) -> str:
    """What a block takes of a microbatch on a rank, part by part; of several kinds, one of each."""
    tokens = ("tokens", f"{form.tokens:,.0f} of a rank")
    ends_s = format_seconds(form.head_s), format_seconds(form.embedding_s)
    ends = [("ends", f"head {ends_s[0]}, embedding {ends_s[1]}, forward and backward")]
    if about.model.further:
        further_s = format_seconds(form.further_s)
        ends.append(("further", f"a token takes {further_s}: a block, with head and loss"))
    pages = []
    for block in form.blocks:
        said = ", ".join(f"{n:,.0f} x {k:,.0f}" for n, k in block.products)
        lines = [tokens, ("products", f"of these with weights {said}")]
        lines.append(("kept", f"{format_bytes(block.kept_bytes)} of a microbatch"))
        lines += ends if block is form.blocks[-1] else []
        several = f" OF {block.kind.upper()}" if len(form.blocks) > 1 else ""
        pages += [_parts(block, several, bool(about.calibration)), label_lines(lines)]
    return "\n\n".join(pages)


def _parts(block: BlockParts, several: str, calibrated: bool) -> str:
    """The parts of a block of a kind in a table."""
    some = "computed" if block.basis == "computed" else "scaled"

    def row(name: str, forward_s: float, backward_s: float, of: str) -> tuple[str, ...]:
        seconds = [format_seconds(pass_s) if pass_s else "" for pass_s in (forward_s, backward_s)]
        return _NAMES.get(name, name), *seconds, of

    rows = [
        row(part.name, part.forward_s, part.backward_s, some if part.scaled else "computed")
        for part in block.parts
    ]
    if block.again_s:
        rows.append(row("made again", 0.0, block.again_s, some))
    basis = some if block.again_s else block.basis
    rows.append(row("a block", block.forward_s, block.backward_s + block.again_s, basis))
    return table_of(
        rows,
        [
            Column(f"A BLOCK{several}, A MICROBATCH", lambda row: row[0], "whole"),
            Column("FORWARD", lambda row: row[1]),
            Column("BACKWARD", lambda row: row[2]),
            *([Column("", lambda row: row[3], "whole")] if calibrated else []),
        ],
    )
