"""Weights for a model that is larger than memory: one real set for all units that are alike."""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from partopt.profiler.fake import replace_tensors


class SharedWeights:
    """Real weights for the fake ones of a model: units of a group have those of its first.

    Weights outside of the groups get their own, tied ones stay tied.
    """

    def __init__(self, model: nn.Module, groups: Sequence[Sequence[nn.Module]]) -> None:
        self.model = model
        self._like: dict[int, nn.Parameter] = {}  # id of a fake -> the fake whose weight it has
        self._parts: list[list[nn.Parameter]] = []  # what stands for others, by group
        self._real: dict[int, nn.Parameter] = {}  # by the id of its fake; alike ones share memory
        for units in [*groups, [model]]:
            self._add(units)
        self._members = Counter(id(self._like[id(each)]) for each in model.parameters())

    def _add(self, units: Sequence[nn.Module]) -> None:
        first = list(units[0].parameters())
        self._parts.append([each for each in first if id(each) not in self._like])
        for unit in units:
            for mine, its in zip(first, unit.parameters(), strict=True):
                self._like.setdefault(id(its), self._like.get(id(mine), mine))

    def bytes_with(self, copies: int) -> int:
        """Bytes of the real weights, `copies` of each that is trained."""
        return sum(
            each.nbytes * (copies if each.requires_grad else 1)
            for part in self._parts
            for each in part
        )

    def in_place(self) -> contextlib.AbstractContextManager[None]:
        """The context in which the model has the real weights; they are made at the first time."""
        return replace_tensors(self.model, self._weight)

    def drop_unused_gradients(self) -> None:
        """Take the gradients from weights that got none in the steps so far."""
        gradients = {id(weight.grad): weight.grad for weight in self._real.values()}
        unused = {key for key, each in gradients.items() if each is not None and not each.any()}
        for weight in self._real.values():
            if id(weight.grad) in unused:
                weight.grad = None

    def sole_names(self) -> set[str]:
        """Names of the parameters that share their real weight with no other."""
        return {
            name
            for name, fake in self.model.named_parameters()
            if self._members[id(self._like[id(fake)])] == 1
        }

    def trained(self) -> list[tuple[int, list[nn.Parameter]]]:
        """The real weights that are trained, with how many parameters each stands for.

        Those of one group and of one number are a list.
        """
        lists: defaultdict[tuple[int, int], list[nn.Parameter]] = defaultdict(list)
        for index, part in enumerate(self._parts):
            for fake in part:
                if fake.requires_grad:
                    lists[index, self._members[id(fake)]].append(self._real[id(fake)])
        return [(members, weights) for (_, members), weights in lists.items()]

    def _weight(self, fake: Tensor) -> Tensor:
        like = self._like[id(fake)]
        if id(like) not in self._real:
            self._real[id(like)] = _make(like)
        if id(fake) not in self._real:
            self._real[id(fake)] = _alias(self._real[id(like)])
        return self._real[id(fake)]


def _make(fake: nn.Parameter) -> nn.Parameter:
    """A weight, with its gradient, that keeps the magnitude of what it multiplies."""
    made = torch.empty(fake.shape, dtype=fake.dtype, device=fake.device)
    if not fake.is_floating_point():
        made.zero_()
    elif fake.dim() < 2:
        made.fill_(1.0)
    else:
        made.normal_(std=(fake[0].numel() or 1) ** -0.5)
    weight = nn.Parameter(made, requires_grad=fake.requires_grad)
    if weight.requires_grad:
        # beside the weights, not among activations: what is freed there serves the next step whole
        weight.grad = torch.zeros_like(weight)
    return weight


def _alias(weight: nn.Parameter) -> nn.Parameter:
    """A parameter of its own with a weight's memory, and with that of its gradient.

    As one parameter in many places autograd would hold the sum of their gradients in memory of its
    own until the last is there.
    """
    alias = nn.Parameter(weight.detach(), requires_grad=weight.requires_grad)
    alias.grad = weight.grad
    return alias
