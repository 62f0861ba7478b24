"""Models without their weights: parameters with a shape, a number format and a device, no memory.

A fake parameter (torch's FakeTensor) goes through every operation and shows what comes out of it,
apart from values. Buffers stay real: rotary frequencies, tables and counters are small, and code
reads their values.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from partopt.errors import PartoptError
from partopt.profiler.tensors import local_tensors

# Elements from which random numbers are not drawn while a model is built: whoever fills a tensor
# as large as that with them initialises a weight, whose values do not matter.
LARGE = 2**20
_FLASH_HEAD = 256  # the largest head of the flash kernel
_HALVES = (torch.bfloat16, torch.float16)


def fake_mode() -> FakeTensorMode:
    """The mode that the parameters of one model belong to; real buffers may mix with them."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def is_fake(tensor: Tensor) -> bool:
    """Whether the tensor has no memory, nor has the shard of a DTensor."""
    return all(isinstance(part, FakeTensor) for part in local_tensors(tensor))


# --- building -------------------------------------------------------------------------------------


def build_weightless(build: Callable[[], nn.Module]) -> nn.Module:
    """The model without its weights, or with them where its build needs their values."""
    before = RandomNumbers()
    try:
        with build_without_weights(fake_mode()):
            return build()
    except Exception:  # whatever it is, an ordinary build fails of it too, or not
        before.restore()
        return build()


@contextlib.contextmanager
def build_without_weights(mode: FakeTensorMode) -> Iterator[None]:
    """What registers parameters in this context gets fake ones, and nothing is initialised."""
    register = nn.Module.register_parameter
    convert: Any = nn.Module._apply
    # by the parameter itself: one that two modules register is one parameter
    fakes = WeakTensorKeyDictionary()

    def register_fake(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None and not is_fake(parameter) and not is_lazy(parameter):
            if parameter not in fakes:
                fakes[parameter] = fake_parameter(mode, parameter)
            module._parameters[name] = fakes[parameter]

    def convert_fake(module: nn.Module, function: Any, recurse: bool = True) -> nn.Module:
        # as `module.to` calls it: torch swaps fakes in place, and fails where modes refer to them
        @memoize
        def convert_one(parameter: Tensor) -> Tensor:
            with torch.no_grad():
                return nn.Parameter(function(parameter), requires_grad=parameter.requires_grad)

        inner = list(module.modules()) if recurse else [module]
        slots = [slot for slot in _slots(inner) if is_fake(slot[2])]
        for holder, name, _ in slots:
            holder._parameters[name] = None
        convert(module, function, recurse)
        for holder, name, parameter in slots:
            setattr(holder, name, convert_one(parameter))
        return module

    building = True

    def once_built(initialise: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """The function, for modules that are imported now and keep it; now it does nothing."""

        @functools.wraps(initialise)
        def call(tensor: Tensor, *arguments: Any, **options: Any) -> Tensor:
            return tensor if building else initialise(tensor, *arguments, **options)

        return call

    with contextlib.ExitStack() as stack:
        stack.enter_context(replace_attribute(nn.Module, "register_parameter", register_fake))
        stack.enter_context(replace_attribute(nn.Module, "_apply", convert_fake))
        # `torch.nn.init` would read values of fakes, or touch every page
        for name, function in list(vars(nn.init).items()):
            if name.endswith("_") and not name.startswith("_") and callable(function):
                stack.enter_context(replace_attribute(nn.init, name, once_built(function)))
        stack.enter_context(_LargeRandomNumbersAreFake(mode))
        try:
            yield
        finally:
            building = False


class _LargeRandomNumbersAreFake(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Draws no random numbers for large tensors.

    A tensor that they would fill in place is left as it is, one that they would make is fake.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.mode = mode

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the operation, unless it draws many random numbers."""
        options = kwargs or {}
        given = [value for value in args if isinstance(value, Tensor)]
        if torch.Tag.nondeterministic_seeded in func.tags and not any(map(is_fake, given)):
            if func._schema.is_mutable:
                if args[0].numel() >= LARGE:
                    return args[0]
            elif not given:
                with self.mode:
                    fake = func(*args, **options)
                if fake.numel() >= LARGE:
                    return fake
        return func(*args, **options)


# --- running --------------------------------------------------------------------------------------


def fake_parameter(
    mode: FakeTensorMode,
    parameter: nn.Parameter,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
) -> nn.Parameter:
    """A fake like `parameter`, on `device`, and if it is a floating one as `dtype`.

    What other code has noted on the parameter, it finds on the fake. Of a DTensor the shard that
    this rank has is fake.
    """
    place = device or torch.device("cpu" if parameter.is_meta else parameter.device)
    form = dtype if dtype and parameter.is_floating_point() else parameter.dtype
    [local] = local_tensors(parameter)
    with mode:
        empty = torch.empty(local.shape, dtype=form, device=place)
        if local is not parameter:
            from torch.distributed.tensor import DTensor

            whole: Any = parameter
            empty = DTensor.from_local(
                empty,
                whole.device_mesh,
                whole.placements,
                run_check=False,
                shape=whole.shape,
                stride=whole.stride(),
            )
    made = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for name, value in vars(parameter).items():
        if name not in vars(made):
            setattr(made, name, value)
    return made


@contextlib.contextmanager
def replace_tensors(
    model: nn.Module, replacement: Callable[[Tensor], Tensor], buffers: bool = False
) -> Iterator[None]:
    """Every parameter of `model`, or every buffer, is its replacement in this context."""
    slots = list(_slots(model.modules(), buffers))
    try:
        for module, name, tensor in slots:
            setattr(module, name, replacement(tensor))
        yield
    finally:
        for module, name, tensor in slots:
            setattr(module, name, tensor)


def fake_parameters(
    model: nn.Module, mode: FakeTensorMode, device: torch.device, dtype: torch.dtype
) -> contextlib.AbstractContextManager[None]:
    """The context in which a model has fakes of its parameters; ties remain.

    Raises PartoptError where a parameter gets its shape in the first forward only.
    """
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise PartoptError(
                f'the parameter "{name}" has no shape before the first forward',
                "an estimate needs its shapes: build it without lazy modules",
                code="lazy-parameter",
            )
    return replace_tensors(
        model, memoize(lambda parameter: fake_parameter(mode, parameter, device, dtype))
    )


def fake_buffers(model: nn.Module, mode: FakeTensorMode) -> contextlib.AbstractContextManager[None]:
    """The context in which a model has fakes of its buffers."""
    return replace_tensors(model, memoize(mode.from_tensor), buffers=True)


def real_buffers(
    model: nn.Module, device: torch.device, dtype: torch.dtype
) -> contextlib.AbstractContextManager[None]:
    """The context in which the buffers of a model lie on the device, also those built on meta."""

    @memoize
    def real(buffer: Tensor) -> Tensor:
        form = dtype if buffer.is_floating_point() else buffer.dtype
        if not buffer.is_meta and not is_fake(buffer):
            return buffer.to(device, form)
        # not known: a mask that hides nothing, index 0, a scale of 1
        fill = float(buffer.is_floating_point() or buffer.dtype is torch.bool)
        return torch.full(buffer.shape, fill, dtype=form, device=device)

    return replace_tensors(model, real, buffers=True)


def fake_inputs(inputs: Any, mode: FakeTensorMode) -> Any:
    """Inputs of a model with fakes of the tensors in them."""
    return tree_map_only(Tensor, memoize(mode.from_tensor), inputs)


@contextlib.contextmanager
def without_log() -> Iterator[None]:
    """Keeps torch from logging, with a traceback, that an operation does not work on fakes."""
    with replace_attribute(logging.getLogger(FakeTensorMode.__module__), "disabled", True):
        yield


@contextlib.contextmanager
def replace_attribute(owner: object, name: str, value: object) -> Iterator[None]:
    """The attribute of an object, a class or a module has another value in this context."""
    is_set, was = name in vars(owner), vars(owner).get(name)  # a classmethod as it is written
    setattr(owner, name, value)
    try:
        yield
    finally:
        if is_set:
            setattr(owner, name, was)
        else:
            delattr(owner, name)


def memoize(make: Callable[[Any], Tensor]) -> Callable[[Tensor], Tensor]:
    """`make`, once for every tensor: ties remain."""
    made: dict[int, tuple[Tensor, Tensor]] = {}  # with the tensor, so that its id is not used again

    def once(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            made[id(tensor)] = (tensor, make(tensor))
        return made[id(tensor)][1]

    return once


def _slots(
    modules: Iterable[nn.Module], buffers: bool = False
) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """The parameters that these modules hold themselves, or the buffers, and where."""
    for module in modules:
        for name, tensor in (module._buffers if buffers else module._parameters).items():
            if tensor is not None:
                yield module, name, tensor


class RandomNumbers:
    """Where random numbers of torch, Python and numpy stand, so that they can be drawn again."""

    def __init__(self) -> None:
        numpy: Any = sys.modules.get("numpy")
        self._torch = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
        self._python = random.getstate()
        self._numpy = numpy.random.get_state() if numpy else None

    def restore(self) -> None:
        """Draw the same numbers again."""
        torch.set_rng_state(self._torch)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)

    def advanced(self) -> bool:
        """Whether torch has drawn numbers since."""
        cuda = torch.cuda.get_rng_state_all() if self._cuda else []
        pairs = zip([self._torch, *self._cuda], [torch.get_rng_state(), *cuda], strict=True)
        return not all(torch.equal(before, now) for before, now in pairs)

    @staticmethod
    def seed(seed: int) -> None:
        """Draw the numbers that follow from `seed`."""
        numpy: Any = sys.modules.get("numpy")
        torch.default_generator.manual_seed(seed)  # torch.manual_seed looks for all devices
        if torch.cuda.is_available():
            torch.cuda.manual_seed_all(seed)
        random.seed(seed)
        if numpy is not None:
            numpy.random.seed(seed % 2**32)


# --- the kernels of CUDA --------------------------------------------------------------------------

# The CPU has other kernels than CUDA for attention and dropout, which do other work and keep other
# tensors: a model that is to be estimated for a GPU calls those of CUDA. (Fake tensors of CUDA
# itself end the process where torch was built without it.) Recurrent layers, which cuDNN runs as it
# likes, are refused.


@contextlib.contextmanager
def kernels_of(device: str) -> Iterator[None]:
    """The context in which a model calls the kernels of a device of this type."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(_without_packed_sequences())
        if device == "cuda":
            kernels = stack.enter_context(_CudaKernels())
            stack.enter_context(_also_in_backward(kernels))
        yield


@contextlib.contextmanager
def _also_in_backward(kernels: TorchFunctionMode) -> Iterator[None]:
    """The mode is active in a backward too, where checkpoints run their forward again.

    torch leaves it out of whatever it is asked for, and it is asked for the backward.
    """
    run = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

    def run_with_kernels(*arguments: Any, **options: Any) -> Any:
        with kernels:
            return run(*arguments, **options)

    with replace_attribute(torch.autograd, "_engine_run_backward", run_with_kernels):
        yield


@contextlib.contextmanager
def _without_packed_sequences() -> Iterator[None]:
    """transformers looks for packed sequences in positions, and takes all fakes for such.

    It would then give attention a mask, and take a slower kernel, where a real step does not.
    """
    masks = sys.modules.get("transformers.masking_utils")
    if masks is None or not hasattr(masks, "find_packed_sequence_indices"):
        yield
        return
    with replace_attribute(masks, "find_packed_sequence_indices", lambda _positions: None):
        yield


class _CudaKernels(TorchFunctionMode):
    """Puts CUDA's kernels of attention and dropout in the place of the CPU's."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call the kernel, or `func` where CUDA has no other."""
        replacement = _REPLACEMENTS.get(func)
        made = replacement(*args, **(kwargs or {})) if replacement else None
        return func(*args, **(kwargs or {})) if made is None else made


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Tensor | None:
    """Flash attention, or with a mask or in float32 the memory-efficient one; None for neither.

    Shapes: (b, h, t, w) samples, heads, tokens, width of a head. Of torch's other options `scale`
    changes no shape; with `enable_gqa` several heads of the query share one of key and value.
    """
    plain = query.dim() == key.dim() == 4 and query.shape[-1] == value.shape[-1] <= _FLASH_HEAD
    if not plain or query.dtype not in (*_HALVES, torch.float32):
        return None
    if attn_mask is None and query.dtype in _HALVES:
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        made: Tensor = flash(query, key, value, dropout_p, is_causal)[0]
        return made
    if options.get("enable_gqa"):
        groups = query.shape[1] // key.shape[1]
        key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
    if attn_mask is not None:
        if attn_mask.dtype is torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(
                ~attn_mask, -torch.inf
            )
        attn_mask = attn_mask.expand(*query.shape[:-1], key.shape[-2])
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    found: Tensor = efficient(query, key, value, attn_mask, True, dropout_p, is_causal)[0]
    return found


def _dropout(
    input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor | None:
    """Dropout that keeps a mask of bytes; None where CUDA runs no such kernel."""
    if inplace or not training or not 0 < p < 1:
        return None
    return torch.native_dropout(input, p, True)[0]


def _refuse_recurrence(*_arguments: Any, **_options: Any) -> NoReturn:
    raise PartoptError(
        "the model has recurrent layers (LSTM, GRU or RNN), which an estimate does not know",
        "measure the model: leave out `estimate`",
        code="no-rule",
    )


_REPLACEMENTS: dict[Any, Callable[..., Any]] = {
    functional.scaled_dot_product_attention: _attention,
    functional.dropout: _dropout,
    **dict.fromkeys(
        (torch.lstm, torch.lstm_cell, torch.gru, torch.rnn_tanh, torch.rnn_relu),
        _refuse_recurrence,
    ),
}
