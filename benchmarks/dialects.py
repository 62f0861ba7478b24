"""How much is read of scripts in other words than Megatron's: `benchmarks/dialects.py FOLDER`.

Scripts under the folder that train by ms-swift, verl or slime are read for as many devices as they
say. One is read, or read with one question answered or two, or refused by name; with -v its notes
and reasons are printed, too. verl's by other engines than Megatron's count apart.
"""

from __future__ import annotations

import collections
import re
import sys
from pathlib import Path

from partopt import Topology
from partopt.errors import PartoptError
from partopt.search.jobs import read_job

ANSWERS = {"tokens_per_sample": "max", "DEVICE": "gpu"}
ASKED = re.compile(r"`arguments=(\w+)=")
QUESTIONS = ("missing-setting", "unknown-variable")
DIALECTS = {  # by what only their scripts that train have
    "ms-swift": r"(?m)^[^#\n]*\bmegatron(\s|\\\n)+(sft|pt|rlhf)\b",
    "verl": r"(?m)^[^#\n]*\bverl\.(trainer|experimental)",
    "slime": r"--actor-num-gpus-per-node",
}
SERVER = 8  # devices
TRIED = (8, 1, 2, 4, 16, 32, 64, 96, 128, 256, 512, 1024)


def cluster_of(devices: int) -> Topology:
    """Servers of eight H100, or one of fewer."""
    topology = Topology.load("dgx-h100", max(1, devices // SERVER))
    if devices >= SERVER:
        return topology
    inner, *outer = topology.levels
    levels = [type(inner)(**{**as_fields(inner), "size": devices}), *outer]
    return Topology(name=topology.name, device=topology.device, levels=levels)


def as_fields(level: object) -> dict[str, object]:
    """The fields of a level."""
    return {name: getattr(level, name) for name in level.__struct_fields__}


def read(
    name: str, path: Path, devices: int, arguments: dict[str, str]
) -> tuple[bool, list[str], list[str]]:
    """Whether a script is read for so many devices, the notes or why not, and what is asked."""
    try:
        text = path.read_text(errors="replace")
        job, notes = read_job(name, text, cluster_of(devices), arguments, folder=path.parent)
    except PartoptError as error:
        hints = [part.hint or "" for part in error.parts if part.code in QUESTIONS]
        asked = [found[1] for found in map(ASKED.search, hints) if found]
        return False, [part.message for part in error.parts], asked
    layout = {key: value for key, value in as_fields(job.layout).items() if value is not None}
    said = f"{job.model.name}: {job.global_batch} of {job.sequence} tokens, {layout}, {job.facts}"
    return True, [said, *notes], []


def judge(name: str, path: Path) -> tuple[str, list[str]]:
    """How a script is read on the devices that it says, and what is noted of it."""
    arguments, reasons = dict[str, str](), list[str]()
    for _ in range(3):
        for devices in TRIED:
            done, said, asked = read(name, path, devices, arguments)
            stated = re.search("trains on ([0-9]+) devices", " ".join(said))
            if done and stated:
                done, said, asked = read(name, path, int(stated[1]), arguments)
            if done:
                outcome = ("read", "one question", "two questions")[len(arguments)]
                return outcome, [*reasons, *said]
            if asked or not any(re.search("devices|ranks of a stage", one) for one in said):
                break
        reasons += said
        if len(asked) != len(said) or len({*asked}) != 1 or asked[0] in arguments:
            break
        arguments[asked[0]] = ANSWERS.get(asked[0], "8192")
    apart = any("another engine than" in one for one in reasons)
    return ("another engine" if apart else "refused"), reasons


def main() -> None:
    """Print a line a script, and a table."""
    counts = collections.Counter[tuple[str, str]]()
    for path in sorted(Path(sys.argv[1]).rglob("*.sh")):
        text = path.read_text(errors="replace")
        for name in [name for name, pattern in DIALECTS.items() if re.search(pattern, text)][:1]:
            outcome, said = judge(name, path)
            counts[name, outcome] += 1
            print(f"{name:9} {outcome:14} {path}")
            for line in said if "-v" in sys.argv else ():
                print(f"    {line}")
    for (name, outcome), count in sorted(counts.items()):
        print(f"{name:9} {outcome:14} {count:4}")


if __name__ == "__main__":
    main()
