"""Checks of a run (batches, optimizer, data, files, faults), and all checks of a configuration together."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from megatron.config import (
    DEFAULT_SPLIT,
    INDEXED_DATASETS,
    NATIVE_FORMAT,
    RAW_DATASETS,
    RunConfig,
    extra_validation_sets,
)
from megatron.config.checks import hybrid, model, parallelism
from megatron.config.checks.parallelism import Check, has_whole_copies
from megatron.core.config_base import BELOW_ONE
from megatron.core.datasets import (
    ConversationFile,
    IndexedDataset,
    is_raw,
    parse_blend,
    parse_split,
    split_boundaries,
    suggest_split,
)
from megatron.core.errors import ConfigurationError, DataError, StorageError, choices, divisors_of
from megatron.core.object_store import PACKAGES, is_url, url_problem
from megatron.core.optimizer import parse_optimizer_args, parse_override, styles_unknown_to_megatron
from megatron.core.parallel_config import MODEL_SIZE_NAMES
from megatron.core.registry import is_registered

_LENGTHS = (
    "train_iters",
    "train_samples",
    "lr_decay_iters",
    "lr_decay_samples",
    "lr_warmup_iters",
    "lr_warmup_samples",
    "lr_warmup_fraction",
    "lr_wsd_decay_iters",
    "lr_wsd_decay_samples",
)


def _check_learning_rate(config: RunConfig) -> Iterator[str]:
    optimizer = config.optimizer
    if optimizer.lr == 0 and not config.training.skip_train:
        yield "--lr is missing; set the maximum learning rate"
    elif optimizer.min_lr > optimizer.lr and optimizer.lr > 0:
        yield f"--min-lr {optimizer.min_lr} is greater than --lr {optimizer.lr}; use {optimizer.lr} or less"


def _check_decoupled(config: RunConfig) -> Iterator[str]:
    highest, lowest = config.optimizer.decoupled_lr, config.optimizer.decoupled_min_lr
    lowest, name = (config.optimizer.min_lr, "min-lr") if lowest is None else (lowest, "decoupled-min-lr")
    if highest is not None and lowest > highest:
        yield (
            f"--{name} {lowest} is greater than --decoupled-lr {highest}; set --decoupled-min-lr to {highest} or less"
        )


def _check_step_results(config: RunConfig) -> Iterator[str]:
    """Reject what needs the results of an iteration before the next one is launched."""
    if not config.training.overlap_step_results:
        return
    if config.faults.rerun_mode != "disabled":
        yield (
            f"--overlap-step-results: --rerun-mode {config.faults.rerun_mode} checks each iteration before the next "
            "one; add --rerun-mode disabled"
        )
        return
    logging, faults, model = config.logging, config.faults, config.model
    if level := config.training.empty_unused_memory_level:
        yield (
            f"--overlap-step-results: --empty-unused-memory-level {level} waits for the device in each iteration; use "
            "--empty-unused-memory-level 0, or omit --overlap-step-results"
        )
    given = [
        flag
        for flag, is_given in (
            ("--fp16", model.fp16),
            ("--no-check-for-nan-in-loss-and-grad", not config.ddp.check_for_nan_in_loss_and_grad),
            ("--spike-policy", faults.spike_policy is not None),
            ("--check-for-spiky-loss", faults.check_for_spiky_loss),
            ("--check-for-large-grads", faults.check_for_large_grads),
            ("--error-injection-rate", faults.error_injection_rate > 0),
            ("--check-weight-hash-across-dp-replicas-interval", _has_weight_checks(config)),
            (
                "--check-gradient-hash-across-dp-replicas-interval",
                faults.check_gradient_hash_across_dp_replicas_interval is not None,
            ),
            ("--inprocess-restart", config.restart.inprocess_restart),
            ("--num-experts", model.moe.num_experts is not None),
            ("--qk-clip", model.qk_clip),
            ("--fp8-recipe delayed", model.fp8.fp8_format is not None and model.fp8.fp8_recipe == "delayed"),
            ("--optimizer-cpu-offload", config.optimizer.optimizer_cpu_offload),
            ("--log-params-norm", logging.log_params_norm),
            ("--log-layer-norms", logging.log_layer_norms is not None),
            ("--log-max-attention-logit", logging.log_max_attention_logit),
            ("--log-straggler", logging.log_straggler),
            ("--timing-log-level", logging.timing_log_level > 0),
            ("--profile", logging.profile),
            ("--record-schedule", logging.record_schedule is not None),
        )
        if is_given
    ]
    if given:
        yield (
            f"--overlap-step-results: {' and '.join(given)} must see the results of an iteration before the next "
            "one is launched; omit --overlap-step-results"
        )


def _has_weight_checks(config: RunConfig) -> bool:
    return config.training.check_weight_hash_across_dp_replicas_interval is not None


def _check_optimizer_graph(config: RunConfig) -> Iterator[str]:
    optimizer = config.optimizer
    if not optimizer.optimizer_cuda_graph:
        return
    if optimizer.optimizer != "adam":
        yield (
            f"--optimizer-cuda-graph supports --optimizer adam, not {optimizer.optimizer}; use --optimizer adam, or "
            "omit --optimizer-cuda-graph"
        )
    given = [
        flag
        for flag, is_given in (
            ("--optimizer-cpu-offload", optimizer.optimizer_cpu_offload),
            ("--use-precision-aware-optimizer", optimizer.use_precision_aware_optimizer),
            ("--decoupled-lr", optimizer.decoupled_lr is not None),
            ("--clip-grad-matrices", optimizer.clip_grad_matrices > 0),
            ("--clip-grad-embeddings", optimizer.clip_grad_embeddings > 0),
            ("--clip-grad-vectors", optimizer.clip_grad_vectors > 0),
        )
        if is_given
    ]
    if given:
        yield (
            f"--optimizer-cuda-graph does not support {' and '.join(given)}: only Adam's fused kernel is captured, "
            "which updates float32 state on the device with one learning rate and one clipping factor; omit "
            "--optimizer-cuda-graph"
        )


def _check_overrides(config: RunConfig) -> Iterator[str]:
    for text in config.optimizer.param_group_overrides:
        try:
            parse_override(text)
        except ValueError as error:
            yield (
                f"--param-group-overrides {text}: {error}; use PATTERN:lr_mult=X,wd_mult=Y with a pattern of parameter "
                "names, such as *.mlp.*:lr_mult=0.5"
            )


def _check_optimizer_args(config: RunConfig) -> Iterator[str]:
    optimizer = config.optimizer
    if optimizer.optimizer_args and not is_registered("optimizer", optimizer.optimizer):
        yield (
            f"--optimizer-args {' '.join(optimizer.optimizer_args)}: --optimizer {optimizer.optimizer} has flags of "
            "its own; only an optimizer that a script registers takes --optimizer-args"
        )
    try:
        parse_optimizer_args(optimizer.optimizer_args)
    except ValueError as error:
        yield f"--optimizer-args: {error}; use NAME=VALUE, such as eps=1e-6"


def _check_mup(config: RunConfig) -> Iterator[str]:
    model = config.model
    if not model.mup.use_mup:
        return
    if model.mup.mup_base_hidden_size is None and model.mup.mup_width_mult is None:
        yield "--use-mup needs the width of the base model; add --mup-base-hidden-size (or --mup-width-mult)"
    if config.optimizer.elementwise == "sgd":
        yield "--use-mup does not support --optimizer sgd; use --optimizer adam, lion or muon"
    if model.mla.multi_latent_attention and model.mup.mup_base_head_dim is not None:
        yield (
            "--mup-base-head-dim is not supported with --multi-latent-attention; omit it: attention scores are then "
            "divided by the square root of the head size"
        )


def _check_clipping(config: RunConfig) -> Iterator[str]:
    optimizer = config.optimizer
    for name in ("clip_grad_matrices", "clip_grad_embeddings", "clip_grad_vectors"):
        value = getattr(optimizer, name)
        if value and optimizer.offload_fraction:
            yield (
                f"--{name.replace('_', '-')} {value} is not supported with optimizer offload; omit it or "
                "--optimizer-cpu-offload"
            )


def _check_average(config: RunConfig) -> Iterator[str]:
    decay, form = config.optimizer.ema_decay, config.checkpoint.ckpt_format
    if decay is None:
        return
    if form in ("torch", "torch_dist") and config.checkpoint.save:
        yield (
            f"--ckpt-format {form} cannot store the averaged weights of --ema-decay {decay}; omit --ckpt-format for "
            "the native format, and convert later"
        )
    if config.checkpoint.save and config.checkpoint.no_save_optim:
        yield f"--no-save-optim also omits the averaged weights of --ema-decay {decay}; omit one of them"
    if config.model.fp8.fp8_param_gather:
        yield f"--ema-decay {decay} is not supported with --fp8-param-gather; omit one of them"
    if config.model.cpu_offloading_weights:
        yield f"--ema-decay {decay} is not supported with --cpu-offloading-weights; omit one of them"


def _check_units(config: RunConfig) -> Iterator[str]:
    """Require that the schedule is given in the unit of the run's length: iterations or samples."""
    schedule = config.scheduler
    by_samples = config.training.train_samples > 0
    wrong, right = ("iters", "samples") if by_samples else ("samples", "iters")
    for name, value in (
        ("lr-decay", schedule.lr_decay_iters if by_samples else schedule.lr_decay_samples),
        ("lr-warmup", schedule.lr_warmup_iters if by_samples else schedule.lr_warmup_samples),
        ("lr-wsd-decay", schedule.lr_wsd_decay_iters if by_samples else schedule.lr_wsd_decay_samples),
    ):
        if value:
            yield (
                f"--{name}-{wrong} {value} is not supported with --train-{right}, because the run is counted in "
                f"{right}; use --{name}-{right}"
            )


def _check_warmup(config: RunConfig) -> Iterator[str]:
    schedule = config.scheduler
    counted = schedule.lr_warmup_iters or schedule.lr_warmup_samples
    if schedule.lr_warmup_fraction is not None and counted:
        unit = "iters" if schedule.lr_warmup_iters else "samples"
        yield (
            f"--lr-warmup-fraction {schedule.lr_warmup_fraction} and --lr-warmup-{unit} {counted} exclude each other; "
            "omit one of them"
        )
        return
    if schedule.lr_warmup_fraction is not None and not BELOW_ONE.hold(schedule.lr_warmup_fraction):
        return  # the bounds are checked elsewhere
    lengths = config.schedule_lengths
    if lengths.lr_decay_steps and lengths.lr_warmup_steps >= lengths.lr_decay_steps:
        unit, size = ("samples", 1) if config.training.train_samples else ("iters", config.training.global_batch_size)
        yield (
            f"the warmup of {lengths.lr_warmup_steps:g} samples must be shorter than the decay of "
            f"{lengths.lr_decay_steps} samples; use --lr-warmup-{unit} below {lengths.lr_decay_steps // size}, or "
            f"raise --lr-decay-{unit}"
        )


def _check_wsd(config: RunConfig) -> Iterator[str]:
    schedule = config.scheduler
    given = schedule.lr_wsd_decay_iters or schedule.lr_wsd_decay_samples
    if schedule.lr_decay_style == "WSD" and not given:
        yield "--lr-decay-style WSD needs --lr-wsd-decay-iters (or --lr-wsd-decay-samples)"
        return
    lengths = config.schedule_lengths
    if lengths.wsd_decay_steps is not None and lengths.wsd_decay_steps > lengths.lr_decay_steps:
        yield (
            f"the WSD decay of {lengths.wsd_decay_steps} samples is longer than the whole schedule of "
            f"{lengths.lr_decay_steps}; lower --lr-wsd-decay-iters"
        )


def _check_decay_format(config: RunConfig) -> Iterator[str]:
    form, schedule = config.checkpoint.ckpt_format, config.scheduler
    styles = {"lr_decay_style": schedule.lr_decay_style}
    if schedule.lr_decay_style == "WSD":
        styles["lr_wsd_decay_style"] = schedule.lr_wsd_decay_style
    unknown = styles_unknown_to_megatron(styles)
    if form in ("torch", "torch_dist") and config.checkpoint.save and unknown:
        yield (
            f"--ckpt-format {form} cannot store {', '.join(unknown)}, which Megatron does not have; omit --ckpt-format "
            "for the native format, or use a value that Megatron has"
        )


def _check_weight_decay(config: RunConfig) -> Iterator[str]:
    schedule = config.scheduler
    start, end = schedule.start_weight_decay, schedule.end_weight_decay
    if schedule.weight_decay_incr_style == "constant":
        if start != end:
            yield (
                f"--start-weight-decay {start} and --end-weight-decay {end} differ, but --weight-decay-incr-style is "
                "constant; use linear or cosine"
            )
    elif start is None or end is None:
        yield (
            f"--weight-decay-incr-style {schedule.weight_decay_incr_style} needs --start-weight-decay and "
            "--end-weight-decay"
        )
    elif end < start:
        yield (
            f"--end-weight-decay {end} is smaller than --start-weight-decay {start}; weight decay can only increase; "
            "exchange the values"
        )


def _check_types(config: RunConfig) -> Iterator[str]:
    optimizer, dtype = config.optimizer, config.model.params_dtype
    if optimizer.main_grads_dtype == "bf16" and dtype != "bfloat16":
        yield (
            f"--main-grads-dtype bf16 requires a bfloat16 model, but the model is {dtype}; use --bf16 or "
            "--main-grads-dtype fp32"
        )
    if optimizer.main_params_dtype == "fp16":
        if dtype != "bfloat16":
            yield (
                f"--main-params-dtype fp16 requires a bfloat16 model, but the model is {dtype}; use --bf16 or "
                "--main-params-dtype fp32"
            )
        elif optimizer.offload_fraction:
            yield (
                "--main-params-dtype fp16 cannot be combined with optimizer offload (--optimizer-cpu-offload); use "
                "--main-params-dtype fp32, or omit the offload"
            )
    if optimizer.elementwise != "adam":
        for name in ("exp_avg", "exp_avg_sq"):
            value = getattr(optimizer, f"{name}_dtype")
            if value != "fp32":
                flag = f"--{name.replace('_', '-')}-dtype"
                yield f"{flag} {value} applies only to Adam's state; use --optimizer adam, or {flag} fp32"


def _check_float8_gather(config: RunConfig) -> Iterator[str]:
    if config.model.fp8.fp8_param_gather and config.optimizer.main_params_dtype == "fp16":
        yield (
            "--main-params-dtype fp16 cannot be combined with --fp8-param-gather, which rounds the weights; use "
            "--main-params-dtype fp32, or omit --fp8-param-gather"
        )


def _check_gather(config: RunConfig) -> Iterator[str]:
    if config.ddp.overlap_param_gather_with_optimizer_step and config.optimizer.optimizer_cpu_offload:
        yield (
            "--overlap-param-gather-with-optimizer-step updates parameters in the order of the forward pass, which "
            "optimizer offload does not support; omit one of them"
        )


def _check_rule(config: RunConfig) -> Iterator[str]:
    """Reject options that only AdamW and SGD support with another optimizer."""
    rule = config.optimizer.optimizer
    if rule in ("adam", "sgd"):
        return
    form = config.checkpoint.ckpt_format
    if form in ("torch", "torch_dist") and config.checkpoint.save and not config.checkpoint.no_save_optim:
        yield (
            f"--ckpt-format {form} cannot store the state of --optimizer {rule}; use the native format and convert "
            "later, or add --no-save-optim"
        )
    if rule == "muon":
        if config.optimizer.offload_fraction:
            yield (
                "--optimizer muon needs whole matrices on the device; omit the optimizer offload "
                "(--optimizer-cpu-offload), or use --optimizer adam"
            )
        if config.ddp.overlap_param_gather_with_optimizer_step:
            yield (
                "--overlap-param-gather-with-optimizer-step updates bucket by bucket, but --optimizer muon updates "
                "whole matrices; omit one of them (--overlap-param-gather is supported with muon)"
            )


OPTIMIZER_CHECKS = (
    Check(
        ("optimizer", "ckpt_format", "optimizer_cpu_offload", "overlap_param_gather_with_optimizer_step"), _check_rule
    ),
    Check(("lr", "min_lr"), _check_learning_rate),
    Check(("param_group_overrides",), _check_overrides),
    Check(("optimizer", "optimizer_args"), _check_optimizer_args),
    Check(
        ("ema_decay", "ckpt_format", "save", "no_save_optim", "fp8_param_gather", "cpu_offloading_weights"),
        _check_average,
    ),
    Check(
        ("clip_grad_matrices", "clip_grad_embeddings", "clip_grad_vectors", "optimizer_cpu_offload"), _check_clipping
    ),
    Check(
        (
            "use_mup",
            "mup_base_hidden_size",
            "mup_width_mult",
            "mup_base_head_dim",
            "multi_latent_attention",
            "optimizer",
        ),
        _check_mup,
    ),
    Check(("lr", "min_lr", "decoupled_lr", "decoupled_min_lr"), _check_decoupled),
    Check(
        (
            *("overlap_step_results", "rerun_mode", "fp16", "check_for_nan_in_loss_and_grad", "spike_policy"),
            *("check_for_spiky_loss", "check_for_large_grads", "error_injection_rate", "inprocess_restart"),
            "check_weight_hash_across_dp_replicas_interval",
            "check_gradient_hash_across_dp_replicas_interval",
            *("num_experts", "qk_clip", "fp8_format", "fp8_recipe", "optimizer_cpu_offload", "log_params_norm"),
            *("log_layer_norms", "log_max_attention_logit", "log_straggler", "timing_log_level", "profile"),
            *("record_schedule", "empty_unused_memory_level"),
        ),
        _check_step_results,
    ),
    Check(
        (
            *("optimizer_cuda_graph", "optimizer", "optimizer_cpu_offload", "use_precision_aware_optimizer"),
            *("decoupled_lr", "clip_grad_matrices", "clip_grad_embeddings", "clip_grad_vectors"),
        ),
        _check_optimizer_graph,
    ),
    Check(_LENGTHS, _check_units),
    Check((*_LENGTHS, "global_batch_size", "micro_batch_size"), _check_warmup),
    Check((*_LENGTHS, "lr_decay_style", "global_batch_size", "micro_batch_size"), _check_wsd),
    Check(("lr_decay_style", "lr_wsd_decay_style", "ckpt_format", "save"), _check_decay_format),
    Check(("start_weight_decay", "end_weight_decay", "weight_decay"), _check_weight_decay),
    Check(("overlap_param_gather_with_optimizer_step", "optimizer_cpu_offload"), _check_gather),
    Check(("fp8_param_gather", "main_params_dtype"), _check_float8_gather),
    Check(
        (
            *("optimizer", "params_dtype", "main_grads_dtype", "main_params_dtype", "exp_avg_dtype"),
            *("exp_avg_sq_dtype", "optimizer_cpu_offload", "optimizer_offload_fraction"),
        ),
        _check_types,
    ),
)


_MOST_SAMPLES = 2**63 - 1
_MOST_MICROBATCHES = 2**20
_MOST_BATCH_SIZES = 2**16
_BATCH = ("micro_batch_size", "global_batch_size", *MODEL_SIZE_NAMES)


def _slice(config: RunConfig) -> int:
    """Return the samples of one micro-batch over all data-parallel ranks, or 0 if the layout is invalid."""
    if not has_whole_copies(config):
        return 0
    return max(config.training.micro_batch_size, 0) * config.data_parallel_size


def _check_global_batch(config: RunConfig) -> Iterator[str]:
    batch, micro, one = config.training.global_batch_size, config.training.micro_batch_size, _slice(config)
    if one and batch > 0 and batch % one != 0 and config.training.step_batch_size_schedule is None:
        below, above = batch // one * one, -(-batch // one) * one
        nearest = f"{below} or {above}" if below else f"{above}"
        yield (
            f"--global-batch-size {batch} is not divisible by --micro-batch-size {micro} x "
            f"data-parallel size {config.data_parallel_size} = {one}; nearest sizes that work: {nearest}"
        )


def _check_rampup(config: RunConfig) -> Iterator[str]:
    given, batch, one = config.training.rampup_batch_size, config.training.global_batch_size, _slice(config)
    if not given:
        return
    typed = "--rampup-batch-size " + " ".join(str(number) for number in given)
    if len(given) != 3:
        yield f"{typed}: three numbers are expected: first size, increment, samples"
        return
    start, increment, _ = given
    if min(given) <= 0:
        yield f"{typed}: a first size, an increment and a number of samples above 0 are expected"
        return
    if start > batch:
        yield f"{typed}: the first size is greater than --global-batch-size {batch}"
    elif (batch - start) % increment != 0:
        yield (
            f"{typed}: the difference between {start} and --global-batch-size {batch} is {batch - start}, which is not "
            f"a multiple of the increment {increment}; increments that work: {_increments(batch - start, max(one, 1))}"
        )
    if one and (start % one != 0 or increment % one != 0):
        yield (
            f"{typed}: first size and increment must be multiples of --micro-batch-size "
            f"{config.training.micro_batch_size} x data-parallel size {config.data_parallel_size} = {one}"
        )


def _increments(way: int, one: int) -> str:
    """Format the valid increments from the initial to the full batch size."""
    return choices(size for size in divisors_of(way) if size % one == 0)


def _check_steps(config: RunConfig) -> Iterator[str]:
    text, one = config.training.step_batch_size_schedule, _slice(config)
    if text is None or not one:
        return
    sizes = (*config.training.batch_size_steps[::2], config.training.global_batch_size)
    for size in sizes:
        if size % one != 0:
            nearest = max(round(size / one), 1) * one
            yield (
                f"--step-batch-size-schedule {text!r}: {size} is not divisible by --micro-batch-size "
                f"{config.training.micro_batch_size} x data-parallel size {config.data_parallel_size} = {one}; "
                f"nearest size that works: {nearest}"
            )


def _check_end(config: RunConfig) -> Iterator[str]:
    training = config.training
    if not (training.train_iters or training.train_samples or training.skip_train):
        yield "--train-iters is missing or 0; pass --train-iters N, --train-samples N or --skip-train"


def _check_length(config: RunConfig) -> Iterator[str]:
    training = config.training
    if 0 < training.train_samples < training.global_batch_size:
        yield (
            f"--train-samples {training.train_samples} is less than --global-batch-size {training.global_batch_size}, "
            "so no iteration would be trained; raise it"
        )


def _check_run(config: RunConfig) -> Iterator[str]:
    training = config.training
    if training.train_iters * training.global_batch_size > _MOST_SAMPLES:
        yield (
            f"--train-iters {training.train_iters} x --global-batch-size {training.global_batch_size} are more samples "
            f"than {_MOST_SAMPLES}; lower one of them"
        )


def _check_microbatches(config: RunConfig) -> Iterator[str]:
    training = config.training
    if not has_whole_copies(config) or training.micro_batch_size < 1:
        return
    count = training.global_batch_size // (training.micro_batch_size * config.data_parallel_size)
    if count > _MOST_MICROBATCHES:
        yield (
            f"--global-batch-size {training.global_batch_size} makes {count} micro-batches of --micro-batch-size "
            f"{training.micro_batch_size} on each of {config.data_parallel_size} model copies; at most "
            f"{_MOST_MICROBATCHES} are supported; lower --global-batch-size or raise --micro-batch-size"
        )


def _check_batch_sizes(config: RunConfig) -> Iterator[str]:
    given, batch = config.training.rampup_batch_size, config.training.global_batch_size
    if len(given) != 3 or min(given) <= 0:
        return  # The check of the ramp-up reports it.
    count = (batch - given[0]) // given[1]
    if count > _MOST_BATCH_SIZES:
        yield (
            f"--rampup-batch-size {given[0]} {given[1]} {given[2]} has {count} sizes up to --global-batch-size "
            f"{batch}; at most {_MOST_BATCH_SIZES} are supported; raise the increment"
        )


BATCH_CHECKS = (
    Check(("train_iters", "global_batch_size"), _check_run),
    Check(("global_batch_size", "micro_batch_size", *MODEL_SIZE_NAMES), _check_microbatches),
    Check(("rampup_batch_size", "global_batch_size"), _check_batch_sizes),
    Check(_BATCH, _check_global_batch),
    Check((*_BATCH, "rampup_batch_size"), _check_rampup),
    Check((*_BATCH, "step_batch_size_schedule"), _check_steps),
    Check(("train_iters", "train_samples", "global_batch_size", "micro_batch_size"), _check_length),
)
LENGTH_CHECKS = (Check(("train_iters", "train_samples"), _check_end),)
"""Checks of a whole run, which a single step does not need."""


NO_PROFILE_FOLDER = (
    "--profile has no folder for the traces of torch's profiler; add --tensorboard-dir DIR or --save DIR"
)


def _check_profiled_steps(config: RunConfig) -> Iterator[str]:
    start, end = config.logging.profile_step_start, config.logging.profile_step_end
    if config.logging.profile and start >= end:
        yield (
            f"--profile-step-start {start} --profile-step-end {end}: the range of iterations {start + 1} to {end} is "
            "empty; use an end above the start"
        )


def _check_ranks(config: RunConfig) -> Iterator[str]:
    missing = [rank for rank in config.logging.profile_ranks if not 0 <= rank < config.world_size]
    if missing:
        yield (
            f"--profile-ranks {' '.join(map(str, missing))}: the run has ranks 0 to {config.world_size - 1}; omit the "
            "others"
        )


def _check_folder(config: RunConfig) -> Iterator[str]:
    if config.logging.profile and config.logging.use_pytorch_profiler and config.profile_folder is None:
        yield NO_PROFILE_FOLDER


def _check_looks(config: RunConfig) -> Iterator[str]:
    interval, tasks = config.logging.generate_interval, config.validation.eval_tasks
    if interval is not None and not config.logging.generate_prompts:
        yield f"--generate-interval {interval} has no prompts; add --generate-prompts TEXT"
    if tasks and not config.validation.eval_interval and config.validation.eval_tasks_interval is None:
        yield "--eval-tasks with --eval-interval 0 would never run; add --eval-tasks-interval N"


PROFILING_CHECKS = (
    Check(("profile_step_start", "profile_step_end"), _check_profiled_steps),
    Check(("profile_ranks",), _check_ranks),
    Check(("tensorboard_dir", "save"), _check_folder),
    Check(("generate_interval", "eval_tasks"), _check_looks),
)


_LEAST_WINDOW = 8


def _check_policy(config: RunConfig) -> Iterator[str]:
    policy, checkpoint = config.faults.spike_policy, config.checkpoint
    if policy is None:
        return
    if not config.ddp.check_for_nan_in_loss_and_grad:
        yield (
            f"--spike-policy {policy} acts on a gradient that is not finite, but --no-check-for-nan-in-loss-and-grad "
            "turns this check off; omit one of them"
        )
    if policy == "rewind" and (checkpoint.save is None or checkpoint.save_interval is None):
        yield "--spike-policy rewind rolls back to checkpoints of the run; add --save DIR and --save-interval N"
    if policy == "rewind" and (checkpoint.no_save_optim or checkpoint.no_save_rng):
        flag = "--no-save-optim" if checkpoint.no_save_optim else "--no-save-rng"
        yield f"--spike-policy rewind resumes the optimizer and the RNG state from a checkpoint; omit {flag}"
    if 0 < config.faults.spike_window < _LEAST_WINDOW:
        yield f"--spike-window {config.faults.spike_window} is too short to detect spikes; use {_LEAST_WINDOW} or more"


def _check_skipped(config: RunConfig) -> Iterator[str]:
    wrong = [number for number in config.faults.iterations_to_skip if number < 0]
    if wrong:
        yield f"--iterations-to-skip {' '.join(map(str, wrong))}: iteration numbers must be 0 or more"


def _check_injection(config: RunConfig) -> Iterator[str]:
    rate, mode = config.faults.error_injection_rate, config.faults.rerun_mode
    if rate and mode != "validate_results":
        yield (
            f"--error-injection-rate {rate} tests the validation of results, but --rerun-mode {mode} validates none; "
            "use --rerun-mode validate_results"
        )


def _check_gradient_hash(config: RunConfig) -> Iterator[str]:
    interval = config.faults.check_gradient_hash_across_dp_replicas_interval
    if interval and config.ddp.shards_optimizer:
        yield (
            f"--check-gradient-hash-across-dp-replicas-interval {interval} compares copies of the reduced gradients, "
            "but with --use-distributed-optimizer each rank has a different shard; omit one of them, or use "
            "--check-weight-hash-across-dp-replicas-interval"
        )


FAULT_CHECKS = (
    Check(
        (
            *("spike_policy", "spike_window", "check_for_nan_in_loss_and_grad", "save", "save_interval"),
            *("no_save_optim", "no_save_rng"),
        ),
        _check_policy,
    ),
    Check(("iterations_to_skip",), _check_skipped),
    Check(("error_injection_rate", "rerun_mode"), _check_injection),
    Check(
        (
            *("check_gradient_hash_across_dp_replicas_interval", "use_distributed_optimizer"),
            "data_parallel_sharding_strategy",
        ),
        _check_gradient_hash,
    ),
)


_FOLDERS = ("save", "load", "pretrained_checkpoint", "data_cache_path")
_OPENED = ("data_path", "train_data_path", "valid_data_path", "test_data_path", "config")
_TEXTS = ("TEXT", "TOKEN")


def _check_byte_pair_files(config: RunConfig) -> Iterator[str]:
    tokenizer = config.tokenizer
    if tokenizer.tokenizer_type != "GPT2BPETokenizer":
        return
    files = (("--vocab-file", tokenizer.vocab_file), ("--merge-file", tokenizer.merge_file))
    other = "HuggingFaceTokenizer needs only --tokenizer-model FOLDER, and ByteTokenizer no flag"
    if not config.data.train_data:
        other = "NullTokenizer needs only --vocab-size, and ByteTokenizer no flag"
    for name, file in files:
        if file is None:
            yield (
                f"{name} is missing; --tokenizer-type GPT2BPETokenizer needs --vocab-file and --merge-file ({other})"
            )
        elif not os.path.isfile(file):
            yield f"{name} {file}: there is no such file; pass the path of an existing file"


def _check_model_file(config: RunConfig) -> Iterator[str]:
    tokenizer = config.tokenizer
    if tokenizer.tokenizer_type in ("GPT2BPETokenizer", "ByteTokenizer", "NullTokenizer"):
        return
    if tokenizer.tokenizer_model is None:
        yield f"--tokenizer-model is missing; --tokenizer-type {tokenizer.tokenizer_type} needs it"
        return
    path = Path(tokenizer.tokenizer_model)
    if not path.exists():
        yield f"--tokenizer-model {path}: there is no such file or folder; pass a local path"
    elif tokenizer.tokenizer_type == "HuggingFaceTokenizer":
        if path.is_dir() and not (path / "tokenizer.json").is_file():
            yield f"--tokenizer-model {path}: the folder has no tokenizer.json; save the fast tokenizer there"
    elif path.is_dir():
        yield f"--tokenizer-model {path} is a folder, but {tokenizer.tokenizer_type} needs a file"


def _check_null_tokenizer(config: RunConfig) -> Iterator[str]:
    if config.tokenizer.tokenizer_type == "NullTokenizer" and config.tokenizer.vocab_size is None:
        yield "--vocab-size is missing; --tokenizer-type NullTokenizer needs it"


def _check_folders(config: RunConfig) -> Iterator[str]:
    for name, folder in (
        ("--save", config.checkpoint.save),
        ("--load", config.checkpoint.load),
        ("--tensorboard-dir", config.logging.tensorboard_dir),
        ("--data-cache-path", config.data.data_cache_path),
    ):
        if folder is not None and os.path.isfile(folder):
            yield f"{name} {folder} is a file; pass a folder"
    if config.logging.record_schedule is not None and os.path.isdir(config.logging.record_schedule):
        yield f"--record-schedule {config.logging.record_schedule} is a folder; pass a file"
    if config.logging.metrics_jsonl is not None and os.path.isdir(config.logging.metrics_jsonl):
        yield f"--metrics-jsonl {config.logging.metrics_jsonl} is a folder; pass a file"


def _check_urls(config: RunConfig) -> Iterator[str]:
    for spec, value in config.flags():
        if spec.options.metavar in _TEXTS or spec.name in _OPENED:  # opening the data reports the problem
            continue
        for text in value if isinstance(value, tuple) else (value,):
            if not isinstance(text, str) or ":" not in text:
                continue
            if spec.name in _FOLDERS:
                problem = url_problem(text)
                if problem is not None:
                    yield f"{spec.flags[0]}: {problem}"
            elif spec.name != "mlflow_tracking_uri" and is_url(text) and text.partition("://")[0] in PACKAGES:
                scheme = text.partition("://")[0]
                yield f"{spec.flags[0]} {scheme}://...: object stores are not supported here; pass a local path"


def _check_saving(config: RunConfig) -> Iterator[str]:
    checkpoint = config.checkpoint
    if checkpoint.save is None or checkpoint.local_save is not None or url_problem(checkpoint.save) is not None:
        return
    given = f"--save {checkpoint.save}"
    if checkpoint.ckpt_format != NATIVE_FORMAT:
        yield (
            f"--ckpt-format {checkpoint.ckpt_format} can only be written to a file system, but {given} is in an object "
            f"store; use --ckpt-format {NATIVE_FORMAT}, or a local folder"
        )
    if config.logging.log_progress:
        yield f"--log-progress appends to a file next to checkpoints, but {given} is in an object store; omit it"


FILE_CHECKS = (
    Check(("tokenizer_type",), _check_byte_pair_files),
    Check(("tokenizer_type",), _check_model_file),
    Check(("tokenizer_type", "vocab_size"), _check_null_tokenizer),
    Check((), _check_folders),
    Check((), _check_urls),
    Check(("save", "ckpt_format"), _check_saving),
)


_SET_NAMES = ("training", "validation", "test")


def _check_sources(config: RunConfig) -> Iterator[str]:
    """Require exactly one data source."""
    data = config.data
    sources = {
        "--data-path": bool(data.data_path) and data.data_args_path is None,
        "--data-args-path": data.data_args_path is not None,
        "--train-data-path (or --valid-data-path, --test-data-path)": (
            bool(data.train_data_path or data.valid_data_path or data.test_data_path)
            and data.per_split_data_args_path is None
        ),
        "--per-split-data-args-path": data.per_split_data_args_path is not None,
        "--train-data": bool(data.train_data or data.valid_data or data.test_data),
        "--mock-data": data.mock_data,
        f"--dataset {data.dataset}": data.is_registered,
    }
    given = [name for name, is_given in sources.items() if is_given]
    if not given and data.dataloader_type != "external":
        yield (
            "no data is configured; pass --data-path PREFIX, --train-data-path PREFIX, --train-data FILE or --mock-data"
        )
    elif len(given) > 1:
        yield f"{' and '.join(given)} exclude each other; omit one of them"
    if data.split is not None and data.has_data_per_split:
        yield f"--split {data.split} has no effect if each set has its own data; omit it"
    has_training_data = bool(data.train_data_path or data.train_data)
    if data.has_data_per_split and not has_training_data and not config.training.skip_train:
        yield "--train-data-path is missing; --valid-data-path and --test-data-path contain no training data"


def _check_split(config: RunConfig) -> Iterator[str]:
    split = config.data.split
    if split is None or config.data.has_data_per_split:
        return
    try:
        shares = parse_split(split)
    except ConfigurationError as error:
        yield from error.problems
        return
    if shares[0] == 0 and not config.training.skip_train:
        yield f"--split {split}: the training set is empty; make the first number positive, as in {DEFAULT_SPLIT}"


def _check_blends(config: RunConfig) -> Iterator[str]:
    for name, values in _lists(config):
        try:
            blend = parse_blend(values)
        except ConfigurationError as error:
            yield from (f"{name}: {problem}" for problem in error.problems)
            continue
        for prefix, weight in zip(blend.prefixes, blend.weights or (1.0,) * len(blend.prefixes)):
            if not 0 < weight < float("inf"):
                yield f"{name}: the weight of {prefix} is {weight:g}; use a positive weight, or omit the data set"
        for prefix in dict.fromkeys(blend.prefixes):
            yield from _check_kind(config, name, prefix)
            yield from _check_data_set(config, name, prefix)


def _check_text(config: RunConfig) -> Iterator[str]:
    """Check the files of text that are tokenized on first use."""
    data = config.data
    flags = (("--train-data", data.train_data), ("--valid-data", data.valid_data), ("--test-data", data.test_data))
    for name, files in flags:
        for file in files:
            if not os.path.exists(file):
                yield f"{name} {file}: there is no such file; pass a text file, or a file with a JSON object per line"
            elif not os.path.isfile(file):
                yield f"{name} {file} is not a file; pass a text file, or a file with a JSON object per line"
    if data.train_data and config.tokenizer.tokenizer_type == "NullTokenizer":
        yield "--train-data is text, which NullTokenizer cannot encode; give another --tokenizer-type"
    if data.train_data and data.sft:
        yield "--train-data is tokenized as text; for --sft pass --train-data-path FILE.jsonl"


def _check_extra_valid(config: RunConfig) -> Iterator[str]:
    try:
        sets = extra_validation_sets(config.validation)
    except ConfigurationError as error:
        yield from error.problems
        return
    for extra in sets:
        for prefix, weight in zip(extra.blend.prefixes, extra.blend.weights or (1.0,) * len(extra.blend.prefixes)):
            if not 0 < weight < float("inf"):
                yield f"validation set {extra.name}: the weight of {prefix} is {weight:g}; use a positive weight"
            try:
                _open(config, prefix)
            except (DataError, StorageError) as error:
                yield f"validation set {extra.name}: {error}"


def _check_registered_data(config: RunConfig) -> Iterator[str]:
    """Reject flags of data files for a data set that a script registered."""
    data, given = config.data, f"--dataset {config.data.dataset}"
    if not data.is_registered:
        return
    if data.dataloader_type == "external":
        yield f"--dataloader-type external and {given} exclude each other; use single or cyclic"
    if config.validation.extra_valid_datalist:
        yield f"--extra-valid-datalist is not supported with {given}; return the validation data with the data set"
    if data.data_cache_path is not None:
        yield f"--data-cache-path {data.data_cache_path} has no effect with {given}, which has no index; omit it"


def _check_full_validation(config: RunConfig) -> Iterator[str]:
    validation = config.validation
    if validation.eval_iters == 0 and (validation.full_validation or validation.extra_valid_datalist):
        flag = "--full-validation" if validation.full_validation else "--extra-valid-datalist"
        yield f"{flag} has no effect with --eval-iters 0, which turns evaluation off; use --eval-iters 1 or more"
    if validation.full_validation and config.data.dataloader_type == "external":
        yield "--full-validation does not support --dataloader-type external; use --eval-iters instead"


def _check_data_set(config: RunConfig, name: str, prefix: str) -> Iterator[str]:
    """Yield a problem for each data set with unusable files, or with too few sequences for a required set.

    An empty test set is allowed, since usual splits of small data sets produce one. Building the data reports it.
    """
    try:
        data_set = _open(config, prefix)
    except (DataError, StorageError) as error:
        yield f"{name} {prefix}: {error}"
        return
    if data_set is None:
        return
    num_sequences = len(data_set)
    if num_sequences == 0:
        yield f"{name} {prefix}: the data set contains no documents"
        return
    for set_name, size in _wanted_sets(config, num_sequences):
        if size == 0 and set_name != "test":
            yield (
                f"--split {config.data.split} of the {num_sequences} documents of {prefix} leaves the "
                f"{set_name} set empty; {_split_that_works(config, num_sequences)}"
            )


def _open(config: RunConfig, prefix: str) -> IndexedDataset | None:
    """Open a data set; return None for jsonl conversations, which are not tokenized yet."""
    if not config.data.sft:
        return IndexedDataset(prefix)
    return None if is_raw(prefix) else ConversationFile(prefix)


def _check_fine_tuning(config: RunConfig) -> Iterator[str]:
    data = config.data
    without_text = (
        ("--mock-data", data.mock_data),
        ("--dataloader-type external", _is_external(config)),
        (f"--dataset {data.dataset}", data.is_registered),
    )
    for flag, is_given in without_text:
        if is_given and (data.sft or data.fim_rate):
            tuning = "--train-mode finetune" if data.train_mode == "finetune" else "--sft"
            what = f"{tuning} needs conversations" if data.sft else "--fim-rate needs text"
            yield f"{what}, but {flag} has none; use --data-path instead"
    if data.sft and data.fim_rate:
        yield "--sft and --fim-rate exclude each other; omit one of them"
    if data.dataset is not None and "SFT" in data.dataset and not data.sft and not data.is_registered:
        yield f"--dataset {data.dataset} reads conversations; add --train-mode finetune or --sft"


def _check_kind(config: RunConfig, name: str, prefix: str) -> Iterator[str]:
    """Check a path against the kind of --dataset."""
    dataset = config.data.dataset
    if config.data.sft and dataset is not None and is_raw(prefix) != (dataset in RAW_DATASETS):
        kind, others = ("a file", RAW_DATASETS) if is_raw(prefix) else ("not a file", INDEXED_DATASETS)
        yield f"{name} {prefix} is {kind}, which does not match --dataset {dataset}; use {' or '.join(others)}"


def _is_external(config: RunConfig) -> bool:
    return config.data.dataloader_type == "external"


def _wanted_sets(config: RunConfig, num_sequences: int) -> list[tuple[str, int | None]]:
    """Return (name, number of sequences) of each set that the run reads; None if its share is 0."""
    shares = _shares(config)
    if shares is None:
        return []
    evaluates = config.validation.eval_iters != 0
    wanted = (not config.training.skip_train, evaluates and config.validation.eval_interval > 0, evaluates)
    return [
        (name, None if sequences is None else len(sequences))
        for name, sequences, is_wanted in zip(_SET_NAMES, split_boundaries(shares, num_sequences), wanted)
        if is_wanted
    ]


def _shares(config: RunConfig) -> tuple[float, float, float] | None:
    """Return the shares of the three sets, or None if --split is malformed."""
    if config.data.has_data_per_split or config.data.split is None:
        return None
    try:
        return parse_split(config.data.split)
    except ConfigurationError:
        return None  # _check_split reports it


def _split_that_works(config: RunConfig, num_sequences: int) -> str:
    split = suggest_split(_shares(config) or (), num_sequences)
    return "use a data set with more documents, or --split 1,0,0" if split is None else f"use --split {split}"


def _lists(config: RunConfig) -> list[tuple[str, tuple[str, ...]]]:
    data = config.data
    whole = "--data-path" if data.data_args_path is None else "--data-args-path"
    lists = [
        (whole, data.data_path),
        ("--train-data-path", data.train_data_path),
        ("--valid-data-path", data.valid_data_path),
        ("--test-data-path", data.test_data_path),
    ]
    return [(name, values) for name, values in lists if values and not data.mock_data]


DATA_FILE_CHECKS = (
    Check(("sft", "dataset", "dataloader_type", "fim_rate"), _check_fine_tuning),
    Check(("data_path", "dataloader_type"), _check_sources),
    Check(("split",), _check_split),
    Check(("data_path", "split", "eval_iters", "eval_interval"), _check_blends),
    Check(("train_data", "valid_data", "test_data", "tokenizer_type", "sft"), _check_text),
    Check(("extra_valid_datalist", "extra_valid_data_samples", "extra_valid_data_names"), _check_extra_valid),
    Check(("eval_iters", "extra_valid_datalist", "full_validation", "dataloader_type"), _check_full_validation),
    Check(("dataset", "dataloader_type", "extra_valid_datalist", "data_cache_path"), _check_registered_data),
)


_CHECKS = (
    *parallelism.FIELD_CHECKS,
    *parallelism.DATA_PARALLEL_CHECKS,
    *parallelism.LAYOUT_CHECKS,
    *parallelism.CONTEXT_PARALLEL_CHECKS,
    *model.MODEL_CHECKS,
    *parallelism.PIPELINE_CHECKS,
    *BATCH_CHECKS,
    *OPTIMIZER_CHECKS,
    *PROFILING_CHECKS,
    *parallelism.CUDA_GRAPH_CHECKS,
    *parallelism.ACTIVATION_CHECKS,
    *model.FLOAT8_CHECKS,
    *model.MOE_CHECKS,
    *model.MTP_CHECKS,
    *model.MLA_CHECKS,
    *model.ATTENTION_CHECKS,
    *hybrid.HYBRID_CHECKS,
    *FAULT_CHECKS,
)
_RUN_CHECKS = (*LENGTH_CHECKS, *DATA_FILE_CHECKS, *FILE_CHECKS)


def find_problems(config: RunConfig, broken: frozenset[str] = frozenset(), *, needs_files: bool = True) -> list[str]:
    """Return every problem of a resolved configuration, one line each.

    ``broken`` names fields without a usable value; checks that read one of them are skipped. Without ``needs_files``,
    the run's data, tokenizer and length are not required.
    """
    problems: list[str] = []
    for check in (*_CHECKS, *(_RUN_CHECKS if needs_files else ())):
        if broken.isdisjoint(check.reads):
            problems.extend(check.find(config))
    # A command line cannot have such values, but a checkpoint's configuration can.
    problems.extend(
        found for spec, value in config.flags("registry") if (found := spec.unregistered(value)) is not None
    )
    return list(dict.fromkeys(problems))
