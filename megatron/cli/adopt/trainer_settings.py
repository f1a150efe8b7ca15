"""Translate configuration files of torchtitan, nanotron and OLMo-core to flags of this project.

torchtitan: a TOML file of release 0.1 or 0.2, whose ``[training]`` has ``local_batch_size`` or ``batch_size``.
nanotron: a YAML file of 0.4 (2024 and 2025), with ``data_stages`` and ``tokens``.
OLMo-core: a config.json that versions 2.0 to 2.4 save with a run.
`settings.tsv` has one line per key, or per common prefix of keys. A ``neutral`` value needs no flag. Keys that a
trainer's function reads are not looked up in this table.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron.cli.adopt.adopted_command import PRETRAIN, Launch
from megatron.cli.adopt.shell_values import unknown_mark
from megatron.cli.adopt.translation import Finding
from megatron.core.errors import ConfigurationError

_TABLE = Path(__file__).with_name("settings.tsv")
DATA_PREFIX = "DATA_PREFIX"


@dataclasses.dataclass(frozen=True)
class _Setting:
    key: str
    becomes: str
    needs_decision: bool
    neutral: tuple[Any, ...]
    change: str


@dataclasses.dataclass(frozen=True)
class AdoptedSettings:
    """Launch equivalent to a configuration file, with the outcomes of its keys and its placeholders."""

    trainer: str
    launch: Launch
    findings: tuple[Finding, ...]
    placeholders: Mapping[str, str]


@functools.cache
def _table(trainer: str) -> Mapping[str, _Setting]:
    rows = [line.split("\t") for line in _TABLE.read_text(encoding="utf-8").splitlines()[1:]]
    return {
        key: _Setting(key, becomes, decide == "yes", tuple(json.loads(neutral or "[]")), change)
        for owner, key, becomes, decide, neutral, change in rows
        if owner == trainer
    }


def flattened(settings: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value with its dotted key; a list of scalars is one value."""
    if isinstance(settings, Mapping) and settings:
        for name, value in settings.items():
            yield from flattened(value, f"{prefix}.{name}" if prefix else str(name))
    elif isinstance(settings, list) and settings and all(isinstance(item, Mapping) for item in settings):
        for number, item in enumerate(settings):
            yield from flattened(item, f"{prefix}.{number}")
    else:
        yield prefix, settings


def _word(value: Any) -> str:
    """Format a value as a word of a command line; 500000.0 becomes 500000, since a flag may require an integer."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


class SettingsReader:
    """Translator of a trainer's settings: functions handle keys that depend on each other, a table handles the rest."""

    def __init__(self, trainer: str, settings: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self.trainer = trainer
        self.values = {**defaults, **dict(flattened(settings))}
        self.words: list[str] = []
        self.findings: list[Finding] = []
        self.placeholders: dict[str, str] = {}

    def take(self, key: str, default: Any = None) -> Any:
        """Remove a value from the settings and return it, so that the table does not translate it."""
        value = self.values.pop(key, None)
        return default if value is None else value

    def take_number(self, key: str, default: int) -> int:
        """Take a value like `take`; return the default if it is not an integer."""
        value = self.take(key, default)
        return value if isinstance(value, int) and not isinstance(value, bool) else default

    def add(self, *words: Any) -> None:
        """Append words to the command."""
        self.words += [str(word) for word in words]

    def add_placeholder(self, flag: str, name: str, reason: str) -> None:
        """Append a flag with a placeholder for a value that the user must fill in."""
        self.placeholders[name] = reason
        self.add(flag, unknown_mark(name))

    def note(self, key: str, kind: str, text: str, needs_decision: bool = False) -> None:
        """Record the outcome of a key."""
        self.findings.append(Finding(key, kind, text, needs_decision))

    def finish(self, ranks: int | None) -> AdoptedSettings:
        """Translate all remaining keys by the table, and return the settings of a launch on ``ranks`` ranks."""
        for key, value in self.values.items():
            self._translate(key, value)
        if ranks is None:
            self.placeholders["RANKS_OF_NODE"] = "the file does not set the number of ranks"
        nproc = unknown_mark("RANKS_OF_NODE") if ranks is None else str(ranks)
        launch = Launch((), "torchrun", ("--nproc_per_node", nproc), PRETRAIN, tuple(self.words), ranks)
        return AdoptedSettings(self.trainer, launch, tuple(self.findings), self.placeholders)

    def _translate(self, key: str, value: Any) -> None:
        setting = self._setting(key)
        typed = f"{key} = {json.dumps(value, default=str)}"
        if setting is None:
            if value not in (None, False, [], {}):
                self.note(typed, "no counterpart", f"no flag corresponds to it; it is omitted ({self.trainer})", True)
            return
        if any(value == neutral and type(value) is type(neutral) for neutral in setting.neutral) or value is None:
            return
        if not setting.becomes:
            kind = "no counterpart" if setting.needs_decision else "no effect"
            self.note(typed, kind, f"{setting.change} ({self.trainer})", setting.needs_decision)
        elif value is not False:
            items = [_word(item) for item in (value if isinstance(value, list) else [value])]
            words = [item for word in setting.becomes.split() for item in (items if word == "{}" else (word,))]
            self.add(*words)
            self.note(
                typed, "renamed", f"{' '.join(words)}; changes: {setting.change or 'nothing'}", setting.needs_decision
            )

    def _setting(self, key: str) -> _Setting | None:
        table = _table(self.trainer)
        if key in table:
            return table[key]
        return next((table[name] for name in table if name.endswith("*") and key.startswith(name[:-1])), None)


_NANOTRON_SCHEDULE = "optimizer.learning_rate_scheduler."
_NANOTRON_GATED = {"silu": "--swiglu", "gelu_pytorch_tanh": "--geglu"}
_NANOTRON_WSD_STYLES = {"linear": "linear", "cosine": "cosine", "1-sqrt": "minus_sqrt"}


def nanotron_settings(settings: Mapping[str, Any], variables: Mapping[str, str]) -> AdoptedSettings:
    """Translate a file of nanotron; its parallel layout determines the number of ranks."""
    reader = SettingsReader("nanotron", settings, {})
    reader.add("--position-embedding-type", "rope", "--disable-bias-linear")
    reader.add("--attention-dropout", 0.0, "--hidden-dropout", 0.0)
    if not reader.take("model.model_config.tie_word_embeddings", False):
        reader.add("--untie-embeddings-and-output-weights")
    activation = reader.take("model.model_config.hidden_act", "silu")
    reader.add(_NANOTRON_GATED.get(activation, "--swiglu"))
    if activation not in _NANOTRON_GATED:
        text = f"only {' and '.join(_NANOTRON_GATED)} are supported as gated activations: the model differs"
        reader.note(f"model.model_config.hidden_act = {activation}", "no counterpart", text, needs_decision=True)
    _nanotron_precision(reader)
    _nanotron_schedule(reader)
    ranks = _nanotron_layout(reader)
    size = reader.take("model.model_config.vocab_size")
    text = "it follows from the tokenizer and --make-vocab-size-divisible-by"
    reader.note(f"model.model_config.vocab_size = {size}", "no effect", text)
    stage = "data_stages.0.data.dataset."
    source = reader.take(f"{stage}hf_dataset_or_datasets") or reader.take(f"{stage}dataset_folder")
    reason = f"the prefix of tokenized data: create it from the text of {source} with tools/preprocess_data.py"
    reader.add_placeholder("--data-path", DATA_PREFIX, reason)
    return reader.finish(ranks)


def _nanotron_precision(reader: SettingsReader) -> None:
    dtype = reader.take("model.dtype", "bfloat16")
    flags = {"bfloat16": "--bf16", "float16": "--fp16"}
    if dtype in flags:
        reader.add(flags[dtype])
    reader.note(f"model.dtype = {dtype}", "renamed", f"{flags.get(dtype, 'no flag')}; changes: nothing")


def _nanotron_schedule(reader: SettingsReader) -> None:
    steps = int(reader.values.get("tokens.train_steps", 0))
    warmup = int(reader.values.get(f"{_NANOTRON_SCHEDULE}lr_warmup_steps", 0))
    start = reader.take_number(f"{_NANOTRON_SCHEDULE}lr_decay_starting_step", warmup)
    decay = reader.take_number(f"{_NANOTRON_SCHEDULE}lr_decay_steps", steps - start)
    style = reader.take(f"{_NANOTRON_SCHEDULE}lr_decay_style", "linear")
    reader.add("--lr-decay-iters", start + decay)
    if start > warmup or style == "1-sqrt":
        reader.add("--lr-decay-style", "WSD", "--lr-wsd-decay-iters", decay)
        reader.add("--lr-wsd-decay-style", _NANOTRON_WSD_STYLES.get(style, style))
    else:
        reader.add("--lr-decay-style", style)
    text = f"--lr-decay-iters {start + decay}, counted from the start of the run; changes: nothing"
    reader.note(f"{_NANOTRON_SCHEDULE}lr_decay_steps = {decay}", "renamed", text)


def _nanotron_layout(reader: SettingsReader) -> int:
    """Translate the keys of the parallel layout; return the number of ranks."""
    dp = reader.take_number("parallelism.dp", 1)
    sizes = [int(reader.values.get(f"parallelism.{axis}", 1)) for axis in ("tp", "pp", "context_parallel_size")]
    if reader.take("parallelism.tp_mode", "ALL_REDUCE") == "REDUCE_SCATTER" and sizes[0] > 1:
        reader.add("--sequence-parallel")
    micro = int(reader.values.get("tokens.micro_batch_size", 1))
    accumulation = reader.take_number("tokens.batch_accumulation_per_replica", 1)
    reader.add("--global-batch-size", micro * accumulation * dp)
    text = f"--global-batch-size {micro * accumulation * dp}, over all {dp} data-parallel ranks; changes: nothing"
    reader.note(f"tokens.batch_accumulation_per_replica = {accumulation}", "renamed", text)
    if reader.take_number("optimizer.zero_stage", 0) > 0:
        reader.add("--use-distributed-optimizer")
        reader.note("optimizer.zero_stage", "renamed", "--use-distributed-optimizer; changes: nothing")
    return dp * sizes[0] * sizes[1] * sizes[2]


_OLMO_CORE_SCHEDULES = {"CosWithWarmup": "cosine", "LinearWithWarmup": "linear", "ConstantWithWarmup": "constant"}


def olmo_core_settings(settings: Mapping[str, Any], variables: Mapping[str, str]) -> AdoptedSettings:
    """Translate a file of OLMo-core; the variable ``WORLD_SIZE`` is the number of ranks."""
    reader = SettingsReader("OLMo-core", settings, {})
    for key in [key for key in reader.values if key.endswith("_CLASS_") and "scheduler" not in key]:
        reader.take(key)
    _olmo_core_model(reader)
    length = int(
        reader.values.get("dataset.sequence_length") or reader.take("train_module.max_sequence_length", 0) or 1
    )
    if "dataset.sequence_length" not in reader.values:
        reader.add("--seq-length", length, "--max-position-embeddings", length)
    reader.take("train_module.max_sequence_length")
    batch = _olmo_core_batch(reader, length)
    _olmo_core_duration(reader, batch)
    if "bfloat16" in (
        reader.take("train_module.autocast_precision"),
        reader.take("train_module.dp_config.param_dtype"),
    ):
        reader.add("--bf16")
    betas = reader.take("train_module.optim.betas")
    if betas:
        reader.add("--adam-beta1", betas[0], "--adam-beta2", betas[1])
    if str(reader.take("train_module.dp_config.name")) in ("fsdp", "hsdp"):
        reader.add("--data-parallel-sharding-strategy", "optim_grads_params")
        text = "--data-parallel-sharding-strategy optim_grads_params"
        reader.note("train_module.dp_config.name", "renamed", text)
    tokenizer = reader.take("dataset.tokenizer.identifier")
    reader.add("--tokenizer-type", "HuggingFaceTokenizer")
    reason = f"a folder with the tokenizer.json of {tokenizer}; a Hub name is not downloaded"
    reader.add_placeholder("--tokenizer-model", "TOKENIZER_FOLDER", reason)
    reader.take("dataset.paths")
    reason = "the prefix of a data set: create it from the run's .npy files with tools/merge_datasets.py --eod-id"
    reader.add_placeholder("--data-path", DATA_PREFIX, reason)
    ranks = variables.get("WORLD_SIZE", "")
    return reader.finish(int(ranks) if ranks.isdigit() and int(ranks) > 0 else None)


def _olmo_core_model(reader: SettingsReader) -> None:
    reader.add("--swiglu", "--position-embedding-type", "rope", "--disable-bias-linear")
    reader.add("--attention-dropout", 0.0, "--untie-embeddings-and-output-weights")
    if "model.block.dropout" not in reader.values:
        reader.add("--hidden-dropout", 0.0)
    name = reader.take("model.block.name", "default")
    if name == "reordered_norm":
        reader.add("--norm-placement", "post")
        reader.note(f"model.block.name = {name}", "renamed", "--norm-placement post; changes: nothing")
    elif name != "default":
        text = f"known blocks are default and reordered_norm: a {name} block may be a different model"
        reader.note(f"model.block.name = {name}", "no counterpart", text, needs_decision=True)
    if str(reader.take("model.block.layer_norm.name", "rms")).endswith("rms"):
        reader.add("--normalization", "RMSNorm")
    for attention in ("attention", "sequence_mixer"):
        prefix = f"model.block.{attention}."
        norms = [key for key in reader.values if key.startswith(f"{prefix}qk_norm")]
        present = [key for key in norms if reader.take(key) is not None]
        is_by_head = reader.take(f"{prefix}use_head_qk_norm", False)
        if present:
            reader.add("--qk-layernorm", *([] if is_by_head else ["--qk-layernorm-across-heads"]))
        if reader.take(f"{prefix}bias", False):
            reader.add("--add-qkv-bias")
            text = "--add-qkv-bias; changes: the output projection has no bias"
            reader.note(f"{prefix}bias", "renamed", text, needs_decision=True)


def _olmo_core_batch(reader: SettingsReader, length: int) -> int:
    """Translate the batch sizes, which OLMo-core gives in tokens; return the global batch size in sequences."""
    whole = reader.take_number("data_loader.global_batch_size", length) // length
    micro = reader.take_number("train_module.rank_microbatch_size", length) // length
    reader.add("--micro-batch-size", micro, "--global-batch-size", whole)
    text = f"--global-batch-size {whole}: sequences of {length} tokens; changes: nothing"
    reader.note("data_loader.global_batch_size", "renamed", text)
    return whole * length


def _olmo_core_duration(reader: SettingsReader, tokens_of_step: int) -> None:
    """Translate the length of the run and of its schedule."""
    value, unit = reader.take_number("trainer.max_duration.value", 0), reader.take("trainer.max_duration.unit", "")
    steps = value if unit == "steps" else value // tokens_of_step if unit == "tokens" else 0
    if steps:
        reader.add("--train-iters", steps, "--lr-decay-iters", steps)
        reader.note(f"trainer.max_duration = {value} {unit}", "renamed", f"--train-iters {steps}; changes: nothing")
    else:
        reader.add_placeholder("--train-iters", "TRAIN_ITERS", f"{value} {unit} as a number of iterations")
    kind = str(reader.take("train_module.scheduler._CLASS_", "")).rpartition(".")[2]
    warmup = reader.take_number("train_module.scheduler.warmup", 0)
    warmup = warmup or reader.take_number("train_module.scheduler.warmup_steps", 0)
    if str(reader.take("train_module.scheduler.units", "steps")).endswith("tokens"):
        warmup //= tokens_of_step
    least = reader.take("train_module.scheduler.alpha_f", 0.1 if kind != "ConstantWithWarmup" else 1.0)
    rate = float(reader.values.get("train_module.optim.lr", 0.0))
    if kind not in _OLMO_CORE_SCHEDULES:
        text = f"known schedules are {', '.join(_OLMO_CORE_SCHEDULES)}: set --lr-decay-style yourself"
        reader.note(f"train_module.scheduler = {kind or None}", "no counterpart", text, needs_decision=True)
        return
    reader.add(
        "--lr-decay-style",
        _OLMO_CORE_SCHEDULES[kind],
        "--lr-warmup-iters",
        warmup,
        "--min-lr",
        f"{rate * float(least):.10g}",
    )
    text = f"--lr-decay-style {_OLMO_CORE_SCHEDULES[kind]}; changes: nothing"
    reader.note(f"train_module.scheduler = {kind}", "renamed", text)


# Defaults of torchtitan that differ from this project's.
_TORCHTITAN_DEFAULTS: dict[str, Any] = {
    "optimizer.lr": 8e-4,
    "optimizer.beta1": 0.9,
    "optimizer.beta2": 0.95,
    "optimizer.eps": 1e-8,
    "optimizer.weight_decay": 0.1,
    "lr_scheduler.warmup_steps": 200,
    "training.seq_len": 2048,
    "training.max_norm": 1.0,
    "training.steps": 10000,
    "metrics.log_freq": 10,
}
# Layers, hidden size, attention heads, query groups, FFN hidden size.
_TORCHTITAN_LLAMA3 = {
    "8B": (32, 4096, 32, 8, 14336),
    "70B": (80, 8192, 64, 8, 28672),
    "405B": (126, 16384, 128, 8, 53248),
}
_TORCHTITAN_WSD_STYLES = {"linear": "linear", "cosine": "cosine", "sqrt": "minus_sqrt"}


def torchtitan_settings(settings: Mapping[str, Any], variables: Mapping[str, str]) -> AdoptedSettings:
    """Translate a file of torchtitan; the variable ``NGPU`` is the number of ranks."""
    reader = SettingsReader("torchtitan", settings, _TORCHTITAN_DEFAULTS)
    _torchtitan_model(reader)
    _torchtitan_tokenizer(reader)
    _torchtitan_schedule(reader)
    _torchtitan_folders(reader)
    _torchtitan_recompute(reader)
    ranks = _torchtitan_parallelism(reader, variables)
    if reader.take("training.mixed_precision_param", "bfloat16") == "bfloat16":
        reader.add("--bf16")
    data = reader.take("training.dataset", "c4_test")
    reason = (
        f"the prefix of tokenized data: {data} is streamed by torchtitan and tokenized here by tools/preprocess_data.py"
    )
    reader.add_placeholder("--data-path", DATA_PREFIX, reason)
    return reader.finish(ranks)


def _torchtitan_model(reader: SettingsReader) -> None:
    name, flavor = reader.take("model.name", "llama3"), reader.take("model.flavor", "debugmodel")
    typed = f"model.name = {name}, model.flavor = {flavor}"
    if name != "llama3" or flavor not in _TORCHTITAN_LLAMA3:
        known = ", ".join(_TORCHTITAN_LLAMA3)
        text = (
            f"known flavors of llama3 are {known}: set --num-layers, --hidden-size and --num-attention-heads yourself"
        )
        reader.note(typed, "no counterpart", text, needs_decision=True)
    else:
        layers, width, heads, groups, feed_forward = _TORCHTITAN_LLAMA3[flavor]
        reader.add("--num-layers", layers, "--hidden-size", width, "--num-attention-heads", heads)
        reader.add("--group-query-attention", "--num-query-groups", groups, "--ffn-hidden-size", feed_forward)
        text = (
            "the model size as flags; changes: all layers use the same initialization std (torchtitan's decreases "
            "with the layer number)"
        )
        reader.note(typed, "renamed", text)
    reader.add("--swiglu", "--normalization", "RMSNorm", "--norm-epsilon", "1e-05", "--disable-bias-linear")
    reader.add("--position-embedding-type", "rope", "--rotary-base", 500000, "--untie-embeddings-and-output-weights")
    reader.add("--attention-dropout", 0.0, "--hidden-dropout", 0.0)


def _torchtitan_tokenizer(reader: SettingsReader) -> None:
    path = reader.take("model.hf_assets_path") or reader.take("model.tokenizer_path")
    reader.add("--tokenizer-type", "HuggingFaceTokenizer")
    if path is None or str(path).endswith(".model"):
        reason = "a folder with the model's tokenizer.json: torchtitan's tokenizer.model has a different format"
        reader.add_placeholder("--tokenizer-model", "TOKENIZER_FOLDER", reason)
    else:
        reader.add("--tokenizer-model", path)
        reader.note(f"tokenizer in {path}", "renamed", f"--tokenizer-model {path}; changes: nothing")


def _torchtitan_schedule(reader: SettingsReader) -> None:
    steps = reader.values["training.steps"]
    ratio, style = reader.take("lr_scheduler.decay_ratio"), reader.take("lr_scheduler.decay_type", "linear")
    least = reader.take("lr_scheduler.min_lr_factor") or reader.take("lr_scheduler.lr_min", 0.0)
    reader.add("--lr-decay-iters", steps, "--min-lr", f"{float(reader.values['optimizer.lr']) * float(least):.10g}")
    if ratio is not None:
        decay = round(float(steps) * float(ratio))
        reader.add("--lr-decay-style", "WSD", "--lr-wsd-decay-iters", decay)
        reader.add("--lr-wsd-decay-style", _TORCHTITAN_WSD_STYLES.get(style, style))
        text = f"WSD, with a decay over the last {decay} iterations; changes: nothing"
        reader.note(f"lr_scheduler.decay_ratio = {ratio}", "renamed", text)
    elif style == "sqrt":
        reader.note(
            "lr_scheduler.decay_type = sqrt",
            ("no counterpart"),
            "only supported with decay_ratio (WSD); linear is used",
            True,
        )
        reader.add("--lr-decay-style", "linear")
    else:
        reader.add("--lr-decay-style", style)


def _torchtitan_folders(reader: SettingsReader) -> None:
    root = reader.take("job.dump_folder", "./outputs")
    if reader.take("checkpoint.enable_checkpoint", False) or reader.take("checkpoint.enable", False):
        folder = f"{root}/{reader.take('checkpoint.folder', 'checkpoint')}"
        reader.add("--save", folder, "--load", folder)
    else:
        for key in [key for key in reader.values if key.startswith("checkpoint.")]:
            reader.take(key)
        reader.note(
            "checkpoint.enable", "no effect", "no checkpoints are written, as in the file; add --save to write them"
        )
    if reader.take("metrics.enable_tensorboard", False):
        reader.add("--tensorboard-dir", f"{root}/{reader.take('metrics.save_tb_folder', 'tb')}")
    if reader.take("checkpoint.async_mode", "disabled") != "disabled":
        reader.add("--async-save")


def _torchtitan_recompute(reader: SettingsReader) -> None:
    mode = reader.take("activation_checkpoint.mode", "selective")
    if mode == "full":
        reader.add("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", 1)
    elif mode == "selective":
        reader.add("--recompute-granularity", "selective")


def _torchtitan_parallelism(reader: SettingsReader, variables: Mapping[str, str]) -> int | None:
    """Translate the parallel layout and the batch size; return the number of ranks, or None if it is unknown."""
    tp = reader.take_number("parallelism.tensor_parallel_degree", 1)
    pp = int(reader.values.get("parallelism.pipeline_parallel_degree", 1))
    cp = int(reader.values.get("parallelism.context_parallel_degree", 1))
    copies = reader.take_number("parallelism.data_parallel_replicate_degree", 1)
    shards = reader.take_number("parallelism.data_parallel_shard_degree", -1)
    ranks: int | None = copies * shards * tp * pp * cp if shards > 0 else None
    if ranks is None and variables.get("NGPU", "").isdigit():
        ranks = int(variables["NGPU"])
    reader.add("--tensor-model-parallel-size", tp, *(["--sequence-parallel"] if tp > 1 else []))
    if shards != 1:
        reader.add("--data-parallel-sharding-strategy", "optim_grads_params")
        text = "--data-parallel-sharding-strategy optim_grads_params"
        reader.note(f"parallelism.data_parallel_shard_degree = {shards}", "renamed", text)
        if copies > 1:
            reader.add("--num-distributed-optimizer-instances", copies)
    schedule = reader.take("parallelism.pipeline_parallel_schedule", "1F1B")
    if pp > 1 and schedule != "1F1B":
        is_zero = "ZeroBubble" in schedule or "ZB" in schedule
        reader.add(
            *(["--pipeline-schedule", "zero-bubble"] if is_zero else ["--num-virtual-stages-per-pipeline-rank", 2])
        )
        text = "the most similar schedule is used; results are the same"
        reader.note(f"parallelism.pipeline_parallel_schedule = {schedule}", "renamed", text)
    local = reader.take_number("training.local_batch_size", 0) or reader.take_number("training.batch_size", 8)
    whole = reader.take_number("training.global_batch_size", -1)
    micro = reader.take_number("parallelism.pipeline_parallel_microbatch_size", 1)
    reader.add("--micro-batch-size", micro if pp > 1 else local)
    if whole > 0:
        reader.add("--global-batch-size", whole)
    elif ranks is not None:
        reader.add("--global-batch-size", local * max(ranks // (tp * pp * cp), 1))
    else:
        reason = f"{local} times the number of data-parallel ranks; pass --set NGPU=N, the number of ranks"
        reader.add_placeholder("--global-batch-size", "GLOBAL_BATCH_SIZE", reason)
    return ranks


@dataclasses.dataclass(frozen=True)
class _Trainer:
    name: str
    sections: frozenset[str]
    variable: str | None
    adopt: Callable[[Mapping[str, Any], Mapping[str, str]], AdoptedSettings]


_TRAINERS = {
    ".toml": _Trainer("torchtitan", frozenset(("model", "training")), "NGPU", torchtitan_settings),
    ".yaml": _Trainer("nanotron", frozenset(("model", "parallelism", "tokens")), None, nanotron_settings),
    ".yml": _Trainer("nanotron", frozenset(("model", "parallelism", "tokens")), None, nanotron_settings),
    ".json": _Trainer("OLMo-core", frozenset(("model", "train_module", "trainer")), "WORLD_SIZE", olmo_core_settings),
}
_DEEPSPEED_KEYS = frozenset(
    ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "zero_optimization")
)
"""Keys of DeepSpeed's configuration that OLMo-core's does not have."""


def read_settings(path: Path, text: str, variables: Mapping[str, str]) -> AdoptedSettings:
    """Read a configuration file; its suffix determines the trainer.

    Raises:
        ConfigurationError: the file cannot be parsed, a section that the trainer requires is missing, or a variable
            does not belong to the trainer.
    """
    trainer = _TRAINERS[path.suffix]
    unused = [f"{name}={value}" for name, value in variables.items() if name != trainer.variable]
    if unused:
        known = f"only {trainer.variable} can be set" if trainer.variable else "nothing can be set"
        raise ConfigurationError(
            f"--set {unused[0]} has no effect: {known} for a settings file of {trainer.name}; omit it"
        )
    try:
        settings = _parse(path, text)
    except ValueError as error:
        raise ConfigurationError(f"{path} cannot be parsed: {' '.join(str(error).split())}") from None
    if path.suffix == ".json" and isinstance(settings, dict) and _DEEPSPEED_KEYS & settings.keys():
        raise ConfigurationError(
            f"{path} is a configuration of DeepSpeed, which is not read; pass the launch script, whose flags are "
            "translated"
        )
    missing = sorted(trainer.sections - set(settings)) if isinstance(settings, dict) else sorted(trainer.sections)
    if missing:
        raise ConfigurationError(
            f"{path} is not a settings file of {trainer.name}: it has no section {' and no '.join(missing)}"
        )
    try:
        return trainer.adopt(settings, variables)
    except (TypeError, ValueError, LookupError, ArithmeticError) as error:
        raise ConfigurationError(f"{path} contains a value that is not valid for {trainer.name}: {error}") from None


def _parse(path: Path, text: str) -> Any:
    if path.suffix == ".json":
        return json.loads(text)
    if path.suffix == ".toml":
        return _parse_toml(text)
    return _parse_yaml(text)


def _parse_toml(text: str) -> Any:
    try:
        if sys.version_info >= (3, 11):
            import tomllib
        else:
            import tomli as tomllib
    except ImportError:
        raise ConfigurationError("reading TOML with Python 3.10 needs tomli: pip install tomli") from None
    return tomllib.loads(text)


def _parse_yaml(text: str) -> Any:
    try:
        import yaml
    except ImportError:
        raise ConfigurationError("reading YAML needs PyYAML: pip install pyyaml") from None
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None
