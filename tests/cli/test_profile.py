from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from msgspec.structs import replace

from partopt.cli import stopping
from partopt.cli.profile import command
from partopt.cli.words import as_flags
from partopt.documents.profile import Profile
from partopt.errors import PartoptError
from partopt.profiler.step import Stepper
from partopt.report.profile_text import render, render_sizes
from tests.forked import Forked, run_forked
from tests.helpers import ROOT, run_process

MODEL = """
import torch
from torch import nn

def build(width=4, layers=2):
    print("building")
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)])

def example_inputs(batch_size):
    return torch.randn(batch_size, 4)
"""


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "net.py").write_text(MODEL)
    return str(tmp_path / "net.py")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(command, ["--device", "cpu", "--steps", "2", *arguments])


def refusal(*arguments: str) -> PartoptError:
    error = run(*arguments).exception
    assert isinstance(error, PartoptError), error
    return error


@pytest.mark.slow
def test_it_writes_a_profile_and_says_what_to_do_next(model: str, tmp_path: Path) -> None:
    output = str(tmp_path / "net.json")
    result = run(model, "--microbatch", "4,1", "--set", "layers=3", "-o", output)
    assert result.exit_code == 0, result.exception
    measured = Profile.load(output)
    assert [each.microbatch_size for each in measured.measurements] == [1, 4]
    assert [layer.name for layer in measured.layers] == ["0", "1", "2"]
    assert measured.model.arguments == {"layers": 3}
    assert result.stderr.splitlines()[-2:] == [
        f"Wrote {output}",
        f"next:    partopt plan {output} --topology cpu-2",
    ]


@pytest.mark.slow
def test_blocks_are_repeated_and_the_summary_says_so(model: str, tmp_path: Path) -> None:
    output = str(tmp_path / "deep.json")
    given = [model, "--microbatch", "1", "--set", "layers=4", "-o", output]
    Path(model).write_text(
        MODEL.replace("Sequential(*[", "Module([").replace("nn.Module(", "Net(") + NET
    )
    result = run(*given, "--repeat", "blocks=7")
    assert result.exit_code == 0, result.exception
    assert [layer.name for layer in Profile.load(output).layers] == [
        f"blocks.{index}" for index in range(7)
    ]
    assert "measured with 4 blocks of blocks" in " ".join(result.stderr.split())
    assert "* did not run" in render(Profile.load(output))
    for wrong in ("blocks", "=3", "blocks=many"):
        assert "not of the form LIST=N" in refusal(*given, "--force", "--repeat", wrong).message
    wrong = run(*given, "--force", "--repeat", "layers=9")
    assert "has 0 blocks" in str(wrong.exception)
    assert f"nothing is repeated: wrote {output}" in wrong.stderr
    assert (
        run(
            model,
            "--set",
            "layers=4",
            "--microbatch",
            "1",
            "--resume",
            output,
            "--repeat",
            "blocks=7",
        ).exit_code
        == 0
    )
    assert len(Profile.load(output).layers) == 7
    estimated = ("--estimate", "h100", "--calibrate", "1", "--repeat", "blocks=7", "--force")
    error = CliRunner().invoke(command, [*given, *estimated]).exception
    assert str(error).startswith("--calibrate: the step of a whole model")


NET = """
class Net(nn.Module):
    def __init__(self, blocks):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x
"""


@pytest.mark.slow
def test_the_summary_is_a_line_for_each_size_and_fits_80_columns(
    model: str, tmp_path: Path
) -> None:
    lines = run(
        model, "--microbatch", "1,2", "--name", "tiny", "-o", str(tmp_path / "net.json")
    ).stdout.splitlines()
    assert lines[0] == "model    tiny: 2 layers, 160 B of parameters, float32"
    assert lines[3].split() == [
        "MICROBATCH",
        "STEP",
        "LAYERS",
        "COVERAGE",
        "OVERHEAD",
        "SAMPLES/S",
        "OPTIMIZER",
        "PEAK",
    ]
    assert [line.split()[0] for line in lines[4:]] == ["1", "2"]
    assert all(len(line) <= 80 for line in lines)


def test_the_summary_says_how_the_model_was_run(model: str, tmp_path: Path) -> None:
    output = str(tmp_path / "net.json")
    result = run(model, "--microbatch", "1", "--autocast", "bfloat16", "-o", output)
    assert "of parameters, float32, bfloat16 autocast\n" in result.stdout
    compiled = replace(Profile.load(output), compiled=True)
    head = " ".join(render_sizes(compiled).split("device")[0].split())
    assert head.endswith("float32, bfloat16 autocast, compiled")


@pytest.mark.slow
def test_a_dash_writes_the_profile_to_standard_output_and_nothing_else(model: str) -> None:
    result = run(model, "--microbatch", "1", "-o", "-")
    assert Profile.parse(result.stdout_bytes).model.name == "net"
    assert "building" in result.stderr


@pytest.mark.slow
def test_out_of_memory_is_a_line_of_the_summary(model: str, tmp_path: Path) -> None:
    limit = "    if batch_size == 2: raise torch.OutOfMemoryError('full')\n"
    Path(model).write_text(
        MODEL.replace("    return torch.randn", limit + "    return torch.randn")
    )
    result = run(model, "--microbatch", "1,2,4", "-o", str(tmp_path / "net.json"))
    assert result.stdout.splitlines()[5].split()[:4] == ["2", "out", "of", "memory"]
    assert Profile.load(str(tmp_path / "net.json")).measurements[1].out_of_memory


@pytest.mark.slow
def test_sizes_at_which_the_hooks_cost_much_are_warned_of(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = str(tmp_path / "net.json")
    bare = Stepper.bare
    monkeypatch.setattr(Stepper, "bare", lambda self: bare(self) / 4)
    result = run(model, "--microbatch", "1,2", "-o", output)
    assert result.exit_code == 0
    said = [line for line in result.stderr.splitlines() if "the hooks cost" in line]
    cost = Profile.load(output).measurements[0].overhead - 1
    assert said == [
        f"warning: microbatch 1: the hooks cost {cost * 100:.0f} % of the step: the layers' shares "
        "are in doubt; larger units need fewer hooks: --granularity block, --unit (and 1 alike)"
    ]


def test_values_read_as_python_where_they_can(model: str, tmp_path: Path) -> None:
    options = "def build(**options):\n    print(options)\n    return nn.Linear(4, 4)\n"
    Path(model).write_text(MODEL.replace("def build(", "def other(") + options)
    settings = ["a=1", "b=2.5", "c=true", "d=None", "e=gelu", "f=[1, 2]", "g=x=y", "h="]
    result = run(
        model,
        "--microbatch",
        "1",
        *[word for setting in settings for word in ("--set", setting)],
        "-o",
        str(tmp_path / "net.json"),
    )
    assert (
        str({"a": 1, "b": 2.5, "c": True, "d": None, "e": "gelu", "f": [1, 2], "g": "x=y", "h": ""})
        in result.stderr
    )


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        (
            ["--microbatch", "0"],
            "--microbatch 0: 0 is not a microbatch size",
            "list whole numbers from 1",
        ),
        (
            ["--microbatch", "1,x"],
            "--microbatch 1,x: 'x' is not a microbatch size",
            "list whole numbers from 1",
        ),
        (
            ["--microbatch", "-2"],
            "--microbatch -2: -2 is not a microbatch size",
            "list whole numbers from 1",
        ),
        (["--microbatch", ","], "--microbatch: no size given", "list whole numbers from 1"),
        (["--set", "layers"], "--set layers: not of the form K=V", "--set layers=12"),
        (
            ["--set", "layer=3"],
            '--set: net.py:build takes no argument "layer"',
            'did you mean "layers"?',
        ),
        (["--steps", "0"], "--steps 0: expected a whole number >= 1", "10 steps"),
        (["--unit", "5"], "--unit 5: matches no module that the forward calls", "known: 0, 1"),
    ],
)
def test_options_that_cannot_be(
    model: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
    hint: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    error = refusal("net.py", *arguments, "-o", "net.json")
    assert as_flags(error.message) == message
    assert hint in as_flags(error.hint)
    assert error.exit_code == 2
    assert not (tmp_path / "net.json").exists()


def test_an_existing_output_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "net.json").write_text("mine")
    error = refusal("no-such-file.py", "-o", str(tmp_path / "net.json"))
    assert error.message.endswith("net.json: already exists")
    assert "--force" in as_flags(error.hint)
    assert (tmp_path / "net.json").read_text() == "mine"


@pytest.mark.slow
def test_force_replaces_an_existing_output(model: str, tmp_path: Path) -> None:
    (tmp_path / "net.json").write_text("old")
    assert (
        run(model, "--microbatch", "1", "--force", "-o", str(tmp_path / "net.json")).exit_code == 0
    )
    assert Profile.load(str(tmp_path / "net.json")).model.name == "net"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("content", "code", "message", "hint"),
    [
        (
            "raise ValueError('broken')\n",
            2,
            "net.py: raised ValueError: broken (net.py, line 1)",
            "--debug shows the traceback",
        ),
        ("import torch\n", 2, "net.py: has no build function and no model", "build(**options)"),
        (
            MODEL + "\nraise RuntimeError\n",
            2,
            "net.py: raised RuntimeError (net.py, line 12)",
            "--debug",
        ),
        (
            MODEL.replace("batch_size, 4", "batch_size, 5"),
            2,
            "net.py: the training step raised RuntimeError: mat1 and mat2",
            "example_inputs",
        ),
        (
            MODEL.replace("return torch.randn", "raise MemoryError #"),
            1,
            "net.py: every microbatch size ran out of memory",
            "a smaller model",
        ),
    ],
)
def test_a_process_answers_with_error_hint_and_code(
    tmp_path: Path, content: str, code: int, message: str, hint: str
) -> None:
    (tmp_path / "net.py").write_text(content)
    words = ["--device", "cpu", "-o", str(tmp_path / "net.json")]
    result = run_forked("partopt", ["profile", str(tmp_path / "net.py"), *words])
    error, explanation = result.stderr.splitlines()[-2:]
    assert error.startswith("error: ")
    assert message in error
    assert explanation.startswith("hint:")
    assert hint in explanation
    assert result.returncode == code
    assert result.stdout == ""


SLOW_AT_TWO = MODEL.replace(
    "def example_inputs(batch_size):\n",
    "def example_inputs(batch_size):\n    import sys, time\n    while batch_size >= SLOW:\n"
    "        print('waiting', file=sys.stderr, flush=True)\n        time.sleep(0.05)\n",
)


STOPS = {
    "foreground": (signal.SIGINT, "interrupted", 130),
    "background": (signal.SIGINT, "interrupted", 130),  # a shell has its jobs ignore SIGINT
    "scheduler": (signal.SIGTERM, "terminated", 143),
}


class Started:
    """A process whose signals are as a terminal's and a scheduler's are, or as a shell's job's."""

    def __init__(self, arguments: list[str], ignored: bool) -> None:
        self.job: subprocess.Popen[str] | None = None
        if not ignored:
            self.forked = Forked("partopt", arguments, ROOT)
            return
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
        command = [sys.executable, "-m", "partopt", *arguments]
        self.job = subprocess.Popen(
            command, stderr=subprocess.PIPE, cwd=ROOT, env=os.environ, text=True
        )
        signal.signal(signal.SIGINT, handler)

    def stop_at(self, word: str, number: int) -> tuple[int, str]:
        """Its exit code and what it said, sent a signal when it has said `word`."""
        if self.job is not None:
            assert self.job.stderr is not None
            next(line for line in self.job.stderr if word in line)
            self.job.send_signal(number)
            said = self.job.communicate()[1]
            return self.job.returncode, said
        while self.forked.process.is_alive() and word not in self.forked.err.read_text():
            time.sleep(0.02)
        assert self.forked.process.pid is not None
        os.kill(self.forked.process.pid, number)
        done = self.forked.wait()
        return done.returncode, done.stderr


@pytest.mark.slow
@pytest.mark.usefixtures("heeded_signals")
@pytest.mark.parametrize(
    ("stop", "slow", "kept"), [*((stop, 2, [1]) for stop in STOPS), ("foreground", 1, None)]
)
def test_a_signal_keeps_what_is_finished(
    tmp_path: Path, stop: str, slow: int, kept: list[int] | None
) -> None:
    number, word, code = STOPS[stop]
    (tmp_path / "net.py").write_text(f"SLOW = {slow}\n{SLOW_AT_TWO}")
    output = tmp_path / "net.json"
    words = ["--device", "cpu", "--steps", "2", "--microbatch", "1,2,4", "-o", str(output)]
    started = Started(["profile", str(tmp_path / "net.py"), *words], stop == "background")
    returncode, said = started.stop_at("waiting", number)
    assert returncode == code
    if kept is None:
        assert f"{word} before the first microbatch size was finished: nothing is written" in said
        assert not output.exists()
    else:
        assert f"{word}: wrote {output} with what was finished, microbatch 1" in said
        assert [each.microbatch_size for each in Profile.load(str(output)).measurements] == kept


@pytest.mark.usefixtures("heeded_signals")
def test_a_hang_up_stops_too_but_not_under_nohup() -> None:
    with pytest.raises(KeyboardInterrupt) as stopped, stopping.stopped_by_signals():
        os.kill(os.getpid(), signal.SIGHUP)
    assert stopping.describe(stopped.value) == "hung up"
    assert stopping.exit_code(stopped.value) == 129
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stopping.stopped_by_signals():
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("heeded_signals")
def test_a_signal_before_the_model_is_built_is_answered_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "net.py").write_text(f"import os\nos.kill(os.getpid(), {int(signal.SIGTERM)})\n")
    before = signal.getsignal(signal.SIGTERM)
    result = run(str(tmp_path / "net.py"), "-o", str(tmp_path / "net.json"))
    assert result.exit_code == 143
    assert result.stderr.startswith("terminated before the first microbatch size was finished")
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.slow
def test_a_profile_is_gone_on_with(model: str, tmp_path: Path) -> None:
    output = tmp_path / "net.json"
    run(model, "--microbatch", "1,4", "--name", "mine", "-o", str(output))
    first = Profile.load(str(output)).measurements
    result = run(model, "--microbatch", "1,2,4,8", "--resume", str(output))
    assert result.exit_code == 0, result.exception
    resumed = Profile.load(str(output))
    assert [each.microbatch_size for each in resumed.measurements] == [1, 2, 4, 8]
    assert [resumed.measurements[0], resumed.measurements[2]] == first
    assert resumed.model.name == "mine"
    assert [line.split(",")[0] for line in result.stderr.splitlines() if "steps in" in line] == [
        "microbatch 2 (2 of 4)",
        "microbatch 8 (4 of 4)",
    ]


@pytest.mark.slow
def test_what_is_gone_on_with_may_be_written_elsewhere(model: str, tmp_path: Path) -> None:
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    run(model, "--microbatch", "1", "-o", str(first))
    before = first.read_bytes()
    assert run(model, "--microbatch", "2", "--resume", str(first), "-o", str(second)).exit_code == 0
    assert first.read_bytes() == before
    assert [each.microbatch_size for each in Profile.load(str(second)).measurements] == [1, 2]
    error = refusal(model, "--microbatch", "4", "--resume", str(first), "-o", str(second))
    assert error.message.endswith("second.json: already exists")


def test_another_model_is_not_gone_on_with(model: str, tmp_path: Path) -> None:
    output = str(tmp_path / "net.json")
    run(model, "--microbatch", "1", "-o", output)
    error = refusal(model, "--microbatch", "2", "--resume", output, "--set", "layers=3")
    assert as_flags(error.message) == (
        "--resume: a profile of something else: model.arguments is {} in it and {'layers': 3} here"
    )
    assert error.exit_code == 2
    assert [each.microbatch_size for each in Profile.load(output).measurements] == [1]


def test_a_profile_to_go_on_with_has_to_be_there(model: str, tmp_path: Path) -> None:
    error = refusal(model, "--resume", str(tmp_path / "net.json"))
    assert error.message.endswith("net.json: no such file")


@pytest.mark.slow
def test_somewhere_to_write_is_needed(model: str) -> None:
    result = run_process(["profile", model, "--device", "cpu"])
    assert result.returncode == 2
    assert b"missing option '-o' / '--output'" in result.stderr


@pytest.mark.parametrize(("failing", "kept"), [(4, [1, 2]), (1, None)])
def test_an_error_at_a_later_size_keeps_what_is_finished(
    tmp_path: Path, failing: int, kept: list[int] | None
) -> None:
    failure = (
        f"    if batch_size == {failing}: raise RuntimeError('no kernel for this size')\n   "
        " return torch.randn"
    )
    (tmp_path / "net.py").write_text(MODEL.replace("    return torch.randn", failure))
    source, output = tmp_path / "net.py", tmp_path / "net.json"
    result = run_forked(
        "partopt",
        [
            "profile",
            str(source),
            "--device",
            "cpu",
            "--steps",
            "2",
            "--microbatch",
            "1,2,4",
            "-o",
            str(output),
        ],
    )
    said = result.stderr.splitlines()
    assert result.returncode == 2
    assert said[-2].startswith(
        f"error: {source}: example_inputs: raised RuntimeError: no kernel for this size"
    )
    if kept is None:
        assert not output.exists()
    else:
        assert (
            said[-3]
            == f"stopped by an error: wrote {output} with what was finished, microbatch 1, 2"
        )
        assert [each.microbatch_size for each in Profile.load(str(output)).measurements] == kept


@pytest.mark.slow
def test_help_shows_an_example_and_needs_no_torch() -> None:
    program = (
        "import sys; from partopt.cli import main\ntry: main(['profile', "
        "'--help'])\nfinally: assert 'torch' not in sys.modules"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert result.returncode == 0, result.stderr
    assert "partopt profile examples/gpt.py" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "error", "hint"),
    [
        (["--onto", "p.json"], "--onto: goes with --from-run", "leave it out to measure MODEL"),
        (["--from-run", "r.json"], "has no bytes of parameters", "say whose they are: --onto"),
        (
            ["net.py", "--from-run", "r.json", "--onto", "p.json"],
            "MODEL: goes with measuring, and --from-run measures nothing",
            "leave one of the two out",
        ),
        (
            ["--microbatch", "2", "--from-run", "r.json", "--onto", "p.json"],
            "--microbatch: goes with measuring",
            "leave one of the two out",
        ),
        (["--from-run", "r.json", "--onto", "p.json"], "r.json: ", ""),
        ([], "missing argument 'MODEL[:ATTR]'", "see partopt profile --help"),
    ],
)
def test_what_goes_with_a_run_is_said(
    partopt: Any, tmp_path: Path, arguments: list[str], error: str, hint: str
) -> None:
    outcome = partopt("profile", *arguments, "-o", tmp_path / "again.json")
    assert outcome.code == 2
    assert error in outcome.errors[0] and hint in "".join(outcome.hints)
    assert not (tmp_path / "again.json").exists()
