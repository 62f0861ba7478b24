"""`partopt plan --scaling`."""

import shlex

import jsonschema
import pytest
from click import unstyle

from tests.helpers import flat, two_level, uniform_profile


@pytest.fixture
def scaled(partopt, profile_file, topology_file):
    """Scales sixteen equal layers over servers of two devices."""
    arguments = (
        "plan",
        profile_file(uniform_profile(16)),
        "--topology",
        topology_file(two_level(2, 2, 1e11, 1e10)),
    )
    return lambda *options: partopt(*arguments, *options)


SYNCHRONOUS = ["--schedule", "1f1b"]


@pytest.mark.slow
def test_one_device_is_all_efficient_and_more_are_the_speed_up_a_device(scaled):
    rows = scaled("--scaling", "1,2,4,8", "--json").document["rows"]
    assert [row["devices"] for row in rows] == [1, 2, 4, 8]
    assert rows[0]["efficiency"] == pytest.approx(1.0)
    for row in rows:
        assert row["efficiency"] == pytest.approx(
            row["samples_per_s"] / rows[0]["samples_per_s"] / row["devices"]
        )
        assert row["microbatches"] is None


@pytest.mark.slow
def test_every_row_is_the_plan_on_that_many_devices(scaled):
    for row in scaled("--scaling", "2,4,6", "--json").document["rows"]:
        document = scaled("--servers", row["devices"] // 2, "--json").document
        assert (row["planner"], row["period_s"]) == (
            document["planner"],
            document["predicted"]["period_s"],
        )


@pytest.mark.slow
@pytest.mark.parametrize("flag", ["--microbatches", "--global-batch"])
def test_strong_scaling_keeps_the_batch_and_weak_scaling_lets_it_grow(scaled, flag):
    options = ["--scaling", "2,4,6", *SYNCHRONOUS, flag, 16, "--json"]
    assert [row["microbatches"] for row in scaled(*options).document["rows"]] == [16, 16, 16]
    assert [row["microbatches"] for row in scaled(*options, "--weak").document["rows"]] == [
        16,
        32,
        48,
    ]


def test_a_batch_grows_in_proportion_where_the_devices_are_no_multiples(scaled):
    rows = scaled(
        "--scaling", "4,6", *SYNCHRONOUS, "--microbatches", 8, "--weak", "--json"
    ).document["rows"]
    assert [row["microbatches"] for row in rows] == [8, 12]


def test_a_batch_that_grows_to_no_whole_number(scaled):
    options = ["--scaling", "4,6", *SYNCHRONOUS, "--weak"]
    outcome = scaled(*options, "--microbatches", 9)
    assert outcome.errors == ["--microbatches 9: grows to no whole number from 4 to 6 devices"]
    assert outcome.hints == ["choose a multiple of 4: --microbatches 12"]
    assert scaled(*options, "--microbatches", 12).code == 0


@pytest.mark.slow
def test_weak_scaling_is_the_more_efficient(scaled):
    strong, weak = (
        scaled("--scaling", "1,8", *SYNCHRONOUS, "--microbatches", 8, *more, "--json")
        for more in ([], ["--weak"])
    )
    assert weak.document["rows"][1]["efficiency"] > strong.document["rows"][1]["efficiency"]


@pytest.mark.slow
def test_a_table_with_the_batch_of_each_row(scaled):
    outcome = scaled("--scaling", "1,2,4")
    heading, *rows = unstyle(outcome.out).splitlines()
    assert (outcome.code, len(rows)) == (0, 3)
    assert heading.split()[:3] == ["DEVICES", "BATCH", "SAMPLES/S"]
    assert all(len(line) <= 80 for line in unstyle(outcome.out).splitlines())
    synchronous = scaled("--scaling", "1,2", *SYNCHRONOUS, "--microbatches", 4).out
    assert unstyle(synchronous).splitlines()[1].split()[1].endswith("x4")


def test_json_is_one_document_and_nothing_else(scaled):
    outcome = scaled("--scaling", "2", "--json")
    assert (outcome.code, outcome.err, outcome.document["schema"]) == (0, "", "partopt.scaling/1")


def test_the_document_meets_its_published_schema(partopt, scaled):
    schema = partopt("schema", "scaling").document
    document = scaled("--scaling", "1,2", "--json").document
    jsonschema.validate(document, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"rows": [{**document["rows"][0], "devices": "one"}]}, schema)


def test_what_does_not_fit_is_in_the_table(scaled):
    outcome = scaled("--scaling", "1,2", "--memory", "1 kB", "--json")
    assert outcome.code == 0
    assert [row["fits"] for row in outcome.document["rows"]] == [False, False]


def test_a_planner_that_is_named_makes_every_plan(scaled):
    rows = scaled("--scaling", "2,4", "--planner", "straight", "--json").document["rows"]
    assert [row["planner"] for row in rows] == ["straight", "straight"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--weak"], "--weak goes with --scaling"),
        (
            ["--scaling", "2,4", "--weak"],
            "--weak: pipedream is asynchronous and has no batch to grow",
        ),
        (["--scaling", "4,2"], "--scaling 4,2: must be ascending numbers of devices"),
        (["--scaling", "2,2"], "--scaling 2,2: must be ascending numbers of devices"),
        (["--scaling", "0,2"], "--scaling 0,2: must be ascending numbers of devices"),
        (["--scaling", "-1"], "--scaling -1: must be ascending numbers of devices"),
        (["--scaling", ""], "--scaling : not a list of whole numbers"),
        (["--scaling", "2,x"], "--scaling 2,x: not a list of whole numbers"),
        (
            ["--scaling", "2,4", "--cuts", "3"],
            "--cuts: a split of your own is for one number of devices",
        ),
        (
            ["--scaling", "2,4", "--replicas", "2"],
            "--replicas: a split of your own is for one number of devices",
        ),
        (
            ["--scaling", "2,4", "--planner", "manual"],
            "--planner manual: a split of your own is for one number of devices",
        ),
        (["--scaling", "2,4", "--planner", "gpip"], 'unknown planner "gpip"'),
        (
            ["--scaling", "2,4", "--planner", "pipedream", "--stages", 2],
            "--stages: the planner pipedream does not look at it",
        ),
        (["--scaling", "2,4", "-o", "a.txt"], "a.txt: unsupported format .txt"),
        (
            ["--scaling", "2,4", "--schedule", "1f1b"],
            "--schedule 1f1b: needs either --microbatches or --global-batch",
        ),
        (["--scaling", "2,4", "--stages", 3], "3 stages for 2 devices"),
        (["--scaling", "1000000000000"], "1000000000000 devices; partopt plans for up to 1048576"),
    ],
)
def test_mistakes(scaled, options, message):
    outcome = scaled(*options)
    assert (outcome.code, outcome.out, outcome.errors) == (2, "", [message])
    assert len(outcome.hints) == 1


@pytest.mark.slow
def test_a_number_that_fills_no_servers_is_answered_with_its_neighbours(
    partopt, profile_file, topology_file
):
    arguments = profile_file(), "--topology", topology_file(two_level(8, 2))
    outcome = partopt("plan", *arguments, "--scaling", "8,12")
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.errors == ["12 devices do not fill servers-8x2: 8 to a server"]
    assert outcome.hints == ["choose 8 or 16, for example"]
    assert partopt("plan", *arguments, "--scaling", "8,16").code == 0


def test_thousands_of_devices(partopt, profile_file, topology_file):
    arguments = profile_file(uniform_profile(4)), "--topology", topology_file(flat(4, 1e9))
    outcome = partopt(
        "plan",
        *arguments,
        "--scaling",
        "16,1024",
        *SYNCHRONOUS,
        "--microbatches",
        1024,
        "--planner",
        "data_parallel",
    )
    assert (outcome.code, outcome.out.splitlines()[-1].split()[0]) == (0, "1024")
    assert all(len(line) <= 80 for line in unstyle(outcome.out).splitlines())


@pytest.mark.slow
@pytest.mark.parametrize(
    "given", [[], ["--schedule", "auto", "--global-batch", 4], ["--planner", "data_parallel"]]
)
def test_a_plan_of_one_stage_says_how_to_find_where_a_pipeline_is_faster(
    partopt, profile_file, topology_file, given
):
    job = profile_file(uniform_profile(16)), "--topology", topology_file(flat(4, 1e15))
    outcome = partopt("plan", *job, *given)
    [hint] = outcome.hints
    lead, command = hint.split(": ", 1)
    assert lead == "from how many devices on a pipeline is faster"
    rows = partopt(*shlex.split(command)[1:], "--json").document["rows"]
    assert [row["devices"] for row in rows] == [4, 8, 16, 32]
    assert rows[0]["shape"] == "4"


@pytest.mark.parametrize(
    "given", [["--planner", "straight"], ["--cuts", "4"], ["--for", "torch", *SYNCHRONOUS]]
)
def test_other_plans_do_not(scaled, given):
    more = ["--microbatches", 8] if "--for" in given else []
    outcome = scaled(*given, *more)
    assert (outcome.code, outcome.hints) == (0, [])


def test_a_budget_without_a_price_is_refused_before_anything_is_searched(partopt, monkeypatch):
    monkeypatch.setattr("partopt.scale_servers", lambda *_: pytest.fail("it searches"))
    words = "--for", "megatron", "--global-batch", 64, "--sequence", 4096, "--topology", "dgx-h100"
    sizes = "--servers", "1-4", "--tokens", "15T", "--budget", 2
    outcome = partopt("plan", "llama3-8b", *words, *sizes)
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.errors == ["--budget: dgx-h100 has no price of a device"]
    assert outcome.hints == ["add --price 2.1"]
