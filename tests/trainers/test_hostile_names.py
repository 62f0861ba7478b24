"""Names of models, clusters and layers are text: they run nowhere and end nothing."""

import ast

import pytest
from msgspec.structs import replace

from partopt import TRAINERS, Plan, export_plan
from partopt.trainers import writers
from tests.bash import run_bash
from tests.helpers import uniform_profile
from tests.trainers.plans import planned
from tests.trainers.readers import assigned

HOSTILE = [
    '"""\nimport os\nos.system("touch OWNED")\n"""',
    "'; touch OWNED; echo '",
    "$(touch OWNED)`touch OWNED`",
    "\ntouch OWNED\n",
    "\r\ntouch OWNED",
    "a\\",
    '\\"""',
    "{stages}{name!r}%s",
    "é中\u2028touch OWNED\u0085x\x00\x1b[2J",
    "*/ // # --flag",
]


def hostile(name: str, schedule: str) -> Plan:
    """A plan whose model and cluster have that name, and its layers where names may have it.

    Documents refuse layers with control characters in their names.
    """
    own = name if name.isprintable() else "gpt"
    layers = [f"{own}.wte", *(f"{own}.h.{block}" for block in range(4)), f"{own}.lm_head"]
    plan = planned([2, 3, 4], profile=uniform_profile(6, names=layers), schedule=schedule)
    return replace(
        plan,
        profile=replace(plan.profile, name=name),
        topology=replace(plan.topology, name=name),
    )


def structure(text: str) -> str:
    """A Python text without what its literals are."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node.value = "text"
    return ast.dump(tree)


def written(name: str, to: str) -> str:
    return export_plan(hostile(name, "gpipe" if to == "torchgpipe" else "1f1b"), to).main


@pytest.mark.slow
@pytest.mark.parametrize("to", [name for name in writers() if TRAINERS[name].suffix == ".py"])
def test_python_has_the_statements_that_it_has_for_a_plain_name(to):
    plain = structure(written("gpt", to))
    for name in HOSTILE:
        assert structure(written(name, to)) == plain


@pytest.mark.slow
@pytest.mark.parametrize("to", [name for name in writers() if TRAINERS[name].suffix == ".sh"])
def test_a_shell_reads_what_it_reads_of_a_plain_name(to, tmp_path):
    for name in HOSTILE:
        text = written(name, to)
        assert [line for line in text.splitlines() if not line.startswith("#")] == [
            line for line in written("gpt", to).splitlines() if not line.startswith("#")
        ]
        run_bash(text, strict=True, cwd=tmp_path).check_returncode()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", [name for name in HOSTILE if name.isprintable()])
def test_names_of_layers_reach_accelerate_as_they_are(name):
    points = assigned(written(name, "accelerate"), "ARGUMENTS")["split_points"]
    assert points == [f"{name}.h.1", f"{name}.h.2", f"{name}.h.3"]
