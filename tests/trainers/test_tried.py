"""What a target says that it was tried with is what `make test-exporters` installs."""

import importlib.metadata
import re

import pytest

from partopt import TRAINERS
from partopt.trainers import writers
from tests.helpers import ROOT
from tests.trainers.own_code import installed

PINS = dict(
    line.split("==")
    for name in ("constraints.txt", "constraints-exporters.txt")
    for line in (ROOT / name).read_text().splitlines()
    if "==" in line
)


@pytest.mark.parametrize("to", writers())
def test_the_versions_are_those_of_the_tests(to):
    found = re.findall(r"([A-Za-z][A-Za-z ]*) ([0-9.]+[0-9])", TRAINERS[to].tried)
    assert found
    for title, version in found:
        package = title.strip().lower().replace(" ", "-")
        assert PINS[package] == version
        if installed(package):
            assert importlib.metadata.version(package).partition("+")[0] == version
