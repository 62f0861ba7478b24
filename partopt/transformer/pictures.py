"""What reads pictures before the first stage: a tower of blocks (Dosovitskiy et al., 2021).

Every rank of the first stage has it whole and reads all pictures of its samples, as it does where a
trainer takes it from Hugging Face (modelscope/mcore-bridge, model/mm_gpt_model.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from partopt.documents.transformer import Format, Practice, Tower, Transformer
from partopt.transformer.rates import Rates, Seconds


@dataclass(frozen=True)
class Pictures:
    """A tower, and what a training does with it; products are in the format `wide`."""

    tower: Tower
    model: Transformer
    practice: Practice
    rates: Rates
    wide: Format

    @property
    def trained_parameters(self) -> int:
        """Its parameters, where they are trained."""
        return self.tower.parameters if self.practice.tower_trained else 0

    def patches(self, samples: float) -> float:
        """Those of a microbatch."""
        return samples * self.practice.images * self.tower.merged

    def seconds(self, samples: float, again: bool) -> Seconds:
        """Those of a microbatch: the forward alone where it is not trained.

        Trained blocks may be made `again`.
        """
        tower, passes, L = self.tower, self.practice.passes, self.tower.blocks
        T, h, f, out = self.patches(samples), tower.hidden, tower.ffn, self.model.hidden
        up = (tower.matrices - 1) * f
        every = [
            (L, self._attention_s(T)),
            *((L, self._product_s(T, n, k)) for n, k in ((3 * h, h), (h, h), (up, h), (h, f))),
            (1, self._product_s(T, h, tower.patch)),
            (1, self._product_s(T / tower.merged, out, tower.aligner / out)),
        ]
        inside = passes.gated if tower.gated else passes.plain
        passed = (h * (passes.norms[i] + passes.residuals[i]) + f * inside[i] for i in (0, 1))
        every.append((L, Seconds(*(self.rates.passes_s(T * size) for size in passed))))
        forward_s, backward_s = (sum(n * one[way] for n, one in every) for way in (0, 1))
        return Seconds(forward_s, (backward_s + again * forward_s) * bool(self.trained_parameters))

    def _product_s(self, rows: float, n: float, k: float) -> Seconds:
        return self.rates.linear_s(rows, n, k, self.wide)

    def _attention_s(self, patches: float) -> Seconds:
        """Of a block in the mean, whose patches see a picture, or a window of it."""
        h, seen = self.tower.hidden, self.tower.seen(self.practice.images)
        if self.practice.scores is None:
            return self.rates.attention_s(self.practice.attention, 4 * patches * seen * h, seen)
        both_s = self.rates.product_s(patches, seen, h) + self.rates.product_s(patches, h, seen)
        return Seconds(both_s, 2 * both_s)

    def kept_bytes(self, samples: float, again: bool) -> float:
        """Bytes that it keeps of a microbatch where it is trained, in 16 bits.

        Of a block that is made `again` the input; else inputs of norms and products, queries, keys
        and values, and what is before and behind the activation.
        """
        tower = self.tower
        inside = 1.0 if again else 8 + tower.matrices * tower.ffn / tower.hidden
        size = 2 * self.patches(samples) * tower.hidden * tower.blocks * inside
        return size * bool(self.trained_parameters)
