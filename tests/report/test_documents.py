"""Pages of small documents, whole: they say what they said.

`tests/golden/documents.txt` has them. Whoever changes one on purpose reads the difference, and runs
`pytest tests/report --update`.
"""

import re
from functools import cache

import click
import pytest
from msgspec.structs import replace

import partopt as po
from partopt.documents.device import read_device
from partopt.documents.doctor import Accelerator, Check, Diagnosis, Exchange, Machine
from partopt.documents.files import find_shipped, read_bytes
from partopt.documents.profile import Device, Environment, Group
from partopt.documents.stage import Figures
from partopt.documents.topology import Topology
from partopt.documents.training_run import Check as Compared
from partopt.documents.transformer import LayoutBeside
from partopt.importers.hugging_face import load_transformer
from partopt.report import clusters, pages, plan_text, run_text
from partopt.report import doctor_text as doctor
from partopt.report import plans_text as plans
from partopt.report import profile_text as profile
from partopt.report import simulation_text as simulation
from partopt.report import transformer_text as transformer
from partopt.report import trials_text as trials
from partopt.report.text import page_style
from partopt.runtime.link_fit import fit_links, levels_of
from partopt.simulator import execute
from partopt.what_if.variation import flows_of
from tests.helpers import ROOT, chain_profile, flat, limited, measurement, out_of_memory, profile_of
from tests.links.synthetic import level_samples
from tests.links.synthetic import measurement as measured_links
from tests.report.pictures import cases
from tests.report.test_simulation_text import case, document
from tests.trainers.models import plan_layout

PAGES = ROOT / "tests/golden/documents.txt"
KNOWN = Environment(
    torch="2.7", cuda="12.8", driver="570", cudnn="9", nccl="2.26", python="3.11", partopt="0.1"
)
TUNED = {
    "float32_matmul_precision": "high",
    "matmul_tf32": True,
    "cudnn_tf32": True,
    "cudnn_benchmark": True,
    "attention": ["flash", "cudnn"],
    "sm_clock_hz": 1.755e9,
    "throttled_by": ["power", "heat"],
}
CPU = Device(name="EPYC", type="cpu")
GPU = Device(name="H100", type="cuda", memory_bytes=80 * 10**9)


def known_profile(**environment):
    """Six layers of a group at two sizes that fit and one that does not."""
    names = ["table", "h.0.a", "h.0.b", "h.1.a", "h.1.b", "head"]
    times = [1e-3, 2e-3, 4e-3, 2e-3, 4e-3, 3e-3]
    sizes = [
        measurement(times, [2 * each for each in times], [10**6] * 6, 1),
        measurement(
            [2 * each for each in times],
            [4 * each for each in times],
            [2 * 10**6] * 6,
            2,
            step_s=0.1,
            coverage=0.96,
            overhead=1.25,
            optimizer_s=5e-3,
            peak_memory_bytes=10**9,
        ),
        out_of_memory(4),
    ]
    found = profile_of(sizes, [10**6 * n for n in (9, 1, 2, 1, 2, 9)], names, name="gpt")
    layers = [replace(own, type=own.name[-1].upper() * 3) for own in found.layers]
    layers[3:5] = [replace(own, measured_as=n) for n, own in enumerate(layers[3:5], 1)]
    layers[5] = replace(layers[5], call=1)
    return replace(
        found,
        model=replace(found.model, tokens_per_sample=1024),
        device=GPU,
        layers=layers,
        environment=replace(KNOWN, **environment),
        autocast="bfloat16",
        compiled=True,
        group=Group(ranks=2),
    )


def one_unmeasured():
    """The profile where one layer has the times of another."""
    found = known_profile()
    return replace(
        found,
        layers=[*found.layers[:4], replace(found.layers[4], measured_as=None), found.layers[5]],
    )


def machine():
    """One of two GPUs, without a compiler, whose all-reduce failed."""
    return Diagnosis(
        environment=KNOWN,
        machine=Machine(system="Linux", processor=CPU, cores=8),
        devices=[
            Accelerator(device=GPU, capability="9.0", reaches=[1]),
            Accelerator(device=GPU, capability="9.0"),
        ],
        backend="nccl",
        checks=[
            Check(name="exchange", status="ok", seconds=1.25),
            Check(name="compiler", status="missing", text="no gcc"),
        ],
        exchanges=[
            Exchange(kind="send", bytes=10**6, first_s=1e-3, seconds=1e-4),
            Exchange(kind="all-reduce", bytes=2 * 10**6, error="no"),
        ],
    )


def ran(**changes):
    """A run that an engine made of two ranks, as it learned what one process does or not."""
    equal = changes.pop("equal")
    found = cases.run(2)
    check = Compared(
        compared="gradients",
        loss_error=1e-7,
        largest_error=2e-6,
        worst="head.weight",
        parameters=12,
        equal=equal,
    )
    return run_text.render(replace(found, check=check, **changes))


def tried(name, **options):
    return po.try_schedule(name, po.Uniform(**options)).document


def fitted():
    levels = [level_samples(level) for level in levels_of(16, 4)[:1]]
    return fit_links(measured_links(*levels, hosts=("a", "a", "b", "b")), "mine", 4)


def flows():
    profile = chain_profile([1.0, 1.0], output_bytes=[2 * 10**6, 0], parameter_bytes=[10**6, 0])
    options = {"schedule": "1f1b", "microbatches": 4, "cuts": [1], "replicas": [2, 1]}
    return flows_of(execute(po.solve(po.Job(profile, flat(3, 1e6), **options)).plan))


def several(*names, **options):
    return po.try_schedules(po.Uniform(**options), names)


@cache
def laid(model="llama3-8b", layout="tp=2,pp=4,dp=2,microbatch=1", form="bfloat16"):
    return plan_layout("megatron", load_transformer(model), layout, form, {})


def changed(layout="tp=2,pp=4,dp=2,microbatch=1", limit=None):
    """A layout beside the best of the same model."""
    plan = laid(layout=layout)
    if limit is not None:
        plan = limited(plan, limit)
    changes = ["recompute_granularity  full -> none", "num_layers  32 -> 30"]
    return transformer.render_change(plan, laid(), changes)


def priced(scaling):
    """The table with the dollars of its devices, and tokens."""
    rows = [
        replace(
            row,
            figures=Figures(
                tokens_per_s=1000 * row.samples_per_s,
                price_per_hour=2.5 * row.devices,
                samples_per_money=row.samples_per_s * 1440 / row.devices,
                tokens_per_money=row.samples_per_s * 1440_000 / row.devices,
            ),
        )
        for row in scaling.rows
    ]
    return replace(scaling, rows=rows)


def beside(again, simulated, fits):
    """A layout that takes half a second more, 0.42 s of it for tensors."""
    return LayoutBeside(
        layout=replace(laid().transformer.layout, tp=4, pp=2, recompute=again),
        iteration_s=laid().predicted.iteration_s + 0.5,
        simulated=simulated,
        memory_bytes=80 * 10**9,
        fits=fits,
        part="tensor",
        part_s=0.42,
    )


def laid_beside_others():
    others = [beside("never", True, True), beside("always", False, False), beside(3, True, True)]
    about = replace(laid().transformer, beside=others, tried=1234)
    return replace(laid(), transformer=about)


@cache
def planned():
    """Stages of two and one replicas, whose gradients and messages take long."""
    profile = chain_profile(
        [1e-3, 2e-3, 3e-3], output_bytes=[10**6, 10**5, 0], parameter_bytes=[10**6] * 3
    )
    options = {"schedule": "1f1b", "microbatches": 4, "cuts": [2], "replicas": [2, 1]}
    return po.solve(po.Job(profile, flat(4, 1e9, memory_bytes=10**9), **options)).plan


def simulated(schedule):
    return document(*case(schedule, topology=flat(4, 1e8)))


def styled(page, **style):
    def render():
        with page_style(**style):
            return page()

    return render


RENDERED = {
    "a profile": lambda: profile.render(known_profile(**TUNED)),
    "a profile in ASCII": styled(
        lambda: profile.render(known_profile(), all_layers=True), ascii_only=True, spell=str.upper
    ),
    "a profile of which one layer did not run": lambda: profile.render(one_unmeasured()),
    "a profile of blocks": styled(lambda: profile.render(cases.many_layers(50)), spell=str.upper),
    "a profile of blocks, every layer": lambda: profile.render(
        cases.many_layers(2), all_layers=True
    ),
    "a plan": lambda: plan_text.render(planned()),
    "a plan in ASCII": styled(lambda: plan_text.render(limited(planned(), 10**7)), ascii_only=True),
    "a simulation": lambda: simulation.render(simulated("1f1b")),
    "a simulation from both ends": lambda: simulation.render(simulated("dualpipe")),
    "a simulation in ASCII": styled(
        lambda: simulation.render(simulated("pipedream")), ascii_only=True
    ),
    "plans in a table": lambda: plans.render_comparison(cases.comparison(3)),
    "numbers of devices": lambda: plans.render_scaling(cases.scaling([1, 8, 32])),
    "numbers of devices with a price": lambda: plans.render_scaling(
        priced(cases.scaling([1, 8, 32]))
    ),
    "a run": lambda: ran(equal=True),
    "a run of torch's that learned something else": lambda: ran(
        equal=False,
        steps=1,
        engine="torch",
        remarks=["slow", "two"],
        plan=replace(
            cases.run(2).plan,
            tokens_per_sample=100,
            estimated="H100",
            schedule="pipedream",
            measured_per="microbatch",
        ),
    ),
    "a machine": lambda: doctor.render(machine()),
    "a machine without exchanges": lambda: doctor.render(replace(machine(), exchanges=[])),
    "1f1b": lambda: trials.render(tried("1f1b", stages=3, microbatches=4)),
    "interleaved in ASCII": styled(
        lambda: trials.render(tried("interleaved", stages=2, microbatches=4, recompute=True)),
        ascii_only=True,
    ),
    "pipedream": lambda: trials.render(tried("pipedream", stages=10, microbatches=20)),
    "schedules": lambda: trials.render(
        several("gpipe", "1f1b", "zb-h1", "dualpipe", microbatches=6, transfer="50 ms")
    ),
    "topologies": lambda: clusters.render_topologies(
        {name: Topology.load(name) for name in ("dgx-h100", "v100-pcie")}
    ),
    "a topology with a price": lambda: clusters.render_topology(
        replace(
            Topology.load("v100-pcie"),
            device=replace(Topology.load("v100-pcie").device, price_per_hour=2.5),
        )
    ),
    "a device": lambda: clusters.render_device(
        read_device(read_bytes(find_shipped("h100", "devices")), "h100")
    ),
    "links": lambda: clusters.render_links(fitted()),
    "flows": lambda: pages.render_flows(flows()),
    "flows that were not tried": lambda: pages.render_flows(
        replace(
            flows(),
            iteration_s=None,
            estimated="H100",
            flows=[
                replace(each, critical=None, per_second=None, saved=None) for each in flows().flows
            ],
        )
    ),
    "no flows": lambda: pages.render_flows(replace(flows(), flows=[])),
    "flows as a table": lambda: pages.flows_csv(flows()),
    "a layout": lambda: transformer.render(laid(), arithmetic=True),
    "a layout of experts in ASCII": styled(
        lambda: transformer.render(
            laid("mixtral-8x7b", "tp=2,ep=2,pp=4,microbatch=1,recompute=always", "fp8")
        ),
        ascii_only=True,
    ),
    "a layout beside the best": lambda: changed("tp=2,pp=4,dp=2,microbatch=1,recompute=always"),
    "a layout beside the best that does not fit": lambda: changed(limit=10**9),
    "a layout that is the best": lambda: changed(),
    "a layout beside others": lambda: transformer.render(laid_beside_others()),
}


@pytest.fixture(scope="module")
def recorded(request):
    """The pages by name; none where they are written anew."""
    if not request.config.getoption("--update"):
        yield dict(re.findall(r"^=== (.*)\n((?:(?!===).*\n)*)", PAGES.read_text(), re.MULTILINE))
        return
    found = {}
    yield found
    PAGES.write_text("".join(f"=== {name}\n{page}" for name, page in found.items()))


@pytest.mark.parametrize("name", RENDERED)
def test_a_page_says_what_it_said(name, recorded, request):
    with page_style(width=100):
        lines = click.unstyle(RENDERED[name]()).splitlines()
    page = "".join(f"{line.rstrip()}\n" for line in lines)
    if request.config.getoption("--update"):
        recorded[name] = page
    assert page == recorded[name]


def test_every_page_is_recorded(recorded, request):
    assert request.config.getoption("--update") or recorded.keys() == RENDERED.keys()


def test_of_very_many_rows_the_first_and_the_last_are_shown():
    rows = [(place, 1) for place in range(300)]
    assert profile.choose_rows(range(100)) == (rows[:100], 0)
    assert profile.choose_rows(range(101)) == ([*rows[:75], None, *rows[76:101]], 1)
    assert profile.choose_rows(range(300)) == ([*rows[:75], None, *rows[275:]], 200)
    # fifty that are alike between others: a row
    alike = [*range(60), *[-1] * 50, *range(60)]
    every = [*rows[:60], (60, 50), *rows[110:170]]
    assert profile.choose_rows(alike) == ([*every[:75], None, *every[96:]], 21)
