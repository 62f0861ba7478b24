"""What trainers are said to do: every fact has a source, and fits what they can say."""

import msgspec
import pytest

from partopt import TRAINERS, Trainer
from partopt.documents.engine import Engine, Layout
from partopt.documents.transformer import BITS, Practice
from partopt.schedules import SCHEDULES

# of a fact that rests on a rule of partopt's own
RULES = {"optimizer_bytes", "reserve_bytes", "gathered_bytes", "on_host"}


@pytest.fixture(params=TRAINERS)
def trainer(request) -> Trainer:
    return TRAINERS[request.param]


def test_every_fact_has_a_source(trainer):
    engine = msgspec.structs.asdict(trainer.engine)
    facts = engine.keys() - {name for name in RULES if engine[name] in (None, msgspec.UNSET)}
    facts -= {"whole_sums"}  # the source of `shard` says it
    if engine["allreduce"] == "blocking":
        facts -= {"bucket_bytes"}
    if not engine["in_turn"]:
        facts -= {"in_turn"}
    if trainer.schedules is not None:
        facts |= {"schedules"}
    if trainer.says.degrees:
        facts |= {"degrees"}
    if [*trainer.says.formats] != [*BITS]:
        facts |= {"formats"}
    assert facts - trainer.sources.keys() == set()
    practiced = {*Practice.__struct_fields__} if trainer.practice else set()
    said = engine.keys() | {"schedules", "cuts", "degrees", "orders", "formats"} | practiced
    assert trainer.sources.keys() <= said
    assert all(trainer.sources.values())


PRACTICED = [name for name, trainer in TRAINERS.items() if trainer.practice]
# what Megatron's practice, which the defaults are, has no use for
UNUSED = {"compiled", "kept_selective", "shard_copies", "shards", "keeps_outputs"}
UNUSED |= {"host_shards"}
# which Megatron Bridge adds
ADAPTERS = {"adapters", "adapted", "adapter_dropout", "images", "tower_trained"}


@pytest.mark.parametrize("name", PRACTICED)
def test_what_a_trainer_does_with_a_transformer_has_sources(name):
    own, usual = TRAINERS[name].practice, TRAINERS["megatron"].practice
    fields = {*Practice.__struct_fields__}
    facts = {field for field in fields if getattr(own, field) != getattr(usual, field)}
    if "megatron" in name:
        facts = fields - UNUSED - (ADAPTERS if name == "megatron" else set())
    assert facts | {"loss", "attention"} <= TRAINERS[name].sources.keys()
    assert [*own.faults()] == []
    assert msgspec.json.decode(msgspec.json.encode(own), type=Practice) == own


@pytest.mark.parametrize("name", PRACTICED)
def test_a_choice_replaces_facts_and_the_first_is_the_default_or_one_of_the_trainer(name):
    own, choices = TRAINERS[name].practice, TRAINERS[name].choices
    for choice, values in choices.items():
        defaults = 0
        for changes in values.values():
            made = msgspec.structs.replace(own, **changes)
            assert [*made.faults()] == [], choice
            defaults += made == own
        assert defaults == 1, choice


def test_facts_are_of_schedules_that_there_are(trainer):
    named = {*trainer.engine.waits, *trainer.engine.in_turn, *(trainer.schedules or {})}
    assert named <= {*SCHEDULES}
    assert trainer.name in TRAINERS
    assert (trainer.read is None) == (trainer.reads == "") == (trainer.example == "")
    assert (trainer.write is None) == (trainer.suffix == "")
    assert "none" in trainer.engine.recompute
    assert "none" in trainer.engine.shard


def test_what_an_engine_does_is_read_from_a_document_again(trainer):
    content = msgspec.json.encode(trainer.engine)
    assert msgspec.json.decode(content, type=Engine) == trainer.engine
    # of plans in fp8, of shares on the host, and of partopt's engine and torch's alone
    written = {*Engine.__struct_fields__} - {"gathered_bytes", "on_host", "whole_sums"}
    assert msgspec.json.decode(content).keys() - {"whole_sums"} == written


def test_a_layout_leaves_out_what_nothing_says():
    assert msgspec.json.encode(Layout(pp=4, microbatch=1)) == b'{"pp":4,"microbatch":1}'


# where devices wait under 1F1B: messages, number format of gradients, when they are exchanged,
# receive buffers, what is made again, what replicas hold a share of
ENGINES = {
    "megatron": "packed float32 overlap flight none,selective,blocks none,optimizer",
    "torchtitan": "split float32 blocking all none,selective,blocks none,gradients,parameters",
    "deepspeed": "split parameters blocking flight none,blocks,stage none,optimizer",
    "colossalai": "split parameters blocking flight none,blocks none,optimizer",
}
# and where they do not
ENGINES |= {
    "partopt": "packed parameters overlap flight none,stage none,optimizer",
    "torch": "split parameters blocking all none,stage none,optimizer",
    "torch-csv": "split parameters blocking all none,stage none",
    "torchgpipe": "split parameters blocking flight none,stage none",
    "vllm": "packed parameters overlap flight none,selective,blocks,stage "
    "none,optimizer,gradients,parameters",
}
LIKE = dict.fromkeys(("megatron-bridge", "ms-swift", "verl", "slime"), "megatron")
LIKE |= {"sglang": "vllm", "accelerate": "vllm"}


def test_engines_do_what_their_sources_say(trainer):
    own, name = trainer.engine, LIKE.get(trainer.name, trainer.name)
    facts = [own.messages, own.gradients, own.allreduce, own.buffers]
    facts += [",".join(own.recompute), ",".join(own.shard)]
    assert " ".join(facts) == ENGINES[name]
    assert own.waits == (("1f1b",) if [*ENGINES].index(name) < 4 else ())
    assert (own.optimizer_bytes, own.reserve_bytes) == (None, None)


def test_megatron_reduces_40_million_parameters_at_once_and_bridge_has_sources_of_its_own():
    assert {TRAINERS[name].engine.bucket_bytes for name in PRACTICED[:2]} == {4 * 40_000_000}
    for fact in ("waits", "gradients", "allreduce"):
        assert "Megatron Bridge, " in TRAINERS["megatron-bridge"].sources[fact]
