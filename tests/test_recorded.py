"""What documents say of themselves, property by property: what it was is what it is.

`tests/golden/properties.jsonl` holds, a line a document, what the properties of all its parts add
up to. Whoever changes one on purpose runs `pytest tests/test_recorded.py --update`, and says why.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

import partopt as po
from partopt.documents.device import shipped_device
from partopt.documents.files import shipped_names
from partopt.documents.transformer import Transformer
from partopt.importers.hugging_face import load_transformer
from partopt.transformer.operations import active_parameters, taken_parameters
from tests.golden.jobs import JOBS, plan_by_hand
from tests.golden.records import condensed, record_test
from tests.helpers import ROOT
from tests.report.pictures import cases
from tests.report.test_documents import flows, laid, machine, tried


def verified() -> msgspec.Struct:
    profile, topology, options, *_ = JOBS["1f1b"]
    plan = po.solve(po.Job(profile, topology, planner="gpipe", **options)).plan
    return po.verify(msgspec.structs.replace(plan, noam=plan.noam + 1), profile)


DOCUMENTS: dict[str, Callable[[], Any]] = {
    **{f"plan {name}": lambda name=name: plan_by_hand(name) for name in JOBS},
    **{f"profile {name}": lambda name=name: JOBS[name][0] for name in ("1f1b", "of a bus")},
    **{
        f"simulation {name}": lambda name=name: po.simulate(plan_by_hand(name)).document
        for name in ("1f1b", "asynchronous", "of shares")
    },
    **{
        f"topology {name}": lambda name=name: po.Topology.load(name)
        for name in shipped_names("topologies")
    },
    **{
        f"model {name}": lambda name=name: load_transformer(name)
        for name in shipped_names("models")
    },
    **{
        f"device {name}": lambda name=name: shipped_device(name)[1]
        for name in ("H100-80GB", "A100")
    },
    "comparison": lambda: cases.comparison(5),
    "scaling": lambda: cases.scaling([1, 8, 32]),
    "run": lambda: cases.run(3),
    "trial": lambda: tried("interleaved", stages=2, microbatches=4),
    "flows": flows,
    "layout": laid,
    "machine": machine,
    "verification": verified,
}


def properties(document: object) -> dict[str, list[object]]:
    """The values of all properties of a document and its parts, by class and name.

    Of a transformer also what its room counts.
    """
    found = defaultdict[str, list[object]](list)
    for part in parts(document):
        for name, own in inspect.getmembers(type(part)):
            if isinstance(own, property | cached_property) and not name.startswith("_"):
                found[f"{type(part).__name__}.{name}"].append(getattr(part, name))
        if isinstance(part, Transformer):
            for count in (active_parameters, taken_parameters):
                found[f"Transformer.{count.__name__}"].append(count(part))
    return found


def parts(value: object) -> Iterator[msgspec.Struct]:
    if isinstance(value, msgspec.Struct):
        yield value
        for name in value.__struct_fields__:
            yield from parts(getattr(value, name))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from parts(each)
    elif isinstance(value, dict):
        for each in value.values():
            yield from parts(each)


def plain(value: object) -> object:
    """A value in terms of JSON."""
    return msgspec.to_builtins(value, enc_hook=as_list, str_keys=True)


def as_list(value: object) -> object:
    return str(value) if isinstance(value, Path) else list(value)  # type: ignore[call-overload]


def found_of(name: str) -> dict[str, object]:
    return condensed(plain(properties(DOCUMENTS[name]())))


test_a_document_says_what_it_said = record_test(
    ROOT / "tests/golden/properties.jsonl", DOCUMENTS, found_of
)
