"""`partopt plan` of a transformer's configuration, `partopt import` of its trainer's."""

from __future__ import annotations

import dataclasses
import math
import shlex
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import click

from partopt.cli import options
from partopt.cli.terminal import ascii_only, leave_if_interrupted, progress, say, say_page, search
from partopt.cli.words import LARGER
from partopt.errors import ANSWER_IS_NO, PartoptError
from partopt.units import format_bytes

if TYPE_CHECKING:
    from partopt import Laying
    from partopt.documents.engine import Layout
    from partopt.documents.plan import Plan
    from partopt.documents.transformer import Transformer

# options of a job that a configuration's plan has, by the part of the layout that they are
_PARTS = {
    "microbatch_size": "microbatch",
    "recompute": "recompute",
    "shard": "shard",
    "chunks": "chunks",
}
_TAKEN = {
    *_PARTS,
    *("topology", "servers", "target", "layout", "facts", "memory", "force"),
    *("global_batch", "sequence", "dtype", "assignments", "best", "calibrate"),
    *("scaling", "weak", "picture"),
}
_NEEDED = {"target": "--for", "global_batch": "--global-batch", "sequence": "--sequence"}


def plan(model: Transformer, given: dict[str, Any], output: str | None, as_json: bool) -> None:
    """Plan a model in a layout: print the page, and write the plan.

    `given` are the values of the options; exits with 1 where the layout does not fit.
    """
    import partopt
    from partopt.report.transformer_text import render

    _check(model, given)
    measured = given["calibrate"]
    asked = partopt.Laying(
        model=model,
        topology=partopt.Topology.load(given["topology"], given["servers"]),
        trainer=given["target"],
        global_batch=given["global_batch"],
        sequence=given["sequence"],
        format=given["dtype"],
        layout=_layout(given),
        facts=options.parse_facts(given["facts"]),
        memory=given["memory"],
        measured=partopt.Profile.load(measured) if measured else None,
    )
    if given["scaling"] is not None:
        devices = options.integers(given["scaling"], "--scaling")
        table, interrupted = search(
            lambda tell: partopt.scale_layouts(asked, devices, given["weak"], tell)
        )
        options.print_scaling(table, as_json, output, given["force"])
        leave_if_interrupted(interrupted)
        if not as_json and output != "-":
            rest = shlex.join(_words(given.keys() - {"scaling", "weak", "force"}))
            say(f"next:    {rest} -o plan.json", err=True)
        return
    chosen, interrupted = search(lambda tell: partopt.choose(asked, tell))
    found = chosen.best.plan
    if as_json:
        options.write_json(found)
    elif output != "-":
        say_page(render(found, ascii_only()))
    if not found.fits:
        leave_if_interrupted(interrupted)
        raise _does_not_fit(found, asked, _fitting(asked, given, output))
    if output and not (as_json and output == "-"):
        found.save(output, given["force"])
    if given["picture"]:
        partopt.draw(found, given["picture"], profile=chosen.best.profile, force=given["force"])
    options.say_wrote(output, given["picture"])
    leave_if_interrupted(interrupted)
    if output and output != "-":
        file = shlex.quote(output)
        say(f"next:    partopt show {file}; partopt export {file} --to {asked.trainer}", err=True)


def import_(
    trainer: str, text: str, given: dict[str, Any], output: str | None, as_json: bool
) -> None:
    """Plan what a trainer's configuration says, and print it beside the best layout.

    `given` are the values of the options; exits with 1 where the layout does not fit.
    """
    import partopt
    from partopt.report.transformer_text import render, render_compared

    _refuse_others(given, "the configuration of a trainer, without --profile")
    name, _, function = text.rpartition(":")
    if not name.endswith(".py"):
        name, function = text, ""
    facts = options.parse_facts(given["facts"])
    asked, notes = partopt.read_configuration(
        trainer,
        options.layout_text(name),
        partopt.Topology.load(given["topology"], given["servers"]),
        options.parse_pairs("--set", given["assignments"], "NAME=VALUE", "TP=8"),
        function=function or None,
        global_batch=given["global_batch"],
        sequence=given["sequence"],
        format=given["dtype"],
        layout=_layout(given),
        facts=facts,
        memory=given["memory"],
    )
    for note in notes:
        say(f"note:    {note}", err=True)
    with progress() as tell:
        compared = partopt.compare_layout(asked, tell)
    yours, best = compared.yours, compared.chosen.best
    written = best.plan if given["best"] else yours.plan
    if as_json:
        options.write_json(written)
    elif output != "-":
        say_page(render(yours.plan, ascii_only()))
        beside = (yours.plan, yours.estimate), (best.plan, best.estimate)
        say(f"\n{render_compared(*beside, compared.loses, compared.changes)}")
    if output and not (as_json and output == "-"):
        written.save(output, given["force"])
    options.say_wrote(output)
    if not written.fits:
        size = asked.topology.cluster.levels[-1].size
        free = dataclasses.replace(asked, layout=partopt.Layout())
        hint = "the best layout fits: add --best to write that"
        if not best.plan.fits:
            servers = partopt.find_servers(free, size + 1)
            hint = LARGER if servers is None else f"a layout fits with --servers {servers}"
        raise _does_not_fit(written, asked, hint)
    if output and output != "-":
        file = shlex.quote(output)
        say(f"next:    partopt show {file}; partopt export {file} --to {trainer}", err=True)


def _does_not_fit(plan: Plan, asked: Laying, hint: str) -> PartoptError:
    from partopt import Layout

    needs = format_bytes(plan.peak_memory_bytes + plan.reserve.size_bytes)
    limit = format_bytes(asked.limit_bytes or 0)
    what = "no layout fits" if asked.layout == Layout() else "the layout does not fit"
    return PartoptError(
        f"{what}: a device needs {needs} of {limit}", hint, ANSWER_IS_NO, code="no-plan-fits"
    )


def _fitting(asked: Laying, given: dict[str, Any], output: str | None) -> str:
    """The command with which a layout fits: on more servers, or with no part of it fixed."""
    import partopt

    size = asked.topology.cluster.levels[-1].size
    found: dict[tuple[str, ...], int | None] = {(): partopt.find_servers(asked, size + 1)}
    if asked.layout != partopt.Layout():
        free = dataclasses.replace(asked, layout=partopt.Layout())
        found[*_PARTS, "layout"] = partopt.find_servers(free, size)
    dropped = min(found, key=lambda names: found[names] or math.inf)
    if (servers := found[dropped]) is None:
        return f"no layout fits on any number of servers that was tried; {LARGER}"
    written = ["-o", output] if output else []
    changed = [] if servers == size else ["--servers", str(servers)]
    left = given.keys() - set(dropped) - ({"servers"} if changed else set())
    return f"this fits: {shlex.join([*_words(left), *changed, *written])}"


def _words(given: Iterable[str]) -> list[str]:
    """The words of this command with the options `given` alone."""
    profile = click.get_current_context().params["profile"]
    return ["partopt", "plan", profile, *options.repeat_words(given)]


def _check(model: Transformer, given: dict[str, Any]) -> None:
    """Refuse options that go with profiles, and what is missing."""
    for name, flag in _NEEDED.items():
        if given[name] is None:
            raise PartoptError(
                f"{flag}: needed to plan {model.name}, a transformer's configuration",
                f"add {flag}",
                code="missing-option",
            )
    _refuse_others(given, f"{model.name} is a transformer's configuration, not a profile")


def _refuse_others(given: dict[str, Any], why: str) -> None:
    """Refuse options that go with profiles."""
    for name in given.keys() - _TAKEN:
        if options.is_given(name):
            flag = f"--{name.replace('_', '-')}"
            raise PartoptError(
                f"{flag}: {why}",
                f"leave {flag} out; --layout fixes what its trainer can choose",
                code="unused-option",
            )


def _layout(given: dict[str, Any]) -> Layout:
    """The layout of --layout, with the parts that other options say."""
    import msgspec

    import partopt

    stated = partopt.Layout.parse(given["layout"]) if given["layout"] else partopt.Layout()
    for name, part in _PARTS.items():
        if options.is_given(name):
            value = given[name]
            if getattr(stated, part) not in (None, value):
                raise PartoptError(
                    f"--{name.replace('_', '-')} {value}: --layout says {part}="
                    f"{getattr(stated, part)}",
                    "give one of them",
                    code="contradiction",
                )
            stated = msgspec.structs.replace(stated, **{part: value})
    return stated
