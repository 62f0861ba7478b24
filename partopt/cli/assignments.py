"""Arguments of a model, as `--set K=V` gives them."""

from __future__ import annotations

import ast
from typing import Any

import click

from partopt.errors import PartoptError

set_option = click.option(
    "--set",
    "assignments",
    multiple=True,
    metavar="K=V",
    help="An argument for the function that builds the model.",
)


def parse_assignments(assignments: tuple[str, ...]) -> dict[str, Any]:
    """Arguments from `K=V`: V is a Python literal where it reads as one, else text."""
    arguments: dict[str, Any] = {}
    for assignment in assignments:
        key, equals, value = assignment.partition("=")
        if not equals or not key.isidentifier():
            raise PartoptError(
                f"--set {assignment}: not of the form K=V",
                "write --set layers=12",
                code="invalid-option",
                option="arguments",
                value=assignment,
            )
        arguments[key] = _literal(value)
    return arguments


def _literal(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
    return value if isinstance(value, int | float | str | list | dict | None) else text
