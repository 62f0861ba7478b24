"""docs/how-it-works.md: the worked example computed again, and every function that it names."""

import importlib
import math
import re
from dataclasses import replace

import click
import pytest

from partopt import planners
from partopt.cli import VERBS
from partopt.cost.collectives import allreduce_s
from partopt.cost.messages import transfer_s
from partopt.cost.pricing import price
from partopt.cost.problem import CONTIGUOUS, Partition, consecutive, problem_of
from partopt.documents.plan import noam
from partopt.documents.profile import Profile
from partopt.documents.topology import Topology
from partopt.planners.pipedream import cut_s, stage_s
from tests.docs.documents import NAMES, blocks, read
from tests.helpers import ROOT

FORMATS = read("formats.md")
PROBLEM = problem_of(
    Profile.parse(blocks(FORMATS, "json")[0].encode()),
    Topology.parse(blocks(FORMATS, "yaml")[0].encode()),
)
SYNCHRONOUS = problem_of(PROBLEM.profile, PROBLEM.topology, schedule="1f1b", microbatches=8)
ON_A_BUS = problem_of(
    PROBLEM.profile,
    Topology.parse(b"""
name: bus
device: {name: GPU}
levels: [{name: host, size: 3, bandwidth: 10 GB/s, bus: true}]
"""),
)
SPLIT = Partition(CONTIGUOUS, consecutive([0, 2, 3], [2, 1]))
CHAIN, TOPOLOGY, PLAN = PROBLEM.chain, PROBLEM.topology, price(SPLIT, PROBLEM, "manual")
ITERATED = price(SPLIT, SYNCHRONOUS, "manual")
LOADS = {load.what: load.seconds for load in PLAN.predicted.estimate.loads}
B = TOPOLOGY.levels[0].bandwidth_bytes_per_s
MS, MB = 1e3, 1e-6
STEPPING = replace(CHAIN, optimizer_s=1.9 / MS).with_steps()

# What the functions say of every line of the worked example, in its units.
COMPUTED = {
    "a(1)": lambda: CHAIN.a[1] * MB,
    "a(2)": lambda: CHAIN.a[2] * MB,
    "C(0,2)": lambda: CHAIN.compute_s(0, 2) * MS,
    "C(2,3)": lambda: CHAIN.compute_s(2, 3) * MS,
    "W(0,2)": lambda: CHAIN.parameter_bytes(0, 2) * MB,
    "W(0,3)": lambda: CHAIN.parameter_bytes(0, 3) * MB,
    "stash(0,2)": lambda: CHAIN.stash_bytes(0, 2) * MB,
    "transfer of a(2)": lambda: transfer_s(CHAIN.a[2], 1, TOPOLOGY) * MS,
    "allreduce of stage 0": lambda: (
        allreduce_s(CHAIN.parameter_bytes(0, 2), range(2), TOPOLOGY) * MS
    ),
    "compute load 0": lambda: LOADS["compute"] * MS,
    "tied exchange": lambda: PLAN.stages[0].tied_exchange_s * MS,
    "all-reduce load 0": lambda: LOADS["all-reduce"] * MS,
    "cut 1": lambda: LOADS["cut"] * MS,
    "ports of stage 0": lambda: LOADS["ports"] * MS,
    "compute load 1": lambda: PLAN.stages[1].compute_s * MS,
    "all-reduce load 1": lambda: PLAN.stages[1].gradients_s * MS,
    "period": lambda: PLAN.predicted.estimate.period_s * MS,
    "samples/s": lambda: PLAN.predicted.samples_per_s,
    "speedup": lambda: PLAN.predicted.speedup_over_one_device,
    "bubble": lambda: PLAN.predicted.bubble,
    "period, host a bus": lambda: price(SPLIT, ON_A_BUS, "manual").predicted.period_s * MS,
    "data parallel period": lambda: planners.plan("data_parallel", PROBLEM).predicted.period_s * MS,
    "NOAM": lambda: noam(3, 2),
    "in flight 0": lambda: PLAN.stages[0].in_flight,
    "in flight 1": lambda: PLAN.stages[1].in_flight,
    "warm-up 0": lambda: PLAN.stages[0].warmup,
    "memory 0": lambda: PLAN.stages[0].memory.total_bytes * MB,
    "memory 1": lambda: PLAN.stages[1].memory.total_bytes * MB,
    "update of stage 0": lambda: ITERATED.stages[0].gradients_s * MS,
    "update of stage 1": lambda: ITERATED.stages[1].gradients_s * MS,
    "1F1B iteration, M=8": lambda: (ITERATED.predicted.iteration_s or 0) * MS,
    "T(0..2, 2)": lambda: (
        stage_s.py_func(CHAIN.compute_s(0, 2), CHAIN.parameter_bytes(0, 2), 2, B) * MS
    ),
    "T(0..3, 3)": lambda: (
        stage_s.py_func(CHAIN.compute_s(0, 3), CHAIN.parameter_bytes(0, 3), 3, B) * MS
    ),
    "recurrence's cut 2": lambda: cut_s(CHAIN.a[2], B) * MS,
    "A(0..3, 3)": lambda: planners.decide("pipedream", PROBLEM).certificate.objective_s * MS,
    "steps of stage 0": lambda: STEPPING.steps_s(0, 2) * MS,
    "steps of stage 1": lambda: STEPPING.steps_s(2, 3) * MS,
}
# lines for which the page has no room; the optimizer steps in 1.9 ms
MORE = """\
transfer of a(2)      = 0.01+12/10                                       = 1.21
samples/s             = 4/0.0045                                         = 888.89
speedup               = 12/4.5                                           = 2.667
warm-up 0             = floor((2+1-1)/2)                                 = 1
compute load 1        = 3/1                                              = 3
a(1)                  = 8                                                = 8
C(2,3)                = 1+2                                              = 3
W(0,3)                = 10+6+140-4                                       = 152
all-reduce load 1     = (0+0.42)/1                                       = 0.42
period, host a bus    = max(4.5, 2*(2-1)*(16+4)/10/2, 2*12/10)           = 4.5
data parallel period  = max(12, 2*2/3*152/10+2*2*0.01)/3                 = 6.769
NOAM                  = ceil(3/2)                                        = 2
in flight 1           = ceil(1/1)                                        = 1
memory 1              = 1*140+140+2*140+1*5+1*(12+0)                     = 577
update of stage 1     = 0+0.42                                           = 0.42
T(0..2, 2)            = max(9, 2*(2-1)*16/10)/2                          = 4.5
T(0..3, 3)            = max(12, 2*(3-1)*152/10)/3                        = 20.27
recurrence's cut 2    = 2*12/10                                          = 2.4
A(0..3, 3)            = max(4.5, 2.4, 3)                                 = 4.5
steps of stage 0      = (10+6)/152*1.9                                   = 0.2
steps of stage 1      = (140-4)/152*1.9                                  = 1.7
"""
LINES = [
    re.split(r" += ", line)
    for text in (blocks(read("how-it-works.md"), "worked")[0], MORE)
    for line in text.splitlines()
]


def test_arithmetic_printed_value_and_function_agree():
    assert sorted(name for name, _, _ in LINES) == sorted(COMPUTED)
    for name, arithmetic, printed in LINES:
        value = eval(arithmetic, {"max": max, "ceil": math.ceil, "floor": math.floor})
        decimals = len(printed.partition(".")[2])
        assert round(value, decimals) == float(printed), name
        # an arithmetic line may use numbers that an earlier line printed, to its digits
        assert COMPUTED[name]() == pytest.approx(value, rel=1e-9), name


OF_TRAINERS = {
    *("--num-layers", "--pipeline-parallel-size", "--pp-size", "--use-tp-pp-dp-mapping"),
    *("--moe-layer-freq", "--use-megatron-fsdp", "--megatron-fsdp-main-grads-dtype"),
}


def flags():
    """Every flag of every command."""
    commands = [importlib.import_module(module).command for module, _ in VERBS.values()]
    for command in commands:
        if isinstance(command, click.Group):
            group = click.Context(command)
            commands += [command.get_command(group, name) for name in command.list_commands(group)]
    return {flag for each in commands for parameter in each.params for flag in parameter.opts}


@pytest.mark.slow
def test_what_a_document_names_exists():
    """Functions, flags, files, and what its links lead to."""
    known = flags() | {"--help"}
    for document in NAMES:
        text = read(document)
        for name in sorted(set(re.findall(r"`(partopt(?:\.\w+)+)`", text))):
            if name != "partopt.planners.even":  # the example of extending.md
                assert resolve(name) is not None, (document, name)
        codes = re.findall(r"`((?:partopt|--)[^`\n]*)`", text)
        named = {flag for code in codes for flag in re.findall(r"(?<![\w-])--[a-z-]+", code)}
        assert named - (OF_TRAINERS if document == "trainers.md" else set()) <= known, document
        for name in re.findall(r"\b(?:benchmarks|tests|docs|examples)/[\w./-]+\.py", text):
            assert (ROOT / name).exists(), (document, name)
        for target in re.findall(r"\]\(([^)#:]+)\)", text):
            assert (ROOT / "docs" / target).exists(), (document, target)


def resolve(name):
    """The module, class, function or constant of a dotted name."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            found = getattr(found, part)
        return found
    raise ModuleNotFoundError(name)
