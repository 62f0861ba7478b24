"""The same training in one process: plain, with stale weights, with weights a batch old."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from partopt.documents.actions import A, B, F
from partopt.documents.plan import Plan
from partopt.runtime.versions import batch_of_stage
from partopt.schedules import order
from partopt.schedules.order import Order
from partopt.schedules.placement import placement_of
from tests.runtime.cases import Case, optimizer_of
from tests.runtime.stages import whole_loss, whole_model

Outcome = tuple[list[list[Tensor]], dict[int, float]]  # weights by stage, losses by microbatch


def expected(case: Case) -> Outcome:
    """Weights and losses after the steps of a case."""
    if case.plan.schedule == "pipedream":
        return stale(case)
    return delayed(case) if case.plan.schedule == "pipedream-2bw" else plain(case)


def plain(case: Case) -> Outcome:
    layers, losses = whole_model(len(case.plan.stages), case.tied), {}
    parameters = list({id(p): p for layer in layers for p in layer.parameters()}.values())
    optimizer = optimizer_of(0, parameters)
    for step in range(case.steps):
        for number in range(step * case.M, (step + 1) * case.M):
            loss = whole_loss(layers, number, case.M)
            loss.backward()
            losses[number] = float(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return _weights(layers), losses


def stale(case: Case) -> Outcome:
    """Each forward uses the weights of its stage after the updates before it in its row."""
    plan, M = case.plan, case.M
    used = versions_used(order(plan.schedule, placement_of(plan, M)), plan)
    live = whole_model(len(plan.stages))
    optimizers = [optimizer_of(s, list(layer.parameters())) for s, layer in enumerate(live)]
    losses = {}
    for step in range(case.steps):  # each from an empty pipeline
        versions = [[copy.deepcopy(layer)] for layer in live]
        gradients: list[dict[int, list[list[Tensor]]]] = [defaultdict(list) for _ in live]
        for number in range(M):
            layers = [copy.deepcopy(own[used[s, number]]) for s, own in enumerate(versions)]
            loss = whole_loss(layers, step * M + number, M)
            loss.backward()
            losses[step * M + number] = float(loss.detach())
            for s, layer in enumerate(layers):
                r = plan.stages[s].replicas
                done = gradients[s][number // r]
                done.append([p.grad for p in layer.parameters()])
                if len(done) == r:
                    for p, own in zip(live[s].parameters(), zip(*done, strict=True), strict=True):
                        p.grad = torch.stack(own).sum(0)
                    optimizers[s].step()
                    versions[s].append(copy.deepcopy(live[s]))
    return _weights(live), losses


def versions_used(orders: Order, plan: Plan) -> dict[tuple[int, int], int]:
    """The updates before each forward in the row of its rank, by stage and microbatch.

    An exchange that blocks nothing is used when the next one begins.
    """
    used, exchanging = {}, set(orders.stage[orders.kind == A].tolist())
    blocking = plan.engine.allreduce == "blocking"
    for rank in range(orders.ranks):
        made = 0
        for place in range(orders.rows[rank], orders.rows[rank + 1]):
            kind, s = int(orders.kind[place]), int(orders.stage[place])
            if kind == F:
                late = s in exchanging and not blocking and made > 0
                used[s, int(orders.microbatch[place])] = made - late
            made += kind == (A if s in exchanging else B)
    return used


def delayed(case: Case) -> Outcome:
    """W(t+1) = W(t) - step of the gradient at W(t-1), of the whole model (2BW, section 3.1)."""
    plan, M = case.plan, case.M
    G = batch_of_stage(plan, order(plan.schedule, placement_of(plan, M)), 0)
    newest = whole_model(len(plan.stages))
    optimizer = optimizer_of(0, [p for layer in newest for p in layer.parameters()])
    losses = {}
    for start in range(0, case.steps * M, M):  # each step from an empty pipeline
        before = copy.deepcopy(newest)
        for first in range(start, start + M, G):
            at = copy.deepcopy(before)
            before = copy.deepcopy(newest)
            for number in range(first, min(first + G, start + M)):
                loss = whole_loss(at, number, M)
                loss.backward()
                losses[number] = float(loss.detach())
            if first + G <= start + M:
                for layer, own in zip(newest, at, strict=True):
                    for p, q in zip(layer.parameters(), own.parameters(), strict=True):
                        p.grad = q.grad
                optimizer.step()
    return _weights(newest), losses


def _weights(layers: Sequence[nn.Module]) -> list[list[Tensor]]:
    return [[p.detach().clone() for p in layer.parameters()] for layer in layers]
