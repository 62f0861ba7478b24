"""One process that learns as an asynchronous plan does: each stage with weights as old as there.

The whole model runs a microbatch after the other, from the empty pipeline of a step to the empty
one. Before each, every stage gets the weights that its forward has by the plan's order. How old
they are is counted here; of the versions that the engine keeps nothing is used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from partopt.cost.plan import layout_of
from partopt.documents.plan import Plan
from partopt.runtime.one_process import Reference, WholeModel, largest
from partopt.runtime.training import Training
from partopt.runtime.versions import batch_of_stage
from partopt.schedules import order, schedule
from partopt.schedules.order import A, B, F, Order

# S   stages, M   microbatches of the step
# G   of them that a stage learns from at once

NOISE = 1e-2  # of the largest change in a stage: what changes by less may do so by rounding alone
ULPS = 4  # by which a weight may be off


def train_stale(
    training: Training,
    whole: WholeModel,
    names: Sequence[Sequence[str]],
    rates: Sequence[float],
    equal: float,
) -> Reference:
    """The losses of a step's microbatches, and the parameters that plain SGD makes.

    Each stage has the parameters `names`, and a learning rate. Errors are relative to what changed:
    the largest change of the parameter, but no less than the share `NOISE` of the largest in its
    stage, and no less than that of which `ULPS` of the weight are the share `equal`.
    """
    plan, M = training.plan, training.microbatches
    orders = order(plan.schedule, layout_of(plan, M))
    stages = [
        _StageWeights(
            {name: whole.parameters[name] for name in names[s]},
            used_versions(plan, orders, s, M),
            batch_of_stage(plan, orders, s),
            rates[s],
        )
        for s in range(len(plan.stages))
    ]
    losses = {}
    for number in range(M):
        for stage in stages:
            stage.use(number)
        losses[number] = whole.backward(number)
        for stage in stages:
            stage.learn(number)
    found = Reference(losses, {}, {})
    for stage in stages:
        newest = stage.newest
        changed = {name: largest(each - stage.start[name]) for name, each in newest.items()}
        most = max(changed.values(), default=0.0)
        for name, weight in newest.items():
            rounding = ULPS * torch.finfo(weight.dtype).eps * largest(stage.start[name])
            found.tensors[name] = weight
            found.scales[name] = max(changed[name], NOISE * most, rounding / equal)
    return found


class _StageWeights:
    """The versions of one stage's weights, by the updates that made them."""

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], used: list[int], batch: int, rate: float
    ) -> None:
        self._parameters, self._used, self._batch, self._rate = parameters, used, batch, rate
        self.start = {name: each.detach().clone() for name, each in parameters.items()}
        self._updates, self._versions = 0, {0: self.start}
        self._drop_gradients()

    def use(self, microbatch: int) -> None:
        """Give the model the weights of a microbatch."""
        with torch.no_grad():
            for name, weight in self._versions[self._used[microbatch]].items():
                self._parameters[name].copy_(weight)

    def learn(self, microbatch: int) -> None:
        """Take the gradients of a microbatch, and step by the mean of a batch where it ends one."""
        for name, parameter in self._parameters.items():
            if parameter.grad is not None:
                self._total[name] += parameter.grad
            parameter.grad = None
        if (microbatch + 1) % self._batch == 0:
            made = {
                name: weight.sub(self._total[name] / self._batch, alpha=self._rate)
                for name, weight in self.newest.items()
            }
            self._updates += 1
            self._versions[self._updates] = made
            self._drop_gradients()
        needed = {self._updates, *self._used[microbatch + 1 :]}
        self._versions = {n: each for n, each in self._versions.items() if n in needed}

    @property
    def newest(self) -> dict[str, Tensor]:
        """The weights that all updates have made."""
        return self._versions[self._updates]

    def _drop_gradients(self) -> None:
        self._total = {name: torch.zeros_like(weight) for name, weight in self.start.items()}


def used_versions(plan: Plan, orders: Order, s: int, M: int) -> list[int]:
    """The updates of stage s that the forward of each of M microbatches knows of.

    PipeDream's knows of all that precede it in its rank's row; an exchange that blocks nothing
    ends when the next one begins. 2BW's, of batch t, knows of all batches but the last: t - 1
    (Narayanan et al., ICML 2021, section 3.1).
    """
    if not schedule(plan.schedule).steps_in_backwards:
        G = batch_of_stage(plan, orders, s)
        return [max(0, m // G - 1) for m in range(M)]
    own = orders.stage == s
    exchanges = plan.stages[s].replicas > 1
    late = exchanges and plan.engine.allreduce != "blocking"
    used = [0] * M
    for rank in plan.stages[s].ranks:
        updates = 0
        for place in range(orders.rows[rank], orders.rows[rank + 1]):
            if own[place] and orders.kind[place] == F:
                used[orders.microbatch[place]] = max(0, updates - late)
            updates += own[place] and orders.kind[place] == (A if exchanges else B)
    return used
