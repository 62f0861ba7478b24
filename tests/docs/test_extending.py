"""The worked examples of docs/extending.md, run as they are printed."""

import sys
import types

from partopt import planners, schedules
from partopt.cost.problem import problem_of
from partopt.schedules.check import check
from partopt.schedules.layout import Layout
from tests.docs.documents import blocks, read
from tests.helpers import flat, uniform_profile

PLANNER, PLANNER_LINE, SCHEDULE = blocks(read("extending.md"), "python")


def put_in_place(monkeypatch, name: str, source: str) -> None:
    module = types.ModuleType(name)
    exec(source, vars(module))
    monkeypatch.setitem(sys.modules, name, module)


def test_the_planner_of_the_example_plans_once_it_is_registered(monkeypatch):
    [(name, entry)] = eval(f"{{{PLANNER_LINE}}}", {"Planner": planners.Planner}).items()
    put_in_place(monkeypatch, entry.module, PLANNER)
    monkeypatch.setitem(planners.PLANNERS, name, entry)
    plan = planners.plan(name, problem_of(uniform_profile(10), flat(4)))
    assert plan.planner == "even"
    assert [(stage.start, stage.stop) for stage in plan.stages] == [(0, 2), (2, 5), (5, 7), (7, 10)]
    assert list(plan.faults()) == []


def test_the_schedule_of_the_example_is_an_order_once_it_is_registered(monkeypatch):
    put_in_place(monkeypatch, "partopt.schedules.backlog", SCHEDULE)
    monkeypatch.setitem(
        schedules.SCHEDULES, "backlog", schedules.Schedule("partopt.schedules.backlog", "two ahead")
    )
    layout = Layout([[0], [1]], 2, 4)
    order = schedules.order("backlog", layout)
    check(order, layout)
    assert order.names(0) == ["0F0", "0F1", "0F2", "0B0", "0F3", "0B1", "0B2", "0B3", "0U"]
    assert order.names(1) == ["1F0", "1F1", "1B0", "1F2", "1B1", "1F3", "1B2", "1B3", "1U"]
