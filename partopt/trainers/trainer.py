"""What a trainer is: what it can say of a plan, what its engine does, and what it writes and reads.

Everything that is known of a trainer is in one `Trainer`, in a file of it, and every fact has its
source. The rest of the program asks the object and compares no names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, NamedTuple

from msgspec.structs import replace

from partopt.configurations.settings import Settings
from partopt.documents.engine import STATE, Engine, Layout
from partopt.documents.files import check_writable, write_bytes
from partopt.documents.plan import Plan
from partopt.documents.transformer import ADAPTED, BITS, OFFLOADED, Format, Practice, Transformer
from partopt.errors import did_you_mean, invalid, unknown, unknown_value
from partopt.options import FACTS, with_facts
from partopt.trainers.parts import Part

# Where a trainer may begin a stage.
ANYWHERE: Final = "anywhere"  # with any layer
PARTS: Final = "parts"  # with a block, the final norm or the head; embedding and blocks stay whole
HEADS: Final = "heads"  # with a block or the head, of which the final norm is a part
BLOCKS: Final = "blocks"  # with a block, so that no stage is without one

# what of a practice may have other values than are listed: their pattern, a type, an example
_OPEN: dict[str, tuple[str, type[str] | type[int], str]] = {
    # blocks of every stage, m of further tokens
    "ends": (r"[0-9]{1,4}m?(-[0-9]{1,4}m?){1,999}", str, "17-20-22-21"),
    "documents": (r"[1-9][0-9]{0,6}", int, "256"),
    "images": (r"[1-9][0-9]{0,6}", int, "1024"),  # tokens of a sample
}
# what of a practice may be several of some names, joined by +
_LISTED = {"offload": ("offload", OFFLOADED), "lora-targets": ("adapted", ADAPTED)}

Cuts = Literal["anywhere", "parts", "heads", "blocks"]
Order = Literal["stages", "pipelines"]  # ranks next to each other are those of a stage, a pipeline


@dataclass(frozen=True, kw_only=True)
class Says:
    """What the configuration of a trainer can say of a plan.

    `cuts` is where a stage may begin, `replicas` which numbers of them stages may have,
    `recomputed` whether all stages or none recompute, as many first blocks of each, or each as the
    plan says. `orders` are those of ranks; none where ranks do not matter. `degrees` are what it
    has beside the pipeline, and what each must divide; devices may be groups of ranks where it has
    "tp", more than heads of keys where it `repeats_keys`; with "cp" those of recurrences, too,
    where it `spreads_recurrences`. With `ties` stages may part layers that share parameters;
    `least_stages` make a pipeline; `formats` are those of a transformer's products.
    """

    cuts: Cuts = ANYWHERE
    replicas: Literal["one", "equal", "any"] = "equal"
    recomputed: Literal["all", "first", "each"] = "all"
    orders: Sequence[Order] = ("stages", "pipelines")
    degrees: Mapping[str, str] = field(default_factory=dict)
    repeats_keys: bool = False
    spreads_recurrences: bool = True
    ties: bool = True
    least_stages: int = 1
    formats: Sequence[Format] = tuple(BITS)


@dataclass(frozen=True)
class Text:
    """What is written for a trainer: `main`, and files that lie beside it, by what they end in."""

    main: str
    beside: Mapping[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()  # what a person has to know beside the text

    def save(self, path: str, force: bool = False) -> list[str]:
        """Write `main` to `path` and the others beside it; the names of the files.

        Raises PartoptError, and writes nothing, where a file exists and is not to be replaced, or
        cannot be written.
        """
        files = {path: self.main}
        for suffix, content in self.beside.items():
            files[str(Path(path).with_suffix(suffix))] = content
        for name in files:
            check_writable(name, force)
        for name, content in files.items():
            write_bytes(name, content.encode(), force)
        return list(files)


@dataclass(frozen=True, kw_only=True)
class Stated:
    """What a configuration says of a training.

    `layout` are the parts that it says, `batch` samples an iteration, `facts` those of the trainer
    that are not its defaults, as `--with` names them; `notes` tell what is taken otherwise than it
    says. On a profile `cuts` are the first layers of all stages but the first, None where only
    their order is in the text. A text that is the order of a schedule has `stages` and
    `microbatches` of a pipeline, and `warmups` where they are not the schedule's usual ones.

    Without a profile there is a `model`, trained on a `sequence` in a `format`, and the layout has
    all parts but `dp` and `schedule`; `blocks` are those of stages where the text says them, and
    `further_stage` is the one that predicts further tokens, by default the last.
    """

    layout: Layout = field(default_factory=Layout)
    batch: int | None = None
    facts: Mapping[str, object] = field(default_factory=dict)
    notes: Sequence[str] = ()
    cuts: Sequence[int] | None = None
    stages: int | None = None
    microbatches: int | None = None
    warmups: Sequence[int] | None = None
    model: Transformer | None = None
    sequence: int = 1
    format: Format = "bfloat16"
    blocks: Sequence[int] | None = None
    further_stage: int | None = None


class Lever(NamedTuple):
    """A switch of a trainer that is off by default and may make training faster.

    `flag` is what people write; it is the last of the `facts`, and the others are those without
    which it is refused or does nothing. It `needs` several tensor or expert parallel ranks, and
    servers of more devices than `beyond`; of those of one fact the first that is open is tried.
    With it training computes other numbers where it `changes_numbers`; it is `verified` where
    published runs that differ in it alone say what it is worth. What `frees` memory makes a layout
    no faster: it helps where another one fits with it. Its last fact may have one of several
    `values`, from the one that frees least: a layout takes the first with which it fits, which
    stands where the flag has {}.
    """

    facts: tuple[tuple[str, str], ...]
    flag: str
    needs: Literal["", "tp", "ep"] = ""
    beyond: int = 0
    changes_numbers: bool = False
    verified: bool = False
    frees: bool = False
    values: tuple[str, ...] = ()

    def at(self, value: str) -> Lever:
        """The switch with one of its values."""
        facts = (*self.facts[:-1], (self.facts[-1][0], value))
        return self._replace(facts=facts, flag=self.flag.format(value), values=())


@dataclass(frozen=True)
class Asked:
    """What a text is read for: a layout of a profile's `layers`, or a training on `devices`.

    `parts` say what each layer is, where `cuts` of what the trainer says asks for it.
    """

    layers: Sequence[str] = ()
    parts: Sequence[Part] = ()
    devices: int = 0


Write = Callable[[Plan, Sequence[Part], str], Text]
Read = Callable[[Settings, Asked], Stated]
Words = Callable[[Plan, Settings], Sequence[Mapping[str, object]]]


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """A trainer, as far as plans ask for it.

    `tried` is the version that texts were checked with. `schedules` has the trainer's names for
    schedules that it runs, the first by default, and None where it is told the order; it is None
    for a trainer that runs whatever a plan has. Warm-ups are those of the schedules. `practice` is
    how it runs a transformer by default, None where that is not known; `choices` are what its
    options change of that, by their names and values. `levers` are those that may be worth it, and
    `recipes` the facts that its authors set, by the name of the recipe and the model. `sources` has
    one for every fact of `engine`, of `practice`, and for what `says` needs; sources.yaml has those
    of shipped trainers.

    `write(plan, parts, stem)` makes the text in a file that ends in `suffix`; `parts` say what each
    layer is, where `says.cuts` asks for it; `stem` names the file without its ending, for files
    that name each other. It `trains`, or runs forwards alone. `faults` finds what else it cannot
    say of a plan. `read(settings, asked)` reads a text, of which `reads` and `example` tell what it
    is: layouts of profiles, and with a `practice` all of a transformer's training. Of its plan
    `words(plan, settings)` are the settings by which people say it, as those of a text have it;
    what is said together is in one mapping, and None is not said.
    """

    name: str
    summary: str
    tried: str
    schedules: Mapping[str, str | None] | None
    says: Says
    engine: Engine
    sources: Mapping[str, str]
    practice: Practice | None = None
    choices: Mapping[str, Mapping[str, Mapping[str, object]]] = field(default_factory=dict)
    levers: Sequence[Lever] = ()
    recipes: Mapping[str, Mapping[str, Mapping[str, str]]] = field(default_factory=dict)
    write: Write | None = None
    suffix: str = ""
    trains: bool = True
    faults: Callable[[Plan], Sequence[str]] = lambda plan: ()
    read: Read | None = None
    words: Words | None = None
    reads: str = ""
    example: str = ""

    def run_with(self, facts: Mapping[str, object]) -> tuple[Practice, Engine]:
        """How it runs a transformer, which it has to know, with some of the facts replaced.

        PartoptError for unknown facts and values.
        """
        assert self.practice
        practice, rest = self.practice, dict[str, object]()
        for name, value in facts.items():
            choice = self.choices.get(dashed := name.replace("_", "-"))
            if choice is None and name not in {*FACTS, *Engine.__struct_fields__}:
                what, known = f"no fact `{name}` of {self.name}", [*self.choices, *FACTS]
                raise unknown(what, name, known, code="unknown-fact")
            if choice is None:
                rest[name] = value
            elif dashed in _OPEN and re.fullmatch(_OPEN[dashed][0], str(value)):
                practice = replace(practice, **{dashed: _OPEN[dashed][1](str(value))})
            elif dashed in _LISTED and {*str(value).split("+")} <= {*_LISTED[dashed][1]}:
                field, listed = _LISTED[dashed]
                names = [one for one in listed if one in str(value).split("+")]
                practice = replace(practice, **{field: "+".join(names)})
            elif str(value) not in choice:
                names = [*choice]  # of numbers none is meant that is spelled alike
                hint = did_you_mean(str(value), [*names, *_OPEN.get(dashed, ("", str))[2:]])
                if names[0].isdecimal():
                    hint = f"from {names[0]} to {names[-1]}, as {names[1]}"
                raise invalid(dashed, value, f"unknown {dashed}", hint)
            else:
                practice = replace(practice, **choice[str(value)])
        if practice.tp_overlap == "async" and not practice.compiled:
            what = "only compiled products are split"
            raise invalid("async-tp", "yes", what, "add `compile=yes`")
        if practice.tp_overlap == "buffers" and not practice.sequence_parallel:
            what = "only sequence parallel exchanges are overlapped"
            raise invalid("tp-overlap", "yes", what, "leave `sequence-parallel=no` out")
        if practice.dispatch != "alltoall" and practice.routing == "capacity":
            what, hint = "its tokens are not padded to a capacity", "leave `routing=capacity` out"
            raise invalid("exchange", practice.dispatch, what, hint)
        engine, offloaded = with_facts(self.engine, rest), practice.optimizer_offload
        if offloaded and (practice.muon or engine.optimizer_bytes not in (None, STATE)):
            what = "the host steps Adam alone, with its state in float32"
            hint = f"leave `{'muon' if practice.muon else 'optimizer_bytes'}` out"
            raise invalid("optimizer-offload", f"{offloaded:g}", what, hint)
        if practice.fsdp and practice.muon:
            raise invalid("fsdp", "yes", "its shares are stepped by Adam alone", "leave `muon` out")
        if practice.adapters and (practice.fsdp or practice.muon):
            what = "adapters are stepped by Adam, and parameters do not lie in shares"
            hint = f"leave `{'fsdp' if practice.fsdp else 'muon'}` out"
            raise invalid("lora", practice.adapters, what, hint)
        if practice.images and (practice.fsdp or practice.tower_trained * practice.adapters):
            what = "its tower is not planned in shares, nor trained beside adapters"
            hint = f"leave `{'fsdp' if practice.fsdp else 'tower'}` out"
            raise invalid("images", practice.images, what, hint)
        if practice.fsdp:
            engine = replace(engine, shard=(*engine.shard, "gradients", "parameters"))
        return practice, engine

    def spell_recipe(self, facts: Mapping[str, object], model: str) -> dict[str, object]:
        """The facts, with those of a `recipe` among them written out, before which others go.

        PartoptError where the trainer has no such recipe of the model.
        """
        if (name := facts.get("recipe")) is None:
            return dict(facts)
        recipes = {recipe for recipe, models in self.recipes.items() if model in models}
        if not recipes:
            able = [other for models in self.recipes.values() for other in models]
            hint = f"it has some of {', '.join(dict.fromkeys(able))}" if able else "leave it out"
            raise invalid("recipe", name, f"{self.name} has no recipe of {model}", hint)
        if name not in recipes:
            raise unknown_value("recipe", name, recipes)
        stated = {fact.replace("_", "-") for fact in facts}
        of_recipe = self.recipes[str(name)][model].items()
        added = {fact: value for fact, value in of_recipe if fact not in stated}
        return added | {fact: value for fact, value in facts.items() if fact != "recipe"}


def plain(name: str) -> str:
    """A name from a file as a comment or a docstring may have it."""
    return re.sub(r"[^\w .,:/+-]", "_", name, flags=re.ASCII)


def arguments_text(model: str, callee: str, arguments: Mapping[str, object]) -> str:
    """A Python file whose `ARGUMENTS` are those of the pipeline of `model` for `callee`."""
    body = "".join(f"    {name}={value!r},\n" for name, value in arguments.items())
    head = f'"""The pipeline of {plain(model)}: arguments of {callee}."""\n'
    return f"{head}\nARGUMENTS = dict(\n{body})\n"


def pipeline_size(plan: Plan) -> int:
    """P, the devices of a pipeline of the plan."""
    return plan.layout.pp or 1


def batch_of(plan: Plan) -> int:
    """Samples of an iteration."""
    return plan.microbatch_size * (plan.microbatches or 1)


def rank_order(plan: Plan) -> list[Order]:
    """The orders in which a mesh of devices has the plan's ranks, equal replicas of every stage.

    Next to each other are those of a stage, of a pipeline, or both where there is one of either.
    """
    held = list(dict.fromkeys(tuple(stage.ranks) for stage in plan.stages))
    P, d = len(held), plan.stages[0].replicas
    found: list[Order] = []
    if held == [tuple(range(p * d, p * d + d)) for p in range(P)]:
        found.append("stages")
    if held == [tuple(range(p, P * d, P)) for p in range(P)]:
        found.append("pipelines")
    return found
