"""Operations of a model on a sample, as trainers count them, and the scores of its attention."""

from __future__ import annotations

from partopt.documents.transformer import Kind, Transformer


def taken_parameters(model: Transformer) -> int:
    """Those of the experts of a block that a token takes."""
    return model.experts_per_token * model.matrices * model.hidden * model.expert_ffn


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
    attention = 6 * seen * (model.q + model.values) * (model.blocks + model.further)
    last = model.kinds()[-1]  # of this kind are blocks of further tokens, with a head
    further = model.dense_parameters(last) + model.joining_parameters + model.end_parameters
    further += last.experts * taken_parameters(model)
    return 6.0 * (active_parameters(model) + model.further * further) * sequence + attention


def scores(model: Transformer, sequence: int, kind: Kind) -> float:
    """Scores of a head on a sample that attention needs: half of the square where causal."""
    if not kind.windowed or model.window >= sequence:
        return sequence**2 / 2 if model.causal else float(sequence**2)
    if model.chunked:
        return sequence * model.window / 2
    pairs = model.window * sequence - model.window**2 / 2
    return pairs if model.causal else float(sequence**2)
