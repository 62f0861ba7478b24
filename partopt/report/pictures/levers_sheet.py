"""What else makes a transformer's training faster, as bars: switches, a layout, fewer devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from matplotlib.patches import Patch

from partopt.documents.plan import Plan, seconds_of
from partopt.documents.transformer import Challenger, Fewer, Worth
from partopt.report.phrases import count_text
from partopt.report.pictures.sheet import (
    FULL,
    GREY,
    RIGHT,
    SIZE,
    SMALL,
    Heading,
    Picture,
    Sheet,
    draw_boxes,
    first_fit,
    fit,
    text_width,
)
from partopt.report.transformer_text import doubts_of, layout_name, worth_text
from partopt.units import format_seconds

_ROW, _BAR = 0.17, 0.7  # inches of a row, and the share of it that a bar is high
_NAMES, _LONGEST = 0.33, 0.35  # of the sheet's width, and of the room beside the names
_LEFT = 0.08  # inches
_SWITCH, _NUMBERS, _ALL = "switch", "switch that changes numbers", "all switches together"
_TRY, _FEWER = "layout to try, its chance to fit", "fewer devices"
# unlike those of memory, which the picture of a plan has, too
_COLOURS = {
    _SWITCH: "#009E73",
    _NUMBERS: "#56C9A6",
    _ALL: GREY,
    _TRY: "#CC79A7",
    _FEWER: "#D9D9D9",
}
_HATCH: Any = {"hatch": "//////", "edgecolor": "white", "linewidth": 0.0}


class LeverBar(NamedTuple):
    """What a lever saves of an iteration, as a share; 0 of one that makes the first layout fit."""

    name: str
    kind: str
    lever: Worth | Challenger | Fewer
    notes: Sequence[str] = ()

    @property
    def saved(self) -> float:
        """The share of an iteration, which the bar is as long as; negative of what takes longer."""
        return self.lever.saved or 0.0

    @property
    def forms(self) -> list[str]:
        """What stands beside the bar, the longest first."""
        worth = worth_text(self.lever)
        return [", ".join([worth, *self.notes]), worth, worth.partition(",")[0]]

    def __str__(self) -> str:
        """The bar in words."""
        return f"{self.name}: {self.forms[0]}"


def bars_of(plan: Plan) -> list[LeverBar]:
    """The levers of a transformer's plan in the order of its page; an empty list if none helps."""

    def found() -> Iterator[LeverBar]:
        about = plan.transformer
        if not about:
            return
        for lever in about.levers:
            kind = _NUMBERS if lever.changes_numbers else _SWITCH
            yield LeverBar(" ".join(lever.flags), kind, lever, doubts_of(lever))
        if all_ := about.together:
            yield LeverBar(f"all of {len(all_.flags)}", _ALL, all_, doubts_of(all_))
        if tried := about.challenger:
            chance = tried.fits_chance
            yield LeverBar(
                f"if it fits ({chance:.0%})" if chance < 1 else "another layout", _TRY, tried
            )
        if fewer := about.fewer:
            whole = plan.topology.cluster.devices
            yield LeverBar(f"{fewer.devices:,} of {whole:,} devices", _FEWER, fewer)

    return [*found()]


def picture(plan: Plan, width: float = FULL) -> Picture | None:
    """What every lever saves of an iteration of the plan; None where there is no lever."""
    bars = bars_of(plan)
    if not bars:
        return None
    parts = [
        plan.profile.name,
        layout_name(plan.layout),
        count_text(plan.topology.cluster.devices, "device"),
        f"{format_seconds(seconds_of(plan))} an iteration",
    ]
    heading = Heading.of(parts, describe(bars), plan.profile.estimated)
    return Picture(heading, partial(_draw, bars, width))


def describe(bars: Sequence[LeverBar]) -> str:
    """The bars in words."""
    return f"What else saves time of an iteration. {'; '.join(map(str, bars))}."


def _draw(bars: Sequence[LeverBar], width: float, heading: Heading) -> Sheet:
    sheet = Sheet(heading, width)
    draw_levers(sheet, bars)
    sheet.legend(handles_of(bars))
    return sheet


def draw_levers(sheet: Sheet, bars: Sequence[LeverBar]) -> None:
    """A bar a lever, with its name before it and what it is worth behind it."""
    title = "time saved of an iteration in closed form, with the best layout for it"
    sheet.text(_LEFT, sheet.down, title, size=SIZE)
    sheet.down += _ROW
    most = _NAMES * sheet.width
    names = [fit(bar.name, most, SMALL) for bar in bars]
    left = _LEFT + max(text_width(name, SMALL) for name in names) + 0.06
    inches, top = sheet.width - RIGHT - left, sheet.down
    axes = sheet.axes(left, inches, _ROW * len(bars))
    least = min(0.0, *(bar.saved for bar in bars))
    longest = max(1e-9, *(bar.saved for bar in bars)) - least
    axes.set_xlim(least, least + longest / _LONGEST)
    axes.spines["left"].set_position("zero")
    axes.set_ylim(len(bars) - 0.5, -0.5)
    axes.spines["bottom"].set_visible(False)
    axes.tick_params(axis="both", length=0, labelbottom=False, labelleft=False)
    look: Any = {"size": SMALL, "va": "center_baseline"}
    for place, (bar, name) in enumerate(zip(bars, names, strict=True)):
        down = top + _ROW * (place + 0.5)
        sheet.text(left - 0.04, down, name, ha="right", **look)
        hatch = _HATCH if "unverified" in bar.notes else {"linewidth": 0.0}
        low, high = place - _BAR / 2, place + _BAR / 2
        draw_boxes(axes, [0], [bar.saved], [low], [high], facecolor=_COLOURS[bar.kind], **hatch)
        end = left + inches * _LONGEST * (max(0.0, bar.saved) - least) / longest + 0.05
        sheet.text(end, down, first_fit(bar.forms, sheet.width - 0.02 - end, SMALL), **look)
        sheet.add_row_tooltip(axes, place - 0.5, place + 0.5, str(bar))
    sheet.down += 0.06


def handles_of(bars: Sequence[LeverBar]) -> dict[str, Any]:
    """What colours and hatches mean."""
    kinds = {bar.kind for bar in bars}
    handles: dict[str, Any] = {
        kind: Patch(facecolor=colour) for kind, colour in _COLOURS.items() if kind in kinds
    }
    if any("unverified" in bar.notes for bar in bars):
        handles["unverified"] = Patch(facecolor=GREY, **_HATCH)
    return handles
