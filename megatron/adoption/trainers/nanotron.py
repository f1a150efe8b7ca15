"""A YAML file of nanotron: the form of 0.4 (2024 and 2025), with ``data_stages`` and ``tokens``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.adoption.trainers.settings import DATA_PREFIX, AdoptedSettings, SettingsReader

_SCHEDULE = "optimizer.learning_rate_scheduler."
_GATED = {"silu": "--swiglu", "gelu_pytorch_tanh": "--geglu"}
_WSD_STYLES = {"linear": "linear", "cosine": "cosine", "1-sqrt": "minus_sqrt"}


def nanotron_settings(settings: Mapping[str, Any], variables: Mapping[str, str]) -> AdoptedSettings:
    """Adopt a file of nanotron; its layout says the number of ranks."""
    reader = SettingsReader("nanotron", settings, {})
    reader.add("--position-embedding-type", "rope", "--disable-bias-linear")
    reader.add("--attention-dropout", 0.0, "--hidden-dropout", 0.0)
    if not reader.take("model.model_config.tie_word_embeddings", False):
        reader.add("--untie-embeddings-and-output-weights")
    activation = reader.take("model.model_config.hidden_act", "silu")
    reader.add(_GATED.get(activation, "--swiglu"))
    if activation not in _GATED:
        text = f"gated activations are {' and '.join(_GATED)} here: the model differs"
        reader.note(f"model.model_config.hidden_act = {activation}", "no counterpart", text, needs_decision=True)
    _precision(reader)
    _schedule(reader)
    ranks = _layout(reader)
    size = reader.take("model.model_config.vocab_size")
    text = "it follows from the tokenizer and --make-vocab-size-divisible-by"
    reader.note(f"model.model_config.vocab_size = {size}", "no effect", text)
    stage = "data_stages.0.data.dataset."
    source = reader.take(f"{stage}hf_dataset_or_datasets") or reader.take(f"{stage}dataset_folder")
    reason = f"the prefix of tokenized data: make it from the text of {source} with tools/preprocess_data.py"
    reader.add_placeholder("--data-path", DATA_PREFIX, reason)
    return reader.finish(ranks)


def _precision(reader: SettingsReader) -> None:
    dtype = reader.take("model.dtype", "bfloat16")
    flags = {"bfloat16": "--bf16", "float16": "--fp16"}
    if dtype in flags:
        reader.add(flags[dtype])
    reader.note(f"model.dtype = {dtype}", "renamed", f"{flags.get(dtype, 'no flag')}; changes: nothing")


def _schedule(reader: SettingsReader) -> None:
    steps = int(reader.values.get("tokens.train_steps", 0))
    warmup = int(reader.values.get(f"{_SCHEDULE}lr_warmup_steps", 0))
    start = reader.take_number(f"{_SCHEDULE}lr_decay_starting_step", warmup)
    decay = reader.take_number(f"{_SCHEDULE}lr_decay_steps", steps - start)
    style = reader.take(f"{_SCHEDULE}lr_decay_style", "linear")
    reader.add("--lr-decay-iters", start + decay)
    if start > warmup or style == "1-sqrt":
        reader.add("--lr-decay-style", "WSD", "--lr-wsd-decay-iters", decay)
        reader.add("--lr-wsd-decay-style", _WSD_STYLES.get(style, style))
    else:
        reader.add("--lr-decay-style", style)
    text = f"--lr-decay-iters {start + decay}, counted from the start of the run; changes: nothing"
    reader.note(f"{_SCHEDULE}lr_decay_steps = {decay}", "renamed", text)


def _layout(reader: SettingsReader) -> int:
    """Add what several keys of the layout say together; return the number of ranks."""
    dp = reader.take_number("parallelism.dp", 1)
    sizes = [int(reader.values.get(f"parallelism.{axis}", 1)) for axis in ("tp", "pp", "context_parallel_size")]
    if reader.take("parallelism.tp_mode", "ALL_REDUCE") == "REDUCE_SCATTER" and sizes[0] > 1:
        reader.add("--sequence-parallel")
    micro = int(reader.values.get("tokens.micro_batch_size", 1))
    accumulation = reader.take_number("tokens.batch_accumulation_per_replica", 1)
    reader.add("--global-batch-size", micro * accumulation * dp)
    text = f"--global-batch-size {micro * accumulation * dp}, of all {dp} copies of the model; changes: nothing"
    reader.note(f"tokens.batch_accumulation_per_replica = {accumulation}", "renamed", text)
    if reader.take_number("optimizer.zero_stage", 0) > 0:
        reader.add("--use-distributed-optimizer")
        reader.note("optimizer.zero_stage", "renamed", "--use-distributed-optimizer; changes: nothing")
    return dp * sizes[0] * sizes[1] * sizes[2]
