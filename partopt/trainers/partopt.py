"""partopt itself: what `partopt run` executes."""

from __future__ import annotations

from partopt.documents.engine import OWN
from partopt.trainers.sources import Sources
from partopt.trainers.trainer import Says, Trainer

PARTOPT = Trainer(
    name="partopt",
    summary="partopt: a plan as it is, run on torch.distributed",
    tried="this version",
    schedules=None,
    says=Says(replicas="any", recomputed="each", orders=()),
    engine=OWN,
    sources=Sources("partopt"),
)
