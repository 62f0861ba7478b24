"""Tokens, operations, utilisation and money from samples/s.

Utilisation is the model FLOPs utilisation (MFU) of PaLM (Chowdhery et al., 2022, appendix B): the
operations of forward and backward of the model itself, whatever a plan computes again, over the
peak of all devices. Those of the backward are twice the forward's: a product of the forward has
one for the gradient of its input and one for that of its weights.
"""

from __future__ import annotations

import msgspec

from partopt.documents.device import TF32, same_device, shipped_device, shipped_file
from partopt.documents.plan import ProfileReference
from partopt.documents.profile import Profile
from partopt.documents.stage import Figures
from partopt.documents.topology import Topology
from partopt.documents.transformer import BITS, Format
from partopt.errors import PartoptError
from partopt.units import format_flops, parse_flops

PASSES = 3  # forwards that forward and backward take together
_HOUR_S = 3600.0
_ROUNDING = 1 + 1e-9


def figures_of(
    samples_per_s: float, profile: ProfileReference, topology: Topology
) -> Figures | msgspec.UnsetType:
    """What follows from samples/s on all devices of `topology`; unset where nothing does.

    Raises PartoptError where that takes more operations than the devices do.
    """
    devices = topology.devices * topology.group_ranks
    tokens, flops, price = (
        profile.tokens_per_sample,
        profile.sample_flops,
        topology.device.price_per_hour or None,
    )
    device_flops = flops and flops * samples_per_s / devices
    if device_flops and profile.peak_flops and device_flops > profile.peak_flops * _ROUNDING:
        raise _above_peak(topology.name, device_flops, profile.peak_flops, topology.device.name)
    money = price and price * devices
    bought = money and samples_per_s * _HOUR_S / money
    found = Figures(
        tokens_per_s=tokens and tokens * samples_per_s,
        device_flops_per_s=device_flops,
        mfu=device_flops / profile.peak_flops if device_flops and profile.peak_flops else None,
        price_per_hour=money,
        samples_per_money=bought,
        tokens_per_money=tokens and bought and tokens * bought,
    )
    return msgspec.UNSET if found == Figures() else found


def flops_of(
    profile: Profile, topology: Topology, products: Format | None = None
) -> tuple[float | None, float | None]:
    """Operations of a sample, and the peak of a device of `topology` in the profile's format.

    Of a transformer it is that of the format of its blocks' `products`.
    The peak is None unless the times are those of this device, and its file is shipped with it.
    float32 may be multiplied as TF32: that peak counts where a step does more than the other.
    Neither is known where a step does more than any peak: `PASSES` counts causal attention and the
    gradient of the model's input whole, or the times are another device's. PartoptError where they
    are not, and the forward's operations alone take longer at the peak than the step.
    """
    sample = sample_flops(profile)
    if sample is None or not (peaks := _peaks_flops(profile, topology, products)):
        return sample, None
    step_flops = max(
        sample / profile.group_ranks * measurement.microbatch_size / seconds
        for measurement in profile.measured()
        if (seconds := sum(layer.forward_s + layer.backward_s for layer in measurement.layers))
    )
    same = same_device(profile.estimated_for or profile.device.name, topology.device.name)
    if same and step_flops > PASSES * max(peaks):
        name = profile.model.name
        raise _above_peak(name, step_flops / PASSES, max(peaks), topology.device.name)
    reachable = [peak for peak in peaks if step_flops <= peak]
    return (sample, min(reachable) if same else None) if reachable else (None, None)


def sample_flops(profile: Profile) -> float | None:
    """Operations of forward and backward of a sample, those of all ranks of a group.

    None where some layer does not say or nothing was measured, where a parameter is frozen, so that
    the backward is shorter, and of a profile of a CPU, which stands for devices that it knows
    nothing of.
    """
    if not profile.measured():
        return None
    measured = profile.measured()[-1]
    counts = [layer.forward_flops for layer in measured.layers]
    known = sum(count for count in counts if count is not None)
    if None in counts or not known or profile.device.type == "cpu":
        return None
    if any(layer.frozen_bytes for layer in profile.layers):
        return None
    return PASSES * known * profile.group_ranks / measured.microbatch_size


def _peaks_flops(profile: Profile, topology: Topology, products: Format | None) -> list[float]:
    """Peaks of the topology's device in the profile's format, if they are known."""
    file = shipped_file(topology.device.name)
    if products and BITS[products] < 16 and file and file[1].training:
        peak = file[1].training.peaks.get("fp8" if products == "mxfp8" else products)
        return [parse_flops(peak.value)] if peak else []
    found, estimated = shipped_device(topology.device.name), profile.estimated
    if found is None or (estimated is not None and estimated.sha256 != found[1].sha256):
        return []  # the second: of a user's device file
    dtype = profile.autocast or profile.dtype
    formats = (dtype, TF32) if dtype == "float32" else (dtype,)
    return [found[1].peaks_flops[name] for name in formats if name in found[1].peaks_flops]


def _above_peak(where: str, flops: float, peak: float, device: str) -> PartoptError:
    return PartoptError(
        f"{where}: {format_flops(flops)} a device, above {format_flops(peak)}, the peak of "
        f"{device}",
        "the times are too short or are another device's: profile the model again, without "
        "`calibrate`",
        code="above-peak",
    )
