"""Two profiles side by side: numbers by hand, and a page that fits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click
import pytest

from partopt.documents.difference import Difference
from partopt.documents.profile import Profile
from partopt.errors import PartoptError
from partopt.report import difference
from tests.helpers import measurement, out_of_memory, profile_of

NAMES = ("a.json", "b.json")


def render(found: Difference) -> str:
    return click.unstyle(difference.render(found))


def profile(
    seconds: list[float], names: Sequence[str] = "wxyz", size: int = 4, **fields: object
) -> Profile:
    """Layers named by letters: a quarter of the seconds forward, 8 bytes of output each."""
    forward, backward = [each / 4 for each in seconds], [each * 3 / 4 for each in seconds]
    return profile_of(
        [measurement(forward, backward, [8] * len(seconds), size, **fields)],
        [16] * len(seconds),
        list(names),
    )


def page(found: Difference) -> list[list[str]]:
    return [line.split() for line in render(found).splitlines()]


def test_layers_stand_beside_each_other_with_ratio_and_share():
    found = Difference.between(profile([1, 2, 3, 4]), profile([1, 1, 6, 4]), NAMES)
    assert [layer.ratio for layer in found.layers] == [1, 0.5, 2, 1]
    assert (found.first.seconds_s, found.second.seconds_s) == (10, 12)
    lines = page(found)
    assert ["1", "x", "2.00", "s", "20.0%", "1.00", "s", "8.3%", "0.50", "2"] in lines
    assert ["2", "y", "3.00", "s", "30.0%", "6.00", "s", "50.0%", "2.00", "1"] in lines
    assert ["0", "w", "1.00", "s", "10.0%", "1.00", "s", "8.3%", "1.00"] in lines
    assert ["all", "10.00", "s", "12.00", "s", "1.20"] in lines
    assert "only in" not in render(found) and "BYTES OF" not in render(found)


def test_only_changes_of_a_hundredth_of_the_whole_are_marked_and_at_most_three():
    before = profile([100.0] * 4)
    marked = []
    for after in ([103, 100, 100, 100], [104, 95, 100, 100], [110, 120, 130, 140]):
        lines = page(Difference.between(before, profile(after), NAMES))
        marked.append([line[1] for line in lines if line and line[-1] in ("1", "2", "3")])
    assert marked == [[], ["w", "x"], ["x", "y", "z"]]


def test_layers_of_one_only_are_listed_and_the_order_is_the_firsts():
    found = Difference.between(profile([1, 2, 3], "wxy"), profile([5, 1, 3], "vwy"), NAMES)
    assert [layer.name for layer in found.layers] == ["w", "x", "y", "v"]
    assert [layer.ratio for layer in found.layers] == [1, None, 1, None]
    assert found.layers[3].first is None and found.layers[3].second.index == 0
    text = render(found)
    assert "only in  the first: x\n" in text and "only in  the second: v" in text


def test_calls_of_one_module_are_matched_one_by_one():
    from msgspec.structs import replace

    def called(seconds: list[float]) -> Profile:
        made = profile(seconds, "wx")
        layers = [replace(layer, name="w", call=call) for call, layer in enumerate(made.layers)]
        return replace(made, layers=layers)

    found = Difference.between(called([1, 2]), called([2, 2]), NAMES)
    assert [(layer.call, layer.ratio) for layer in found.layers] == [(0, 2), (1, 1)]
    assert "w #1" in render(found)


def test_bytes_are_shown_where_they_differ():
    first = profile([1, 2], "wx", stash_groups=[([0], 100)])
    second = profile([1, 2], "wx", stash_groups=[([0], 60)])
    second.measurements[0].layers[1] = (
        first.measurements[0].layers[0].__class__(forward_s=0.5, backward_s=1.5, output_bytes=4000)
    )
    lines = page(Difference.between(first, second, NAMES))
    begin = lines.index(["LAYER", "BYTES", "OF", "FIRST", "SECOND"])
    assert lines[begin + 1 :] == [
        ["all", "kept", "for", "the", "backward", "100", "B", "60", "B"],
        ["x", "output", "8", "B", "4", "kB"],
    ]


def test_the_size_is_the_largest_common_one_or_that_asked_for():
    several = profile_of(
        [measurement([b * 1.0], microbatch_size=b) for b in (1, 2, 4)] + [out_of_memory(8)],
        names=["w"],
    )
    other = profile_of([measurement([b * 3.0], microbatch_size=b) for b in (1, 2, 8)], names=["w"])
    assert Difference.between(several, other, NAMES).microbatch_size == 2
    assert Difference.between(several, other, NAMES, 1).layers[0].ratio == 3
    with pytest.raises(
        PartoptError, match=r"size 4 was not measured in both: .* b.json has 1, 2, 8"
    ):
        Difference.between(several, other, NAMES, 4)
    with pytest.raises(PartoptError, match="no microbatch size in common"):
        Difference.between(profile([1.0], "w"), profile([1.0], "w", size=3), NAMES)


def test_profiles_of_different_models_are_refused():
    with pytest.raises(PartoptError, match="have no layer in common: w, x; y, z"):
        Difference.between(profile([1, 2], "wx"), profile([1, 2], "yz"), NAMES)


def test_layers_that_take_no_time_have_no_ratio():
    found = Difference.between(profile([0, 1], "wx"), profile([1e6, 1], "wx"), NAMES)
    assert found.layers[0].ratio is None
    assert ["0", "w", "0", "s", "0.0%"] in [line[:5] for line in page(found)]


def test_what_repeats_in_both_is_shown_once_and_every_layer_with_all():
    """Two blocks of two layers, the second slower in one of them: eight layers and then a head."""
    names = [f"blocks.{place // 2}.{'ab'[place % 2]}" for place in range(8)] + ["head"]
    before = profile([1.0, 2.0] * 4 + [1.0], names)
    slower = Difference.between(before, profile([1.5, 2.0] * 4 + [2.0], names), NAMES)
    lines = page(slower)[5:]
    assert lines[0][:6] == ["0", "blocks.0.a", "x4", "1.00", "s", "7.7%"]
    assert lines[1][:5] == ["1", "blocks.0.b", "x4", "2.00", "s"]
    assert lines[0][-2:] == ["1.50", "1"]  # four times half a second
    assert lines[2][0] == "8" and lines[2][-2:] == ["2.00", "2"]
    assert "xN: N times" in render(slower)
    every = click.unstyle(difference.render(slower, all_layers=True))
    assert [f"\n{place} " in every for place in range(9)] == [True] * 9
    assert "xN" not in every
    once = profile([1.5, 2.0] + [1.0, 2.0] * 3 + [1.0], names)
    first = page(Difference.between(before, once, NAMES))[5]
    assert first[:4] == ["0", "blocks.0.a", "1.00", "s"]  # unlike the others in the second


def test_many_layers_of_one_only_are_counted():
    first, second = (profile([1.0] * 101, [*(f"{x}{n}x" for n in range(100)), "w"]) for x in "ab")
    text = " ".join(render(Difference.between(first, second, NAMES)).split())
    assert "only in the first: a0x, a1x" in text and "a19x, and 80 more" in text


@pytest.mark.parametrize("seconds", [1e-9, 1.0, 999999.0])
def test_the_page_fits_and_numbers_are_whole(seconds):
    names = [f"transformer.encoder.blocks.{index}.attention" for index in range(40)]
    first = profile_of([measurement([seconds] * 40, output_bytes=[2**40] * 40)], names=names)
    second = profile_of([measurement([seconds * 1.5] * 40)], names=names)
    found = Difference.between(first, second, ("x" * 30, "y" * 30))
    text = click.unstyle(difference.render(found, all_layers=True))
    assert max(map(len, text.splitlines())) <= 80
    assert text.count("1.50") == 41


def test_profiles_that_ship_are_shown_and_shown_again(partopt, tmp_path: Path):
    pair = "gpt.cpu.float32", "gpt.cpu.float32"
    shown = partopt("show", *pair)
    assert shown.code == 0 and "2.00" not in shown.out
    (tmp_path / "difference.json").write_text(partopt("show", *pair, "--json").out)
    assert partopt("show", tmp_path / "difference.json").out == shown.out
    assert partopt("show", *pair, "--microbatch-size", 1).out != shown.out


@pytest.mark.parametrize(
    ("given", "error"),
    [
        (
            ["gpt.cpu.float32", "v100-pcie"],
            "gpt.cpu.float32 is a profile, v100-pcie a topology: two",
        ),
        (["gpt.cpu.float32", "mlp.cpu.float32"], "no microbatch size in common: gpt"),
        (["gpt.cpu.float32", "none.json"], "none.json: no such file"),
        (["gpt.cpu.float32", "--microbatch-size", 2], "--microbatch-size: goes with two profiles"),
        (["--verify", "gpt.cpu.float32", "gpt.cpu.float32"], "--verify: one plan is verified at"),
    ],
)
def test_what_cannot_be_compared_is_refused(partopt, given, error):
    outcome = partopt("show", *given)
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.errors[0].startswith(error)
