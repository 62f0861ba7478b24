"""Hostile input: documents, and values of options, changed at random and given to the command line.

    python benchmarks/fuzz.py [SUBJECT ...] [--count 10000] [--seed 0]

A subject is a kind of document that partopt reads, or a command whose options are changed. Every
answer has to come within 10 s, with an exit code of 0, 1 or 2, without a traceback, with at most
2,000 characters of error, and name no fault twice. What does not is printed, one of each kind; the
exit code is then 1. Commands run in this process and in a temporary folder, and start no others.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import json
import os
import re
import resource
import shlex
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import click
import yaml
from msgspec.structs import replace

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.setdefault("OMP_NUM_THREADS", "1")

from partopt import cli
from partopt.errors import PartoptError

LIMIT_S, LIMIT_CHARACTERS, LIMIT_BYTES = 10, 2_000, 32 * 10**9
NUMBERS = [0, -1, 1, 2, 3, 7, -0.0, 0.5, 1e-300, 1e300, 2**31, 2**53, 2**63, 2**64, 10**30]
TEXTS = ["", "x", "é", "x" * 3000, "\x1b[31m", "a b", "1 GB", "\ud800", "1" * 400]
VALUES = [None, True, False, [], {}, [1], [[]], {"a": 1}, *NUMBERS, *TEXTS]
CHARACTERS = "0123456789-+.,;:=|*()[]{}'\"#&!<>%@ \t\n\\/eENxt\x00\x7fé"
GRAPH = (
    "node1 -- Input0 -- forward_compute_time=1.0, backward_compute_time=0.0, "
    "activation_size=10.0, parameter_size=0.0\n"
    "node2 -- Linear(1, 2) -- forward_compute_time=1.0, backward_compute_time=2.0, "
    "activation_size=[4.0; 6.0], parameter_size=7.0\n"
    "\tnode1 -- node2\n"
)
MODEL = """import torch
class Model(torch.nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.wte, self.ln_f, self.lm_head = (torch.nn.Linear(4, 4) for _ in range(3))
        self.h = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))
    def forward(self, x):
        for layer in (self.wte, *self.h, self.ln_f, self.lm_head):
            x = layer(x)
        return x
build = Model
example_inputs = lambda batch_size: torch.randn(batch_size, 4)
"""
# configurations of trainers in every language that is read, with the idioms of each
SHELL = """#!/bin/bash
#SBATCH --nodes=2 --gpus-per-node=8
source env.sh
TP=${TP:-2}; PP=$((8 / TP > 4 ? 4 : 8 / TP))
if [ -z "$MBS" ]; then MBS=1; elif [[ $MBS == a* || -f x ]]; then exit 1; fi
A=(--num-layers 16 --hidden-size 1024 # sizes
   --num-attention-heads 16)
for i in 1 2; do GBS=$((${GBS:-16} * 2)); done
case $TP in 2|4) A+=("--seq-length 1024");; *) A+=(--seq-length 512);; esac
f() { local V=${1%k}; echo $((V * 1000)); }
cat <<EOT > ds.json
{"train_micro_batch_size_per_gpu": $MBS, "zero_optimization": {"stage": 1}}
EOT
O=" --micro-batch-size $MBS \\
    --global-batch-size $GBS --vocab-size $(f 32k) --bf16 $MORE"
srun bash -c "torchrun --nnodes \\$N pretrain_gpt.py ${A[*]} $O \\
    --tensor-model-parallel-size $TP --pipeline-model-parallel-size $PP" 2>&1 | tee log
"""
FLAGS = """ENV: {A: 1}
BASE: &base
  --num-layers: 16
  --hidden-size: 1024
ARGS:
  <<: *base
  --num-attention-heads: ${ARGS.hidden_size}
  --seq-length: ${multiply:2, ${.num_attention_heads}}
  --micro-batch-size: ${MBS:1}
  --vocab-size: 32000
  --bf16: true
"""
RECIPE = """from lib import Bridge, base, common, with_batch
GB = 8 * 4
def part(tp=2, *, wide=False):
    return dict(tensor_model_parallel_size=tp * 2 if wide else tp)
def recipe(name="llama3-8b", seq=2048):
    cfg = base()
    cfg.model = Bridge.from_hf_pretrained(name, **part(4)).to_provider()
    cfg.model.seq_length = seq
    for i in range(2):
        cfg.train.micro_batch_size = i + 1
    if seq > 1024 and cfg.model:
        cfg.train["global_batch_size"] = GB
    common(cfg)
    return with_batch(cfg, 64)
"""
TITAN = """[model]
name = "llama3"
flavor = "8B" # or 70B
[training]
local_batch_size = 1
seq_len = 2048
[parallelism]
tensor_parallel_degree = 2
"""
CONFIGURATIONS = {
    "megatron": [SHELL, FLAGS],
    "deepspeed": [SHELL],
    "megatron-bridge": [RECIPE],
    "torchtitan": [TITAN],
}
PLAUSIBLE = """
1 2 3 4 8 -1 0 1,2 2,2 5,9 1e3 nan inf 1e400 auto all - -- . .. / * = a=b a=1 *2* head=head cpu gloo
x.json x.csv x.et x.svg x.html x.py x.txt p.json plan.json c.yaml m.py v100-pcie h100 gpipe optimal
grid manual 1f1b zb-h1 dualpipev interleaved megatron torch vllm flows cluster=1GB/s server=5us
cluster=2 0=1.5 5% 10us 1GB 9ms 0s,1s 99999999999999999999
"""
WORDS = [*PLAUSIBLE.split(), "", "x" * 5000, "\udcff", "1,2," * 2000, "1" * 400]

PLAN, ON = "plan p.json --topology c.yaml", "--profile p.json --topology c.yaml"
OF_TWO = "--onto two.json --plan two.plan.json -o -"
SHOW = ["show {}", "show {} --json"]
DRAW = [*SHOW, "report plan.json {} -o -"]
PLANS = [
    *(
        "show {}",
        "simulate {}",
        "simulate {} -o -",
        "simulate {} --schedule gpipe --microbatches 4",
    ),
    *("show --verify {} --profile p.json", "export {} --to flows", "export {} --to megatron"),
]
# by kind: the command that writes one, or its file; and those that read it
DOCUMENTS: dict[str, tuple[str, list[str]]] = {
    "plan": (f"{PLAN} --schedule 1f1b --microbatches 6 --recompute auto -o -", PLANS),
    "plan asynchronous": (f"{PLAN} -o -", PLANS),
    "plan auto": (f"{PLAN} --schedule auto --microbatches 8 -o -", PLANS),
    "plan interleaved": (f"{PLAN} --schedule interleaved --microbatches 8 -o -", PLANS),
    "profile": ("p.json", ["show {}", "show {} p.json", PLAN.replace("p.json", "{}")]),
    "topology": ("c.yaml", ["show {}", PLAN.replace("c.yaml", "{}")]),
    "device": ("device.yaml", ["show {}"]),
    "simulation": ("simulate plan.json --json", SHOW),
    "comparison": (PLAN.replace("plan", "compare") + " --json", DRAW),
    "scaling": (f"{PLAN} --scaling 1,2,4 --json", DRAW),
    "verification": ("show --verify plan.json --profile p.json --json", SHOW),
    "trial": ("schedule 1f1b --json", SHOW),
    "flows": ("export plan.json --to flows -o flows.json", SHOW),
    "run": ("run.json", [*DRAW, "profile --from-run {} --onto p.json -o -"]),
    "graph": ("graph.txt", ["import pipedream {} -o -"]),
    "trace": ("trace.json", [f"import torch-profile {{}} {OF_TWO}"]),
    "order": ("simulate plan.json -o order.csv", ["simulate plan.json --schedule {}"]),
}
COMMANDS = {
    "plan": PLAN,
    "compare": f"{PLAN.replace('plan', 'compare')}",
    "simulate": "simulate plan.json",
    "schedule": "schedule 1f1b",
    "report": "report plan.json comparison.json --profile p.json",
    "run": "run plan.json m.py",
    "export": "export plan.json --to flows",
    "show": "show plan.json",
    "import pipedream": "import pipedream graph.txt -o -",
    "import torch-profile": f"import torch-profile trace.json {OF_TWO}",
    "import vllm": f"import vllm 1,1,1 {ON}",
    "topology show": "topology show v100-pcie",
    "topology measure": "topology measure -o -",
    "schema": "schema plan",
    "profile": "profile m.py --microbatch 1 --device cpu -o -",
}


def places(node: Any, here: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of everything inside `node`."""
    pairs = node.items() if isinstance(node, dict) else enumerate(node)
    for key, value in pairs:
        yield (*here, key)
        yield from places(value, (*here, key)) if isinstance(value, dict | list) else ()


def change_values(original: Any, random: Random, times: int = 1) -> Any:
    """The document with `times` of its values replaced, removed, repeated or moved."""
    document = copy.deepcopy(original)
    for _ in range(times):
        path = random.choice(list(places(document)) or [("schema",)])
        parent = document
        for step in path[:-1]:
            parent = parent[step]
        change = random.choice(["replace", "replace", "near", "remove", "repeat", "swap"])
        old = parent.get(path[-1]) if isinstance(parent, dict) else parent[path[-1]]
        if change == "remove" and path[-1] in parent:
            del parent[path[-1]]
        elif change == "near" and type(old) in (int, float):
            parent[path[-1]] = random.choice([old + 1, old - 1, -old, old * 2, old * 1e9])
        elif change == "repeat" and isinstance(parent, list):
            parent += [copy.deepcopy(old)] * random.choice([1, 1, 50])
        elif change == "swap" and isinstance(parent, list):
            random.shuffle(parent)
        else:
            parent[path[-1]] = copy.deepcopy(random.choice(VALUES))
    return document


def change_text(text: str, random: Random, times: int = 1) -> str:
    """The text with `times` of its stretches removed, repeated or written over."""
    for _ in range(times):
        start = random.randint(0, len(text))
        stop = min(len(text), start + random.choice([0, 1, 1, 3, 9, 80]))
        new = "".join(random.choice(CHARACTERS) for _ in range(random.choice([0, 1, 1, 4])))
        again = text[start:stop] * random.choice([2, 2, 100])
        text = text[:start] + random.choice([new, new, again, "[" * 5000]) + text[stop:]
    return text


class Document(NamedTuple):
    """Contents, plain data or texts, of which one is changed, and commands that read its file."""

    contents: list[Any]
    readers: list[str]
    suffix: str = ".txt"

    def plain(self) -> Iterator[list[str]]:
        """The commands on a file that is not changed."""
        path, content = Path(f"plain{self.suffix}"), self.contents[0]
        path.write_text(content if isinstance(content, str) else self.dump(content))
        return ([word.format(path) for word in line.split()] for line in self.readers)

    def draw(self, random: Random) -> tuple[list[str], bool]:
        """A command on a changed file, and whether one value alone is changed."""
        content, times = random.choice(self.contents), random.choice([1, 1, 1, 2, 3])
        text = content if isinstance(content, str) else self.dump(content)
        if isinstance(content, str) or random.random() < 0.25:
            text, times = change_text(text, random, times), 0
        else:
            text = self.dump(change_values(content, random, times))
        path = Path(f"changed{self.suffix}")
        path.write_bytes(text.encode(errors="surrogatepass"))
        return [word.format(path) for word in random.choice(self.readers).split()], times == 1

    def dump(self, content: Any) -> str:
        """The text of plain data."""
        return yaml.safe_dump(content) if self.suffix == ".yaml" else json.dumps(content)


class Options(NamedTuple):
    """A command line, to which one to three options are added; or a word of it is changed."""

    line: str

    def plain(self) -> Iterator[list[str]]:
        """The command line alone."""
        yield self.line.split()

    def draw(self, random: Random) -> tuple[list[str], bool]:
        """A command with other values of its options."""
        words = self.line.split()
        command: click.Command = cli.partopt
        for word in words:
            if not isinstance(command, click.Group):
                break
            command = command.get_command(click.Context(command), word)
        given = [each for each in command.params if isinstance(each, click.Option)]
        given = [each for each in given if each.name != "compile"]  # torch takes long
        for option in random.choices(given, k=random.choice([1, 1, 2, 3])) if given else []:
            value = random.choice(WORDS)
            if isinstance(option.type, click.Choice) and random.random() < 0.7:
                value = random.choice(list(option.type.choices))
            elif random.random() < 0.3:
                value = change_text(value[:50], random)
            words += [option.opts[-1]] if option.is_flag else [option.opts[-1], value]
        if random.random() < 0.2 or not given:
            words[random.randrange(1, len(words))] = random.choice(WORDS)
        return [word.replace("\0", "") for word in words], False  # as in every command line


class Late(BaseException):
    """A command took longer than the limit."""


def answer(words: list[str], limit_s: int = LIMIT_S + 1) -> tuple[int, str, str, float]:
    """The exit code of a command, its standard output and error, and its seconds.

    `limit_s` of 0 is none: the first call of a command may compile.
    """
    raw, error, began = io.BytesIO(), io.StringIO(), time.perf_counter()
    out, sys.stdin = io.TextIOWrapper(raw, errors="replace"), io.TextIOWrapper(io.BytesIO())
    signal.alarm(limit_s)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
            cli.main(words)
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else 70
    except BaseException:
        code = 70
        error.write(traceback.format_exc())
    finally:
        signal.alarm(0)
    return (
        code,
        raw.getvalue().decode(errors="replace"),
        error.getvalue(),
        time.perf_counter() - began,
    )


def find_fault(code: int, error: str, seconds: float, alone: bool) -> str:
    """What is wrong with an answer; `alone`: to an input with one change."""
    lines = [re.sub(r"[0-9]+", "#", line) for line in error.splitlines() if line[:6] == "error:"]
    if seconds > LIMIT_S:
        return "late"
    if code not in (0, 1, 2) or "Traceback" in error:
        return "broken"
    if code and len(error) > LIMIT_CHARACTERS:
        return "long"
    if alone and len(set(lines)) < len(lines):
        return "twice"
    return "" if lines or code == 0 else "silent"


def write_files() -> None:
    """Files of a small model and four devices in the current folder."""
    from partopt import Job, solve
    from partopt.documents.topology import Topology
    from tests.helpers import ROOT, chain_profile, two_level
    from tests.importers import traces
    from tests.report.pictures import cases
    from tests.trainers.models import transformer

    names, sizes = ["wte", "h.0", "h.1", "h.2", "ln_f", "lm_head"], [8 * 10**6] * 6
    kept = {"tensors": [(0, [1, 2], 9)], "stash_groups": [([0, 2], 7)]}
    tied = [("tied", [0, 5], 10**6)]
    profile = chain_profile([1e-3] * 6, None, sizes, sizes, names=names, shared=tied, **kept)
    profile.save("p.json")
    cluster: Topology = two_level(2, 2, outer_latency=1e-6, memory_bytes=10**9)
    for name, text in {
        "c.yaml": cluster.dump(),
        "device.yaml": (ROOT / "devices/v100.yaml").read_text(),
        "m.py": MODEL,
        "graph.txt": GRAPH,
    }.items():
        Path(name).write_text(text)
    transformer(12).save("t.json")
    two = chain_profile([1e-3] * 2, names=["first", "second"])
    two.save("two.json")
    by_hand = Job(two, cluster, planner="manual", cuts=(1,), replicas=(1, 1))
    solve(by_hand).plan.save("two.plan.json")
    traces.write(Path("trace.json"), [*traces.on_gpu(), *traces.on_gpu(1e4)])
    ran = cases.run(3)
    stages = [
        replace(stage, start=2 * s, modules=names[2 * s : 2 * s + 2])
        for s, stage in enumerate(ran.stages)
    ]
    ran_plan = replace(ran.plan, parameter_bytes=profile.parameter_bytes())
    replace(ran, plan=ran_plan, stages=stages).save("run.json")


def find_subjects() -> dict[str, Document | Options]:
    """Every kind of document, and every command."""
    from tests.trainers.test_reading import SAME

    write_files()
    found: dict[str, Document | Options] = {}
    for name, (source, readers) in DOCUMENTS.items():
        last = source.split()[-1]
        path = Path(last if "." in last else f"{name}.json")
        if " " in source:
            code, out, error, _ = answer(source.split(), limit_s=0)
            assert code == 0, error
            path.write_text(path.read_text() if "." in last else out)
        parse = {".json": json.loads, ".yaml": yaml.safe_load}.get(path.suffix, str)
        found[name] = Document([parse(path.read_text())], readers, path.suffix)
    for trainer in {trainer for trainer, _ in SAME}:
        texts = [text for each, text in SAME if each == trainer]
        reader = f"import {trainer} {{}} --profile t.json --topology c.yaml --servers 1"
        reader += "" if trainer in ("vllm", "sglang", "accelerate") else " --microbatches 8"
        found[f"layout of {trainer}"] = Document(texts, [f"{reader} --effort quick"])
    for trainer, texts in CONFIGURATIONS.items():
        reader = f"import {trainer} {{}} --topology dgx-h100 --servers 1 --set MORE= --json"
        found[f"configuration of {trainer}"] = Document(texts, [reader])
    return found | {f"options of {name}": Options(line) for name, line in COMMANDS.items()}


def fuzz(name: str, subject: Document | Options, count: int, seed: int, seeds: str) -> int:
    """Give `count` changed inputs to the command line; how many were answered wrongly."""
    random, wrong, told = Random(f"{name} {seed}"), 0, set()
    codes = [0, 0, 0]
    slowest = 0.0
    for words in subject.plain():  # compiles what they take
        answer(words, limit_s=0)
    for number in range(count):
        if number % 20 == 0:  # a command may have written over one
            shutil.copytree(seeds, Path.cwd(), dirs_exist_ok=True)
        words, alone = subject.draw(random)
        code, _, error, seconds = answer(words)
        slowest = max(slowest, seconds)
        fault = find_fault(code, error, seconds, alone)
        if not fault:
            codes[code] += 1
            continue
        wrong += 1
        if fault == "broken":  # again, to see where
            error = answer([*words, "--debug"])[2]
            error = "\n".join(error.splitlines()[-8:])
        kind = fault, re.sub("[0-9]+", "#", error)[-160:]
        if kind not in told and len(told) < 12:
            print(f"{name} {number}: {fault}, exit code {code}, {seconds:.1f} s")
            print(f"  {shlex.join(words)[:300]}\n{error[:900]}", flush=True)
            if isinstance(subject, Document) and os.environ.get("KEEP"):
                kept = Path(os.environ["KEEP"]) / f"{name} {seed} {number}{subject.suffix}".replace(
                    " ", "_"
                )
                kept.write_bytes(Path(f"changed{subject.suffix}").read_bytes())
        told.add(kind)
    print(
        f"{name}: {count} run, {wrong} wrong; exit codes {codes}; slowest {slowest:.1f} s",
        flush=True,
    )
    return wrong


def main() -> int:
    """Fuzz the subjects named, by default all; 1 where one is answered wrongly."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("subjects", nargs="*")
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES, LIMIT_BYTES))

    def give_up(*_: object) -> None:
        raise Late

    def start_none(_: object) -> None:
        raise PartoptError("no process is started here", code="fuzzing")

    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    signal.signal(signal.SIGALRM, give_up)
    BaseProcess.start = start_none  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        subjects = find_subjects()
        wrong = 0
        for name in given.subjects or subjects:
            with tempfile.TemporaryDirectory() as own, contextlib.chdir(own):
                shutil.copytree(folder, own, dirs_exist_ok=True)
                wrong += fuzz(name, subjects[name], given.count, given.seed, folder)
        return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
