"""Checkpoints of a training at the boundaries of its steps, which another plan can go on from.

A checkpoint is a folder of torch.distributed.checkpoint, whose entries are parameters, buffers and
optimizer state by the names of the model, whatever stage holds them. It is written under another
name and renamed when it is whole.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save as write
from torch.distributed.tensor import DTensor, Shard

from partopt.errors import PartoptError
from partopt.runtime.context import lost_connections
from partopt.runtime.parameters import shared_parameters
from partopt.runtime.replay import ReplayStage
from partopt.runtime.training import RankTraining

KEPT = 2  # checkpoints in a folder: the last, and the one before
_NAME = re.compile(r"step-([0-9]+)")
_ABOUT = "training.json"


def save(own: RankTraining, folder: Path) -> None:
    """Write a checkpoint of the steps so far into `folder`; every rank calls it."""
    target, partial = folder / f"step-{own.steps}", folder / f".step-{own.steps}.partial"
    if own.context.rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    own.context.barrier()
    with _quiet(), lost_connections():
        write(_state(own), checkpoint_id=partial)
    own.context.barrier()
    if own.context.rank == 0:
        training = own.training
        about = {"steps": own.steps, "model": training.plan.profile.name, "seed": training.seed}
        (partial / _ABOUT).write_text(json.dumps(about) + "\n")
        _put_in_place(partial, target)
        for old in checkpoints(folder)[:-KEPT]:
            (old / _ABOUT).unlink()  # first: with it half a checkpoint would be a whole one
            shutil.rmtree(old)
    own.context.barrier()


def _put_in_place(partial: Path, target: Path) -> None:
    """Rename a whole checkpoint; an older one of the same steps stays until then."""
    older = target.with_name(f".{target.name}.older")
    if target.exists():
        target.rename(older)
    partial.rename(target)
    shutil.rmtree(older, ignore_errors=True)


@contextlib.contextmanager
def removing_partial(folder: Path | None) -> Iterator[None]:
    """Around a run that saves into `folder`: tidy up what it, or one before, left half-written."""
    if folder is None:
        yield
        return
    _remove_partial(folder)
    try:
        yield
    finally:
        _remove_partial(folder)


def _remove_partial(folder: Path) -> None:
    for older in folder.glob(".step-*.older"):
        target = folder / older.stem.removeprefix(".")
        if not target.exists():
            older.rename(target)
        shutil.rmtree(older, ignore_errors=True)
    for partial in folder.glob(".step-*.partial"):
        shutil.rmtree(partial, ignore_errors=True)


def checkpoints(folder: Path) -> list[Path]:
    """The whole checkpoints in a folder, the oldest first."""
    found = [each for each in folder.glob("step-*") if (each / _ABOUT).is_file()]
    numbered = [(int(match[1]), each) for each in found if (match := _NAME.fullmatch(each.name))]
    return [each for _, each in sorted(numbered)]


def last_checkpoint(folder: Path) -> Path:
    """The last whole checkpoint in a folder; PartoptError where there is none."""
    try:
        found = checkpoints(folder)
    except OSError:  # a name that is too long
        found = []
    if not found:
        raise PartoptError(
            f"{folder}: no whole checkpoint in it",
            "give the folder that `save` named",
            code="no-checkpoint",
            path=str(folder),
        )
    return found[-1]


def resume(own: RankTraining, checkpoint: Path) -> None:
    """Go on from a checkpoint; every rank calls it.

    Raises PartoptError where it is not of this model.
    """
    known = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    state = _state(own)
    missing = sorted(name for name in state if name not in known)
    other = sorted(
        name
        for name, each in state.items()
        if name in known and tuple(_shape(known[name])) != tuple(each.shape)
    )
    if missing or other:
        what = f"lacks {missing[0]}" if missing else f"has another shape of {other[0]}"
        raise PartoptError(f"{checkpoint}: {what}", "it is of another model", code="other-model")
    kept = _optimizer_state(own, known)
    with _quiet(), lost_connections():
        load(
            {**state, **{name: read for name, (_, _, _, read) in kept.items()}},
            checkpoint_id=checkpoint,
        )
    for parameter_state, key, tensor, _ in kept.values():
        parameter_state[key] = tensor
    own.begin_at(int(json.loads((checkpoint / _ABOUT).read_text())["steps"]))


def _state(own: RankTraining) -> dict[str, Tensor]:
    """The tensors of this rank by their names in a checkpoint: they are read in place."""
    state: dict[str, Tensor] = {}
    for s, stage in own.stages.items():
        state |= {f"model.{name}": each.detach() for name, each in stage.own_parameters.items()}
        state |= {f"buffer.{name}": each for name, each in stage.changing_buffers.items()}
        if s in own.optimizers:
            for name, key, value in _states_of(own, s, stage):
                state[f"optimizer.{name}.{key}"] = value
    return state


def _states_of(own: RankTraining, s: int, stage: ReplayStage) -> Iterator[tuple[str, str, Tensor]]:
    holding = shared_parameters(own.record, own.training.starts)
    for name, parameter in stage.own_parameters.items():
        if holding.get(name, [s])[0] != s:  # stages that hold one have other shares of it
            continue
        stepped = _stepped(own, s, parameter)
        for key, value in own.optimizers[s].state.get(stepped, {}).items():
            if isinstance(value, Tensor):
                is_share = stepped is not parameter and value.shape == stepped.shape
                yield name, key, _as_rows(own, s, value, parameter) if is_share else value


def _optimizer_state(
    own: RankTraining, known: dict[str, Any]
) -> dict[str, tuple[dict[str, Any], str, Tensor, Tensor]]:
    """Room for the optimizer state in a checkpoint of this rank's parameters, and where it goes.

    Of each entry the state, the key in it, the tensor that goes there, and what is read: the same,
    or of a share the rows of the whole.
    """
    room: dict[str, tuple[dict[str, Any], str, Tensor, Tensor]] = {}
    for s, stage in own.stages.items():
        optimizer = own.optimizer(s, own.stepped(s)) if own.stepped(s) else None
        for name, parameter in stage.own_parameters.items():
            prefix, stepped = f"optimizer.{name}.", _stepped(own, s, parameter)
            if optimizer is None or not stepped.numel():
                continue
            for entry in known:
                key, about = entry.removeprefix(prefix), known[entry]
                if not entry.startswith(prefix) or "." in key:
                    continue
                if not isinstance(about, TensorStorageMetadata):
                    continue
                # a state of one number, such as Adam's count of steps, stays on the CPU
                device = parameter.device if about.size else torch.device("cpu")
                is_share = stepped is not parameter and about.size == parameter.shape
                shape = stepped.shape if is_share else about.size
                tensor = torch.empty(shape, dtype=about.properties.dtype, device=device)
                read = _as_rows(own, s, tensor, parameter) if is_share else tensor
                room[entry] = optimizer.state[stepped], key, tensor, read
    return room


def _stepped(own: RankTraining, s: int, parameter: nn.Parameter) -> nn.Parameter:
    """What the optimizer knows of a parameter: itself, or this replica's rows of it."""
    return own.shares[s].share_of(parameter) if s in own.shares else parameter


def _as_rows(own: RankTraining, s: int, rows: Tensor, parameter: nn.Parameter) -> Tensor:
    """What is like this replica's rows of a parameter, as those of a tensor like the whole one."""
    if not parameter.dim():  # a single number, which the first replica has
        return rows
    whole, mesh = torch.empty(parameter.shape, device="meta"), own.shares[s].mesh
    return DTensor.from_local(
        rows, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
    )


def _shape(about: Any) -> Any:
    return about.size if isinstance(about, TensorStorageMetadata) else ()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what torch warns of its own use of itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def check_folder(folder: Path) -> None:
    """Refuse a folder that cannot be written to, before any work."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".partopt"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise PartoptError(
            f"{folder}: cannot be written to: {error.strerror}",
            "choose another folder",
            code="not-writable",
            path=str(folder),
        ) from error
