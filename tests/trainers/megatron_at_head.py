"""Megatron-LM's own parser and checks, of a checkout: run as a program, in a process of its own.

Of each list of words on standard input it prints the arguments that it makes of them, or its error.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import types
import typing
from typing import Any

import torch
import typing_extensions

if not hasattr(typing, "override"):  # before Python 3.12
    typing.override = typing_extensions.override  # type: ignore[attr-defined]
# fused rotary embeddings need Transformer Engine, which needs a GPU
WITHOUT = ["--no-rope-fusion"]


def parsed(words: list[str], ranks: int) -> dict[str, Any]:
    """The arguments, and fields of the configuration that Megatron Core gets of them."""
    from megatron.training import arguments

    os.environ |= {"WORLD_SIZE": str(ranks), "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    if "--use-megatron-fsdp" in words:  # as the export says
        del os.environ["CUDA_DEVICE_MAX_CONNECTIONS"]
    sys.argv = ["pretrain_gpt.py", *words, *WITHOUT]
    found = arguments.validate_args(arguments.parse_args())
    made = arguments.core_transformer_config_from_args(found)
    fields = {own.name: getattr(made, own.name) for own in dataclasses.fields(made)}
    simple = (int, float, str, bool, type(None))
    return {
        name: value if isinstance(value, simple) else str(value)
        for name, value in {**vars(found), **fields}.items()
    }


def main() -> None:
    """Read lists of words and print what becomes of each, one a line."""
    sys.path.insert(0, sys.argv[1])
    hopper = types.SimpleNamespace(major=9, minor=0)  # for its checks of a GPU
    torch.cuda.get_device_properties = lambda *_: hopper
    torch.cuda.get_device_capability = lambda *_: (hopper.major, hopper.minor)
    out, sys.stdout = sys.stdout, sys.stderr
    for ranks, words in json.load(sys.stdin):
        try:
            found: Any = parsed(words, ranks)
        except (Exception, SystemExit) as error:
            found = f"{type(error).__name__}: {error}"
        out.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
