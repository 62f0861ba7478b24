"""Completion of command lines by bash, zsh and fish.

click completes what it knows; everything else is completed as file names.
"""

from __future__ import annotations

import click
from click.shell_completion import (
    BashComplete,
    CompletionItem,
    FishComplete,
    ShellComplete,
    ZshComplete,
    add_completion_class,
    shell_complete,
)

from partopt.errors import PartoptError

VARIABLE = "_PARTOPT_COMPLETE"  # SHELL_source or SHELL_complete


class _OrFiles(ShellComplete):
    """Values for which click has no completions are completed as file names."""

    def get_completions(self, args: list[str], incomplete: str) -> list[CompletionItem]:
        known = super().get_completions(args, incomplete)
        if known or incomplete.startswith("-"):
            return known
        return [CompletionItem(incomplete, type="file")]


class _Bash(_OrFiles, BashComplete):
    pass


class _Zsh(_OrFiles, ZshComplete):
    pass


class _Fish(_OrFiles, FishComplete):
    pass


SHELLS: dict[str, type[ShellComplete]] = {"bash": _Bash, "zsh": _Zsh, "fish": _Fish}


def complete(command: click.Command, instruction: str) -> int:
    """Print the script for `SHELL_source`, or completions for `SHELL_complete`; the exit code.

    Raises PartoptError for any other instruction.
    """
    shell, _, action = instruction.partition("_")
    if shell not in SHELLS or action not in ("source", "complete"):
        raise PartoptError(
            f"{VARIABLE}={instruction}: unknown instruction",
            f"set it to {', '.join(f'{name}_source' for name in SHELLS)}, or unset it",
            code="unknown-completion",
            instruction=instruction,
        )
    add_completion_class(SHELLS[shell])
    return shell_complete(command, {}, "partopt", VARIABLE, instruction)
