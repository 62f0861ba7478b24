"""Learning rates at which every version of the weights is told from the next.

Under a rate that is good for training, weights one update older give nearly the same gradients:
what used the wrong ones would pass for rounding. Where updates are too large, rounding grows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from partopt.runtime.one_process import WholeModel

SEEN = 0.1  # share by which the updates of all stages together change the gradients
TRIAL = 1e-3  # of its weights by which a stage is changed to find out
MOST = 0.1  # of its weights by which an update may change it


def visible_rates(whole: WholeModel, names: Sequence[Sequence[str]]) -> list[float]:
    """The rate of each stage, which has the parameters `names`, for plain SGD.

    An update of a stage alone, by the gradient of a microbatch, changes the gradient of some stage
    by the share `SEEN` over the number of stages. 0 where it has no gradient.
    """
    before = _gradients(whole)
    return [_rate(whole, names, s, before) for s in range(len(names))]


def _rate(
    whole: WholeModel, names: Sequence[Sequence[str]], s: int, before: dict[str, Tensor]
) -> float:
    start = {name: whole.parameters[name].detach().clone() for name in names[s]}
    gradient = _norm([before[name] for name in names[s]])
    if gradient == 0.0:
        return 0.0
    # what begins at zero, as a head may, is compared with all weights
    weights = _norm(list(start.values())) or _norm(list(whole.parameters.values()))
    rate = TRIAL * weights / gradient
    with torch.no_grad():
        for name, weight in start.items():
            whole.parameters[name].copy_(weight - rate * before[name])
    after = _gradients(whole)
    with torch.no_grad():
        for name, weight in start.items():
            whole.parameters[name].copy_(weight)
    changed = max(
        _norm([after[name] - before[name] for name in own])
        / max(_norm([before[name] for name in own]), 1e-30)
        for own in names
    )
    return rate * min(SEEN / len(names) / max(changed, 1e-30), MOST / TRIAL)


def _gradients(whole: WholeModel) -> dict[str, Tensor]:
    """The gradients of the first microbatch."""
    whole.model.zero_grad()
    whole.backward(0)
    found = {
        name: torch.zeros_like(each) if each.grad is None else each.grad
        for name, each in whole.parameters.items()
    }
    whole.model.zero_grad()
    return found


def _norm(tensors: Sequence[Tensor]) -> float:
    parts = [each.detach().double().norm() for each in tensors]
    return float(torch.stack(parts).norm()) if parts else 0.0
