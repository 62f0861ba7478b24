"""The command that follows, by what was made; and this command line with some of it changed."""

from __future__ import annotations

import math
import shlex
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from partopt.cli.options import repeat_options, repeat_words
from partopt.cli.terminal import say
from partopt.cli.words import flags_of
from partopt.errors import PartoptError

if TYPE_CHECKING:
    from partopt.documents.plan import Plan
    from partopt.documents.profile import Profile
    from partopt.documents.transformer import Transformer

_TRAINED_BYTES = 18  # of a parameter in mixed precision
_BATCH, _SEQUENCE = 512, 4096

# what follows what was made, `{}` its file or name
NEXT: Final = {
    "profile": "partopt plan {} --topology {topology}",
    "plan": "partopt simulate {}",
    "plan for a trainer": "partopt export {} --to {trainer}",
    "plan of a transformer": "partopt show {}; partopt export {} --to {trainer}",
    "simulation": "partopt simulate {} -o trace.json",
    "timeline": "open {} in https://ui.perfetto.dev",
    "topology": "partopt plan PROFILE --topology {}",
    "device": "partopt profile MODEL --estimate {} -o profile.json",
    "list of topologies": "partopt topology show NAME",
    "list of trainers": "partopt trainer show NAME",
    "trainer": "partopt plan PROFILE --topology T --for {}",
}


def say_next(made: str, name: str = "", **words: str) -> None:
    """Say which command follows: one of `NEXT`, or the words of another."""
    command = NEXT.get(made, made)
    if made in NEXT:
        file = shlex.quote(name)
        command = command.replace("{}", file).format(**words)
    say(f"next:    {command}", err=True)


class Written(NamedTuple):
    """A plan, the file that it is in, and the rules that say what its layers are."""

    plan: Plan
    file: str
    rules: Sequence[str] = ()


def say_next_of_plan(written: Written, trainer: str) -> None:
    """Say what follows a plan for a trainer: to export it, unless the trainer cannot say it."""
    import partopt

    plan, file, rules = written
    try:
        partopt.export_plan(plan, trainer, rules=rules)
    except PartoptError as error:
        say(f"warning: {error.message}", err=True)
        say_next("plan", file)
    else:
        made = "plan of a transformer" if plan.transformer else "plan for a trainer"
        say_next(made, file, trainer=f"{trainer} {repeat_options(['rules'])}".rstrip())


def command_of(
    verb: str,
    words: Collection[str],
    given: Collection[str],
    changes: Mapping[str, Any] | None = None,
    output: str | None = None,
) -> str:
    """The command of a verb with the options of this command line that are among `given`.

    `changes` are options of the library in place of some; one that is None is left out.
    """
    changes = changes or {}
    kept = repeat_words(set(given) - changes.keys())
    written = ["-o", output] if output else []
    return shlex.join(["partopt", verb, *words, *kept, *flags_of(changes), *written])


def command_of_transformer(
    name: str,
    model: Transformer,
    given: Mapping[str, Any],
    output: str | None = None,
    trainer: str | None = None,
) -> str:
    """A `partopt plan` of the transformer `name` that has all it needs, with what is `given`.

    The rest is usual, as far as the device has it; of servers there are the fewest, in powers of
    two, with twice the memory of weights, gradients and Adam's state in mixed precision.
    """
    from partopt.documents.device import shipped_device
    from partopt.documents.topology import Topology

    servers, devices = given["servers"], given.get("devices")
    topology = Topology.load(given["topology"], getattr(servers, "most", servers))
    known, changes = shipped_device(topology.device.name), dict[str, Any]()
    is_old = known is not None and "bfloat16" not in known[1].peaks_flops
    if not given.get("target"):
        changes["for"] = trainer or ("deepspeed" if is_old else "megatron")
    if is_old and not given.get("dtype"):
        changes["dtype"] = "float16"
    if not (servers or devices):
        inside = topology.devices // topology.levels[-1].size
        room = inside * (topology.device.memory_bytes or math.inf) / 2
        count = math.ceil(_TRAINED_BYTES * model.parameters / room)
        changes["servers"] = 2 ** (count - 1).bit_length()
        devices = inside * changes["servers"]
    if not given["global_batch"]:
        devices = devices or topology.devices
        changes["global_batch"] = devices * max(1, round(_BATCH / devices))
    if not given.get("sequence"):
        changes["sequence"] = _SEQUENCE
    return command_of("plan", [name], given, changes, output)


def next_cluster(profile: Profile) -> str:
    """The topology to name in a command that plans `profile`: of its device where one is shipped.

    An estimate can be planned on no other; what a CPU takes says little of GPUs.
    """
    if profile.estimated is None and profile.device.type == "cpu":
        return "cpu-2"
    device = profile.estimated_for or profile.device.name
    return _cluster_of(device) or ("dgx-a100" if profile.estimated is None else "CLUSTER")


def _cluster_of(device: str) -> str | None:
    """The first shipped topology of such devices."""
    from partopt.documents.device import same_device
    from partopt.documents.files import shipped_folder, shipped_names
    from partopt.documents.topology import Topology

    for name in shipped_names("topologies"):
        path = str(shipped_folder("topologies") / f"{name}.yaml")
        if same_device(Topology.load(path).device.name, device):
            return name
    return None
