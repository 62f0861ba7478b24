"""`partopt plan` of a transformer's configuration."""

import json
import re
from pathlib import Path

import pytest

from partopt.documents.files import find_shipped

MODEL = "llama3-8b", "--topology", "dgx-h100", "--servers", "1"
ASKED = *MODEL, "--for", "megatron", "--global-batch", "64", "--sequence", "4096"
LAYOUT = "--layout", "tp=2,pp=2,dp=2,chunks=1,microbatch=1,recompute=never"


def test_the_page_says_where_time_and_memory_go_and_how_far_to_trust_it(partopt):
    page = partopt("plan", *ASKED, *LAYOUT).out
    labels = [line[:9].strip() for line in page.splitlines() if line[:1] not in ("", " ")]
    expected = ["model", "cluster", "plan", "time", "speed", "cuts", "where", "memory", "trust"]
    assert labels == expected
    assert "tp 2, pp 2, dp 2, microbatch 1, recompute never, shard" in page
    assert "closed form" in page and "products" in page
    assert "on published runs that no constant was fitted to" in " ".join(page.split())


def test_a_written_plan_is_shown_with_the_arithmetic_of_a_block_and_verified(partopt, tmp_path):
    path = tmp_path / "plan.json"
    done = partopt("plan", *ASKED, *LAYOUT, "-o", path)
    assert done.code == 0 and f"partopt export {path} --to megatron" in done.err
    page = partopt("show", path).out
    assert (
        "A BLOCK, A MICROBATCH" in page and "products of these with weights 3,072 x 4,096" in page
    )
    assert "verified" in partopt("show", path, "--verify").out
    assert partopt("simulate", path).code == 0
    stated = json.loads(path.read_text())["transformer"]
    stated["layout"]["tp"] = 4
    path.write_text(path.read_text().replace('"tp": 2', '"tp": 4'))
    assert partopt("show", path, "--verify").code != 0


def test_what_is_left_open_is_chosen_and_the_others_stand_beside(partopt):
    page = partopt("plan", *ASKED).out
    assert re.search("TP CP +PP DP MB AGAIN", page) and "layouts estimated" in page
    rows = page[page.index("TP CP") :].splitlines()[1:-1]
    assert len(rows) >= 10 and "no room" in page
    gains = [re.findall(r"([-+][\d.]+)%:", line)[0] for line in rows[1:] if "no room" not in line]
    assert sorted(map(float, gains)) == list(map(float, gains))


def test_json_has_the_layout_and_the_speed(partopt):
    plan = json.loads(partopt("plan", *ASKED, *LAYOUT, "--json").out)
    assert plan["layout"] == {
        "tp": 2, "cp": 1, "ep": 1, "pp": 2, "chunks": 1, "dp": 2, "microbatch": 1,
        "recompute": "never", "shard": "optimizer", "schedule": "1f1b",
    }  # fmt: skip
    figures = plan["predicted"]["figures"]
    assert figures["tokens_per_s"] == pytest.approx(4096 * plan["predicted"]["samples_per_s"])
    assert 0.3 < figures["mfu"] < 0.7


def test_what_is_known_to_be_off_is_said(partopt, tmp_path):
    raw = json.loads(Path(find_shipped("llama3-8b", "models")).read_text())
    odd = tmp_path / "odd.json"
    odd.write_text(json.dumps(raw | {"intermediate_size": 14340}))
    page = " ".join(partopt("plan", odd, *ASKED[1:], *LAYOUT).out.split())
    assert "widths that are no multiple of 64: kernels are slower" in page
    assert "widths that" not in partopt("plan", *ASKED, *LAYOUT).out
    far = "llama3-8b", "--topology", "dgx-a100", "--servers", "2", *ASKED[5:], "--layout"
    page = " ".join(partopt("plan", *far, "tp=2,dp=8").out.split())
    assert "exchanges between servers are taken to reach the rate of messages" in page
    for layout in ("tp=2,pp=2,dp=4", "tp=2,pp=8,dp=1"):  # of a server, and none at all
        assert "exchanges between servers" not in partopt("plan", *far, layout).out


def test_in_8_bits_the_utilisation_is_of_the_peak_in_8_bits(partopt):
    both = {
        dtype: json.loads(partopt("plan", *ASKED, *LAYOUT, "--dtype", dtype, "--json").out)
        for dtype in ("bfloat16", "fp8")
    }
    for dtype, peak in (("bfloat16", 989.4e12), ("fp8", 1979e12)):
        figures = both[dtype]["predicted"]["figures"]
        assert figures["mfu"] == pytest.approx(figures["device_flops_per_s"] / peak)
    page = partopt("plan", *ASKED, *LAYOUT, "--dtype", "fp8").out
    assert "of the fp8 peak" in " ".join(page.split())


def test_options_of_a_layout_may_stand_alone(partopt):
    said = "plan", *ASKED, "--json"
    whole = partopt(*said, "--layout", "tp=2,pp=2,recompute=always,microbatch=2").out
    some = "--layout", "tp=2,pp=2"
    apart = partopt(*said, *some, "--recompute", "always", "--microbatch-size", "2").out
    assert json.loads(whole) == json.loads(apart)


def test_a_layout_that_does_not_fit_is_shown_and_not_written(partopt, tmp_path):
    path = tmp_path / "plan.json"
    done = partopt("plan", *ASKED, "--layout", "tp=1", "--memory", "25GB", "-o", path)
    assert done.code == 1 and not path.exists()
    assert "DOES NOT FIT" in done.out and "does not fit: a device needs" in done.err


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((*MODEL, "--for", "megatron", "--global-batch", "64"), "--sequence: needed"),
        ((*MODEL, "--global-batch", "64", "--sequence", "64"), "--for: needed"),
        ((*ASKED, "--cuts", "3"), "--cuts: llama3-8b is a transformer's configuration"),
        ((*ASKED, *LAYOUT, "--chunks", "4", "--layout", "chunks=2"), "--layout says chunks=2"),
        (("gpt.cpu.float32", "--topology", "v100-pcie", "--dtype", "fp8"), "--dtype: goes with"),
        ((*ASKED, "--layout", "tp=3"), "tp x cp x pp x dp are 6 devices"),
    ],
)
def test_what_does_not_go_together_is_refused(partopt, given, message):
    done = partopt("plan", *given)
    assert done.code == 2 and message in done.err and done.out == ""


def test_a_configuration_is_a_file_or_its_folder(partopt, tmp_path):
    shipped = json.loads(partopt("plan", *ASKED, *LAYOUT, "--json").out)
    folder = tmp_path / "mine"
    folder.mkdir()
    text = Path(find_shipped("llama3-8b", "models")).read_text()
    (folder / "config.json").write_text(text)
    for given in (folder, folder / "config.json"):
        own = json.loads(partopt("plan", given, *ASKED[1:], *LAYOUT, "--json").out)
        assert own["predicted"] == shipped["predicted"]
        assert own["profile"]["name"] == "mine"
