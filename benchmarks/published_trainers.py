"""Published runs of transformers, beside what partopt computes of the same configuration.

    python benchmarks/published_trainers.py [RUNS.csv] [--json] [--rows] [--left-out] [--simulated]

Each table in a line: rows, |error| of an iteration's seconds (mean, median, 95 %, worst), and bias;
then whether runs fit, which of the layouts of a sheet is picked, and the older tables. `--rows`
prints every row. RUNS.csv has a run a line, its device, model, layout and facts of its trainer;
without it the data of `../shared/data/published`, beside the repository, are read. `--json` prints
what is predicted alone, in the order of the file, with a reason where it is null. `--left-out` fits
the constants to all tables but one and says how far that one is off. `--simulated` simulates the
plan of each run that went through and says how far that parts from the closed form, and why.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# a checkout in which nothing is installed
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.published_older import DATA, OLDER
from benchmarks.published_rows import (
    USUAL,
    check_columns,
    estimate_of,
    model_of,
    simulated_of,
)
from partopt.documents.engine import Layout
from partopt.errors import PartoptError
from partopt.report.transformer_text import AGREES, ODD
from partopt.transformer import block, experts, iteration, rates
from partopt.transformer.chances import expected_gain, fits_chance
from partopt.transformer.iteration import Estimate, has_odd_widths
from partopt.transformer.rates import PLANNED, USABLE


@dataclass(frozen=True)
class Found:
    """A row and what partopt says of it; `why` it says nothing, or what is known to be off."""

    row: Mapping[str, str]
    estimate: Estimate | None
    why: str = ""

    @property
    def ran(self) -> bool:
        """Whether the run is known to have gone through."""
        return self.row["status"] == "ok"

    @property
    def error(self) -> float | None:
        """Of the seconds of an iteration, relatively."""
        if self.estimate is None or not self.row["step_s"]:
            return None
        return self.estimate.seconds / float(self.row["step_s"]) - 1

    @property
    def chance(self) -> float | None:
        """How likely it fits."""
        if self.estimate is None:
            return None
        return fits_chance(self.estimate.memory_bytes, float(self.row["device_memory"]))

    def fits(self, share: float) -> bool:
        """Whether it needs no more than `share` of the memory in the device's name."""
        assert self.estimate is not None
        return self.estimate.memory_bytes <= share * float(self.row["device_memory"])


def read(path: Path) -> list[Found]:
    """Every run of a file, in its order."""
    if not path.exists():
        raise PartoptError(
            f"{path}: no such file",
            "published runs are not part of the repository: name a file of them",
            code="no-such-file",
        )
    with path.open(newline="") as file:
        rows = csv.DictReader(file)
        if ignored := check_columns(rows.fieldnames or ()):
            print(f"ignored columns: {', '.join(ignored)}", file=sys.stderr)
        return [find(row) for row in rows]


def find(row: Mapping[str, str]) -> Found:
    """What partopt says of a row."""
    try:
        return Found(row, estimate_of(row), known_to_be_off(row))
    except (PartoptError, KeyError, ValueError) as error:
        return Found(row, None, getattr(error, "message", f"unknown: {error}"))


def known_to_be_off(row: Mapping[str, str]) -> str:
    """Why little is to be made of what partopt says of a row; nothing where there is no reason."""
    why = [ODD] if has_odd_widths(model_of(USUAL | {k: v for k, v in row.items() if v})) else []
    why += ["fp8 with a scale a row"] if row.get("scales") == "row" else []
    return "; ".join(why)


def line(name: str, errors: Sequence[float]) -> str:
    """A table in a line."""
    size = sorted(map(abs, errors))
    if not size:
        return f"{name:24}    0 rows"
    high = size[min(len(size) - 1, int(0.95 * len(size)))]
    return (
        f"{name:24} {len(size):4} rows  mean {statistics.mean(size):5.1%}  "
        f"median {statistics.median(size):5.1%}  95 % {high:5.1%}  worst {size[-1]:5.1%}  "
        f"bias {statistics.mean(errors):+5.1%}"
    )


def tables_of(found: Sequence[Found], column: str = "table") -> dict[str, list[Found]]:
    """The rows by table, or by another column."""
    tables: dict[str, list[Found]] = {}
    for own in found:
        tables.setdefault(own.row[column], []).append(own)
    return tables


def errors_of(found: Sequence[Found]) -> list[float]:
    """Errors of the runs that went through, where partopt knows them."""
    return [own.error for own in found if own.ran and own.error is not None]


def show_runs(found: Sequence[Found], rows: bool) -> None:
    """The tables, with all their rows if asked for; of experts also models and devices."""
    means = []
    if found and "model" in found[0].row:
        for model, table in tables_of(found, "model").items():
            for device, runs in tables_of(table, "device_name").items():
                print(line(f"{model} {device}", errors_of(runs)))
        print()
    for name, own in tables_of(found).items():
        print(line(name, errors_of(own)))
        means += [statistics.mean(map(abs, errors_of(own)))] if errors_of(own) else []
        for each in own if rows else ():
            published = each.row["step_s"] or each.row["status"]
            said = "unknown" if each.estimate is None else f"{each.estimate.seconds:9.3f} s"
            size = "" if each.estimate is None else f"{each.estimate.memory_bytes / 1e9:7.1f} GB"
            print(f"    {each.row['run']:90} {published:>9} {said:>11} {size} {each.why}")
    errors = errors_of(found)
    print(line("all", errors))
    if not errors:
        return
    print(f"mean of the tables' means {statistics.mean(means):.1%}")
    for share in (0.05, 0.10, 0.20):
        print(f"  {sum(abs(e) <= share for e in errors) / len(errors):.0%} within {share:.0%}")
    if unknown := sum(own.estimate is None for own in found):
        print(f"  {unknown} unknown")


CHANCES = (0.0, 0.05, 0.5, 0.8, 0.95, 0.99)  # least ones of bins


def by_chance(tries: Sequence[Found]) -> dict[float, list[tuple[float, bool]]]:
    """Chances that tries were said to fit, and whether they ran, by the least chance of a bin."""
    said = sorted((one.chance, one.ran) for one in tries if one.chance is not None)
    groups = itertools.groupby(said, lambda one: max(low for low in CHANCES if low <= one[0]))
    return {low: [*group] for low, group in groups}


def show_fits(found: Sequence[Found]) -> None:
    """Whether partopt says rightly what ran out of memory, and bytes where they are published."""
    tables = tables_of([own for own in found if own.estimate])
    tried = [name for name, own in tables.items() if not all(each.ran for each in own)]
    own = [each for name in tried for each in tables[name]]
    counts = {
        (ran, fits): sum(each.ran == ran and each.fits(USABLE) == fits for each in own)
        for ran in (True, False)
        for fits in (True, False)
    }
    right = counts[True, True] + counts[False, False]
    if own:
        print(
            f"fits: {right / len(own):.1%} of {len(own)} tries said rightly ({', '.join(tried)}); "
            f"ran, said out {counts[True, False]}; out, said to fit {counts[False, True]}"
        )
    for low, tries in by_chance(own).items():
        mean = statistics.mean(chance for chance, _ in tries)
        ran = statistics.mean(ran for _, ran in tries)
        print(f"  chance from {low:4.0%}: {len(tries):3} tries, said {mean:5.1%}, ran {ran:5.1%}")
    for name in tables.keys() - set(tried):
        fit = sum(each.fits(USABLE) for each in tables[name])
        print(f"fits: {fit} of {len(tables[name])} that ran ({name})")
    known = [each for each in found if each.ran and each.estimate and each.row["memory_bytes"]]
    sizes = [each.estimate.memory_bytes for each in known if each.estimate]
    print(
        line(
            "bytes",
            [s / float(o.row["memory_bytes"]) - 1 for s, o in zip(sizes, known, strict=True)],
        )
    )


SHEET = ("layers", "sequence", "gpus", "kernel", "norm", "sequence_parallel")


def show_ranking(found: Sequence[Found]) -> None:
    """Which layout of a sheet is picked: of all that its author tried of a model and a kernel."""
    sheets: dict[tuple[str, ...], list[Found]] = {}
    for own in found:
        if own.row["table"] == "hagemann" and own.estimate:
            sheets.setdefault(tuple(own.row[name] for name in SHEET), []).append(own)
    lost, both, out, taus = list[float](), list[float](), 0, []
    for own in sheets.values():
        ran = {float(each.row["step_s"]): each for each in own if each.ran}
        if len(ran) < 2:
            continue
        picked = [each for each in own if each.fits(PLANNED)]
        picked.sort(key=lambda each: each.estimate.seconds if each.estimate else 0.0)
        out += not picked or not picked[0].ran
        first = next((each for each in picked if each.ran), None)
        if first:
            lost.append(float(first.row["step_s"]) / min(ran) - 1)
            tried = [float(each.row["step_s"]) for each in challengers(own, first) if each.ran]
            both.append(min([*tried, float(first.row["step_s"])]) / min(ran) - 1)
        taus.append(
            kendall([(s, each.estimate.seconds) for s, each in ran.items() if each.estimate])
        )
    if taus:
        print(
            f"ranking: {len(taus)} sheets; the first pick runs out of memory in {out}; the first "
            f"that runs is slower than the best by {statistics.mean(lost):.1%} in the mean, "
            f"{max(lost):.1%} at worst; that or the challenger by {statistics.mean(both):.1%}; "
            f"Kendall's tau {statistics.mean(taus):.2f}"
        )


def challengers(sheet: Sequence[Found], first: Found) -> list[Found]:
    """The one of a sheet that is to be tried beside the first, if there is one."""
    assert first.estimate
    seconds = first.estimate.seconds

    def gain(one: Found) -> float:
        assert one.estimate
        return expected_gain(1 - one.estimate.seconds / seconds, one.chance or 0.0)

    tried = max((one for one in sheet if one is not first), key=gain, default=None)
    return [tried] if tried else []


def kendall(pairs: Sequence[tuple[float, float]]) -> float:
    """Kendall's tau: pairs in the right order less those in the wrong one, of all."""
    signs = [
        (a - c > 0) - (a - c < 0) if b > d else (c - a > 0) - (c - a < 0)
        for i, (a, b) in enumerate(pairs)
        for c, d in pairs[:i]
        if b != d
    ]
    return sum(signs) / len(signs)


def show_older(rows: bool) -> None:
    """The older tables, with all their rows if asked for."""
    for name, table in OLDER.items():
        own = list(table())
        print(line(name, [found / published - 1 for _, published, found in own]))
        for case, published, found in own if rows else ():
            print(f"    {case:70} {published:9.4g} {found:9.4g} {found / published - 1:+6.1%}")


# --- constants ------------------------------------------------------------------------------------

# what was fitted, and the steps in which it is sought
FITTED = {
    "SUSTAINED": (rates, 0.005),
    "BLOCK_SCALES": (rates, 0.01),
    "CLOCK_POWER": (rates, 0.02),
    "STRAGGLER": (iteration, 0.001),
    "buffers": (block.HIDDEN, 0.05),
}
FITTED_TO_EXPERTS = {
    "CONVERTED": (experts, 0.25),
    "EXCHANGE_S": (experts, 20e-6),
    "OVERLAPPED": (experts, 0.05),
    "DRAWN": (experts, 0.02),
    "LATENT": (rates, 0.05),
    "LAUNCH_S": (rates, 0.4e-6),
    "BESIDE": (block, 0.1),
}


def constants_of(rows: Sequence[Mapping[str, str]]) -> dict[str, tuple[Any, float]]:
    """The constants that were fitted to such rows, and the steps in which they are sought."""
    return (
        FITTED_TO_EXPERTS
        if all("experts" in row and int(row["experts"]) for row in rows)
        else FITTED
    )


def cost(rows: Sequence[Mapping[str, str]], column: str) -> float:
    """The mean of the tables' mean errors; of experts, of all rows."""
    found = [find(row) for row in rows if row["status"] == "ok"]
    if column == "model":
        return statistics.mean(map(abs, errors_of(found)))
    tables = tables_of(found).values()
    return statistics.mean(statistics.mean(map(abs, errors_of(table))) for table in tables)


def constant(name: str, value: float | None = None) -> float:
    """What a fitted constant is; set to `value` first where that is given."""
    where, _ = (FITTED | FITTED_TO_EXPERTS)[name]
    names = where if isinstance(where, dict) else vars(where)
    if value is not None:
        names[name] = value
    return float(names[name])


def fit(rows: Sequence[Mapping[str, str]], column: str = "table") -> dict[str, float]:
    """Seek constants, one after the other, until no step lowers the cost of `rows`."""
    best, moved, fitted = cost(rows, column), True, constants_of(rows)
    while moved:
        moved = False
        for name, (_, step) in fitted.items():
            for sign in (step, -step):
                while (now := constant(name)) is not None:
                    constant(name, now + sign)
                    if (tried := cost(rows, column)) >= best - 1e-6:
                        constant(name, now)
                        break
                    best, moved = tried, True
    return {name: constant(name) for name in fitted}


def show_left_out(found: Sequence[Found]) -> None:
    """Each table, or each model of experts, with the constants that are fitted to the others."""
    rows = [one.row for one in found]
    usual = {name: constant(name) for name in constants_of(rows)}
    column = "table" if "buffers" in usual else "model"
    means, every = [], []
    for table in tables_of(found, column):
        fitted = fit([row for row in rows if row[column] != table], column)
        errors = errors_of([find(row) for row in rows if row[column] == table])
        means.append(statistics.mean(map(abs, errors)))
        every += errors
        said = ", ".join(f"{name} {value:.3g}" for name, value in fitted.items())
        print(f"{line(table, errors)}\n    {said}")
        for name, value in usual.items():
            constant(name, value)
    print(line("all, left out in turn", every))
    print(f"mean of the means {statistics.mean(means):.1%}")
    size = sorted(map(abs, every))
    print(
        "on published runs that no constant was fitted to, half within "
        f"{statistics.median(size):.1%}, one of twenty off by more than "
        f"{size[int(0.95 * len(size))]:.0%}"
    )


def show_simulated(found: Sequence[Found], rows: bool) -> None:
    """How far the simulated plans of runs part from the closed form; by cause those that do."""
    apart: dict[str, list[float]] = {}
    for name, own in tables_of([each for each in found if each.ran and each.estimate]).items():
        near, size = [], []
        for each in own:
            assert each.estimate is not None
            simulated_s = simulated_of(each.row)
            change = simulated_s / each.estimate.seconds - 1
            near.append(change)
            size.append(simulated_s / float(each.row["step_s"]) - 1)
            if abs(change) > AGREES:
                apart.setdefault(cause_of(each.estimate.layout), []).append(change)
            if rows:
                said = f"{simulated_s:9.3f} s {each.estimate.seconds:9.3f} s {change:+6.1%}"
                print(f"    {each.row['run']:90} {said}")
        print(line(f"{name}, simulated", near))
        print(line("  against published", size))
    for cause, changes in apart.items():
        print(f"over {AGREES:.0%}: {line(cause, changes)}")


def cause_of(layout: Layout) -> str:
    """What a simulated plan lacks that parts from the closed form."""
    if (layout.pp or 1) > 2 and (layout.chunks or 1) == 1:
        return "sends and receives in turn"
    return "chunks" if (layout.chunks or 1) > 1 else "exchanges"


def main() -> None:
    """Print the tables, or what is predicted."""
    parser = argparse.ArgumentParser()
    parser.add_argument("runs", nargs="?", type=Path, help="a file of runs")
    parser.add_argument("--json", action="store_true", help="what is predicted alone")
    parser.add_argument("--rows", action="store_true", help="every row")
    parser.add_argument("--left-out", action="store_true", help="constants of the other tables")
    parser.add_argument("--simulated", action="store_true", help="their plans, simulated")
    given = parser.parse_args()
    try:
        found = read(given.runs or DATA / "runs.csv")
    except PartoptError as error:
        sys.exit(f"error: {error.message}\nhint:  {error.hint}")
    if given.json:
        print(json.dumps({"rows": [document(own) for own in found]}, indent=1))
        return
    show_runs(found, given.rows)
    show_fits(found)
    show_ranking(found)
    if DATA.exists():
        print()
        show_older(given.rows)
    if given.simulated:
        print("\nthe plan of each run that went through, simulated, against the closed form")
        show_simulated(found, given.rows)
    if given.left_out:
        print("\neach table left out in turn, the constants fitted to the others")
        show_left_out(found)


def document(own: Found) -> dict[str, object]:
    """A row as it is printed in JSON."""
    known = own.estimate
    return {
        "run": own.row["run"],
        "predicted_s": known.seconds if known else None,
        "predicted_bytes": known.memory_bytes if known else None,
        "fits_chance": own.chance,
        "why": own.why,
    }


if __name__ == "__main__":
    main()
