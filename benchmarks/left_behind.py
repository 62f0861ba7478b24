"""What a run that ended leaves: processes, ports, files, and its last checkpoint."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from faults import Fault, M
from faulty_model import BLOCKS, build
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load

from partopt.runtime.checkpoint import checkpoints

LEFT_S = 2.0  # after which a process counts as left


def processes_left(session: int) -> list[str]:
    """What still runs of a session, after a while; it is killed."""
    until = time.monotonic() + LEFT_S
    while (found := list(_processes(session))) and time.monotonic() < until:
        time.sleep(0.01)
    for pid in found:
        os.kill(pid, signal.SIGKILL)
    return [f"process {pid}" for pid in found]


def _processes(session: int) -> Iterator[int]:
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, own = stat.read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if own == str(session) and state != "Z":
            yield int(stat.parent.name)


def listening() -> list[str]:
    """The ports that this process listens on."""
    own = {str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()}
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
                found.append(f"port {int(fields[1].rpartition(':')[2], 16)}")
    return found


def files_left(temporary: Path, saved: Path, fault: Fault) -> list[str]:
    """Temporary files, and parts of checkpoints: but where all were killed the next run tidies."""
    found = list(temporary.iterdir())
    if fault.kind != "parent killed":
        found += saved.glob(".*")
    return [str(path) for path in found]


def check_last(folder: Path, fault: Fault) -> tuple[int, str]:
    """The steps of the last checkpoint, if there is one, and what is wrong with it."""
    found = checkpoints(folder)
    if not found:
        return 0, ""
    steps = int(json.loads((found[-1] / "training.json").read_text())["steps"])
    known = FileSystemReader(found[-1]).read_metadata().state_dict_metadata
    state = {
        name: torch.empty(about.size, dtype=about.properties.dtype) for name, about in known.items()
    }
    if state.keys() != _entries():
        return steps, f"{found[-1]}: other entries: {state.keys() ^ _entries()}"
    load(state, checkpoint_id=found[-1], no_dist=True)
    counts = [int(state[f"buffer.{block}.norm.num_batches_tracked"]) for block in range(BLOCKS)]
    replicas = [*fault.replicas, *[fault.replicas[-1]] * BLOCKS][:BLOCKS]  # of each block
    if counts != [steps * M // r for r in replicas] or found[-1].name != f"step-{steps}":
        return steps, f"{found[-1]}: of {steps} steps, but layers have counted {counts}"
    return steps, ""


def _entries() -> set[str]:
    """What a whole checkpoint of the model has, trained by AdamW."""
    model = build()
    names = {name for name, _ in model.named_parameters()}
    found = {f"model.{name}" for name in names}
    found |= {f"buffer.{name}" for name, _ in model.named_buffers()}
    kinds = "exp_avg", "exp_avg_sq", "step"
    return found | {f"optimizer.{name}.{kind}" for name in names for kind in kinds}
