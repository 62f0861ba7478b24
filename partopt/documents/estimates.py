"""Estimated profiles stay with the device that they were estimated for."""

from __future__ import annotations

import shlex
from pathlib import Path

from partopt.documents import shipped
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
        device=device,
        estimated=profile.estimated.device,
    )


def cluster_of(device: str) -> str | None:
    """The first shipped topology of such devices."""
    for name in shipped.names("topologies"):
        path = str(shipped.folder("topologies") / f"{name}.yaml")
        if same_device(Topology.load(path).device.name, device):
            return name
    return None


def next_cluster(profile: Profile) -> str:
    """The topology to name in a command that plans `profile`: of its device where one is shipped.

    An estimate can be planned on no other.
    """
    device = profile.estimated_for or profile.device.name
    return cluster_of(device) or ("dgx-a100" if profile.estimated is None else "CLUSTER")


def _command(profile: Profile, topology: Topology) -> str:
    """The command that makes `profile` for the device of `topology`, as far as it says how."""
    model, found = profile.model, shipped_device(topology.device.name)
    name, formats = (found[0], found[1].peaks_flops) if found else ("FILE", {profile.dtype: 0.0})
    words = ["partopt", "profile", model.entry or "MODEL"]
    for key, value in model.arguments.items():
        words += ["--set", f"{key}={value}"]
    words += ["--microbatch", ",".join(str(each.microbatch_size) for each in profile.measurements)]
    words += ["--dtype", profile.dtype] if profile.dtype in formats else []
    words += ["--autocast", profile.autocast] if profile.autocast else []
    if model.name != Path(model.entry.partition(":")[0]).stem:
        words += ["--name", model.name]
    if profile.group is not None:
        known = topology.name in shipped.names("topologies")
        words += ["--group", str(profile.group.ranks)]
        words += ["--topology", topology.name if known else "CLUSTER"]
    words += ["--estimate", name, "-o", f"{model.name}.{name}-estimated.{profile.dtype}.json"]
    return shlex.join(words) + (
        "" if found else f", where FILE says what a {topology.device.name} does (docs/formats.md)"
    )
