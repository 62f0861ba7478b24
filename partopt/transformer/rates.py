"""What a device and its links achieve in training, and the seconds of what runs on them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from partopt.documents.device import Attention, DeviceFile
from partopt.documents.topology import Topology
from partopt.documents.transformer import BITS, Format
from partopt.errors import PartoptError
from partopt.units import parse_bandwidth, parse_flops, parse_power, parse_seconds

# fitted on published runs: benchmarks/published_trainers.py
SUSTAINED = 0.91  # of the rate that a benchmark finds for one kernel
BLOCK_SCALES = 0.94  # of the rate with one scale a tensor, products with a scale a block
LAUNCH_S = 8.4e-6  # in which a host starts an operation: runs of experts; 5 to 25 us are measured
LATENT = 1.40  # of the rate of attention with heads of 128, that of 192 with values of 128
CLOCK_POWER = 0.36  # clock = (limit / rated power) to this power; 0.89 at 500 of 700 W
# of the host's memory bandwidth, torch's AdamW there: NeMo RL's runs of Qwen3-0.6B on an H100
ON_HOST = 0.31
# measured
MEMORY = 0.867  # of the data sheet's bandwidth, passes over tensors: 2,903 of 3,350 GB/s on H100
OUTPUT = 0.60  # of it, at which a product's output is written: the tables of shapes of DeepGEMM
COLLECTIVE_S = 40e-6  # start of a collective of NCCL in a server: tables of nccl-tests on H200
HOP_S = 20e-6  # of a message or an exchange between servers
TAKEN = (
    16  # multiprocessors that a collective takes: sm_margin of Megatron Bridge's recipes, 16 to 20
)
HOST_STEP = 28  # bytes of a parameter, gradient and moments that AdamW reads and writes

USABLE = 1.0625  # of the memory in a device's name: 80 GB are 79.25 GiB as torch counts them
PLANNED = 0.95  # of it, that a layout may need to be picked


class Seconds(NamedTuple):
    """Of a forward, and of its backward."""

    forward: float
    backward: float


class Port(NamedTuple):
    """A device's share of the ports of a level that joins so many `servers` at a time.

    Bytes a second, in one direction: of a `message`, and what a `ring` of a collective reaches.
    """

    servers: int
    message: float
    ring: float


@dataclass(frozen=True, kw_only=True)
class Rates:
    """A device in a cluster: operations and bytes a second.

    `peaks` and `bandwidth` are the data sheet's, of products by number format and of memory, of
    which passes over tensors reach a share, `passed`;
    `products` are what a benchmark finds, `attention` has kernels by name. `link` is a
    device's inside a server of `server` devices, achieved, in one direction; `outer` has the ports
    of the levels between servers, and `sizes` those of all levels, innermost first. The host starts
    an operation in `launch` seconds; a device copies to and from the host's memory at `host_link`,
    whose processors read and write `host_memory` for it, 0 where that is not known.
    """

    device: str
    peaks: Mapping[str, float]
    products: Mapping[str, float]
    bandwidth: float
    attention: Mapping[str, Attention]
    clock: float
    link: float
    server: int
    multiprocessors: int
    passed: float = MEMORY
    outer: Sequence[Port] = ()
    sizes: tuple[int, ...] = ()
    launch: float = LAUNCH_S
    host_link: float = 0.0
    host_memory: float = 0.0

    @classmethod
    def of(cls, file: DeviceFile, topology: Topology) -> Rates:
        """The rates of a device on the links of `topology`.

        Raises PartoptError where the file does not say what the device achieves in training.
        """
        training = file.training
        if training is None:
            raise PartoptError(
                f"{file.name}: its file has no `training`: what trainers achieve is not known",
                "docs/formats.md has an example",
                code="unknown-rates",
            )
        inner, *between = topology.cluster.levels
        outer, servers = list[Port](), 1
        for level in between:
            share = level.links / (servers * inner.size)
            message = level.bandwidth_bytes_per_s * share
            outer.append(Port(servers, message, level.allreduce_bandwidth_bytes_per_s * share))
            servers *= level.size
        return cls(
            device=file.name,
            peaks={n: parse_flops(rate.value) for n, rate in (file.peaks | training.peaks).items()},
            products={name: parse_flops(rate.value) for name, rate in training.products.items()},
            bandwidth=parse_bandwidth(file.bandwidth.value),
            attention=training.attention,
            clock=clock(parse_power(training.limit.value) / parse_power(training.rated.value)),
            link=inner.bandwidth_bytes_per_s * inner.links,
            server=inner.size,
            multiprocessors=training.multiprocessors.value,
            passed=training.passes.value if training.passes else MEMORY,
            outer=tuple(outer),
            sizes=tuple(level.size for level in topology.cluster.levels),
            launch=parse_seconds(training.host.value) if training.host else LAUNCH_S,
            host_link=parse_bandwidth(training.host_link.value) if training.host_link else 0.0,
            host_memory=parse_bandwidth(training.host_memory.value)
            if training.host_memory
            else 0.0,
        )

    def holds(self, ranks: int) -> bool:
        """Whether groups of so many ranks fill the inner levels, and divide the next one."""
        for size in self.sizes:
            if ranks % size:
                return size % ranks == 0
            ranks //= size
        return ranks == 1 or not self.sizes

    @property
    def taken(self) -> float:
        """The share of the compute that a collective takes from what it hides behind."""
        return TAKEN / self.multiprocessors

    def passes_s(self, size_bytes: float) -> float:
        """Seconds in which so many bytes of tensors are read and written."""
        return size_bytes / (self.passed * self.bandwidth)

    def stepped_on_host_s(self, parameters: float, overlaps: bool) -> float:
        """Seconds of AdamW in the host's memory, with the copies there and back.

        In float32: torch converts on the device what it copies and does not wait for
        (aten/src/ATen/native/cuda/Copy.cu). Copies of a parameter `overlap` the steps of others.
        """
        step_s = HOST_STEP * parameters / (ON_HOST * self.host_memory)
        copy_s = 4 * parameters / self.host_link
        return max(step_s, copy_s) if overlaps else step_s + 2 * copy_s

    def written_s(self, size_bytes: float) -> float:
        """Seconds in which so many bytes of a product are written, while nothing is computed."""
        return size_bytes / (OUTPUT * self.bandwidth)

    def on_host_s(self, size_bytes: float) -> float:
        """Seconds in which torch reads and writes so many bytes with the host's processors."""
        return size_bytes / (ON_HOST * self.host_memory)

    def arithmetic_s(self, m: float, n: float, k: float, form: Format = "bfloat16") -> float:
        """(m, k) x (k, n), the arithmetic alone."""
        rate = self.products["fp8" if form == "mxfp8" else form] * SUSTAINED * self.clock
        rate *= BLOCK_SCALES if form in ("mxfp8", "nvfp4") else 1.0
        return 2 * m * n * k / rate

    def product_s(
        self,
        m: float,
        n: float,
        k: float,
        form: Format = "bfloat16",
        out: float = 2.0,
        added: float = 0.0,
    ) -> float:
        """(m, k) x (k, n): the arithmetic, then the output, of `out` bytes an element.

        Where it is added to what is there, `added` bytes an element are read. At least what all
        bytes take.
        """
        written, read = out * m * n, added * m * n
        computing_s = self.arithmetic_s(m, n, k, form) + self.written_s(written)
        inputs = (m * k + n * k) * BITS[form] / 8
        return max(computing_s + self.passes_s(read), self.passes_s(inputs + written + read))

    def linear_s(
        self,
        m: float,
        n: float,
        k: float,
        form: Format = "bfloat16",
        grad: tuple[float, float] = (2.0, 0.0),
    ) -> Seconds:
        """A product; backward the gradients of its input, and of its weight.

        `grad` are bytes an element of the latter: written, and read where it is added to one.
        """
        back_s = self.product_s(m, k, n, form) + self.product_s(n, k, m, form, *grad)
        return Seconds(self.product_s(m, n, k, form), back_s)

    def frozen_s(self, m: float, n: float, k: float, form: Format = "bfloat16") -> Seconds:
        """A product whose weight is not trained: backward the gradient of its input alone."""
        return Seconds(self.product_s(m, n, k, form), self.product_s(m, k, n, form))

    def attention_s(
        self, kernel: str, flops: float, tokens: float, latent: bool = False
    ) -> Seconds:
        """A flash attention of so many operations forward, over `tokens` of a rank.

        Heads of `latent` attention are wider, and as much faster. Backward it makes the scores
        again: 2.5 times the operations (Dao, 2023).
        """
        curve = self.attention[kernel]
        forward, backward = (
            self.peaks["float16"]
            * self.clock
            * SUSTAINED
            * (LATENT if latent else 1.0)
            * share
            * tokens
            / (tokens + half)
            for share, half in zip(curve.share, curve.half_at, strict=True)
        )
        return Seconds(flops / forward, 2.5 * flops / backward)

    def ports(self, senders: int, span: float = math.inf) -> Iterator[Port]:
        """Of the levels that groups of `span` devices side by side go over, what a device has.

        So many `senders` of the devices that a level joins send at once, and share its ports.
        """
        for servers, message, ring in self.outer:
            devices = servers * self.server
            if span > self.server and devices % span:
                more = max(1, devices // senders)
                yield Port(servers, more * message, more * ring)

    def message_rate(self, senders: int, span: float = math.inf) -> float:
        """Bytes a second of a device's messages: over its link, and through `ports`, one a server.

        A server's devices have a port apart; beyond one those of others are theirs.
        """
        ports = self.ports(max(senders, self.server), span)
        return min([self.link, *(port.message for port in ports)])

    def ring_rate(self, senders: int, span: float = math.inf) -> float:
        """The same of a collective's rings, which have the ports of all devices that send none."""
        return min([self.link, *(port.ring for port in self.ports(senders, span))])

    def replicas_s(self, size_bytes: float, ranks: int, stride: int = 1) -> float:
        """A gather or a scatter-reduction of `size_bytes` in all, over so many `ranks`.

        They are `stride` devices apart, and groups of those between do the same beside them.
        """
        return size_bytes * (ranks - 1) / ranks / self.ring_rate(stride, ranks * stride)

    def scattered_s(self, size_bytes: float, ranks: int) -> float:
        """What a rank sends out to `ranks` side by side, evenly, all at once."""
        found_s = 0.0
        for servers, message, _ in self.ports(ranks, ranks):
            groups = max(2, math.ceil(ranks / (servers * self.server)))
            found_s = max(found_s, size_bytes * (1 - 1 / groups) / message)
        return found_s

    def send_s(self, size_bytes: float, stage: int, span: float = math.inf) -> float:
        """A message to the next `stage` of so many devices, in a pipeline over `span` of them."""
        return HOP_S + size_bytes / self.message_rate(stage, span)


def clock(power: float) -> float:
    """The clock of products, over the rated one, where the limit is so much of the rated power."""
    return float(power**CLOCK_POWER)
