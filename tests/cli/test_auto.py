"""`partopt plan --schedule auto`, and the options of schedules with several stages a device."""

import re
import shlex

import pytest
from click import unstyle

from partopt.documents.plan import Plan
from partopt.documents.profile import Profile
from tests.helpers import flat, measurement, profile_of, two_level, uniform_profile


def sizes(layers: int) -> Profile:
    """Equal layers, measured at two sizes."""
    return profile_of(
        [
            measurement(
                [forward] * layers,
                [2 * forward] * layers,
                [size * 10**6] * layers,
                size,
                stash_groups=[((layer,), size * 10**8) for layer in range(layers)],
            )
            for size, forward in ((1, 1e-3), (3, 1.5e-3))
        ],
        parameter_bytes=[10**6] * layers,
    )


@pytest.fixture
def planned(partopt, profile_file, topology_file):
    """Plans eight equal layers, measured at two sizes, on four devices."""
    return lambda *options, layers=8: partopt(
        "plan", profile_file(sizes(layers)), "--topology", topology_file(), *options
    )


@pytest.fixture
def auto(planned):
    return lambda *options, **given: planned("--schedule", "auto", *options, **given)


def table(out: str) -> dict[str, list[str]]:
    """The cells of the table of schedules, by schedule."""
    lines = unstyle(out).splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("SCHEDULE"))
    return {line.split()[0]: line.split() for line in lines[first + 1 :]}


@pytest.mark.slow
def test_the_best_plan_is_printed_and_all_schedules_beside_it(auto):
    outcome = auto("--global-batch", 24)
    assert outcome.code == 0
    rows = table(outcome.out)
    assert f"schedule {next(iter(rows))}" in outcome.out
    assert {"1f1b", "gpipe", "zbv", "interleaved", "naive"} <= rows.keys()
    assert all(len(line) <= 80 for line in unstyle(outcome.out).splitlines())


@pytest.mark.slow
def test_it_is_never_slower_than_a_schedule_that_is_named(planned, auto):
    best = auto("--global-batch", 24, "--json").document["predicted"]["samples_per_s"]
    for name in ("1f1b", "gpipe", "zb-h1", "interleaved", "zbv", "1f1b-eager"):
        for size in (1, 3):
            options = [
                "--schedule",
                name,
                "--global-batch",
                24,
                "--microbatch-size",
                size,
                "--planner",
                "gpipe",
                "--json",
            ]
            assert planned(*options).document["predicted"]["samples_per_s"] <= best * (1 + 1e-9)


@pytest.mark.slow
def test_a_written_plan_is_shown_and_simulates_as_it_predicts(partopt, auto, tmp_path):
    path = tmp_path / "plan.json"
    outcome = auto("--microbatches", 8, "-o", path)
    assert f"Wrote {path}" in outcome.err
    assert outcome.err.splitlines()[-1] == f"next:    partopt simulate {path}"
    assert (
        path.read_text()
        == auto("--microbatches", 8, "--json").out
        == auto("--microbatches", 8, "-o", "-").out
    )
    made = Plan.load(str(path))
    assert partopt("show", path).code == 0
    assert partopt("simulate", path, "--json").document["period_s"] == pytest.approx(
        made.predicted.period_s
    )


@pytest.mark.slow
def test_the_next_command_writes_the_plan(partopt, auto):
    last = auto("--microbatches", 8).err.splitlines()[-1]
    words = shlex.split(last.removeprefix("next:"))
    assert words[:2] == ["partopt", "plan"]
    assert words[-2:] == ["-o", "plan.json"]
    assert partopt(*words[1:-2], "--json").document["planner"] == "grid"


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_a_microbatch_size_that_was_given_is_kept_to(auto, size):
    rows = table(auto("--microbatches", 8, "--microbatch-size", size).out)
    assert {cells[2] for cells in rows.values()} == {f"{size}x8"}


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["never", "always"])
def test_recomputation_that_was_asked_for_or_not_is_kept_to(auto, recompute):
    rows = table(auto("--microbatches", 8, "--recompute", recompute).out)
    assert {cells[3] for cells in rows.values()} == {recompute}


@pytest.mark.slow
def test_stages_may_choose_to_recompute(auto):
    rows = table(auto("--microbatches", 8, "--recompute", "auto").out)
    assert {cells[3] for cells in rows.values()} <= {"never", "some", "always"}


@pytest.mark.slow
def test_without_room_it_recomputes(auto):
    free, tight = (
        table(auto("--microbatches", 8, "--microbatch-size", 3, *more).out)
        for more in ([], ["--memory", "1 GB"])
    )
    assert {cells[3] for cells in free.values()} == {"never"}
    assert "always" in {cells[3] for cells in tight.values()}


@pytest.mark.slow
def test_sizes_that_do_not_divide_the_batch_are_skipped(auto):
    assert {cells[2].split("x")[0] for cells in table(auto("--global-batch", 16).out).values()} == {
        "1"
    }
    assert {cells[2] for cells in table(auto("--global-batch", 12).out).values()} <= {"1x12", "3x4"}


def test_no_size_divides_the_batch(auto):
    outcome = auto("--global-batch", 16, "--microbatch-size", 3)
    assert (outcome.code, outcome.errors, outcome.hints) == (
        2,
        ["--global-batch 16: not a multiple of the microbatch size 3"],
        ["choose 15"],
    )


@pytest.mark.slow
def test_where_nothing_fits_the_answer_is_no_and_nothing_is_written(auto, tmp_path):
    outcome = auto("--microbatches", 8, "--memory", "1 MB", "-o", tmp_path / "plan.json", layers=4)
    assert outcome.code == 1
    assert outcome.errors[0].startswith("the plan does not fit: a device of stage ")
    assert outcome.hints == [
        "nothing found fits, whatever --shard, --optimizer; take larger devices, or more of them"
    ]
    assert {cells[-1] for cells in table(outcome.out).values()} == {"no"}
    assert not (tmp_path / "plan.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--recompute", "always"]])
def test_a_size_that_does_not_fit_is_left_open_in_the_hint(partopt, auto, more):
    outcome = auto(
        "--microbatches", 8, "--memory", "400 MB", "--microbatch-size", 3, *more, layers=5
    )
    assert outcome.code == 1
    told = re.fullmatch(r"this fits \((.*) samples/s\): partopt (.*)", outcome.hints[0])
    assert "--microbatch-size" not in told[2]
    again = partopt(*shlex.split(told[2]), "--json")
    assert again.code == 0
    speed = again.document["predicted"]["samples_per_s"]
    assert float(told[1]) == pytest.approx(speed, rel=5e-3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--planner", "gpipe"], "--planner: --schedule auto chooses that itself"),
        (["--stages", 2], "--stages: --schedule auto chooses that itself"),
        (["--chunks", 2], "--chunks: --schedule auto chooses that itself"),
        (["--cuts", "3"], "--cuts: --schedule auto chooses that itself"),
        (["--replicas", "2"], "--replicas: --schedule auto chooses that itself"),
        (
            ["--global-batch", 8],
            "--schedule auto: --microbatches and --global-batch are both given",
        ),
        (["--weak"], "--weak goes with --scaling"),
        (
            ["--microbatch-size", 7],
            "microbatch size 7 was not measured, and times are never extrapolated",
        ),
    ],
)
def test_options_that_it_would_not_look_at_are_refused(auto, options, message):
    outcome = auto("--microbatches", 8, *options)
    assert (outcome.code, outcome.out, outcome.errors) == (2, "", [message])
    assert len(outcome.hints) == 1


@pytest.mark.slow
def test_it_chooses_a_schedule_for_each_number_of_devices(auto):
    found = auto("--microbatches", 8, "--scaling", "2,4", "--json").document
    assert [row["devices"] for row in found["rows"]] == [2, 4]


def test_it_needs_a_batch(auto):
    assert auto().errors == ["--schedule auto: needs either --microbatches or --global-batch"]


@pytest.mark.slow
def test_stages_begin_only_where_they_may(auto):
    document = auto(
        "--microbatches", 8, "--cut-at", "layer3", "--cut-at", "layer6", "--json"
    ).document
    assert {stage["start"] for stage in document["stages"]} <= {0, 3, 6}


@pytest.mark.slow
@pytest.mark.any_effort
def test_large_clusters_and_long_names_fit_the_page(partopt, profile_file, topology_file):
    path = profile_file(
        uniform_profile(
            6, name="a-model-with-a-name-as-long-as-some-of-them-are-nowadays-and-longer"
        )
    )
    for cluster in (flat(1), two_level(8, 16)):
        outcome = partopt(
            "plan",
            path,
            "--topology",
            topology_file(cluster),
            "--schedule",
            "auto",
            "--microbatches",
            128,
        )
        assert outcome.code == 0
        assert all(len(line) <= 80 for line in unstyle(outcome.out).splitlines())


class TestChunks:
    def test_they_are_the_stages_of_a_device(self, planned):
        document = planned(
            "--schedule", "interleaved", "--chunks", 3, "--stages", 6, "--microbatches", 4, "--json"
        ).document
        assert [stage["ranks"] for stage in document["stages"]] == [[0, 1], [2, 3]] * 3

    @pytest.mark.parametrize("name", ["pipedream", "1f1b", "zbv", "dualpipe"])
    def test_schedules_with_a_number_of_their_own_refuse_them(self, planned, name):
        outcome = planned("--schedule", name, "--chunks", 3, "--microbatches", 8)
        assert (outcome.code, outcome.errors) == (2, [f"--chunks: not for {name}"])
        assert outcome.hints == ["choose --schedule interleaved or --schedule interleaved-zb"]

    def test_a_hint_about_stages_is_taken(self, planned):
        options = ["--schedule", "interleaved", "--chunks", 4, "--microbatches", 8]
        outcome = planned(*options, "--stages", 7)
        assert (outcome.errors, outcome.hints) == (
            ["7 stages: interleaved takes a multiple of 4"],
            ["--stages 8"],
        )
        assert planned(*options, "--stages", 8).code == 0


class TestAllReduce:
    def test_the_devices_wait_and_the_plan_says_what_the_formula_would_have_given(
        self, partopt, profile_file, topology_file
    ):
        arguments = (
            profile_file(uniform_profile(3)),
            "--topology",
            topology_file(flat(3, 1e18)),
            "--cuts",
            1,
            "--replicas",
            "1,2",
        )
        outcome = partopt("plan", *arguments, "--with", "allreduce=blocking", "--json")
        predicted = outcome.document["predicted"]
        assert (predicted["period_s"], predicted["formula_period_s"]) == (
            pytest.approx(3e-3),
            pytest.approx(4.5e-3),
        )
        assert outcome.document["noam"] == 4
        assert (
            partopt("plan", *arguments, "--json").document["predicted"]["formula_period_s"] is None
        )

    def test_a_synchronous_schedule_exchanges_beside_its_backward_or_after_it(self, planned):
        given = "--schedule", "1f1b", "--microbatches", 4, "--with", "bucket=1 B"
        beside, after = (
            planned(*given, "--with", f"allreduce={how}", "--json").document["predicted"][
                "iteration_s"
            ]
            for how in ("overlap", "blocking")
        )
        assert beside <= after
