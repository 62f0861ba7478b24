"""The terms of the pages, each in a sentence or two."""

from __future__ import annotations

import re

import click

from partopt.report.text import label_lines

TERMS = {
    "stage": "Consecutive layers that run together, on one rank or on several replicas.",
    "rank": "The number of a device, counted through the cluster; of a group of devices where a "
    "profile is of one.",
    "replica": "One of the ranks that run the same stage on different microbatches, or on parts of "
    "each.",
    "microbatch": "The samples that go through a stage at once; `microbatch 2` has two.",
    "shape": "The replicas of each stage in order: 4-12 is a stage on 4 ranks, then one on 12; "
    "1x16 is sixteen stages on one each.",
    "schedule": "The order in which each rank runs forwards and backwards.",
    "compute": "Seconds of a stage's forward and backward for each microbatch, after its replicas "
    "have shared the work.",
    "sync": "Seconds for each microbatch in which the replicas of a stage exchange gradients; a "
    "dash where there is one replica.",
    "flight": "Microbatches whose activations a replica holds at once, waiting for their backward.",
    "NOAM": "Microbatches in flight for each replica of the first stage: PipeDream's number of "
    "optimal active minibatches.",
    "memory": "Bytes that the fullest device holds at its peak, against the limit of each device.",
    "busy": "The share of the time in which a stage or a rank works, as a bar or in percent.",
    "period": "Seconds from one microbatch to the next in steady state; of synchronous schedules "
    "those of an iteration, divided by its microbatches.",
    "iteration": "The microbatches between two steps of the optimizer, of synchronous schedules.",
    "binds": "What the period waits for: memory, where lifting its limit gains most, else "
    "the compute of a stage, an exchange of gradients, a cut's messages, or the microbatches in "
    "flight.",
    "slack": "The share of the time for which the other loads are idle, the tightest first; for "
    "memory the share that is free.",
    "speed": "Tokens trained a second where the profile knows them, else samples; `times one "
    "device` is against one device that runs the whole model.",
    "idle": "The share of the devices' time in which they do not compute, also called the bubble.",
    "bubble": "The share of the devices' time in which they do not compute.",
    "proof": "What is proven of the plan, and among which plans: those of its schedule, "
    "microbatches and memory limit; a number is a lower bound of the period of any of them.",
    "formula": "The period by the formulas alone, where the simulator found another.",
    "tried": "The best plans at the other microbatch sizes.",
    "fits": "Whether the fullest device holds no more than its memory.",
    "advice": "What costs most, and changes that were simulated before they are given.",
}


def explain(page: str) -> str:
    """The terms that stand on a page and what they mean, a term a line."""
    bare = click.unstyle(page)
    found = [
        (term, text)
        for term, text in TERMS.items()
        if re.search(rf"\b{term}(?:s|es)?\b", bare, re.IGNORECASE)
    ]
    return label_lines(found)
