"""The closed form of a layout as a plan records it: what an iteration and a block are made of."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from partopt.documents.engine import Layout
from partopt.documents.plan import Plan
from partopt.documents.transformer import (
    BlockParts,
    ClosedForm,
    Kind,
    MeasuredScale,
    Modelled,
    PartSeconds,
)
from partopt.transformer.as_profile import estimate_again, training_of
from partopt.transformer.block import Shape, Training
from partopt.transformer.chances import errors_like, kind_of
from partopt.transformer.iteration import (
    Degrees,
    Estimate,
    has_odd_widths,
    host_bytes,
    stages_of,
)

# parts that blocks' seconds are in, beside those that nothing is measured of
_OF_BLOCKS = {
    *("products", "attention", "recurrence", "passes", "tensor", "experts"),
    *("recomputation", "bubble", "imbalance"),
}


def closed_form_of(work: Training, layout: Layout, batch: int, found: Estimate) -> ClosedForm:
    """What the estimate that was `found` of a layout is made of."""
    degrees = Degrees.of(work, layout, batch)
    shape, kinds = degrees.shape, [*work.counts]
    block, like = work.block(shape), kind_of(work, found.seconds)
    return ClosedForm(
        parts=dict(found.parts),
        scaled=[
            name
            for name in found.parts
            if name in _OF_BLOCKS and any(work.is_scaled(name, kind) for kind in kinds)
        ],
        stages=[
            "E" * stage.first + "t" * stage.blocks + "m" * stage.further + "L" * stage.last
            for stage in stages_of(work, degrees)
        ],
        tokens=work.tokens(shape),
        head_s=block.head_s,
        embedding_s=block.embedding_s,
        further_s=sum(work.further_s(shape)) if work.model.further else 0.0,
        blocks=[_block_of(work, shape, kind) for kind in kinds],
        host_bytes=round(host_bytes(work, layout, batch)),
        odd_widths=has_odd_widths(work.model),
        errors=errors_like(like) if like else None,
    )


def _block_of(work: Training, shape: Shape, kind: Kind) -> BlockParts:
    """A block of a kind: its parts that take time, its products, and what it keeps."""
    block, calibration = work.block(shape, kind), work.calibration_of(kind)
    scale = work.scale(shape, kind)
    basis: Literal["computed", "scaled", "measured"] = "computed"
    if calibration is not None:
        basis = "measured" if work.is_measured(shape, kind) else "scaled"
    return BlockParts(
        kind=kind.name,
        basis=basis,
        scale=None if calibration is None else MeasuredScale(**scale._asdict()),
        parts=[
            PartSeconds(
                name=name,
                forward_s=seconds.forward,
                backward_s=seconds.backward,
                scaled=work.is_scaled(name, kind),
            )
            for name, seconds in block.parts.items()
            if sum(seconds)
        ],
        forward_s=block.forward_s,
        backward_s=block.backward_s,
        again_s=block.again_s,
        products=[(product.n, product.k) for product in work.products(shape, kind)],
        kept_bytes=round(block.saved_bytes),
    )


def modelled_again(plan: Plan) -> Modelled | UnsetType:
    """What a plan's profile was computed from, and the closed form of it, as recorded, again."""
    about = plan.transformer
    if not about:
        return UNSET
    found = estimate_again(plan)
    if not about.form:
        return replace(about, closed_s=found.seconds)
    batch = plan.microbatch_size * (plan.microbatches or 1)
    form = closed_form_of(training_of(plan, about), about.layout, batch, found)
    return replace(about, closed_s=found.seconds, form=form)
