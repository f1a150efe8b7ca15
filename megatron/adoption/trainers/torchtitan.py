"""A TOML file of torchtitan: releases 0.1 and 0.2, whose ``[training]`` has ``local_batch_size`` or ``batch_size``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.adoption.trainers.settings import DATA_PREFIX, AdoptedSettings, SettingsReader

# What torchtitan does where the file says nothing; this project's own defaults differ.
_DEFAULTS: dict[str, Any] = {
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
# Layers, width, heads, query groups, feed-forward width.
_LLAMA3 = {
    "8B": (32, 4096, 32, 8, 14336),
    "70B": (80, 8192, 64, 8, 28672),
    "405B": (126, 16384, 128, 8, 53248),
}
_WSD_STYLES = {"linear": "linear", "cosine": "cosine", "sqrt": "minus_sqrt"}


def torchtitan_settings(settings: Mapping[str, Any], variables: Mapping[str, str]) -> AdoptedSettings:
    """Adopt a file of torchtitan; ``NGPU`` among the variables is the number of ranks."""
    reader = SettingsReader("torchtitan", settings, _DEFAULTS)
    _model(reader)
    _tokenizer(reader)
    _schedule(reader)
    _folders(reader)
    _recompute(reader)
    ranks = _parallelism(reader, variables)
    if reader.take("training.mixed_precision_param", "bfloat16") == "bfloat16":
        reader.add("--bf16")
    data = reader.take("training.dataset", "c4_test")
    reason = (
        f"the prefix of tokenized data: {data} is streamed by torchtitan and tokenized here by tools/preprocess_data.py"
    )
    reader.add_placeholder("--data-path", DATA_PREFIX, reason)
    return reader.finish(ranks)


def _model(reader: SettingsReader) -> None:
    name, flavor = reader.take("model.name", "llama3"), reader.take("model.flavor", "debugmodel")
    typed = f"model.name = {name}, model.flavor = {flavor}"
    if name != "llama3" or flavor not in _LLAMA3:
        known = ", ".join(_LLAMA3)
        text = f"known are llama3's {known}: give --num-layers, --hidden-size and --num-attention-heads by hand"
        reader.note(typed, "no counterpart", text, needs_decision=True)
    else:
        layers, width, heads, groups, feed_forward = _LLAMA3[flavor]
        reader.add("--num-layers", layers, "--hidden-size", width, "--num-attention-heads", heads)
        reader.add("--group-query-attention", "--num-query-groups", groups, "--ffn-hidden-size", feed_forward)
        text = "the shape as flags; changes: initial weights have one std, torchtitan's shrinks with the layer's number"
        reader.note(typed, "renamed", text)
    reader.add("--swiglu", "--normalization", "RMSNorm", "--norm-epsilon", "1e-05", "--disable-bias-linear")
    reader.add("--position-embedding-type", "rope", "--rotary-base", 500000, "--untie-embeddings-and-output-weights")
    reader.add("--attention-dropout", 0.0, "--hidden-dropout", 0.0)


def _tokenizer(reader: SettingsReader) -> None:
    path = reader.take("model.hf_assets_path") or reader.take("model.tokenizer_path")
    reader.add("--tokenizer-type", "HuggingFaceTokenizer")
    if path is None or str(path).endswith(".model"):
        reason = "a folder with the model's tokenizer.json: torchtitan's tokenizer.model is another format"
        reader.add_placeholder("--tokenizer-model", "TOKENIZER_FOLDER", reason)
    else:
        reader.add("--tokenizer-model", path)
        reader.note(f"tokenizer in {path}", "renamed", f"--tokenizer-model {path}; changes: nothing")


def _schedule(reader: SettingsReader) -> None:
    steps = reader.values["training.steps"]
    ratio, style = reader.take("lr_scheduler.decay_ratio"), reader.take("lr_scheduler.decay_type", "linear")
    least = reader.take("lr_scheduler.min_lr_factor") or reader.take("lr_scheduler.lr_min", 0.0)
    reader.add("--lr-decay-iters", steps, "--min-lr", f"{float(reader.values['optimizer.lr']) * float(least):.10g}")
    if ratio is not None:
        decay = round(float(steps) * float(ratio))
        reader.add("--lr-decay-style", "WSD", "--lr-wsd-decay-iters", decay)
        reader.add("--lr-wsd-decay-style", _WSD_STYLES.get(style, style))
        text = f"WSD, the last {decay} iterations fall; changes: nothing"
        reader.note(f"lr_scheduler.decay_ratio = {ratio}", "renamed", text)
    elif style == "sqrt":
        reader.note(
            "lr_scheduler.decay_type = sqrt", "no counterpart", "only with decay_ratio (WSD); linear is taken", True
        )
        reader.add("--lr-decay-style", "linear")
    else:
        reader.add("--lr-decay-style", style)


def _folders(reader: SettingsReader) -> None:
    root = reader.take("job.dump_folder", "./outputs")
    if reader.take("checkpoint.enable_checkpoint", False) or reader.take("checkpoint.enable", False):
        folder = f"{root}/{reader.take('checkpoint.folder', 'checkpoint')}"
        reader.add("--save", folder, "--load", folder)
    else:
        for key in [key for key in reader.values if key.startswith("checkpoint.")]:
            reader.take(key)
        reader.note("checkpoint.enable", "no effect", "no checkpoints are written, as in the file: --save writes them")
    if reader.take("metrics.enable_tensorboard", False):
        reader.add("--tensorboard-dir", f"{root}/{reader.take('metrics.save_tb_folder', 'tb')}")
    if reader.take("checkpoint.async_mode", "disabled") != "disabled":
        reader.add("--async-save")


def _recompute(reader: SettingsReader) -> None:
    mode = reader.take("activation_checkpoint.mode", "selective")
    if mode == "full":
        reader.add("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", 1)
    elif mode == "selective":
        reader.add("--recompute-granularity", "selective")


def _parallelism(reader: SettingsReader, variables: Mapping[str, str]) -> int | None:
    """Add the layout and the batch; return the number of ranks, or None where nothing says it."""
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
        text = "the nearest schedule here is taken; the numbers are the same"
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
        reason = f"{local} times the number of model copies; give --set NGPU=N, the number of ranks"
        reader.add_placeholder("--global-batch-size", "GLOBAL_BATCH_SIZE", reason)
    return ranks
