"""One rank of a group: measures models of `group_models` and writes what it finds to a folder.

`experts` come from `group_experts`, as their inputs are others.

The last one, on the command line, runs out of memory on rank 1, which ends there.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch.distributed as dist

from partopt import PartoptError, measure_source
from partopt.cli import main
from partopt.documents import encode

MODELS = Path(__file__).with_name("group_models.py")
FOLDER = Path(sys.argv[1])

dist.init_process_group("gloo")
for name in sys.argv[2:]:
    models = MODELS.with_name("group_experts.py") if name == "experts" else MODELS
    try:
        profile = measure_source(f"{models}:{name}", microbatch_sizes=[2], steps=1)
        content = encode(profile)
    except PartoptError as error:
        content = f"{error.code}: {error.message}".encode()
    (FOLDER / f"{name}.{dist.get_rank()}").write_bytes(content)
options = ["--device", "cpu", "--microbatch", "2,4,8", "--steps", "1"]
main(["profile", f"{MODELS}:full", *options, "-o", str(FOLDER / "full.json")])
