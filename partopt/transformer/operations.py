"""Operations of a model on a sample, as trainers count them, and the scores of its attention."""

from __future__ import annotations

from partopt.documents.transformer import Kind, Recurrence, Transformer


def taken_parameters(model: Transformer) -> int:
    """Those of the experts of a block that a token takes."""
    return model.experts_per_token * model.matrices * model.expert_inputs * model.expert_ffn


def active_parameters(model: Transformer) -> int:
    """Those that multiply every token: the experts that it takes, and the head."""
    taken = taken_parameters(model)
    inside = (model.dense_parameters(kind) + taken * kind.experts for kind in model.kinds())
    return sum(inside) + model.end_parameters


def model_flops(model: Transformer, sequence: int, document: int = 0) -> float:
    """Operations on a sample, forward and backward, no recomputation.

    6 a parameter and token, and attention over what a causal mask leaves, as Megatron-LM reports it
    (training/training.py, num_floating_point_operations). Tokens attend within a `document`,
    by default the sample.
    """
    seen = sequence * (document or sequence) / (2 if model.causal else 1)
    kinds = [*model.kinds(), *model.further_kinds * model.further]
    mixing = 6 * seen * (model.q + model.values) * sum(kind.attends for kind in kinds)
    if state := model.recurrence:
        flops = 3 * recurrent_flops(state) * sequence
        mixing += flops * sum(kind.is_recurrent for kind in kinds)
    further = model.joining_parameters + model.end_parameters
    for kind in model.further_kinds:
        further += model.dense_parameters(kind) + kind.experts * taken_parameters(model)
    return 6.0 * (active_parameters(model) + model.further * further) * sequence + mixing


def recurrent_flops(state: Recurrence) -> int:
    """Operations of a state on a token, forward, as Megatron-LM counts them there."""
    return (8 if state.rule == "delta" else 7) * state.values * state.keys


def scores(model: Transformer, sequence: int, kind: Kind) -> float:
    """Scores of a head on a sample that attention needs: half of the square where causal."""
    window = keys_seen(model, sequence, kind)
    if window >= sequence:
        return sequence**2 / 2 if model.causal else float(sequence**2)
    if model.chunked:
        return sequence * window / 2
    pairs = window * sequence - window**2 / 2
    return pairs if model.causal else float(sequence**2)


def keys_seen(model: Transformer, sequence: int, kind: Kind) -> int:
    """The most keys that a token attends to: those of a window, or that an indexer takes."""
    if kind.mixer in ("indexed", "sparse") and model.indexer:
        return min(sequence, model.indexer.taken)
    return min(sequence, model.window) if kind.windowed else sequence
