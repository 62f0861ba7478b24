"""Whether times that were estimated are of the devices of a cluster, and how to estimate others."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from partopt.documents.device import same_device, shipped_device
from partopt.documents.profile import Profile
from partopt.documents.topology import Topology
from partopt.errors import PartoptError


def check_device(profile: Profile, topology: Topology) -> None:
    """Raise PartoptError for a profile that was estimated for another device than the topology's.

    The hint is the command that estimates it for that device.
    """
    device = topology.device.name
    if profile.estimated is None or same_device(profile.estimated.device, device):
        return
    raise PartoptError(
        f"{topology.name}: device.name: {device}, but {profile.model.name} was estimated for "
        f"{profile.estimated.device}",
        f"estimate it for {device}: {_command(profile, topology)}",
        code="estimated-for-another-device",
        option="topology",
    )


def _command(profile: Profile, topology: Topology) -> str:
    """The command that makes `profile` for the device of `topology`, as far as it says how."""
    model, found = profile.model, shipped_device(topology.device.name)
    name, formats = (found[0], found[1].peaks_flops) if found else ("FILE", {profile.dtype: 0.0})
    options: dict[str, object] = {}
    if model.arguments:
        words = {
            key: str(value).lower() if isinstance(value, bool) else str(value)
            for key, value in model.arguments.items()
        }
        options["arguments"] = json.dumps(words)
    options["microbatch_sizes"] = [
        measurement.microbatch_size for measurement in profile.measurements
    ]
    if profile.dtype in formats:
        options["dtype"] = profile.dtype
    if profile.autocast:
        options["autocast"] = profile.autocast
    if model.name != Path(model.entry.partition(":")[0]).stem:
        options["name"] = model.name
    given = " ".join(f"`{option}={value}`" for option, value in options.items())
    output = shlex.quote(f"{model.name}.{name}-estimated.{profile.dtype}.json")
    return f"`estimate_source` {name} {shlex.quote(model.entry or 'MODEL')} {given} -o {output}" + (
        "" if found else f"; FILE says what a {topology.device.name} does (docs/formats.md)"
    )
