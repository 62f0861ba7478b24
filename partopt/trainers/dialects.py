"""Trainers by Megatron in words of others: ms-swift, verl and slime.

What their scripts say is put into Megatron's arguments, which are read as Megatron-LM's. A plan is
of one step of the update: what generates, scores or refers is not planned. Sources: ms-swift,
megatron/arguments; verl, trainer/config; slime, utils/arguments.py and utils/dp_schedule.py.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence

from partopt.configurations.marks import is_unset, marks_of, strip_marks
from partopt.configurations.settings import Settings
from partopt.documents.plan import Plan
from partopt.documents.transformer import ADAPTED, Loss
from partopt.trainers.megatron import BRIDGE, MEGATRON, read_arguments
from partopt.trainers.megatron_arguments import ADAPTING, look_up_model
from partopt.trainers.megatron_model import COMPILED, OFFLOAD, model_arguments
from partopt.trainers.sources import Sources
from partopt.trainers.trainer import Asked, Stated, Trainer

_MEAN, _IMAGES = "tokens_per_sample", "images"
_LONGEST = "max"  # where every sample is counted as the longest
_DEGREES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
_PICTURES = re.compile(r"[-_]vl[-_]|omni|internvl|llava|ovis|glm-?[0-9.]+v", re.I)
_PAIRS = ("dpo", "rm")  # whose samples are chosen and rejected ones
_GENERATING = ("grpo", "gkd")
_SMALL_HEADS = ("seq_cls", "embedding", "reranker")  # a number or a few of a sample
# flags of generation, data and phases, some of which are called as Megatron's are
_OF_SWIFT = re.compile(
    r"(vllm|sglang|lora|freeze_vit|freeze_aligner|packing|offload_(model|optimizer|bridge)|target)\w*"
    r"|(max|max_completion|seq)_length|(tuner|train)_type|model(_name)?|(no_)?load_\w*|padding_free"
    r"|\w*attn_impl|sleep_level|offload_teacher_model|torch_dtype"
)
_OF_SLIME = re.compile(
    r"(rollout|sglang|eval|offload(?!_)|ref|critic|log_probs|actor|n_samples|update_weight|prefill"
    r"|offload_(train|rollout))\w*|max_tokens_per_gpu|use_dynamic_batch_size|seq_length"
    r"|num_steps_per_rollout"
)
# of what verl says of an engine and an optimizer, what Megatron's arguments are called alike
_ENGINE = (
    *_DEGREES,
    *("virtual_pipeline_model_parallel_size", "expert_model_parallel_size", "sequence_parallel"),
    *("expert_tensor_parallel_size", "use_distributed_optimizer", "use_megatron_fsdp"),
)
_OPTIMIZER = (
    *("optimizer", "use_precision_aware_optimizer", "main_grads_dtype", "exp_avg_dtype"),
    "exp_avg_sq_dtype",
)
# of what Megatron is told of a model, what is a choice of the layout
_OF_LAYOUTS = {
    *("sequence_parallel", "tp_comm_overlap", "cross_entropy_loss_fusion", "grad_reduce_in_bf16"),
    *("use_precision_aware_optimizer", *OFFLOAD),
}
_LOSSES = {"compiled": {"loss": COMPILED}, "none": {"loss": Loss(passes=0, held=0)}}
# arrays, and variables on a line of their own
_PASSED = re.compile(r"(?m)^[^#\n]*\$\{(\w+)\[[@*]\]\}|^\s*\"?\$\{?(\w+)\}?\"?\s*\\?$")
# of Megatron's switches those that ms-swift has
_OF_EXPERTS = "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend deepep"
_SWITCHES = {
    **{name: name for name in ("ends=free", "--dtype mxfp8", "--dtype fp8")},
    "--tp-comm-overlap": "--tp_comm_overlap true",
    "--use-megatron-fsdp": "--use_megatron_fsdp true",
    _OF_EXPERTS: "--moe_token_dispatcher_type flex --moe_enable_deepep true",
    "--use-precision-aware-optimizer": "--use_precision_aware_optimizer true --exp_avg_dtype bf16 "
    "--exp_avg_sq_dtype bf16",
    "--optimizer-cpu-offload {}": "--optimizer_cpu_offload true --optimizer_offload_fraction {}",
}
_BY_MEGATRON = re.compile(r"(?m)^[^#\n]*(ppo_megatron_trainer|(model_engine|strategy)=megatron)")


class _Words:
    """What a script says in Megatron's words, `values`, and how it writes them."""

    def __init__(self, settings: Settings, devices: int) -> None:
        self.settings, self.devices = settings, devices
        self.values = {
            name: value
            for name, value in settings.values.items()
            if "." not in name and name not in settings.variables
        }
        self.written = dict[str, str]()
        self.rest = ""  # before arguments that it does not write as others
        self.on = ("",)  # arguments that are something where nothing is said
        self.facts = dict[str, object]()  # beside those that Megatron's arguments say
        self.per_rank = ""  # what says the tokens of a microbatch on a rank
        self.given = settings.number("seq_length")  # before what the script says

    def refuse_unknown_words(self) -> None:
        """Refuse variables of several words that are passed, and depend on what is not known."""
        known = {name: str(value) for name, value in self.settings.values.items()}
        passed = [name for names in _PASSED.findall(self.settings.text) for name in names if name]
        values = {known.get(name, ""): name for name in reversed(passed)}
        for value, name in values.items():
            if marks_of(value) and not is_unset(value) and not strip_marks(value).strip():
                cause = next(other for other, said in known.items() if said == value)
                if cause == name and any(file.endswith(".sh") for file in self.settings.unread):
                    continue  # which a note says
                unknown = f"{cause}, which" if cause != name else "a condition that"
                what = f"what {name} has depends on {unknown} the text does not say"
                hint = f"give it: `arguments={cause}=VALUE`"
                self.settings.refuse(what, hint, "unknown-variable", path=cause)

    def spell(self, name: str) -> str:
        """An argument of Megatron as the script writes it; a variable is as it is."""
        return name if name.isupper() else self.written.get(name, f"{self.rest}{name}")

    def leave_out(self, names: re.Pattern[str]) -> None:
        """Leave out flags that are not Megatron's."""
        self.values = {
            name: value for name, value in self.values.items() if not names.fullmatch(name)
        }

    def take(self, name: str, written: str, usual: object = None) -> None:
        """Give an argument of Megatron the value that the script writes as another, or a usual."""
        value = self.settings.value(written)
        self.written[name] = written
        self.values[name] = usual if value is None else value

    def number(self, written: str, usual: int = 0) -> int:
        """The whole number that the script has, a usual one where it has none."""
        return self.settings.number(written, least=0) or usual

    def length(self, written: str, usual: int = 0, packs: bool = False) -> int:
        """Tokens that a sample may have; none are needed of one of a given length, not packed."""
        return 0 if self.given and not packs else self.number(written, usual)

    def name_model(self, written: str, trains: bool) -> None:
        """Take the model whose shape it is, of whose path the end is enough.

        Where tokens of pictures are said it `trains` what reads them, or not.
        """
        self.take("model_name", written)
        named = str(self.settings.value(written) or "").rstrip("/")
        name = named.rpartition("/")[2] if marks_of(named) else named
        if marks_of(name) or not name:
            if not self.settings.find(written):
                self.settings.refuse_missing(written)
        elif (model := look_up_model(name)) is None:
            what = f"{self.settings.show(written)}: no shape of {name} is known"
            hint = f"give a config.json, or a name of models/: `arguments={written}=NAME`"
            self.settings.refuse(what, hint, "unsupported-model", path=written)
        elif images := self.number(_IMAGES):
            self.facts |= {"images": images, "tower": "trained" if trains else "frozen"}
        elif _PICTURES.search(name):
            what = "its text alone is planned, not what reads pictures"
            if model.tower:
                what += f": `arguments={_IMAGES}=N` says the tokens of pictures that a sample has"
            self.settings.note(written, what)
        self.settings.check()

    def adapt(self, kind: str, rank: int, targets: object, dropout: object) -> None:
        """Take adapters in the words of Megatron Bridge: all linear layers have one by default."""
        self.written["peft"] = kind
        names = targets if isinstance(targets, list) else [targets or "all-linear"]
        every = [f"linear_{name}" for name in ADAPTED] if "all-linear" in names else []
        others = [name for name in names if name not in ("all-linear", "all-router", *every)]
        if "all-router" in names:
            self.settings.note("target_modules", "adapters of routers are not counted")
        self.values |= {"peft": "lora", "dim": rank, "target_modules": every + others}
        self.values["dropout"] = dropout

    def pack(self, per_rank: str, samples: int, longest: int, usual: int = 0) -> None:
        """Count microbatches of the tokens that a rank takes, full of samples of a mean length.

        `samples` are those of a step, `longest` the tokens of the longest, 0 where that is not
        said. Each replica has as many microbatches as its samples fill.
        """
        settings, self.per_rank = self.settings, per_rank
        sizes = [settings.replaced.get(name, self.values.get(name)) for name in _DEGREES]
        t, p, c = (size if isinstance(size, int) and size > 0 else 1 for size in sizes)
        tokens = self.given or (self.number(per_rank) or usual) * c
        longest = min(longest or tokens, tokens)
        mean = longest if settings.find(_MEAN) == _LONGEST else self.number(_MEAN)
        if not mean:
            what = f"microbatches are of {tokens:,} tokens, and the text has no mean of a sample's"
            hint = f"give it: `arguments={_MEAN}=N`; or count all as {longest:,}, the longest: "
            hint += f"`arguments={_MEAN}={_LONGEST}`"
            what = f"{settings.show(per_rank)}: {what}"
            settings.refuse(what, hint, "missing-setting", path=_MEAN)
        ranks = max(1, self.devices // (t * p * c))
        counted = ranks * max(1, -(-samples * mean // max(1, tokens * ranks)))
        self.written["seq_length"] = per_rank
        self.values |= {"seq_length": tokens or None, "micro_batch_size": 1}
        self.values["global_batch_size"] = counted
        if mean < tokens:
            self.facts["documents"] = mean
        if mean and "global_batch_size" not in settings.replaced:
            size = f"{samples:,} samples of {mean:,} tokens"
            what = f"{size} are counted as {counted:,} full microbatches of {tokens:,}"
            settings.notes.append(what)

    def count_longest(self, samples: int, longest: int) -> None:
        """Count every sample as the longest, as those that are padded are."""
        self.values |= {"seq_length": self.given or longest, "global_batch_size": samples or None}
        if not self.given:
            what = f"every sample is counted as long as the longest, {longest:,} tokens"
            self.settings.notes.append(f"{what}: `sequence=N` counts others")

    def note_devices(self, nodes: str, per_node: str, usual: int) -> None:
        """Note devices that the script does not have, as far as it says them."""
        sizes = [self.settings.known(name) for name in (nodes, per_node)]
        counts = [size if isinstance(size, int) else None for size in sizes]
        said = (counts[0] or 1) * (counts[1] or usual)
        if said != self.devices:
            what = f"the script trains on {said} devices, this is on {self.devices}"
            self.settings.notes.append(what)

    def note_update(self, way: str, moved: Sequence[str]) -> None:
        """Note what of training by a policy is planned, and what goes to the host in between."""
        settings = self.settings
        what = f"a step of the update by {way} is planned: not generation, rewards, and passes of a"
        settings.notes.append(f"{what} reference or a critic, nor what these keep in memory")
        if on := [settings.show(name) for name in moved if settings.has(name)]:
            where = f"{', '.join(on)}: what is trained is on the host between phases"
            settings.notes.append(f"{where}, whose copies take time that is not counted")


def _translate_swift(words: _Words) -> None:
    """`megatron sft`, `pt` and `rlhf` of ms-swift (megatron/arguments/megatron_args.py)."""
    settings = words.settings
    way = str(settings.find("rlhf_type") or "") if settings.has("rlhf_type") else ""
    words.leave_out(_OF_SWIFT)
    words.values = {
        "use_distributed_optimizer": "muon" not in str(settings.find("optimizer")),
        **dict.fromkeys(("bf16", "cross_entropy_loss_fusion", "moe_grouped_gemm"), True),
        "recompute_granularity": "selective",
        "moe_token_dispatcher_type": "alltoall",
        "expert_tensor_parallel_size": 1,
        "mtp_num_layers": None,
    } | words.values
    words.on = ("recompute_granularity",)
    if str(settings.find("torch_dtype")) in ("float16", "fp16"):
        words.values |= {"fp16": True, "bf16": False}
    small = settings.find("task_type") in _SMALL_HEADS or way == "rm"
    fused = settings.has("cross_entropy_loss_fusion", default=True)
    if small or (fused and not way and settings.find("cross_entropy_fusion_impl") != "te"):
        words.facts["loss"] = "none" if small else "compiled"
    trains = settings.states("freeze_vit") and not settings.has("freeze_vit")
    words.name_model("model", trains)
    pair = 1 + (way in _PAIRS and not settings.has("packing"))  # a packed row has both
    words.values["micro_batch_size"] = pair * words.number("micro_batch_size", 1)
    samples = pair * words.number("global_batch_size", 16)
    longest = words.length("packing_length") or words.length("max_length")
    more = words.length("max_completion_length", 512) if way in _GENERATING else 0
    if settings.has("packing") or not longest:
        words.take("seq_length", "max_length")
        if settings.has("packing") and (mean := words.number(_MEAN)):
            words.facts["documents"] = mean
        elif settings.has("packing"):
            what = "attention is counted over the whole of what is packed"
            settings.note("packing", f"{what}: `arguments={_MEAN}=N` says how long samples are")
        words.values |= {"global_batch_size": samples, "seq_length": words.given or longest or None}
    else:
        words.count_longest(samples, longest + more)
    if pair > 1:
        settings.note("rlhf_type", f"each sample of {way} is a pair, which is counted as two")
    if way:
        words.note_update(way, ("offload_model", "offload_optimizer"))
    if small:
        what = "the head has the weights and the product of one of the vocabulary, and no logits"
        settings.note("rlhf_type" if way == "rm" else "task_type", what)
    kind = next((name for name in ("tuner_type", "train_type") if settings.has(name)), "")
    goes_on = settings.has("adapters", "mcore_adapter")  # whose file says the rank
    if goes_on and not settings.states("lora_rank"):
        settings.refuse_missing("lora_rank")
    if goes_on or (kind and settings.find(kind) == "lora"):
        targets = settings.value("target_regex") or settings.value("target_modules")
        dropout = settings.value("lora_dropout") if settings.states("lora_dropout") else 0.05
        words.adapt(kind or "adapters", words.number("lora_rank", 8), targets, dropout)
    elif kind:
        words.take(kind, kind)
    words.note_devices("NNODES", "NPROC_PER_NODE", words.devices)


def _translate_slime(words: _Words) -> None:
    """slime's script, whose flags of training are Megatron's (utils/arguments.py)."""
    settings = words.settings
    words.leave_out(_OF_SLIME)
    words.values = {"bf16": not settings.has("fp16")} | words.values
    words.values["use_distributed_optimizer"] = True
    steps = words.number("num_steps_per_rollout", 1)
    generated = words.number("rollout_batch_size") * words.number("n_samples_per_prompt", 1)
    samples = words.number("global_batch_size", generated // steps)
    packs = settings.has("use_dynamic_batch_size", "max_tokens_per_gpu")
    prompt, answer, both = (
        words.length(f"rollout_max_{what}_len", packs=packs)
        for what in ("prompt", "response", "context")
    )
    longest = both or (prompt and prompt + answer)
    if packs:
        words.pack("max_tokens_per_gpu", samples, longest)
    else:
        words.take("seq_length", _MEAN, words.given or longest or None)
        words.values["global_batch_size"] = samples or None
    if re.search(r"INT4_FAKE_QAT\w*[\\\"' ]*[:=][\\\"' ]*1", settings.text):
        settings.notes.append("the rounding of weights to 4 bits in the forward is not counted")
    if settings.find("loss_type") != "sft_loss":
        way = str(settings.find("advantage_estimator") or "grpo")
        stays = settings.has("no_offload_train")
        words.note_update(way, () if stays else ("colocate", "offload", "offload_train"))
    words.note_devices("actor_num_nodes", "actor_num_gpus_per_node", 8)


def _translate_verl(words: _Words) -> None:
    """verl's trainer of a policy, or of examples (trainer/config: actor, engine, optim, model)."""
    settings = words.settings
    learns = any(path.startswith("actor_rollout_ref.") for path in settings.values)
    of, actor = ("actor_rollout_ref.", "actor_rollout_ref.actor.") if learns else ("", "")
    engine, optim, model = (
        f"{actor}{'megatron' if learns else 'engine'}.",
        f"{actor}optim.",
        f"{of}model.",
    )
    words.rest, of_ddp = f"{engine}override_transformer_config.", f"{engine}override_ddp_config."
    tops = (words.rest, of_ddp, f"{optim}override_optimizer_config.")
    is_said = any(settings.states(f"{engine}{name}") for name in _ENGINE)
    if not is_said and not _BY_MEGATRON.search(settings.text):
        hint = "give a script that trains by Megatron's"
        what = "it trains by another engine than Megatron's, which is not read"
        settings.refuse(what, hint, "unsupported-trainer")
        settings.check()
    settings.unread = [name for name in settings.unread if not name.endswith("_trainer.yaml")]
    words.values |= {"bf16": True, "mtp_num_layers": None}
    for path in [path for path in settings.values if path.startswith(tops)]:
        words.take(path.rpartition(".")[2], path)
    for name in ("overlap_grad_reduce", "overlap_param_gather"):
        words.written.setdefault(name, f"{of_ddp}{name}")
    for end in ("first", "last"):  # as fields of Megatron's configuration have them
        field = f"{words.rest}num_layers_in_{end}_pipeline_stage"
        words.written[f"decoder_{end}_pipeline_num_layers"] = field
    for name in _ENGINE:
        on = name in ("sequence_parallel", "use_distributed_optimizer")
        words.take(name, f"{engine}{name}", on or None)
    for name in filter(lambda name: settings.states(f"{optim}{name}"), _OPTIMIZER):
        words.take(name, f"{optim}{name}")
    if settings.has(f"{model}mtp.enable_train"):
        del words.values["mtp_num_layers"]
    if settings.has(f"{actor}qat.enable", f"{engine}qat.enable"):
        what = "qat.enable: weights in few bits: not planned"
        settings.refuse(what, "leave it out", "unsupported-model")
    rank = words.number(f"{model}lora.rank") or words.number(f"{model}lora_rank")
    words.name_model(f"{model}path", not (rank or settings.has(f"{actor}freeze_vision_tower")))
    if rank:
        targets, dropout = (
            settings.value(f"{model}lora.{name}") for name in ("target_modules", "dropout")
        )
        words.adapt(f"{model}lora.type", rank, targets, dropout)
        words.values["peft"] = settings.find(f"{model}lora.type") or "lora"
    if learns:
        _count_policy(words, actor, engine)
    else:
        _count_examples(words)


def _count_policy(words: _Words, actor: str, engine: str) -> None:
    """What verl trains a policy on: answers to the prompts of a mini-batch."""
    settings = words.settings
    packs = settings.has(f"{actor}use_dynamic_bsz")
    longest = words.length("data.max_prompt_length", 512, packs)
    longest += words.length("data.max_response_length", 512, packs)
    samples = words.number(f"{actor}ppo_mini_batch_size", 256)
    samples *= words.number("actor_rollout_ref.rollout.n", 1)
    if packs:
        words.pack(f"{actor}ppo_max_token_len_per_gpu", samples, longest, 16_384)
    else:
        words.take("micro_batch_size", f"{actor}ppo_micro_batch_size_per_gpu")
        words.count_longest(samples, longest)
    moved = [f"{engine}{name}_offload" for name in ("param", "grad", "optimizer")]
    words.note_update(str(settings.find("algorithm.adv_estimator") or "gae"), moved)
    words.note_devices("trainer.nnodes", "trainer.n_gpus_per_node", words.devices)


def _count_examples(words: _Words) -> None:
    """What verl trains on examples."""
    settings = words.settings
    packs = settings.has("data.use_dynamic_bsz", default=True)
    longest = words.length("data.max_length", 1024, packs)
    samples = words.number("data.train_batch_size", 256)
    if packs:
        words.pack("data.max_token_len_per_gpu", samples, longest, 8192)
    else:
        words.take("micro_batch_size", "data.micro_batch_size_per_gpu", 4)
        words.count_longest(samples, longest)
    words.note_devices("nnodes", "nproc_per_node", words.devices)


def _dialect(name: str, title: str, tried: str, translate: Callable[[_Words], None]) -> Trainer:
    """A trainer whose words `translate` puts into Megatron's."""

    def read(settings: Settings, asked: Asked) -> Stated:
        words = _Words(settings, asked.devices)
        if not asked.layers:
            words.refuse_unknown_words()
            translate(words)
        found = read_arguments(settings.translate(words.values, words.written), asked, name)
        return dataclasses.replace(found, facts={**found.facts, **words.facts})

    def write(plan: Plan, settings: Settings) -> list[dict[str, object]]:
        assert MEGATRON.words
        words = _Words(settings, plan.topology.cluster.devices)
        translate(words)
        left = {*model_arguments(plan)} - _OF_LAYOUTS | {"global_batch_size"}
        sizes = dict[str, object]()
        if words.per_rank and plan.transformer:
            tokens = plan.transformer.sequence * plan.microbatch_size // (plan.layout.cp or 1)
            left, sizes = left | {"micro_batch_size"}, {words.per_rank: tokens}
        found = [
            {
                words.spell(other): "none" if other in words.on and value is None else value
                for other, value in group.items()
                if other not in left
            }
            for group in MEGATRON.words(plan, settings)
        ]
        return [group for group in (*found, sizes) if group]

    return dataclasses.replace(
        MEGATRON,
        name=name,
        summary=f"{title}, whose engine is Megatron's",
        tried=tried,
        sources=Sources("megatron", name),
        choices={
            **(BRIDGE.choices if name in ADAPTING else MEGATRON.choices),
            "loss": {**MEGATRON.choices["loss"], **_LOSSES},
        },
        read=read,
        write=None,
        words=write,
        suffix="",
        reads=f"{title}: a script that trains",
        example="train.sh",
    )


MS_SWIFT = dataclasses.replace(
    _dialect("ms-swift", "Megatron-SWIFT", "ms-swift at 3602360a", _translate_swift),
    levers=[
        lever._replace(flag=_SWITCHES[lever.flag])
        for lever in MEGATRON.levers
        if lever.flag in _SWITCHES
    ],
)
VERL = _dialect("verl", "verl", "verl at 1dda039b", _translate_verl)
SLIME = _dialect("slime", "slime", "slime at 624b824a", _translate_slime)
