"""Files: read and written whole or not at all, and the names of those that partopt ships."""

from __future__ import annotations

import difflib
import os
import re
import stat
import sys
import tempfile
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from partopt.errors import PartoptError, unknown
from partopt.units import format_bytes, parse_bytes

PathLike = str | os.PathLike[str]

MAX_INPUT = "PARTOPT_MAX_INPUT"  # in the environment: the largest file that is read, `200 MB`
_MAX_INPUT_BYTES = 64 * 10**6
_NEAR = 0.8  # of the letters of a family's name: llama, lama
_SHIPPED = {  # the suffix of what comes with partopt, and what one of it is called
    "profiles": (".json", "profile"),
    "topologies": (".yaml", "topology"),
    "devices": (".yaml", "device"),
    "models": (".json", "model"),
}


def shipped_folder(kind: str) -> Path:
    """The folder of `kind`: "profiles", "topologies", "devices" or "models".

    It lies in the installed package or, in a checkout, next to the package.
    """
    package = Path(__file__).parent.parent
    installed = package / "shipped" / kind
    return installed if installed.is_dir() else package.parent / kind


def shipped_names(kind: str) -> list[str]:
    """The shipped names of `kind`, sorted."""
    suffix = _SHIPPED[kind][0]
    return sorted(
        path.name.removesuffix(suffix) for path in shipped_folder(kind).glob(f"*{suffix}")
    )


def find_shipped(given: PathLike, *kinds: str) -> str:
    """The path of `given`: a file, `-`, or a shipped name of one of `kinds`.

    Raises PartoptError, with the nearest name, otherwise.
    """
    given = os.fspath(given)
    if given == "-" or os.path.exists(given):  # noqa: PTH110 (unlike Path.exists it never raises)
        return given
    known = {name: kind for kind in reversed(kinds) for name in shipped_names(kind)}
    if given in known:
        return str(shipped_folder(known[given]) / f"{given}{_SHIPPED[known[given]][0]}")
    *others, last = (_SHIPPED[kind][1] for kind in kinds)
    what = f"{', '.join(others)} or {last}" if others else last
    message, name = f"{given}: no such file, and no shipped {what} of that name", Path(given).name
    near: Collection[str] = known
    if "models" in kinds:
        family, size = _family_and_size(name)
        kin = [other for other in known if _is_near(family, _family_and_size(other)[0])]
        near = [other for other in kin if _family_and_size(other)[1] == size]
        if not near:  # what is spelled alike, gemma2-9b and llama2-7b, has another shape
            hint = f"known: {_list_families(kin or shipped_names('models'))}"
            hint += "; of others give the config.json"
            raise PartoptError(message, hint, code="no-such-file")
    raise unknown(message, name, near, code="no-such-file")


def _family_and_size(name: str) -> tuple[str, list[str]]:
    """The letters that the name of a model begins with, and its size."""
    small = name.lower()
    return re.findall("^[a-z]*", small)[0], re.findall(r"[0-9.]+[bm]\b", small)


def _list_families(names: Iterable[str]) -> str:
    """Names, those of a family together: `llama3-{70b,8b}`."""
    families = dict[str, list[str]]()
    for name in names:
        family, _, size = name.partition("-")
        families.setdefault(family, []).append(size)
    return ", ".join(
        f"{family}-{sizes[0]}" if len(sizes) == 1 else f"{family}-{{{','.join(sizes)}}}"
        for family, sizes in families.items()
    )


def _is_near(word: str, other: str) -> bool:
    return difflib.SequenceMatcher(None, word, other).ratio() >= _NEAR


def read_bytes(path: PathLike, limit: int | None = None) -> bytes:
    """The content of the regular file `path`, or of standard input where it is `-`.

    Raises PartoptError for a pipe, a device or a folder, which may have no end, and beyond `limit`
    bytes, by default 64 MB or what the environment's PARTOPT_MAX_INPUT says.
    """
    most = _max_input() if limit is None else limit
    try:
        if path == "-":
            content = sys.stdin.buffer.read(most + 1)
        else:
            mode = Path(path).stat().st_mode
            if stat.S_ISDIR(mode):
                raise _is_a_directory(path)
            if not stat.S_ISREG(mode):
                hint = "give a file, or - and the content on standard input"
                raise _error(path, "is not a regular file", hint, "not-a-file")
            with Path(path).open("rb") as file:
                content = file.read(most + 1)
    except FileNotFoundError:
        raise _error(path, "no such file", "check the path", "no-such-file") from None
    except OSError as error:
        what = f"cannot be read: {error.strerror}"
        raise _error(path, what, "check the permissions", "unreadable-file") from None
    if len(content) <= most:
        return content
    hint = f"set {MAX_INPUT} in the environment to read more, such as {MAX_INPUT}=1GB"
    raise _error(path, f"has more than {format_bytes(most)}", hint, "input-too-large")


def is_file(name: str) -> bool:
    """Whether there is a file of this name, which may be any word."""
    try:
        return Path(name).is_file()
    except (OSError, ValueError):  # no name of a file
        return False


def write_bytes(path: PathLike, content: bytes, force: bool = False) -> None:
    """Write `content` to the file `path` (`-` is standard output), whole or not at all.

    An existing file is replaced only with `force`.
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
        raise _unwritable(path, error) from None


def check_form(path: PathLike, forms: Sequence[str], hint: str = "") -> str:
    """The suffix of `path` in small letters, which says what is written there.

    Raises PartoptError for one that is not among `forms`; `hint` says more than their names.
    """
    form = Path(path).suffix.lower()
    if form not in forms:
        message = f"{path}: unsupported format {form or 'without an extension'}"
        hint = hint or f"choose {', '.join(forms)}"
        raise PartoptError(message, hint, code="unsupported-format")
    return form


def check_writable(path: PathLike, force: bool = False, forms: Sequence[str] = ()) -> None:
    """Refuse, before any work is done, an output path that could not be written at the end.

    Also one whose suffix is not among `forms`, where they are given; a path without one says
    nothing. Pipes and devices are written as they are.
    """
    if path == "-":
        return
    folder, mode = Path(path).parent, _mode(path)
    if forms and Path(path).suffix and (not mode or stat.S_ISREG(mode)):
        check_form(path, forms)
    if stat.S_ISDIR(mode):
        raise _is_a_directory(path)
    if stat.S_ISREG(mode) and not force:
        raise _error(path, "already exists", "add `force=True` to replace it", "file-exists")
    if not folder.is_dir():
        what = f"the folder {folder} does not exist"
        raise _error(path, what, "create it first", "no-such-folder")
    if not mode and not os.access(folder, os.W_OK):
        what = f"the folder {folder} cannot be written to"
        raise _error(path, what, "choose another folder", "unwritable-file")


def _error(path: PathLike, what: str, hint: str, code: str) -> PartoptError:
    return PartoptError(f"{path}: {what}", hint, code=code, path=str(path))


def _is_a_directory(path: PathLike) -> PartoptError:
    return _error(path, "is a directory", "name a file in it", "is-a-directory")


def _unwritable(path: PathLike, error: OSError) -> PartoptError:
    what = f"cannot be written: {error.strerror}"
    return _error(path, what, "choose another place", "unwritable-file")


def _max_input() -> int:
    given = os.environ.get(MAX_INPUT)
    if given is None:
        return _MAX_INPUT_BYTES
    try:
        return parse_bytes(given)
    except PartoptError as error:
        raise error.at(MAX_INPUT) from None


def _mode(path: PathLike) -> int:
    """Kind and permissions of the file at `path`; 0 where there is none."""
    try:
        return Path(path).stat().st_mode
    except FileNotFoundError:
        return 0
    except OSError as error:
        raise _unwritable(path, error) from None


def _replace(target: Path, content: bytes) -> None:
    """Write `content` beside `target`, then rename it; on failure leave nothing behind."""
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=".partopt.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        umask = os.umask(0)
        os.umask(umask)
        Path(temporary).chmod(0o666 & ~umask)
        Path(temporary).replace(target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
