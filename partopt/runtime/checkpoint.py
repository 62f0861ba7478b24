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

from partopt.errors import PartoptError
from partopt.runtime.context import lost_connections
from partopt.runtime.training import RankTraining

KEPT = 2  # checkpoints in a folder: the last, and the one before
_NAME = re.compile(r"step-([0-9]+)")
_ABOUT = "training.json"


def save(pipeline: RankTraining, folder: Path) -> None:
    """Write a checkpoint of the steps so far into `folder`; every rank calls it."""
    target, partial = folder / f"step-{pipeline.steps}", folder / f".step-{pipeline.steps}.partial"
    if pipeline.context.rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    pipeline.context.barrier()
    with _quiet(), lost_connections():
        write(_state(pipeline), checkpoint_id=partial)
    pipeline.context.barrier()
    if pipeline.context.rank == 0:
        training = pipeline.training
        about = {
            "steps": pipeline.steps,
            "model": training.plan.profile.name,
            "seed": training.seed,
        }
        (partial / _ABOUT).write_text(json.dumps(about) + "\n")
        _put_in_place(partial, target)
        for old in checkpoints(folder)[:-KEPT]:
            (old / _ABOUT).unlink()  # first: with it half a checkpoint would be a whole one
            shutil.rmtree(old)
    pipeline.context.barrier()


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
    _remove_partial(folder)
    try:
        yield
    finally:
        _remove_partial(folder)


def _remove_partial(folder: Path | None) -> None:
    if folder is None:
        return
    for older in folder.glob(".step-*.older"):
        target = folder / older.stem.removeprefix(".")
        if not target.exists():
            older.rename(target)
        shutil.rmtree(older, ignore_errors=True)
    for partial in folder.glob(".step-*.partial"):
        shutil.rmtree(partial, ignore_errors=True)


def checkpoints(folder: Path) -> list[Path]:
    """The whole checkpoints in a folder, the oldest first."""
    found = [path for path in folder.glob("step-*") if (path / _ABOUT).is_file()]
    numbered = [(int(match[1]), path) for path in found if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(numbered)]


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
        )
    return found[-1]


def resume(pipeline: RankTraining, checkpoint: Path) -> None:
    """Go on from a checkpoint; every rank calls it.

    Raises PartoptError where it is not of this model.
    """
    known = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    state = _state(pipeline)
    for name, tensor in sorted(state.items()):
        about = known.get(name)
        if about is None:
            raise _other_model(checkpoint, f"lacks {name}")
        if not isinstance(about, TensorStorageMetadata) or about.size != tensor.shape:
            raise _other_model(checkpoint, f"has another shape of {name}")
    pipeline.make_optimizers()
    for name, kept, parameter in _find_optimized(pipeline):
        for entry, about in known.items():
            key = entry.removeprefix(f"optimizer.{name}.")
            if key == entry or "." in key or not isinstance(about, TensorStorageMetadata):
                continue
            # a state of one number, such as Adam's count of steps, stays on the CPU
            device = parameter.device if about.size else torch.device("cpu")
            kept[key] = torch.empty(about.size, dtype=about.properties.dtype, device=device)
            state[entry] = kept[key]
    with _quiet(), lost_connections():
        load(dict(state), checkpoint_id=checkpoint)
    pipeline.begin_at(int(json.loads((checkpoint / _ABOUT).read_text())["steps"]))


def _other_model(checkpoint: Path, what: str) -> PartoptError:
    return PartoptError(f"{checkpoint}: {what}", "it is of another model", code="other-model")


def _state(pipeline: RankTraining) -> dict[str, Tensor]:
    """The tensors of this rank by their names in a checkpoint: they are read in place."""
    state: dict[str, Tensor] = {}
    for stage in pipeline.stages.values():
        state |= {f"model.{name}": p.detach() for name, p in stage.held_parameters.items()}
        state |= {f"buffer.{name}": buffer for name, buffer in stage.changing_buffers.items()}
    for name, kept, _ in _find_optimized(pipeline):
        for key, value in kept.items():
            if isinstance(value, Tensor):
                state[f"optimizer.{name}.{key}"] = value
    return state


def _find_optimized(pipeline: RankTraining) -> Iterator[tuple[str, dict[str, Any], nn.Parameter]]:
    """The parameters that this rank steps itself: name, state of the optimizer, parameter."""
    for s, optimizer in pipeline.optimizers.items():
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for name, parameter in pipeline.stages[s].held_parameters.items():
            if id(parameter) in stepped:
                yield name, optimizer.state[parameter], parameter


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what torch warns of its use of itself."""
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
        ) from error
