"""Small profiles and topologies for tests, built in code."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from partopt.documents.engine import Engine
from partopt.documents.plan import Plan
from partopt.documents.profile import (
    Device,
    Layer,
    LayerMeasurement,
    Measurement,
    Model,
    Profile,
    SharedParameter,
    StashGroup,
    Tensor,
)
from partopt.documents.topology import Device as ClusterDevice
from partopt.documents.topology import Level, Topology
from partopt.schedules import SCHEDULES

WAITING = Engine(waits=tuple(SCHEDULES))  # devices wait for their messages
BLOCKING = Engine(allreduce="blocking")  # and for their gradients

ROOT = Path(__file__).parent.parent


def measurement(
    forward: Sequence[float],
    backward: Sequence[float] | None = None,
    output_bytes: Sequence[int] | None = None,
    microbatch_size: int = 1,
    tensors: Sequence[tuple[int, Sequence[int], int]] = (),
    stash_groups: Sequence[tuple[Sequence[int], int]] = (),
    **fields: Any,
) -> Measurement:
    """Layers that take `forward` and `backward` seconds (default: as long as the forward) at one
    microbatch size.

    `tensors` are (producer, consumers, bytes) and `stash_groups` are (layers, bytes); `fields` are
    others of Measurement.
    """
    backward = forward if backward is None else backward
    outputs = [0] * len(forward) if output_bytes is None else output_bytes
    return Measurement(
        microbatch_size=microbatch_size,
        layers=[
            LayerMeasurement(forward_s=f, backward_s=g, output_bytes=size)
            for f, g, size in zip(forward, backward, outputs, strict=True)
        ],
        tensors=[
            Tensor(producer=producer, consumers=list(consumers), bytes=size)
            for producer, consumers, size in tensors
        ],
        stash_groups=[StashGroup(layers=list(layers), bytes=size) for layers, size in stash_groups],
        **fields,
    )


def out_of_memory(microbatch_size: int) -> Measurement:
    """A microbatch size that did not fit the device."""
    return Measurement(microbatch_size=microbatch_size, out_of_memory=True)


def profile_of(
    measurements: Sequence[Measurement],
    parameter_bytes: Sequence[int] | None = None,
    names: Sequence[str] | None = None,
    shared: Sequence[tuple[str, Sequence[int], int]] = (),
    name: str = "chain",
    dtype: str = "float32",
    memory_bytes: int | None = None,
) -> Profile:
    """A profile of `measurements`.

    `shared` parameters are (name, layers, bytes), to be counted in `parameter_bytes` of each layer.
    """
    layers = max(len(each.layers) for each in measurements)
    sizes = [0] * layers if parameter_bytes is None else parameter_bytes
    names = [f"layer{index}" for index in range(layers)] if names is None else names
    return Profile(
        model=Model(name=name),
        device=Device(name="test device", memory_bytes=memory_bytes),
        dtype=dtype,
        layers=[
            Layer(
                name=names[index],
                type="Linear",
                parameter_bytes=size,
                shared_parameters=[
                    SharedParameter(name=key, bytes=held)
                    for key, members, held in shared
                    if index in members
                ],
            )
            for index, size in enumerate(sizes)
        ],
        measurements=list(measurements),
    )


def with_memory_of(
    profile: Profile,
    frozen_bytes: Sequence[int],
    transient_bytes: Sequence[int],
    frozen: Sequence[str] = (),
    split_stash_bytes: int = 0,
) -> Profile:
    """The profile with these bytes of each layer, and shared parameters `frozen` by name.

    Those count in `frozen_bytes` of each of their layers; every microbatch size takes the same, and
    layer n keeps n + 1 times `split_stash_bytes`.
    """

    def freeze(layer: Layer, size: int) -> Layer:
        shared = [replace(own, frozen=own.name in frozen) for own in layer.shared_parameters]
        return replace(layer, frozen_bytes=size, shared_parameters=shared)

    def load(measured: Measurement) -> Measurement:
        layers = [
            replace(own, transient_bytes=size, split_stash_bytes=(n + 1) * split_stash_bytes)
            for n, (own, size) in enumerate(zip(measured.layers, transient_bytes, strict=True))
        ]
        return replace(measured, layers=layers)

    pairs = zip(profile.layers, frozen_bytes, strict=True)
    return replace(
        profile,
        layers=[freeze(layer, size) for layer, size in pairs],
        measurements=[load(each) for each in profile.measurements],
    )


def chain_profile(
    forward: Sequence[float],
    backward: Sequence[float] | None = None,
    output_bytes: Sequence[int] | None = None,
    parameter_bytes: Sequence[int] | None = None,
    microbatch_size: int = 1,
    tensors: Sequence[tuple[int, Sequence[int], int]] = (),
    stash_groups: Sequence[tuple[Sequence[int], int]] = (),
    names: Sequence[str] | None = None,
    shared: Sequence[tuple[str, Sequence[int], int]] = (),
    name: str = "chain",
    dtype: str = "float32",
    **fields: Any,
) -> Profile:
    """A profile of one microbatch size; see `measurement` and `profile_of` for the arguments."""
    measured = measurement(
        forward, backward, output_bytes, microbatch_size, tensors, stash_groups, **fields
    )
    return profile_of([measured], parameter_bytes, names, shared, name, dtype)


def uniform_profile(layers: int, **fields: Any) -> Profile:
    """Equal layers: 1 ms forward, 2 ms backward, 1 MB of output and 1 MB of parameters each."""
    return chain_profile(
        [1e-3] * layers, [2e-3] * layers, [10**6] * layers, [10**6] * layers, **fields
    )


def flat(
    n: int,
    bandwidth: float = 1e9,
    latency: float = 0.0,
    links: int = 1,
    bus: bool = False,
    memory_bytes: int | None = None,
) -> Topology:
    """`n` devices under one level; bytes per second and seconds."""
    level = Level(
        name="all", size=n, bandwidth_bytes_per_s=bandwidth, links=links, latency_s=latency, bus=bus
    )
    return Topology(
        name=f"flat-{n}",
        device=ClusterDevice(name="GPU", memory_bytes=memory_bytes),
        levels=[level],
    )


def two_level(
    inner: int,
    outer: int,
    inner_bandwidth: float = 10e9,
    outer_bandwidth: float = 1e9,
    inner_latency: float = 0.0,
    outer_latency: float = 0.0,
    inner_links: int = 1,
    outer_links: int = 1,
    inner_bus: bool = False,
    outer_bus: bool = False,
    memory_bytes: int | None = None,
) -> Topology:
    """`outer` servers of `inner` devices each; bytes per second and seconds."""
    return Topology(
        name=f"servers-{inner}x{outer}",
        device=ClusterDevice(name="GPU", memory_bytes=memory_bytes),
        levels=[
            Level(
                name="server",
                size=inner,
                bandwidth_bytes_per_s=inner_bandwidth,
                links=inner_links,
                latency_s=inner_latency,
                bus=inner_bus,
            ),
            Level(
                name="cluster",
                size=outer,
                bandwidth_bytes_per_s=outer_bandwidth,
                links=outer_links,
                latency_s=outer_latency,
                bus=outer_bus,
            ),
        ],
    )


def run_process(
    arguments: Sequence[str], stdin: bytes | None = None, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[bytes]:
    """`python -m partopt ARGUMENTS` as a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "partopt", *arguments],
        input=stdin,
        capture_output=True,
        env=os.environ | (environment or {}),
        cwd=ROOT,
        check=False,
    )


def changed(content: bytes, *path: str | int, to: Any) -> bytes:
    """The JSON document `content` with the value at `path` replaced by `to`.

    A step is a key, an index, or several of them, such as `layers[0].name`.
    """
    document = json.loads(content)
    place = document
    *steps, last = [each for step in path for each in re.findall(r"\w+", str(step))]
    for step in steps:
        place = place[int(step) if isinstance(place, list) else step]
    place[int(last) if isinstance(place, list) else last] = to
    return json.dumps(document).encode()


def limited(plan: Plan, memory_bytes: int | None) -> Plan:
    """The plan for devices of so much memory."""
    device = replace(plan.topology.device, memory_bytes=memory_bytes)
    return replace(plan, topology=replace(plan.topology, device=device))


def rows(text: str) -> list[tuple[str, ...]]:
    """The cases of a table: a line each, cells between ` | `; a line that is further in goes on."""
    lines = re.sub(r"\n {8,}", " ", text.strip()).splitlines()
    return [tuple(cell.strip() for cell in re.split(r"(?<!\S)\|(?!\S)", line)) for line in lines]
