"""What every document promises: strict reading, faults with their places, versions, deterministic
bytes, nothing half-written.
"""

import hashlib
import io
import json
import math
import os
import stat
import sys
from pathlib import Path
from types import SimpleNamespace

import jsonschema
import msgspec
import pytest
from msgspec.structs import replace

from partopt import documents, planners
from partopt.cost.problem import problem_of
from partopt.documents.engine import Layout
from partopt.documents.files import is_file, read_bytes
from partopt.documents.kinds import DOCUMENTS
from partopt.documents.plan import Plan
from partopt.documents.profile import Model, Profile
from partopt.documents.transformer import Calibration, Latent, MeasuredBlock
from partopt.errors import PartoptError
from partopt.importers.hugging_face import load_transformer
from tests.helpers import ROOT, chain_profile, changed, two_level, uniform_profile
from tests.report.test_simulation_text import case, document

PROFILE = documents.encode(uniform_profile(3, name="three"))
PLAN = documents.encode(planners.plan("pipedream", problem_of(uniform_profile(6), two_level(2, 2))))


def messages(parse, content):
    with pytest.raises(PartoptError) as error:
        parse(content, "file")
    return [part.message for part in error.value.parts]


BOTH = pytest.mark.parametrize(("kind", "content"), [(Profile, PROFILE), (Plan, PLAN)])


@pytest.mark.slow
@BOTH
def test_every_document_is_written_again_as_it_was_and_meets_its_published_schema(kind, content):
    assert documents.encode(documents.decode(content, kind, "file")) == content
    schema = msgspec.json.schema(kind)
    jsonschema.validate(json.loads(content), schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(json.loads(changed(content, "schema", to=1)), schema)
    for version in (b'/1.0"', b'/1.7"'):
        assert kind.parse(content.replace(b'/1"', version, 1), "file")


SCHEMAS = ROOT / "tests/golden/schemas.json"


def test_formats_are_what_they_were(request):
    """Fields, defaults and bounds; whoever changes them runs `pytest tests/test_documents.py
    --update`, and thinks of files that there are.
    """
    found = {}
    for kind, own in DOCUMENTS.items():
        fields = {
            f"{name}.{field}": {key: what[key] for key in what.keys() - {"description"}}
            for name, part in msgspec.json.schema(own)["$defs"].items()
            for field, what in part.get("properties", {}).items()
        }
        digest = hashlib.sha256(json.dumps(fields, sort_keys=True).encode())
        found[kind] = digest.hexdigest()[:12]
    if request.config.getoption("--update"):
        SCHEMAS.write_text(json.dumps(found, indent=0) + "\n")
    assert found == json.loads(SCHEMAS.read_text())


@BOTH
def test_what_is_no_document_is_refused(kind, content):
    [message] = messages(kind.parse, content[: len(content) // 2])  # cut short
    assert message.startswith("file: ") and "not JSON" in message
    for empty in (b"", b" \n\t"):
        assert messages(kind.parse, empty) == ["file: the file is empty"]
    document = json.loads(content)
    del document["schema"]
    others = [b"[]", b"null", b"3", b'"text"', b"{}", b'{"schema": 1}']
    for other in (*others, json.dumps(document).encode()):
        [message] = messages(kind.parse, other)
        assert message.startswith('file: has no "schema": not a partopt p')
    [message] = messages(kind.parse, content.replace(b'/1"', b'/2"', 1))
    assert "version 2 of p" in message
    [message] = messages(kind.parse, b"[" * 100_000)
    assert "nested too deeply" in message
    assert "not JSON" in messages(kind.parse, b"\xff\xfe\x00")[0]


def test_a_plan_where_a_profile_is_expected_is_named():
    for kind, content, named, expected in (
        (Profile, PLAN, "plan", "profile"),
        (Plan, PROFILE, "profile", "plan"),
    ):
        told = f'file: schema: "partopt.{named}/1" is not a partopt {expected}'
        assert messages(kind.parse, content) == [told]


def test_a_newer_minor_version_may_add_fields_at_any_depth_and_is_as_strict_else():
    document = json.loads(PROFILE) | {"schema": "partopt.profile/1.3", "colour": "blue"}
    [measured] = document["measurements"]
    for place in (document["model"], document["layers"][1], measured["layers"][0]):
        place["colour"] = "blue"
    newer = PROFILE.replace(b"profile/1", b"profile/1.3")
    assert documents.encode(Profile.parse(json.dumps(document).encode())) == newer
    assert messages(Profile.parse, changed(newer, "dtype", to=16)) == [
        "file: dtype: expected text, found a whole number"
    ]


def test_the_known_version_refuses_an_unknown_key_with_the_nearest():
    content = PROFILE.replace(b'"forward_s"', b'"foward_s"', 1)
    with pytest.raises(PartoptError) as error:
        Profile.parse(content, "file")
    unknown, missing = error.value.parts
    assert (unknown.message, unknown.hint) == (
        "file: measurements[0].layers[0].foward_s: unknown key",
        'did you mean "forward_s"?',
    )
    assert unknown.fields["path"] == "measurements[0].layers[0].foward_s"
    assert missing.message == "file: measurements[0].layers[0].forward_s: missing"


def test_all_the_faults_of_a_file_are_told_at_once_each_with_its_path():
    document = json.loads(PROFILE)
    document["dtype"] = 3
    document["layers"][0]["name"] = None
    document["layers"][2]["parameter_bytes"] = -1
    document["measurements"][0]["microbatch_size"] = 0
    document["measurements"][0]["layers"][1]["forward_s"] = "fast"
    assert messages(Profile.parse, json.dumps(document).encode()) == [
        "file: dtype: expected text, found a whole number",
        "file: layers[0].name: expected text, found null",
        "file: layers[2].parameter_bytes: expected a whole number >= 0",
        "file: measurements[0].microbatch_size: expected a whole number >= 1",
        "file: measurements[0].layers[1].forward_s: expected a number, found text",
    ]


def test_a_fault_of_the_syntax_has_its_line_and_column():
    for content, message in (
        (b'{"schema": "partopt.profile/1",\n "dtype": NaN}', "line 2, column 11: not JSON: inv"),
        (b'{"schema": "partopt.profile/1",\n\n  "dtype": -Infinity}', "line 3, column 13: not"),
        (b'{"schema": "partopt.profile/1",}', "line 1, column 32: not JSON"),
    ):
        with pytest.raises(PartoptError) as error:
            Profile.parse(content, "file")
        assert error.value.message.startswith(f"file: {message}")
        assert "JSON has no NaN" in error.value.hint
    for number in (b"1e999", b"-1e999"):
        assert messages(Profile.parse, PROFILE.replace(b"0.001", number, 1)) == [
            "file: not JSON: number out of range"
        ]
    profile = Profile.parse(PROFILE.replace(b"0.001", b"-0", 1))
    assert profile.measurements[0].layers[0].forward_s == 0


def test_a_repeated_key_is_refused_with_its_place():
    content = PROFILE.replace(b'"name": "three"', b'"name": "two", "name": "three"', 1).replace(
        b'"backward_s": 0.002', b'"backward_s": 9, "backward_s": 0.002', 1
    )
    assert messages(Profile.parse, content) == [
        "file: model.name: given twice",
        "file: measurements[0].layers[0].backward_s: given twice",
    ]


@pytest.mark.parametrize(
    ("escaped", "shown"),
    [(b"\\u001b", r"\x1b"), (b"\\n", r"\n"), (b"\x7f", r"\x7f"), ("\x9b".encode(), r"\x9b")],
    ids=["escape", "newline", "delete", "csi"],
)
def test_control_characters_in_names_are_refused(escaped, shown):
    name = b'"three' + escaped
    assert messages(Profile.parse, PROFILE.replace(b'"three', name, 1)) == [
        f"file: model.name: has the control character '{shown}'"
    ]
    key = b'"' + escaped + b'": 1, "name"'
    assert messages(Profile.parse, PROFILE.replace(b'"name"', key, 1)) == [
        f"file: model.{shown}: has the control character '{shown}'"
    ]


def test_escapes_that_are_no_control_characters_are_read():
    content = PROFILE.replace(b'"three"', b'"\\u00e9 \\ud83d\\ude00 \\\\n"', 1)
    assert Profile.parse(content).model.name == "é \U0001f600 \\n"


def test_what_a_terminal_hides_is_written_as_an_escape():
    written = documents.encode(Model(name="a\u200bé\u2028b"))
    assert written == '{\n "name": "a\\u200bé\\u2028b"\n}\n'.encode()
    assert msgspec.json.decode(written, type=Model).name == "a\u200bé\u2028b"


SHAPE = load_transformer("qwen3-30b-a3b")
MIXED = replace(SHAPE, dense_first=2, ffn=4096)
LATENT = Latent(keys=512, rotary=64, values=128)
BLOCKS = [MeasuredBlock(microbatch_size=size, forward_s=1.0, backward_s=2.0) for size in (1, 2, 4)]
CALIBRATION = Calibration(name="block", sha256="0", blocks=BLOCKS)


@pytest.mark.parametrize(
    ("document", "wrong", "path"),
    [
        (replace(SHAPE, blocks=1000), {"blocks": 1001}, "blocks"),
        (SHAPE, {"kv_heads": 3}, "kv_heads"),
        (MIXED, {"ffn": 0}, "ffn"),
        (SHAPE, {"expert_ffn": 0}, "expert_ffn"),
        (replace(SHAPE, experts_per_token=128), {"experts_per_token": 129}, "experts_per_token"),
        (SHAPE, {"experts_per_token": 0}, "experts_per_token"),
        (replace(SHAPE, groups=8, groups_per_token=2), {"groups": 7}, "groups"),
        (replace(SHAPE, groups=8, groups_per_token=2), {"groups_per_token": 0}, "groups"),
        (replace(SHAPE, latent=LATENT, head_size=64), {"head_size": 63}, "head_size"),
        (CALIBRATION, {"blocks": BLOCKS[::-1]}, "blocks"),
        (CALIBRATION, {"blocks": BLOCKS[:1] * 2}, "blocks"),
    ],
)
def test_shapes_and_calibrations_are_refused_just_beyond_their_bounds(document, wrong, path):
    assert list(document.faults()) == []
    [fault] = replace(document, **wrong).faults()
    assert (fault.code, fault.fields["path"]) == ("inconsistent-document", path)


@pytest.mark.parametrize(
    ("change", "code", "message"),
    [
        ({"dtype": 3}, "invalid-value", "dtype: expected text, found a whole number"),
        ({"layers": []}, "invalid-value", "layers: expected a list of length >= 1"),
        ({"dtype": "int3"}, "inconsistent-document", 'dtype: "int3" is not a number format'),
    ],
)
def test_a_document_made_in_code_is_checked_like_one_in_a_file(change, code, message):
    [fault] = msgspec.structs.replace(uniform_profile(3), **change).faults()
    assert fault.message.startswith(message)
    assert fault.code == code


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_numbers_made_in_code_must_be_finite(number):
    faulty = chain_profile([1e-3, number])
    paths = {fault.fields["path"] for fault in faulty.faults()}
    assert paths == {f"measurements[0].layers[1].{part}_s" for part in ("forward", "backward")}


@pytest.mark.slow
def test_a_newer_file_of_many_thousand_layers_is_read():
    profile = chain_profile([1e-3] * 4000, names=[f"blocks.{index}" for index in range(4000)])
    newer = documents.encode(profile).replace(b"profile/1", b"profile/1.1")
    assert len(Profile.parse(newer).layers) == 4000


# --- files ------------------------------------------------------------------------------------


def test_a_document_is_written_whole_with_ordinary_permissions_or_not_at_all(tmp_path):
    path = tmp_path / "three.json"
    uniform_profile(3, name="three").save(str(path))
    umask = os.umask(0)
    os.umask(umask)
    assert path.read_bytes() == PROFILE
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask
    with pytest.raises(PartoptError, match="no layer takes any time"):
        chain_profile([0.0]).save(str(tmp_path / "x.json"))
    assert list(tmp_path.iterdir()) == [path]


def test_an_existing_file_is_replaced_only_with_force(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"old")
    with pytest.raises(PartoptError, match="already exists") as error:
        documents.write_bytes(str(path), b"new")
    assert error.value.hint == "add `force=True` to replace it"
    assert path.read_bytes() == b"old"
    documents.write_bytes(str(path), b"new", force=True)
    assert path.read_bytes() == b"new"


@pytest.mark.parametrize("fault", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, fault):
    path = tmp_path / "x"
    path.write_bytes(b"old")

    def fail(*_):
        raise fault

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises((PartoptError, KeyboardInterrupt)) as error:
        documents.write_bytes(str(path), b"new", force=True)
    if isinstance(fault, OSError):
        assert error.value.message == f"{path}: cannot be written: No space left on device"
    assert [(entry.name, entry.read_bytes()) for entry in tmp_path.iterdir()] == [("x", b"old")]


def test_places_that_cannot_be_written_or_read_are_named(tmp_path):
    def refused(use, *arguments, **options):
        with pytest.raises(PartoptError) as error:
            use(*arguments, **options)
        return error.value

    write, read = documents.write_bytes, documents.read_bytes
    missing = refused(write, str(tmp_path / "a" / "b"), b"")
    assert ("does not exist" in missing.message, missing.hint) == (True, "create it first")
    (tmp_path / "file").touch()
    assert "Not a directory" in refused(write, str(tmp_path / "file" / "x"), b"").message
    assert "is a directory" in refused(write, str(tmp_path), b"", force=True).message
    assert "is a directory" in refused(read, str(tmp_path)).message
    assert "File name too long" in refused(write, "x" * 300, b"").message
    assert "File name too long" in refused(read, "x" * 300).message
    assert "x: no such file" in refused(read, str(tmp_path / "x")).message


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read and write what nobody may")
def test_what_nobody_may_read_or_write_is_refused(tmp_path):
    (tmp_path / "x").touch(0o000)
    with pytest.raises(PartoptError, match="cannot be read: Permission denied"):
        documents.read_bytes(str(tmp_path / "x"))
    tmp_path.chmod(0o500)
    with pytest.raises(PartoptError, match="cannot be written to"):
        documents.write_bytes(str(tmp_path / "y"), b"")


def test_a_device_a_link_and_standard_input_stay_what_they_are(tmp_path, monkeypatch):
    documents.write_bytes(os.devnull, b"gone")
    assert stat.S_ISCHR(Path(os.devnull).stat().st_mode)
    (tmp_path / "link").symlink_to("file")
    documents.write_bytes(str(tmp_path / "link"), b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_bytes() == b"new"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(PROFILE)))
    assert documents.encode(Profile.load("-")) == PROFILE


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("pp=4", Layout(pp=4)),
        (" dp = 2 , recompute=selective", Layout(dp=2, recompute="selective")),
        ("chunks=2,recompute=3,schedule=1f1b", Layout(chunks=2, recompute=3, schedule="1f1b")),
    ],
)
def test_a_layout_is_written_part_by_part(text, found):
    assert Layout.parse(text) == found


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("chunk=4", "`layout=chunk=4`: no part of a layout", 'did you mean "chunks"?'),
        ("pp", "`layout=pp`: each part once, with a value", "write pp=4,chunks=2"),
        ("dp=1,pp=", "`layout=pp=`: each part once, with a value", "write pp=4,chunks=2"),
        ("pp=1,pp=2", "`layout=pp=2`: each part once, with a value", "write pp=4,chunks=2"),
        ("pp=many", "`layout`: pp: expected a whole number", ""),
        ("tp=0", "`layout`: tp: expected a whole number >= 1", ""),
    ],
)
def test_what_is_no_layout_is_refused(text, message, hint):
    with pytest.raises(PartoptError) as error:
        Layout.parse(text)
    assert error.value.message.startswith(message) and hint in error.value.hint


def test_any_word_may_be_asked_for_as_a_file(tmp_path):
    (tmp_path / "here").write_bytes(b"")
    for name, found in (("here", True), ("there", False), ("x" * 5000, False), ("a\0b", False)):
        assert is_file(str(tmp_path / name)) is found


def refusal(*arguments):
    with pytest.raises(PartoptError) as raised:
        read_bytes(*arguments)
    return raised.value


def test_a_pipe_without_a_writer_a_device_and_a_folder_are_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/zero")
    for path in (tmp_path / "pipe", "/dev/zero", "/dev/null", tmp_path / "link"):
        assert (refusal(path).code, refusal(path).fields["path"]) == ("not-a-file", str(path))
    assert refusal(tmp_path).code == "is-a-directory"


@pytest.mark.parametrize("size", [64_000_000, 64_000_001])
def test_files_have_64_mb_at_most(tmp_path, size):
    with (tmp_path / "large").open("wb") as file:
        file.truncate(size)
    if size <= 64e6:
        assert len(read_bytes(tmp_path / "large")) == size
    else:
        error = refusal(tmp_path / "large")
        assert error.message == f"{tmp_path / 'large'}: has more than 64 MB"
        assert "PARTOPT_MAX_INPUT=1GB" in error.hint


def test_the_environment_and_the_reader_move_the_limit(tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(b"12345")
    monkeypatch.setenv("PARTOPT_MAX_INPUT", "5 B")
    assert read_bytes(tmp_path / "file") == b"12345"
    monkeypatch.setenv("PARTOPT_MAX_INPUT", "4B")
    assert refusal(tmp_path / "file").code == "input-too-large"
    assert read_bytes(tmp_path / "file", 5) == b"12345"
    monkeypatch.setenv("PARTOPT_MAX_INPUT", "many")
    assert refusal(tmp_path / "file").message.startswith("PARTOPT_MAX_INPUT: 'many'")


def test_standard_input_is_read_up_to_the_limit(monkeypatch):
    endless = io.BytesIO(b"x" * 1000)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=endless))
    monkeypatch.setenv("PARTOPT_MAX_INPUT", "100 B")
    assert refusal("-").code == "input-too-large"
    assert endless.tell() == 101


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"actions": "0F0 0X1"}, "timeline.ranks[0].actions: not actions"),
        ({"actions": "0F9999999999"}, "timeline.ranks[0].actions: not actions"),
        ({"actions": "9F0"}, "timeline.ranks[0].actions: of other stages than the rank's"),
        ({"start_s": []}, "timeline.ranks[0].start_s: not one for each slot"),
        ({"allreduce_end_s": [1.0]}, "timeline.ranks[0].allreduce_end_s: not one for each start"),
    ],
)
def test_a_timeline_that_cannot_be_drawn_is_refused(change, error):
    whole = document(*case("1f1b"))
    assert list(whole.faults()) == []
    row = replace(whole.timeline.ranks[0], **change)
    timeline = replace(whole.timeline, ranks=[row])
    faults = replace(whole, timeline=timeline).faults()
    assert error in [fault.message for fault in faults]


def test_a_document_of_another_topology_is_refused():
    whole = document(*case("1f1b"))
    faults = replace(whole, levels=[]).faults()
    assert [fault.message for fault in faults] == ["levels: not the levels of the topology"]
