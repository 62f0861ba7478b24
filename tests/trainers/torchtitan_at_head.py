"""torchtitan's own command line, of a checkout: run as a program, in a process of its own.

Of each module of a folder it prints what torchtitan makes of its configuration, or its error.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def parsed(stem: str) -> dict[str, Any]:
    """Fields of the configuration, and of the model that is in it."""
    from torchtitan.config.manager import ConfigManager

    config = ConfigManager().parse_args(["--module", stem, "--config", "planned"])
    model = config.model_spec.model
    attention = model.layers[0].attention
    parts = {"training": config.training, "parallelism": config.parallelism}
    parts |= {"rope": attention.rope, "norm": model.norm, "model": model}
    found = {
        f"{part}.{name}": getattr(own, name)
        for part, own in parts.items()
        for name in own.__dataclass_fields__
        if isinstance(getattr(own, name), int | float | str)
    }
    return found | {
        "again": type(config.activation_checkpoint).__qualname__.partition(".")[0],
        "compile": [config.compile.enable, list(config.compile.components)],
        "blocks": len(model.layers),
        "query_key_norms": attention.qk_norm is not None,
        "stages": config.parallelism.module_fqns_per_model_part,
    }


def main() -> None:
    """Read the modules of a folder, and print what becomes of each, one a line."""
    folder = Path(sys.argv[2])
    sys.path[:0] = [sys.argv[1], str(folder)]
    out, sys.stdout = sys.stdout, sys.stderr
    for path in sorted(folder.glob("*.py")):
        try:
            found: Any = parsed(path.stem)
        except (Exception, SystemExit) as error:
            found = f"{type(error).__name__}: {error}"
        out.write(json.dumps([path.stem, found]) + "\n")


if __name__ == "__main__":
    main()
