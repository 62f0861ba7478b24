"""The worked example of docs/extending.md, run as it is printed."""

import sys
import types

from partopt import plan as plans
from partopt import planners
from partopt.cost.problem import problem_of
from tests.docs.documents import blocks, read
from tests.helpers import flat, uniform_profile


def test_the_planner_of_the_example_plans_once_it_is_registered(monkeypatch):
    source, line = blocks(read("extending.md"), "python")
    registered = eval(f"{{{line}}}", {"Planner": planners.Planner})
    [(name, entry)] = registered.items()
    module = types.ModuleType(entry.module)
    exec(source, vars(module))
    monkeypatch.setitem(sys.modules, entry.module, module)
    monkeypatch.setitem(planners.PLANNERS, name, entry)
    plan = planners.plan(name, problem_of(uniform_profile(10), flat(4)))
    assert plan.planner == "even"
    assert [(stage.start, stage.stop) for stage in plan.stages] == [(0, 2), (2, 5), (5, 7), (7, 10)]
    assert list(plans.find_faults(plan)) == []
