"""What a result rests on, where its times were estimated."""

from __future__ import annotations

from collections.abc import Sequence

_LABEL = "rests on"


def basis_text(device: str) -> str:
    """What to say of times that were estimated for `device`."""
    return f"times estimated for {device}: nothing was measured"


def basis_lines(estimated: str | None) -> list[tuple[str, str]]:
    """The line, with its label, of times estimated for a device; none where they were measured."""
    return [] if estimated is None else [(_LABEL, basis_text(estimated))]


def basis_of_several(profiles: Sequence[tuple[str, str | None]]) -> list[tuple[str, str]]:
    """A line for each device that any of `profiles`, pairs of a name and `estimated`, are for.

    It names these profiles unless all are for one device.
    """
    devices = list(dict.fromkeys(device for _, device in profiles))
    if len(devices) == 1:
        return basis_lines(devices[0])
    texts = [
        f"{', '.join(name for name, own in profiles if own == device)}: {basis_text(device)}"
        for device in devices
        if device is not None
    ]
    return [(_LABEL if place == 0 else "", text) for place, text in enumerate(texts)]
