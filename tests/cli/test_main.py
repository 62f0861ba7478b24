"""What holds for every verb: help, hints, exit codes, streams."""

import json
import os
import pty
import subprocess
import sys
import warnings

import pytest

from partopt import __version__, cli
from partopt.documents.profile import Profile
from partopt.errors import PartoptError
from tests.helpers import ROOT, run_process


@pytest.mark.parametrize("verb", cli.VERBS)
def test_the_help_of_every_verb_contains_an_example(partopt, verb):
    outcome = partopt(verb, "--help")
    assert outcome.code == 0
    assert f"Example:\n    partopt {verb}" in outcome.out
    assert max(map(len, outcome.out.splitlines())) <= 100


@pytest.mark.parametrize("verb", cli.VERBS)
def test_every_option_says_what_it_does(verb):
    command = cli.partopt.get_command(None, verb)
    for own in [command, *getattr(command, "commands", {}).values()]:
        options = [each for each in own.params if each.param_type_name == "option"]
        assert [each.opts for each in options if not each.help] == []


@pytest.mark.parametrize("verb", ["plan", "compare"])
def test_help_is_one_screen_of_what_is_often_needed_and_help_all_has_all(
    partopt, verb, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "80")
    short, whole = partopt(verb, "--help").out, partopt(verb, "--help-all").out
    assert len(short.splitlines()) <= 50
    command = cli.partopt.get_command(None, verb)
    options = [own.opts[-1] for own in command.params if own.param_type_name == "option"]
    missing = [name for name in options if f"  {name} " not in whole and f", {name} " not in whole]
    assert missing == []
    assert "--tied" in whole and "--tied" not in short
    headings = [line for line in whole.splitlines() if line.endswith(":") and line[0] != " "]
    assert headings[0] == "Cluster:" and headings[-1] == "Output:"


def test_the_help_lists_every_verb_and_stands_for_no_arguments_too(partopt):
    outcome = partopt("--help")
    assert [line.split()[0] for line in outcome.out.split("Commands:\n")[1].splitlines()] == list(
        cli.VERBS
    )
    assert partopt() == outcome


@pytest.mark.parametrize("option", ["--version", "-V"])
def test_the_version(partopt, option):
    assert partopt(option).out == f"partopt, version {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["plna"], 'did you mean "plan"?'),
        (["plan", "p", "--topologi", "c"], 'did you mean "--topology"?'),
        (["compare", "p", "--plnner", "c"], 'did you mean "--planner"?'),
        (["topology", "lst"], 'did you mean "list"?'),
        (["topology"], "see partopt topology --help"),
        (["topology", "show", "dgx-h10"], 'did you mean "dgx-h100"?'),
        (["show", "dgx-h10"], 'did you mean "dgx-h100"?'),
        (["show"], "see partopt show --help"),
        (["schema", "a", "b"], "see partopt schema --help"),
        (["schema", "plam"], 'did you mean "plan"?'),
        (["import", "pipedrem", "x"], 'did you mean "pipedream"?'),
        (["plan", "p"], "see partopt plan --help"),
        (["plan", "p", "--topology", "c", "--stages", "0"], "see partopt plan --help"),
        (["plan", "p", "--topology", "c", "--stages", "two"], "see partopt plan --help"),
        (["plan", "p", "--topology", "c", "--recompute", "alway"], 'did you mean "always"?'),
    ],
)
def test_a_mistaken_word_is_bad_usage_with_a_hint(partopt, arguments, hint):
    outcome = partopt(*arguments)
    assert (outcome.code, outcome.out, outcome.hints) == (2, "", [hint])
    assert len(outcome.errors) == 1


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["--planner", "pipedrem"], 'did you mean "pipedream"?'),
        (["--schedule", "1f2b"], 'did you mean "1f1b"?'),
        (["--topology", "dgx-a10"], 'did you mean "dgx-a100"?'),
    ],
)
def test_a_mistaken_name_has_the_nearest_in_its_hint(partopt, profile_file, arguments, hint):
    outcome = partopt("plan", profile_file(), "--topology", "v100-pcie", *arguments)
    assert (outcome.code, outcome.out, outcome.hints) == (2, "", [hint])


def test_a_profile_that_is_neither_a_file_nor_shipped(partopt):
    outcome = partopt("plan", "no-such-profile", "--topology", "v100-pcie")
    assert (outcome.code, outcome.errors) == (
        2,
        ["no-such-profile: no such file, and no shipped profile or model of that name"],
    )


@pytest.fixture
def broken(monkeypatch):
    def break_with(error: BaseException) -> None:
        def fail(*_: object) -> None:
            raise error

        monkeypatch.setattr("partopt.planners.pipedream.plan", fail)

    return break_with


def test_a_fault_of_its_own_is_admitted_without_a_traceback(partopt, profile_file, broken):
    broken(RuntimeError("lost count"))
    outcome = partopt("plan", profile_file(), "--topology", "v100-pcie")
    assert outcome.code == 70
    assert outcome.errors == ["a fault of partopt's own: RuntimeError: lost count"]
    assert "--debug" in outcome.hints[0]
    assert "Traceback" not in outcome.err


@pytest.mark.parametrize("place", [0, 1, 4])
def test_debug_shows_the_traceback_wherever_it_stands(partopt, profile_file, broken, place):
    broken(RuntimeError("lost count"))
    arguments = ["plan", profile_file(), "--topology", "v100-pcie"]
    outcome = partopt(*arguments[:place], "--debug", *arguments[place:])
    assert outcome.code == 70
    assert "Traceback" in outcome.err


def test_warnings_of_libraries_are_not_for_users(partopt, monkeypatch):
    def warn(context):
        warnings.warn("will be removed", DeprecationWarning, stacklevel=1)

    monkeypatch.setattr(cli.partopt, "invoke", warn)
    outcome = partopt("topology", "list")
    assert (outcome.code, outcome.err) == (0, "")


def test_an_interruption_leaves_with_130(partopt, profile_file, broken):
    broken(KeyboardInterrupt())
    outcome = partopt("plan", profile_file(), "--topology", "v100-pcie")
    assert (outcome.code, outcome.out) == (130, "")
    assert outcome.err.startswith("interrupted at ")


@pytest.mark.slow
def test_a_reader_that_leaves_early_is_no_fault(profile_file):
    path = profile_file()
    for arguments in (
        ["show", path],
        ["--help"],
        ["plan", path, "--topology", "v100-pcie", "--json"],
    ):
        reading, writing = os.pipe()
        os.close(reading)
        command = [sys.executable, "-m", "partopt", *arguments]
        done = subprocess.run(
            command, stdout=writing, stderr=subprocess.PIPE, cwd=ROOT, check=False
        )
        os.close(writing)
        assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.slow
def test_a_terminal_that_knows_only_ascii(profile_file):
    arguments = ["show", profile_file(), "--debug"]
    done = run_process(arguments, environment={"PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0
    assert b"######" in done.stdout
    assert done.stdout.isascii()
    assert (
        "██████"
        in run_process(arguments, environment={"PYTHONIOENCODING": "utf-8"}).stdout.decode()
    )


def on_a_terminal(arguments: list[str], environment: dict[str, str]) -> bytes:
    """What the command writes to a terminal."""
    primary, terminal = pty.openpty()
    command = [sys.executable, "-m", "partopt", *arguments]
    subprocess.run(
        command,
        stdout=terminal,
        stderr=terminal,
        stdin=terminal,
        cwd=ROOT,
        env=os.environ | environment,
        check=True,
    )
    os.close(terminal)
    return os.read(primary, 100_000)


@pytest.mark.slow
def test_headings_are_bold_on_a_terminal_but_not_with_no_color():
    assert b"\x1b[" in on_a_terminal(["topology", "list"], {"NO_COLOR": ""})
    assert b"\x1b[" not in on_a_terminal(["topology", "list"], {"NO_COLOR": "1"})


def test_what_is_not_a_terminal_gets_no_colour(partopt):
    assert "\x1b" not in partopt("topology", "list").out


@pytest.mark.parametrize(
    "name", ["profile", "plan", "topology", "comparison", "scaling", "simulation", "verification"]
)
def test_a_schema_is_one_json_document(partopt, name):
    outcome = partopt("schema", name)
    assert (outcome.code, outcome.err) == (0, "")
    assert "$defs" in json.loads(outcome.out)


def test_three_errors_of_a_file_are_shown_and_the_others_counted(partopt, tmp_path):
    layers = [{"name": "a", "surprise" * 40: 1}] * 30
    head = {"schema": "partopt.profile/1", "device": {"name": "GPU", "type": "cuda"}}
    (tmp_path / "p.json").write_text(json.dumps(head | {"layers": layers}))
    outcome = partopt("plan", tmp_path / "p.json", "--topology", "v100-pcie")
    assert (outcome.code, outcome.out) == (2, "")
    shown, counted = outcome.errors[:3], outcome.errors[3]
    assert [error.count(": missing") + error.count("unknown key") for error in shown] == [1, 1, 1]
    with pytest.raises(PartoptError) as raised:
        Profile.load(str(tmp_path / "p.json"))
    assert counted == f"and {len(raised.value.parts) - 3} more" and len(outcome.errors) == 4
    assert len(outcome.hints) == 3


@pytest.mark.parametrize("echoed", ["q" * 5000, "1 " * 5000])
def test_what_an_error_repeats_of_a_file_is_cut(partopt, tmp_path, echoed):
    text = f"name: n\ndevice: {{name: g, memory: '{echoed}'}}\n"
    (tmp_path / "c.yaml").write_text(f"{text}levels: [{{name: a, size: 2, bandwidth: 1 GB/s}}]")
    [error] = partopt("topology", "show", tmp_path / "c.yaml").errors
    rest = error.removeprefix(f"{tmp_path / 'c.yaml'}: device.memory: ")
    assert len(rest) <= 60 + len(" is not a quantity")
    assert echoed[:20] in rest


@pytest.mark.parametrize(
    ("content", "profile", "topology"),
    [
        (b"\x89PNG\r\n\x1a\n\x00\x00", "not a partopt profile", "not YAML"),
        (b"", "the file is empty", "not a topology"),
        (b'{"a": 1, "b": 2}', 'has no "schema": not a partopt profile', "not a topology"),
        (b"hello: world\nfoo: 1\n", "not a partopt profile", "not a topology"),
    ],
)
def test_a_file_of_something_else_is_told_in_one_line(
    partopt, tmp_path, content, profile, topology
):
    (tmp_path / "f").write_bytes(content)
    for arguments, what in (
        ([tmp_path / "f", "--topology", "v100-pcie"], profile),
        (["gpt2-small.cpu.float32", "--topology", tmp_path / "f"], topology),
    ):
        outcome = partopt("plan", *arguments)
        assert outcome.code == 2
        [error] = outcome.errors
        assert error.startswith(f"{tmp_path / 'f'}: {what}")
