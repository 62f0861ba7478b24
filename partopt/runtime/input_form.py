"""What the inputs of all microbatches have in common, so that one graph can run them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from partopt.errors import ANSWER_IS_NO, PartoptError
from partopt.profiler.step import Inputs, tensors_in


class InputForm:
    """The structure of a microbatch's inputs, the forms of its tensors, and all that is no tensor.

    Raises PartoptError for inputs with tensors in an object that is no tuple, list or mapping.
    """

    def __init__(self, inputs: Inputs) -> None:
        leaves, self._spec = tree_flatten(inputs)
        self._leaves = [_form(each) for each in leaves]
        for leaf in leaves:
            if not isinstance(leaf, Tensor) and tensors_in(leaf):
                raise PartoptError(
                    f"the inputs hold tensors in a {type(leaf).__name__}, where torch.export sees "
                    "none",
                    "give them in tuples and mappings",
                    code="cannot-export",
                )

    def tensors(self, inputs: Inputs) -> list[Tensor]:
        """The tensors of a microbatch's inputs; PartoptError where their form is another one."""
        leaves, spec = tree_flatten(inputs)
        if spec != self._spec or [_form(each) for each in leaves] != self._leaves:
            raise PartoptError(
                "a microbatch has inputs of another form than the one that torch.export traced",
                "give every microbatch tensors of the same shapes, and the same values beside them",
                ANSWER_IS_NO,
                code="calls-vary",
            )
        return [each for each in leaves if isinstance(each, Tensor)]

    def fill(self, tensors: Sequence[Tensor]) -> Any:
        """Inputs of this form with these tensors."""
        given = iter(tensors)
        return tree_unflatten(
            [next(given) if isinstance(each, _Form) else each for each in self._leaves], self._spec
        )


class _Form(tuple[Any, ...]):
    """Shape, number format and place of a tensor."""


def _form(leaf: Any) -> Any:
    return _Form((leaf.shape, leaf.dtype, leaf.device)) if isinstance(leaf, Tensor) else leaf
