"""partopt plans pipeline-parallel training from measurements.

    import partopt as po

    profile = po.measure(model, example_inputs, microbatch_sizes=[1, 2, 4])
    cluster = po.Topology.load("dgx-h100", servers=4)
    result = po.solve(po.Job(profile, cluster, schedule="1f1b", global_batch=512))

Names are imported when they are first used, so that `import partopt` is quick and only measuring
imports torch. docs/python.md describes them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from partopt.errors import PartoptError

if TYPE_CHECKING:
    from partopt.documents import Note
    from partopt.documents.engine import Layout
    from partopt.documents.plan import Certificate, Plan
    from partopt.documents.profile import Profile
    from partopt.documents.repeat import repeat
    from partopt.documents.stage import Stage
    from partopt.documents.topology import Topology
    from partopt.html_report import write_report
    from partopt.importers import IMPORTERS, import_profile
    from partopt.importers.run import import_run
    from partopt.importers.torch_profile import import_times
    from partopt.job import Job
    from partopt.links import FittedLinks
    from partopt.planners import PLANNERS
    from partopt.profiler import ProfilingStopped, measure, measure_source
    from partopt.profiler.conditions import describe_host
    from partopt.profiler.estimating import estimate, estimate_source
    from partopt.report.pictures import draw
    from partopt.runtime.link_measurement import prepare_links
    from partopt.runtime.measured import TrainingRun
    from partopt.runtime.run import run_source
    from partopt.schedules import SCHEDULES
    from partopt.search.compare import compare
    from partopt.search.does_not_fit import Fitting, find_fitting, list_tried
    from partopt.search.scaling import scale
    from partopt.search.solve import Result, solve
    from partopt.simulation import Simulation, simulate
    from partopt.trainers import TRAINERS, export_plan, readers, writers
    from partopt.trainers.judging import Judgement, judge_layout, plan_layout
    from partopt.trainers.layout import TrainerLayout, read_layout
    from partopt.trainers.planning import job_for, schedule_for, solve_for
    from partopt.trainers.sizing import find_servers, scale_layouts
    from partopt.trainers.trainer import Trainer
    from partopt.trainers.transformer import (
        Chosen,
        Compared,
        Laid,
        Laying,
        choose,
        compare_layout,
        lay,
        read_configuration,
    )
    from partopt.trainers.verifying import verify
    from partopt.transformer.as_profile import find_profile
    from partopt.transformer.config import find_transformer
    from partopt.trials import Trial, Uniform, try_schedule, try_schedules

__version__ = "0.1.0"

_PLACES = {
    "Certificate": "partopt.documents.plan",
    "Chosen": "partopt.trainers.transformer",
    "FittedLinks": "partopt.links",
    "Fitting": "partopt.search.does_not_fit",
    "IMPORTERS": "partopt.importers",
    "Job": "partopt.job",
    "Compared": "partopt.trainers.transformer",
    "Laid": "partopt.trainers.transformer",
    "Laying": "partopt.trainers.transformer",
    "Layout": "partopt.documents.engine",
    "Judgement": "partopt.trainers.judging",
    "Note": "partopt.documents",
    "PLANNERS": "partopt.planners",
    "Plan": "partopt.documents.plan",
    "Profile": "partopt.documents.profile",
    "ProfilingStopped": "partopt.profiler",
    "Result": "partopt.search.solve",
    "SCHEDULES": "partopt.schedules",
    "TRAINERS": "partopt.trainers",
    "Simulation": "partopt.simulation",
    "Stage": "partopt.documents.stage",
    "Topology": "partopt.documents.topology",
    "Trainer": "partopt.trainers.trainer",
    "TrainerLayout": "partopt.trainers.layout",
    "TrainingRun": "partopt.runtime.measured",
    "Trial": "partopt.trials",
    "Uniform": "partopt.trials",
    "choose": "partopt.trainers.transformer",
    "compare_layout": "partopt.trainers.transformer",
    "compare": "partopt.search.compare",
    "describe_host": "partopt.profiler.conditions",
    "draw": "partopt.report.pictures",
    "estimate": "partopt.profiler.estimating",
    "estimate_source": "partopt.profiler.estimating",
    "export_plan": "partopt.trainers",
    "find_fitting": "partopt.search.does_not_fit",
    "find_profile": "partopt.transformer.as_profile",
    "find_servers": "partopt.trainers.sizing",
    "find_transformer": "partopt.transformer.config",
    "lay": "partopt.trainers.transformer",
    "list_tried": "partopt.search.does_not_fit",
    "import_profile": "partopt.importers",
    "import_run": "partopt.importers.run",
    "import_times": "partopt.importers.torch_profile",
    "job_for": "partopt.trainers.planning",
    "judge_layout": "partopt.trainers.judging",
    "measure": "partopt.profiler",
    "measure_source": "partopt.profiler",
    "plan_layout": "partopt.trainers.judging",
    "prepare_links": "partopt.runtime.link_measurement",
    "readers": "partopt.trainers",
    "read_configuration": "partopt.trainers.transformer",
    "read_layout": "partopt.trainers.layout",
    "repeat": "partopt.documents.repeat",
    "run_source": "partopt.runtime.run",
    "scale": "partopt.search.scaling",
    "scale_layouts": "partopt.trainers.sizing",
    "schedule_for": "partopt.trainers.planning",
    "simulate": "partopt.simulation",
    "solve": "partopt.search.solve",
    "solve_for": "partopt.trainers.planning",
    "try_schedule": "partopt.trials",
    "try_schedules": "partopt.trials",
    "verify": "partopt.trainers.verifying",
    "write_report": "partopt.html_report",
    "writers": "partopt.trainers",
}

__all__ = [
    "IMPORTERS",
    "PLANNERS",
    "SCHEDULES",
    "TRAINERS",
    "Certificate",
    "Chosen",
    "Compared",
    "FittedLinks",
    "Fitting",
    "Job",
    "Judgement",
    "Laid",
    "Laying",
    "Layout",
    "Note",
    "PartoptError",
    "Plan",
    "Profile",
    "ProfilingStopped",
    "Result",
    "Simulation",
    "Stage",
    "Topology",
    "Trainer",
    "TrainerLayout",
    "TrainingRun",
    "Trial",
    "Uniform",
    "__version__",
    "choose",
    "compare",
    "compare_layout",
    "describe_host",
    "draw",
    "estimate",
    "estimate_source",
    "export_plan",
    "find_fitting",
    "find_profile",
    "find_servers",
    "find_transformer",
    "import_profile",
    "import_run",
    "import_times",
    "job_for",
    "judge_layout",
    "lay",
    "list_tried",
    "measure",
    "measure_source",
    "plan_layout",
    "prepare_links",
    "read_configuration",
    "read_layout",
    "readers",
    "repeat",
    "run_source",
    "scale",
    "scale_layouts",
    "schedule_for",
    "simulate",
    "solve",
    "solve_for",
    "try_schedule",
    "try_schedules",
    "verify",
    "write_report",
    "writers",
]


def __getattr__(name: str) -> Any:
    """Import a public name where it lives."""
    if name not in _PLACES:
        raise AttributeError(f"module 'partopt' has no attribute {name!r}")
    return getattr(importlib.import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
