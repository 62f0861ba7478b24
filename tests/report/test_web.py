"""The report as one page: what it holds is the simulation's, and it is whole in a browser."""

import functools
import json
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

import partopt as po
from partopt.cost.problem import certify
from partopt.documents.actions import A
from partopt.errors import PartoptError
from partopt.report.layout_words import layout_name
from partopt.report.text import page_style
from partopt.what_if import html_report
from tests.helpers import chain_profile, flat, two_level
from tests.report.pictures.cases import levered, transformer

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(not CHROMIUM, reason="chromium is not installed")
LOADED = re.compile(r"""(?:src|href)\s*=\s*["'](?!\#)[^"']*|url\((?!\#)[^)]*|@import""")


def plan_of(stages=4, microbatches=8, schedule="1f1b", name="gpt"):
    profile = chain_profile([1e-3 * (1 + n % 3) for n in range(2 * stages)])
    profile = replace(profile, model=replace(profile.model, name=name))
    options = {"stages": stages, "schedule": schedule, "microbatches": microbatches}
    return po.solve(po.Job(profile, flat(stages), planner="gpipe", **options)).plan, profile


@functools.cache
def large_plan():
    profile = chain_profile([1e-3] * 128)
    options = {"planner": "gpipe", "stages": 64, "schedule": "1f1b", "microbatches": 512}
    return po.solve(po.Job(profile, two_level(8, 8), **options)), profile


@functools.cache
def usual():
    """A plan with its profile, and the report of both."""
    plan, profile = plan_of()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "report.html")
        po.write_report(plan, path, profile=profile)
        return plan, profile, path.read_text()


@pytest.fixture
def written(tmp_path):
    """Writes the report of a plan, and gives its text."""

    def write(plan, name="report.html", **options):
        po.write_report(plan, tmp_path / name, **options)
        return (tmp_path / name).read_text()

    return write


def data_of(page):
    return json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1", "pipedream"])
def test_the_timeline_is_that_of_the_simulation(written, schedule):
    microbatches = None if schedule == "pipedream" else 8
    plan, profile = plan_of(microbatches=microbatches, schedule=schedule)
    data = data_of(written(plan, profile=profile))
    timeline = po.simulate(plan).execution.timeline
    order = timeline.order
    for row in data["ranks"]:
        own = slice(order.rows[row["rank"]], order.rows[row["rank"] + 1])
        kept = (order.kind[own] != A) & (
            timeline.start[own] < data["windows"][0][1] * data["tick_s"]
        )
        for name, times in (("start", timeline.start), ("length", timeline.end - timeline.start)):
            found = np.array(row[name]) * data["tick_s"]
            expected = times[own][kept].astype(float)
            np.testing.assert_allclose(found[: len(expected)], expected, atol=2 * data["tick_s"])
        assert row["microbatch"][:4] == order.microbatch[own][kept][:4].tolist()
    assert [row["rank"] for row in data["ranks"]] == [0, 1, 2, 3]


@pytest.mark.slow
def test_numbers_and_digests_are_those_of_the_files(written, tmp_path):
    plan, profile = plan_of()
    plan.save(str(tmp_path / "plan.json"))
    page = written(plan, profile=profile, commands=["partopt show --verify plan.json"])
    digest = subprocess.run(
        ["sha256sum", tmp_path / "plan.json"], capture_output=True, text=True, check=True
    ).stdout.split()[0]
    assert digest in page and plan.profile.sha256 in page
    assert f"{plan.predicted.samples_per_s:.2f} samples/s"[:4] in page
    assert "partopt show --verify plan.json" in page
    for stage in plan.stages:
        assert f"{stage.modules[0]} .. {stage.modules[-1]}" in page


@pytest.mark.slow
def test_what_is_proved_names_the_plans_among_which_it_holds(written):
    plan, profile = plan_of()
    scope = "plans under 1f1b, 8 microbatches of 1, 16 GB a device"
    for number, (lower_s, value, label) in enumerate(
        [
            (4.5, "optimal", f"among {scope}"),
            (4.0, "12.5%", f"faster at most is any of {scope}"),
            (0.0, "no bound", f"is known of {scope}"),
        ]
    ):
        certificate = certify(4.5, lower_s, scope, "a search")
        proved = replace(plan, planner="optimal", certificate=certificate)
        page = written(proved, f"{number}.html", profile=profile)
        assert f"<b>{value}</b><span>{label}</span>" in page
        assert page.count(scope) == 2 and "no plan of these is below</dt><dd>0" not in page


@pytest.mark.slow
def test_documents_beside_the_plan_have_a_picture_each(written):
    plan, profile = plan_of()
    job = po.Job(profile, flat(4), schedule="1f1b", microbatches=8)
    comparison, _ = po.compare(job)
    beside = [comparison, comparison, po.scale(job, [2, 4])]
    page = written(plan, profile=profile, beside=beside)
    for name in ("profile", "comparison", "comparison-2", "scaling"):
        assert f'<section id="{name}">' in page
    assert page.count("<svg ") == 6
    names = re.findall(r'\bid="([^"]+)"', page)
    used = set(re.findall(r'(?:url\(#|href="#)([^")]+)', page))
    assert used <= {*names}
    assert all(names.count(each) == 1 for each in used)


@pytest.mark.slow
def test_runners_up_stand_beside_the_plan(written):
    _, profile, page = usual()
    assert "What was found beside it" not in page
    job = po.Job(profile, flat(4), schedule="1f1b", microbatches=8)
    result = po.solve(job)
    page = written(result.document, "beside.html", profile=profile)
    rows = page[page.index("What was found beside it") :]
    rows = rows[: rows.index("</section>")]
    for each in (result.plan, *result.alternatives):
        assert f"{each.planner}</td>" in rows and f">{each.shape}</td>" in rows
    assert rows.count("<tr>") == 2 + len(result.alternatives)


@pytest.mark.slow
def test_the_age_of_weights_is_on_the_page(written):
    plan, profile = plan_of(2, None, "pipedream")
    page = written(plan, profile=profile)
    assert '"remark">weights up to 1 update old; synchronous: ' in page
    assert '"remark">weights ' not in usual()[2]


@pytest.mark.slow
def test_nothing_is_requested_and_the_same_plan_gives_the_same_page(written):
    plan, profile, page = usual()
    assert not LOADED.search(re.sub(r'xmlns(:\w+)?="[^"]*"', "", page))
    assert "default-src 'none'" in page
    assert page == written(plan, "again.html", profile=profile)


@pytest.mark.slow
def test_a_large_plan_is_below_3_mb(written):
    result, profile = large_plan()
    plan = result.plan
    page = written(plan, profile=profile)
    assert len(page.encode()) < 3_000_000
    data = data_of(page)
    assert len(data["ranks"]) == 64 and len(data["windows"]) == 3
    for text in ("The beginning, a steady part and the end of ", "Steady, ", " left out</p>"):
        assert text in page


@pytest.mark.slow
def test_a_timeline_of_many_actions_has_fewer_columns_or_is_left_out(written, monkeypatch):
    plan, _ = plan_of(microbatches=64)
    drawn = []
    for most in (10_000, 200, 10):
        monkeypatch.setattr(html_report, "_ACTIONS", most)
        page = written(plan, f"{most}.html")
        rows = data_of(page)["ranks"] if 'id="data"' in page else []
        drawn.append(sum(len(own["start"]) for own in rows))
    assert drawn[0] == 4 * 2 * 64 + 4 and 0 < drawn[1] <= 200 and drawn[2] == 0


HOSTILE = "</script><script>document.title='x'</script>{{ 7*7 }}&\"'$a_b$"


@pytest.mark.slow
def test_names_are_text(written):
    plan, profile = plan_of(name=HOSTILE)
    page = written(plan, profile=profile)
    assert "<script>document" not in page and "&lt;script&gt;document" in page
    assert "{{ 7*7 }}" in page


@pytest.mark.slow
def test_nothing_is_overwritten_and_what_has_no_picture_is_refused(written, partopt, tmp_path):
    plan, profile = plan_of()
    plan.save(str(tmp_path / "plan.json"))
    profile.save(str(tmp_path / "p.json"))
    page = tmp_path / "page.html"
    given = ("report", tmp_path / "plan.json", "--profile", tmp_path / "p.json", "-o", page)
    assert partopt(*given).code == 0
    assert "already exists" in partopt(*given).err
    (tmp_path / "s.json").write_bytes(po.documents.encode(po.simulate(plan).document))
    refused = partopt("report", tmp_path / "plan.json", tmp_path / "s.json", "-o", page, "--force")
    assert (refused.code, "a simulation has no picture" in refused.err) == (2, True)
    other = chain_profile([1.0] * 8)
    with pytest.raises(PartoptError, match="profile"):
        written(plan, "other.html", profile=other)
    assert not (tmp_path / "other.html").exists()
    with pytest.raises(PartoptError, match="already exists"):
        written(plan, page.name)


def browsed(page):
    """What a browser makes of a page."""
    return subprocess.run(
        [
            *(CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"),
            *(f"--user-data-dir={page.parent / 'browser'}", "--virtual-time-budget=3000"),
            f"file://{page}",
        ],
        capture_output=True,
        text=True,
        timeout=120,
    ).stdout


POINTED = """<script>
const canvas = document.querySelector("canvas"), area = canvas.getBoundingClientRect();
const at = (kind, x, y) => canvas.dispatchEvent(new PointerEvent(kind,
  {clientX: area.left + x, clientY: area.top + y, pointerId: 1}));
at("pointermove", 48, 30);
document.body.dataset.first = document.querySelector(".tip").textContent;
canvas.dispatchEvent(new KeyboardEvent("keydown", {key: "+"}));
at("pointermove", 48, 30);
document.body.dataset.zoomed = document.querySelector(".tip").textContent;
</script>"""


@pytest.mark.slow
@needs_chromium
@pytest.mark.parametrize("name", ["gpt", HOSTILE])
def test_a_browser_shows_it(written, tmp_path, name):
    plan, profile = plan_of(name=name)
    page = written(plan, profile=profile)
    (tmp_path / "report.html").write_text(page.replace("</body>", f"{POINTED}</body>"))
    shown = browsed(tmp_path / "report.html")
    body = re.search(r"<body([^>]*)>", shown)[1]
    assert 'data-ready="yes"' in body and "data-error" not in body
    assert 'data-drawn="4"' in shown
    forward = plan.stages[0].forward_s * 1e3
    assert f'data-first="rank 0, stage 0: forward of microbatch 0\n{forward:.3f} ms' in body
    assert 'data-zoomed="rank 0, stage 0: ' in body
    assert name == "gpt" or "49" not in re.search(r"<title>(.*?)</title>", shown)[1]


MEASURED = """<script>
const shown = document.documentElement;
parent.postMessage(`${shown.scrollWidth} of ${shown.clientWidth}`, "*");
</script>"""
FRAMED = """<iframe src="report.html" style="border: 0; width: {}px; height: 900px"></iframe>
<script>addEventListener("message", (event) => {{ document.body.dataset.told = event.data; }});
</script>"""


@pytest.mark.slow
@needs_chromium
def test_nothing_is_wider_than_the_page(written, tmp_path):
    result, profile = large_plan()
    comparison, _ = po.compare(po.Job(profile, flat(4), schedule="1f1b", microbatches=8))
    page = written(result.document, profile=profile, beside=[comparison, comparison])
    (tmp_path / "report.html").write_text(page.replace("</body>", f"{MEASURED}</body>"))
    for width in (420, 1280):
        (tmp_path / "frame.html").write_text(FRAMED.format(width))
        told = re.search(r'data-told="([0-9]+) of ([0-9]+)"', browsed(tmp_path / "frame.html"))
        assert told[1] == told[2] and width - 20 <= int(told[1]) <= width


@pytest.mark.slow
def test_dark_mode_sets_every_colour_of_the_page():
    """A colour that is no variable stands in no rule but those of what is inverted or dark."""
    css = re.search(r"<style>(.*?)</style>", usual()[2], re.DOTALL)[1]
    light, dark = css.split("@media (prefers-color-scheme: dark)")
    variables = re.findall(r"--[a-z]+(?=:)", light)
    assert variables and all(f"{name}: #" in dark for name in variables)
    rules = re.findall(r"([^{}]*)\{([^{}]*#[0-9a-f]{3,6}\b[^{}]*)\}", light)
    assert {rule.strip() for rule, _ in rules} == {":root", ".bar", ".legend i.idle", ".tip"}
    inverted = re.search(r"([^{}]*)\{ filter: invert", dark)[1]
    assert {each.strip() for each in inverted.split(",")} >= {"figure svg", "canvas", ".bar"}


@pytest.mark.slow
def test_no_label_of_a_picture_is_smaller_than_nine_pixels():
    *_, page = usual()
    widths = re.findall(r'<svg style="min-width:([0-9]+)px[^>]*? width="([0-9.]+)pt"', page)
    assert len(widths) == page.count("<svg ") >= 3
    assert all(float(pixels) / float(points) * 6 >= 8.98 for pixels, points in widths)
    assert "@media (max-width: 720px) { figure { overflow-x: auto;" in page


@pytest.mark.slow
def test_a_transformer_is_headed_by_its_layout(written):
    plan = transformer()
    page = written(plan)
    [title] = re.findall(r"<h1>(.*?)</h1>", page)
    assert title == f"llama on 4 x H100-80GB: {layout_name(plan.layout)}, {plan.schedule}"
    assert title.startswith("llama on 4 x H100-80GB: tp ") and " pp " in title and " dp " in title


@pytest.mark.slow
def test_what_else_is_faster_has_the_lines_of_the_page(written):
    plan = levered(["--tp-comm-overlap", HOSTILE])
    with page_style(spell=lambda text: text.replace("facts=", "--with ")):
        page = written(plan)
    section = page[page.index('<section id="levers">') : page.index('<section id="proof">')]
    _, lines = section.split("<pre>")
    for begin in ("also     --tp-comm-overlap ", "try      tp "):
        assert lines.count(begin) == 1
    assert "--with best,numbers" in lines or "--with best" in lines
    assert "<script>document" not in page and "&lt;script&gt;document" in section
    assert '<a href="#levers">levers</a>' in page
    assert "levers" not in usual()[2]
