"""Random faults in real runs: who is named, how soon all is over, and what is left.

    python benchmarks/kills.py [--count 50] [--seed 1] [--json]

Every run is `partopt run` itself, in a session of its own, on a model that trains for ever; one
fault strikes it at a random time or in a random action. Then no process of the session may be left,
no listening port, no file, and the last checkpoint has to be whole: the running statistics of every
layer have counted each microbatch of its steps. A rank waits for another for 10 s here, and not for
10 minutes. A slow one is no fault: its run goes on, until Ctrl-C ends it.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from faults import PARENT, RANKS, SIGNALS, SLOW, Fault, M, draw, is_named
from faulty_model import SLOW_S
from left_behind import check_last, files_left, listening, processes_left
from machine import describe

from partopt import Job, Topology, cli, measure_source, solve
from partopt.runtime import processes
from partopt.runtime.checkpoint import checkpoints

MODEL = Path(__file__).parent / "faulty_model.py"
SIDE_BY_SIDE = 5
WAIT_S = 10.0  # instead of that of a run
STOPPED_S = 2.5  # between Ctrl-Z and `fg`
STUCK_S = 60.0  # after which a run will never end


class Outcome(NamedTuple):
    """What came of it.

    `left` names processes, ports and files; `broken` says what is wrong with the last checkpoint,
    which is of so many `steps`.
    """

    fault: Fault
    code: int
    text: str
    named: bool
    seconds: float
    left: list[str]
    steps: int
    broken: str


def run_all(faults: Sequence[Fault], folder: Path) -> list[Outcome]:
    """The outcomes of all, several at a time; this process must have a single thread."""
    prepare(faults, folder)
    gc.collect()
    gc.freeze()
    waiting, running_ = list(faults), 0
    while waiting or running_:
        if waiting and running_ < SIDE_BY_SIDE:
            _fork(partial(watch, waiting.pop(0), folder))
            running_ += 1
        else:
            os.wait()
            running_ -= 1
    found = [json.loads((folder / f"{fault.number}.json").read_text()) for fault in faults]
    return [Outcome(fault, *rest) for fault, (_, *rest) in zip(faults, found, strict=True)]


def prepare(faults: Sequence[Fault], folder: Path) -> None:
    """Write a plan for each shape of a run."""
    profile = measure_source(MODEL, microbatch_sizes=[4], steps=1, granularity="block")
    for fault in {fault.plan: fault for fault in faults}.values():
        level = f"{{name: host, size: {fault.ranks}, bandwidth: 1 GB/s}}"
        text = f"name: here\ndevice: {{name: CPU, memory: 1 GB}}\nlevels: [{level}]\n"
        job = Job(
            profile,
            Topology.parse(text.encode(), "here.yaml"),
            schedule=fault.schedule,
            cuts=list(range(1, len(fault.replicas))),
            replicas=fault.replicas,
            microbatches=M,
        )
        solve(job).plan.save(str(folder / fault.plan))


def watch(fault: Fault, folder: Path) -> None:
    """Run, strike, and write down what came of it."""
    own = folder / str(fault.number)
    (own / "tmp").mkdir(parents=True)
    struck, ports = own / "struck", own / "ports"
    parent = _fork(partial(run, fault, own))
    if fault.time_s is not None:
        pids = _wait_for_ranks(parent, fault)
        while fault.later and not checkpoints(own / "saved"):
            time.sleep(0.01)
        time.sleep(fault.time_s)
        struck.write_text(repr(time.monotonic()))
        _strike(fault, parent, pids)
    elif fault.kind == SLOW:
        began = time.monotonic()
        while not struck.exists() and time.monotonic() < began + STUCK_S:
            time.sleep(0.01)
        time.sleep(SLOW_S + 0.5)
        struck.write_text(repr(time.monotonic()))
        os.killpg(parent, signal.SIGINT)  # which a run that has ended does not say anything of
    until, left = time.monotonic() + STUCK_S, []
    while (ended := os.waitpid(parent, os.WNOHANG))[0] == 0 and time.monotonic() < until:
        time.sleep(0.01)
    if ended[0] == 0:
        left.append("the run itself")
        os.kill(parent, signal.SIGKILL)
        ended = os.waitpid(parent, 0)
    left += processes_left(parent)
    seconds = time.monotonic() - float(struck.read_text()) if struck.exists() else STUCK_S
    left += ports.read_text().splitlines() if ports.exists() else []
    left += files_left(own / "tmp", own / "saved", fault)
    code, text = os.waitstatus_to_exitcode(ended[1]), (own / "output").read_text()
    named, last = is_named(fault, code, text), check_last(own / "saved", fault)
    outcome = Outcome(fault, code, text, named, seconds, left, *last)
    (folder / f"{fault.number}.json").write_text(json.dumps(outcome))


def _wait_for_ranks(parent: int, fault: Fault) -> list[int]:
    """The processes of the ranks, in their order."""
    children = Path(f"/proc/{parent}/task/{parent}/children")
    while len(pids := children.read_text().split()) < fault.ranks:
        time.sleep(0.01)
    return [int(pid) for pid in pids]


def _strike(fault: Fault, parent: int, pids: Sequence[int]) -> None:
    if fault.kind == "Ctrl-Z, Ctrl-C":
        os.killpg(parent, signal.SIGSTOP)
        time.sleep(STOPPED_S)
        os.killpg(parent, signal.SIGCONT)
        time.sleep(0.5)  # in which the run might give up
    if "Ctrl-C" in fault.kind:
        os.killpg(parent, signal.SIGINT)  # as a terminal does
    else:
        os.kill(parent if fault.kind in PARENT else pids[fault.rank], SIGNALS[fault.kind])


def run(fault: Fault, own: Path) -> NoReturn:
    """`partopt run`, as the first process of a session."""
    os.setsid()
    output = os.open(own / "output", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ["FAULT"] = json.dumps(fault._asdict() | {"struck": str(own / "struck")})
    tempfile.tempdir = str(own / "tmp")
    processes.WAIT_S = WAIT_S
    saving = ["--save", str(own / "saved"), "--every", "1"] if fault.saves else []
    endless = ["--steps", "1000000", "--engine", fault.engine, *saving]
    code: Any = 0
    try:
        cli.main(["run", str(own.parent / fault.plan), str(MODEL), *endless])
    except SystemExit as left:
        code = left.code
    (own / "ports").write_text("\n".join(listening()))
    os._exit(code)


def _fork(do: Callable[[], object]) -> int:
    """The process that does this, and ends."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        do()
        code = 0
    finally:
        os._exit(code)


def table(outcomes: Sequence[Outcome]) -> str:
    """A line for each kind of fault."""
    columns = f"{'worst':>9}{'left':>6}{'checkpoints':>13}{'broken':>8}"
    lines = [f"{'':22}{'runs':>6}{'named':>7}{columns}"]
    for kind in RANKS + PARENT:
        own = [each for each in outcomes if each.fault.kind == kind]
        worst_s = max((each.seconds for each in own), default=0.0)
        left, saved = sum(len(each.left) for each in own), sum(each.steps > 0 for each in own)
        broken = sum(bool(each.broken) for each in own)
        lines.append(
            f"{kind:22}{len(own):6}{sum(each.named for each in own):7}{worst_s:7.1f} s"
            f"{left:6}{saved:13}{broken:8}"
        )
    return "\n".join(lines)


def main() -> None:
    """Print the table, or every outcome as JSON; exit code 1 where anything is wrong."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)  # processes are forked
    warnings.simplefilter("ignore")  # of torch, that it loads a checkpoint in one process
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        outcomes = run_all(draw(options.count, options.seed), Path(folder))
    if options.json:
        print(json.dumps([each._asdict() | {"fault": each.fault._asdict()} for each in outcomes]))
        return
    print(f"{describe()}\n{table(outcomes)}")
    print(f"\n{len(outcomes)} runs in {time.monotonic() - began:.0f} s, seed {options.seed}")
    wrong = [each for each in outcomes if not each.named or each.left or each.broken]
    for each in wrong:
        print(each, file=sys.stderr)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
