"""What a program in Python makes: the fields of its objects, read without running it.

Functions of the file are followed, with the arguments of their callers over their defaults. An
imported class is an object of the fields that it is given. An imported function that makes the
configuration, or is given it, is named in `unread`: it may set anything.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from partopt.configurations.marks import mark, unknown_names
from partopt.errors import PartoptError

_DEPTH = 12  # functions that call each other
_WORK = 100_000  # expressions and statements
_MOST = 10**15  # numbers beyond are not computed with
_LONGEST = 10_000  # letters and elements of what is computed
_OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Mod: operator.mod,
    ast.FloorDiv: operator.floordiv, ast.Div: operator.truediv,
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le,
    ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Is: operator.is_, ast.IsNot: operator.is_not,
    ast.In: lambda a, b: _key(a) in b, ast.NotIn: lambda a, b: _key(a) not in b,
}  # fmt: skip
# a function that sets what its name says
_SETTER = re.compile(r"_*(?:with|set|override|apply)_(\w+)")


class Called(str):
    """The name of what is called, in place of what it returns."""


class Expression(str):
    """What stands in a program as it is; its first name is of a `module`, where that is said."""

    module: str

    def __new__(cls, text: str, module: str = "") -> Expression:
        """The expression of a text."""
        made = super().__new__(cls, text)
        made.module = module
        return made

    __repr__ = str.__str__


class ProgramObject(dict[Any, object]):
    """An object: its fields, and `made_by`, what was called for it.

    `order` has when every field was set, counted over all objects.
    """

    def __init__(self, made_by: str = "") -> None:
        super().__init__()
        self.made_by, self.order = made_by, dict[str, int]()


def parse_program(text: str) -> ast.Module | None:
    """The syntax of a program in Python; None where the text is none.

    `name: value` in every line is a document in YAML, though the syntax of Python has it, too.
    """
    with suppress(SyntaxError, ValueError, RecursionError, MemoryError):
        tree = ast.parse(text)
        if any(not isinstance(node, ast.AnnAssign) or node.value for node in tree.body):
            return tree
    return None


class Program:
    """The values that a program gives to names, and to fields by path, in their order."""

    def __init__(self, tree: ast.Module, given: Mapping[str, object]) -> None:
        self.tree, self.given = tree, given
        self.functions = {
            node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)
        }
        self.imported, self.unread = dict[str, str](), list[str]()
        self.scopes = [ProgramObject()]  # the module's names, and those of the function that runs
        self.scopes[0].update(given)
        self.clock = self.depth = self.work = 0
        self.returned: object = None
        self.is_left = False  # whether a function has returned

    def read(self, function: str | None) -> dict[str, object]:
        """Run through the module, then the function, or the only one that sets anything.

        Raises PartoptError where there are several, and for a program that does too much.
        """
        names = [function] if function is not None else list(self.functions)
        self.run([node for node in self.tree.body if not isinstance(node, ast.FunctionDef)])
        found = dict(self.flatten(self.scopes[:1]))
        found |= {f"import.{name}": path for name, path in self.imported.items()}
        if function is not None and function not in self.functions:
            raise PartoptError(
                f"no function {function}",
                f"choose {', '.join(self.functions) or 'none: there are no functions'}",
                code="no-such-function",
            )
        made = dict[str, tuple[dict[str, object], list[str]]]()
        for name in names:
            before, self.unread = self.unread, list(self.unread)
            scope, value = self.call_function(name, [], {})
            fields = dict(self.flatten([scope, value]))
            if fields or function is not None:
                made[name] = fields, self.unread
            self.unread = before
        calls = (node for node in ast.walk(self.tree) if isinstance(node, ast.Call))
        called = {node.func.id for node in calls if isinstance(node.func, ast.Name)}
        free = {name: one for name, one in made.items() if name not in called or function}
        if len(free) > 1:
            raise PartoptError(
                f"{len(free)} functions make configurations: {', '.join(list(free)[:12])}",
                "name one behind the file: FILE:FUNCTION",
                code="several-layouts",
            )
        fields, self.unread = next(iter((free or made).values()), ({}, self.unread))
        return found | fields

    def flatten(self, roots: Iterable[object]) -> Iterator[tuple[str, object]]:
        """The fields of objects by their paths, in the order in which they were set."""
        found, seen = list[tuple[int, str, object]](), set[int]()

        def walk(value: object, path: str) -> None:
            self.spend(1)
            if isinstance(value, list | tuple):
                for element in value:
                    walk(element, path)
            elif isinstance(value, dict) and id(value) not in seen:
                seen.add(id(value))
                order = value.order if isinstance(value, ProgramObject) else {}
                for name, field in value.items():
                    if isinstance(name, str):
                        inside = f"{path}.{name}" if path else name
                        walk(field, inside)
                        found.append((order.get(name, self.clock), inside, _shown(field)))
                seen.discard(id(value))

        for root in roots:
            walk(root, "")
        return ((path, value) for _, path, value in sorted(found, key=lambda one: one[0]))

    def spend(self, steps: int) -> None:
        """Count steps; a PartoptError where there are too many."""
        self.work += steps
        if self.work > _WORK:
            what = "the program does too much to be read: its loops, or the calls of its functions"
            hint = "give the configuration alone, as it is printed"
            raise PartoptError(what, hint, code="malformed-script")

    # statements

    def run(self, statements: Sequence[ast.stmt]) -> None:
        """Run statements, of an `if` both branches where its condition is not known."""
        for node in statements:
            self.spend(1)
            if self.is_left:
                return
            match node:
                case ast.Assign(targets=targets, value=value):
                    made = self.evaluate(value, base=isinstance(targets[0], ast.Name))
                    for target in targets:
                        self.assign(target, made)
                case ast.AnnAssign(target=target, value=ast.expr() as value):
                    self.assign(target, self.evaluate(value, base=True))
                case ast.AugAssign(target=target, op=op, value=value):
                    before = self.evaluate(target)
                    self.assign(target, self.combine(op, before, self.evaluate(value), node))
                case ast.Import(names=names) | ast.ImportFrom(names=names):
                    module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
                    for alias in names:
                        self.imported[alias.asname or alias.name] = f"{module}{alias.name}"
                case ast.Return(value=returned):
                    self.returned = self.evaluate(returned, base=True) if returned else None
                    self.is_left = True
                case ast.Expr(value=value) if not isinstance(value, ast.Constant):
                    made = self.evaluate(value)
                    if isinstance(made, ProgramObject):
                        self.set(self.scopes[-1], f"{made.made_by}()", made)
                case ast.FunctionDef(name=name, body=body):
                    self.functions.setdefault(name, node)
                    self.set(self.scopes[-1], name, self.run_apart(body, ""))
                case ast.ClassDef(name=name, body=body):
                    self.set(self.scopes[-1], name, self.run_apart(body, name))
                case ast.With(body=body) | ast.Try(body=body):
                    self.run(body)
                case ast.If(test=test, body=body, orelse=otherwise):
                    holds = self.evaluate(test)
                    known = not _is_unknown(holds)
                    if not known or holds:
                        self.run(body)
                    if not known or not holds:
                        self.run(otherwise)
                case ast.For(target=target, iter=iterated, body=body):
                    found = self.evaluate(iterated)
                    for turn in found if isinstance(found, list | tuple) else [mark("a loop")]:
                        self.assign(target, turn)
                        self.run(body)
                    if not isinstance(found, list | tuple):
                        self.forget(body)
                case ast.While(body=body):
                    self.forget(body)

    def forget(self, body: Sequence[ast.stmt]) -> None:
        """Run a loop's body whose turns are not known: the names that it sets are not, either."""
        self.run(body)
        for node in (node for statement in body for node in ast.walk(statement)):
            if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for target in targets:
                    self.assign(target, mark(_path(target) or "a loop"))

    def run_apart(self, body: Sequence[ast.stmt], name: str) -> ProgramObject:
        """Run statements whose names are apart; gives these."""
        before = self.returned, self.is_left
        self.scopes.append(ProgramObject(name))
        self.run(body)
        self.returned, self.is_left = before
        return self.scopes.pop()

    def assign(self, target: ast.expr, value: object) -> None:
        """Give a name, or a field of an object, a value."""
        match target:
            case ast.Name(id=name):
                if name not in self.given:
                    self.set(self.scopes[-1], name, value)
            case (
                ast.Attribute(value=owner, attr=name)
                | ast.Subscript(value=owner, slice=ast.Constant(value=str(name)))
            ):
                holder = self.evaluate(owner)
                if not isinstance(holder, ProgramObject):
                    holder = ProgramObject()
                    self.assign(owner, holder)
                self.set(holder, name, value)
            case ast.Tuple(elts=targets) | ast.List(elts=targets):
                values = value if isinstance(value, list | tuple) else []
                for i, one in enumerate(targets):
                    self.assign(one, values[i] if i < len(values) else mark("a value"))

    def set(self, holder: ProgramObject, name: str, value: object) -> None:
        """Set a field, of an object what is in it, too."""
        self.clock += 1
        holder[name] = value
        holder.order[name] = self.clock

    # expressions

    def evaluate(self, node: ast.expr, base: bool = False) -> Any:
        """The value of an expression; a mark where it is not known.

        `base`: whether it is the whole of what a name is given, as a configuration is.
        """
        self.spend(1)
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name):
                for scope in self.scopes[:0:-1] + self.scopes[:1]:
                    if name in scope:
                        return scope[name]
                return Called(name) if name in self.imported else mark(name)
            case ast.Attribute():
                return self.attribute(node, base)
            case ast.Subscript(value=owner, slice=key):
                holder, index = self.evaluate(owner), self.evaluate(key)
                with suppress(TypeError, LookupError):
                    if isinstance(holder, dict | list):
                        return holder[_key(index)]
                return _unknown(node)
            case ast.List(elts=elements) | ast.Tuple(elts=elements):
                return [self.evaluate(element) for element in elements]
            case ast.Dict(keys=keys, values=values):
                made = ProgramObject()
                for word, inside in zip(keys, values, strict=True):
                    entry, value = word and self.evaluate(word), self.evaluate(inside)
                    if isinstance(entry, list | int):  # of a table
                        made[_key(entry)] = value
                    self.pass_on(made, entry, value)
                return made
            case ast.UnaryOp(op=op, operand=operand):
                value = self.evaluate(operand)
                if _is_unknown(value):
                    return _unknown(node)
                if isinstance(op, ast.Not):
                    return not value
                return -value if isinstance(value, int | float) else _unknown(node)
            case ast.BinOp(op=op, left=left, right=right):
                return self.combine(op, self.evaluate(left), self.evaluate(right), node)
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                return self.combine(op, self.evaluate(left), self.evaluate(right), node)
            case ast.BoolOp(op=op, values=values):
                return self.join([self.evaluate(value) for value in values], isinstance(op, ast.Or))
            case ast.IfExp(test=test, body=yes, orelse=no):
                holds = self.evaluate(test)
                return holds if _is_unknown(holds) else self.evaluate(yes if holds else no)
            case ast.Call():
                return self.call(node, base)
        return _unknown(node)

    def attribute(self, node: ast.Attribute, base: bool) -> Any:
        """The field of an object, or the name of a constant of another module."""
        name, holder, path = node.attr, self.evaluate(node.value), _path(node)
        if isinstance(holder, ProgramObject):
            if base and name not in holder:  # what a name is given, to set fields of it
                self.set(holder, name, ProgramObject(mark(path)))
            return holder[name] if name in holder else mark(path)
        self.spend(path.count("."))
        is_local = _is_unknown(holder) and not isinstance(holder, Called)
        is_constant = path and not (is_local and path[0].islower())
        is_constant = is_constant or path.startswith("torch.")
        return path.removeprefix("torch.") if is_constant else mark(path or name)

    def join(self, values: Sequence[Any], decides: bool) -> Any:
        """The value of `and` or `or`: the first that decides it, else the last."""
        known = [value for value in values if not _is_unknown(value)]
        found = [value for value in known if bool(value) == decides]
        unknown = [value for value in values if _is_unknown(value)]
        return found[0] if found else unknown[0] if unknown else values[-1]

    def combine(self, op: ast.AST, left: Any, right: Any, node: ast.AST) -> Any:
        """What an operator makes of two values."""
        texts = isinstance(left, str | list) or isinstance(right, str | list)
        for value in (left, right):
            if _is_unknown(value):
                return value if isinstance(value, str) else _unknown(node)
            size = abs(value) if isinstance(value, int | float) else 0
            size = len(value) if isinstance(value, str | list) else size
            if size > (_LONGEST if texts else _MOST):
                return _unknown(node)
        with suppress(TypeError, ValueError, ArithmeticError, KeyError):
            return _OPERATORS[type(op)](left, right)
        return _unknown(node)

    def call(self, node: ast.Call, base: bool) -> Any:
        """What a call returns: of the file's functions and classes as they are, else an object."""
        path = _path(node.func)
        name = path.rpartition(".")[2]
        args = [self.evaluate(arg) for arg in node.args if not isinstance(arg, ast.Starred)]
        keywords = [(word.arg, self.evaluate(word.value)) for word in node.keywords]
        if path in self.functions and not any(word is None for word, _ in keywords):
            return self.call_function(path, args, dict(keywords))[1]  # type: ignore[arg-type]
        made = ProgramObject(path)
        match node.func:
            case ast.Attribute(value=owner, attr="lower" | "upper" | "strip" as method):
                text = self.evaluate(owner)
                if isinstance(text, str) and not _is_unknown(text) and not args:
                    return getattr(text, method)()
            case ast.Attribute(value=owner):
                holder = self.evaluate(owner)
                made = holder if isinstance(holder, ProgramObject) else made
            case ast.Name(id="range" | "len" | "int" | "max" | "min" | "list" | "tuple" as builtin):
                plain = all(isinstance(arg, int | list) and not _is_unknown(arg) for arg in args)
                with suppress(TypeError, ValueError):
                    if plain and args and not keywords:
                        return self.call_builtin(builtin, args)
                return _unknown(node)
            case ast.Name(id="getattr") if len(args) > 1 and isinstance(args[0], ProgramObject):
                return args[0].get(args[1], _unknown(node)) if isinstance(args[1], str) else made
            case ast.Name() if isinstance(base_class := self.scopes[0].get(path), ProgramObject):
                for field, value in base_class.items():
                    self.set(made, field, value)
        literal = next(
            (arg for arg in args if not isinstance(arg, ProgramObject) and arg is not None), True
        )
        if path != "dict":
            self.set(made, name, literal)
        objects = [arg for arg in args if isinstance(arg, ProgramObject)]
        for given in objects:
            made.update({field: value for field, value in given.items() if field != name})
            made.order |= given.order
        for word, value in keywords:
            self.pass_on(made, word, value)
        for arg in args:
            if isinstance(arg, list) and any(isinstance(element, ProgramObject) for element in arg):
                self.set(made, name, arg)
        if path in self.imported and name[:1] in "_abcdefghijklmnopqrstuvwxyz":
            setter = _SETTER.fullmatch(name)
            if setter and objects:  # by itself where it is not given what
                field = mark(setter[1]) if literal is True else literal
                for holder in (objects[0], made):
                    self.set(holder, setter[1], field)
            if (not setter or literal is True) and (objects or base) and name not in self.unread:
                self.unread.append(name)
        return made

    def call_builtin(self, name: str, args: Sequence[Any]) -> Any:
        """What a function of the language returns for plain values."""
        if name == "range":
            found = range(*args)
            self.spend(len(found[: _WORK + 1]))  # len refuses 2**63
            return list(found)
        functions: dict[str, Callable[..., Any]] = {"len": len, "int": int, "max": max, "min": min}
        return functions.get(name, list)(*args)

    def call_function(
        self, name: str, args: Sequence[object], keywords: Mapping[str, object]
    ) -> tuple[ProgramObject, object]:
        """The names that a function of the file leaves, and what it returns."""
        self.spend(10)
        function, scope = self.functions[name], ProgramObject()
        spec = function.args
        names = [arg.arg for arg in (*spec.posonlyargs, *spec.args)]
        stated = {**dict(zip(names, args, strict=False)), **keywords}
        positional = spec.defaults[::-1], names[::-1]
        defaults = dict(zip(positional[1], positional[0], strict=False))
        defaults |= {
            arg.arg: value
            for arg, value in zip(spec.kwonlyargs, spec.kw_defaults, strict=True)
            if value
        }
        for parameter, default in defaults.items():
            if parameter not in stated:
                stated[parameter] = self.evaluate(default)
        for parameter, value in stated.items():
            self.set(scope, parameter, self.given.get(parameter, value))
        before = self.returned, self.is_left
        self.returned, self.is_left = None, False
        self.depth += 1
        self.scopes.append(scope)
        if self.depth <= _DEPTH:
            self.run(function.body)
        self.scopes.pop()
        self.depth -= 1
        returned = self.returned
        self.returned, self.is_left = before
        return scope, returned

    def pass_on(self, made: ProgramObject, name: object, value: object) -> None:
        """Set the field of a keyword, or those of `**value`."""
        if isinstance(name, str):
            self.set(made, name, value)
        elif name is None and isinstance(value, dict):
            for field, inside in value.items():
                self.set(made, field, inside)


def _key(value: Any) -> Any:
    """What a table is asked for: a tuple is a list here."""
    return tuple(value) if isinstance(value, list) else value


def _unknown(node: ast.AST) -> str:
    return mark(ast.unparse(node)[:40])


def _is_unknown(value: object) -> bool:
    if isinstance(value, str):
        return isinstance(value, Called) or bool(unknown_names(value))
    return isinstance(value, ProgramObject) and bool(value.made_by)


def _shown(value: object) -> object:
    """A value as settings have it: of an object the name of what makes it."""
    if isinstance(value, ProgramObject) and value.made_by:
        return Called(value.made_by)
    return [_shown(element) for element in value] if isinstance(value, list) else value


def _path(node: ast.expr) -> str:
    """`a.b.c` of names and attributes, `a["b"]` likewise; of a call, what is called."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=name):
            before = _path(value)
            return f"{before}.{name}" if before else name
        case ast.Subscript(value=value, slice=ast.Constant(value=str(name))):
            return f"{_path(value)}.{name}"
        case ast.Call(func=function):
            return _path(function)
    return ""
