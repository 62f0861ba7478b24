"""Compilation of hot loops, cached on disk for as long as no compiled source changes.

numba keys a cached function by its own file, though its machine code holds what it calls and the
constants that it uses, from whatever file. Here all these sources count together: the cache is a
folder named by their digest. numba itself keys every function by the processor. Nothing of
numba's settings is changed, and `NUMBA_CACHE_DIR` says where the folder lies.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import pickle
import re
import shutil
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import llvmlite
import numba
import numpy
from numba import njit, types
from numba.core.caching import CompileResultCacheImpl, FunctionCache
from numba.core.serialize import dumps
from numba.misc.appdirs import AppDirs

PACKAGE = Path(__file__).resolve().parent.parent
KEPT = 4  # digest folders, of this and of other versions of the sources
_IMPORT = re.compile(rb"^from (partopt[\w.]*) import (\([^)]*\)|.*)", re.MULTILINE)


def compiled(*, allocates: bool = False, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """numba's njit with its cache on disk, and without its counting of references to arrays.

    The counting is atomic and takes most of the time of a loop that reads arrays out of tuples. A
    function that makes or returns an array needs it: one that `allocates`.

    There is no cache where no folder can be written, nor for functions outside this package, whose
    sources the digest does not cover.
    """

    def compile_(function: Callable[..., Any]) -> Any:
        settings: dict[str, Any] = {"_nrt": allocates, **options}
        dispatcher: Any = njit(**settings)(function)
        if not hasattr(dispatcher, "_cache"):  # with NUMBA_DISABLE_JIT it is the function
            return dispatcher
        dispatcher.get_call_template = _without_literals(dispatcher.get_call_template)
        is_own = Path(function.__code__.co_filename).resolve() in compiled_sources(PACKAGE)
        folder = cache_folder() if is_own else None
        if folder is not None:
            dispatcher._cache = _Cache(function, folder)
        return dispatcher

    return compile_


def _without_literals(call_template: Callable[..., Any]) -> Callable[..., Any]:
    """numba's choice of a signature for a call, for which 0 is an integer like others.

    It would compile a function once for each constant that a call passes.
    """
    return lambda args, kws: call_template(
        [types.unliteral(arg) for arg in args],
        {name: types.unliteral(arg) for name, arg in kws.items()},
    )


@functools.cache
def cache_folder() -> Path | None:
    """The folder for the machine code of these sources; None where none can be written.

    It lies under `NUMBA_CACHE_DIR`, else beside the package, else in the user's cache. None also
    where the package has no sources.
    """
    digest = digest_of(compiled_sources(PACKAGE))
    settings: Any = numba.config
    roots = [
        *([Path(settings.CACHE_DIR, "partopt")] if settings.CACHE_DIR else []),
        PACKAGE / "__pycache__" / "compiled",
        Path(AppDirs("partopt", appauthor=False).user_cache_dir, "compiled"),
    ]
    for root in roots if digest else []:
        with contextlib.suppress(OSError):
            return _open_folder(root / digest)
    return None


@functools.cache
def compiled_sources(package: Path) -> tuple[Path, ...]:
    """The files with compiled functions, and those they import, whose constants are compiled in.

    Empty where the package has no sources, as in an archive.
    """
    contents = {path: path.read_bytes() for path in package.rglob("*.py")}
    own = {path: content for path, content in contents.items() if b"compiled(" in content}
    names = {name for content in own.values() for name in _imported_modules(content)}
    files = {package.parent.joinpath(*name.split(".")) for name in names}
    imported = {file for path in files for file in (path.with_suffix(".py"), path / "__init__.py")}
    return tuple(sorted(own.keys() | (imported & contents.keys())))


def _imported_modules(content: bytes) -> Iterator[str]:
    """The dotted names that may be modules of the package: what is imported, and from where."""
    for module, names in _IMPORT.findall(content):
        yield module.decode()
        yield from (f"{module.decode()}.{name.decode()}" for name in re.findall(rb"\w+", names))


def digest_of(sources: Sequence[Path]) -> str:
    """A name for these sources as this Python and these compilers see them; "" without sources."""
    if not sources:
        return ""
    versions = (sys.version, numba.__version__, llvmlite.__version__, numpy.__version__)
    digest = hashlib.sha256(repr(versions).encode())
    for path in sources:
        digest.update(f"\n{path.name} ".encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]


def _open_folder(folder: Path) -> Path:
    """Make a folder and check that it can be written; OSError where it cannot be."""
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=folder).close()
    os.utime(folder)
    if is_new:
        _remove_old(folder.parent)
    return folder


def _remove_old(root: Path) -> None:
    """Remove all but the folders used last; a process that still uses one compiles again."""

    def last_use(folder: Path) -> float:
        with contextlib.suppress(FileNotFoundError):  # another process has removed it
            return folder.stat().st_mtime
        return 0.0

    for folder in sorted(root.iterdir(), key=last_use, reverse=True)[KEPT:]:
        shutil.rmtree(folder, ignore_errors=True)


class _Cache(FunctionCache):
    """numba's cache of a function, in a given folder.

    What cannot be saved is compiled again.
    """

    def __init__(self, function: Callable[..., Any], folder: Path) -> None:
        self._name = repr(function)
        self._py_func = function
        self._impl = _Results(function)
        self._cache_path = str(folder)
        name = f"{function.__module__}.{function.__qualname__}-{self._impl._lineno}"
        self._cache_file: Any = _Files(folder, name)
        FunctionCache.enable(self)

    def save_overload(self, sig: Any, data: Any) -> None:
        """Save what was compiled for a signature."""
        if self._impl.check_cachable(data):
            with contextlib.suppress(OSError):
                key = FunctionCache._index_key(self, sig, data.codegen)
                self._cache_file.save(key, self._impl.reduce(data))


class _Results(CompileResultCacheImpl):
    """How numba writes and reads what it compiled, without its search for a folder."""

    def __init__(self, function: Callable[..., Any]) -> None:
        code = function.__code__
        self._lineno = code.co_firstlineno
        self._locator = SimpleNamespace(_py_file=code.co_filename)  # for numba's warnings


class _Files:
    """One file for each signature of a function, written at once and with its key inside.

    numba's own files have an index, which two processes that compile different signatures of one
    function at the same time can leave pointing at each other's code.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._name = re.sub(r"[^\w.-]", "", name)

    def load(self, key: Any) -> Any:
        """What was saved under a key, or None."""
        try:
            content = self._path(key).read_bytes()
        except OSError:
            return None
        saved, data = pickle.loads(content)
        return data if saved == key else None

    def save(self, key: Any, data: Any) -> None:
        """Save data under a key; OSError where the folder cannot be written."""
        self._folder.mkdir(parents=True, exist_ok=True)
        unfinished = self._path(key).with_suffix(f".{uuid.uuid4().hex}")
        unfinished.write_bytes(dumps((key, data)))
        unfinished.replace(self._path(key))

    def flush(self) -> None:
        """Forget every signature."""
        for path in self._folder.glob(f"{self._name}-*"):
            path.unlink(missing_ok=True)

    def _path(self, key: Any) -> Path:
        digest = hashlib.sha256(repr(key).encode()).hexdigest()
        return self._folder / f"{self._name}-{digest[:16]}.nbc"
