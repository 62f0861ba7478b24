"""What partopt says when something is wrong: where, what, and what to do about it."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from partopt.printable import cut

LISTED = 12  # names in a hint
Item = TypeVar("Item")
Made = TypeVar("Made")

BAD_INPUT = 2  # the input or the usage is wrong
ANSWER_IS_NO = 1  # everything ran, and the answer is no: it does not fit, there is no plan


class PartoptError(Exception):
    """A mistake that a person can mend, or an answer that is no.

    `message` reads `WHERE: WHAT`; `hint` says what to do; `code` names the kind of error for
    programs, and `fields` are what it is about; `exit_code` is 2 for bad input and 1 where the
    answer is no. `parts` holds the errors when several were found at once; `file` among the fields
    says that all of them are of that file.

    Options are written as Python takes them, in backquotes: `microbatches=64`. The command line
    writes them as flags.
    """

    def __init__(
        self,
        message: str,
        hint: str = "",
        exit_code: int = BAD_INPUT,
        *,
        code: str = "",
        **fields: Any,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.exit_code = exit_code
        self.code = code
        self.fields = fields
        self.parts: tuple[PartoptError, ...] = (self,)

    def at(self, where: str) -> PartoptError:
        """The same error, said to be at `where`; the long words in it are cut."""
        message = f"{where}: {cut(self.message)}"
        return PartoptError(message, self.hint, self.exit_code, code=self.code, **self.fields)

    @classmethod
    def together(cls, errors: Iterable[PartoptError], **fields: Any) -> PartoptError:
        """One error that carries all of `errors`, in their order. There must be at least one."""
        parts = tuple(part for error in errors for part in error.parts)
        if len(parts) == 1:
            return parts[0]
        whole = cls(
            "\n".join(part.message for part in parts),
            exit_code=max(part.exit_code for part in parts),
            code=parts[0].code,
            **fields,
        )
        whole.parts = parts
        return whole


def make_each(items: Iterable[Item], make: Callable[[Item], Made]) -> list[Made]:
    """What `make` makes of all items but those that it refuses.

    Raises PartoptError with all reasons, each of them once, where it refuses all.
    """
    made, refusals = list[Made](), dict[str, PartoptError]()
    for item in items:
        try:
            made.append(make(item))
        except PartoptError as error:
            refusals[error.message] = error
    if refusals and not made:
        raise PartoptError.together(refusals.values())
    return made


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during a search: `found` is the best until then, as the interrupted function gives it.

    Where nothing was found yet, KeyboardInterrupt itself is raised.
    """

    def __init__(self, found: Any) -> None:
        super().__init__()
        self.found = found


@contextmanager
def found_until_then(so_far: Callable[[Any], Any]) -> Iterator[None]:
    """Where this context is interrupted, Interrupted carries what was found until then.

    `so_far` makes it of what a function inside found, None where none says so. Where it is None or
    a PartoptError, nothing was found.
    """
    try:
        yield
    except KeyboardInterrupt as stopped:
        with suppress(PartoptError):
            found = so_far(getattr(stopped, "found", None))
            if found is not None:
                raise Interrupted(found) from None
        raise KeyboardInterrupt(*stopped.args) from None


def did_you_mean(name: str, known: Iterable[str], most: int = LISTED) -> str:
    """A hint that names the nearest of `known`, whatever the case, or where none is near `most`."""
    names = list(known)
    small = {known_name.lower(): known_name for known_name in names}
    near = difflib.get_close_matches(name.lower(), small, n=1, cutoff=0.5)
    if near:
        return f'did you mean "{small[near[0]]}"?'
    return f"known: {', '.join(names[:most]) or 'none'}" + (", ..." if len(names) > most else "")


def unknown(
    what: str,
    name: object,
    known: Iterable[str],
    /,
    most: int = LISTED,
    *,
    code: str,
    **fields: Any,
) -> PartoptError:
    """The error that says `what`, for a `name` not among `known`: the hint is the nearest."""
    return PartoptError(what, did_you_mean(str(name), known, most), code=code, **fields)


def invalid(option: str, value: object, what: str, hint: str) -> PartoptError:
    """The error of an option with an invalid value."""
    return PartoptError(
        f"`{option}={value}`: {what}", hint, code="invalid-option", option=option, value=value
    )


def unknown_value(option: str, value: object, known: Iterable[str], what: str = "") -> PartoptError:
    """The error of an option whose value is not among `known`; the hint is the nearest of them."""
    what = f"`{option}={value}`: {what or f'unknown {option}'}"
    return unknown(what, value, known, code="invalid-option", option=option, value=value)
