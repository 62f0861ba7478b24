"""Whole numbers as bash computes with them: 64 bits, the operators of C, names without a `$`.

An operand that is not known, between two of `UNKNOWN`, makes what depends on it None.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable

UNKNOWN = "\0\1"  # what stands on both sides of the name of an unknown value, of one never set

_TOKEN = re.compile(
    rf"\s*(?:(?P<number>0[xX][0-9a-fA-F]+|[0-9]+#\w+|[0-9]+)|(?P<name>[A-Za-z_]\w*(?:\[[^\]]*\])?)"
    rf"|(?P<unknown>[{UNKNOWN}][^{UNKNOWN}]*[{UNKNOWN}])"
    r"|(?P<sign><<=|>>=|\*\*|&&|\|\||[<>=!]=|<<|>>|\+\+|--|[-+*/%&|^]=|[-+*/%<>=!~&|^?:,()]))"
)
_DEEP = 50  # expressions in each other, and names whose values are expressions
_ASSIGNMENTS = ("=", "+=", "-=", "*=", "/=", "%=", "&=", "|=", "^=", "<<=", ">>=")
# how much operators bind, and what they make of two numbers
_BINARY: dict[str, tuple[int, Callable[[int, int], int]]] = {
    "||": (4, lambda a, b: bool(a or b)),
    "&&": (5, lambda a, b: bool(a and b)),
    "|": (6, operator.or_),
    "^": (7, operator.xor),
    "&": (8, operator.and_),
    "==": (9, operator.eq),
    "!=": (9, operator.ne),
    "<": (10, operator.lt),
    "<=": (10, operator.le),
    ">": (10, operator.gt),
    ">=": (10, operator.ge),
    "<<": (11, lambda a, b: a << (b & 63)),
    ">>": (11, lambda a, b: a >> (b & 63)),
    "+": (12, operator.add),
    "-": (12, operator.sub),
    "*": (13, operator.mul),
    "/": (13, lambda a, b: abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)),
    "%": (13, lambda a, b: abs(a) % abs(b) * (-1 if a < 0 else 1)),
    "**": (14, lambda a, b: pow(a, b, 2**64)),
}
_COMMA, _ASSIGN, _CHOICE, _UNARY = 1, 2, 3, 15  # how much these bind


def calculate_whole(
    text: str, look_up: Callable[[str], str], assign: Callable[[str, str], None], depth: int = 0
) -> int | None:
    """The value of an expression; None where it depends on what is not known.

    `look_up` gives the value of a name, itself an expression, and `assign` takes one. Raises
    ValueError for a text that is no expression, as a division by zero.
    """
    reader = _ExpressionReader(text, look_up, assign, depth)
    value = reader.read(_COMMA) if reader.kind else 0
    if reader.kind:
        raise ValueError(f"unexpected {reader.token}")
    return value


class _ExpressionReader:
    """Reads an expression from its beginning, and computes it."""

    def __init__(
        self,
        text: str,
        look_up: Callable[[str], str],
        assign: Callable[[str, str], None],
        depth: int,
    ) -> None:
        self.text, self.at, self.depth = text.rstrip(), 0, depth
        self.look_up, self.assign, self.skips = look_up, assign, False
        self.kind: str | None = None
        self.token = ""
        self.advance()

    def advance(self) -> str:
        """Go to the next token; gives the one that is left."""
        before = self.token
        found = _TOKEN.match(self.text, self.at)
        if found is None and self.at < len(self.text):
            raise ValueError(f"unexpected {self.text[self.at]}")
        self.kind, self.token = (found.lastgroup, found[0].strip(" \t\n")) if found else (None, "")
        self.at = found.end() if found else self.at
        return before

    def read(self, binds: int) -> int | None:
        """The value of what operators join that bind at least so much."""
        self.depth += 1
        if self.depth > _DEEP:
            raise ValueError("too deep")
        left = self.operand()
        while True:
            sign = self.token if self.kind == "sign" else ""
            strength = _BINARY[sign][0] if sign in _BINARY else 0
            if strength >= binds:
                self.advance()
                left = self.combine(sign, left, strength)
            elif sign == "?" and binds <= _CHOICE:
                self.advance()
                yes = self.evaluate(_COMMA, skip=left == 0)
                if self.advance() != ":":
                    raise ValueError("no :")
                no = self.evaluate(_CHOICE, skip=bool(left))
                left = (yes if yes == no else None) if left is None else yes if left else no
            elif sign == "," and binds <= _COMMA:
                self.advance()
                left = self.read(_ASSIGN)
            else:
                self.depth -= 1
                return left

    def combine(self, sign: str, left: int | None, strength: int) -> int | None:
        """The value of two operands, of which `&&` and `||` may need the first alone."""
        decides = {"&&": False, "||": True}.get(sign)  # what either operand settles alone
        settled = left is not None and bool(left) == decides
        right = self.evaluate(strength + (sign != "**"), skip=settled)
        if settled or (right is not None and bool(right) == decides):
            return int(bool(decides))
        if left is None or right is None or self.skips:
            return None
        return self.apply(sign, left, right)

    def evaluate(self, binds: int, skip: bool) -> int | None:
        """The value of the next operand; where it is skipped, it assigns nothing."""
        before, self.skips = self.skips, self.skips or skip
        value = self.read(binds)
        self.skips = before
        return value

    def operand(self) -> int | None:
        """A number, a name, an expression in parentheses, with what stands before or behind it."""
        kind, token = self.kind, self.advance()
        if kind == "number":
            return _number(token)
        if kind == "unknown":
            return None
        if kind == "name":
            return self.name(token)
        if token == "(":
            value = self.read(_COMMA)
            if self.advance() != ")":
                raise ValueError("no )")
            return value
        if token in ("++", "--") and self.kind == "name":
            name = self.advance()
            return self.change(name, token[0], self.value(name), 1)
        if token in ("++", "--", "+", "-", "!", "~"):
            value = self.read(_UNARY)
            if value is None:
                return None
            return {"-": -value, "!": int(not value), "~": ~value}.get(token, value)
        raise ValueError(f"unexpected {token}")

    def name(self, name: str) -> int | None:
        """The value of a name, or what is assigned to it."""
        sign = self.token
        if sign in ("++", "--"):
            self.advance()
            before = self.value(name)
            self.change(name, sign[0], before, 1)
            return before
        if sign in _ASSIGNMENTS:
            self.advance()
            before = self.value(name) if sign != "=" else None
            return self.change(name, sign[:-1], before, self.read(_ASSIGN))
        return self.value(name)

    def value(self, name: str) -> int | None:
        """The value of a variable; None where it is not needed."""
        if self.skips:
            return None
        return calculate_whole(self.look_up(name), self.look_up, self.assign, self.depth)

    def change(self, name: str, sign: str, before: int | None, operand: int | None) -> int | None:
        """Assign what an operator makes of a variable's value before, or the operand itself."""
        value = operand
        if sign:
            value = None if before is None or operand is None else self.apply(sign, before, operand)
        if not self.skips:
            self.assign(name, f"{UNKNOWN[0]}{name}{UNKNOWN[0]}" if value is None else str(value))
        return value

    def apply(self, sign: str, left: int, right: int) -> int:
        """What an operator makes of two numbers."""
        if (sign in "/%" and right == 0) or (sign == "**" and right < 0):
            raise ValueError("no number")
        return _wrap(int(_BINARY[sign][1](left, right)))


def _number(token: str) -> int:
    if "#" in token:
        base, _, digits = token.partition("#")
        return _wrap(int(digits, int(base)))
    octal = token.isdecimal() and token.startswith("0")
    return _wrap(int(token, 8) if octal else int(token, 0))


def _wrap(number: int) -> int:
    """A number in 64 bits."""
    return (number + 2**63) % 2**64 - 2**63
