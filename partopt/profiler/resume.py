"""Going on with a profile that was stopped: whether it is of the same, and what remains."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from partopt.documents.profile import Layer, Model, Profile
from partopt.errors import PartoptError
from partopt.profiler.device import describe_device, describe_environment
from partopt.profiler.settings import invalid_option
from partopt.profiler.subject import Subject

_HINT = "measure as it was measured, or leave out `resume`"


def check_resume(resume: object) -> Profile | None:
    """The profile to go on with. Raises PartoptError where it is none."""
    if resume is not None and not isinstance(resume, Profile):
        what = f"of type {type(resume).__name__}, not a Profile"
        raise invalid_option("resume", resume, what, "give Profile.load(path), or leave it out")
    return resume


def check_same_subject(resumed: Profile, model: Model, subject: Subject) -> None:
    """Raise PartoptError, naming each field, unless `resumed` was measured of this and like this.

    Where a model was loaded from is compared without its folder, and not at all where it is not
    known.
    """
    settings = subject.settings
    device, environment = describe_device(settings.device), describe_environment(settings.device)
    pairs = {
        "model.entry": (_file_of(resumed.model.entry), _file_of(model.entry)),
        "model.arguments": (resumed.model.arguments, model.arguments),
        "device.name": (resumed.device.name, device.name),
        "dtype": (resumed.dtype, settings.dtype_name),
        "autocast": (resumed.autocast, settings.autocast_name),
        "compiled": (resumed.compiled, settings.compiled),
        "group.ranks": (resumed.group_ranks, subject.group.ranks),
        "environment.torch": (resumed.environment.torch, environment.torch),
        "environment.cuda": (resumed.environment.cuda, environment.cuda),
    }
    if not (resumed.model.entry and model.entry):
        del pairs["model.entry"]
    wrong = [
        f"{field} is {there!r} in it and {here!r} here"
        for field, (there, here) in pairs.items()
        if there != here
    ]
    if wrong:
        fields = [field for field, (there, here) in pairs.items() if there != here]
        raise _mismatch("; ".join(wrong), fields)


def check_same_layers(resumed: Sequence[Layer], found: Sequence[Layer]) -> None:
    """Raise PartoptError unless the model has the layers of the profile that is gone on with."""
    if len(resumed) != len(found):
        raise _mismatch(f"layers are {len(resumed)} in it and {len(found)} here", ["layers"])
    for index, (there, here) in enumerate(zip(resumed, found, strict=True)):
        for field in ("name", "call", "type", "parameter_bytes"):
            old, new = getattr(there, field), getattr(here, field)
            if old != new:
                path = f"layers[{index}].{field}"
                raise _mismatch(f"{path} is {old!r} in it and {new!r} here", [path])


def _mismatch(what: str, fields: list[str]) -> PartoptError:
    return PartoptError(
        f"`resume`: a profile of something else: {what}",
        _HINT,
        code="resume-mismatch",
        option="resume",
        mismatched=fields,
    )


def _file_of(entry: str) -> str:
    return Path(entry).name
