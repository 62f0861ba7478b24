"""What a profile measured of a trainer's block, for which the closed form's is scaled.

The profile is of the module that the trainer builds, one block or a model of several, as `partopt
profile` writes it. Of a tensor parallel group it has one rank's numbers.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Mapping, Sequence

from msgspec.structs import replace

from partopt.documents.device import same_device
from partopt.documents.profile import Measurement, Profile
from partopt.documents.topology import Topology
from partopt.documents.transformer import Calibration, Format, Kind, MeasuredBlock, Transformer
from partopt.errors import PartoptError
from partopt.trainers.parts import block_bounds, find_parts
from partopt.units import format_bytes

WIDTHS = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}  # bytes of a number
NEAR = 0.02  # of the parameters of a block: biases are not counted
HINT = "profile the block that the trainer builds for this model, in the plan's sequence"


def calibrate_kinds(
    measured: Profile | Mapping[str, Profile | Calibration],
    model: Transformer,
    sequence: int,
    format: Format,
    topology: Topology,
) -> list[Calibration]:
    """What was measured of blocks of `model`, by the names of its kinds where it has several.

    Kinds may be left out, and are computed. PartoptError for one that it does not have.
    """
    kinds = {kind.name: kind for kind in model.kinds()}
    if isinstance(measured, Profile):
        if len(kinds) > 1:
            what = f"{measured.model.name}: blocks of {model.name} are of several kinds"
            raise _fault(what, f"say of which: {', '.join(f'{name}=FILE' for name in kinds)}")
        only = model.kinds()[0]
        return [calibrate(measured, model, only, sequence, format, topology)]
    found = list[Calibration]()
    for name, profile in measured.items():
        if isinstance(profile, Calibration):
            found.append(profile)
            continue
        if name not in kinds:
            what = f"`calibrate={name}`: {model.name} has no such blocks"
            raise _fault(what, f"its kinds are {', '.join(kinds)}")
        one = calibrate(profile, model, kinds[name], sequence, format, topology)
        found.append(replace(one, kind=name))
    return found


def calibrate(
    profile: Profile,
    model: Transformer,
    kind: Kind,
    sequence: int,
    format: Format,
    topology: Topology,
) -> Calibration:
    """What was measured of a block of a kind: of several blocks in a profile the median.

    One of experts may have those of one of several ranks. Raises PartoptError with all that
    contradicts the question: times that nobody measured, another device, number format, sequence or
    width.
    """
    faults = list(_faults(profile, sequence, format, topology))
    if faults:
        raise PartoptError.together(faults)
    blocks, expert_ranks = _find_blocks(profile, model, kind)
    measured = [_measure(measurement, blocks) for measurement in profile.measured()]
    ends = [block[-1] for block in blocks]
    for measurement in profile.measured():
        faults += _shape_faults(measurement, ends, profile, model, sequence)
    if faults:
        raise PartoptError.together(faults)
    return Calibration(
        name=profile.model.name,
        sha256=profile.sha256(),
        ranks=profile.group_ranks,
        expert_ranks=expert_ranks,
        blocks=measured,
    )


def _faults(
    profile: Profile, sequence: int, format: Format, topology: Topology
) -> Iterator[PartoptError]:
    """What of a profile contradicts the question, whatever its layers are."""
    name, device = profile.model.name, topology.device.name
    computes, wanted = profile.autocast or profile.dtype, "bfloat16"
    if format == "float16":
        wanted = format
    if profile.estimated:
        what = f"{name}: its times were estimated, and the closed form computes them already"
        yield _fault(what, f"measure it on a {device}")
    if not same_device(profile.device.name, device):
        what = f"{name}: was measured on {profile.device.name}, and the cluster has {device}"
        yield _fault(what, f"measure it on a {device}")
    if computes != wanted:
        what = f"{name}: computes in {computes}, and the plan in {wanted}"
        yield _fault(what, f"measure it in {wanted}")
    tokens = profile.model.tokens_per_sample
    if tokens not in (None, sequence):
        what = f"{name}: its samples have {tokens:,} tokens, those of the plan {sequence:,}"
        yield _fault(what, HINT)


def _find_blocks(
    profile: Profile, model: Transformer, kind: Kind
) -> tuple[list[Sequence[int]], int]:
    """The layers of every block: of a series of blocks, or of a profile that is of one.

    And the ranks, on one of which their experts lie. PartoptError where neither has the parameters
    of a block of the model.
    """
    whole = range(len(profile.layers))
    ways: list[list[Sequence[int]]] = [[whole]]
    try:
        bounds = block_bounds(find_parts([layer.name for layer in profile.layers]))
    except PartoptError:  # no series
        pass
    else:
        ways.append([range(*pair) for pair in itertools.pairwise(bounds)])
    ranks = profile.group_ranks
    most = model.experts if kind.experts else 1
    wanted = {
        e: WIDTHS[profile.dtype]
        * (model.dense_parameters(kind) / ranks + model.expert_parameters(kind) / e)
        for e in range(1, most + 1)
        if most % e == 0
    }
    sizes = [
        [sum(profile.layers[i].parameter_bytes for i in block) for block in blocks]
        for blocks in ways
    ]
    for blocks, held in zip(ways, sizes, strict=True):
        for e, size_bytes in wanted.items():
            if all(abs(size / size_bytes - 1) <= NEAR for size in held):
                return blocks, e
    found = ", or ".join(format_bytes(statistics.median_low(held)) for held in reversed(sizes))
    what = (
        f"{profile.model.name}: a block has {found} of parameters, one of {model.name} on "
        f"{ranks} tensor parallel ranks {format_bytes(round(wanted[1]))}"
    )
    raise _fault(what, HINT)


def _measure(measurement: Measurement, blocks: Sequence[Sequence[int]]) -> MeasuredBlock:
    """A block in the median of several."""
    held = [
        sum(group.bytes for group in measurement.stash_groups if not block.isdisjoint(group.layers))
        for block in map(set, blocks)
    ]
    return MeasuredBlock(
        microbatch_size=measurement.microbatch_size,
        forward_s=statistics.median(
            sum(measurement.layers[i].forward_s for i in block) for block in blocks
        ),
        backward_s=statistics.median(
            sum(measurement.layers[i].backward_s for i in block) for block in blocks
        ),
        kept_bytes=statistics.median_low(held),
    )


def _shape_faults(
    measured: Measurement, ends: Sequence[int], profile: Profile, model: Transformer, sequence: int
) -> Iterator[PartoptError]:
    """Blocks whose output is not of the plan's sequence and width, whole or a rank's part."""
    samples = measured.microbatch_size
    numbers = samples * sequence * model.hidden
    parts = {1, profile.group_ranks}
    widths = {WIDTHS[profile.dtype], WIDTHS[profile.autocast or profile.dtype]}
    wanted = {width * numbers // part for width in widths for part in parts}
    if {measured.layers[i].output_bytes for i in ends} - wanted:
        found = measured.layers[ends[0]].output_bytes
        what = (
            f"{profile.model.name}: {format_bytes(found)} leave a block for {samples} "
            f"samples; {sequence:,} tokens of width {model.hidden:,} are "
            f"{format_bytes(max(wanted))}"
        )
        yield _fault(what, HINT)


def _fault(what: str, hint: str) -> PartoptError:
    return PartoptError(what, hint, code="other-block", option="calibrate")
