"""What is read: regular files and standard input, up to a limit."""

from __future__ import annotations

import io
import os
import sys
from types import SimpleNamespace

import pytest

from partopt.documents.files import read_bytes
from partopt.errors import PartoptError


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
