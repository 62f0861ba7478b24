"""Microbatches that a stage holds at once, versions of its weights, and forwards before its first backward."""

from __future__ import annotations

from collections.abc import Sequence

# M        microbatches per iteration of a synchronous schedule
# S, s     stages, and which one
# r_s      replicas of stage s

ASYNCHRONOUS = ("pipedream", "pipedream-2bw")
SYNCHRONOUS = ("1f1b", "gpipe", "naive")
SCHEDULES = ASYNCHRONOUS + SYNCHRONOUS


def noam(devices: int, input_replicas: int) -> int:
    """Minibatches in flight per input-stage replica: ceil(P / r_0) (PipeDream, SOSP 2019, section 3.2)."""
    return -(-devices // input_replicas)


def in_flight(schedule: str, s: int, replicas: Sequence[int], microbatches: int | None) -> int:
    """Microbatches that one replica of stage s holds between their forward and their backward, at most.

    pipedream and 1f1b: ceil(sum of r_t over t >= s, over r_s), for 1f1b no more than the M/r_s that it gets in an iteration; without
    replication that is S-s and min(M, S-s). gpipe: all that it gets. naive: 1.
    """
    if schedule == "naive":
        return 1
    downstream = -(-sum(replicas[s:]) // replicas[s])
    if schedule in ASYNCHRONOUS:
        return downstream
    assert microbatches is not None
    own = -(-microbatches // replicas[s])
    return own if schedule == "gpipe" else min(own, downstream)


def interleaved_in_flight(s: int, stages: int, chunks: int, microbatches: int) -> int:
    """Chunks in flight on device s of an interleaved schedule with v chunks per device: min(Mv, 2(S-1-s) + (v-1)S + 1).

    Narayanan et al., "Efficient large-scale language model training on GPU clusters using Megatron-LM", SC 2021, section 2.2.
    """
    return min(microbatches * chunks, 2 * (stages - 1 - s) + (chunks - 1) * stages + 1)


def warmup(schedule: str, s: int, replicas: Sequence[int], microbatches: int | None) -> int:
    """Forwards that one replica of stage s does before it alternates: floor((sum of r_t over t >= s, less 1) / r_s) for pipedream."""
    held = in_flight(schedule, s, replicas, microbatches)
    return held if schedule == "gpipe" else held - 1


def weight_versions(schedule: str, held: int) -> int:
    """Versions of its weights that a stage keeps with `held` microbatches in flight: all of them for pipedream, 2 for 2BW, else 1."""
    return {"pipedream": held, "pipedream-2bw": 2}.get(schedule, 1)
