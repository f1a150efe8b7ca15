"""Notes on a configuration: flags without effect, slow FP8 recipes, and the model's attention and routing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping

from megatron.config.run_config import RunConfig
from megatron.core.optimizer.optimizer_config import OptimizerConfig

BF16 = "bf16"
PREDICTED_MS: Mapping[str, Mapping[str, float]] = {
    "H100": {BF16: 260, "delayed": 216, "tensorwise": 234, "rowwise": 458, "blockwise": 490},
    "B200": {BF16: 120, "delayed": 100, "tensorwise": 110, "rowwise": 210, "blockwise": 223, "mxfp8": 230},
}
"""Milliseconds of a step by GPU type and recipe: 4 layers of Llama 3.1 8B, TP 1 and DP 8 on 8 GPUs, two micro-batches
of 8,192 tokens, by the dry run (tests/unit/dry_run/test_float8.py predicts them again)."""


def float8_speed_line(recipe: str) -> str | None:
    """Return a line that says that a recipe is predicted slower than bf16, None if it is not."""
    slower = [
        f"{times[recipe]:g} ms per step instead of {times[BF16]:g} on 8 {gpu}"
        for gpu, times in PREDICTED_MS.items()
        if times.get(recipe, 0.0) > times[BF16]
    ]
    if not slower:
        return None
    return (
        f"--fp8-recipe {recipe} is predicted slower than bf16: {', '.join(slower)} (4 layers of Llama 3.1 8B, TP 1, "
        "DP 8; predicted by tools/gpu_dry_run.py, not measured); delayed and tensorwise are predicted faster than bf16"
    )


def float8_notes(config: RunConfig) -> Iterator[str]:
    """Yield the line of the recipe that a run takes."""
    line = None if config.model.fp8_format is None else float8_speed_line(config.model.fp8_recipe)
    if line is not None:
        yield line


def model_notes(config: RunConfig) -> list[str]:
    """Return the lines."""
    return [
        *_attention_notes(config),
        *_level_notes(config),
        *_window_notes(config),
        *_routing_notes(config),
        *float8_notes(config),
    ]


def _attention_notes(config: RunConfig) -> list[str]:
    model = config.model
    if model.attention_backend != "flash":
        return []
    if config.data.reset_attention_mask:
        return ["flash-attn is not used with packed documents: --reset-attention-mask takes torch's own attention"]
    if model.context_parallel_size > 1 and (rings := {"p2p", "a2a+p2p"} & {*model.cp_comm_type}):
        name = max(rings)
        return [f"flash-attn is not used with --cp-comm-type {name}: blocks that are merged take torch's own attention"]
    return []


def _level_notes(config: RunConfig) -> list[str]:
    sizes = config.model.hierarchical_context_parallel_sizes
    if not sizes or "a2a+p2p" in config.model.cp_comm_type:
        return []
    given = " ".join(map(str, sizes))
    return [f"--hierarchical-context-parallel-sizes {given} has no effect without --cp-comm-type a2a+p2p"]


def _window_notes(config: RunConfig) -> list[str]:
    model = config.model
    try:
        is_idle = model.window_size is not None and not any(model.layer_windows)
    except ValueError:
        return []  # The checks say what is wrong.
    if not is_idle:
        return []
    pattern = model.window_attn_skip_freq
    return [f"--window-size {model.window_size} has no effect: --window-attn-skip-freq {pattern} gives it to no layer"]


def _routing_notes(config: RunConfig) -> list[str]:
    if not config.model.routes_at_random:
        return []
    return [
        "--moe-router-force-load-balancing chooses experts by random numbers, so that their load is even: the model "
        "does not learn its routing, and what is trained so is for measurements only"
    ]


_TO_LOGGERS = (
    "tensorboard_log_interval",
    "log_timers_to_tensorboard",
    "log_batch_size_to_tensorboard",
    "log_learning_rate_to_tensorboard",
    "log_loss_scale_to_tensorboard",
    "log_validation_ppl_to_tensorboard",
    "log_memory_to_tensorboard",
    "log_world_size_to_tensorboard",
)


@dataclasses.dataclass(frozen=True)
class _Idle:
    """Hold fields that count for nothing where the condition holds; ``reason`` completes "has no effect"."""

    fields: tuple[str, ...]
    condition: Callable[[RunConfig], bool]
    reason: str


_IDLE = (
    _Idle(
        (
            "account_for_embedding_in_pipeline_split",
            "account_for_loss_in_pipeline_split",
            "microbatch_group_size_per_virtual_pipeline_stage",
        ),
        lambda config: config.model.pipeline_model_parallel_size == 1,
        "with --pipeline-model-parallel-size 1",
    ),
    _Idle(
        ("cp_comm_type",),
        lambda config: config.model.context_parallel_size == 1,
        "with --context-parallel-size 1",
    ),
    _Idle(
        (
            "overlap_grad_reduce",
            "ddp_bucket_size",
            "ddp_average_in_collective",
            "check_weight_hash_across_dp_replicas_interval",
            "check_gradient_hash_across_dp_replicas_interval",
        ),
        lambda config: config.parallel_sizes.num_replicas == 1,
        "with one data-parallel rank",
    ),
    _Idle(
        ("check_weight_hash_across_dp_replicas_interval",),
        lambda config: config.ddp.shards_weights and config.parallel_sizes.num_replicas > 1,
        "with --data-parallel-sharding-strategy optim_grads_params, under which ranks hold no copies to compare",
    ),
    _Idle(
        ("loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"),
        lambda config: not config.model.fp16,
        "without --fp16",
    ),
    _Idle(
        ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"),
        lambda config: config.model.fp16 and config.optimizer.loss_scale is not None,
        "with --loss-scale, which is constant",
    ),
    _Idle(
        ("rope_type",),
        lambda config: not config.model.multi_latent_attention and not config.model.stretches_positions,
        "without --multi-latent-attention, but for yarn with a --rotary-scaling-factor other than 1",
    ),
    _Idle(
        (
            *("original_max_position_embeddings", "beta_fast", "beta_slow", "mscale"),
            "yarn_correction_range_round_to_int",
        ),
        lambda config: config.model.multi_latent_attention and not config.model.stretches_positions,
        "without positions that YaRN stretches: --rope-type yarn and a --rotary-scaling-factor other than 1",
    ),
    _Idle(
        ("rotary_scaling_factor",),
        lambda config: (
            config.model.multi_latent_attention
            and config.model.rope_type == "rope"
            and config.model.mscale_all_dim == 0.0
        ),
        "with --rope-type rope and --mscale-all-dim 0.0",
    ),
    _Idle(
        ("mscale_all_dim",),
        lambda config: config.model.multi_latent_attention and config.model.rotary_scaling_factor <= 1.0,
        "with a --rotary-scaling-factor of 1.0 or less",
    ),
    _Idle(
        ("kv_channels",),
        lambda config: (
            config.model.multi_latent_attention
            and config.model.kv_channels != config.model.hidden_size // max(config.model.num_attention_heads, 1)
        ),
        "with --multi-latent-attention: --qk-head-dim, --qk-pos-emb-head-dim and --v-head-dim are the widths of a head",
    ),
    _Idle(
        ("no_rope_freq",),
        # Before the checks it may be anything.
        lambda config: (
            (number := config.model.no_rope_freq or "").isdecimal() and int(number) > config.model.num_layers
        ),
        "on fewer layers than that: all of them rotate queries and keys",
    ),
    _Idle(("sgd_momentum",), lambda config: config.optimizer.optimizer != "sgd", "without --optimizer sgd"),
    _Idle(
        ("adam_beta1", "adam_beta2", "adam_eps"),
        lambda config: config.optimizer.elementwise != "adam",
        "without Adam",
    ),
    _Idle(
        ("lion_beta1", "lion_beta2"), lambda config: config.optimizer.elementwise != "lion", "without --optimizer lion"
    ),
    _Idle(
        ("lr_wsd_decay_style", "lr_wsd_decay_iters", "lr_wsd_decay_samples"),
        lambda config: config.scheduler.lr_decay_style != "WSD",
        "without --lr-decay-style WSD",
    ),
    _Idle(
        ("lr_warmup_init",),
        lambda config: not config.schedule_lengths.lr_warmup_steps,
        "without a warm-up (--lr-warmup-iters, --lr-warmup-samples or --lr-warmup-fraction)",
    ),
    _Idle(
        ("use_precision_aware_optimizer",),
        lambda config: (
            {
                *(config.optimizer.main_grads_dtype, config.optimizer.main_params_dtype),
                *(config.optimizer.exp_avg_dtype, config.optimizer.exp_avg_sq_dtype),
            }
            == {"fp32"}
        ),
        "with fp32 alone (--main-grads-dtype, --main-params-dtype, --exp-avg-dtype, --exp-avg-sq-dtype)",
    ),
    _Idle(
        ("fp8_wgrad", "fp8_param_gather", "defer_embedding_wgrad_compute", "wgrad_deferral_limit"),
        lambda config: config.model.lora_rank > 0,
        "with --lora-rank: no weight of the model itself is trained",
    ),
    _Idle(
        ("result_rejected_tracker_filename",),
        lambda config: config.faults.rerun_mode == "disabled",
        "with --rerun-mode disabled",
    ),
    _Idle(
        ("spike_budget",),
        lambda config: config.faults.spike_policy == "stop",
        "with --spike-policy stop: the first spike ends the run",
    ),
    _Idle(
        ("max_consecutive_skipped_iterations",),
        lambda config: config.ddp.check_for_nan_in_loss_and_grad and not config.model.fp16,
        "without --fp16: the first gradient that is not finite ends the run or follows --spike-policy; "
        "--no-check-for-nan-in-loss-and-grad skips it",
    ),
    _Idle(("override_opt_param_scheduler",), lambda config: config.checkpoint.load is None, "without --load DIR"),
    _Idle(
        ("tensorboard_queue_size",),
        lambda config: config.logging.tensorboard_dir is None,
        "without --tensorboard-dir DIR",
    ),
    _Idle(
        _TO_LOGGERS,
        lambda config: (
            not (config.logging.tensorboard_dir or config.logging.wandb_project or config.logging.mlflow_experiment)
        ),
        "without --tensorboard-dir DIR, --wandb-project NAME or --mlflow-experiment NAME",
    ),
    _Idle(
        ("wandb_exp_name", "wandb_save_dir", "wandb_entity"),
        lambda config: not config.logging.wandb_project,
        "without --wandb-project NAME",
    ),
    _Idle(
        ("mlflow_run_name", "mlflow_tracking_uri"),
        lambda config: not config.logging.mlflow_experiment,
        "without --mlflow-experiment NAME",
    ),
    _Idle(
        ("exit_signal_handler",),
        lambda config: config.training.exit_signal == "SIGTERM",
        "with --exit-signal SIGTERM: a checkpoint is always saved on it",
    ),
)


def idle_flags(config: RunConfig) -> Iterator[str]:
    """Yield a line for each flag that is given and counts for nothing, because another one is, or is not, given."""
    fields = {spec.name: (spec, value) for spec, value in config.flags()}
    for idle in _IDLE:
        given = [fields[name] for name in idle.fields if fields[name][1] != fields[name][0].default]
        if given and idle.condition(config):
            for spec, value in given:
                words = " ".join(map(str, value)) if spec.is_sequence else value
                yield f"{spec.typed(words)} has no effect {idle.reason}"


def machine_notes(config: RunConfig, is_cuda: bool, has_launcher_rank: bool) -> Iterator[str]:
    """Yield a line for each given flag that changes nothing in this process.

    ``has_launcher_rank`` tells that the environment says which device is this process's.
    """
    local_rank = config.initialization.local_rank
    if local_rank is not None and has_launcher_rank:
        yield f"--local-rank {local_rank} has no effect: the environment's LOCAL_RANK is used"
    elif local_rank is not None and not is_cuda:
        yield f"--local-rank {local_rank} has no effect on a CPU: it is the number of a CUDA device"
    if is_cuda:
        return
    level = config.training.empty_unused_memory_level
    if level:
        yield f"--empty-unused-memory-level {level} has no effect on a CPU: only CUDA memory is kept after use"
    if config.initialization.disable_bf16_reduced_precision_matmul:
        yield "--disable-bf16-reduced-precision-matmul has no effect on a CPU, whose sums are float32"
    if not config.ddp.gradient_accumulation_fusion:
        yield (
            "--no-gradient-accumulation-fusion has no effect on a CPU: gradients of 16-bit weights are always rounded "
            "before they are added to their float32 sums there"
        )
    yield from _offload_notes(config.optimizer)


def _offload_notes(optimizer: OptimizerConfig) -> Iterator[str]:
    if not optimizer.optimizer_cpu_offload:
        return
    if optimizer.use_torch_optimizer_for_cpu_offload:
        yield "--use-torch-optimizer-for-cpu-offload has no effect on a CPU: apex has no optimizer there"
    for flag, is_pinned in (
        ("--no-pin-cpu-grads", optimizer.pin_cpu_grads),
        ("--no-pin-cpu-params", optimizer.pin_cpu_params),
    ):
        if not is_pinned:
            yield f"{flag} has no effect on a CPU: memory is pinned for copies to and from a device of its own"
    margin = optimizer.optimizer_offload_auto_threshold
    if optimizer.optimizer_offload_policy == "auto" and margin != OptimizerConfig.optimizer_offload_auto_threshold:
        yield f"--optimizer-offload-auto-threshold {margin} has no effect on a CPU: it has no memory of its own to fill"
