"""A training that goes on from a checkpoint is the training that was never stopped."""

from __future__ import annotations

from pathlib import Path

import pytest

from partopt.documents.run import Run
from tests.runtime.test_run import MODEL, made, partopt

__all__ = ["made"]  # the fixture

DROPOUT = MODEL.replace("nn.Tanh())", "nn.Dropout(0.5), nn.BatchNorm1d(5), nn.Tanh())")


def losses(*arguments: object) -> list[float]:
    ran = partopt("run", *arguments, "--json")
    assert ran.returncode == 0, ran.stderr
    return Run.parse(ran.stdout.encode()).losses


def test_it_goes_on_under_its_plan_and_under_another(made, tmp_path):
    """Weights, Adam's state, running statistics, the numbers of dropout and the data go on."""
    plan, model = made("kept", DROPOUT, cuts=[2])
    folder = tmp_path / "checkpoints"
    whole = losses(plan, model, "--steps", 4)
    assert losses(plan, model, "--steps", 2, "--save", folder) == whole[:2]
    assert losses(plan, model, "--steps", 2, "--resume", folder) == whole[2:]
    assert len(set(whole)) == 4
    smooth, model = made("smooth", MODEL, cuts=[2])
    other, same = made("other", MODEL, cuts=[1], replicas=[2, 1])
    again = tmp_path / "again"
    losses(smooth, model, "--steps", 2, "--save", again)
    expected = losses(smooth, model, "--steps", 4)[2:]
    resumed = losses(other, same, "--steps", 2, "--resume", again)
    assert resumed == pytest.approx(expected, rel=1e-5)


def test_the_last_two_are_kept_and_a_half_written_one_is_none(made, tmp_path):
    plan, model = made("two", cuts=[2])
    folder = tmp_path / "checkpoints"
    losses(plan, model, "--steps", 3, "--save", folder, "--every", 1)
    assert sorted(each.name for each in folder.iterdir()) == ["step-2", "step-3"]
    (folder / ".step-9.partial").mkdir()
    (folder / "step-9").mkdir()  # without what is written last
    ran = partopt("run", plan, model, "--steps", 1, "--resume", folder, "--save", folder)
    assert ran.returncode == 0, ran.stderr
    assert (folder / "step-4" / "training.json").is_file()


def test_what_is_no_checkpoint_of_the_model_is_refused(made, tmp_path):
    plan, model = made("refusing", cuts=[2])
    empty = partopt("run", plan, model, "--resume", tmp_path)
    assert (empty.returncode, empty.stdout) == (2, "")
    assert "no whole checkpoint in it" in empty.stderr
    folder = tmp_path / "checkpoints"
    losses(plan, model, "--steps", 1, "--save", folder)
    wide, wider = made("wide", MODEL.replace("width=8", "width=12"), cuts=[2])
    other = partopt("run", wide, wider, "--steps", 1, "--resume", folder)
    assert other.returncode != 0
    assert "has another shape of " in other.stderr and "it is of another model" in other.stderr
    every = partopt("run", plan, model, "--every", 2)
    assert (every.returncode, every.stdout) == (2, "")
    file = Path(tmp_path / "file")
    file.write_text("")
    taken = partopt("run", plan, model, "--save", file)
    assert (taken.returncode, "cannot be written to" in taken.stderr) == (2, True)
