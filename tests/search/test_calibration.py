"""Measured blocks: a profile of a trainer's own block scales the closed form, and nothing else."""

import json
import time

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from partopt import verify
from partopt.documents.engine import Layout
from partopt.documents.plan import Plan
from partopt.documents.profile import Group
from partopt.documents.topology import Topology
from partopt.documents.transformer import Calibration, MeasuredBlock
from partopt.errors import PartoptError
from partopt.importers.hugging_face import load_transformer
from partopt.job import Job
from partopt.report.plans_text import render_plan
from partopt.search.judging import plan_layout
from partopt.search.layout_questions import fill_layout, training_for
from partopt.transformer.as_profile import profile_again, profile_of
from partopt.transformer.block import Shape
from partopt.transformer.iteration import estimate
from tests.examples import examples
from tests.transformer.helpers import KINDS as KINDS_MODEL
from tests.transformer.helpers import training

MODEL, BATCH, SEQUENCE = "llama3-8b", 64, 4096
LAYOUTS = [
    "tp=1,dp=8",
    "tp=2,pp=2",
    "tp=4,pp=2,microbatch=2,recompute=always",
    "tp=2,cp=2,microbatch=2",
    "tp=2,recompute=selective",
]


def job_of(layout="", trainer="megatron", model=MODEL, **options):
    return Job(
        model=load_transformer(model),
        topology=Topology.load("dgx-h100", 1),
        trainer=trainer,
        global_batch=BATCH,
        sequence=SEQUENCE,
        layout=Layout.parse(layout) if layout else Layout(),
        **options,
    )


def measured(layout="tp=1,dp=8", forward=1.0, backward=1.0, kept=1.0, sizes=(1,), **changes):
    """A profile as `partopt profile` would write it of blocks that take so many times as long."""
    asked = job_of(**changes)
    work = training_for(asked)
    profiles = [
        profile_of(work, Layout.parse(f"{layout},microbatch={size}"), BATCH) for size in sizes
    ]
    each = [
        replace(
            own.measurements[0],
            layers=[
                replace(
                    layer,
                    forward_s=forward * layer.forward_s,
                    backward_s=backward * layer.backward_s,
                )
                for layer in own.measurements[0].layers
            ],
            stash_groups=[
                replace(group, bytes=round(kept * group.bytes))
                for group in own.measurements[0].stash_groups
            ],
        )
        for own in profiles
    ]
    return replace(profiles[0], estimated=None, measurements=each)


def of_layout(text, trainer="megatron", **options):
    asked = job_of(text, trainer, **options)
    return estimate(training_for(asked), fill_layout(asked, training_for(asked)), BATCH)


CASES = [
    (layout, trainer)
    for layout in LAYOUTS
    for trainer in ("megatron", "torchtitan", "deepspeed")
    if trainer != "deepspeed" or ("cp" not in layout and "selective" not in layout)
]


@pytest.mark.parametrize(("layout", "trainer"), CASES)
@pytest.mark.parametrize("at", ["tp=1,dp=8", "tp=2,dp=4"])
def test_a_profile_of_the_closed_form_itself_changes_nothing(layout, trainer, at):
    own = measured(at, trainer=trainer, sizes=(1, 2))
    plain, scaled = of_layout(layout, trainer), of_layout(layout, trainer, calibrate=own)
    assert scaled.seconds == pytest.approx(plain.seconds, rel=1e-7)
    assert scaled.memory_bytes == pytest.approx(plain.memory_bytes, rel=1e-7)
    assert scaled.parts == pytest.approx(plain.parts, rel=1e-6)


@pytest.mark.slow
@examples(20)
@given(
    forward=st.floats(0.2, 5),
    backward=st.floats(0.2, 5),
    kept=st.floats(0.2, 5),
    t=st.sampled_from([1, 2, 4]),
    recompute=st.sampled_from(["never", "selective", "always"]),
    trainer=st.sampled_from(["megatron", "torchtitan"]),
)
def test_blocks_are_scaled_as_measured_and_what_one_rank_exchanges_is_not(
    forward, backward, kept, t, recompute, trainer
):
    own = measured(forward=forward, backward=backward, kept=kept, trainer=trainer)
    shape = Shape(1, t, 1, 1, recompute)
    plain, scaled = (
        training_for(job_of(trainer=trainer, **given)).block(shape)
        for given in ({}, {"calibrate": own})
    )
    for name, (first_s, second_s) in plain.parts.items():
        factors = (1.0, 1.0) if name == "tensor" else (forward, backward)
        expected = (factors[0] * first_s, factors[1] * second_s)
        assert scaled.parts[name] == pytest.approx(expected, rel=1e-6)
    assert scaled.forward_s == pytest.approx(sum(s.forward for s in scaled.parts.values()))
    if t == 1:  # nothing is exchanged
        assert scaled.again_s == pytest.approx(forward * plain.again_s, rel=1e-6)
    more = 1.0 if recompute == "always" else kept
    assert scaled.saved_bytes == pytest.approx(more * plain.saved_bytes, rel=1e-6)
    assert (scaled.head_s, scaled.embedding_s) == (plain.head_s, plain.embedding_s)


def test_a_group_that_exchanged_while_it_was_measured_scales_that_too():
    own = measured("tp=2,dp=4", forward=2.0, backward=3.0)
    plain, scaled = (training_for(job_of(**given)) for given in ({}, {"calibrate": own}))
    for t in (1, 2, 4):
        one, other = (work.block(Shape(t=t)) for work in (plain, scaled))
        assert other.forward_s == pytest.approx(2 * one.forward_s, rel=1e-6)
        assert other.backward_s == pytest.approx(3 * one.backward_s, rel=1e-6)
    assert all(
        scaled.is_measured(Shape(t=t), kind) == (t == 2) for kind in scaled.kinds for t in (2, 4)
    )


def test_between_measured_sizes_the_factor_is_in_proportion_and_outside_the_ends():
    one, four = measured(forward=1.0, sizes=(1,)), measured(forward=4.0, sizes=(4,))
    own = replace(one, measurements=[*one.measurements, *four.measurements])
    work = training_for(job_of(calibrate=own))
    factors = {Shape(b): work.scale(Shape(b), work.kinds[0]).forward for b in (1, 2, 3, 4, 8)}
    assert [*factors.values()] == pytest.approx([1, 2, 3, 4, 4], rel=1e-6)
    # context ranks have so many fewer tokens
    assert work.scale(Shape(4, 1, 4), work.kinds[0]).forward == pytest.approx(1, rel=1e-6)
    assert work.scale(Shape(8, 2, 2), work.kinds[0]).forward == pytest.approx(4, rel=1e-6)


def test_one_block_alone_is_measured_in_the_parts_that_its_modules_are():
    whole = measured(forward=1.5, backward=1.5)
    block, [size] = whole.layers[1], whole.measurements
    parts = [
        replace(block, name=name, parameter_bytes=block.parameter_bytes // 2)
        for name in ("attn", "mlp")
    ]
    half = replace(
        size.layers[1],
        forward_s=size.layers[1].forward_s / 2,
        backward_s=size.layers[1].backward_s / 2,
    )
    stash = [replace(size.stash_groups[0], layers=[0, 1])]
    alone = replace(size, layers=[half, half], tensors=[], stash_groups=stash)
    alone = replace(whole, layers=parts, measurements=[alone])
    [one], [other] = (training_for(job_of(calibrate=own)).calibration for own in (whole, alone))
    assert one.blocks == other.blocks


def longer(profile):
    return replace(profile, model=replace(profile.model, tokens_per_sample=8192))


def wider(profile):
    size = profile.measurements[0]
    layers = [replace(layer, output_bytes=2 * layer.output_bytes) for layer in size.layers]
    return replace(profile, measurements=[replace(size, layers=layers)])


def heavier(profile):
    """The profile where one block of all has twice the parameters."""
    layers = list(profile.layers)
    layers[2] = replace(layers[2], parameter_bytes=2 * layers[2].parameter_bytes)
    return replace(profile, layers=layers)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda own: replace(own, device=replace(own.device, name="AMD EPYC")), "measured on AMD"),
        (lambda own: replace(own, dtype="float32"), "computes in float32, and the plan in bfloat"),
        (longer, "its samples have 8,192 tokens, those of the plan 4,096"),
        (wider, "leave a block for 1 samples; 4,096 tokens of width 4,096 are 33.6 MB"),
        (lambda own: replace(own, group=Group(ranks=4)), "on 4 tensor parallel ranks"),
        (lambda own: measured(model="llama3-70b", layout="tp=8,dp=1"), "a block has"),
        (heavier, "a block has"),
        (lambda own: replace(own, dtype="float32", autocast="bfloat16"), r"^[^\n]* a block has"),
    ],
)
def test_a_profile_of_another_block_is_refused_with_what_is_other(change, message):
    asked = job_of(calibrate=change(measured()))
    with pytest.raises(PartoptError, match=message) as refused:
        plan_layout(asked)
    assert refused.value.exit_code == 2 and refused.value.parts[0].hint


def test_estimated_times_are_not_measured_ones():
    asked = job_of()
    own = profile_of(training_for(asked), fill_layout(asked, training_for(asked)), BATCH)
    with pytest.raises(PartoptError, match="its times were estimated"):
        plan_layout(job_of(calibrate=own))


@pytest.mark.slow
def test_the_plan_says_what_was_measured_and_is_verified_by_that():
    plan = plan_layout(job_of("tp=2,pp=2", calibrate=measured("tp=2,dp=4", forward=1.2)))
    plain = plan_layout(job_of("tp=2,pp=2"))
    assert plan.predicted.iteration_s > 1.04 * plain.predicted.iteration_s
    read = Plan.parse(msgspec.json.encode(plan))
    assert read == plan and verify(read, profile_again(read)).ok
    forged = replace(read, transformer=replace(read.transformer, closed_s=1.0))
    assert "numbers" in verify(forged, profile_again(forged)).failed
    block = replace(read.transformer.calibration[0].blocks[0], forward_s=1e-3)
    other = replace(read.transformer.calibration[0], blocks=[block])
    forged = replace(read, transformer=replace(read.transformer, calibration=[other]))
    assert "profile" in verify(forged, profile_again(forged)).failed


ASKED = "llama3-8b", "--topology", "dgx-h100", "--servers", "1", "--for", "megatron"
ASKED = *ASKED, "--global-batch", "64", "--sequence", "4096"


@pytest.mark.slow
def test_the_page_says_of_every_number_whether_it_was_measured_scaled_or_computed(
    partopt, tmp_path
):
    file, path = tmp_path / "block.json", tmp_path / "plan.json"
    file.write_bytes(msgspec.json.encode(measured("tp=2,dp=4", forward=1.25)))
    said = "plan", *ASKED, "--calibrate", file, "--force", "-o", path, "--layout"
    page = " ".join(partopt(*said, "tp=2,pp=2,cp=1,microbatch=1,recompute=never").out.split())
    assert "block measured: forward x 1.25, backward x 1, bytes kept x 1" in page
    assert "where scaled: products" in page and "computed: embedding and head" in page
    assert "trust blocks measured, exchanges and the rest computed" in page
    shown = partopt("show", path).out
    assert [line.split()[-1] for line in shown.splitlines() if line.startswith("a block")] == [
        "measured"
    ]
    assert "verified" in partopt("show", path, "--verify").out
    page = " ".join(partopt(*said, "tp=4,pp=2,cp=1,microbatch=1,recompute=never").out.split())
    assert "block scaled: forward x 1.25" in page and "trust blocks scaled" in page
    stated = json.loads(path.read_text())["transformer"]["calibration"][0]
    assert stated["ranks"] == 2 and stated["blocks"][0]["microbatch_size"] == 1


def test_what_does_not_go_with_a_measured_block_is_refused(partopt, tmp_path):
    file = tmp_path / "block.json"
    file.write_bytes(msgspec.json.encode(measured()))
    done = partopt("plan", *ASKED[:-1], "8192", "--calibrate", file)
    assert done.code == 2 and "8,192" in done.err and "hint:" in done.err and not done.out
    done = partopt("plan", "gpt.cpu.float32", "--topology", "v100-pcie", "--calibrate", file)
    assert done.code == 2 and "--calibrate: goes with a transformer's" in done.err


def kinds_of(profile, **times):
    """The profiles of blocks of every kind of a model, some so many times as long."""
    [size], blocks = profile.measurements, {0: "dense", 1: "experts"}  # glm-4.5-air begins so
    found = {}
    for place, name in blocks.items():
        layer, measured = profile.layers[1 + place], size.layers[1 + place]
        factor, stash = (
            times.get(name, 1.0),
            [group for group in size.stash_groups if group.layers == [1 + place]],
        )
        longer = replace(
            measured, forward_s=factor * measured.forward_s, backward_s=factor * measured.backward_s
        )
        alone = replace(
            size, layers=[longer], tensors=[], stash_groups=[replace(stash[0], layers=[0])]
        )
        found[name] = replace(profile, layers=[layer], measurements=[alone])
    return found


KINDS = {
    "model": "glm-4.5-air",
    "facts": {"exchange": "alltoall", "routing": "capacity", "graphs": "full"},
}


def test_a_block_of_each_kind_is_scaled_as_its_profile_says():
    asked = job_of("tp=1,ep=1,dp=8", memory="10 TB", **KINDS)
    whole = measured("tp=1,ep=1,dp=8", **KINDS)
    plain = training_for(asked)
    same = training_for(asked.with_(calibrate=kinds_of(whole)))
    longer = training_for(asked.with_(calibrate=kinds_of(whole, dense=2.0, experts=3.0)))
    for shape in (Shape(), Shape(e=8), Shape(2, 1, 1, 4)):
        for kind, factor in zip(plain.counts, (2.0, 3.0), strict=True):
            one, other, more = (work.block(shape, kind) for work in (plain, same, longer))
            assert other.forward_s == pytest.approx(one.forward_s, rel=1e-6)
            exchange_s = one.parts["exchange"].forward if kind.experts else 0.0
            expected = exchange_s + factor * (one.forward_s - exchange_s)
            assert more.forward_s == pytest.approx(expected, rel=1e-6)
    only = asked.with_(calibrate={"dense": kinds_of(whole, dense=2.0)["dense"]})
    dense, experts = training_for(only).counts
    assert training_for(only).scale(Shape(), experts).forward == 1.0
    assert training_for(only).scale(Shape(), dense).forward == pytest.approx(2.0)


def test_a_block_may_have_the_experts_of_one_of_several_ranks():
    asked = job_of("tp=1,ep=8,dp=8", memory="10 TB", **KINDS)
    own = kinds_of(measured("tp=1,ep=8,dp=8", **KINDS))["experts"]
    [found] = training_for(asked.with_(calibrate={"experts": own})).calibration
    assert (found.kind, found.expert_ranks) == ("experts", 8)


def test_the_plan_says_which_kinds_were_measured_and_is_verified_by_that():
    own = kinds_of(measured("tp=1,ep=8,dp=8", **KINDS), experts=1.5)["experts"]
    asked = job_of("ep=4,pp=2,dp=4", memory="10 TB", **KINDS)
    plan = plan_layout(asked.with_(calibrate={"experts": own}))
    read = Plan.parse(msgspec.json.encode(plan))
    assert read == plan and verify(read, profile_again(read)).ok
    page = " ".join(render_plan(read).split())
    assert "block dense: computed experts: scaled: forward x" in page
    assert "measured at tp 1, ep 8, microbatch 1" in page
    assert "trust blocks partly scaled, exchanges and the rest computed" in page


def test_one_measured_block_does_not_say_how_long_blocks_of_other_kinds_take():
    asked = job_of("tp=1,ep=8,dp=8", model="glm-4.5-air", calibrate=measured())
    with pytest.raises(PartoptError, match=r"blocks of .* are of several kinds") as refused:
        plan_layout(asked)
    assert "dense=FILE, experts=FILE" in refused.value.hint
    named = job_of(calibrate={"windowed": measured()})
    with pytest.raises(PartoptError, match="`calibrate=windowed`: llama3-8b has no such blocks"):
        plan_layout(named)


@pytest.mark.slow
def test_files_of_kinds_are_told_apart_by_their_names(partopt, tmp_path):
    asked = "plan", "glm-4.5-air", *ASKED[1:]
    for name, profile in kinds_of(measured("tp=1,ep=8,dp=8", **KINDS)).items():
        (tmp_path / f"{name}.json").write_bytes(msgspec.json.encode(profile))
    each = [
        word for n in ("dense", "experts") for word in ("--calibrate", f"{n}={tmp_path}/{n}.json")
    ]
    done = partopt(*asked, *each, "--memory", "10 TB", "--layout", "ep=4,pp=2,dp=4,recompute=never")
    assert done.code == 0 and "block dense:" in " ".join(done.out.split())
    twice = partopt(*asked, "--calibrate", f"{tmp_path}/dense.json", *each[:2])
    assert twice.code == 2 and "one file, or one for every kind" in twice.err


@pytest.mark.slow
def test_measured_blocks_of_two_kinds_say_how_long_a_run_of_both_takes():
    """On this processor a block of each kind is timed alone; a run has six."""
    torch = pytest.importorskip("torch")
    width, tokens, experts = 256, 512, 4
    torch.manual_seed(0)
    torch.set_num_threads(1)

    class Dense(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = torch.nn.Linear(width, 1024), torch.nn.Linear(1024, width)

        def forward(self, x):
            return x + self.down(torch.nn.functional.gelu(self.up(x)))

    class Experts(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.router = torch.nn.Linear(width, experts)
            self.experts = torch.nn.ModuleList(Dense() for _ in range(experts))

        def forward(self, x):
            chosen = torch.arange(len(x)) % experts  # balanced
            out = x * self.router(x).softmax(-1).amax(-1, keepdim=True)
            parts = [expert(out[chosen == i]) for i, expert in enumerate(self.experts)]
            return x + torch.cat(parts)

    def pass_s(blocks):
        """The least seconds of a forward and of a backward, of several."""
        x, taken = torch.randn(tokens, width, requires_grad=True), []
        for _ in range(8):
            began = time.process_time()
            y = x
            for block in blocks:
                y = block(y)
            middle = time.process_time()
            y.sum().backward()
            taken.append((middle - began, time.process_time() - middle))
        return [min(seconds) for seconds in zip(*taken, strict=True)]

    model = replace(KINDS_MODEL, blocks=6, dense_first=2, further=0, window=0, full_period=0)
    measured_blocks = [
        Calibration(
            name=kind,
            sha256="0" * 64,
            kind=kind,
            blocks=[MeasuredBlock(microbatch_size=1, forward_s=forward, backward_s=backward)],
        )
        for kind, made in (("dense", Dense), ("experts", Experts))
        for forward, backward in [pass_s([made()])]
    ]
    work = training(model, sequence=tokens, calibration=measured_blocks)
    blocks = [work.block(Shape(), kind) for kind in work.kinds]
    run_s = sum(pass_s([*(Dense() for _ in range(2)), *(Experts() for _ in range(4))]))
    said_s = sum(block.forward_s + block.backward_s for block in blocks)
    assert said_s == pytest.approx(run_s, rel=0.3)
    plain = training(model, sequence=tokens)
    computed_s = sum(plain.block(Shape(), kind).seconds for kind in plain.kinds)
    assert computed_s < run_s / 3  # of a device that this one is not
