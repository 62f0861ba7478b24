"""A device as people read it: what it does in a second, and where that is known from."""

from __future__ import annotations

import textwrap

from partopt.documents.device import DeviceFile
from partopt.report.table import paragraph
from partopt.report.width import columns


def render(device: DeviceFile) -> str:
    """The device, and every number of its file with its source."""
    return "\n".join(
        [
            f"{device.name}: {device.memory}, {device.type}",
            "",
            *(
                textwrap.fill(
                    f"{path:30} {_value(number.value):16} {_origin(number.source, number.assumed)}",
                    columns(),
                    subsequent_indent=" " * min(48, columns() // 2),
                )
                for path, number in device.numbers()
            ),
            "",
            paragraph(
                "peaks: dense matrix products. efficiency: what is achieved of them; memory, of "
                "the bandwidth. launch: what each operation takes beside its work."
            ),
        ]
    )


def _value(value: str | int | float) -> str:
    return f"{value:.0%}" if isinstance(value, float) else str(value)


def _origin(source: str, assumed: str) -> str:
    return source or f"assumed: {assumed}"
