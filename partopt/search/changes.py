"""What of a person's configuration is changed so that it says another plan, in its own text."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from partopt.configurations.edits import apply_edits, find_edits
from partopt.configurations.marks import show_marks, unknown_names
from partopt.configurations.settings import Settings, convert, read_settings
from partopt.documents.plan import Plan
from partopt.errors import PartoptError
from partopt.trainers import TRAINERS
from partopt.trainers.parts import find_parts
from partopt.trainers.read_back import Losses, find_losses
from partopt.trainers.trainer import Trainer

# names that the text does not say, and the plan had otherwise: none, those of options, all
_FURTHER = ("^$", "batch|tokens|seq_len|16", "")
_LETTERS = 40  # of a value that is shown
# beside which others are put, of a trainer's layout and then of its model
_BESIDE = (
    *("training", "pipeline_model_parallel_size", "tensor_model_parallel_size", "micro_batch_size"),
    *("local_batch_size", "tensor_parallel_degree", "seq_length", "seq_len", "num_layers"),
    *("global_batch_size", "hidden_size", "batch_size"),
)


@dataclass(frozen=True)
class Changes:
    """The `text` of a configuration that says a plan, and what is changed in it.

    `rows` are names of settings as the text has them, their values before, and the new ones; those
    `by_hand` are rows that it could not be changed in. With all of them it `says_all` of the plan.
    """

    text: str
    rows: tuple[tuple[str, str, str], ...] = ()
    by_hand: tuple[tuple[str, str, str], ...] = ()
    says_all: bool = True

    def describe(self) -> list[str]:
        """A line for every change."""
        lines = [f"{name}  {old} -> {new}" for name, old, new in self.rows]
        lines += [f"{name}  {old} -> {new}, by hand" for name, old, new in self.by_hand]
        return lines + ["and more: an export of the plan says all"] * (not self.says_all)

    def mark_lines(self, before: str) -> str:
        """The text with a comment: which lines are others than `before`, and what is changed."""
        if self.text.lstrip().startswith("{") or not self.rows:  # JSON has none
            return self.text
        said = [" ".join(line.split()) for line in self.describe()]
        matcher = difflib.SequenceMatcher(
            None, before.splitlines(), self.text.splitlines(), autojunk=False
        )
        blocks = [block for block in matcher.get_opcodes() if block[0] != "equal"]
        lines = [str(k + len(said) + 2) for *_, start, stop in blocks for k in range(start, stop)]
        head = [f"changed by partopt, lines {', '.join(lines)}:", *said]
        first = self.text.partition("\n")[0] + "\n" if self.text.startswith("#!") else ""
        return first + "".join(f"# {line}\n" for line in head) + self.text[len(first) :]


def change_text(
    text: str,
    yours: Plan,
    best: Plan,
    arguments: Mapping[str, str] | None = None,
    function: str | None = None,
    folder: Path | None = None,
) -> Changes:
    """The configuration of the plan `yours`, changed so that it says the plan `best`.

    Its lines stay, but for values that differ, which are set where they stand; `arguments`,
    `function` and `folder` are those with which it is read. Every change is made sure of by reading
    it again. What an argument says is changed there, by hand.
    """
    given = {name.replace("-", "_"): value for name, value in (arguments or {}).items()}
    read_given = partial(read_settings, function=function, folder=folder)
    read = partial(read_given, given=given)
    settings, trainer = read(text), TRAINERS.lookup(best.trainer)
    if not trainer.words:
        return Changes(text, says_all=False)
    before = _find_losses(yours, trainer, settings)
    said, words = (
        {next(iter(group)): group for group in trainer.words(plan, settings)}
        for plan in (yours, best)
    )
    wanted = dict[str, object]()
    for first in dict.fromkeys([*said, *words]):
        old, new = said.get(first, {}), words.get(first, {})
        if old != new:
            names = dict.fromkeys([*old, *new])
            differ = (
                n for n in names if new.get(n) != old.get(n) or _find_names(settings, n, given)
            )
            wanted |= {name: new.get(name) for name in differ}
    named = {name: value for new in words.values() for name, value in new.items()}
    wanted |= {  # which options said in place of the text
        name: value
        for name, value in named.items()
        for spelled in _find_names(settings, name, given)
        if unknown_names(str(settings.value(spelled)))
    }
    attempts = list[Changes]()
    for further in _FURTHER:
        wanted |= {name: value for name, value in named.items() if re.search(further, name)}
        attempts.append(_set(settings, wanted, read, given))
        ends = {name.rpartition(".")[2]: str(value) for name, value in wanted.items()}
        changed = given | {name: ends[name] for name in given.keys() & ends}
        if _is_of(best, trainer, read_given(attempts[-1].text, changed), before):
            return attempts[-1]
    return replace(attempts[0 if attempts[0].by_hand else -1], says_all=False)


def _find_losses(plan: Plan, trainer: Trainer, settings: Settings) -> Losses:
    parts = find_parts([name for stage in plan.stages for name in stage.modules])
    return find_losses(plan, trainer, parts, settings)


def _is_of(plan: Plan, trainer: Trainer, settings: Settings, before: Losses) -> bool:
    """Whether a text says a plan, as far as the one before said its plan.

    A vocabulary is filled up for tensor parallel ranks.
    """
    lost = _find_losses(plan, trainer, settings)
    faults = [fault for fault in lost.faults if not fault.startswith("`vocabulary`")]
    return not faults and {*lost.notes} <= {*before.notes}


def _find_names(settings: Settings, name: str, given: Collection[str]) -> list[str]:
    """The names by which a text has a setting; a path that it has is it alone.

    One that is `given` as an argument comes before those.
    """
    end = name.rpartition(".")[2]
    names = [name] if settings.states(name) and end not in given else [end]
    names += [other for one in names for other in settings.synonyms.get(one, ())]
    return [name for name in dict.fromkeys(names) if settings.states(name)][:2]


def _set(
    settings: Settings,
    wanted: Mapping[str, object],
    read: Callable[[str], Settings],
    given: Collection[str],
) -> Changes:
    """The text of settings with the wanted values, those that differ, one after the other."""
    rows, by_hand = list[tuple[str, str, str]](), list[tuple[str, str, str]]()
    synonyms, before, lacks = settings.synonyms, settings, settings.lacks
    for name, value in wanted.items():
        for spelled in _find_names(settings, name, given) or [name]:
            if _says(settings, spelled, value):
                continue
            row = settings.show(spelled), _show(before.value(spelled)), _show(value)
            for edits in () if name in lacks else find_edits(settings, spelled, value, _BESIDE):
                try:
                    changed = read(apply_edits(settings.text, edits))
                except PartoptError:  # as of a text that bash would refuse
                    continue
                says = edits and _says(changed, spelled, value)
                if says and _keeps(settings, changed, wanted, given):
                    settings, settings.synonyms = changed, synonyms
                    rows.append((settings.show(spelled), *row[1:]))
                    break
            else:
                by_hand.append(row)
    return Changes(settings.text, tuple(rows), tuple(by_hand))


def _says(settings: Settings, name: str, value: object) -> bool:
    """Whether a text gives a setting a value; none where that is None or False."""
    said = settings.value(name)
    if value in (None, False) or not settings.states(name):
        return said in (None, False) and value in (None, False)
    if isinstance(said, list) and not isinstance(value, list):
        return False
    words, others = (
        [str(word) for word in (one if isinstance(one, list | tuple) else [one])]
        for one in (said, value)
    )
    as_written = [word.strip("'\"").removesuffix("()") for word in others]
    return [word.strip("'\"") for word in words] == as_written or said == convert(str(value))


def _keeps(
    settings: Settings, changed: Settings, wanted: Iterable[str], given: Collection[str]
) -> bool:
    """Whether the settings that are not wanted otherwise have the values that they had.

    What a document computes from others follows these.
    """
    names = {spelled for name in wanted for spelled in _find_names(settings, name, given)} | {
        *wanted
    }
    kept = settings.values.keys() - settings.variables
    return all(
        settings.values[name] == changed.values.get(name)
        for name in kept
        if not any(f".{other}." in f".{name}." for other in names)  # it, or what is inside it
        and not isinstance(settings.values[name], dict)
        and not re.search(rf"^\W*{re.escape(name.rpartition('.')[2])}:.*\$\{{", settings.text, re.M)
    )


def _show(value: object) -> str:
    """A setting in few letters; `-` where there is none."""
    words = [str(word) for word in value] if isinstance(value, list) else [str(value)]
    text = "-" if value in (None, False) else show_marks(" ".join(words))
    return text if len(text) <= _LETTERS else f"{text[: _LETTERS - 2]}.."
