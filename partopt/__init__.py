"""partopt plans pipeline-parallel training from measurements.

    import partopt as po

    profile = po.measure(model, example_inputs, microbatch_sizes=[1, 2, 4])
    cluster = po.Topology.load("dgx-h100", servers=4)
    result = po.solve(po.Job(profile, cluster, schedule="1f1b", global_batch=512))

Its names are in `__init__.pyi`, and imported when they are first used, so that `import partopt` is
quick and only measuring imports torch. docs/python.md describes them.
"""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from typing import Any

__version__ = "0.1.0"

_PLACES = {
    alias.name: str(node.module)
    for node in ast.parse(Path(__file__).with_suffix(".pyi").read_text("utf-8")).body
    if isinstance(node, ast.ImportFrom)
    for alias in node.names
}
__all__ = ["__version__", *_PLACES]


def __getattr__(name: str) -> Any:
    """Import a public name where it lives."""
    if name not in _PLACES:
        raise AttributeError(f"module 'partopt' has no attribute {name!r}")
    return getattr(importlib.import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
