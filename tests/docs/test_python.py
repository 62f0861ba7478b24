"""The code of docs/python.md, run as it stands, one block after the other."""

import re

import pytest
import torch
from torch import nn

import partopt
from tests.docs.documents import blocks, read

PAGE = read("python.md")


def model():
    layers = [nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4)]
    return nn.Sequential(*layers)


@pytest.mark.slow
def test_the_code_of_the_page_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = {"model": model(), "example_inputs": lambda size: torch.randn(size, 64)}
    for block in blocks(PAGE, "python"):
        exec(compile(block, "docs/python.md", "exec"), names)
    written = set(re.findall(r'"([\w]+\.(?:svg|pdf|png|json))"', PAGE))
    assert {path.name for path in tmp_path.glob("*.*")} == written
    printed = capsys.readouterr().out
    assert "microbatches-needed schedule" in printed


def test_the_page_names_every_public_function():
    functions = {name for name in partopt.__all__ if name.islower() and name != "__version__"}
    named = set(re.findall(r"`(\w+)`", PAGE))
    assert functions - named == {"import_profile"}  # `partopt import` has it
