"""An option is declared once: its flag, what a problem holds and what a plan records agree."""

import ast
import inspect
import textwrap
from dataclasses import fields
from typing import get_args, get_type_hints

import click
import pytest
from msgspec.structs import replace

from partopt import cli
from partopt.cost.pricing import plan_of
from partopt.cost.problem import Problem, problem_from_plan
from partopt.documents.engine import Engine, Layout
from partopt.documents.plan import Plan, Request
from partopt.errors import PartoptError
from partopt.job import Job
from partopt.options import OF_TRANSFORMERS, Kind, Options, kinds, with_facts

FLAGGED = [name for name, kind in kinds().items() if kind.flag]
# options that no problem has by their names, and what comes of them there
BECOME = {
    "planner": "who decides",
    "cost": "`costs` of the request, a number for each layer",
    "memory": "`memory_bytes`, without the reserve",
    "global_batch": "`microbatches`",
    "microbatch_size": "the chain, which is of one size",
    "facts": "the engine",
    "effort": "what the search is given",
}
# options named in more than three places, and why
OFTEN = {
    "schedule": "a plan has it in its layout",
    "shard": "a plan has it in its layout",
    "chunks": "a plan has it as its stages lie",
    "microbatches": "are counted where the batch is given",
    "layout": "of a plan it is what all stages have in common",
    "stages": "of a plan they are what it consists of",
}


def options_of(verb, *names):
    """The options of a verb of the command line, by name."""
    command = cli.partopt.get_command(None, verb)
    for name in names:
        command = command.get_command(None, name)
    return {own.name: own for own in command.params if isinstance(own, click.Option)}


@pytest.mark.parametrize("verb", [("plan",), ("compare",), ("import", "megatron")])
def test_every_flag_is_as_its_option_is_declared(verb):
    found = options_of(*verb)
    for name in FLAGGED:
        option, kind = found.get(name), kinds()[name]
        if (kind.flag.split and verb != ("plan",)) or (kind.flag.apart and verb == ("compare",)):
            continue
        assert option.opts == [f"--{name.replace('_', '-')}"]
        default = getattr(Options, name, None)
        assert not default or option.default == default
        assert option.multiple == (kind.items is str)
        assert tuple(getattr(option.type, "choices", ())) == kind.words
        assert isinstance(option.type, click.IntRange) == (kind.counts and not kind.words)
        if kind.counts:
            assert option.type.convert("7", option, None) == 7
            with pytest.raises(
                click.BadParameter, match=r"one of|not a valid (whole number|number of tokens)"
            ):
                option.type.convert("x", option, None)


FACTS = [
    ({"waits": "none"}, {"waits": ()}),
    ({"waits": "1f1b, gpipe"}, {"waits": ("1f1b", "gpipe")}),
    ({"recompute": "none,blocks"}, {"recompute": ("none", "blocks")}),
    ({"shard": "none"}, {"shard": ("none",)}),
    ({"allreduce": "blocking", "buffers": "all"}, {"allreduce": "blocking", "buffers": "all"}),
    ({"bucket": "1 MiB", "reserve": 0}, {"bucket_bytes": 2**20, "reserve_bytes": 0}),
    ({"reserve": "50 MB"}, {"reserve_bytes": 50_000_000}),
    ({"optimizer_bytes": "2.5"}, {"optimizer_bytes": 2.5}),
]


@pytest.mark.parametrize(("stated", "held"), FACTS)
def test_facts_replace_those_of_an_engine(stated, held):
    assert with_facts(Engine(), stated) == replace(Engine(), **held)


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ({"waits": "none,1f1b"}, "unknown waits"),
        ({"recompute": "some"}, "unknown recompute"),
        ({"bucket": 0}, "`bucket=0`"),
        ({"optimizer_bytes": -1}, "`optimizer_bytes=-1`"),
        ({"wait": "none"}, "no fact `wait` of an engine"),
    ],
)
def test_facts_that_no_engine_has_are_refused(stated, message):
    with pytest.raises(PartoptError) as refused:
        with_facts(Engine(), stated)
    assert message in refused.value.message


def test_an_option_without_a_flag_of_its_name_is_set_by_others():
    """By `--for`, `--layout` and `--with`; `--calibrate` takes a file for every kind of block."""
    others = {"block_bounds", "trainer", "engine", "facts", "calibrate"}
    assert kinds().keys() - set(FLAGGED) == others
    assert {"target", "calibrate", "facts"} <= options_of("plan").keys()


def test_a_problem_holds_an_option_once_by_its_own_name():
    own, requested = {each.name for each in fields(Problem)}, set(Request.__struct_fields__)
    assert not own & requested
    assert kinds().keys() - own - requested - OF_TRANSFORMERS == BECOME.keys()
    assert requested - kinds().keys() == {"costs", "any_shard"}  # of `cost`; where `shard` is open


@pytest.mark.parametrize("name", sorted(kinds().keys() & set(Request.__struct_fields__)))
def test_a_request_says_what_its_option_may_say(name):
    hints = get_type_hints(Request)[name]
    assert set(kinds()[name].words) == {
        w for each in (hints, *get_args(hints)) for w in words(each)
    }
    unsaid = {"cut_at": None, "recompute": "never", "layout": Layout()}
    assert getattr(Request(), name) == (unsaid[name] if name in unsaid else getattr(Options, name))


def words(hint):
    """The words of a literal type."""
    return [each for each in get_args(hint) if isinstance(each, str)]


def named(function):
    """Names that a function passes on, as keywords or as texts."""
    nodes = list(ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function)))))
    return {node.arg for node in nodes if isinstance(node, ast.keyword)} | {
        node.value for node in nodes if isinstance(node, ast.Constant)
    }


def test_an_option_is_named_in_three_places_at_most():
    """Declared as an option, held by a problem or its request, and recorded by a plan as it is; or
    named by a function that passes options on, from a job to its plan and back.
    """
    places = [set(kinds()), {each.name for each in fields(Problem)}]
    places += [set(Request.__struct_fields__), set(Plan.__struct_fields__)]
    places += [named(Job.problem.func), named(problem_from_plan), named(plan_of)]
    counts = {name: sum(name in place for place in places) for name in kinds()}
    assert {name for name, count in counts.items() if count > 3} == OFTEN.keys()


def test_a_kind_is_read_from_the_type():
    assert kinds()["recompute"][:4] == (("never", "always", "auto"), True, None, True)
    assert kinds()["stages"] == Kind((), True, None, True, kinds()["stages"].flag)
    assert kinds()["cut_at"].items is str and not kinds()["cut_at"].optional
    assert not any(kinds()["memory"][:1]) and not kinds()["memory"].counts
