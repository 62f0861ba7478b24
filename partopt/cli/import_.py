"""`partopt import`."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

import click

from partopt.cli import import_layout, options, words
from partopt.cli.terminal import say
from partopt.errors import PartoptError, did_you_mean

if TYPE_CHECKING:
    from partopt.documents.profile import Profile

_TRACE = "torch-profile"
_PROFILES = {
    _TRACE: "traces of torch.profiler: times of the stages of a plan that ran",
    "pipedream": "a graph of the published PipeDream profiler",
}


class _Formats(click.Group):
    """Formats of profiles, one command for all of them, and of layouts, another."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The formats of profiles, then those of layouts."""
        import partopt

        return [_TRACE, *partopt.IMPORTERS, *partopt.readers()]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of a format. PartoptError for an unknown one."""
        import partopt

        if cmd_name in partopt.readers():
            return import_layout.command
        if cmd_name == _TRACE or cmd_name in partopt.IMPORTERS:
            return _profile
        if ctx.resilient_parsing or cmd_name.startswith("-"):
            return None
        if cmd_name == "run":
            raise PartoptError(
                "partopt import run: a run is of partopt's own",
                "partopt profile --from-run RUN --onto PROFILE",
                code="unknown-format",
                name=cmd_name,
            )
        raise PartoptError(
            f'unknown format "{cmd_name}"',
            did_you_mean(cmd_name, self.list_commands(ctx)),
            code="unknown-format",
            name=cmd_name,
        )

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command of the format; an option of the other kind is said to be that."""
        try:
            return super().invoke(ctx)
        except click.NoSuchOption as error:
            raise _of_other_kind(error) or error from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """One line a format."""
        import partopt

        profiles = [(name, _PROFILES.get(name, "")) for name in (_TRACE, *partopt.IMPORTERS)]
        with formatter.section("Measurements, as a profile"):
            formatter.write_dl(profiles)
        layouts = [(name, partopt.TRAINERS[name].reads) for name in partopt.readers()]
        with formatter.section("Layouts of trainers, as a plan"):
            formatter.write_dl(layouts)


def _of_other_kind(error: click.NoSuchOption) -> PartoptError | None:
    """The error of an option that formats of the other kind have; None where they have it not."""
    assert error.ctx is not None
    is_layout = error.ctx.command is import_layout.command
    other, kind = (_profile, "measurements") if is_layout else (import_layout.command, "layouts")
    if not any(error.option_name in parameter.opts for parameter in other.params):
        return None
    return PartoptError(
        f"{error.option_name}: not of {error.ctx.command_path}",
        f"it goes with {kind}: see partopt import --help",
        code="unused-option",
    )


@click.group(
    "import",
    cls=_Formats,
    short_help="read another program's profile, or a trainer's layout",
    subcommand_metavar="FORMAT ...",
)
def command() -> None:
    """Read what another program measured as a profile, or a trainer's layout as a plan.

    partopt import FORMAT --help says what each takes.

    \b
    Example:
      partopt import torch-profile rank*.json --onto gpt.json --plan plan.json -o again.json
      partopt import megatron 'Et*4|t*3|t*3|t*2L' --profile gpt.json --topology v100-pcie
        --global-batch 512 -o plan.json
    """


@click.command()
@click.argument("files", metavar="FILE...", nargs=-1, required=True)
@click.option(
    "--onto", metavar="PROFILE", help="torch-profile: the profile whose times are replaced."
)
@click.option(
    "--plan", metavar="PLAN", help="torch-profile: the plan that ran, whose stages are timed."
)
@click.option("--name", help="Name of the model (default: that of the file, or of the profile).")
@click.option(
    "--microbatch-size",
    type=click.IntRange(min=1),
    metavar="B",
    help="Samples that were measured at once; such files do not record it.",
)
@click.option("--device", metavar="NAME", help="Device that was measured, if it is known.")
@options.output_options("the profile")
def _profile(
    files: tuple[str, ...],
    onto: str | None,
    plan: str | None,
    name: str | None,
    microbatch_size: int | None,
    device: str | None,
    output: str | None,
    force: bool,
) -> None:
    """Read what another program measured and write it as a profile of partopt's.

    For pipedream, FILE is the published profiler's graph; for torch-profile they are traces of
    torch.profiler, one of each process, in which torch executed a --plan: its stages are found by
    the ranges of torch's pipelines, PP:0F0. A trace has times alone: --onto says which profile they
    are put into.

    \b
    Example:
      partopt import pipedream vgg16.txt --microbatch-size 128 -o vgg16.json
      partopt import torch-profile rank*.json --onto gpt.json --plan plan.json -o again.json
    """
    import partopt
    from partopt import documents

    form = str(click.get_current_context().info_name)
    if output is None:
        raise PartoptError(
            "partopt import: no output file",
            "add -o profile.json, or -o - for standard output",
            code="missing-option",
            option="output",
        )
    documents.check_writable(output, force, [".json"])
    if form == _TRACE:
        if microbatch_size is not None:
            raise PartoptError(
                f"--microbatch-size: not of partopt import {_TRACE}, whose plan says it",
                "leave it out",
                code="unused-option",
            )
        imported = _import_traces(files, onto, plan, name, device)
    else:
        _refuse_other_options(form, files, onto, plan)
        imported = partopt.import_profile(
            form, files[0], name=name, microbatch_size=microbatch_size, device=device
        )
    imported.save(output, force)
    words.print_notes(imported.notes)
    if output != "-":
        count = len(imported.layers)
        say(f"Wrote {output}: {count} {'layer' if count == 1 else 'layers'}", err=True)
        say(f"next:    partopt plan {shlex.quote(output)} --topology v100-pcie", err=True)


def _import_traces(
    files: tuple[str, ...],
    onto: str | None,
    plan: str | None,
    name: str | None,
    device: str | None,
) -> Profile:
    from msgspec.structs import replace

    import partopt

    if onto is None:
        raise PartoptError(
            f"partopt import {_TRACE}: a trace has no bytes of parameters and activations",
            "say whose they are: --onto PROFILE, a profile of the same model",
            code="missing-option",
            option="onto",
        )
    if plan is None:
        raise PartoptError(
            f"partopt import {_TRACE}: a trace does not say which layers its stages have",
            "name the plan that ran: --plan PLAN",
            code="missing-option",
            option="plan",
        )
    imported = partopt.import_times(
        files, partopt.Profile.load(onto), partopt.Plan.load(plan), device=device
    )
    return replace(imported, model=replace(imported.model, name=name)) if name else imported


def _refuse_other_options(
    form: str, files: tuple[str, ...], onto: str | None, plan: str | None
) -> None:
    for flag, given in (("--onto", onto), ("--plan", plan), (files[-1], len(files) > 1)):
        if given:
            raise PartoptError(
                f"{flag}: not of partopt import {form}",
                f"one FILE holds the whole profile; {flag} goes with {_TRACE}",
                code="unused-option",
            )
