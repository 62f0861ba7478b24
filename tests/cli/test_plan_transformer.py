"""`partopt plan` of a transformer's configuration."""

import json
import re
import shlex
from pathlib import Path

import click
import pytest

from partopt.cli.plan import command as plan_command
from partopt.documents.files import find_shipped, shipped_names
from partopt.search import solve

MODEL = "llama3-8b", "--topology", "dgx-h100", "--servers", "1"
ASKED = *MODEL, "--for", "megatron", "--global-batch", "64", "--sequence", "4096"
LAYOUT = "--layout", "tp=2,pp=2,dp=2,chunks=1,microbatch=1,recompute=never"


@pytest.mark.levers
def test_the_page_says_where_time_and_memory_go_and_how_far_to_trust_it(partopt):
    page = partopt("plan", *ASKED, *LAYOUT).out
    labels = [line[:9].strip() for line in page.splitlines() if line[:1] not in ("", " ")]
    expected = ["model", "cluster", "plan", "time", "speed", "cuts", "where", "memory", "also"]
    expected += ["trust"]
    assert labels == expected
    assert "tp 2, pp 2, dp 2, microbatch 1, recompute never, shard" in page
    assert "closed form" in page and "products" in page
    assert "published runs like this (dense, on an H100 or later" in " ".join(page.split())


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


@pytest.mark.slow
@pytest.mark.levers
def test_what_is_left_open_is_chosen_and_the_others_stand_beside(partopt):
    page = partopt("plan", *ASKED).out
    assert re.search("TP CP +PP DP MB AGAIN", page) and "layouts estimated" in page
    lines = page[page.index("TP CP") :].splitlines()[1:-1]
    rows = [line for line in lines if re.match(r" *\d", line)]
    told = " ".join(lines[len(rows) :])  # with which switch a layout without room fits
    assert told.count(" fits with --") == page.count("no room") > 0
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_layout_that_does_not_fit_is_shown_and_not_written(partopt, tmp_path):
    path = tmp_path / "plan.json"
    done = partopt("plan", *ASKED, "--layout", "tp=1", "--memory", "25GB", "-o", path)
    assert done.code == 1 and not path.exists()
    assert "DOES NOT FIT" in done.out and "does not fit: a device needs" in done.err


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((*MODEL, "--for", "megatron", "--global-batch", "64"), "also needs --sequence"),
        ((*MODEL, "--global-batch", "64", "--sequence", "64"), "also needs --for"),
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


@pytest.mark.slow
def test_numbers_of_devices_are_a_table_a_document_and_a_picture(partopt, tmp_path):
    asked = "llama3-8b", "--topology", "dgx-h100", *ASKED[5:], "--scaling", "8,16"
    done = partopt("plan", *asked, "-o", tmp_path / "scaling.svg")
    assert done.code == 0 and b"tokens/s, tp 2, " in (tmp_path / "scaling.svg").read_bytes()
    header, *rows = done.out.splitlines()[:3]
    assert header.split()[-3:] == ["MB", "AGAIN", "BINDS"]
    assert [row.split()[0] for row in rows] == ["8", "16"]
    assert all(len(line) <= 80 for line in done.out.splitlines())
    assert re.search(r"partopt plan llama3-8b .* -o plan.json", done.err)
    assert "--scaling" not in done.err
    strong, weak = (
        json.loads(partopt("plan", *asked, "--json", *more).out) for more in ([], ["--weak"])
    )
    assert [row["microbatches"] * row["microbatch_size"] for row in strong["rows"]] == [64, 64]
    assert [row["microbatches"] * row["microbatch_size"] for row in weak["rows"]] == [64, 128]


def test_a_picture_of_a_layout_has_its_layers(partopt, tmp_path):
    picture = tmp_path / "plan.svg"
    done = partopt("plan", *ASKED, *LAYOUT, "--picture", picture)
    assert done.code == 0 and f"Wrote {picture}" in done.err
    assert re.search(r"stage 1: layers \d+-34 layers.\d+ .. lm_head", picture.read_text())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "kept", "dropped"),
    [
        (("--memory", "14GB"), "--servers 2", "--layout"),
        (("--layout", "tp=1,pp=1,dp=8", "--memory", "30GB"), "--memory 30GB", "--layout"),
        (("--layout", "tp=2,microbatch=64", "--memory", "40GB"), "-o", "--microbatch-size"),
    ],
)
def test_where_nothing_fits_the_hint_is_a_command_with_which_something_does(
    partopt, tmp_path, words, kept, dropped
):
    plan = tmp_path / "plan.json"
    done = partopt("plan", "llama3-8b", "--topology", "dgx-h100", *ASKED[5:], "--servers", 1,
                   *words, "-o", plan)  # fmt: skip
    assert done.code == 1 and not plan.exists()
    (hint,) = done.hints
    command = hint.removeprefix("this fits: partopt ")
    assert command != hint and kept in command and dropped not in command
    assert partopt(*shlex.split(command)).code == 0 and plan.exists()


@pytest.mark.slow
def test_where_nothing_ever_fits_that_is_said(partopt):
    done = partopt("plan", *ASKED, "--memory", "3GB")
    assert done.code == 1 and "no layout fits: a device needs" in done.err
    (hint,) = done.hints
    assert hint.startswith("no layout fits on any number of servers that was tried; take larger")


@pytest.mark.parametrize(
    ("given", "tokens"), [("128k", 131_072), ("2K", 2048), ("1M", 1_048_576), ("4096", 4096)]
)
def test_a_sequence_is_a_number_of_tokens(partopt, given, tokens):
    words = *MODEL, "--for", "megatron", "--global-batch", "8", "--json"
    done = partopt("plan", *words, "--layout", "tp=8,recompute=always", "--sequence", given)
    assert done.document["transformer"]["sequence"] == tokens


@pytest.mark.parametrize("given", ["0", "0k", "-1k", "1.5k", "8kb", "8 k", "1m", "1G", "k", "8k8"])
def test_what_is_no_number_of_tokens_is_refused(partopt, given):
    done = partopt("plan", *MODEL, "--for", "megatron", "--global-batch", "8", "--sequence", given)
    assert done.code == 2 and "--sequence" in done.err and not done.out


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("llama3-70B", "llama3-70b"),
        ("meta-llama/Llama-3.1-70B", "llama3-70b"),
        ("meta-llama/Llama-3.3-70B-Instruct", "llama3-70b"),
        ("llama-3-70b", "llama3-70b"),
        ("LLaMA2_7B", "llama2-7b"),
        ("mistralai/Mixtral-8x7B-v0.1", "mixtral-8x7b"),
    ],
)
def test_an_unknown_model_is_told_the_nearest_one(partopt, given, meant):
    done = partopt("plan", given, *ASKED[1:])
    assert done.code == 2 and f"{given}: no such file" in done.errors[0]
    assert done.hints == [f'did you mean "{meant}"?']


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ("gemma2-9b", "known: bert-{base,large}, deepseek-{v3,v3.2}, glm-{4.5,4.5-air,5}, "),
        ("phi-2", "known: bert-{base,large}, deepseek-{v3,v3.2}, glm-{4.5,4.5-air,5}, "),
        ("qwen2.5-70b", "known: qwen1.5-moe-a2.7b, qwen2.5-{0.5b,1.5b,14b,"),
    ],
)
def test_a_name_is_not_called_near_where_the_model_is_not(partopt, given, hint):
    assert partopt("plan", given, *ASKED[1:]).hints[0].startswith(hint)


def test_a_model_that_is_like_none_is_told_all(partopt):
    (hint,) = partopt("plan", "weird-v9", *ASKED[1:]).hints
    known, _, others = hint.partition("; ")
    found = set[str]()
    for family, sizes in re.findall(r"([a-z0-9.]+)-(\{[^}]*\}|[^,]+)", known):
        found |= {f"{family}-{size}" for size in sizes.strip("{}").split(",")}
    assert found == {*shipped_names("models")}
    assert others == "of others give the config.json"


def test_scores_of_a_device_without_bfloat16_are_in_float16(partopt):
    words = "--topology", "v100-nvlink", "--for", "deepspeed", "--global-batch", 64
    asked = "gpt3-1.3b", *words, "--servers", 2, "--sequence", "2k", "--dtype"
    assert partopt("plan", *asked, "float16").code == 0
    done = partopt("plan", *asked, "bfloat16")
    assert done.code == 2 and "what bfloat16 achieves on it is not known" in done.err


@pytest.mark.slow
@pytest.mark.parametrize("name", shipped_names("topologies"))
def test_every_shipped_cluster_is_planned_for_or_it_is_said_why_not(partopt, name):
    """None trains a model of 1.3 billion parameters at more than half of its peak, or at less than
    a tenth; newer devices are faster.
    """
    asked = "gpt3-1.3b", "--topology", name, "--for", "deepspeed", "--global-batch", 1152
    asked += "--sequence", "2k", "--dtype", "float16", "--with", "attention=scores"
    done = partopt("plan", *asked, "--json")
    if name == "cpu-2":
        assert done.code == 2 and "achieves in training is not known" in done.err
    else:
        assert 0.1 < done.document["predicted"]["figures"]["mfu"] < 0.5


# A value of every option of the command that is not the default's; with `None` it is a switch.
OPTIONS = {
    "topology": "dgx-a100",
    "servers": "2",
    "target": "torchtitan",
    "layout": "tp=4",
    "sequence": "2048",
    "dtype": "fp8",
    "calibrate": "gpt.cpu.float32",
    "facts": "ends=free",
    "rules": "*=block",
    "schedule": "gpipe",
    "global_batch": "32",
    "microbatches": "8",
    "microbatch_size": "2",
    "chunks": "4",
    "planner": "straight",
    "cuts": "5,9",
    "replicas": "1,2,1",
    "stages": "2",
    "cut_at": "h.*",
    "replication": "uniform",
    "tied": "together",
    "cost": "flops",
    "effort": "quick",
    "memory": "41GB",
    "recompute": "always",
    "optimizer": "sgd",
    "shard": "none",
    "scaling": "8",
    "devices": "4",
    "tokens": "1T",
    "days": "30",
    "budget": "2M",
    "price": "2.1",
    "beside": "tp=4",
    "weak": None,
    "picture": "FOLDER/plan.svg",
    "output": "FOLDER/plan.json",
    "force": None,
    "as_json": None,
}
# `--force` goes with a file; `--help-all` and the like end the command
APART = {"force", "help_all", "help"}


class Heeded:
    """A command, which runs once without what is tried, in a folder that it writes to."""

    def __init__(self, folder, words):
        self.folder, self.words, self.plain = folder, [*map(str, words)], None

    def check(self, partopt, parameter, values=OPTIONS):
        """An option more, which takes the place of another, is refused or changes something."""
        self.plain = self.plain or self._run(partopt, self.words)
        words, flag, value = [*self.words], parameter.opts[-1], values[parameter.name]
        if flag in words:
            del words[words.index(flag) : words.index(flag) + 2]
        words += [flag] if value is None else [flag, value.replace("FOLDER", str(self.folder))]
        told = self._run(partopt, words)
        assert self.plain[0] == 0 and (told[0] == 2 or told != self.plain)

    def _run(self, partopt, words):
        """What a command says and writes."""
        for path in self._written():
            path.unlink()
        done = partopt(*words)
        return done.code, done.out, [(path.name, path.read_bytes()) for path in self._written()]

    def _written(self):
        return sorted(path for path in self.folder.iterdir() if path.suffix in (".json", ".svg"))


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    words = "plan", *ASKED, "--layout", "tp=2,pp=2", "--microbatch-size", "1"
    return Heeded(tmp_path_factory.mktemp("heeded"), words)


@pytest.mark.slow
@pytest.mark.parametrize(
    "parameter",
    [own for own in plan_command.params if isinstance(own, click.Option) and own.name not in APART],
    ids=lambda own: own.name,
)
def test_no_option_is_ignored(partopt, command, parameter):
    command.check(partopt, parameter)


@pytest.mark.slow
@pytest.mark.levers
def test_switches_that_help_are_told_and_taken(partopt):
    options = *MODEL, "--for", "megatron", "--global-batch", "32", "--sequence", "8192"
    found = json.loads(partopt("plan", *options, "--json").out)["transformer"]
    page = " ".join(partopt("plan", *options).out.split())
    assert "--grad-reduce-in-bf16" in page and "changes numbers" in page and "unverified" in page
    assert {tuple(lever["with"]) for lever in found["levers"]} >= {("gradients",), ("loss",)}
    for words, numbers in (("best", False), ("best,numbers", True)):
        done = partopt("plan", *options, "--with", words, "--json")
        taken = json.loads(done.out)["transformer"]
        assert ("gradients" in taken["facts"]) == numbers
        assert taken["closed_s"] < found["closed_s"]
        assert f"note:    --with {words}: " in done.err
        assert all(lever["changes_numbers"] and not numbers for lever in taken["levers"])


@pytest.mark.slow
def test_sizes_of_a_cluster_are_a_table_with_days_and_money(partopt, tmp_path):
    options = "llama3-8b", "--topology", "dgx-h100", "--for", "megatron", "--global-batch", "64"
    options += "--sequence", "4096"
    path = tmp_path / "sizes.svg"
    run = "--tokens", "1T", "--price", "2.1", "--days", "300"
    done = partopt("plan", *options, "--servers", "1-2", *run, "-o", path)
    heads = [word for word in done.out.splitlines()[0].split() if word not in ("MFU", "*")]
    assert heads[:6] == ["DEVICES", "TIME", "TOKENS/S", "DAYS", "GPU-H", "COST"]
    assert "run      1 T tokens" in done.out and "best " in done.out
    assert "cost, and days" in path.read_text()
    rows = json.loads(partopt("plan", *options, "--servers", "1-2", *run, "--json").out)
    assert [row["devices"] for row in rows["rows"]] == [8, 16] and rows["chosen"] in (8, 16)
    assert f"--servers {rows['chosen'] // 8} " in done.err and "1-2" not in done.err


@pytest.mark.slow
def test_a_deadline_that_no_size_keeps_is_told_with_the_nearest_below_the_table(partopt):
    run = "--servers", "1-2", "--tokens", "15T", "--days", "30"
    done = partopt("plan", *ASKED, *run)
    assert done.code == 1 and "DEVICES" in done.out and "best " not in done.out
    [days] = re.findall(
        r"--days 30: no size is in time; the fastest, 16 devices, takes ([0-9.]+)"
        r" days\n",
        done.err,
    )
    [allowed] = re.findall(r"hint: +allow --days ([0-9.]+), or give more servers", done.err)
    assert float(days) <= float(allowed) <= 1.01 * float(days)
    dear = partopt("plan", *ASKED, *run[:4], "--price", "2", "--budget", "100k")
    assert "--budget 100k: no size is paid for; the cheapest, " in dear.err and dear.code == 1
    unknown = partopt("plan", *ASKED, *run[:4], "--budget", "100k")
    assert "dgx-h100 has no price of a device" in unknown.err and unknown.code == 2


def test_another_layout_stands_beside_part_by_part(partopt, monkeypatch):
    levers = []
    monkeypatch.setattr(solve, "with_levers", lambda job, plan, *_: levers.append(job) or plan)
    page = partopt("plan", *ASKED, *LAYOUT, "--beside", "tp=8").out
    assert len(levers) == 1  # what else helps is looked for once
    assert "first " in page and "beside " in page and "PART " in page


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--days", "3"], "--days goes with --tokens"),
        (["--tokens", "1T"], "--tokens goes with --scaling"),
        (["--servers", "4-2"], "begins with the larger number"),
        (["--servers", "1-2", "--beside", "tp=8"], "--beside: goes with one plan"),
        (["--servers", "1-2", "--picture", "a.svg"], "a table of sizes has no plan"),
        (["--price", "0"], "--price"),
    ],
)
def test_options_of_sizes_that_do_not_go_together_are_refused(partopt, options, message):
    done = partopt("plan", *ASKED, *options)
    assert done.code == 2 and message in done.err


def test_the_best_switches_are_of_a_trainer(partopt):
    done = partopt("plan", *MODEL, "--global-batch", "64", "--sequence", "4096", "--with", "best")
    assert done.code == 2 and "add --for megatron" in done.err


@pytest.mark.slow
def test_so_many_devices_are_planned_on(partopt):
    options = "mixtral-8x7b", "--topology", "gb200-nvl72", "--servers", "1", "--for", "megatron"
    options += "--global-batch", "512", "--sequence", "4096"
    plan = json.loads(partopt("plan", *options, "--devices", "64", "--json").out)
    assert plan["layout"]["dp"] == 64


def test_what_the_trainer_cannot_say_is_not_followed_by_its_export(partopt, tmp_path):
    path = tmp_path / "plan.json"
    asked = "llama4-scout", *ASKED[1:], "--layout", "ep=8,tp=1,pp=1", "--memory", "900 GB"
    done = partopt("plan", *asked, "-o", path)
    assert done.code == 0 and "cannot say this plan of llama4-scout: `chunked`" in done.err
    assert f"next:    partopt simulate {path}" in done.err and "partopt export" not in done.err
    assert partopt("export", path, "--to", "megatron").code != 0


def test_experts_with_biases_are_planned_in_one_piece(partopt):
    done = partopt("plan", "gpt-oss-20b", *ASKED[1:], "--layout", "etp=2")
    assert done.code == 2 and "experts that have biases are not cut" in done.err
