"""The public names, each where it lives: for type checkers, and read as `partopt` runs."""

from partopt.documents.engine import Layout as Layout
from partopt.documents.plan import Plan as Plan
from partopt.documents.profile import Profile as Profile
from partopt.documents.topology import Topology as Topology
from partopt.errors import Interrupted as Interrupted, PartoptError as PartoptError
from partopt.importers import IMPORTERS as IMPORTERS, import_profile as import_profile
from partopt.importers.repeat import repeat as repeat
from partopt.importers.run_times import import_run as import_run
from partopt.importers.torch_profile import import_times as import_times
from partopt.job import Job as Job
from partopt.what_if.drawing import draw as draw
from partopt.what_if.html_report import write_report as write_report
from partopt.what_if.simulation import Simulation as Simulation, simulate as simulate
from partopt.what_if.trials import (
    Trial as Trial,
    Uniform as Uniform,
    try_schedule as try_schedule,
    try_schedules as try_schedules,
)
from partopt.documents.links import FittedLinks as FittedLinks
from partopt.planners import PLANNERS as PLANNERS
from partopt.profiler import (
    ProfilingStopped as ProfilingStopped,
    measure as measure,
    measure_source as measure_source,
)
from partopt.profiler.conditions import describe_host as describe_host
from partopt.profiler.estimating import estimate as estimate, estimate_source as estimate_source
from partopt.runtime.run import run_source as run_source
from partopt.runtime.link_measurement import prepare_links as prepare_links
from partopt.runtime.measured import TrainingRun as TrainingRun
from partopt.schedules import SCHEDULES as SCHEDULES
from partopt.search.changes import Changes as Changes, change_text as change_text
from partopt.search.compare import compare as compare
from partopt.search.fitting import find_fitting as find_fitting, list_tried as list_tried
from partopt.search.jobs import (
    job_for as job_for,
    read_job as read_job,
    schedule_for as schedule_for,
)
from partopt.search.judging import (
    Judgement as Judgement,
    judge_layout as judge_layout,
    plan_layout as plan_layout,
)
from partopt.search.levers import take_best as take_best
from partopt.search.runs import price_runs as price_runs
from partopt.search.scaling import scale as scale, scale_servers as scale_servers
from partopt.search.sizes import find_servers as find_servers
from partopt.search.solve import Result as Result, solve as solve
from partopt.search.verify import verify as verify
from partopt.trainers import (
    TRAINERS as TRAINERS,
    export_plan as export_plan,
)
from partopt.trainers.layout import TrainerLayout as TrainerLayout, read_layout as read_layout
from partopt.trainers.trainer import Trainer as Trainer
from partopt.transformer.as_profile import find_profile as find_profile
from partopt.importers.hugging_face import find_transformer as find_transformer

__version__: str
