"""`partopt plan`."""

import json
import re
import shlex
from ast import literal_eval

import msgspec
import pytest

from partopt import documents, planners
from partopt.documents import plan
from partopt.documents.plan import Plan
from partopt.planners import PLANNERS
from tests.helpers import (
    chain_profile,
    flat,
    measurement,
    out_of_memory,
    profile_of,
    rows,
    two_level,
    uniform_profile,
)


@pytest.fixture
def plan_of(partopt, profile_file, topology_file):
    """Plans a profile on four devices or a topology, with the options that the test gives."""
    return lambda profile=None, *options, on=None: partopt(
        *("plan", profile_file(profile) if profile else profile_file()),
        *("--topology", topology_file(on) if on else topology_file(), *options),
    )


@pytest.fixture
def planned(plan_of):
    """Plans six equal layers on four devices with the options that the test gives."""
    return lambda *options: plan_of(None, *options)


def test_the_plan_is_on_standard_output_and_what_to_do_next_beside_it(planned):
    outcome = planned("--planner", "gpipe")
    assert outcome.code == 0
    assert "plan     gpipe: 4 stages, 1-1-1-1, schedule pipedream" in outcome.out
    assert "BESIDE IT" in outcome.out
    warning, following = outcome.err.splitlines()
    assert warning == "warning: data_parallel is 33.3% faster and fits: --planner data_parallel"
    assert following.startswith("next:    partopt compare ")


def test_a_split_of_ones_own_for_a_trainer_is_told_so_too(planned):
    outcome = planned("--for", "deepspeed", "--cuts", "2,4", "--microbatches", "4")
    assert "warning: data_parallel is " in outcome.err


def test_a_written_plan_is_the_one_that_json_prints(planned, tmp_path):
    outcome = planned("-o", tmp_path / "plan.json")
    assert f"Wrote {tmp_path / 'plan.json'}" in outcome.err
    assert planned("--json").out == planned("-o", "-").out == (tmp_path / "plan.json").read_text()


@pytest.mark.parametrize("flags", [["--json"], ["-o", "-"], ["--json", "-o", "-"]])
def test_one_json_document_and_nothing_else(planned, flags):
    outcome = planned(*flags)
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.document["schema"] == "partopt.plan/1"


def test_json_and_a_file_at_once(planned, tmp_path):
    outcome = planned("--json", "-o", tmp_path / "plan.json")
    assert outcome.out == (tmp_path / "plan.json").read_text()


def test_an_existing_output_is_refused_before_the_work_and_replaced_with_force(
    planned, tmp_path, monkeypatch
):
    (tmp_path / "plan.json").write_text("mine")
    with monkeypatch.context() as patched:
        patched.setattr(planners, "plan", lambda *_: pytest.fail("it planned first"))
        outcome = planned("-o", tmp_path / "plan.json")
    assert (outcome.code, outcome.out, outcome.hints) == (2, "", ["add --force to replace it"])
    assert (tmp_path / "plan.json").read_text() == "mine"
    assert planned("-o", tmp_path / "plan.json", "--force").code == 0
    assert Plan.load(str(tmp_path / "plan.json")).stages


@pytest.mark.slow
def test_the_profile_or_the_topology_is_read_from_standard_input(
    partopt, profile_file, topology_file
):
    content, cluster = documents.read_bytes(profile_file()), documents.read_bytes(topology_file())
    by_file = partopt("plan", profile_file(), "--topology", topology_file(), "--json")
    assert partopt("plan", "-", "--topology", topology_file(), "--json", stdin=content) == by_file
    assert partopt("plan", profile_file(), "--topology", "-", "--json", stdin=cluster) == by_file


def test_standard_input_is_read_once(partopt, profile_file):
    outcome = partopt("plan", "-", "--topology", "-", stdin=documents.encode(uniform_profile(3)))
    assert (outcome.code, outcome.errors) == (2, ["-: not a topology"])


@pytest.mark.parametrize("planner", PLANNERS)
def test_one_layer(plan_of, planner):
    outcome = plan_of(uniform_profile(1), "--planner", planner, "--json")
    assert outcome.code == 0
    assert [(stage["start"], stage["stop"]) for stage in outcome.document["stages"]] == [(0, 1)]


@pytest.mark.parametrize("planner", PLANNERS)
def test_one_device(plan_of, planner):
    outcome = plan_of(None, "--planner", planner, "--json", on=flat(1))
    assert [stage["ranks"] for stage in outcome.document["stages"]] == [[0]]


def test_no_layers(partopt, topology_file):
    document = json.loads(documents.encode(uniform_profile(1))) | {"layers": []}
    outcome = partopt(
        "plan", "-", "--topology", topology_file(), stdin=json.dumps(document).encode()
    )
    assert (outcome.code, outcome.errors) == (2, ["-: layers: expected a list of length >= 1"])


@pytest.mark.parametrize("planner", ["optimal", "gpipe", "torchgpipe", "lingvo", "straight"])
@pytest.mark.parametrize(
    ("layers", "devices", "message"),
    [(3, 8, "5 stages for 3 layers"), (8, 3, "5 stages for 3 devices")],
)
def test_more_stages_than_there_can_be(plan_of, planner, layers, devices, message):
    options = "--stages", 5, "--planner", planner
    outcome = plan_of(uniform_profile(layers), *options, on=flat(devices))
    assert (outcome.code, outcome.out) == (2, "")
    assert (outcome.errors, outcome.hints) == ([message], ["ask for at most 3: --stages 3"])


@pytest.mark.slow
def test_servers_set_the_outermost_level(plan_of):
    outcome = plan_of(None, "--servers", 3, "--json", on=two_level(2, 2))
    assert outcome.document["topology"]["devices"] == 6


MISTAKES = rows(r"""
    --memory 16 | --memory: '16' has no unit
    --memory '16 Gb' | --memory: '16 Gb' is in bits
    --memory '16 GB/s' | --memory: '16 GB/s' is a rate, not a size
    --memory '-1 GB' | --memory: '-1 GB' is not a quantity
    --memory '' | --memory: '' is not a quantity
    --memory '0 GB' | --memory "0 GB": must be positive
    --schedule 1f1b | --schedule 1f1b: needs either --microbatches or --global-batch
    --schedule gpipe --microbatches 4 --global-batch 4 |
        --schedule gpipe: --microbatches and --global-batch are both given
    --microbatches 4 | --microbatches: pipedream is asynchronous and has no iterations
    --schedule pipedream-2bw --global-batch 4 |
        --global-batch: pipedream-2bw is asynchronous and has no iterations
    --cuts 2,x | --cuts 2,x: not a list of whole numbers
    --cuts 2,,4 | --cuts 2,,4: not a list of whole numbers
    --cuts 0 | --cuts 0: 0 is out of place
    --cuts -1 | --cuts -1: -1 is out of place
    --cuts 6 | --cuts 6: 6 is out of place
    --cuts 4,2 | --cuts 4,2: 2 is out of place
    --cuts 2,2 | --cuts 2,2: 2 is out of place
    --cuts 1,2,3,4 | --replicas: 5 devices needed, 4 there
    --microbatch-size 3 --optimizer adamw |
        partopt plan: invalid value for '--optimizer': 'adamw' is not one of 'sgd', 'momentum',
        'adam', 'adam8bit', 'adafactor'
    --cuts 2 --replicas 1 | --replicas: 1 counts for 2 stages
    --cuts 2 --replicas 1,0 | --replicas: 0 is not a number of devices
    --cuts 2 --replicas 1.5,1 | --replicas 1.5,1: not a list of whole numbers
    --cuts 2 --replicas 4,1 | --replicas: 5 devices needed, 4 there
    --replicas 5 | --replicas: 5 devices needed, 4 there
    --cuts 2 --planner gpipe | --planner gpipe: --cuts and --replicas go with --planner manual
    --planner gpipe --cost no-such-file | no-such-file: no such file
""")
CHANGES_NOTHING = rows("""
    --stages 2 --planner pipedream | --stages: the planner pipedream does not look at it
    --stages 2 --planner data_parallel | --stages: the planner data_parallel does not look at it
    --cost parameters --planner straight | --cost: the planner straight does not look at it
    --replication none --planner pipedream |
        --replication none: the planner pipedream does not look at it
    --replication none --planner data_parallel |
        --replication none: the planner data_parallel does not look at it
    --recompute auto --planner gpipe | --recompute auto: the planner gpipe does not look at it
    --cuts 2 --recompute auto | --recompute auto: the planner manual does not look at it
    --cuts '' | --cuts : not a list of whole numbers
""")
COST_FILES = rows(r"""
    b"1\n2\n3\n" | 3 costs for 6 layers
    b"" | 0 costs for 6 layers
    b"1 2 3 4 5 six" | not a list of numbers
    b"\xff" | not a list of numbers
    b"1 2 3 4 5 nan" | must be finite and not negative, and not all zero
    b"1 2 3 4 5 inf" | must be finite and not negative, and not all zero
    b"1 2 3 4 5 -6" | must be finite and not negative, and not all zero
    b"0 0 0 0 0 0" | must be finite and not negative, and not all zero
""")


class TestMistakes:
    @pytest.mark.parametrize(("options", "error"), MISTAKES)
    def test_of_an_option(self, planned, options, error):
        outcome = planned(*shlex.split(options))
        assert (outcome.code, outcome.out, outcome.errors) == (2, "", [error])
        assert len(outcome.hints) == 1

    def test_a_word_that_is_nearly_one_of_the_choices_is_named(self, planned):
        assert planned("--optimizer", "adamw").hints == ['did you mean "adam"?']
        assert planned("--optimizer", "lion").hints == ["see partopt plan --help"]

    def test_a_global_batch_is_a_multiple_of_the_microbatch(self, plan_of):
        options = "--schedule", "1f1b", "--global-batch", 10
        outcome = plan_of(uniform_profile(4, microbatch_size=4), *options)
        assert outcome.errors == ["--global-batch 10: not a multiple of the microbatch size 4"]
        assert outcome.hints == ["choose 8"]

    @pytest.mark.parametrize(("content", "error"), COST_FILES)
    def test_of_a_cost_file(self, planned, tmp_path, content, error):
        (tmp_path / "costs").write_bytes(literal_eval(content))
        outcome = planned("--planner", "gpipe", "--cost", tmp_path / "costs")
        assert (outcome.code, outcome.errors) == (2, [f"{tmp_path / 'costs'}: {error}"])

    def test_parameters_are_no_cost_where_there_are_none(self, plan_of):
        options = "--cost", "parameters", "--planner", "lingvo"
        outcome = plan_of(chain_profile([1.0, 2.0]), *options)
        assert (outcome.code, outcome.errors) == (2, ["--cost parameters: the profile has none"])


def test_costs_of_a_file_are_what_gpipe_balances(planned, tmp_path):
    (tmp_path / "costs").write_text("10 1 1 1 1 1")
    options = ["--planner", "gpipe", "--stages", "2", "--json"]
    document = planned(*options, "--cost", tmp_path / "costs").document
    assert [stage["start"] for stage in document["stages"]] == [0, 1]


def test_a_split_of_ones_own(planned):
    document = planned("--cuts", "2,4", "--replicas", "2,1,1", "--json").document
    assert document["planner"] == "manual"
    assert [(stage["start"], stage["stop"], stage["ranks"]) for stage in document["stages"]] == [
        (0, 2, [0, 1]),
        (2, 4, [2]),
        (4, 6, [3]),
    ]


SIZES = profile_of(
    [measurement([1e-3] * 4), measurement([1.5e-3] * 4, microbatch_size=4), out_of_memory(8)]
)


NOT_MEASURED = rows("""
    5 | 2 | was not measured, and times are never extrapolated | choose from 1 to 4
    8 | 1 | does not fit the device that was profiled | choose at most 4
    9 | 1 | does not fit the device that was profiled | choose at most 4
""")


@pytest.mark.parametrize(("size", "code", "error", "hint"), NOT_MEASURED)
def test_a_microbatch_size_that_was_not_measured(plan_of, size, code, error, hint):
    outcome = plan_of(SIZES, "--microbatch-size", size)
    assert (outcome.code, outcome.out, outcome.hints) == (int(code), "", [hint])
    assert outcome.errors == [f"microbatch size {size} {error}"]


def test_a_microbatch_size_between_two_is_interpolated(plan_of):
    outcome = plan_of(SIZES, "--microbatch-size", 2, "--planner", "data_parallel", "--json")
    assert outcome.document["stages"][0]["compute_s"] == pytest.approx(4 * 2 * (1e-3 + 0.5e-3 / 3))
    assert "warning: microbatch 2 was not measured: times between those of 1 and " in outcome.err


class TestWhatDoesNotFit:
    """Activations dominate: the larger microbatch of two needs about 4 GB on a stage, the smaller a
    quarter of it.
    """

    LONG = "1f1b --global-batch 8 --recompute always"
    SMALL, LARGE = ([([s], size * 10**9) for s in range(4)] for size in (1, 4))
    MEASURED = (
        measurement([1e-3] * 4, [2e-3] * 4, [10**6] * 4, 1, stash_groups=SMALL),
        measurement([1.5e-3] * 4, [2e-3] * 4, [4 * 10**6] * 4, 4, stash_groups=LARGE),
    )
    CONTENT = profile_of([*MEASURED], parameter_bytes=[10**6] * 4)

    @pytest.fixture
    def planned(self, plan_of):
        return lambda *options: plan_of(self.CONTENT, *options)

    @pytest.mark.slow
    @pytest.mark.parametrize("memory", ["12 GB", "5 GB", "2 GB"])
    @pytest.mark.parametrize("planner", ["gpipe", "pipedream", "straight", "data_parallel"])
    @pytest.mark.parametrize(
        "schedule",
        ["pipedream", *(f"gpipe --{all}" for all in ("global-batch 16", "microbatches 4")), LONG],
    )
    def test_the_command_of_the_hint_does_fit(
        self, partopt, planned, tmp_path, memory, planner, schedule
    ):
        (tmp_path / "costs").write_text("1 2 3 4")
        costs = ["--cost", tmp_path / "costs"] if planner == "gpipe" else []
        options = [
            "--memory",
            memory,
            "--planner",
            planner,
            "--schedule",
            *schedule.split(),
            *costs,
        ]
        first = planned(*options, "--json")
        if first.code == 0 or "nothing found fits" in first.hints[0]:
            peaks = [stage["memory"]["total_bytes"] for stage in first.document["stages"]]
            assert (max(peaks) <= float(memory.split()[0]) * 1e9) == (first.code == 0)
            return
        hint = re.fullmatch(r"this fits \((.*) samples/s\): partopt (.*)", first.hints[0])
        assert (first.code, hint is not None) == (1, True)
        again = partopt(*shlex.split(hint[2]), "--json")
        assert again.code == 0
        speed = again.document["predicted"]["samples_per_s"]
        assert float(hint[1]) == pytest.approx(speed, rel=5e-3)

    def test_it_says_by_how_much_and_writes_nothing(self, planned, tmp_path):
        output = tmp_path / "plan.json"
        outcome = planned("--memory", "3 GB", "--planner", "data_parallel", "-o", output)
        assert outcome.code == 1
        assert outcome.errors == [
            "the plan does not fit: a device of stage 0 needs 16 GB, "
            "which exceeds the limit by 13 GB"
        ]
        [hint] = outcome.hints
        assert hint.startswith("this fits (250.0 samples/s): partopt plan /")
        assert hint.endswith(f" --memory '3 GB' -o {output}")  # without the planner
        assert "DOES NOT FIT 3 GB, over by 13 GB" in outcome.out
        assert not (tmp_path / "plan.json").exists()

    @pytest.mark.slow
    def test_where_nothing_tried_fits_it_says_what_was_tried(self, planned):
        [hint] = planned("--memory", "1 MB").hints
        assert hint == (
            "nothing found fits, whatever --shard, --optimizer; take larger devices, or more of "
            "them"
        )

    @pytest.mark.slow
    def test_what_was_given_is_tried_otherwise_and_what_has_no_other_is_not_named(self, planned):
        given = ["--recompute", "always", "--microbatch-size", 1, "--planner", "gpipe"]
        assert planned("--memory", "1 MB", *given, "--optimizer", "momentum").hints == [
            "nothing found fits, whatever --microbatch-size, --planner, --recompute, --shard, "
            "--optimizer; take larger devices, or more of them"
        ]
        own = ["--recompute", "always", "--microbatches", 4, "--schedule", "1f1b", "--cuts", "2"]
        own += ["--shard", "parameters"]
        assert planned("--memory", "1 MB", *own, "--optimizer", "sgd").hints == [
            "take larger devices, or more of them"
        ]

    def test_the_optimizer_is_the_last_resort(self, plan_of):
        heavy = chain_profile([1e-3], parameter_bytes=[10**9])
        for devices, way in ((4, "--shard optimizer"), (1, "--optimizer momentum")):
            outcome = plan_of(heavy, "--memory", "3 GB", on=flat(devices))
            assert "warning" not in outcome.err
            fits = rf"this fits \(.* samples/s\): partopt plan .* {way}"
            assert re.fullmatch(fits, outcome.hints[0])

    def test_the_hint_names_the_fastest_way(self, planned):
        schedule = ["--schedule", "gpipe", "--microbatches", "4", "--microbatch-size", "4"]
        [hint] = planned("--memory", "5 GB", "--planner", "gpipe", *schedule).hints
        assert hint.startswith("this fits (486.3 samples/s): partopt plan ")
        assert " --planner gpipe --topology " in hint
        assert hint.endswith(" --recompute always")


@pytest.mark.slow
def test_the_limit_of_the_device_is_the_topologys(plan_of):
    small = flat(4, memory_bytes=10**6)
    assert plan_of(None, on=small).code == 1
    assert plan_of(None, "--memory", "1 GB", on=small).code == 0
    assert plan_of(None, on=flat(4)).code == 0


def test_an_inverted_topology_warns_and_plans(plan_of):
    outcome = plan_of(None, "--json", on=two_level(2, 2, inner_bandwidth=1e9, outer_bandwidth=2e9))
    assert (outcome.code, outcome.document["topology"]["devices"]) == (0, 4)
    assert outcome.err.startswith(
        "warning: servers-2x2: level cluster (2 GB/s) is faster than server inside it (1 GB/s)"
    )


def test_a_plan_bound_by_a_cut_is_written_too(plan_of):
    profile = chain_profile([1e-3] * 2, output_bytes=[10**9, 0])
    outcome = plan_of(profile, "--planner", "gpipe", "--stages", 2, "--json")
    assert outcome.document["predicted"]["bound_by"] == "cut before stage 1"


def test_the_printed_plan_is_the_published_document(planned):
    assert msgspec.json.decode(planned("--json").out, type=plan.Plan).planner == "optimal"


@pytest.mark.slow
def test_a_plan_that_does_not_fit_is_not_written(planned, tmp_path):
    to = tmp_path / "plan.json", "-"
    to_file, to_stdout = (planned("--memory", "1 kB", "-o", output) for output in to)
    assert (to_file.code, to_stdout.code, to_stdout.out) == (1, 1, "")
    assert not (tmp_path / "plan.json").exists()


@pytest.mark.parametrize(("options", "message"), CHANGES_NOTHING)
def test_an_option_that_would_change_nothing_is_refused(planned, options, message):
    outcome = planned(*shlex.split(options))
    assert (outcome.code, outcome.out, outcome.errors) == (2, "", [message])


def test_the_next_command_states_the_same_problem(partopt, profile_file, topology_file):
    path = profile_file(name="my model.json")
    words = ["--schedule", "1f1b", "--microbatches", "8", "--cut-at", "layer*"]
    options = ["--topology", topology_file(), *words]
    last = partopt("plan", path, *options).err.splitlines()[-1]
    assert shlex.split(last.removeprefix("next:"))[:3] == ["partopt", "compare", path]
    assert sorted(shlex.split(last)[4:]) == sorted(options)


def test_more_microbatches_than_can_be_simulated_are_refused(planned):
    outcome = planned("--schedule", "1f1b", "--microbatches", 10**9)
    error = "1000000000 microbatches are more than 20,000,000 actions to simulate"
    assert (outcome.code, outcome.errors) == (2, [error])
