"""The machine that a table was measured on."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import numba
import numpy


def describe() -> str:
    """Processor, cores, system and the versions that matter, in a line."""
    cpuinfo = Path("/proc/cpuinfo")
    names = (
        [
            line.partition(":")[2].strip()
            for line in cpuinfo.read_text().splitlines()
            if line.startswith("model name")
        ]
        if cpuinfo.exists()
        else []
    )
    processor = names[0] if names else platform.processor() or platform.machine()
    versions = (
        f"Python {platform.python_version()}, numpy {numpy.__version__}, numba {numba.__version__}"
    )
    return f"{processor}, {os.cpu_count()} cores, {platform.system()}; {versions}"
