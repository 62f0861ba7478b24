"""partopt itself: what `partopt run` executes."""

from __future__ import annotations

from partopt.documents.engine import OWN
from partopt.trainers.trainer import Says, Trainer

PARTOPT = Trainer(
    name="partopt",
    summary="partopt: a plan as it is, run on torch.distributed",
    tried="this version",
    schedules=None,
    says=Says(replicas="any", recomputed="each", orders=()),
    engine=OWN,
    sources={
        "schedules": "partopt.runtime.engine: every action in the order of the plan",
        "waits": "partopt.runtime.engine: messages go on beside compute; over gloo it waits for "
        "those of a plan that says so",
        "in_turn": "partopt.runtime.engine: one action after the other",
        "messages": "partopt.runtime.messages: the tensors of a cut are one message",
        "gradients": "autograd's own, in the number format of the parameters",
        "allreduce": "partopt.runtime.updates: beside the last backward",
        "bucket_bytes": "partopt.runtime.updates: as the plan says; that of torch's DDP",
        "buffers": "partopt.runtime.messages: those of the microbatches in flight",
        "recompute": "partopt.replay.replayed_stage: a stage keeps its input",
        "shard": "partopt.runtime.optimizers: a replica steps some parameters",
        "optimizer_bytes": "torch.optim, beside 16-bit parameters a float32 copy",
    },
)
