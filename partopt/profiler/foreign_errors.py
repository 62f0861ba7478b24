"""Errors raised by the model's own code, explained with the line that raised them."""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

from partopt.errors import PartoptError
from partopt.profiler.memory import is_out_of_memory

_EXTRAS = {"torchvision": "examples", "transformers": "examples"}


@contextlib.contextmanager
def explain(where: str) -> Iterator[None]:
    """Turn what the model's own code raises into a PartoptError that names the line.

    Running out of memory passes through.
    """
    try:
        yield
    except PartoptError:
        raise
    except (Exception, SystemExit) as error:
        if is_out_of_memory(error):
            raise
        if isinstance(error, ModuleNotFoundError) and error.name:
            raise _not_installed(where, error.name.partition(".")[0]) from error
        raise PartoptError(
            f"{where}: {describe(error)}", "correct the model file", code="model-code-failed"
        ) from error


def describe(error: BaseException) -> str:
    """An exception of foreign code in one line, with the line of code that led to it.

    That is the innermost line outside of installed packages.
    """
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if _is_the_users(frame.filename)
    ]
    what = str(error).strip().splitlines()
    text = f"raised {type(error).__name__}" + (f": {what[0]}" if what else "")
    if isinstance(error, SyntaxError):
        return f"{text} (line {error.lineno})"
    return (
        f"{text} ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else text
    )


def _not_installed(where: str, missing: str) -> PartoptError:
    own = f"in a clone of partopt: pip install '.[{_EXTRAS.get(missing)}]'"
    return PartoptError(
        f"{where}: needs {missing}, which is not installed",
        own if missing in _EXTRAS else f"pip install {missing}",
        code="not-installed",
        package=missing,
    )


def _is_the_users(filename: str) -> bool:
    own = str(Path(__file__).parent.parent)
    return not filename.startswith((own, "<", sys.base_prefix)) and "site-packages" not in filename
