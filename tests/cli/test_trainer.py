"""`partopt trainer`."""

import json

import pytest

from partopt import TRAINERS


def test_trainers_are_listed_with_what_they_were_tried_with(partopt):
    listed = partopt("trainer", "list")
    assert (listed.code, len(listed.out.splitlines())) == (0, 1 + len(TRAINERS))
    for line, (name, trainer) in zip(listed.out.splitlines()[1:], TRAINERS.items(), strict=True):
        assert line.startswith(name)
        assert line.split()[-2:] == ["yes" if own else "-" for own in (trainer.write, trainer.read)]
    assert "next:    partopt trainer show NAME" in listed.err
    assert json.loads(partopt("trainer", "list", "--json").out).keys() == {*TRAINERS}


@pytest.mark.parametrize("name", TRAINERS)
def test_a_trainer_is_shown_with_its_sources(partopt, name):
    shown = partopt("trainer", "show", name)
    assert shown.code == 0
    assert max(map(len, shown.out.splitlines())) <= 80
    page = " ".join(shown.out.split())
    for fact in ("schedules", "cuts", "replicas", "waits", "gradients", "recompute"):
        assert f" {fact} " in page
    for source in TRAINERS[name].sources.values():
        assert f"({' '.join(source.split())})" in page
    assert f"--for {name}" in shown.err


@pytest.mark.parametrize(
    ("name", "fact", "words"),
    [
        ("deepspeed", "scores", "forward 9; backward 11; kept 5; work 0"),
        ("deepspeed", "sequence_parallel", "no"),
        ("deepspeed", "buffer_bytes", "6 GB"),
        ("torchtitan", "shard_copies", "4 and 6"),
        ("megatron", "cuts", "stages begin with a block or the head"),
        ("megatron", "optimizer_bytes", "as partopt counts it"),
        ("deepspeed", "schedules", "1f1b (TrainSchedule)"),
        ("partopt", "schedules", "any"),
    ],
)
def test_facts_of_a_trainer_are_in_words(partopt, name, fact, words):
    page = " ".join(partopt("trainer", "show", name).out.split())
    assert f" {fact} {words} " in page


def test_a_trainer_as_a_document(partopt):
    document = json.loads(partopt("trainer", "show", "megatron", "--json").out)
    assert document["says"]["degrees"].keys() == {"tp", "cp", "ep", "etp"}
    assert document["engine"]["gradients"] == "float32"
    assert document["engine"]["optimizer_bytes"] is None
    assert document["sources"]["waits"]


def test_an_unknown_trainer_has_a_nearest_one(partopt):
    outcome = partopt("trainer", "show", "torch-titan")
    assert (outcome.code, outcome.hints) == (2, ['did you mean "torchtitan"?'])


def test_of_a_choice_of_many_steps_the_ends_are_shown(partopt):
    page = " ".join(partopt("trainer", "show", "megatron").out.split())
    assert "optimizer-offload 0, 0.01, ..., 1; offload-overlap no, yes" in page
