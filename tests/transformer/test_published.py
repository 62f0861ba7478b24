"""Published runs: partopt is as near as `benchmarks/published_trainers.py` prints, with some slack.

The data are not part of the repository; without them only the way through the benchmark is tested.
"""

import csv
import json
import math
import re
import statistics
from random import Random

import pytest

from benchmarks import published_errors, published_rows, stated_memory
from benchmarks import published_trainers as published
from benchmarks.published_rows import USUAL, simulated_of
from partopt.errors import PartoptError
from partopt.transformer.chances import KINDS, errors_like, fits_chance, memory_factors
from partopt.transformer.rates import USABLE
from tests.docs.documents import read, rows, section
from tests.helpers import ROOT

RUNS = published.DATA / "runs.csv"
needs_runs = pytest.mark.skipif(not RUNS.exists(), reason="published runs are not here")
# of each table the mean error, and a little
MEANS = {
    "hagemann": 0.07,
    "llmfoundry": 0.04,
    "dgxc": 0.03,
    "bloom": 0.055,
    "torchtitan": 0.025,
    "blackwell": 0.05,
}
OLDER = {
    "SC 2021, table 1": 0.035,
    "Korthikanti, table 5": 0.04,
    "Korthikanti, table 4": 0.015,
    "Korthikanti, figure 1": 0.02,
    "torchtitan 8B": 0.025,
    "its memory": 0.02,
    "torchtitan 8B, more": 0.085,
    "their memory": 0.025,
    "Llama 3 405B": 0.05,
}


def mean(errors):
    return statistics.mean(map(abs, errors))


@pytest.fixture(scope="module")
def found():
    return published.read(RUNS)


@pytest.mark.slow
@needs_runs
def test_each_table_is_as_near_as_is_said(found):
    tables = published.tables_of(found)
    assert tables.keys() == MEANS.keys()
    errors = {name: published.errors_of(own) for name, own in tables.items()}
    assert sum(map(len, errors.values())) == 435
    for name, own in errors.items():
        assert mean(own) <= MEANS[name], name
    assert statistics.mean(map(mean, errors.values())) <= 0.0405
    assert statistics.median(abs(e) for own in errors.values() for e in own) <= 0.033


@needs_runs
def test_the_documents_state_what_is_printed(found):
    text = section(read("accuracy.md"), "Transformers in closed form")
    tables = {name: published.errors_of(own) for name, own in published.tables_of(found).items()}
    tables["all"] = [error for own in tables.values() for error in own]
    stated = {row[0]: row[1:5] for row in rows(text)[1:]}
    for name, errors in tables.items():
        size = [abs(error) for error in errors]
        numbers = (statistics.mean(size), statistics.median(size), max(size))
        assert stated[name] == [str(len(size)), *(f"{own:.1%}" for own in numbers)]


@needs_runs
def test_what_fits_and_what_does_not(found):
    tried = [own for own in found if own.row["table"] in ("hagemann", "bloom", "torchtitan")]
    right = sum(own.ran == own.fits(published.USABLE) for own in tried)
    assert len(tried) == 425
    assert right / len(tried) >= 0.965
    assert f"{100 * right / 425:.1f} %" in section(read("accuracy.md"), "The chance to fit")
    ran = [own for own in found if own.row["table"] in ("dgxc", "blackwell")]
    assert sum(own.fits(published.USABLE) for own in ran) >= 143


# of experts: the mean error of a model and a little, and with the constants of the other two
EXPERTS = {"deepseek-v3": 0.066, "qwen3-30b-a3b": 0.078, "qwen3-235b-a22b": 0.095}
OF_EXPERTS = published.DATA / "runs-experts.csv"
needs_experts = pytest.mark.skipif(not OF_EXPERTS.exists(), reason="published runs are not here")


@pytest.fixture(scope="module")
def of_experts():
    return published.read(OF_EXPERTS)


@needs_experts
def test_runs_of_experts_are_as_near_as_is_said(of_experts):
    models = published.tables_of(of_experts, "model")
    assert models.keys() == EXPERTS.keys()
    for name, runs in models.items():
        assert mean(published.errors_of(runs)) <= EXPERTS[name]
    errors = published.errors_of(of_experts)
    assert len(errors) == 110
    assert mean(errors) <= 0.081
    assert sum(run.fits(published.USABLE) for run in of_experts) >= 99


@needs_experts
def test_the_documents_state_what_is_printed_of_experts(of_experts):
    text = section(read("accuracy.md"), "Experts in closed form")
    models = published.tables_of(of_experts, "model")
    tables = {name: published.errors_of(runs) for name, runs in models.items()}
    tables["all"] = [error for errors in tables.values() for error in errors]
    stated = {row[0]: row[1:5] for row in rows(text)[1:]}
    assert stated.keys() == tables.keys()
    for name, errors in tables.items():
        size = [abs(error) for error in errors]
        numbers = (statistics.mean(size), statistics.median(size), max(size))
        assert stated[name] == [str(len(size)), *(f"{number:.1%}" for number in numbers)]
    fit = sum(run.fits(published.USABLE) for run in of_experts)
    assert f"{fit} are said to fit" in text


@pytest.mark.slow
@needs_experts
def test_a_model_that_no_constant_was_fitted_to(of_experts, capsys):
    published.show_left_out(of_experts)
    printed = capsys.readouterr().out
    [whole] = re.findall(r"all, left out in turn .* mean +([0-9.]+)%", printed)
    assert float(whole) <= 15
    assert f"{whole}%" in section(read("accuracy.md"), "Experts in closed form")
    within, over = re.search(
        r"half within ([0-9.]+)%, one of twenty .* than ([0-9]+)%", printed
    ).groups()
    said = f"half of the runs are within {within} %, one of twenty is off by more than {over} %"
    assert said in " ".join(section(read("accuracy.md"), "Experts in closed form").split())


needs_new = pytest.mark.skipif(
    not all(path.exists() for path in published_errors.NEW.values()),
    reason="published runs are not here",
)


UNEXPLAINED = {
    "YaFSDP, A100": lambda row: row["table"] == "yafsdp",
    "Megatron-LLaMA, A100": lambda row: row["table"] == "megatron-llama",
    "LLaMA 2 in NeMo, 16k tokens and more": lambda row: (
        row["table"] == "nemo-long" and int(row["sequence"]) > 8192
    ),
    "torchao, 8 bits on H100": lambda row: row["table"] == "torchao" and row["bits"] == "8",
    "torchtitan, tp 8": lambda row: row["table"] == "torchtitan-pr" and row["tp"] == "8",
    "SimuMax, tp 8": lambda row: row["table"] == "simumax" and row["tp"] == "8",
    "DLPerf, V100, tp over servers": lambda row: "V100" in row["run"] and row["tp"] == "16",
    "DLPerf, V100, tp 2 to 8": lambda row: "V100" in row["run"] and row["tp"] in ("2", "4", "8"),
    "Megatron's test, deterministic": lambda row: row["table"] == "megatron-ci",
    "MLPerf's 8B, Blackwell, tp 1": lambda row: (
        row["table"] == "mlperf-8b" and row["tp"] == "1" and "H100" not in row["run"]
    ),
    "ms-swift, packed samples counted whole": lambda row: row["table"] == "ms-swift",
}


@needs_new
def test_what_is_not_explained_is_listed_with_its_size():
    stated = {
        row[0]: row[1:] for row in rows(section(read("accuracy.md"), "Transformers in closed form"))
    }
    every = published.read(published_errors.NEW["runs-more"])
    for name, is_one in UNEXPLAINED.items():
        errors = [one.error for one in every if one.ran and one.error and is_one(one.row)]
        assert stated[name] == [str(len(errors)), f"{100 * statistics.mean(errors):+.0f} %"]
    assert sum(one.estimate is None for one in every) == 2


def test_runs_of_state_spaces_are_as_near_as_is_said():
    text = " ".join(section(read("accuracy.md"), "Transformers in closed form").split())
    runs = published.read(published_errors.STATES)
    errors = {
        name: [one.error for one in runs if f" 3 {name} " in one.row["run"]]
        for name in ("Nano", "Super", "Ultra")
    }
    nano, others, ultra = (f"{100 * mean(found):.1f} %" for found in errors.values())
    said = f"its five runs in Megatron Bridge are {nano} off in the mean, Super's eight {others}"
    assert f"{said}, Ultra's two {ultra}." in text
    assert [*map(len, errors.values())] == [5, 8, 2]
    assert mean([one.error for one in runs]) <= 0.083
    assert max(abs(one.error) for one in runs) < 0.18


@needs_new
def test_the_errors_that_pages_state_are_those_of_the_runs():
    with published_errors.ERRORS.open(newline="") as file:
        assert [*csv.DictReader(file)] == [*published_errors.recorded_errors()]


def test_pages_and_documents_say_the_same_of_errors():
    text = section(read("accuracy.md"), "Transformers in closed form")
    stated = {row[0]: row[1:] for row in rows(text)}
    for name, like in KINDS.items():
        errors = errors_like(name)
        figures = (f"{100 * error:.1f} %" for error in (errors.half, errors.twentieth))
        assert stated[like] == [str(errors.runs), *figures]
    readme = " ".join((ROOT / "README.md").read_text().split())
    for name in ("usual", "experts", "far"):
        assert f"{100 * errors_like(name).half:.1f} %" in readme


@pytest.mark.parametrize("name", KINDS)
def test_of_runs_like_a_plan_half_and_nearly_all_are_within_what_is_said(name):
    with published_errors.ERRORS.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["kind"] == name]
    known = [abs(float(row["seconds"])) for row in rows if row["seconds"]]
    said = errors_like(name)
    assert said.runs == len(known) > 0
    assert 0.5 <= sum(error <= said.half for error in known) / len(known) < 0.6
    # of one more run with as many as there are, the place among all is any one of n + 1
    beyond = 1 + sum(error > said.twentieth for error in known)
    assert beyond <= max(1, 0.05 * (len(known) + 1))


@needs_runs
def test_tries_run_as_often_as_is_said_by_other_sources(found):
    tried = [one for one in found if one.row["table"] in ("hagemann", "bloom", "torchtitan")]
    assert not {one.row["table"] for one in tried} & memory_factors().keys()
    stated = rows(section(read("accuracy.md"), "The chance to fit"))[1:]
    bins = published.by_chance(tried)
    assert [*bins] == [*published.CHANCES]
    assert sum(map(len, bins.values())) == 425
    for cells, tries in zip(stated, bins.values(), strict=True):
        said = statistics.mean(chance for chance, _ in tries)
        ran = statistics.mean(ran for _, ran in tries)
        assert cells[1:] == [str(len(tries)), f"{100 * said:.1f} %", f"{100 * ran:.1f} %"]
        assert abs(ran - said) < 2 * binomial(chance for chance, _ in tries)


def binomial(chances):
    """The deviation of a share that happens, of events with such chances."""
    chances = [*chances]
    return sum(chance * (1 - chance) for chance in chances) ** 0.5 / len(chances)


@pytest.mark.parametrize("said", [0.05, 0.2, 0.35, 0.5, 0.65, 0.8, 0.95])
def test_sources_that_are_left_out_fit_as_often_as_the_others_say(said):
    """Every source as one; its runs on a device with the room for which the others say a chance."""
    room = [-0.5 + 0.001 * step for step in range(1001)]
    fitting = []
    for source, runs in memory_logs().items():
        others = [statistics.NormalDist(0, rms(logs)) for logs in others_than(source)]
        least = next(x for x in room if statistics.mean(one.cdf(x) for one in others) >= said)
        fitting.append(statistics.mean(log <= least for log in runs))
    assert len(fitting) >= 9
    assert abs(statistics.mean(fitting) - said) < 2 * binomial([said] * len(fitting))


def others_than(source):
    return [logs for name, logs in memory_logs().items() if name != source]


def memory_logs():
    """By source the logs of what runs need to what is computed."""
    known = {}
    with published_errors.ERRORS.open(newline="") as file:
        for row in csv.DictReader(file):
            if row["bytes"]:
                log = -math.log(1 + float(row["bytes"]))
                known.setdefault(row["source"], []).append(log)
    return known


def rms(logs):
    return math.sqrt(sum(log * log for log in logs) / len(logs))


@pytest.mark.parametrize("need", [0.8, 0.95, 1.0, 1.1])
def test_a_chance_is_that_of_draws_of_a_source_and_of_its_error(need):
    random = Random(0)
    spreads = [rms(logs) for logs in memory_logs().values()]
    draws = [math.exp(random.gauss(0, random.choice(spreads))) for _ in range(40_000)]
    fitting = statistics.mean(need * factor <= 1 for factor in draws)
    assert fits_chance(need * USABLE * 80e9, 80e9) == pytest.approx(fitting, abs=0.01)


def test_predictions_are_those_that_were_recorded(request):
    """A change that moves one by over 1 %, or refuses what was predicted, is made on purpose."""
    found = [*published_errors.predictions(published_errors.FILES)]
    if request.config.getoption("--update") and RUNS.exists():
        published_errors.write(published_errors.RECORDED, found)
    with published_errors.RECORDED.open(newline="") as file:
        recorded = {(row["file"], row["row"]): row for row in csv.DictReader(file)}
    assert {row["file"] for row in found} >= {"sinks"}
    moved = [
        (row["file"], row["row"], what, before[what], row[what])
        for row in found
        for before in [recorded[row["file"], row["row"]]]
        for what in ("seconds", "bytes")
        if before[what]
        if not row[what] or abs(float(row[what]) / float(before[what]) - 1) > 0.01
    ]
    assert moved == [], "run `pytest tests/transformer/test_published.py --update` if it is meant"


def test_columns_that_nobody_knows_are_refused_and_those_that_are_ignored_are_said(
    tmp_path, capsys
):
    path = tmp_path / "runs.csv"
    path.write_text("table,run,source,release\nmine,one,a page,26.04\n")
    [run] = published.read(path)
    assert run.estimate is None
    assert "ignored columns: release, source" in capsys.readouterr().err
    path.write_text("table,run,colour\nmine,one,red\n")
    with pytest.raises(PartoptError, match="unknown columns: colour"):
        published.read(path)


@needs_runs
@pytest.mark.parametrize("name", OLDER)
def test_the_older_tables(name):
    errors = [found / said - 1 for _, said, found in published.OLDER[name]()]
    assert mean(errors) <= OLDER[name]


@needs_runs
@pytest.mark.slow
def test_the_command_prints_every_table_and_json(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["published_trainers.py", "--rows"])
    published.main()
    printed = capsys.readouterr().out
    assert all(name in printed for name in [*MEANS, *OLDER, "fits:", "ranking: 13 sheets"])
    by, both = re.findall(r"by ([0-9.]+)%", re.search(r"ranking: .*", printed)[0])
    text = " ".join(read("accuracy.md").split())
    assert (
        f"the first is {by} % slower than the best that ran, the first or its challenger {both} %"
        in text
    )
    monkeypatch.setattr("sys.argv", ["published_trainers.py", str(RUNS), "--json"])
    published.main()
    rows = json.loads(capsys.readouterr().out)["rows"]
    with RUNS.open() as file:
        assert [row["run"] for row in rows] == [row["run"] for row in csv.DictReader(file)]
    assert all(row["predicted_s"] > 0 and row["predicted_bytes"] > 0 for row in rows)


ROW = {
    **dict.fromkeys(("sequence_parallel", "overlap", "sharded", "compile", "llama"), "yes"),
    **dict.fromkeys(("fsdp", "hsdp", "grads_only", "early", "ends_are_blocks"), "no"),
    **dict.fromkeys(("dropout", "rotary", "tied", "expert_overlap"), "no"),
    **dict.fromkeys(("experts", "experts_a_token", "expert_ffn", "head_dim"), "0"),
    **dict.fromkeys(("tp", "cp", "pp", "chunks", "ep", "microbatch"), "1"),
    "table": "mine",
    "run": "mine 8",
    "status": "ok",
    "step_s": "1",
    "memory_bytes": "",
    "device_name": "A100-80GB",
    "device_peak": "312e12",
    "device_best16": "257e12",
    "device_best8": "0",
    "device_best4": "0",
    "device_hbm": "2e12",
    "device_link": "3e11",
    "device_port": "25e9",
    "device_ring": "0.82",
    "device_tdp": "400",
    "device_limit": "400",
    "device_memory": "80e9",
    "device_kind": "A100",
    "layers": "8",
    "hidden": "4096",
    "heads": "32",
    "kv_heads": "8",
    "ffn": "14336",
    "vocab": "32000",
    "sequence": "4096",
    "trainer": "megatron",
    "gpus": "8",
    "global_batch": "64",
    "dp": "8",
    "bits": "16",
    "recompute": "none",
    "tp_overlap": "none",
    "loss": "fused",
    "grad_bytes": "4",
    "server": "8",
    "dispatch": "alltoall",
    "kernel": "flash2",
    "norm": "fused",
    "scales": "tensor",
    "reduce_bytes": "4",
}


def test_a_row_goes_through_the_functions_of_the_program():
    own = published.find(ROW)
    assert own.why == ""
    assert own.ran
    assert own.estimate.seconds > 0
    assert own.error == pytest.approx(own.estimate.seconds - 1)
    moe = {"experts": "8", "experts_a_token": "2", "expert_ffn": "1024", "ep": "8"}
    for changes in (moe, {"trainer": "torchtitan"}, {"fsdp": "yes"}, {"kernel": "fused"}):
        assert published.find(ROW | changes).estimate.seconds > 0


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"pp": "2", "dp": "4", "recompute": "full"},
        {"cp": "2", "dp": "4"},
        {"trainer": "torchtitan"},
        {"trainer": "scaling", "tp": "2", "dp": "4"},
        {"gpus": "32", "dp": "16", "tp": "2", "overlap": "no"},
    ],
)
def test_the_plan_of_a_row_simulated_is_near_the_closed_form(changes):
    row = ROW | changes
    assert simulated_of(row) == pytest.approx(published.find(row).estimate.seconds, rel=0.02)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"bits": "8"}, "A100-80GB: what fp8 achieves on it is not known"),
        ({"kernel": "flash4"}, "A100-80GB: what flash4 achieves on it is not known"),
        ({"device_kind": "TPU"}, "unknown: 'TPU'"),
        ({"trainer": "mine"}, "mine"),
        ({"other": "linear attention"}, "blocks of another kind: linear attention"),
        ({"optimizer": "lion"}, "optimizers beside Adam and Muon"),
    ],
)
def test_what_is_not_known_is_said(changes, why):
    own = published.find(ROW | changes)
    assert own.estimate is None
    assert why in own.why
    assert published.document(own) == {
        "run": "mine 8",
        "predicted_s": None,
        "fits_chance": None,
        "predicted_bytes": None,
        "why": own.why,
    }


LATENT = {
    "experts": "8",
    "experts_a_token": "2",
    "expert_ffn": "1024",
    "llama": "no",
    "kv_lora": "512",
    "q_lora": "768",
    "qk_nope": "64",
    "qk_rope": "32",
    "v_dim": "64",
    "head_dim": "96",
    "kv_heads": "32",
    "dense_first": "1",
    "shared_ffn": "512",
    "mtp": "1",
    "pp": "4",
    "dp": "2",
    "ep": "2",
    "chunks": "2",
    "stages": "Et*2|(t|)*6mL",
}


@pytest.mark.parametrize(
    ("column", "value"),
    [
        *{"q_lora": "0", "v_dim": "128", "dense_first": "2", "shared_ffn": "0", "mtp": "0"}.items(),
        *{"etp": "2", "state_bytes": "8", "optimizer": "muon", "dispatch": "hybridep"}.items(),
        *{"expert_overlap": "yes", "routing": "dropless", "window": "512"}.items(),
        *{"stages": "Et|(t|)*6tmL", "dense_period": "2", "model": "gpt-oss"}.items(),
    ],
)
def test_what_a_column_of_experts_says_changes_the_answer(column, value):
    plain, other = (published.find(ROW | LATENT | more) for more in ({}, {column: value}))
    assert plain.why == other.why == ""
    assert plain.estimate.seconds != other.estimate.seconds


@pytest.mark.parametrize(
    ("stages", "ends"),
    [
        ("Et*3|(tt|)*2m|L", "3-2-2-0m-0"),
        ("Et*4|(t*4|)*2tmL", "4-4-4-1m"),
        ("Et*0|t*1|tL", "0-1-1"),
        ("", "stage"),
    ],
)
def test_pipelines_of_megatron_are_read(stages, ends):
    assert published_rows.ends_of(ROW | {"stages": stages, "chunks": "1"}) == ends
    even = ROW | {"stages": "", "pp": "2", "chunks": "5"}  # 8 blocks and two ends
    assert published_rows.ends_of(even) == "blocks"


def test_columns_that_are_not_there_have_their_usual_values():
    left = {name: value for name, value in ROW.items() if USUAL.get(name) != value}
    assert len(left) < len(ROW) - 20
    assert published.find(left).estimate == published.find(ROW).estimate
    empty = ROW | dict.fromkeys(ROW.keys() - left.keys(), "")
    assert published.find(empty).estimate == published.find(ROW).estimate


def test_what_is_known_to_be_off_is_said_beside_the_number():
    own = published.find(ROW | {"scales": "row", "hidden": "4100", "heads": "41", "kv_heads": "41"})
    assert own.estimate is not None
    assert own.why == "widths that are no multiple of 64; fp8 with a scale a row"


def test_a_file_that_is_not_there_is_said(tmp_path):
    with pytest.raises(PartoptError, match="no such file"):
        published.read(tmp_path / "runs.csv")


def test_kendall():
    assert published.kendall([(1, 1), (2, 2), (3, 3)]) == 1
    assert published.kendall([(1, 3), (2, 2), (3, 1)]) == -1


# GiB that ms-swift's examples state: of packed ones the mean error of a kind, and a little
STATED = {"full": 0.04, "experts": 0.09, "lora": 0.14}


@pytest.mark.skipif(not stated_memory.STATED.exists(), reason="published runs are not here")
def test_memory_that_examples_state_is_as_near_as_is_said(capsys):
    packed = [row for row in stated_memory.read_rows() if row.packed]
    assert {row.name for row in packed} < stated_memory.ARGUMENTS.keys()
    for kind, most in STATED.items():
        errors = [row.error for row in packed if row.kind == kind]
        assert mean(errors) <= most, kind
    text = section(read("accuracy.md"), "Transformers in closed form")
    assert f"{100 * mean(row.error for row in packed if row.kind == 'full'):.1f} % (`python" in text
    for name, kind in (("its stated memory: experts", "experts"), ("adapters", "lora")):
        errors = [row.error for row in packed if row.kind == kind]
        assert f"| {name} | {len(errors)} | {100 * statistics.mean(errors):.0f} % |" in text
    stated_memory.main()
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == len(stated_memory.ARGUMENTS) + len(STATED)
