"""Checks of the optimizer: learning rate and its schedule, weight decay, offload, and the types of its state."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.config.checks.base import Check
from megatron.config.run_config import RunConfig
from megatron.core.config_base import BELOW_ONE
from megatron.core.optimizer.optimizer_config import parse_override
from megatron.core.optimizer.optimizer_param_scheduler import styles_unknown_to_megatron

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
        yield "--lr is missing; give the highest learning rate"
    elif optimizer.min_lr > optimizer.lr and optimizer.lr > 0:
        yield f"--min-lr {optimizer.min_lr} is greater than --lr {optimizer.lr}; give {optimizer.lr} or less"


def _check_decoupled(config: RunConfig) -> Iterator[str]:
    highest, lowest = config.optimizer.decoupled_lr, config.optimizer.decoupled_min_lr
    lowest, name = (config.optimizer.min_lr, "min-lr") if lowest is None else (lowest, "decoupled-min-lr")
    if highest is not None and lowest > highest:
        yield (
            f"--{name} {lowest} is greater than --decoupled-lr {highest}; give --decoupled-min-lr of {highest} or less"
        )


def _check_overrides(config: RunConfig) -> Iterator[str]:
    for text in config.optimizer.param_group_overrides:
        try:
            parse_override(text)
        except ValueError as error:
            yield (
                f"--param-group-overrides {text}: {error}; give PATTERN:lr_mult=X,wd_mult=Y with a pattern of "
                "parameters' names, as in *.mlp.*:lr_mult=0.5"
            )


def _check_mup(config: RunConfig) -> Iterator[str]:
    model = config.model
    if not model.use_mup:
        return
    if model.mup_base_hidden_size is None and model.mup_width_mult is None:
        yield "--use-mup needs the width of the base model; give --mup-base-hidden-size (or --mup-width-mult)"
    if config.optimizer.elementwise == "sgd":
        yield "--use-mup scales the rates of AdamW, Lion and Muon, not of --optimizer sgd; give --optimizer adam"
    if model.multi_latent_attention and model.mup_base_head_dim is not None:
        yield (
            "--mup-base-head-dim is not built beside --multi-latent-attention; leave it out: scores are then divided "
            "by the root of the heads' width"
        )


def _check_clipping(config: RunConfig) -> Iterator[str]:
    optimizer = config.optimizer
    for name in ("clip_grad_matrices", "clip_grad_embeddings", "clip_grad_vectors"):
        value = getattr(optimizer, name)
        if value and optimizer.offload_fraction:
            yield (
                f"--{name.replace('_', '-')} {value} beside the optimizer's offload is not built; leave it or the "
                "offload (--optimizer-cpu-offload) out"
            )


def _check_average(config: RunConfig) -> Iterator[str]:
    decay, form = config.optimizer.ema_decay, config.checkpoint.ckpt_format
    if decay is None:
        return
    if form in ("torch", "torch_dist") and config.checkpoint.save:
        yield (
            f"--ckpt-format {form} has no place for the averages of --ema-decay {decay}; leave it out for the native "
            "format, which converts later"
        )
    if config.checkpoint.save and config.checkpoint.no_save_optim:
        yield f"--no-save-optim leaves out the averages of --ema-decay {decay} too; leave one of the two out"
    if config.model.fp8_param_gather:
        yield f"--ema-decay {decay} beside --fp8-param-gather is not built; leave one of them out"
    if config.model.cpu_offloading_weights:
        yield f"--ema-decay {decay} beside --cpu-offloading-weights is not built; leave one of them out"


def _check_units(config: RunConfig) -> Iterator[str]:
    """Let the schedule be counted as the run is: in iterations or in samples."""
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
                f"--{name}-{wrong} {value} does not go with --train-{right}: the run is counted in {right}; "
                f"give --{name}-{right}"
            )


def _check_warmup(config: RunConfig) -> Iterator[str]:
    schedule = config.scheduler
    counted = schedule.lr_warmup_iters or schedule.lr_warmup_samples
    if schedule.lr_warmup_fraction is not None and counted:
        unit = "iters" if schedule.lr_warmup_iters else "samples"
        yield (
            f"--lr-warmup-fraction {schedule.lr_warmup_fraction} and --lr-warmup-{unit} {counted} exclude "
            "each other; keep one"
        )
        return
    if schedule.lr_warmup_fraction is not None and not BELOW_ONE.hold(schedule.lr_warmup_fraction):
        return  # its bounds are checked
    lengths = config.schedule_lengths
    if lengths.lr_decay_steps and lengths.lr_warmup_steps >= lengths.lr_decay_steps:
        unit, size = ("samples", 1) if config.training.train_samples else ("iters", config.training.global_batch_size)
        yield (
            f"the warm-up of {lengths.lr_warmup_steps:g} samples is not shorter than the decay of "
            f"{lengths.lr_decay_steps} samples; give --lr-warmup-{unit} below {lengths.lr_decay_steps // size}, "
            f"or raise --lr-decay-{unit}"
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
            f"--ckpt-format {form} cannot hold {', '.join(unknown)}, which Megatron does not have; leave it out for "
            "the native format, or choose a style that Megatron has"
        )


def _check_weight_decay(config: RunConfig) -> Iterator[str]:
    schedule = config.scheduler
    start, end = schedule.start_weight_decay, schedule.end_weight_decay
    if schedule.weight_decay_incr_style == "constant":
        if start != end:
            yield (
                f"--start-weight-decay {start} and --end-weight-decay {end} differ, but "
                "--weight-decay-incr-style is constant; give linear or cosine"
            )
    elif start is None or end is None:
        yield (
            f"--weight-decay-incr-style {schedule.weight_decay_incr_style} needs --start-weight-decay and "
            "--end-weight-decay"
        )
    elif end < start:
        yield (f"--end-weight-decay {end} is smaller than --start-weight-decay {start}; weight decay can only grow")


def _check_types(config: RunConfig) -> Iterator[str]:
    optimizer, dtype = config.optimizer, config.model.params_dtype
    if optimizer.main_grads_dtype == "bf16" and dtype != "bfloat16":
        yield f"--main-grads-dtype bf16 needs --bf16: the model is {dtype}; give --bf16, or --main-grads-dtype fp32"
    if optimizer.main_params_dtype == "fp16":
        if dtype != "bfloat16":
            yield (
                "--main-params-dtype fp16 keeps what bfloat16 weights lack of float32, and the model is "
                f"{dtype}; give --bf16, or --main-params-dtype fp32"
            )
        elif optimizer.offload_fraction:
            yield (
                "--main-params-dtype fp16 keeps a part of each main parameter in the weights of the device, where the "
                "host has none; give --main-params-dtype fp32, or leave the optimizer's offload out"
            )
    if optimizer.elementwise != "adam":
        for name in ("exp_avg", "exp_avg_sq"):
            value = getattr(optimizer, f"{name}_dtype")
            if value != "fp32":
                flag = f"--{name.replace('_', '-')}-dtype"
                yield f"{flag} {value} is of Adam's state; give --optimizer adam, or {flag} fp32"


def _check_float8_gather(config: RunConfig) -> Iterator[str]:
    if config.model.fp8_param_gather and config.optimizer.main_params_dtype == "fp16":
        yield (
            "--main-params-dtype fp16 keeps what the weights lack of float32, and --fp8-param-gather rounds the "
            "weights; give --main-params-dtype fp32, or leave --fp8-param-gather out"
        )


def _check_gather(config: RunConfig) -> Iterator[str]:
    if config.ddp.overlap_param_gather_with_optimizer_step and config.optimizer.optimizer_cpu_offload:
        yield (
            "--overlap-param-gather-with-optimizer-step updates in the order of the forward pass, which offloaded "
            "parameters do not have; leave it or the optimizer's offload out"
        )


def _check_rule(config: RunConfig) -> Iterator[str]:
    """Let what only AdamW and SGD can do be asked of these alone."""
    rule = config.optimizer.optimizer
    if rule in ("adam", "sgd"):
        return
    form = config.checkpoint.ckpt_format
    if form in ("torch", "torch_dist") and config.checkpoint.save and not config.checkpoint.no_save_optim:
        yield (
            f"--ckpt-format {form} has no place for the state of --optimizer {rule}; leave it out for the native "
            "format, which converts later, or give --no-save-optim"
        )
    if rule == "muon":
        if config.optimizer.offload_fraction:
            yield (
                "--optimizer muon needs whole matrices on the device; leave the optimizer's offload "
                "(--optimizer-cpu-offload) out, or give --optimizer adam"
            )
        if config.ddp.overlap_param_gather_with_optimizer_step:
            yield (
                "--overlap-param-gather-with-optimizer-step updates bucket by bucket, and --optimizer muon whole "
                "matrices; leave one of them out (--overlap-param-gather goes with muon)"
            )


CHECKS = (
    Check(
        ("optimizer", "ckpt_format", "optimizer_cpu_offload", "overlap_param_gather_with_optimizer_step"), _check_rule
    ),
    Check(("lr", "min_lr"), _check_learning_rate),
    Check(("param_group_overrides",), _check_overrides),
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
