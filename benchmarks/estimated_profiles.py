"""The estimated profiles that ship, made again by the commands of profiles/README.md.

    python benchmarks/estimated_profiles.py [--write] [NAME...]

Each must come out as it is shipped; versions of torch and Python may differ, and times in what
rounding does to sums. With --write one that differs, or is not there, is replaced.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

# a checkout in which nothing is installed
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from partopt import documents
from partopt.documents.profile import Environment, Profile

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    """A line for each profile; exits with 1 where one differs and is not replaced."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="these alone")
    parser.add_argument("--write", action="store_true", help="replace those that differ")
    given = parser.parse_args()
    differ = 0
    for words in commands():
        shipped = ROOT / words[-1]
        if given.names and not any(shipped.name.startswith(name) for name in given.names):
            continue
        made = make(words)
        same = shipped.exists() and without_versions(made) == without_versions(shipped.read_bytes())
        if not same and given.write:
            shipped.write_bytes(made)
        differ += not (same or given.write)
        verdict = "the same" if same else "written" if given.write else "DIFFERS"
        print(f"{shipped.name:46} {len(made) / 1000:4.0f} kB  {verdict}", flush=True)
    sys.exit(differ > 0)


def commands() -> list[list[str]]:
    """The commands of profiles/README.md, each ending in the file that it writes."""
    text = (ROOT / "profiles" / "README.md").read_text()
    lines = [line for line in text.splitlines() if line.startswith("partopt profile ")]
    return [shlex.split(line)[1:] for line in lines]


def make(words: list[str]) -> bytes:
    """The profile that a command writes."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "profile.json"
        command = [sys.executable, "-m", "partopt", *words[:-1], str(output)]
        subprocess.run(command, check=True, capture_output=True, cwd=ROOT)
        return output.read_bytes()


def without_versions(content: bytes) -> object:
    """The profile without the versions that it was made with, numbers to nine digits."""
    profile = msgspec.structs.replace(Profile.parse(content), environment=Environment())
    return json.loads(documents.encode(profile), parse_float=lambda text: f"{float(text):.9g}")


if __name__ == "__main__":
    main()
