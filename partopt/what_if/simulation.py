"""A plan executed: what the public library gives of it, and how it is saved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from partopt import documents, schedules
from partopt.documents.plan import Plan
from partopt.documents.simulation import SimulationDocument, Varied
from partopt.documents.tables import Flows
from partopt.errors import PartoptError, invalid, unknown
from partopt.options import with_facts
from partopt.report.pictures import draw_timeline
from partopt.schedules import SCHEDULES
from partopt.schedules.placement import placement_of
from partopt.schedules.torch_csv import to_csv
from partopt.simulator import trace
from partopt.simulator.execution import Execution, execute, execute_csv, microbatches_in
from partopt.what_if.advice import Trials, findings
from partopt.what_if.conditions import (
    Conditions,
    apply_conditions,
    change_network,
    check_size,
)
from partopt.what_if.document import document_of, figure_timeline
from partopt.what_if.variation import flows_of, variation_of, vary

FORMS = (".json", ".svg", ".pdf", ".png", ".csv")  # what a simulation is saved as


@dataclass(frozen=True, eq=False)
class Simulation:
    """What a plan does under its schedule: `planned` as it was made, `plan` as it ran.

    `conditions` are those that differ between the two, `varied` what becomes of it where devices
    vary.
    """

    planned: Plan
    execution: Execution
    conditions: Conditions
    varied: Varied | None = None

    @property
    def plan(self) -> Plan:
        """The plan under the conditions that it ran under."""
        return self.execution.plan

    @cached_property
    def document(self) -> SimulationDocument:
        """Where the time goes, what to change, what the plan promised: all that a page shows."""
        trials = Trials(self.conditions, partial(_run, self.planned, schedules.ACTION_LIMIT))
        advice = findings(self.execution, trials, self.varied)
        return document_of(self.execution, self.planned, advice, self.varied)

    @cached_property
    def flows(self) -> Flows:
        """Every message and collective: what it takes, and what it costs that it does."""
        return flows_of(self.execution)

    @property
    def fits(self) -> bool:
        """Whether every device has room for the most that it holds at once."""
        return self.execution.fits

    def save(
        self,
        path: str,
        force: bool = False,
        window: tuple[float, float] | None = None,
    ) -> None:
        """Write the simulation; the extension of `path` chooses the form.

        `.json` is a trace for Perfetto, `.svg`, `.pdf` and `.png` a figure as of `draw`, and `.csv`
        the order as torch executes it. An existing file is replaced only with `force`. Raises
        PartoptError for another extension, or where that form cannot hold it.
        """
        form = self.form_of(path)
        if form == ".json":
            content = b"".join(trace.write(self.execution.timeline, self.plan))
            documents.write_bytes(path, content, force)
        elif form == ".csv":
            placement = placement_of(self.plan, self.execution.microbatches)
            text = to_csv(self.execution.order, placement)
            documents.write_bytes(path, text.encode(), force)
        else:
            drawn = self.draw(form.removeprefix("."), window)
            documents.write_bytes(path, drawn, force)

    def draw(self, form: str, window: tuple[float, float] | None = None) -> bytes:
        """The timeline as a figure: "svg", "pdf" or "png".

        It shows the seconds from and to which `window` goes, by default all, or of very many
        actions the beginning.
        """
        document = document_of(self.execution, self.planned, [])
        drawn = figure_timeline(self.execution, window)
        return draw_timeline(self.plan, document, drawn, form)

    @staticmethod
    def form_of(path: str) -> str:
        """The form in which a simulation is saved at `path`; on standard output (`-`), a trace.

        Raises PartoptError for an extension that is not one of a form.
        """
        hint = "choose .json (trace for Perfetto), .svg, .pdf, .png (figure) or .csv (schedule)"
        return ".json" if path == "-" else documents.check_form(path, FORMS, hint)


def simulate(
    plan: Plan,
    *,
    jitter: str | float | None = None,
    slow: Mapping[int, float] | None = None,
    seed: int | None = None,
    draws: int | None = None,
    save_as: str | None = None,
    **conditions: Any,
) -> Simulation:
    """Execute `plan` on the cluster for which it was made, or under other `conditions`.

    The stages stay as they are. The conditions are the fields of
    `partopt.what_if.conditions.Conditions`; with `jitter` ("5%", or a ratio) or `slow` (factors
    by rank) it is also executed where action times vary, as
    `partopt.what_if.variation.Variation` says. `save_as` is where the simulation will be saved,
    if it will, whose form may hold less than the 20 million actions that are simulated at most.
    Raises PartoptError where the conditions contradict each other, the plan cannot run that way,
    has too many actions, or takes no time; `fields["where"]` is "plan" where the plan is at fault.
    """
    given = Conditions(**conditions)
    variation = variation_of(jitter, slow, seed, draws)
    form = Simulation.form_of(save_as) if save_as is not None else ""
    most_actions = trace.MOST_ACTIONS if form == ".json" else schedules.ACTION_LIMIT
    run = _run(plan, most_actions, given)
    if run.makespan_s == 0:
        raise PartoptError(
            "all that the plan does takes 0 s: there is nothing to see",
            "were its layers measured?",
            code="no-time",
            where="plan",
        )
    return Simulation(plan, run, given, vary(run, variation) if variation else None)


def _run(plan: Plan, most_actions: int, conditions: Conditions) -> Execution:
    """The plan under its schedule or another one, or under an order that the user gives."""
    if (order := conditions.own_order) is not None:
        return _run_order(plan, order, conditions, most_actions)
    if conditions.schedule is None and plan.schedule not in SCHEDULES:
        raise unknown(
            f'schedule: unknown schedule "{plan.schedule}"',
            plan.schedule,
            SCHEDULES,
            code="unknown-schedule",
            where="plan",
        )
    changed = apply_conditions(plan, conditions, most_actions)
    try:
        return execute(changed, conditions.microbatches)
    except PartoptError as error:
        hint = error.hint
        if conditions.warmup is not None:
            hint = "let more forwards come first: a deeper `warmup`"
        raise PartoptError(
            f"{changed.schedule}: {error.message}",
            hint,
            code=error.code,
            **error.fields,
            where="plan",
        ) from None


def _run_order(plan: Plan, path: Path, conditions: Conditions, most_actions: int) -> Execution:
    """The order in the file `path`, on the plan's stages."""
    for option, value in {"warmup": conditions.warmup, **conditions.facts}.items():
        if value is not None and option in ("warmup", "allreduce"):
            raise invalid(
                option, value, f"the order in {path} says what is done when", f"drop `{option}`"
            )
    text = documents.read_bytes(str(path)).decode(errors="replace")
    network = change_network(plan.topology, conditions)
    changed = replace(plan, topology=network, engine=with_facts(plan.engine, conditions.facts))
    try:
        M = conditions.microbatches or microbatches_in(text, plan)
        check_size(plan, str(path), M, most_actions)
        return execute_csv(text, path.name, changed, M)
    except PartoptError as error:
        raise error.at(str(path)) from None
