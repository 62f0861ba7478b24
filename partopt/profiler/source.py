"""The model to profile: a file or a dotted module, and what its code raises.

The contract: a callable that returns an `nn.Module` (or the module itself),
`example_inputs(batch_size)` that returns a tensor, a tuple or a dict, and optionally
`loss_fn(output, inputs)`. Where the second argument of the loss is called labels or target, or the
model cannot take both of a pair, `example_inputs` returns a pair of inputs and labels, and the loss
gets the labels. For training
there are also `data(rank, replicas)`, an iterator over the inputs of the microbatches of a replica,
and `optimizer(parameters)`. The model is looked up as the named attribute, else `build`,
`create_model`, `model`, else the sole `nn.Module` of the file: an instance, or else a class that
the file defines.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import inspect
import itertools
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import nn

from partopt.documents import is_file
from partopt.documents.profile import Model
from partopt.errors import PartoptError, did_you_mean, invalid, unknown
from partopt.profiler.device import is_out_of_memory
from partopt.profiler.tensors import Inputs, Loss, loss_of_labels, split_labels
from partopt.profiler.weightless import build_weightless

Made = TypeVar("Made")

_LOOKED_UP = ("build", "create_model", "model")
_TARGETS = (
    "write FILE.py or dotted.module, with :ATTR after it to name the function that builds the model"
)
_CONTRACT = "it needs build(**options) that returns an nn.Module, and example_inputs(batch_size)"
_EXTRAS = {"torchvision": "examples", "transformers": "examples"}


@dataclass(frozen=True)
class ModelSource:
    """A model file that follows the contract, nothing built yet."""

    name: str
    entry: str
    folder: Path
    found: Callable[..., nn.Module] | nn.Module
    inputs_of: Callable[[int], Any]
    loss_of: Callable[[Any, Any], Any] | None
    arguments: dict[str, Any] = field(default_factory=dict)
    data: Callable[[int, int], Any] | None = None
    optimizer: Callable[[Any], Any] | None = None

    @property
    def place(self) -> str:
        """The file or dotted module, without the attribute."""
        return self.entry.rpartition(":")[0]

    @property
    def loss_fn(self) -> Loss | None:
        """The loss of an output and the inputs, labels with them if any."""
        return None if self.loss_of is None else loss_of_labels(self.loss_of)

    def locate(self, error: PartoptError) -> PartoptError:
        """The error, placed in the model's file unless it is about an option or placed already."""
        placed = "option" in error.fields or error.message.startswith(self.place)
        return error if placed else error.at(self.place)

    def __reduce__(self) -> tuple[Any, ...]:
        """How another process gets it: from the file, whose code cannot be sent."""
        return find_model, (self.entry, self.arguments)

    def build(self) -> nn.Module:
        """The model, built with the arguments given; as transformers builds it, without its cache.

        Training reads no keys and values of earlier calls, and that object hides them from a cut.
        Raises PartoptError where the model's code fails.
        """
        model = self.found
        if not isinstance(model, nn.Module):
            model = self._call(model, **self.arguments)
        if not isinstance(model, nn.Module):
            raise _not_a_module(self.entry, f"returned {_kind(model)}, not an nn.Module")
        for module in model.modules():
            config: Any = getattr(module, "config", None)
            if getattr(config, "use_cache", False):
                with contextlib.suppress(AttributeError):  # it is frozen
                    config.use_cache = False
        return model

    def example_inputs(self, batch_size: int) -> Inputs:
        """What the model file offers as the inputs of one microbatch, labels with them if any."""
        return self._split(self._call(self.inputs_of, batch_size), f"example_inputs({batch_size})")

    def replica_data(self, rank: int, replicas: int) -> Iterator[Inputs]:
        """What the file's `data(rank, replicas)` gives: inputs of microbatches, to iterate over."""
        assert self.data is not None
        batches = self._call(self.data, rank, replicas)
        return (self._split(batch, f"data({rank}, {replicas})") for batch in batches)

    def _split(self, given: Any, what: str) -> Inputs:
        forward = lambda: self._forward  # noqa: E731
        return split_labels(given, self.loss_of, forward, f"{self.place}: {what}")

    @functools.cached_property
    def _forward(self) -> inspect.Signature:
        """What the model takes."""
        return inspect.signature(build_weightless(self.build).forward)

    def optimizer_of(self, parameters: Any) -> Any:
        """The optimizer that the file's `optimizer(parameters)` makes."""
        assert self.optimizer is not None
        return self._call(self.optimizer, parameters)

    def _call(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        where = f"{self.place}: {getattr(function, '__name__', 'model')}"
        with _import_from(self.folder), explain(where):
            return with_torchvision(functools.partial(function, *arguments, **options))


def find_model(
    source: str | os.PathLike[str], arguments: Mapping[str, Any] | None = None
) -> ModelSource:
    """The model that `source`, `FILE.py[:ATTR]` or `dotted.module[:ATTR]`, names.

    `arguments` are for its build function. Raises PartoptError where there is no such file, where
    it fails, or where it does not follow the contract.
    """
    given = _recordable(arguments)
    if not isinstance(source, str | os.PathLike) or not (target := os.fspath(source)):
        raise invalid("source", source, "not a file or a dotted module", _TARGETS)
    before, colon, after = target.rpartition(":")
    place, attribute = (before, after) if colon and after.isidentifier() else (target, None)
    path = Path(place) if place.endswith(".py") else None
    folder = path.resolve().parent if path else Path.cwd()
    with _import_from(folder):
        module = _import_file(place, path) if path else _import_dotted(place)
    public = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    name = _look_up(public, module, place, attribute)
    found, entry = public[name], f"{place}:{name}"
    if not callable(found):
        raise _not_a_module(entry, f"is {_kind(found)}, neither a function nor an nn.Module")
    _check_arguments(found, given, entry)
    example_inputs = getattr(module, "example_inputs", None)
    if not callable(example_inputs):
        raise PartoptError(
            f"{place}: has no example_inputs",
            "add the model's inputs for one microbatch, a tensor, a tuple or a dict, such as: "
            f"import torch; example_inputs = lambda batch_size: {_inputs_like(found)}",
            code="no-example-inputs",
        )
    loss_fn, data, optimizer = (
        getattr(module, name, None) for name in ("loss_fn", "data", "optimizer")
    )
    title = path.stem if path else place.rpartition(".")[2]
    return ModelSource(title, entry, folder, found, example_inputs, loss_fn, given, data, optimizer)


@contextlib.contextmanager
def _import_from(folder: Path) -> Iterator[None]:
    """Let code import the modules that lie in `folder`, and forget them afterwards.

    Another folder may have others of the same name.
    """
    last = next(reversed(sys.modules))
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(str(folder))
        for name in [*itertools.takewhile(lambda name: name != last, reversed(sys.modules))]:
            origin = getattr(sys.modules[name], "__file__", None)
            if origin and Path(origin).parent == folder:
                del sys.modules[name]


def _import_file(place: str, path: Path) -> ModuleType:
    if not is_file(place):
        near: list[str] = []
        with contextlib.suppress(OSError, ValueError):  # a name that is too long
            near = sorted(file.name for file in path.parent.glob("*.py"))
        hint = did_you_mean(path.name, near) if near else "give the path of a Python file"
        raise PartoptError(f"{place}: no such file", hint, code="no-such-file")
    spec = importlib.util.spec_from_file_location(f"partopt_model_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # as import does: dataclasses look themselves up there
    with explain(place):
        with_torchvision(functools.partial(spec.loader.exec_module, module))
    return module


def _import_dotted(place: str) -> ModuleType:
    known = None
    with contextlib.suppress(ImportError, ValueError):
        known = importlib.util.find_spec(place)
    if known is None:
        message = f"{place}: no such file or module"
        raise PartoptError(message, _TARGETS, code="no-such-file")
    with explain(place):
        return with_torchvision(functools.partial(importlib.import_module, place))


def _look_up(
    public: Mapping[str, Any], module: ModuleType, place: str, attribute: str | None
) -> str:
    """The name of the model among the public names of a module."""
    modules = [
        name for name, value in public.items() if isinstance(value, nn.Module) and name != "loss_fn"
    ]
    defined = [
        name
        for name, value in public.items()
        if callable(value) and getattr(value, "__module__", None) == module.__name__
    ]
    if attribute is not None:
        if attribute in public:
            return attribute
        raise unknown(
            f'{place}: has no "{attribute}"',
            attribute,
            [name for name in public if name in {*modules, *defined}],
            code="no-such-model",
        )
    classes = (name for name in defined if inspect.isclass(public[name]))
    sole = modules or [name for name in classes if issubclass(public[name], nn.Module)]
    names = [name for name in _LOOKED_UP if name in public] or sole
    if not names:
        message = f"{place}: has no build function and no model"
        raise PartoptError(message, _CONTRACT, code="no-such-model")
    if len(names) > 1 and names is sole:
        raise PartoptError(
            f"{place}: has {len(sole)} modules: {', '.join(sole)}",
            f"name one: {place}:{sole[0]}",
            code="ambiguous-model",
        )
    return names[0]


def _inputs_like(model: object) -> str:
    """The code of inputs that the first layer of `model` takes, where it is built and tells."""
    for layer in model.modules() if isinstance(model, nn.Module) else ():
        if isinstance(layer, nn.Linear):
            return f"torch.randn(batch_size, {layer.in_features})"
        if isinstance(layer, nn.Embedding):
            return f"torch.randint({layer.num_embeddings}, [batch_size, 128])"
        if isinstance(layer, nn.Conv2d):
            return f"torch.randn(batch_size, {layer.in_channels}, 224, 224)"
    return "torch.randn(batch_size, 512)"


def _recordable(arguments: Mapping[str, Any] | None) -> dict[str, Any]:
    """The arguments of the build function. PartoptError where a profile could not record them."""
    given = dict(arguments or {}) if isinstance(arguments, Mapping | None) else None
    what, hint = "not a mapping of names to values", 'give a dictionary such as {"layers": 12}'
    if given is not None and all(isinstance(key, str) for key in given):
        fault = next(iter(Model(name="model", arguments=given).faults()), None)
        if fault is None:
            return given
        what = fault.message.removeprefix("arguments.")
        hint = "give numbers, text, lists or mappings, which the profile records"
    raise PartoptError(
        f"`arguments`: {what}", hint, code="invalid-option", option="arguments", value=arguments
    )


def _check_arguments(found: Any, given: Mapping[str, Any], entry: str) -> None:
    """Refuse arguments that the build function does not take, and say which ones it still needs."""
    if isinstance(found, nn.Module):
        if given:
            raise PartoptError(
                f"{entry}: is a module already built, it takes no arguments",
                "leave out `arguments`, or offer a build function",
                code="unknown-argument",
            )
        return
    parameters = inspect.signature(found).parameters.values()
    named = {
        parameter.name: parameter.default is parameter.empty
        for parameter in parameters
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    for name in given:
        if name not in named and not takes_any:
            raise PartoptError(
                f'`arguments`: {entry} takes no argument "{name}"',
                did_you_mean(name, list(named)) if named else "it takes none",
                code="unknown-argument",
                option="arguments",
            )
    for name, needed in named.items():
        if needed and name not in given:
            raise PartoptError(
                f'{entry}: needs the argument "{name}"',
                f"add {name}=... to `arguments`",
                code="missing-argument",
            )


def _not_a_module(entry: str, what: str) -> PartoptError:
    return PartoptError(f"{entry}: {what}", _CONTRACT, code="not-a-module")


def _kind(value: object) -> str:
    name = type(value).__name__
    return f"an {name}" if name[0] in "AEIOUaeiou" else f"a {name}"


# --- what the model's code raises -----------------------------------------------------------------


@contextlib.contextmanager
def explain(where: str) -> Iterator[None]:
    """Turn what the model's code raises into a PartoptError that names the line.

    Running out of memory passes through.
    """
    try:
        yield
    except PartoptError:
        raise
    except (Exception, SystemExit) as error:
        if is_out_of_memory(error):
            raise
        if isinstance(error, ModuleNotFoundError) and error.name:
            missing = error.name.partition(".")[0]
            from_clone = f"in a clone of partopt: pip install '.[{_EXTRAS.get(missing)}]'"
            raise PartoptError(
                f"{where}: needs {missing}, which is not installed",
                from_clone if missing in _EXTRAS else f"pip install {missing}",
                code="not-installed",
            ) from error
        raise PartoptError(
            f"{where}: {describe(error)}", "correct the model file", code="model-code-failed"
        ) from error


def describe(error: BaseException) -> str:
    """An exception of foreign code in one line, with the line of code that led to it.

    That is the innermost line outside of installed packages.
    """
    installed = (str(Path(__file__).parent.parent), "<", sys.base_prefix)
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(installed) and "site-packages" not in frame.filename
    ]
    what = str(error).strip().splitlines()
    text = f"raised {type(error).__name__}" + (f": {what[0]}" if what else "")
    if isinstance(error, SyntaxError):
        return f"{text} (line {error.lineno})"
    if not frames:
        return text
    return f"{text} ({Path(frames[-1].filename).name}, line {frames[-1].lineno})"


# --- torchvision beside a torch that it was not built for -----------------------------------------

# Its import fails there, or that of a package that imports it, such as a model of transformers: two
# operators of its compiled part are not declared. Declared without code they are enough for a model
# that calls neither.
_SIGNATURES = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_declared: list[torch.library.Library] = []  # a library lives as long as it is referred to


def with_torchvision(call: Callable[[], Made]) -> Made:
    """What `call` makes; where it fails for want of these operators it is called again."""
    try:
        return call()
    except Exception as error:
        if _declared or not _misses_operators(error):
            raise
    library = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
    for signature in _SIGNATURES:
        with contextlib.suppress(RuntimeError):  # declared by somebody else
            library.define(signature)  # type: ignore[no-untyped-call]
    _declared.append(library)
    return call()


def _misses_operators(error: BaseException) -> bool:
    """Whether the error, or one that led to it, says that torchvision's operators are missing."""
    cause: BaseException | None = error
    while cause is not None:
        if "operator torchvision::" in str(cause):
            return True
        cause = cause.__cause__ or cause.__context__
    return False
