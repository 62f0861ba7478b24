"""Scripts drawn at random, run in bash and read: whether words come out that bash does not have.

    python benchmarks/shells.py [--draws 5000] [--first 0]

A script is of the reader's subset, or of all that bash has. It runs in a folder of some files with
few processes. It is equal, or has a value that is not known and its name; a silent difference is
printed, and the exit code is then 1. What bash reports an error for is not compared.
"""

from __future__ import annotations

import argparse
import collections
import sys
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from partopt.configurations.marks import unknown_names
from partopt.errors import PartoptError
from tests.configurations.shell_scripts import (
    Writer,
    draw,
    words_known,
    words_of_bash,
)


def compare(script: str) -> str:
    """How a script is read: equal, unknown, refused, silent; or error, where bash reports one."""
    expected = words_of_bash(script)
    if expected is None:
        return "error"
    try:
        read = words_known(script)
    except PartoptError:
        return "refused"
    if any(map(unknown_names, read)):
        return "unknown"
    return "equal" if read == expected else "silent"


def main() -> int:
    """Draw, compare and count."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--draws", type=int, default=5000)
    parser.add_argument("--first", type=int, default=0)
    given = parser.parse_args()
    counts = collections.Counter[str]()
    for seed in range(given.first, given.first + given.draws):
        script = draw(Random(seed)) if seed % 2 else Writer(seed).script()
        verdict = compare(script)
        counts[verdict] += 1
        if verdict == "silent":
            read = words_known(script)
            print(f"seed {seed}\n{script}\nbash {words_of_bash(script)}\nread {read}\n")
    print(", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items())))
    return bool(counts["silent"])


if __name__ == "__main__":
    sys.exit(main())
