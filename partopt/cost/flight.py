"""Microbatches that a stage holds at once, versions of its weights, and forwards before its first
backward.
"""

from __future__ import annotations

from collections.abc import Sequence

# M        microbatches per iteration of a synchronous schedule
# S, s     stages, and which one
# r_s      replicas of stage s
# P, p     devices of one pipeline, and the place of one among them
# v        chunks, stages of one device

ASYNCHRONOUS = ("pipedream", "pipedream-2bw")
SYNCHRONOUS = ("1f1b", "1f1b-eager", "gpipe", "naive", "zb-h1")
SCHEDULES = ASYNCHRONOUS + SYNCHRONOUS  # one stage on each device
# several, all of them synchronous
CHUNKED = ("interleaved", "interleaved-zb", "zbv", "dualpipe", "dualpipev")


def noam(devices: int, input_replicas: int) -> int:
    """Minibatches in flight per input-stage replica: ceil(P / r_0) (PipeDream, SOSP 2019, section
    3.2).
    """
    return -(-devices // input_replicas)


def in_flight(schedule: str, s: int, replicas: Sequence[int], microbatches: int | None) -> int:
    """Microbatches that one replica of stage s holds between their forward and the end of their
    backward, at most; one stage a device.

    One more than the warm-up, and no more than the M/r_s that it gets in an iteration: pipedream
    and 1f1b ceil(sum of r_t over t >= s, over r_s), without replication S-s. gpipe: all that it
    gets. naive: 1. zb-h1: S on every stage.
    """
    assert schedule not in CHUNKED, "chunks_in_flight counts those of a device"
    if schedule == "naive":
        return 1
    downstream = _downstream(schedule, s, replicas) + 1
    if schedule in ASYNCHRONOUS:
        return downstream
    assert microbatches is not None
    own = -(-microbatches // replicas[s])
    if schedule == "zb-h1":
        return min(own, len(replicas))
    return own if schedule == "gpipe" else min(own, downstream)


def warmup(schedule: str, s: int, replicas: Sequence[int], microbatches: int | None) -> int:
    """Forwards that one replica of stage s does before it alternates: floor((sum of r_t over t >=
    s, less 1) / r_s) for pipedream.

    That is the devices downstream over its own, rounded up; twice as many devices for 1f1b-eager.
    No more than the M/r_s that it gets, less the one that it goes on with.
    """
    held = in_flight("1f1b" if schedule == "zb-h1" else schedule, s, replicas, microbatches)
    return held if schedule == "gpipe" else held - 1


def blocking_warmups(replicas: Sequence[int]) -> list[int]:
    """Forwards that each stage's replicas do first under pipedream, so that all-reduces that they
    wait for cannot deadlock.

    No gradient of a round leaves stage s+1 before all of its replicas have had their backward, for
    which it has taken in (w_{s+1} + 1) r_{s+1} microbatches; the replica of stage s that sends the
    last of these must get to it without a backward of that round: w_s >= ceil(((w_{s+1} + 1)
    r_{s+1} - 1) / r_s). PipeDream's own warm-up is less for 1-3-1 and deadlocks. Derived here.
    """
    warmups = [0] * len(replicas)
    for s in reversed(range(len(replicas) - 1)):
        taken_in = (warmups[s + 1] + 1) * replicas[s + 1]
        warmups[s] = max(warmup("pipedream", s, replicas, None), -(-(taken_in - 1) // replicas[s]))
    return warmups


def _downstream(schedule: str, s: int, replicas: Sequence[int]) -> int:
    """Microbatches that the devices after stage s work on, for each replica of it: ceil(sum of r_t
    over t > s, over r_s), eager twice.
    """
    devices = sum(replicas[s + 1 :]) * (2 if schedule == "1f1b-eager" else 1)
    return -(-devices // replicas[s])


def chunks_in_flight(schedule: str, p: int, P: int, v: int, microbatches: int) -> int:
    """Microbatches in flight on device p, those of all of its chunks together, under one of the
    CHUNKED schedules.

    interleaved: min(Mv, (v-1)G + 2(P-1-p) + 1) (Narayanan et al., "Efficient large-scale language
    model training on GPU clusters using Megatron-LM", SC 2021, section 2.2), G = P where P divides
    M. interleaved-zb: with (v-1)G + P, released at the weights' backward. zbv: 2P half-chunks,
    fewer of fewer than 2P microbatches. dualpipe: P+1, dualpipev: 2P+1 half-chunks.
    """
    own = v * microbatches
    if schedule == "zbv":
        return min(own, microbatches + 1 + p, 2 * P)
    if schedule in ("interleaved", "interleaved-zb"):
        group = microbatches // max(1, microbatches // P)
        return min(own, (v - 1) * group + (2 * (P - 1 - p) + 1 if schedule == "interleaved" else P))
    return {"dualpipe": P + 1, "dualpipev": 2 * P + 1}[schedule]


def weight_versions(schedule: str, held: int) -> int:
    """Versions of its weights that a stage keeps with `held` microbatches in flight: all of them
    for pipedream, 2 for 2BW, else 1.
    """
    return {"pipedream": held, "pipedream-2bw": 2}.get(schedule, 1)
