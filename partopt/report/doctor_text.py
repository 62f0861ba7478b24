"""The page of a machine: what it is, what is missing, and what was tried on it."""

from __future__ import annotations

from partopt.documents.doctor import Accelerator, Diagnosis
from partopt.documents.profile import Device
from partopt.report.text import Column, label_lines, table_of
from partopt.units import format_bytes, format_seconds


def render(found: Diagnosis) -> str:
    """The page."""
    known, machine = found.environment, found.machine
    versions = {
        "partopt": known.partopt,
        "torch": known.torch,
        "Python": known.python,
        "CUDA": known.cuda,
        "driver": known.driver,
        "cuDNN": known.cudnn,
        "NCCL": known.nccl,
    }
    head = [
        (
            "versions",
            ", ".join(f"{name} {version}" for name, version in versions.items() if version),
        ),
        ("machine", f"{machine.system}, {machine.cores} cores, {_device(machine.processor)}"),
        *(("device", _accelerator(number, device)) for number, device in enumerate(found.devices)),
        ("backend", f"{found.backend}, between two ranks"),
    ]
    checks = table_of(
        found.checks,
        [
            Column("CHECK", lambda check: check.name, "text"),
            Column("RESULT", lambda check: check.status, "text"),
            Column(
                "TIME", lambda check: "-" if check.seconds is None else f"{check.seconds:.1f} s"
            ),
        ],
    )
    texts = [(check.status, f"{check.name}: {check.text}") for check in found.checks if check.text]

    def seconds(value: float | None) -> str:
        return "-" if value is None else format_seconds(value)

    exchanges = table_of(
        found.exchanges,
        [
            Column("EXCHANGE", lambda exchange: exchange.kind, "text"),
            Column("SIZE", lambda exchange: format_bytes(exchange.bytes)),
            Column("FIRST", lambda exchange: seconds(exchange.first_s)),
            Column("AFTER IT", lambda exchange: seconds(exchange.seconds)),
        ],
    )
    parts = [label_lines(head), checks, exchanges if found.exchanges else "", label_lines(texts)]
    return "\n\n".join(filter(None, parts))


def _device(device: Device) -> str:
    memory = "" if device.memory_bytes is None else f", {format_bytes(device.memory_bytes)}"
    return f"{device.name}{memory}"


def _accelerator(number: int, accelerator: Accelerator) -> str:
    reaches = f", reaches {', '.join(map(str, accelerator.reaches))}" if accelerator.reaches else ""
    return f"{number}: {_device(accelerator.device)}, capability {accelerator.capability}{reaches}"
