"""A config.json that OLMo-core saves with a run: the form of versions 2.0 to 2.4."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.adoption.trainers.settings import DATA_PREFIX, AdoptedSettings, SettingsReader

_SCHEDULES = {"CosWithWarmup": "cosine", "LinearWithWarmup": "linear", "ConstantWithWarmup": "constant"}


def olmo_core_settings(settings: Mapping[str, Any], variables: Mapping[str, str]) -> AdoptedSettings:
    """Adopt a file of OLMo-core; ``WORLD_SIZE`` among the variables is the number of ranks."""
    reader = SettingsReader("OLMo-core", settings, {})
    for key in [key for key in reader.values if key.endswith("_CLASS_") and "scheduler" not in key]:
        reader.take(key)
    _model(reader)
    length = int(
        reader.values.get("dataset.sequence_length") or reader.take("train_module.max_sequence_length", 0) or 1
    )
    if "dataset.sequence_length" not in reader.values:
        reader.add("--seq-length", length, "--max-position-embeddings", length)
    reader.take("train_module.max_sequence_length")
    batch = _batch(reader, length)
    _duration(reader, batch)
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
    reason = f"a folder with the tokenizer.json of {tokenizer}; a name on a hub is not downloaded"
    reader.add_placeholder("--tokenizer-model", "TOKENIZER_FOLDER", reason)
    reader.take("dataset.paths")
    reason = "the prefix of a data set: make it of the run's .npy files with tools/merge_datasets.py --eod-id"
    reader.add_placeholder("--data-path", DATA_PREFIX, reason)
    ranks = variables.get("WORLD_SIZE", "")
    return reader.finish(int(ranks) if ranks.isdigit() and int(ranks) > 0 else None)


def _model(reader: SettingsReader) -> None:
    reader.add("--swiglu", "--position-embedding-type", "rope", "--disable-bias-linear")
    reader.add("--attention-dropout", 0.0, "--untie-embeddings-and-output-weights")
    if "model.block.dropout" not in reader.values:
        reader.add("--hidden-dropout", 0.0)
    name = reader.take("model.block.name", "default")
    if name == "reordered_norm":
        reader.add("--norm-placement", "after")
        reader.note(f"model.block.name = {name}", "renamed", "--norm-placement after; changes: nothing")
    elif name != "default":
        text = f"known are default and reordered_norm: a {name} block may be another model"
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


def _batch(reader: SettingsReader, length: int) -> int:
    """Add the batch sizes, which OLMo-core counts in tokens; return the global one in sequences."""
    whole = reader.take_number("data_loader.global_batch_size", length) // length
    micro = reader.take_number("train_module.rank_microbatch_size", length) // length
    reader.add("--micro-batch-size", micro, "--global-batch-size", whole)
    text = f"--global-batch-size {whole}: sequences of {length} tokens; changes: nothing"
    reader.note("data_loader.global_batch_size", "renamed", text)
    return whole * length


def _duration(reader: SettingsReader, tokens_of_step: int) -> None:
    """Add the length of the run and of its schedule."""
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
    if kind not in _SCHEDULES:
        text = f"known are {', '.join(_SCHEDULES)}: give --lr-decay-style by hand"
        reader.note(f"train_module.scheduler = {kind or None}", "no counterpart", text, needs_decision=True)
        return
    reader.add(
        "--lr-decay-style", _SCHEDULES[kind], "--lr-warmup-iters", warmup, "--min-lr", f"{rate * float(least):.10g}"
    )
    text = f"--lr-decay-style {_SCHEDULES[kind]}; changes: nothing"
    reader.note(f"train_module.scheduler = {kind}", "renamed", text)
