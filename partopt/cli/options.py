"""The options that planning verbs share, and the problem that they state."""

from __future__ import annotations

import shlex
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from partopt import units
from partopt.errors import PartoptError, PartoptWarning, did_you_mean

if TYPE_CHECKING:
    from partopt.cost.problem import Problem
    from partopt.documents.profile import Profile
    from partopt.documents.topology import Topology

Command = Callable[..., None]


def problem_options(command: Command) -> Command:
    """Add the options that state a planning problem; `problem` turns their values into one."""
    for option in reversed(_PROBLEM_OPTIONS):
        command = option(command)
    return command


def output_options(what: str) -> Callable[[Command], Command]:
    """`-o FILE` and `--force`, for a command that writes `what`."""

    def add(command: Command) -> Command:
        command = click.option("--force", is_flag=True, help="Replace the file if it exists.")(
            command
        )
        return click.option(
            "-o", "--output", metavar="FILE", help=f"Write {what} to FILE; - is standard output."
        )(command)

    return add


def json_option(command: Command) -> Command:
    """`--json`: one document on standard output and nothing more."""
    return click.option(
        "--json", "as_json", is_flag=True, help="Print one JSON document and nothing more."
    )(command)


_PROBLEM_OPTIONS = [
    click.option(
        "--topology",
        required=True,
        metavar="FILE|NAME",
        help="The cluster: a YAML file, - or the name of a shipped one.",
    ),
    click.option(
        "--servers", type=click.IntRange(min=1), help="Size of the topology's outermost level."
    ),
    click.option(
        "--schedule",
        default="pipedream",
        show_default=True,
        metavar="NAME",
        help="pipedream, 1f1b, gpipe, interleaved, zbv, .. or auto.",
    ),
    click.option(
        "--chunks",
        type=click.IntRange(min=1),
        metavar="V",
        help="Stages on a device, for interleaved schedules (default: 2).",
    ),
    click.option(
        "--stages",
        type=click.IntRange(min=1),
        help="Stages for the planners that take a number (default: one a device).",
    ),
    click.option(
        "--cut-at",
        multiple=True,
        metavar="GLOB",
        help="Let stages begin only with layers of such names (repeat).",
    ),
    click.option(
        "--tied",
        type=click.Choice(["exchange", "together"]),
        default="exchange",
        show_default=True,
        help=(
            "Layers that share parameters: stages that part them exchange gradients, or none does."
        ),
    ),
    click.option(
        "--microbatch-size",
        type=click.IntRange(min=1),
        metavar="B",
        help="Samples (default: the fastest size per sample).",
    ),
    click.option(
        "--microbatches",
        type=click.IntRange(min=1),
        metavar="M",
        help="Microbatches per iteration of a synchronous schedule.",
    ),
    click.option(
        "--global-batch",
        type=click.IntRange(min=1),
        metavar="G",
        help="Samples per iteration, instead of --microbatches.",
    ),
    click.option(
        "--replication",
        type=click.Choice(["free", "uniform", "none"]),
        default="free",
        show_default=True,
        help="Replicas of the stages: any, equally many, one.",
    ),
    click.option(
        "--recompute",
        type=click.Choice(["never", "always", "auto"]),
        default="never",
        show_default=True,
        help="Re-materialise activations; auto: in the stages that the planner chooses.",
    ),
    click.option(
        "--optimizer",
        type=click.Choice(["sgd", "momentum", "adam"]),
        default="adam",
        show_default=True,
        help="For its memory.",
    ),
    click.option(
        "--memory",
        metavar="SIZE",
        help='Limit of a device, such as "40 GB", instead of the topology\'s.',
    ),
    click.option(
        "--comm",
        type=click.Choice(["overlap", "serial"]),
        default="overlap",
        show_default=True,
        help="Whether transfers hide.",
    ),
    click.option(
        "--allreduce",
        type=click.Choice(["overlap", "blocking"]),
        default="overlap",
        show_default=True,
        help="Whether asynchronous stages wait for their gradients.",
    ),
    click.option(
        "--cost",
        default="time",
        show_default=True,
        metavar="KIND",
        help="GPipe: time, flops, parameters or a FILE.",
    ),
]


def ascii_only() -> bool:
    """Whether standard output cannot show block characters."""
    return not (sys.stdout.encoding or "ascii").lower().startswith("utf")


def load_profile(given: str) -> Profile:
    """The profile in a file, on standard input, or of a shipped name."""
    from partopt.documents.profile import Profile

    return Profile.load(given)


def load_topology(given: str, servers: int | None = None, memory: str | None = None) -> Topology:
    """The topology in a file, on standard input, or of a shipped name; its devices have `memory`,
    where that is given.
    """
    from msgspec.structs import replace

    from partopt.documents.topology import Topology

    loaded = Topology.load(given, servers)
    return replace(loaded, device=replace(loaded.device, memory_bytes=memory_limit(memory, loaded)))


def warn_of_cpu(profile: Profile, topology: Topology) -> None:
    """Warn of times that are not those of the topology's devices."""
    if profile.device.type == "cpu":
        text = f"{profile.model.name} was measured on a CPU, not on {topology.device.name}"
        warnings.warn(text, PartoptWarning, stacklevel=2)


def repeated(given: Iterable[str]) -> str:
    """The options among `given` that stand on this command line, as another command takes them."""
    context = click.get_current_context()
    words: list[str] = []
    for parameter in context.command.params:
        name = parameter.name or ""
        if name in given and context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            value = context.params[name]
            for each in value if parameter.multiple else [value]:
                words += [parameter.opts[-1], str(each)]
    return shlex.join(words)


def problem(
    profile: Profile,
    topology: Topology,
    options: dict[str, Any],
    cuts: Sequence[int] = (),
    replicas: Sequence[int] = (),
) -> Problem:
    """The problem that the values of `problem_options` state.

    Raises PartoptError where they contradict each other.
    """
    from partopt.cost.problem import problem_of
    from partopt.planners.placing import stage_count
    from partopt.schedules import schedule

    if options["schedule"] == "auto":
        raise PartoptError(
            "--schedule auto: partopt plan chooses one, and for one cluster at a time",
            "name a schedule: --schedule 1f1b",
        )
    schedule(options["schedule"])
    stated = problem_of(
        profile,
        topology,
        options["microbatch_size"],
        schedule=options["schedule"],
        optimizer=options["optimizer"],
        recompute=options["recompute"] == "always",
        recompute_per_stage=options["recompute"] == "auto",
        replication=options["replication"],
        serial_transfers=options["comm"] == "serial",
        blocking_allreduce=_blocking(options),
        stages=options["stages"],
        chunks=_chunks(options),
        tied=options["tied"],
        cut_at=_starts(profile, options["cut_at"]),
        cuts=tuple(cuts),
        replicas=tuple(replicas),
        memory_bytes=memory_limit(options["memory"], topology),
    )
    if stated.stages is not None:
        stage_count(stated)
    return _with_costs(_with_microbatches(stated, options), options["cost"])


def check_planner(name: str | None, options: dict[str, Any]) -> None:
    """PartoptError for options that the planner `name` would not look at or keep to."""
    from partopt.planners import PLANNERS

    replication = options["replication"]
    stated = [("--stages", "stages")] if options["stages"] is not None else []
    stated += [("--cost", "costs")] if options["cost"] != "time" else []
    stated += [(f"--replication {replication}", replication)] if replication != "free" else []
    stated += [("--recompute auto", "auto")] if options["recompute"] == "auto" else []
    for flag, use in stated:
        using = [other for other, entry in PLANNERS.items() if use in entry.uses]
        if name in PLANNERS and name not in using:
            raise PartoptError(
                f"{flag}: the planner {name} does not look at it",
                f"choose --planner {', '.join(using)}",
            )


def _blocking(options: dict[str, Any]) -> bool:
    """Whether devices wait for their gradients; a synchronous schedule exchanges them once, when
    nothing else is left to do.
    """
    from partopt.schedules import schedule

    if options["allreduce"] == "blocking" and not schedule(options["schedule"]).asynchronous:
        raise PartoptError(
            (
                f"--allreduce: {options['schedule']} exchanges gradients when its last "
                "backward is done"
            ),
            "drop --allreduce",
        )
    return bool(options["allreduce"] == "blocking")


def _chunks(options: dict[str, Any]) -> int:
    """v, the stages on a device, by default 2.

    PartoptError for schedules that have a number of their own.
    """
    from partopt.schedules import SCHEDULES, schedule
    from partopt.schedules.layout import LOOPED

    if options["chunks"] is not None and schedule(options["schedule"]).shape != LOOPED:
        able = [name for name, entry in SCHEDULES.items() if entry.shape == LOOPED]
        raise PartoptError(
            f"--chunks: not for {options['schedule']}", f"choose --schedule {' or '.join(able)}"
        )
    return options["chunks"] or 2


def integers(text: str | None, flag: str) -> list[int]:
    """The numbers in `5,9,12`. Raises PartoptError where one is none."""
    try:
        return [] if text is None else [int(word) for word in text.split(",")]
    except ValueError:
        raise PartoptError(
            f"{flag} {text}: not a list of whole numbers", f"write {flag} 5,9,12"
        ) from None


def _starts(profile: Profile, globs: Sequence[str]) -> list[int] | None:
    """The first layer, and those whose names match one of the globs; None without globs.

    PartoptError for a glob that matches none.
    """
    import fnmatch

    names = [layer.name for layer in profile.layers]
    for glob in globs:
        if not fnmatch.filter(names, glob):
            raise PartoptError(
                f"--cut-at {glob}: no layer of {profile.model.name} has such a name",
                did_you_mean(glob, names),
            )
    matching = [
        index
        for index, name in enumerate(names)
        if any(fnmatch.fnmatchcase(name, glob) for glob in globs)
    ]
    return sorted({0, *matching}) if globs else None


def memory_limit(given: str | None, topology: Topology) -> int | None:
    """The limit of a device: --memory, or what the topology says."""
    return topology.device.memory_bytes if given is None else _memory(given)


def _memory(text: str) -> int:
    try:
        limit = units.parse_bytes(text)
    except PartoptError as error:
        raise error.at("--memory") from None
    if limit == 0:
        raise PartoptError("--memory: 0 bytes is no device", 'write "40 GB"')
    return limit


def _with_microbatches(stated: Problem, options: dict[str, Any]) -> Problem:
    """M, from --microbatches or --global-batch, for a synchronous schedule, which needs one of
    them; asynchronous ones take neither.
    """
    from dataclasses import replace

    from partopt.schedules import schedule

    name, count, batch = stated.schedule, options["microbatches"], options["global_batch"]
    if schedule(name).asynchronous:
        if count or batch:
            flag = "--microbatches" if count else "--global-batch"
            raise PartoptError(
                f"{flag}: {name} is asynchronous and has no iterations",
                f"drop {flag}, or choose --schedule 1f1b",
            )
        return stated
    if (count is None) == (batch is None):
        raise PartoptError(
            f"--schedule {name}: needs either --microbatches or --global-batch",
            "for example --microbatches 64",
        )
    size = stated.chain.microbatch_size
    if batch is not None and batch % size:
        raise PartoptError(
            f"--global-batch {batch}: not a multiple of the microbatch size {size}",
            f"choose {batch // size * size or size}",
        )
    return replace(stated, microbatches=count or batch // size)


def _with_costs(stated: Problem, kind: str) -> Problem:
    """The costs that GPipe's heuristics balance: measured time, forward operations, parameters, or
    one number a line of a file.
    """
    from dataclasses import replace

    import numpy as np

    from partopt.cost.microbatch import measurement_at

    layers = stated.chain.layers
    if kind == "time":
        return stated
    if kind not in ("flops", "parameters"):
        return replace(stated, costs=np.array(_costs_in(kind, layers)))
    if kind == "flops":
        measured = measurement_at(stated.profile, stated.chain.microbatch_size).layers
        costs = [float(layer.forward_flops or 0) for layer in measured]
    else:
        costs = [stated.chain.parameter_bytes(layer, layer + 1) for layer in range(layers)]
    if not any(costs):
        raise PartoptError(
            f"--cost {kind}: the profile has none", "balance the measured time: --cost time"
        )
    return replace(stated, costs=np.array(costs))


def _costs_in(path: str, layers: int) -> list[float]:
    from partopt.documents import read_bytes

    hint = (
        f"give one number a line, one for each of the {layers} layers, or --cost time, "
        "flops or parameters"
    )
    try:
        costs = [float(line) for line in read_bytes(path).decode().split()]
    except ValueError:
        raise PartoptError(f"{path}: not a list of numbers", hint) from None
    if len(costs) != layers:
        raise PartoptError(f"{path}: {len(costs)} costs for {layers} layers", hint)
    if not (all(0 <= cost < float("inf") for cost in costs) and sum(costs) > 0):
        raise PartoptError(f"{path}: costs are finite and not negative, and not all zero", hint)
    return costs
