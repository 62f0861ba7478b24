"""What a wheel holds, and that an installed package finds it there."""

import tomllib

import pytest

from partopt.documents import shipped
from tests.helpers import ROOT

WHEEL = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"][
    "wheel"
]


@pytest.mark.parametrize("kind", ["profiles", "topologies", "devices"])
def test_shipped_files_are_looked_for_where_the_wheel_has_them(tmp_path, monkeypatch, kind):
    installed = tmp_path / WHEEL["force-include"][kind]
    installed.mkdir(parents=True)
    monkeypatch.setattr(shipped, "__file__", str(tmp_path / "partopt/documents/shipped.py"))
    assert shipped.folder(kind) == installed


def test_the_package_says_that_it_is_typed():
    assert WHEEL["packages"] == ["partopt"]
    assert (ROOT / "partopt" / "py.typed").is_file()
