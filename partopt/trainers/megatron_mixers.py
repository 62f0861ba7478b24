"""What mixes tokens beside attention, and patterns of blocks, in the arguments of Megatron-LM."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from partopt.configurations.settings import Settings
from partopt.documents.transformer import LETTERS, Indexer, Recurrence, Transformer

Rule = Literal["states", "delta"]
# fields of a recurrence and of an indexer, by the arguments that say them
_STATES = {
    "mamba_num_heads": "heads",
    "mamba_head_dim": "head_size",
    "mamba_num_groups": "groups",
    "mamba_state_dim": "keys",
}
_DELTAS = {
    "linear_num_value_heads": "heads",
    "linear_value_head_dim": "head_size",
    "linear_num_key_heads": "groups",
    "linear_key_head_dim": "keys",
    "linear_conv_kernel_dim": "kernel",
}
_RECURRENCES: Mapping[Rule, Mapping[str, str]] = {"states": _STATES, "delta": _DELTAS}
_INDEXER = {
    "dsa_indexer_n_heads": "heads",
    "dsa_indexer_head_dim": "head_size",
    "dsa_indexer_topk": "taken",
    "dsa_indexer_topk_freq": "period",
    "dsa_indexer_skip_topk_offset": "first",
}
# what they are where nothing says it (core/transformer/transformer_config.py)
_USUAL = {"mamba_head_dim": 64, "mamba_num_groups": 8, "mamba_state_dim": 128}
_USUAL |= {"linear_num_value_heads": 32, "linear_value_head_dim": 128, "linear_key_head_dim": 128}
_USUAL |= {"linear_num_key_heads": 16, "linear_conv_kernel_dim": 4}
_USUAL |= {"dsa_indexer_topk_freq": 1, "dsa_indexer_skip_topk_offset": 0}
# tokens that kernels do at once, and those of a convolution that no argument says (core/ssm)
_CHUNKS: Mapping[Rule, int] = {"states": 128, "delta": 64}
_KERNEL = 4
PATTERN = "hybrid_layer_pattern"
PATTERNS = (PATTERN, "hybrid_override_pattern")  # newer and older
VARIANT = "experimental_attention_variant"
_DELTA_VARIANTS = ("gated_delta_net", "gdn")
_SPEC = ["megatron.core.models.hybrid.hybrid_layer_specs", "hybrid_stack_spec"]


class Pattern(NamedTuple):
    """Letters of blocks and of those of a further token, how many there are of these, and stages.

    Those are in the letters of a pipeline's layout; none where the pattern does not cut.
    """

    letters: str = ""
    of_further: str = ""
    further: int = 0
    stages: Sequence[str] = ()


def write_mixers(model: Transformer) -> dict[str, Any]:
    """What mixes tokens; a pattern is beside the stages of a pipeline."""
    said: dict[str, Any] = {"attention_output_gate": model.output_gated}
    if state := model.recurrence:
        words = _RECURRENCES[state.rule].items()
        said |= {name: getattr(state, field) for name, field in words}
    if model.pattern:
        return said | {"spec": _SPEC}
    if model.recurrence:
        every = model.full_period or model.blocks + 1
        said |= {VARIANT: _DELTA_VARIANTS[0], "linear_attention_freq": every}
    if indexer := model.indexer:
        said[VARIANT] = "dsa"
        said |= {name: getattr(indexer, field) for name, field in _INDEXER.items()}
    return said


def write_pattern(model: Transformer, counts: Sequence[int]) -> str | None:
    """The letters of blocks, `|` between stages of so many, and behind `/` a further token's."""
    if not model.pattern:
        return None
    bounds = itertools.pairwise(itertools.accumulate(counts, initial=0))
    stages = "|".join(model.pattern[start:stop] for start, stop in bounds)
    return "/".join([stages, *[model.further_pattern or model.pattern[-1]] * model.further])


def unsaid_sizes(model: Transformer) -> str:
    """What of a recurrence is otherwise than it is where no argument says it; nothing if none."""
    state = model.recurrence
    if state and state.chunk != _CHUNKS[state.rule]:
        return f"chunks of {state.chunk} tokens in place of {_CHUNKS[state.rule]}"
    if state and state.rule == "states" and state.kernel != _KERNEL:
        return f"convolutions over {state.kernel} tokens in place of {_KERNEL}"
    return ""


def read_pattern(settings: Settings) -> Pattern:
    """The pattern of blocks that are half of others, in its newer form or in the older one."""
    said = settings.find(*PATTERNS)
    main, *others = said.split("/") if isinstance(said, str) else [""]
    older = settings.find("mtp_hybrid_override_pattern")
    if isinstance(older, str) and not others:
        others = [older] * (settings.count("mtp_num_layers", default=0) or 0)
    letters = {*main, *"".join(others)} - {*LETTERS, "|"}
    if letters or len({*others}) > 1:
        what = (
            f"{settings.show(PATTERN)}: letters that are not planned: {', '.join(sorted(letters))}"
        )
        settings.refuse(what, f"{', '.join(LETTERS)} are", "unsupported-model", path=PATTERN)
        return Pattern()
    stages = ["t" * len(segment) for segment in main.split("|")] if "|" in main else []
    if stages:
        stages[0], stages[-1] = f"E{stages[0]}", f"{stages[-1]}{'m' * len(others)}L"
    return Pattern(main.replace("|", ""), "".join(others[:1]), len(others), stages)


def read_mixers(
    settings: Settings, base: Transformer | None, pattern: Pattern, hidden: int, blocks: int
) -> dict[str, Any]:
    """Fields of a shape: what mixes tokens beside attention, and where."""
    found: dict[str, Any] = {
        "output_gated": bool(settings.has("attention_output_gate") or (base and base.output_gated)),
        "recurrence": base.recurrence if base else None,
        "indexer": base.indexer if base else None,
        "pattern": pattern.letters or (base.pattern if base else ""),
        "further_pattern": pattern.of_further or (base.further_pattern if base else ""),
    }
    variant = settings.find(VARIANT)
    rules: list[Rule] = ["states"] * ("M" in pattern.letters)
    rules += ["delta"] * ("G" in pattern.letters or variant in _DELTA_VARIANTS)
    for rule in rules[:1]:
        usual = _USUAL | {"mamba_num_heads": 2 * hidden // _USUAL["mamba_head_dim"]}
        sizes = _sizes(settings, _RECURRENCES[rule], usual)
        found["recurrence"] = Recurrence(rule=rule, **{"chunk": _CHUNKS[rule], **sizes})
    if variant in _DELTA_VARIANTS:
        every = settings.count("linear_attention_freq") or 1
        found["full_period"] = every if every <= blocks else 0
    elif variant == "dsa":
        sizes = _sizes(settings, _INDEXER, _USUAL)
        sizes["first"] = max(1, sizes["first"]) if sizes["period"] > 1 else 0
        found["indexer"] = Indexer(**sizes)
    elif variant is not None:
        what = f"{settings.show(VARIANT)}: {variant}: not planned"
        hint = f"{', '.join((*_DELTA_VARIANTS, 'dsa'))} are"
        settings.refuse(what, hint, "unsupported-model")
    return found


def _sizes(
    settings: Settings, words: Mapping[str, str], usual: Mapping[str, int]
) -> dict[str, int]:
    """Numbers by field, at least 1 but for what may be none."""
    counts = {field: settings.count(name, default=usual.get(name)) for name, field in words.items()}
    return {
        field: count if field == "first" else count or 1
        for field, count in counts.items()
        if count is not None
    }


def find_other_blocks(settings: Settings, others: re.Pattern[str]) -> Iterator[str]:
    """Arguments that are of other blocks than attention, where none says of which."""
    if settings.has(*PATTERNS, VARIANT):
        return
    if settings.has("spec") and others.search(str(settings.find("spec"))):
        yield "spec"
    yield from filter(settings.has, ("linear_attention_freq", *_STATES))
