"""Which backend of torch.distributed a run takes."""

from __future__ import annotations

import torch
import torch.distributed as dist

from partopt.errors import PartoptError, did_you_mean

BACKENDS = ("auto", "gloo", "nccl")


def choose_backend(name: str, ranks_here: int) -> str:
    """`gloo` or `nccl`; `auto` is NCCL where each of the ranks of this host has a GPU.

    Raises PartoptError for one that is unknown, or cannot be taken here.
    """
    if name not in BACKENDS:
        raise _invalid(name, "unknown backend", did_you_mean(name, BACKENDS))
    if name == "gloo":
        return name
    built = dist.is_available() and dist.is_nccl_available()
    devices = torch.cuda.device_count() if built else 0
    if devices >= ranks_here:
        return "nccl"
    if name == "auto":
        return "gloo"
    why = f"{ranks_here} ranks need a GPU each, torch sees {devices}"
    why = why if built else "this torch was built without NCCL"
    raise _invalid(name, why, "`backend=gloo` is for processors")


def _invalid(name: str, what: str, hint: str) -> PartoptError:
    return PartoptError(
        f"`backend={name}`: {what}", hint, code="invalid-option", option="backend", value=name
    )
