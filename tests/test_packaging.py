"""What a wheel holds, and that an installed package finds it there."""

import ast
import hashlib
import re
import sys
import tomllib

import pytest

from partopt.documents import files
from tests.helpers import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
APACHE_2 = "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"  # sha256
WHEEL = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"][
    "wheel"
]


@pytest.mark.parametrize("kind", ["profiles", "topologies", "devices", "models"])
def test_shipped_files_are_looked_for_where_the_wheel_has_them(tmp_path, monkeypatch, kind):
    installed = tmp_path / WHEEL["force-include"][kind]
    installed.mkdir(parents=True)
    monkeypatch.setattr(files, "__file__", str(tmp_path / "partopt/documents/files.py"))
    assert files.shipped_folder(kind) == installed


def test_the_package_says_that_it_is_typed():
    assert WHEEL["packages"] == ["partopt"]
    assert (ROOT / "partopt" / "py.typed").is_file()


def test_the_licence_is_the_standard_text_and_in_every_package():
    assert (PROJECT["license"], PROJECT["license-files"]) == ("Apache-2.0", ["LICENSE"])
    text = (ROOT / "LICENSE").read_bytes()
    assert hashlib.sha256(text).hexdigest() == APACHE_2


@pytest.mark.slow
def test_a_plain_install_brings_all_that_the_package_imports():
    """`pip install .` is enough for every verb; two packages are used where the user has them."""
    trees = [ast.parse(path.read_text()) for path in (ROOT / "partopt").rglob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
    outside = {name.partition(".")[0] for name in names} - {*sys.stdlib_module_names, "partopt"}
    required = {re.split("[^A-Za-z0-9_-]", each)[0].lower() for each in PROJECT["dependencies"]}
    required -= {"shfmt-py"}  # a program, which is started
    assert outside - {"transformers", "pynvml"} == required - {"pyyaml"} | {"yaml", "markupsafe"}


@pytest.mark.slow
def test_hints_name_what_can_be_installed():
    """No index has partopt: its extras are installed from a clone."""
    files = [*(ROOT / "partopt").rglob("*.py"), *ROOT.glob("examples/*.py"), *ROOT.glob("**/*.md")]
    assert not [str(path) for path in files if re.search(r"install .?partopt\[", path.read_text())]
