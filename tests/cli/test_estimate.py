"""`partopt profile --estimate` as a process, and where its mark is shown."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from msgspec.structs import replace

from partopt.documents.files import shipped_folder, shipped_names
from partopt.documents.plan import Plan
from partopt.documents.profile import Estimated, Profile
from partopt.importers.repeat import repeat
from partopt.profiler.estimating import estimate_source
from tests.forked import run_forked
from tests.helpers import ROOT, flat, uniform_profile

BASIS = "times estimated for H100-80GB: nothing was measured"
MODEL = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.part = nn.Linear(4, 4)

    def forward(self, x):
        y = self.part(x)
        return y * READ

def build():
    return nn.Sequential(*[Block() for _ in range(3)])

def example_inputs(batch_size):
    return torch.randn(batch_size, 4)
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "net.py").write_text(MODEL.replace("READ", "2"))
    (tmp_path / "reading.py").write_text(MODEL.replace("READ", "y.max().item()"))
    return tmp_path / "net.py"


@pytest.mark.slow
def test_a_profile_of_a_gpu_that_is_not_there(model: Path, tmp_path: Path) -> None:
    written = tmp_path / "net.json"
    words = ["--estimate", "h100", "--dtype", "bfloat16", "--calibrate", "0.25"]
    arguments = ["profile", str(model), *words, "--microbatch", "1,2", "-o", str(written)]
    done = run_forked("partopt", arguments)
    assert done.returncode == 0, done.stderr
    assert "device   H100-80GB (estimated) (torch" in done.stdout
    assert "warning: the times are estimated for H100-80GB" in done.stderr
    made = Profile.load(str(written))
    assert made.estimated is not None
    assert (made.estimated.device, made.estimated.calibrated_s) == ("H100-80GB", 0.25)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "words", "says"),
    [
        ("net.py", "--estimate h10", ['did you mean "h100"?']),
        ("net.py", "--estimate v100 --dtype bfloat16", ["--dtype bfloat16: V100-16GB has no peak"]),
        (
            "reading.py",
            "--estimate h100",
            ['the code of "0" needs the values of a tensor', "(reading.py, line 12)"],
        ),
    ],
)
def test_bad_input(model: Path, file: str, words: str, says: list[str]) -> None:
    output = str(model.parent / "out.json")
    arguments = ["profile", str(model.parent / file), *words.split(), "-o", output]
    done = run_forked("partopt", arguments)
    assert done.returncode == 2
    assert [each for each in says if each not in done.stderr] == []
    assert not Path(output).exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--estimate h100 --steps 3", "--steps: goes with measuring"),
        ("--estimate h100 --resume old.json", "old.json"),
        ("--estimate h100 --calibrate 0", "--calibrate 0.0: expected a number > 0"),
        ("--calibrate 1", "--calibrate: goes with --estimate"),
    ],
)
def test_options_that_do_not_go_together(partopt: Any, model: Path, words: str, says: str) -> None:
    done = partopt("profile", model, *words.split(), "-o", model.parent / "out.json")
    assert done.code == 2
    assert says in done.err


@pytest.fixture
def h100s_file(topology_file: Any) -> str:
    cluster = flat(4, 10e9, memory_bytes=16 * 10**9)
    device = replace(cluster.device, name="NVIDIA H100 80GB HBM3")  # as torch calls it
    return str(topology_file(replace(cluster, device=device)))


@pytest.fixture
def estimated_file(profile_file: Any) -> str:
    made = uniform_profile(4)
    device = replace(made.device, name="H100-80GB (estimated)")
    mark = Estimated(device="H100-80GB", sha256="0")
    return str(profile_file(replace(made, device=device, estimated=mark)))


def test_a_plan_says_what_it_rests_on(
    partopt: Any, estimated_file: str, h100s_file: str, tmp_path: Path
) -> None:
    given = "--topology", h100s_file, "-o", tmp_path / "plan.json"
    planned = partopt("plan", estimated_file, *given).out
    assert f"rests on {BASIS}" in " ".join(planned.split())
    assert json.loads((tmp_path / "plan.json").read_text())["profile"]["estimated"] == "H100-80GB"
    assert "rests on" in partopt("show", tmp_path / "plan.json").out
    shown = partopt("show", estimated_file).out
    assert "H100-80GB (estimated)" in shown
    assert f"rests on {BASIS}" in " ".join(shown.split())
    assert (
        "warning: times estimated for H100-80GB" in partopt("simulate", tmp_path / "plan.json").err
    )


def test_a_plan_of_a_measured_profile_says_nothing_of_it(
    partopt: Any, profile_file: Any, topology_file: Any
) -> None:
    shown = partopt("plan", profile_file(), "--topology", topology_file(), "--json").out
    assert "estimated" not in shown
    assert Plan.parse(shown.encode()).profile.estimated is None


RESULTS = [
    "compare PROFILE --topology CLUSTER --planner straight",
    "plan PROFILE --topology CLUSTER --planner straight --scaling 2,4",
    "simulate PLAN",
    "simulate PLAN --latency all=1ms",
    "show --verify PLAN --profile PROFILE",
]


def marks(node: Any) -> list[str | None]:
    """Every `estimated` in a document."""
    if isinstance(node, list):
        return [mark for part in node for mark in marks(part)]
    if not isinstance(node, dict):
        return []
    own = [node["estimated"]] if "estimated" in node else []
    return own + marks(list(node.values()))


@pytest.mark.slow
@pytest.mark.parametrize("command", RESULTS)
@pytest.mark.parametrize("device", ["H100-80GB", None])
def test_every_result_says_what_it_rests_on(
    partopt: Any,
    estimated_file: str,
    profile_file: Any,
    h100s_file: str,
    tmp_path: Path,
    command: str,
    device: str | None,
) -> None:
    made = Profile.load(estimated_file)
    if device is None:
        made = replace(made, estimated=None)
    files = {
        "PROFILE": profile_file(made),
        "CLUSTER": h100s_file,
        "PLAN": str(tmp_path / "plan.json"),
    }
    planned = "--planner", "straight", "-o", files["PLAN"]
    assert partopt("plan", files["PROFILE"], "--topology", files["CLUSTER"], *planned).code == 0
    words = [files.get(word, word) for word in command.split()]
    given = partopt(*words, "--json")
    assert set(marks(given.document)) == {device}
    (tmp_path / "result.json").write_text(given.out)
    for page in (partopt(*words).out, partopt("show", tmp_path / "result.json").out):
        assert page.count("rests on") == page.count(BASIS) == (device is not None)


@pytest.mark.slow
def test_a_trace_and_a_figure_say_what_they_rest_on(
    partopt: Any, estimated_file: str, h100s_file: str, tmp_path: Path
) -> None:
    plan = tmp_path / "plan.json"
    assert partopt("plan", estimated_file, "--topology", h100s_file, "-o", plan).code == 0
    assert partopt("simulate", plan, "-o", "-").document["otherData"]["estimated"] == "H100-80GB"
    assert partopt("simulate", plan, "-o", tmp_path / "figure.svg").code == 0
    assert BASIS in (tmp_path / "figure.svg").read_text()


REFUSED = [
    "plan PROFILE --topology CLUSTER -o OUT",
    "plan PROFILE --topology CLUSTER --schedule auto --global-batch 8 -o OUT",
    "plan PROFILE --topology CLUSTER --scaling 1,2 -o OUT",
    "compare PROFILE --topology CLUSTER -o OUT",
    "import megatron Et*2|t*2L --profile PROFILE --topology CLUSTER -o OUT",
]


@pytest.mark.slow
def test_an_estimate_is_planned_on_no_other_device(
    partopt: Any, profile_file: Any, tmp_path: Path
) -> None:
    made = estimate_source(
        *(ROOT / "examples" / "gpt.py", "h100"),
        arguments={"layers": 4, "width": 32, "heads": 2, "context": 16, "vocabulary": 50},
        microbatch_sizes=[1, 2],
        name="small",
    )
    files = {
        "PROFILE": profile_file(made),
        "CLUSTER": "dgx-a100",
    }
    other = "device.name: A100-80GB, but small was estimated for H100-80GB"
    hints = set()
    for command in REFUSED:
        files["OUT"] = str(tmp_path / ("out.svg" if "compare" in command else "out.json"))
        done = partopt(*(files.get(word, word) for word in command.split()))
        assert done.code == 2, command
        [error] = done.errors
        assert error.endswith(f"dgx-a100: {other}"), command
        hints.update(done.hints)
        assert not Path(files["OUT"]).exists()
    [hint] = hints  # of all commands
    program, *words = shlex.split(hint.removeprefix("estimate it for A100-80GB: "))
    assert program == "partopt"
    again = tmp_path / words[-1]
    assert words[-1] == "small.a100-estimated.bfloat16.json"
    assert partopt(*words[:-1], again).code == 0
    estimated = Profile.load(str(again))
    assert estimated.model == made.model
    assert estimated.dtype == made.dtype
    assert [each.microbatch_size for each in estimated.measurements] == [1, 2]
    assert partopt("plan", again, "--topology", "dgx-a100", "--planner", "straight").code == 0


def test_an_estimate_is_made_again_for_the_device_of_the_cluster(
    partopt: Any, estimated_file: str, profile_file: Any, tmp_path: Path
) -> None:
    made = Profile.load(estimated_file)
    model = replace(made.model, entry="net.py:build", arguments={"size": "two words"})
    own = profile_file(replace(made, model=model, autocast="bfloat16"))
    [hint] = partopt("plan", own, "--topology", "dgx-a100").hints
    assert hint.endswith(
        'partopt profile --estimate a100 net.py:build --set size="two words" --microbatch 1 '
        "--dtype float32 --autocast bfloat16 --name chain "
        "-o chain.a100-estimated.float32.json"
    )
    cluster = tmp_path / "cluster.yaml"
    text = (ROOT / "topologies/workstation-2.yaml").read_text()
    cluster.write_text(text.replace("RTX-4090", "L40S"))
    [hint] = partopt("plan", own, "--topology", cluster).hints
    assert "--estimate FILE " in hint
    assert hint.endswith("; FILE says what a L40S does (docs/formats.md)")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("device", "cluster"),
    [
        ("h100", "dgx-h100"),
        ("v100", "v100-nvlink"),
        ("h200", "dgx-h200"),
        ("h100-96gb", "CLUSTER"),
    ],
)
def test_what_follows_an_estimate_is_a_cluster_of_its_device(
    partopt: Any, model: Path, device: str, cluster: str
) -> None:
    output = model.parent / "net.json"
    done = partopt("profile", model, "--estimate", device, "--microbatch", "1", "-o", output)
    following = f"next:    partopt plan {output} --topology {cluster}\n"
    assert done.err.endswith(following)
    assert partopt("show", output).err.endswith(following)


def test_a_device_is_shown_with_its_sources(partopt: Any) -> None:
    shown = partopt("show", "h100")
    assert shown.code == 0
    assert "989.4 Tflop/s" in shown.out
    assert "assumed:" in shown.out
    assert shown.err.startswith("next:    partopt profile MODEL --estimate h100")
    assert json.loads(partopt("show", "h100", "--json").out)["bandwidth"]["value"] == "3.35 TB/s"


ESTIMATED = [name for name in shipped_names("profiles") if "-estimated." in name]


def test_every_command_of_the_readme_is_of_a_file_that_is_there() -> None:
    lines = (ROOT / "profiles" / "README.md").read_text().splitlines()
    written = [line.split()[-1] for line in lines if line.startswith("partopt profile ")]
    assert sorted(written) == [f"profiles/{name}.json" for name in ESTIMATED]


@pytest.mark.parametrize("name", ESTIMATED)
def test_shipped_estimates_are_marked_and_small(name: str) -> None:
    path = shipped_folder("profiles") / f"{name}.json"
    made = Profile.load(str(path))
    assert path.stat().st_size < 300_000
    assert made.estimated is not None
    assert made.device.name == f"{made.estimated.device} (estimated)"
    assert made.estimated.without_rule == []
    assert made.dtype == "bfloat16"


@pytest.mark.slow
def test_a_shipped_estimate_is_made_again() -> None:
    """Its first microbatch, of four of its blocks; `benchmarks/estimated_profiles.py` makes all of
    all of them.
    """
    made = Profile.load("gpt3-6.7b.h100-estimated.bfloat16")
    if made.environment.torch != str(torch.__version__):
        pytest.skip("another torch may issue other operations than the one it was made with")
    few = estimate_source(
        ROOT / "examples" / "gpt.py",
        "h100",
        arguments={**made.model.arguments, "layers": 4},
        microbatch_sizes=[1],
        dtype="bfloat16",
    )
    again = repeat(few, "blocks", made.model.arguments["layers"])
    assert [replace(layer, measured_as=None) for layer in again.layers] == made.layers
    mine, its = again.measurements[0], made.measurements[0]
    assert mine.tensors == its.tensors
    assert mine.stash_groups == its.stash_groups
    for one, other in zip(mine.layers, its.layers, strict=True):
        assert msgspec.to_builtins(one) == pytest.approx(msgspec.to_builtins(other), rel=1e-12)
    assert again.estimated == made.estimated
