"""What every document promises: strict reading, faults with their places, versions, deterministic
bytes, nothing half-written.
"""

import io
import json
import math
import os
import stat
import sys
from pathlib import Path

import jsonschema
import msgspec
import pytest

from partopt import documents, planners
from partopt.cost.problem import problem_of
from partopt.documents.plan import Plan
from partopt.documents.profile import Profile
from partopt.errors import PartoptError
from tests.helpers import chain_profile, changed, flat, two_level, uniform_profile

PROFILE = documents.encode(uniform_profile(3, name="three"))
PLAN = documents.encode(planners.plan("pipedream", problem_of(uniform_profile(6), two_level(2, 2))))


def messages(parse, content):
    with pytest.raises(PartoptError) as error:
        parse(content, "file")
    return [part.message for part in error.value.parts]


@pytest.mark.parametrize(
    ("kind", "content"), [(Profile, PROFILE), (Plan, PLAN)], ids=["profile", "plan"]
)
def test_reading_and_writing_again_gives_the_same_bytes(kind, content):
    assert documents.encode(documents.decode(content, kind, "file")) == content


@pytest.mark.parametrize(
    ("kind", "content"), [(Profile, PROFILE), (Plan, PLAN)], ids=["profile", "plan"]
)
def test_a_document_meets_its_published_schema_and_one_with_a_wrong_type_does_not(kind, content):
    schema = msgspec.json.schema(kind)
    jsonschema.validate(json.loads(content), schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(json.loads(changed(content, "schema", to=1)), schema)


@pytest.mark.parametrize(
    ("parse", "content"), [(Profile.parse, PROFILE), (Plan.parse, PLAN)], ids=["profile", "plan"]
)
class TestEveryDocument:
    def test_a_file_cut_short_is_refused_with_the_place_where_it_ends(self, parse, content):
        (message,) = messages(parse, content[: len(content) // 2])
        assert message.startswith("file: ")
        assert "not JSON" in message

    @pytest.mark.parametrize("empty", [b"", b" \n\t"])
    def test_an_empty_file_says_so(self, parse, content, empty):
        assert messages(parse, empty) == ["file: the file is empty"]

    @pytest.mark.parametrize("other", [b"[]", b"null", b"3", b'"text"', b"{}", b'{"schema": 1}'])
    def test_json_that_is_no_document_has_no_schema(self, parse, content, other):
        (message,) = messages(parse, other)
        assert message.startswith('file: has no "schema": not a partopt p')

    def test_a_document_without_its_schema_is_refused_though_all_else_is_right(
        self, parse, content
    ):
        document = json.loads(content)
        del document["schema"]
        (message,) = messages(parse, json.dumps(document).encode())
        assert 'has no "schema"' in message

    def test_an_unknown_major_version_is_refused(self, parse, content):
        (message,) = messages(parse, content.replace(b'/1"', b'/2"', 1))
        assert "version 2 of p" in message

    @pytest.mark.parametrize("version", [b'/1.0"', b'/1.7"'])
    def test_every_minor_version_is_read(self, parse, content, version):
        assert parse(content.replace(b'/1"', version, 1), "file")

    def test_nesting_without_end_is_refused(self, parse, content):
        (message,) = messages(parse, b"[" * 100_000)
        assert "nested too deeply" in message

    def test_bytes_that_are_not_text_are_refused(self, parse, content):
        assert "not JSON" in messages(parse, b"\xff\xfe\x00")[0]


def test_a_plan_where_a_profile_is_expected_is_named():
    assert messages(Profile.parse, PLAN) == [
        'file: schema: "partopt.plan/1" is not a partopt profile'
    ]
    assert messages(Plan.parse, PROFILE) == [
        'file: schema: "partopt.profile/1" is not a partopt plan'
    ]


def test_a_newer_minor_version_may_add_fields_at_any_depth():
    document = json.loads(PROFILE) | {"schema": "partopt.profile/1.3", "colour": "blue"}
    document["model"]["colour"] = document["layers"][1]["colour"] = document["measurements"][0][
        "layers"
    ][0]["colour"] = "blue"
    assert documents.encode(Profile.parse(json.dumps(document).encode())) == PROFILE.replace(
        b"profile/1", b"profile/1.3"
    )


def test_a_newer_minor_version_is_as_strict_about_what_is_known():
    document = json.loads(PROFILE) | {"schema": "partopt.profile/1.3", "dtype": 16}
    assert messages(Profile.parse, json.dumps(document).encode()) == [
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


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            b'{"schema": "partopt.profile/1",\n "dtype": NaN}',
            "file: line 2, column 11: not JSON: invalid character",
        ),
        (
            b'{"schema": "partopt.profile/1",\n\n  "dtype": -Infinity}',
            "file: line 3, column 13: not JSON: invalid character",
        ),
        (
            b'{"schema": "partopt.profile/1",}',
            "file: line 1, column 32: not JSON: trailing comma in object",
        ),
    ],
)
def test_a_fault_of_the_syntax_has_its_line_and_column(content, message):
    with pytest.raises(PartoptError) as error:
        Profile.parse(content, "file")
    assert error.value.message.startswith(message[:-20])
    assert "JSON has no NaN" in error.value.hint


@pytest.mark.parametrize("number", [b"1e999", b"-1e999"])
def test_a_number_beyond_all_numbers_is_refused(number):
    assert messages(Profile.parse, PROFILE.replace(b"0.001", number, 1)) == [
        "file: not JSON: number out of range"
    ]


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


def test_minus_zero_is_zero():
    profile = Profile.parse(PROFILE.replace(b"0.001", b"-0", 1).replace(b"1000000", b"-0", 1))
    assert profile.measurements[0].layers[0].forward_s == 0
    assert profile.layers[0].parameter_bytes == 0


def test_a_newer_file_of_ten_thousand_layers_is_read():
    profile = chain_profile([1e-3] * 10_000, names=[f"blocks.{index}" for index in range(10_000)])
    newer = documents.encode(profile).replace(b"profile/1", b"profile/1.1")
    assert len(Profile.parse(newer).layers) == 10_000


class TestWriting:
    def test_a_document_is_written_whole_with_ordinary_permissions(self, tmp_path):
        path = tmp_path / "three.json"
        uniform_profile(3, name="three").save(str(path))
        umask = os.umask(0)
        os.umask(umask)
        assert path.read_bytes() == PROFILE
        assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask

    def test_a_faulty_document_is_not_written(self, tmp_path):
        with pytest.raises(PartoptError, match="no layer takes any time"):
            chain_profile([0.0]).save(str(tmp_path / "x.json"))
        assert list(tmp_path.iterdir()) == []

    def test_an_existing_file_is_replaced_only_with_force(self, tmp_path):
        path = tmp_path / "x"
        path.write_bytes(b"old")
        with pytest.raises(PartoptError, match="already exists") as error:
            documents.write_bytes(str(path), b"new")
        assert error.value.hint == "add `force=True` to replace it"
        assert path.read_bytes() == b"old"
        documents.write_bytes(str(path), b"new", force=True)
        assert path.read_bytes() == b"new"

    @pytest.mark.parametrize(
        "fault",
        [OSError(28, "No space left on device"), KeyboardInterrupt()],
        ids=["disk full", "interrupted"],
    )
    def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(
        self, tmp_path, monkeypatch, fault
    ):
        path = tmp_path / "x"
        path.write_bytes(b"old")

        def fail(*_):
            raise fault

        monkeypatch.setattr(Path, "replace", fail)
        with pytest.raises((PartoptError, KeyboardInterrupt)) as error:
            documents.write_bytes(str(path), b"new", force=True)
        assert (
            isinstance(error.value, KeyboardInterrupt)
            or error.value.message == f"{path}: cannot be written: No space left on device"
        )
        assert [(entry.name, entry.read_bytes()) for entry in tmp_path.iterdir()] == [("x", b"old")]

    def test_a_missing_folder_is_refused(self, tmp_path):
        with pytest.raises(PartoptError, match="does not exist") as error:
            documents.write_bytes(str(tmp_path / "a" / "b"), b"")
        assert error.value.hint == "create it first"

    def test_a_folder_is_no_file(self, tmp_path):
        for use in (
            lambda: documents.write_bytes(str(tmp_path), b"", force=True),
            lambda: documents.read_bytes(str(tmp_path)),
        ):
            with pytest.raises(PartoptError, match="is a directory"):
                use()

    def test_a_file_is_no_folder(self, tmp_path):
        (tmp_path / "file").touch()
        with pytest.raises(PartoptError, match="Not a directory"):
            documents.write_bytes(str(tmp_path / "file" / "x"), b"")

    def test_a_name_that_is_too_long_is_refused(self):
        with pytest.raises(PartoptError, match="File name too long"):
            documents.write_bytes("x" * 300, b"")
        with pytest.raises(PartoptError, match="File name too long"):
            documents.read_bytes("x" * 300)

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may write to a read-only folder")
    def test_a_folder_that_cannot_be_written_to_is_refused(self, tmp_path):
        tmp_path.chmod(0o500)
        with pytest.raises(PartoptError, match="cannot be written to"):
            documents.write_bytes(str(tmp_path / "x"), b"")

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may read what nobody may")
    def test_a_file_that_cannot_be_read_is_refused(self, tmp_path):
        (tmp_path / "x").touch(0o000)
        with pytest.raises(PartoptError, match="cannot be read: Permission denied"):
            documents.read_bytes(str(tmp_path / "x"))

    def test_a_device_is_written_to_and_stays_a_device(self):
        documents.write_bytes(os.devnull, b"gone")
        assert stat.S_ISCHR(Path(os.devnull).stat().st_mode)

    def test_a_symbolic_link_stays_one(self, tmp_path):
        (tmp_path / "link").symlink_to("file")
        documents.write_bytes(str(tmp_path / "link"), b"new")
        assert (tmp_path / "link").is_symlink()
        assert (tmp_path / "file").read_bytes() == b"new"

    def test_a_missing_file_is_named(self, tmp_path):
        with pytest.raises(PartoptError, match=r"x: no such file"):
            documents.read_bytes(str(tmp_path / "x"))

    def test_standard_input_is_a_minus(self, monkeypatch):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(PROFILE)))
        assert documents.encode(Profile.load("-")) == PROFILE


def test_a_flat_topology_in_a_plan_round_trips():
    plan = planners.plan(
        "data_parallel", problem_of(uniform_profile(2), flat(3, latency=1e-6, links=2, bus=True))
    )
    assert Plan.parse(documents.encode(plan)) == plan
