"""Every picture at 4 and at 32 ranks: what can be read, what is said, and what is refused."""

import hashlib
import importlib.metadata
import itertools
import json
import re
from xml.etree import ElementTree

import pytest
from msgspec import UNSET
from msgspec.structs import replace

import partopt as po
from partopt.documents.topology import Topology
from partopt.errors import PartoptError
from partopt.report.looks import COLOURS, MEMORY, stage_colour
from partopt.report.pictures.sheet import Heading, Sheet, style
from partopt.report.pictures.tables import PlanPoint, draw_points
from partopt.units import format_count
from partopt.what_if.drawing import picture_of
from tests.helpers import ROOT, flat, limited, two_level, uniform_profile
from tests.report import timelines
from tests.report.pictures import cases
from tests.report.pictures.drawn import Drawn


def render(document, form, **options):
    return picture_of(document, **options).render(form)


def many_stages(count, topology):
    return timelines.plan_of("1f1b", [[rank] for rank in range(count)], 8, topology=topology)


CLOSE, ALONE = [1, 30, 31, 32, 33, 64], [8]
PICTURES = {
    "profile of 1 layer": lambda: picture_of(uniform_profile(1)),
    "profile of 176 layers": lambda: picture_of(po.Profile.load("resnet50.v100-published.float32")),
    "profile of repeated blocks": lambda: picture_of(cases.many_layers(50)),
    "profile of hostile names": lambda: picture_of(cases.hostile_profile(30)),
    "plan of 4": lambda: picture_of(*cases.plan_of(4)),
    "plan of 32": lambda: picture_of(*cases.plan_of(32)),
    "plan of 32 without a profile": lambda: picture_of(cases.plan_of(32)[0]),
    "plan of 4, eight stages each": lambda: picture_of(*cases.plan_of(4, "interleaved", 8)),
    "plan of 128, folded": lambda: picture_of(cases.replicated(16)),
    "plan of 96 stages": lambda: picture_of(many_stages(96, two_level(8, 12))),
    "plan that does not fit": lambda: picture_of(limited(cases.plan_of(4)[0], 10**9)),
    "plan without a limit": lambda: picture_of(limited(cases.plan_of(4)[0], None)),
    "plan with runners-up": lambda: picture_of(
        cases.plan_of(4)[0], alternatives=[cases.plan_of(4, "gpipe")[0]] * 9
    ),
    "plan of hostile names": lambda: picture_of(*cases.hostile_plan()),
    "plan of a transformer": lambda: picture_of(cases.transformer()),
    "comparison of 1": lambda: picture_of(cases.comparison(1)),
    "comparison of 24": lambda: picture_of(cases.comparison(24, model="$m$" * 99)),
    "scaling, close": lambda: picture_of(cases.scaling(CLOSE)),
    "scaling of one": lambda: picture_of(cases.scaling(ALONE)),
    "sizes with a price": lambda: picture_of(cases.sizes(CLOSE)),
    "sizes without a price": lambda: picture_of(cases.sizes([8, 64, 512], None)),
    "one size with a price": lambda: picture_of(cases.sizes(ALONE)),
    "run of 4": lambda: picture_of(cases.run(4, "\x1b$m$ <&>")),
    "run of 512": lambda: picture_of(cases.run(512)),
}


LOOKS = ROOT / "tests/golden/pictures.json"


def digest(svg):
    return hashlib.sha256(svg).hexdigest()[:12]


@pytest.fixture(scope="module")
def recorded(request):
    """Digests of pictures by name; none where they are recorded anew, or with another matplotlib.

    Whoever changes a look looks at the pictures, and runs `pytest tests/report --update`.
    """
    found, version = json.loads(LOOKS.read_text()), importlib.metadata.version("matplotlib")
    updating = request.config.getoption("--update")
    return {} if updating or found.pop("matplotlib") != version else found


@pytest.mark.slow
@pytest.mark.parametrize("case", PICTURES)
def test_a_picture_can_be_read_is_small_has_a_title_a_description_and_text_and_looks_as_it_did(
    case, monkeypatch, recorded
):
    picture = PICTURES[case]()
    drawn = Drawn(picture, monkeypatch)
    assert len(drawn.boxes) > 3
    assert (drawn.overlaps, drawn.outside, drawn.empty) == ([], [], 0)
    svg = picture.render("svg")
    root = ElementTree.fromstring(svg)
    assert len(svg) < 1_000_000
    assert [child.tag.rpartition("}")[2] for child in root[:2]] == ["title", "desc"]
    assert root[0].text == picture.heading.title
    assert len(root[1].text) > len(root[0].text)
    assert len(list(root.iter(f"{SVG}text"))) > 3
    assert digest(svg) == recorded.get(case, digest(svg))


def test_points_far_from_zero_begin_where_they_are():
    """Half a gap before the first; at zero where any is in the nearer half."""
    with style():
        for least, begin in ((0.6, 0.5), (0.9, 0.875), (0.5, 0.0), (0.1, 0.0), (0.0, 0.0)):
            points = [
                PlanPoint("a", least, "samples", least * 1e9, True),
                PlanPoint("b", 1, "samples", 1e9, True),
            ]
            sheet = Sheet(Heading(["x"], ""))
            draw_points(sheet, points, None)
            [axes] = sheet.figure.axes
            for (low, high), unit in ((axes.get_xlim(), 1e9), (axes.get_ylim(), 1)):
                assert low / unit == pytest.approx(begin, abs=0.05) and high > unit
                assert (low == 0) == (begin == 0) and low <= least * unit


def report(path):
    """A report with all that it may show."""
    beside = [cases.comparison(3), cases.scaling([1, 8, 32])]
    po.write_report(cases.replicated(2), path, beside=beside, commands=["partopt show a.json"])
    return path.read_bytes().replace(po.__version__.encode(), b"VERSION")


@pytest.mark.slow
def test_timelines_and_a_report_look_as_they_did_and_every_picture_is_recorded(
    recorded, request, tmp_path
):
    found = {"report": digest(report(tmp_path / "r.html"))}
    for chunks in (None, 8):
        plan, _ = cases.plan_of(4, "interleaved" if chunks else "1f1b", chunks)
        found[f"timeline, {chunks} chunks"] = digest(po.simulate(plan).draw("svg"))
    if request.config.getoption("--update"):
        pictures = {case: digest(make().render("svg")) for case, make in PICTURES.items()}
        version = {"matplotlib": importlib.metadata.version("matplotlib")}
        LOOKS.write_text(json.dumps(version | pictures | found, indent=0) + "\n")
    elif recorded:
        assert found == {name: recorded[name] for name in recorded if name not in PICTURES}
        assert recorded.keys() == {*PICTURES, *found}
    else:
        pytest.skip("recorded with another matplotlib")


@pytest.mark.slow
@pytest.mark.parametrize("form, first", [("svg", b"<?xml"), ("pdf", b"%PDF"), ("png", b"\x89PNG")])
def test_the_same_document_gives_the_same_bytes(form, first):
    plan, profile = cases.plan_of(4)
    content = render(plan, form, profile=profile, alternatives=[plan])
    assert content.startswith(first)
    assert content == render(plan, form, profile=profile, alternatives=[plan])


SVG = "{http://www.w3.org/2000/svg}"


def texts(svg):
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg.decode())


@pytest.mark.slow
def test_names_are_drawn_as_they_are_and_controls_as_escapes():
    drawn = texts(PICTURES["profile of hostile names"]().render("svg"))
    for name in ("0 $x$0", "1 a_b^{2}1", "2 &lt;&amp;&gt;\"'2", r"3 \x1b[31mred3", "5 日本語 é ñ5"):
        assert name in drawn
    [cut] = [text for text in drawn if text.startswith("6 xxx")]
    assert ".." in cut and len(cut) < 100
    assert any(text.startswith(r"\x1b$x$ &lt;&amp;&gt; _, 30 layers") for text in drawn)


@pytest.mark.slow
def test_a_plan_says_what_binds_and_marks_it_and_counts_idle_devices_in_its_title():
    svg = render(cases.replicated(2), "svg")
    assert "bound by cut before stage 1" in texts(svg)
    assert b"#c00000" in svg
    plan = po.solve(po.Job(uniform_profile(6), flat(4), cuts=[3], replicas=[1, 1])).plan
    assert "2 of 4 devices" in picture_of(plan).heading.title


@pytest.mark.slow
def test_layers_are_drawn_of_the_own_profile_alone():
    plan, profile = cases.plan_of(4)
    with_layers, without = (render(plan, "svg", profile=own) for own in (profile, None))
    assert len(with_layers) > len(without)
    with pytest.raises(PartoptError, match="was not made from this profile") as raised:
        render(plan, "svg", profile=uniform_profile(4))
    assert raised.value.code == "plan-of-another-profile"


def grey(colour):
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return 0.3 * red + 0.59 * green + 0.11 * blue


def test_neighbours_differ_in_grey_and_forwards_are_lighter_than_backwards():
    stages = [grey(stage_colour(stage)) for stage in range(17)]
    for shades in (stages, [grey(colour) for colour in MEMORY.values()]):
        assert min(abs(one - other) for one, other in itertools.pairwise(shades)) > 35
    forwards, backwards = ([grey(c) for kind in k for c in COLOURS[kind]] for k in ("F", "BIW"))
    assert min(forwards) > max(backwards) + 10


def test_what_has_no_picture_is_refused():
    for document in (flat(4), Topology.load("dgx-h100"), "plan.json"):
        with pytest.raises(PartoptError, match="has no picture") as raised:
            render(document, "svg")
        assert raised.value.code == "no-picture"


@pytest.mark.slow
def test_a_picture_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "a.svg"
    po.draw(uniform_profile(3), path)
    assert path.read_bytes() == render(uniform_profile(3), "svg")
    with pytest.raises(PartoptError, match="already exists"):
        po.draw(uniform_profile(4), path)
    po.draw(uniform_profile(4), path, force=True)
    assert path.read_bytes() == render(uniform_profile(4), "svg")
    with pytest.raises(PartoptError, match=r"a.gif: unsupported format .gif"):
        po.draw(uniform_profile(4), tmp_path / "a.gif")
    assert [each.name for each in tmp_path.iterdir()] == ["a.svg"]


def spots(svg):
    """The text and the box, left, top, width and height, of all that can be pointed at."""
    root = ElementTree.fromstring(svg)
    assert root[-1].get("pointer-events") == "all"  # above all that is drawn
    return [
        (own[0].text, [float(own.get(name)) for name in ("x", "y", "width", "height")])
        for own in root[-1]
    ]


@pytest.mark.slow
@pytest.mark.parametrize("price", [None, 2.0])
def test_a_run_is_drawn_below_the_speed(price):
    table = cases.sizes([1, 8, 64], price)
    picture = picture_of(table)
    with style():
        axes = picture.draw(picture.heading).finish().axes
    rows = table.rows
    speed, run = ([line for line in each.lines if len(line.get_xdata()) == 3] for each in axes)
    assert [line.get_ydata()[0] for line in speed] == [100.0, 100.0]  # the ideal, and the plans
    took = [row.run.cost if price else row.run.device_hours for row in rows]
    [drawn] = run
    assert [*drawn.get_xdata()] == [1, 8, 64] and [*drawn.get_ydata()] == took
    for each, value in zip(axes, (rows[-1].samples_per_s, took[-1]), strict=True):
        rings = [line for line in each.lines if line.get_markersize() == 9]
        assert [(line.get_xdata()[0], line.get_ydata()[0]) for line in rings] == [(64, value)]
    shown = texts(picture.render("svg"))
    assert f"{format_count(rows[-1].run.days)} d" in shown
    assert ("cost, and days" in shown, "GPU-hours, and days" in shown) == (bool(price), not price)
    assert "does not fit on 1" in picture.heading.title and "1 T tokens" in picture.heading.title
    assert "best 64 devices: " in picture.heading.title
    assert "best for the days or the budget" in shown
    unchosen = picture_of(replace(table, chosen=UNSET))
    assert "best " not in unchosen.heading.title
    assert "best for the days or the budget" not in texts(unchosen.render("svg"))


@pytest.mark.parametrize("of", [cases.scaling([1, 8, 32]), cases.comparison(6)])
def test_points_say_what_they_are_where_they_are_drawn(of):
    svg = render(of, "svg")
    middles = [(x + wide / 2, y + high / 2) for _, (x, y, wide, high) in spots(svg)]
    root = ElementTree.fromstring(svg)
    marks = [(float(own.get("x")), float(own.get("y"))) for own in root.iter(f"{SVG}use")]
    for middle in middles:
        assert any(middle == pytest.approx(mark, abs=0.05) for mark in marks)
    assert len(middles) == len(of.rows)
    for (text, _), row in zip(spots(svg), of.rows, strict=True):
        assert row.shape in text
        assert text.endswith("does not fit") is not row.fits


@pytest.mark.slow
def test_stages_and_layers_say_what_they_are_side_by_side():
    plan, profile = cases.plan_of(4)
    told = spots(render(plan, "svg", profile=profile))
    of_stages = [(text, box) for text, box in told if text.startswith("stage 2: layers")]
    stage = plan.stages[2]
    assert f"layers {stage.start}-{stage.stop - 1} {stage.modules[0]} .. " in of_stages[0][0]
    left, width = 46.8, 464.4 / len(profile.layers)  # points of the panel, and of a layer in it
    for _, box in of_stages:
        assert box[0] == pytest.approx(left + width * stage.start, abs=0.1)
        assert box[2] == pytest.approx(width * (stage.stop - stage.start), abs=0.1)
    layers = [text for text, _ in spots(render(profile, "svg"))]
    for n, layer in enumerate(profile.layers):
        assert sum(text.startswith(f"layer {n} {layer.name}, forward ") for text in layers) == 3


@pytest.mark.slow
def test_a_thousand_stages_are_less_than_a_megabyte_and_cannot_be_pointed_at():
    svg = render(many_stages(1024, two_level(8, 128)), "svg")
    assert len(svg) < 1_000_000
    assert b"pointer-events" not in svg


@pytest.mark.slow
def test_logarithmic_axes_say_so():
    assert render(cases.scaling([1, 8, 32]), "svg").count(b"(log scale)") == 2
    assert b"log scale" not in render(cases.comparison(6), "svg")
