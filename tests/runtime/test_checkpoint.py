"""A training that goes on from a checkpoint is the training that was never stopped."""

import shutil
from pathlib import Path

import pytest

from partopt import Plan, run_source
from partopt.errors import PartoptError
from partopt.runtime.checkpoint import checkpoints, last_checkpoint, removing_partial
from tests.runtime.test_run import MODEL, document_of, made, partopt

__all__ = ["made"]  # the fixture

DROPOUT = MODEL.replace("nn.Tanh())", "nn.Dropout(0.5), nn.BatchNorm1d(5), nn.Tanh())")


def losses(*arguments):
    return document_of(partopt("run", *arguments, "--json")).losses


@pytest.mark.slow
def test_it_goes_on_under_its_plan(made, tmp_path):
    """Weights, Adam's state, running statistics and the numbers of dropout go on."""
    plan, model = made("kept", DROPOUT, cuts=[2])
    whole = losses(plan, model, "--steps", 4, "--save", tmp_path / "a", "--every", 2)
    shutil.rmtree(tmp_path / "a" / "step-4")
    assert losses(plan, model, "--steps", 2, "--resume", tmp_path / "a") == whole[2:]
    assert len(set(whole)) == 4


@pytest.mark.slow
def test_it_goes_on_under_another_plan_of_the_model(made, tmp_path):
    """A half-written checkpoint is none, and the last two are kept."""
    plan, model = made("smooth", cuts=[2])
    folder = tmp_path / "checkpoints"
    whole = losses(plan, model, "--steps", 4, "--save", folder, "--every", 1)
    assert sorted(each.name for each in folder.iterdir()) == ["step-3", "step-4"]
    shutil.rmtree(folder / "step-4")
    (folder / ".step-9.partial").mkdir()
    (folder / "step-9").mkdir()  # without what is written last
    other, same = made("other", cuts=[1], replicas=[2, 1])
    again = losses(other, same, "--steps", 1, "--resume", folder, "--save", folder)
    assert again == pytest.approx(whole[3:], rel=1e-5)
    assert (folder / "step-4" / "training.json").is_file()
    wide, wider = made("wide", MODEL.replace("width=8", "width=12"), cuts=[2])
    ran = partopt("run", wide, wider, "--steps", 1, "--resume", folder)
    assert ran.returncode != 0
    assert "has another shape of " in ran.stderr and "it is of another model" in ran.stderr


def test_what_a_killed_run_left_half_written_is_tidied_up(tmp_path):
    """Of two checkpoints of the same steps the older one, if the other is not in its place."""
    for name in (".step-4.partial", ".step-2.older", ".step-3.older", "step-3"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "training.json").write_text(name)
    with removing_partial(tmp_path):
        assert sorted(each.name for each in tmp_path.iterdir()) == ["step-2", "step-3"]
        (tmp_path / ".step-5.partial").mkdir()
    assert (tmp_path / "step-3" / "training.json").read_text() == "step-3"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["step-2", "step-3"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options, expected",
    [
        ({"resume": "."}, "no whole checkpoint in it"),
        ({"every": 2}, "`every=2`: not possible"),
        ({"save": "file"}, "cannot be written to"),
    ],
)
def test_folders_are_checked_before_any_process_starts(
    made, tmp_path, monkeypatch, options, expected
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    plan, model = made("refusing", cuts=[2])
    with pytest.raises(PartoptError, match=expected):
        run_source(Plan.load(plan), model, **options)


def test_checkpoints_are_in_the_order_of_their_steps_not_of_their_names(tmp_path):
    steps = [100, 8, 10, 9]
    for number in steps:
        (tmp_path / f"step-{number}").mkdir()
        (tmp_path / f"step-{number}" / "training.json").touch()
    for other in ("step-11", "step-last", "step-12.old"):  # half-written, and no checkpoints
        (tmp_path / other).mkdir()
    (tmp_path / "step-12.old" / "training.json").touch()
    names = [each.name for each in checkpoints(tmp_path)]
    assert names == ["step-8", "step-9", "step-10", "step-100"]
    assert last_checkpoint(tmp_path).name == "step-100"


def test_a_name_that_is_too_long_is_no_folder():
    with pytest.raises(PartoptError, match="no whole checkpoint in it"):
        last_checkpoint(Path("x" * 5000))
