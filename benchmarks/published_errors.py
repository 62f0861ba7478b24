"""Errors of all published runs by source; and what the repository records of them.

    python benchmarks/published_errors.py [--update]

A line a source of seconds, and of bytes where those are published: rows, |error| and bias; then how
many runs are within what a page says of their kind, in half and in 19 of 20. `--update` writes the
errors of runs that no constant was fitted to, from which pages have it (`errors.csv` beside
`partopt/transformer/chances.py`), and what is predicted of every run, which
`tests/transformer/test_published.py` holds it to (`tests/golden/published.csv`). Runs of attention
with sinks, to which one constant is fitted, and of state spaces, to Nano's of which one is, are in
the repository; the others are beside it.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

# a checkout in which nothing is installed
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.published_older import DATA
from benchmarks.published_rows import USUAL, training_of
from benchmarks.published_trainers import Found, errors_of, line, read, tables_of
from partopt.transformer.chances import KINDS, errors_like, kind_of
from partopt.transformer.iteration import LASTING, RESERVED

ROOT = Path(__file__).resolve().parent.parent
SINKS = ROOT / "benchmarks/published_sinks.csv"
STATES = ROOT / "benchmarks/published_states.csv"
NEW = {"runs-more": DATA / "runs-more.csv", "runs-experts-more": DATA / "runs-experts-more.csv"}
FILES = {"runs": DATA / "runs.csv", "runs-experts": DATA / "runs-experts.csv"} | NEW
FILES |= {"sinks": SINKS, "states": STATES}
ERRORS = ROOT / "partopt/transformer/errors.csv"
RECORDED = ROOT / "tests/golden/published.csv"
BESIDE_TORCH = 3e9  # of the buffers, what torch does not allocate


def kind(found: Found) -> str:
    """The kind of runs to which a row belongs."""
    assert found.estimate is not None
    row = USUAL | {name: value for name, value in found.row.items() if value}
    return kind_of(training_of(row), found.estimate.seconds)


def bytes_error(found: Found) -> float | None:
    """Of the bytes of a run, relatively: of those that torch allocates where these are printed."""
    if found.estimate is None or not found.ran or not found.row["memory_bytes"]:
        return None
    size = found.estimate.memory_bytes
    if "max allocated" in found.row.get("memory_kind", ""):
        parts = found.estimate.memory.items()
        size = sum(part if name in LASTING else part / RESERVED for name, part in parts)
        size -= BESIDE_TORCH
    return size / float(found.row["memory_bytes"]) - 1


def predictions(files: Mapping[str, Path]) -> Iterator[dict[str, str]]:
    """What is recorded of every row of the files that are here; nothing of what is refused."""
    for name, path in files.items():
        for place, found in enumerate(read(path) if path.exists() else ()):
            known = found.estimate
            yield {
                "file": name,
                "row": str(place),
                "seconds": f"{known.seconds:.5g}" if known else "",
                "bytes": f"{known.memory_bytes:.5g}" if known else "",
            }


def recorded_errors() -> Iterator[dict[str, str]]:
    """Errors of runs that went through, of files that no constant was fitted to."""
    for path in (*NEW.values(), SINKS, STATES):
        for found in read(path):
            errors = {"seconds": found.error if found.ran else None, "bytes": bytes_error(found)}
            if found.estimate and any(error is not None for error in errors.values()):
                known = {of: "" if e is None else f"{e:.4f}" for of, e in errors.items()}
                yield {"kind": kind(found), "source": found.row["table"], **known}


def write(path: Path, rows: Sequence[Mapping[str, str]]) -> None:
    """A table."""
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, rows[0], lineterminator="\n")
        table.writeheader()
        table.writerows(rows)


def show_within(found: Sequence[Found]) -> None:
    """How many runs of a kind are within what a page says of it."""
    known = [(kind(one), abs(one.error)) for one in found if one.ran and one.error is not None]
    for name in KINDS:
        errors, said = [error for of, error in known if of == name], errors_like(name)
        if errors:
            shares = [
                sum(error <= most for error in errors) for most in (said.half, said.twentieth)
            ]
            text = ", ".join(f"{share / len(errors):.0%}" for share in shares)
            print(
                f"  {name:10} {len(errors):4} runs, within {said.half:.1%} and "
                f"{said.twentieth:.1%}: {text}"
            )


def main() -> None:
    """Print the errors, or record them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--update", action="store_true", help="write what is recorded")
    if parser.parse_args().update:
        write(ERRORS, [*recorded_errors()])
        write(RECORDED, [*predictions(FILES)])
        return
    for name, path in FILES.items():
        every = read(path) if path.exists() else []
        for source, table in [*tables_of(every).items(), ("all", every)]:
            print(line(f"{name}: {source}", errors_of(table)))
            sizes = [error for one in table if (error := bytes_error(one)) is not None]
            if sizes:
                print(line("  bytes", sizes))
        show_within(every)


if __name__ == "__main__":
    main()
