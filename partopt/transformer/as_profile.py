"""A layout as an ordinary profile: what one rank of every tensor and context parallel group does.

What is made again is in the backwards, and not kept. What an iteration takes once is in the
optimizer's step: the host, and what the simulator does not see.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from partopt.documents.device import shipped_device, shipped_file
from partopt.documents.engine import Layout
from partopt.documents.files import PathLike, shipped_names
from partopt.documents.plan import Plan
from partopt.documents.profile import (
    Device,
    Estimated,
    Group,
    Layer,
    LayerMeasurement,
    Measurement,
    Model,
    Profile,
    SharedParameter,
    StashGroup,
    Tensor,
)
from partopt.documents.topology import Topology
from partopt.documents.transformer import Modelled, Transformer
from partopt.errors import unknown
from partopt.transformer.block import Block, Training
from partopt.transformer.iteration import (
    PASS_S,
    Degrees,
    Estimate,
    estimate,
    once_s,
    stage_counts,
    stages_of,
    straggling,
    working_bytes,
)
from partopt.transformer.operations import model_flops
from partopt.transformer.rates import Rates
from partopt.transformer.unequal_stages import ends_of

EMBEDDING, BLOCK, NORM, FURTHER, HEAD = "embedding", "layers", "norm", "mtp", "lm_head"


class _Layer(NamedTuple):
    """A layer of the profile.

    Bytes of parameters, seconds, operations forward, bytes beside the stash while it works, stash;
    of the parameters bytes that are not trained.
    """

    name: str
    type: str
    size: int
    forward_s: float = 0.0
    backward_s: float = 0.0
    flops: float = 0.0
    beside: float = 0.0
    stash: float = 0.0
    frozen: int = 0


def rates_of(topology: Topology) -> Rates:
    """The rates of the devices of a topology. PartoptError where they are not known."""
    device = topology.device.name
    found = shipped_file(device)
    if found is None:
        raise unknown(
            f"{topology.name}: device.name: what {device} achieves in training is not known: "
            "no file in devices/ says it (docs/formats.md)",
            device,
            shipped_names("devices"),
            code="unknown-rates",
        )
    return Rates.of(found[1], topology)


def training_of(plan: Plan, about: Modelled) -> Training:
    """The training that the profile of a plan was computed `about`."""
    return Training(
        model=about.model,
        sequence=about.sequence,
        format=about.format,
        practice=about.practice,
        engine=plan.engine,
        rates=rates_of(plan.topology),
        calibration=about.calibration,
    )


def find_profile(plan: Plan, given: PathLike | None = None) -> Profile | None:
    """The profile of a plan: computed again, in the file `given`, or a shipped one; else None."""
    return profile_again(plan) or Profile.find(plan.profile.sha256, given)


def profile_again(plan: Plan) -> Profile | None:
    """The profile that was computed for a plan of a transformer's layout; None for others."""
    if not plan.transformer:
        return None
    work = training_of(plan, plan.transformer)
    batch = plan.microbatch_size * (plan.microbatches or 1)
    return profile_of(work, plan.transformer.layout, batch)


def estimate_again(plan: Plan) -> Estimate:
    """The closed form of the layout of a transformer's plan."""
    about = plan.transformer
    assert about
    batch = plan.microbatch_size * (plan.microbatches or 1)
    return estimate(training_of(plan, about), about.layout, batch)


def profile_of(work: Training, layout: Layout, batch: int) -> Profile:
    """The profile of which the plan with this layout is made, layer by layer.

    Embedding, blocks of their kinds, norm, what predicts further tokens, head.
    """
    degrees, model = Degrees.of(work, layout, batch), work.model
    shape = degrees.shape
    group, slower = degrees.t * degrees.c, 1 + straggling(degrees.devices)
    layers, message = _layers(work, degrees, layout), round(work.message_bytes(shape))
    end = layers[-1]
    one = SharedParameter(name=f"{EMBEDDING}.weight", bytes=end.size, frozen=end.frozen > 0)
    shared = {name: [one] for name in (EMBEDDING, HEAD)} if model.tied else {}
    stepped = [layer.size - layer.frozen for layer in layers]
    return Profile(
        model=Model(
            name=model.name,
            arguments={"layout": layout.inside_text()},
            tokens_per_sample=work.sequence,
        ),
        device=Device(name=work.rates.device, type="cuda"),
        dtype="float16" if work.format == "float16" else "bfloat16",
        estimated=Estimated(device=work.rates.device, sha256=_digest(work.rates.device)),
        group=Group(ranks=group, copies=degrees.c) if group > 1 else None,
        layers=[
            Layer(
                name=layer.name,
                type=layer.type,
                parameter_bytes=layer.size,
                frozen_bytes=layer.frozen,
                shared_parameters=shared.get(layer.name, []),
            )
            for layer in layers
        ],
        measurements=[
            Measurement(
                microbatch_size=shape.b,
                optimizer_s=_step_s(work, degrees, layout, batch, stepped),
                layers=[
                    LayerMeasurement(
                        forward_s=slower * layer.forward_s,
                        backward_s=slower * layer.backward_s,
                        output_bytes=message,
                        transient_bytes=round(layer.beside),
                        forward_flops=round(layer.flops),
                    )
                    for layer in layers
                ],
                tensors=[
                    Tensor(producer=i, consumers=[i + 1], bytes=message)
                    for i in range(len(layers) - 1)
                ],
                stash_groups=[
                    StashGroup(layers=[i], bytes=round(layer.stash))
                    for i, layer in enumerate(layers)
                    if layer.stash
                ],
            )
        ],
    )


def _layers(work: Training, degrees: Degrees, layout: Layout) -> list[_Layer]:
    """What a rank has of every layer; a pass of a stage takes what it does beside its layers."""
    model, practice, shape, t = work.model, work.practice, degrees.shape, degrees.t
    first, T, group = work.block(shape), work.tokens(shape), t * degrees.c
    end = round(2 * model.end_parameters / t)  # a parameter of 16 bits
    frozen = end - round(2 * work.trained_ends / t)
    # model operations as trainers count them: of one rank, a third of them forward
    headed = 2 * model.end_parameters * work.sequence * shape.b / group
    whole = model_flops(model, work.sequence, work.document) * shape.b / 3 / group
    inside = whole - (1 + model.further) * headed
    inside /= model.blocks + model.further
    logits = practice.loss.held * T * model.vocabulary / (1 if practice.loss.gathers else t)
    read, before = work.pictures_s(shape), work.pictures
    embedding_s = (first.embedding_s - sum(read)) / 2
    seconds = embedding_s + read.forward, embedding_s + read.backward
    layers = [_Layer(EMBEDDING, "Embedding", end, *seconds, frozen=frozen)]
    if before:
        size, held = (
            2 * before.tower.parameters,
            2 * (before.tower.parameters - before.trained_parameters),
        )
        stash = before.kept_bytes(shape.b, shape.recompute == "always")
        layers[0] = layers[0]._replace(size=end + size, frozen=frozen + held, stash=stash)
    for i, (kind, block) in enumerate(zip(work.kinds, _blocks(work, degrees, layout), strict=True)):
        again = block.whole_bytes if block.again_s and shape.recompute == "always" else 0.0
        seconds = block.forward_s, block.backward_s + block.again_s
        beside = working_bytes(work, shape, again)
        # of experts as many as lie on the rank
        held = round(2 * work.frozen(shape, kind))
        size = round(2 * sum(work.trained_parameters(shape, kind))) + held
        name = f"{BLOCK}.{i}"
        one = _Layer(name, "Block", size, *seconds, inside, beside, block.saved_bytes)
        layers.append(one._replace(frozen=held))
    layers.append(_Layer(NORM, "Norm", 0))
    if further := model.further:
        forward_s, backward_s = (further * seconds for seconds in work.further_s(shape))
        joining, kinds = round(2 * model.joining_parameters / t), work.further_kinds
        whole_frozen = sum(round(2 * work.frozen(shape, kind)) for kind in kinds)
        size = sum(round(2 * sum(work.trained_parameters(shape, kind))) for kind in kinds)
        size, held = size + whole_frozen + joining, whole_frozen + joining * bool(work.adapters)
        saved = sum(block.saved_bytes for block in work.further_blocks(shape))
        flops, stash = further * (inside + headed), further * (saved + logits)
        beside = further * working_bytes(work, shape, 0.0)
        one = _Layer(FURTHER, "Block", further * size, forward_s, backward_s, flops, beside, stash)
        layers.append(one._replace(frozen=further * held))
    seconds = first.head_s / 3, first.head_s * 2 / 3
    layers.append(_Layer(HEAD, "Head", end, *seconds, headed, 0.0, logits, frozen))
    for begin in [0, *stage_starts(work, degrees)] if degrees.p > 1 else ():
        layer = layers[begin]
        layers[begin] = layer._replace(
            forward_s=layer.forward_s + PASS_S, backward_s=layer.backward_s + PASS_S
        )
    return layers


def _step_s(
    work: Training, degrees: Degrees, layout: Layout, batch: int, sizes: Sequence[int]
) -> float:
    """Seconds of the step of the whole model, of which a device steps its share.

    What the first device steps, for which all wait, takes what there is once in an iteration: it
    ends its last backward behind the others.
    """
    sharers = degrees.sharers if layout.shard not in (None, "none") else 1
    held = sum(sizes) - (sizes[-1] if work.model.tied else 0)
    begins = [0, *stage_starts(work, degrees), len(sizes)]
    stages = [sum(sizes[slice(*bounds)]) for bounds in itertools.pairwise(begins)]
    first = held if degrees.p == 1 else sum(stages[:: degrees.p]) or held
    return held / first * sharers * once_s(work, layout, batch)


def _digest(device: str) -> str:
    found = shipped_device(device)
    assert found is not None
    return found[1].sha256


def stage_starts(work: Training, degrees: Degrees) -> list[int]:
    """The first layer of every stage but the first, in the profile of a layout."""
    stages, head = stages_of(work, degrees), work.model.blocks + 2 + bool(work.model.further)
    begins = accumulate(stage.blocks for stage in stages[:-1])
    before = accumulate(stage.further for stage in stages[:-1])
    return [head if done else 1 + begin for begin, done in zip(begins, before, strict=True)]


def ends_of_starts(model: Transformer, starts: Sequence[int]) -> str:
    """What `Practice.ends` says of stages that begin with these layers of the profile."""
    units = model.blocks + 2 + bool(model.further)  # the norm, which takes no time, is none
    done = [start - (start > model.blocks + 1) for start in starts]
    bounds = itertools.pairwise([0, *done, units])
    return ends_of([stop - start for start, stop in bounds], model.blocks, model.further)


def _blocks(work: Training, degrees: Degrees, layout: Layout) -> Sequence[Block]:
    """Every block; where a stage makes its first ones again, the others keep all."""
    shape, plain = degrees.shape, degrees.shape._replace(recompute="never")
    if not (most := layout.recomputation.blocks):
        return [work.block(shape, kind) for kind in work.kinds]
    again = [k < most for n in stage_counts(work, degrees) for k in range(n)]
    return [
        work.block(shape if made else plain, kind)
        for made, kind in zip(again, work.kinds, strict=True)
    ]
