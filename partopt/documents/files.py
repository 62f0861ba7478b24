"""Reading and writing files: whole or not at all, with errors that name the place."""

from __future__ import annotations

import os
import stat
import sys
import tempfile
from pathlib import Path

from partopt.errors import PartoptError


def read_bytes(path: str) -> bytes:
    """The content of the file `path`, or of standard input where it is `-`."""
    if path == "-":
        return sys.stdin.buffer.read()
    try:
        return Path(path).read_bytes()
    except IsADirectoryError:
        raise PartoptError(f"{path}: is a directory", "name a file in it") from None
    except FileNotFoundError:
        raise PartoptError(
            f"{path}: no such file", "check the path, or list what is there with ls"
        ) from None
    except OSError as error:
        raise PartoptError(
            f"{path}: cannot be read: {error.strerror}", "check the permissions"
        ) from None


def write_bytes(path: str, content: bytes, force: bool = False) -> None:
    """Write `content` to the file `path` (`-` is standard output) whole or not at all; an existing
    file only with `force`.
    """
    if path == "-":
        sys.stdout.buffer.write(content)
        sys.stdout.buffer.flush()
        return
    check_writable(path, force)
    try:
        if stat.S_ISREG(_mode(path) or stat.S_IFREG):
            _replace(Path(path).resolve(), content)
        else:
            Path(path).write_bytes(content)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise PartoptError(
            f"{path}: cannot be written: {error.strerror}", "choose another place"
        ) from None


def check_writable(path: str, force: bool = False) -> None:
    """Refuse, before any work is done, an output path that could not be written at the end.

    Pipes and devices are written as they are.
    """
    if path == "-":
        return
    folder, mode = Path(path).parent, _mode(path)
    if stat.S_ISDIR(mode):
        raise PartoptError(f"{path}: is a directory", "name a file in it")
    if stat.S_ISREG(mode) and not force:
        raise PartoptError(f"{path}: already exists", "add --force to replace it")
    if not folder.is_dir():
        raise PartoptError(
            f"{path}: the folder {folder} does not exist", f"make it first: mkdir -p {folder}"
        )
    if not mode and not os.access(folder, os.W_OK):
        raise PartoptError(
            f"{path}: the folder {folder} cannot be written to", "choose another folder"
        )


def _mode(path: str) -> int:
    """Kind and permissions of the file at `path`; 0 where there is none."""
    try:
        return Path(path).stat().st_mode
    except FileNotFoundError:
        return 0
    except OSError as error:
        raise PartoptError(
            f"{path}: cannot be written: {error.strerror}", "choose another place"
        ) from None


def _replace(target: Path, content: bytes) -> None:
    """Write `content` beside `target` and put it in its place at once; where that fails, leave
    nothing behind.
    """
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=".partopt.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        Path(temporary).chmod(0o666 & ~_umask())
        Path(temporary).replace(target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
