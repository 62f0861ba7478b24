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
        ("versions", ", ".join(f"{name} {own}" for name, own in versions.items() if own)),
        ("machine", f"{machine.system}, {machine.cores} cores, {_device(machine.processor)}"),
        *(("device", _accelerator(number, each)) for number, each in enumerate(found.devices)),
        ("backend", f"{found.backend}, between two ranks"),
    ]
    checks = table_of(
        found.checks,
        [
            Column("CHECK", lambda each: each.name, "text"),
            Column("RESULT", lambda each: each.status, "text"),
            Column("TIME", lambda each: "-" if each.seconds is None else f"{each.seconds:.1f} s"),
        ],
    )
    texts = [(each.status, f"{each.name}: {each.text}") for each in found.checks if each.text]

    def seconds(value: float | None) -> str:
        return "-" if value is None else format_seconds(value)

    exchanges = table_of(
        found.exchanges,
        [
            Column("EXCHANGE", lambda each: each.kind, "text"),
            Column("SIZE", lambda each: format_bytes(each.bytes)),
            Column("FIRST", lambda each: seconds(each.first_s)),
            Column("AFTER IT", lambda each: seconds(each.seconds)),
        ],
    )
    parts = [label_lines(head), checks, exchanges if found.exchanges else "", label_lines(texts)]
    return "\n\n".join(filter(None, parts))


def _device(device: Device) -> str:
    memory = "" if device.memory_bytes is None else f", {format_bytes(device.memory_bytes)}"
    return f"{device.name}{memory}"


def _accelerator(number: int, each: Accelerator) -> str:
    reaches = f", reaches {', '.join(map(str, each.reaches))}" if each.reaches else ""
    return f"{number}: {_device(each.device)}, capability {each.capability}{reaches}"
