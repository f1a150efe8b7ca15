"""Frozen configuration of a run: training, checkpoints, logging, data, fault tolerance, and all parts together."""

from __future__ import annotations

import dataclasses
import functools
import os
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron.config.extra_arguments import ExtraArguments, extra_class, recorded_arguments
from megatron.core.batch_size_rampup import BatchSizeRampup
from megatron.core.config_base import (
    BELOW_ONE,
    FRACTION,
    NOT_NEGATIVE,
    POSITIVE,
    Config,
    FieldSpec,
    config_from_dict,
    config_to_dict,
    field_specs,
    field_value,
    flag,
    idle_with,
    idle_without,
)
from megatron.core.datasets import ValidationSet, parse_blend
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.errors import ConfigurationError
from megatron.core.models.gpt import GPTConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.parallel_config import ParallelSizes
from megatron.core.pipeline_parallel import StageLayout, default_schedule, plan_stage_layout
from megatron.core.safe_io import MAX_TEXT_BYTES, parse_json
from megatron.core.tokenizers import CODE_TOKENIZER_TYPES, PATCH_TOKENIZER_TYPES, TOKENIZER_TYPES

_WITHOUT_LOGGERS = idle_without("tensorboard_dir", "wandb_project", "mlflow_experiment", "loggers")


@dataclasses.dataclass(frozen=True, kw_only=True)
class FaultConfig(Config, role="run"):
    """Monitoring of losses and gradients, validation of suspicious results, and policy for spikes."""

    rerun_mode: str = flag("validate_results", choices=("validate_results", "report_stats", "disabled"))
    """Compute twice: validate_results steps with a suspicious loss or gradient, to find a cause in data, weights or
    device; report_stats all steps, to report the variation; disabled none."""
    error_injection_rate: int = flag(0, bounds=NOT_NEGATIVE)
    """Inject an error into about one of N iterations, on a rank chosen by the seed; 0 for none."""
    error_injection_type: str = flag(
        "transient_error",
        choices=("correct_result", "transient_error", "persistent_error"),
        needs="error_injection_rate",
    )
    """Error to inject: correct_result suspects a correct result, transient_error corrupts one computation of a rank,
    persistent_error all from then on."""
    result_rejected_tracker_filename: str | None = flag(None, metavar="FILE", idle=idle_with("rerun_mode", "disabled"))
    """File to which the reporting rank appends a line for each examined result."""
    spike_policy: str | None = flag(None, choices=("stop", "skip", "rewind"))
    """Action on a spike or non-finite value of the loss or gradient norm: stop ends the run, skip drops the samples,
    rewind also returns to the newest validated checkpoint. By default only non-finite values end the run."""
    spike_window: int = flag(64, bounds=POSITIVE, needs="spike_policy")
    """Previous iterations to compare with; half of them are required."""
    spike_threshold: float = flag(6.0, bounds=POSITIVE, needs="spike_policy")
    """Standard deviations above the window's mean that make a spike (gradient norms: of the logarithm)."""
    max_spikes: int = flag(
        10,
        deprecated=("--spike-budget",),
        bounds=NOT_NEGATIVE,
        needs="spike_policy",
        idle=idle_with("spike_policy", "stop", because=": the first spike ends the run"),
    )
    """Maximum steps that --spike-policy skips or rewinds per run; one more ends it."""
    iterations_to_skip: tuple[int, ...] = flag((), nargs="+", metavar="N")
    """Skip the samples after N completed iterations, as in Megatron: 7 skips iteration 8 of the log."""
    check_for_spiky_loss: bool = False
    """Examine and report a loss ten times the maximum of the first hundred iterations."""
    check_for_large_grads: bool = False
    """Examine and report a gradient norm ten times the maximum of the first hundred iterations."""
    checkpoint_validation_steps: int = flag(2, deprecated=("--known-to-train-after",), bounds=POSITIVE, needs="save")
    """Consecutive finite iterations that validate a checkpoint; retention keeps the newest validated checkpoint."""
    check_gradient_hash_across_dp_replicas_interval: int | None = flag(None, bounds=POSITIVE)
    """Compare reduced gradients of data-parallel replicas bitwise every N iterations; a difference ends the run."""

    @property
    def watches(self) -> bool:
        return self.spike_policy is not None or self.check_for_spiky_loss or self.check_for_large_grads


@dataclasses.dataclass(frozen=True, kw_only=True)
class RestartConfig(Config, role="run"):
    """In-process restart: replacement of failed ranks in new process groups."""

    inprocess_restart: bool = False
    """Replace a failed rank with a new process, in new process groups; other ranks keep theirs."""
    inprocess_max_iterations: int | None = flag(None, bounds=POSITIVE, needs="inprocess_restart")
    """Maximum number of restarts; unlimited by default."""
    inprocess_monitor_thread_interval: float = flag(1.0, bounds=POSITIVE, needs="inprocess_restart")
    """Seconds between a rank's checks for a restart of other ranks."""
    inprocess_barrier_timeout: float = flag(120.0, bounds=POSITIVE, needs="inprocess_restart")
    """Seconds that ranks wait for the others at the start and at each restart."""
    inprocess_hard_timeout: float = flag(90.0, bounds=POSITIVE, needs="inprocess_restart")
    """Seconds that a rank may take to leave the step of a failed run before it is replaced too."""
    inprocess_empty_cuda_cache: bool = flag(False, needs="inprocess_restart")
    """Release unused CUDA memory at each restart."""
    non_persistent_save_interval: int | None = flag(None, bounds=POSITIVE, needs="inprocess_restart")
    """Iterations between checkpoints in host memory for restarts; each rank keeps two copies."""
    non_persistent_local_ckpt_dir: str = flag("/dev/shm", metavar="DIR", needs="non_persistent_save_interval")
    """Folder on each node for in-memory checkpoints; the launcher deletes its subfolder at the end."""
    replication: bool = flag(False, needs="non_persistent_save_interval")
    """Replicate each copy to another rank, so that a node may be lost."""
    replication_jump: int | None = flag(None, bounds=POSITIVE, needs="replication")
    """Distance in ranks to the replica; by default the ranks per node, or 1 on a single node."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingConfig(Config, role="run"):
    """Batch sizes, length of the run, and conditions for an early exit."""

    micro_batch_size: int = flag(1, bounds=POSITIVE, most=2**24, in_args=True)
    """Samples per forward pass on one data-parallel rank."""
    global_batch_size: int = flag(0, bounds=NOT_NEGATIVE, most=2**31 - 1, in_args=True)
    """Samples per iteration over all ranks; by default micro batch size x data-parallel size."""
    rampup_batch_size: tuple[int, ...] = flag((), nargs="+", metavar="N", in_args=True)
    """Ramp up the global batch size: initial size, increment, samples over which it grows."""
    step_batch_size_schedule: str | None = flag(None, metavar="'TOKENS:SIZE ...'", excludes=("rampup_batch_size",))
    """Global batch size in steps, such as '0:16 2.4B:320': 16 at first, 320 from 2.4 billion tokens on (K, M, B, T)."""
    batch_size_steps: tuple[int, ...] = flag((), cli=False)
    """Each size of --step-batch-size-schedule but the last, and the number of samples at which it ends."""
    train_iters: int = flag(0, bounds=NOT_NEGATIVE, in_args=True, excludes=("train_samples",))
    """Iterations of the whole run."""
    train_samples: int = flag(0, bounds=NOT_NEGATIVE, in_args=True)
    """Samples of the whole run, instead of --train-iters."""
    exit_interval: int | None = flag(None, role="session", bounds=POSITIVE)
    """Exit (and save, with --save) at the first iteration divisible by N."""
    exit_duration_in_mins: int | None = flag(None, role="session", bounds=POSITIVE)
    """Exit (and save, with --save) after N minutes."""
    exit_signal_handler: bool = flag(
        False, idle=idle_with("exit_signal", "SIGTERM", because=": a checkpoint is always saved on it")
    )
    """Save a checkpoint and exit on --exit-signal (always on SIGTERM)."""
    exit_signal: str = flag(
        "SIGTERM", choices=("SIGTERM", "SIGUSR1", "SIGUSR2", "SIGINT"), where=("exit_signal_handler", True)
    )
    """Signal that --exit-signal-handler handles."""
    skip_train: bool = False
    """Do not train: only evaluate, then exit."""
    calculate_per_token_loss: bool = flag(False, in_args=True)
    """Divide gradients by the tokens of the global batch instead of averaging per micro-batch."""
    empty_unused_memory_level: int = flag(0, choices=("0", "1", "2"))
    """Release unused GPU memory: 0 never, 1 after each iteration, 2 also before the optimizer step."""
    check_weight_hash_across_dp_replicas_interval: int | None = flag(None, bounds=POSITIVE)
    """Compare weights of data-parallel replicas bitwise every N iterations; a difference ends the run."""
    compile: bool = False
    """Compile residual additions, norms, activations and rotary embeddings with torch.compile, for training passes;
    takes seconds at the start (logged), changes last bits."""
    cuda_graph_impl: str = flag("none", choices=("none", "local"), not_built=("transformer_engine",))
    """Capture each layer's forward and backward pass as CUDA graphs (local): almost no launch cost, but memory stays in
    use between micro-batches."""
    enable_cuda_graph: bool = False
    """Same as --cuda-graph-impl local."""
    loss_cuda_graph: bool = False
    """Capture the embedding, the final norm, the output layer and the loss too; logits stay allocated."""
    cuda_graph_warmup_steps: int = flag(
        3, bounds=POSITIVE, idle=idle_without("cuda_graph_impl", "optimizer_cuda_graph")
    )
    """Iterations before CUDA graphs are captured; at least 2 with --fp8-recipe delayed."""
    overlap_step_results: bool = False
    """Read the loss and the gradient norm of an iteration after the launch of the next one, so that the device does not
    wait for the host; a run then ends one iteration later after a signal or --exit-duration-in-mins. Needs
    --rerun-mode disabled."""
    manual_gc: bool = False
    """Run Python's garbage collector only at fixed iterations, on all ranks at once."""
    manual_gc_interval: int = flag(0, bounds=NOT_NEGATIVE, needs="manual_gc")
    """Iterations between garbage collections with --manual-gc; 0 for never."""

    def __post_init__(self) -> None:
        """Set the fields that follow from others."""
        if self.enable_cuda_graph:
            object.__setattr__(self, "cuda_graph_impl", "local")

    @property
    def batch_sizes(self) -> BatchSizeRampup:
        """Return the schedule of the global batch size."""
        steps = tuple(zip(self.batch_size_steps[::2], self.batch_size_steps[1::2]))
        return BatchSizeRampup(self.global_batch_size, self.rampup_batch_size, steps)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SchedulerConfig(Config, role="run", in_args=True):
    """Schedules as given on the command line; `RunConfig.schedule_lengths` converts them to samples."""

    lr_decay_style: str = flag(
        "linear",
        choices=("constant", "linear", "cosine", "inverse-square-root", "WSD"),
        registry="learning-rate schedule",
    )
    """Shape of the learning rate after the warm-up."""
    lr_decay_iters: int | None = flag(None, bounds=NOT_NEGATIVE)
    """Iterations of the learning rate decay; by default --train-iters."""
    lr_decay_samples: int | None = flag(None, bounds=NOT_NEGATIVE)
    """Samples of the learning rate decay; by default --train-samples."""
    lr_wsd_decay_style: str = flag(
        "exponential",
        choices=("exponential", "linear", "cosine", "minus_sqrt"),
        registry="learning-rate schedule",
        idle=idle_without("lr_decay_style", value="WSD"),
    )
    """Shape of the annealing phase of the WSD schedule."""
    lr_wsd_decay_iters: int | None = flag(None, bounds=NOT_NEGATIVE, idle=idle_without("lr_decay_style", value="WSD"))
    """Iterations of the annealing phase of the WSD schedule."""
    lr_wsd_decay_samples: int | None = flag(None, bounds=NOT_NEGATIVE, idle=idle_without("lr_decay_style", value="WSD"))
    """Samples of the annealing phase of the WSD schedule."""
    lr_warmup_fraction: float | None = flag(None, bounds=BELOW_ONE)
    """Fraction of the decay length for the warm-up."""
    lr_warmup_iters: int = flag(0, bounds=NOT_NEGATIVE)
    """Iterations of the warm-up."""
    lr_warmup_samples: int = flag(0, bounds=NOT_NEGATIVE)
    """Samples of the warm-up."""
    lr_warmup_init: float = flag(0.0, bounds=NOT_NEGATIVE)
    """Learning rate at the start of the warm-up."""
    start_weight_decay: float | None = flag(None, bounds=NOT_NEGATIVE)
    """Weight decay at the start; by default --weight-decay."""
    end_weight_decay: float | None = flag(None, bounds=NOT_NEGATIVE)
    """Weight decay at the end; by default --weight-decay."""
    weight_decay_incr_style: str = flag("constant", choices=("constant", "linear", "cosine"))
    """Shape of the weight decay over the run."""
    override_opt_param_scheduler: bool = flag(
        False,
        aliases=("--override-opt_param-scheduler",),
        in_args=False,
        excludes=("use_checkpoint_opt_param_scheduler",),
        idle=idle_without("load"),
    )
    """On resume, use the command line's schedule."""
    use_checkpoint_opt_param_scheduler: bool = flag(
        False, aliases=("--use-checkpoint-opt_param-scheduler",), in_args=False, needs="load"
    )
    """On resume, use the checkpoint's schedule."""


DEFAULT_EVAL_ITERS = 100


@dataclasses.dataclass(frozen=True, kw_only=True)
class ValidationConfig(Config, role="run"):
    """Interval and length of evaluations, additional validation sets, and evaluation tasks."""

    eval_interval: int = flag(1000, bounds=NOT_NEGATIVE, in_args=True)
    """Iterations between validations; 0 for never."""
    eval_iters: int | None = flag(None, bounds=NOT_NEGATIVE, in_args=True)
    """Iterations per evaluation; 0 for none. By default 100, or each sample once if the data has fewer."""
    full_validation: bool = False
    """Evaluate every sample of each validation set once, instead of --eval-iters iterations."""
    extra_valid_datalist: tuple[str, ...] = flag((), append=True, metavar="FILE")
    """Additional validation set: a data prefix, or a file with prefixes or weights and prefixes; may be repeated."""
    extra_valid_data_samples: tuple[int, ...] = flag((), append=True, metavar="N")
    """Samples of an additional validation set, the same in every evaluation: one number per --extra-valid-datalist; by
    default all."""
    extra_valid_data_names: tuple[str, ...] = flag((), append=True, metavar="NAME")
    """Name of an additional validation set in reports: one per --extra-valid-datalist; by default the file names."""
    eval_tasks: tuple[str, ...] = flag((), nargs="+", metavar="TASK")
    """Tasks of lm-evaluation-harness, by name or file; requires the package lm-eval."""
    eval_tasks_interval: int | None = flag(None, bounds=POSITIVE, needs="eval_tasks")
    """Iterations between evaluations of the tasks; by default --eval-interval."""
    eval_tasks_include_path: str | None = flag(None, metavar="DIR", needs="eval_tasks")
    """Folder with additional task files."""
    eval_tasks_num_fewshot: int | None = flag(None, bounds=NOT_NEGATIVE, needs="eval_tasks")
    """Few-shot examples; by default the task's own."""
    eval_tasks_limit: int | None = flag(None, bounds=POSITIVE, needs="eval_tasks")
    """Evaluate only the first N questions of each task."""

    @property
    def most_eval_iters(self) -> int:
        """Return the iterations of an evaluation, or the maximum if --eval-iters is not given."""
        return DEFAULT_EVAL_ITERS if self.eval_iters is None else self.eval_iters


@dataclasses.dataclass(frozen=True, kw_only=True)
class InitializationConfig(Config, role="run"):
    """Seed, determinism, and backend and timeouts of the process groups."""

    seed: int = flag(1234, bounds=NOT_NEGATIVE, in_args=True)
    """Seed of initial weights, data order and dropout."""
    deterministic_mode: bool = False
    """Use only deterministic algorithms."""
    disable_bf16_reduced_precision_matmul: bool = False
    """Keep the partial sums of bfloat16 matmuls on CUDA in float32."""
    distributed_backend: str = flag("nccl", choices=("nccl", "gloo"), not_built=("ccl", "mpi", "ucc"))
    """Backend of the process groups; without CUDA, nccl becomes gloo."""
    distributed_timeout_minutes: int = flag(10, bounds=POSITIVE, most=10**8)
    """Timeout of collectives in minutes."""
    nccl_communicator_config_path: str | None = flag(None, metavar="FILE")
    """YAML file with min_ctas, max_ctas, cga_cluster_size and net_name of the NCCL communicators of process groups (tp,
    cp, dp, dp_cp, pp, mp, embd, ep, ep_dp)."""
    hang_timeout_seconds: int | None = flag(None, deprecated=("--hang-report-seconds",), bounds=NOT_NEGATIVE)
    """Report which rank blocks the others, and exit with status 1, after N seconds without progress (or five times the
    longest iteration, if longer); by default 60, or 20 if a process is stopped or gone; 0
    uses --distributed-timeout-minutes instead. Loading, saving and first iterations get more time."""
    local_rank: int | None = flag(None, aliases=("--local_rank",), bounds=NOT_NEGATIVE)
    """Device of this process on its node, unless LOCAL_RANK is set."""
    num_threads: int | None = flag(None, bounds=POSITIVE, most=2**15)
    """CPU threads of each process; by default OMP_NUM_THREADS if it is set, and else chosen from the cores of the node
    that are free."""
    used_threads: int | None = flag(None, cli=False, role="output")
    """Number of CPU threads that the run computes with, which a resumed run uses again."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoggingConfig(Config, role="output"):
    """Interval and contents of the log, and destinations of metrics."""

    log_interval: int = flag(100, bounds=NOT_NEGATIVE)
    """Iterations between log lines; 0, the default of megatron train, chooses them from the length of the run and its
    step time."""
    brief_log: bool = flag(False, cli=False)
    """Print the short log of megatron train instead of Megatron's lines."""
    given_arguments: tuple[str, ...] = flag((), cli=False)
    """Fields that the command line, a file or a preset sets; a short log lists those that are not at their defaults."""
    unused_fusions: tuple[str, ...] = flag((), cli=False)
    """Megatron's arguments of fusions that the command line turns off, although the results do not depend on them."""
    log_arguments: bool = False
    """Under megatron train, print all arguments, not only those that differ from their defaults."""
    log_throughput: bool = False
    """Log the throughput in TFLOP/s per GPU."""
    log_params_norm: bool = False
    """Log the norm of the parameters."""
    log_megatron_lines: bool = False
    """Print Megatron's long start-up lines too: gradient buckets, data sets of a blend, index files, compilation; under
    megatron train, print all of Megatron's lines."""
    log_layer_norms: int | None = flag(None, bounds=POSITIVE)
    """Log norms of each layer's parameters and gradients every N iterations, also to TensorBoard."""
    log_max_attention_logit: bool = False
    """Log the maximum attention logit, which recomputes logits."""
    log_straggler: bool = False
    """Log every --log-interval iterations which rank is slower than its peers, where and since when."""
    straggler_minmax_count: int = flag(1, bounds=POSITIVE, needs="log_straggler")
    """Number of slowest and of fastest ranks to log."""
    log_progress: bool = flag(False, needs="save")
    """Append job starts and checkpoints, with throughputs, to progress.txt in the folder of --save."""
    timing_log_level: int = flag(0, choices=("0", "1", "2"))
    """Detail of timers: 0 the iteration, 1 its main parts, 2 each operation."""
    timing_log_option: str = flag("minmax", choices=("max", "minmax", "all"))
    """Times over the ranks to log: maximum, minimum and maximum, or all."""
    tensorboard_dir: str | None = flag(None, metavar="DIR")
    """Folder of the TensorBoard files."""
    tensorboard_log_interval: int = flag(1, bounds=POSITIVE, idle=_WITHOUT_LOGGERS)
    """Iterations between TensorBoard points."""
    tensorboard_queue_size: int = flag(1000, bounds=POSITIVE, idle=idle_without("tensorboard_dir"))
    """Maximum number of pending TensorBoard events."""
    log_timers_to_tensorboard: bool = flag(False, idle=_WITHOUT_LOGGERS)
    """Write timers to TensorBoard."""
    log_batch_size_to_tensorboard: bool = flag(False, idle=_WITHOUT_LOGGERS)
    """Write the global batch size to TensorBoard."""
    log_learning_rate_to_tensorboard: bool = flag(
        True, negative="--no-log-learning-rate-to-tensorboard", idle=_WITHOUT_LOGGERS
    )
    """Write the learning rate to TensorBoard. Off: do not write the learning rate to TensorBoard."""
    log_loss_scale_to_tensorboard: bool = flag(
        True, negative="--no-log-loss-scale-to-tensorboard", idle=_WITHOUT_LOGGERS
    )
    """Write the loss scale to TensorBoard. Off: do not write the loss scale to TensorBoard."""
    log_validation_ppl_to_tensorboard: bool = flag(False, idle=_WITHOUT_LOGGERS)
    """Write the validation perplexity to TensorBoard."""
    log_memory_to_tensorboard: bool = flag(False, idle=_WITHOUT_LOGGERS)
    """Write memory statistics to TensorBoard."""
    log_memory_interval: int | None = flag(None, bounds=POSITIVE)
    """Log memory every N iterations; by default once, with the first report."""
    log_device_memory_used: bool = False
    """Log the memory that all processes use on the device (on CPU: of the host)."""
    log_world_size_to_tensorboard: bool = flag(False, idle=_WITHOUT_LOGGERS)
    """Write the world size to TensorBoard."""
    wandb_project: str = flag("", metavar="NAME")
    """Weights & Biases project for the TensorBoard metrics, the configuration and texts."""
    wandb_exp_name: str = flag("", metavar="NAME", idle=idle_without("wandb_project"))
    """Name of the W&B run; by default the folder name of --save."""
    wandb_save_dir: str = flag("", metavar="DIR", idle=idle_without("wandb_project"))
    """Folder of the W&B run's files; by default wandb in --save or the current folder."""
    wandb_entity: str = flag("", metavar="NAME", idle=idle_without("wandb_project"))
    """User or team that owns the project; by default your default entity."""
    mlflow_experiment: str = flag("", metavar="NAME")
    """MLflow experiment for the TensorBoard metrics, the flags and texts."""
    mlflow_run_name: str = flag("", metavar="NAME", idle=idle_without("mlflow_experiment"))
    """Name of the MLflow run; by default the folder name of --save."""
    mlflow_tracking_uri: str = flag("", metavar="URI", idle=idle_without("mlflow_experiment"))
    """MLflow server, database or folder; by default MLFLOW_TRACKING_URI, or mlflow.db here."""
    metrics_jsonl: str | None = flag(None, metavar="FILE")
    """File for one JSON object per iteration; by default metrics.jsonl in the folder of --save."""
    profile: bool = False
    """Profile with NVTX ranges and start/stop calls for nsys, or with --use-pytorch-profiler."""
    profile_step_start: int = flag(10, bounds=NOT_NEGATIVE, where=("profile", True))
    """Profile the iterations after this one."""
    profile_step_end: int = flag(12, bounds=POSITIVE, where=("profile", True))
    """Last iteration to profile."""
    profile_ranks: tuple[int, ...] = flag((0,), nargs="+")
    """Ranks of --profile and --record-memory-history."""
    use_pytorch_profiler: bool = flag(False, where=("profile", True))
    """Profile with torch's profiler (always on CPU): a Chrome trace per rank in the folder of --tensorboard-dir or
    --save."""
    generate_interval: int | None = flag(None, deprecated=("--sample-interval",), bounds=POSITIVE)
    """Continue --generate-prompts every N iterations, in the log, the metrics file and TensorBoard."""
    generate_prompts: tuple[str, ...] = flag(
        (), deprecated=("--sample-prompts",), nargs="+", metavar="TEXT", needs="generate_interval"
    )
    """Prompts, or one file with a prompt per line."""
    sample_tokens: int = flag(32, bounds=POSITIVE, needs="generate_interval")
    """Maximum number of generated tokens per prompt."""
    callbacks: tuple[str, ...] = flag((), nargs="+", metavar="NAME", registry="callback", role="run")
    """Callbacks that the script registered, in the order of their calls."""
    loggers: tuple[str, ...] = flag((), nargs="+", metavar="NAME", registry="logger")
    """Loggers that the script registered, which get the same metrics as TensorBoard."""
    record_schedule: str | None = flag(None, metavar="FILE")
    """File for the measured pipeline schedule of the second iteration (tools/visualize_pipeline.py --recorded)."""
    record_memory_history: bool = False
    """Record all CUDA memory allocations, written to --memory-snapshot-path at the end of the run, even on errors."""
    memory_snapshot_path: str = flag("snapshot.pickle", metavar="FILE", where=("record_memory_history", True))
    """File of the memory history for pytorch.org/memory_viz; NAME-rankN for several ranks."""
    print_config: bool = False
    """Print the resolved configuration as commented TOML for --config, and exit."""
    explain: bool = False
    """Print what the configuration does, needs and costs, and exit; also accepts flags of tools/explain.py:
    --world-size N, --gpu TYPE, --json, --html FILE."""


NATIVE_FORMAT = "safetensors"
"""The name of the native format on the command line."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Config, role="output"):
    """Saving, retention and loading of checkpoints."""

    save: str | None = flag(None, metavar="DIR")
    """Folder for checkpoints to write, also s3://, gs:// or az://."""
    save_interval: int | None = flag(None, bounds=POSITIVE, idle=idle_without("save"))
    """Iterations between checkpoints; by default only the end of the run is saved."""
    no_save_optim: bool = flag(False, idle=idle_without("save"))
    """Do not save the optimizer state."""
    no_save_rng: bool = flag(False, idle=idle_without("save"))
    """Do not save the RNG state."""
    load: str | None = flag(None, metavar="DIR")
    """Folder of the checkpoint to load, also s3://, gs:// or az://."""
    pretrained_checkpoint: str | None = flag(None, metavar="DIR")
    """Folder of the initial weights while --load holds no checkpoint; same as --load DIR --finetune."""
    no_load_optim: bool = flag(False, idle=idle_without("load"))
    """Do not load the optimizer state."""
    no_load_rng: bool = flag(False, idle=idle_without("load"))
    """Do not load the RNG state."""
    finetune: bool = flag(False, needs="load")
    """Load only the weights and start at iteration 0."""
    ckpt_step: int | None = flag(None, bounds=NOT_NEGATIVE, needs="load")
    """Iteration to load instead of the newest."""
    ckpt_format: str = flag(
        NATIVE_FORMAT, choices=(NATIVE_FORMAT, "torch_dist", "torch"), not_built=("zarr", "torch_dcp", "fsdp_dtensor")
    )
    """Format to write: safetensors is native, torch_dist and torch are Megatron's."""
    async_save: bool = flag(False, needs="save")
    """Write checkpoints in the background."""
    preemption_grace_seconds: int | None = flag(
        None, deprecated=("--exit-warning-seconds",), bounds=POSITIVE, needs="save"
    )
    """Seconds from SIGTERM or --exit-signal to the kill: warn if a checkpoint takes longer, and omit an evaluation
    before it."""
    keep_last: int | None = flag(None, bounds=POSITIVE, needs="save")
    """Number of newest checkpoints to keep; by default all."""
    keep_every: int | None = flag(None, bounds=POSITIVE, needs="save", idle=idle_without("keep_last"))
    """Also keep checkpoints whose iteration is a multiple of this number."""
    save_retain_interval: int | None = flag(None, bounds=POSITIVE, needs="save", excludes=("keep_last", "keep_every"))
    """Keep the newest checkpoint and multiples of N: --keep-last 1 --keep-every N."""
    use_checkpoint_args: bool = flag(False, needs="load")
    """Take model shape, sequence length, precision and tokenizer from the checkpoint unless set by flags."""
    verify_checkpoint: bool = flag(True, negative="--no-verify-checkpoint", idle=idle_without("load"))
    """Verify checksums while loading. Off: do not verify checksums while loading."""
    exit_on_missing_checkpoint: bool = flag(False, needs="load")
    """Exit with an error if --load holds no checkpoint."""
    dist_ckpt_strictness: str = flag(
        "raise_all",
        choices=(
            "raise_all",
            "raise_unexpected",
            "log_all",
            "log_unexpected",
            "ignore_all",
            "assume_ok_unexpected",
            "return_all",
            "return_unexpected",
        ),
        idle=idle_without("load"),
    )
    """Missing (Megatron: unexpected) and additional tensors in a checkpoint: raise_all rejects both, raise_unexpected
    and assume_ok_unexpected missing ones. The others list missing tensors and keep their initial values; log_all and
    return_all also list additional ones."""

    @property
    def local_save(self) -> str | None:
        """Return the folder of --save if it is on a file system: metrics and other reports are written there too."""
        return None if self.save is None or "://" in self.save else self.save

    def resumed(self, iteration: int | None = None) -> CheckpointConfig:
        """Return the configuration for resuming from the run's own checkpoints: the newest one, or an iteration's.

        Optimizer and RNG state are loaded unless the run does not save them.
        """
        return dataclasses.replace(
            self,
            load=self.save,
            pretrained_checkpoint=None,
            ckpt_step=iteration,
            finetune=False,
            no_load_optim=self.no_load_optim and self.no_save_optim,
            no_load_rng=self.no_load_rng and self.no_save_rng,
        )

    @property
    def num_newest_kept(self) -> int | None:
        """Return the number of newest checkpoints to keep; None is all."""
        return self.keep_last if self.save_retain_interval is None else 1

    @property
    def kept_multiple(self) -> int | None:
        """Return the number whose multiples are kept in addition to the newest checkpoints, or None."""
        return self.keep_every if self.save_retain_interval is None else self.save_retain_interval


RAW_DATASETS = ("LLama-SFT-Raw", "LLama-SFT", "JSON-SFT")
"""Pai-Megatron-Patch's names of conversations in jsonl."""
_SFT_TOKENIZER = "SFTTokenizer"
INDEXED_DATASETS = ("MMAP", "LLama-Pretrain-Idxmap", "LLama-SFT-Idxmap")


@dataclasses.dataclass(frozen=True, kw_only=True)
class FineTuningConfig(Config, role="run"):
    """Supervised fine-tuning, and conversion of conversations to samples."""

    sft: bool = flag(False, in_args=True)
    """Supervised fine-tuning on the answers of conversations, in jsonl, a JSON array or from tools/preprocess_data.py
    --sft, with the mean loss over all answer tokens of a global batch (as --calculate-per-token-loss)."""
    train_mode: str = flag("pretrain", choices=("pretrain", "finetune"))
    """Pai-Megatron-Patch's flag for --sft (finetune)."""
    dataset: str | None = flag(
        None,
        choices=(*INDEXED_DATASETS, *RAW_DATASETS),
        not_built=("LLama-Pretrain-Raw", "ChatGLM-Pretrain-Raw"),
        registry="data set",
    )
    """Data set that a script registered, or kind of data (Pai-Megatron-Patch): the SFT kinds without Idxmap are jsonl,
    one conversation per sample unless --reset-position-ids is given; the others are token files."""
    chat_template: str | None = flag(None, metavar="FILE|NAME", where=("sft", True))
    """Chat template for jsonl: a Jinja file, a template name of the tokenizer, chatml, plain (contents, with an
    end-of-document token after answers) or identity (contents); by default the tokenizer's own, else chatml."""
    sft_tokenizer_prompt_format: str = flag(
        "default",
        choices=("default", "identity"),
        not_built=("nemotron-h-aligned", "nemotron-nano-v2"),
        where=("sft", True),
    )
    """Megatron's --chat-template: the tokenizer's own (default), or identity."""
    sft_packing: bool = flag(True, negative="--no-sft-packing", where=("sft", True))
    """Pack conversations into samples, with separate positions and attention. Off: make each conversation a padded
    sample."""
    max_padding_length: int | None = flag(None, bounds=POSITIVE, most=2**31 - 1, where=("sft", True))
    """Maximum tokens of a conversation; by default --seq-length."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FillInTheMiddleConfig(Config, role="run"):
    """Fill-in-the-middle: the fraction of rearranged documents, and the special tokens."""

    fim_data: bool = False
    """Same as --fim-rate 0.5."""
    fim_rate: float = flag(0.0, bounds=FRACTION)
    """Fraction of documents rearranged for fill-in-the-middle, with the middle last."""
    fim_spm_rate: float = flag(0.5, bounds=FRACTION, needs="fim_rate")
    """Fraction of these documents with the suffix first, instead of the prefix."""
    fim_split_sample: str | None = flag(None, metavar="TOKEN", needs="fim_rate")
    """Token that splits documents into fragments, which are rearranged separately."""
    fim_fragment_rate: float = flag(0.5, bounds=FRACTION, needs="fim_split_sample")
    """Fraction of a document's fragments to rearrange."""
    fim_no_prefix: str | None = flag(None, metavar="TEXT", needs="fim_rate")
    """Do not rearrange documents that start with this text."""
    fim_prefix_token: str = flag("<fim_prefix>", metavar="TOKEN", needs="fim_rate")
    """Token that starts a prefix."""
    fim_middle_token: str = flag("<fim_middle>", metavar="TOKEN", needs="fim_rate")
    """Token that starts the middle part of a fill-in-the-middle (FIM) sample."""
    fim_suffix_token: str = flag("<fim_suffix>", metavar="TOKEN", needs="fim_rate")
    """Token that starts a suffix."""
    fim_pad_token: str | None = flag(None, metavar="TOKEN", needs="fim_rate")
    """Token that pads a shortened sample, ignored by the loss; by default token 0."""
    fim_eod_token: str | None = flag(None, metavar="TOKEN", needs="fim_rate")
    """Token that ends a document; by default the tokenizer's own."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig(FineTuningConfig, FillInTheMiddleConfig, role="run"):
    """Data paths, split, and handling of document boundaries."""

    seq_length: int = flag(0, role="recipe", bounds=NOT_NEGATIVE, most=2**31 - 1, in_args=True)
    """Tokens per sample; by default --max-position-embeddings."""
    data_path: tuple[str, ...] = flag((), nargs="+", metavar="[WEIGHT] PREFIX", in_args=True)
    """Data prefixes, or alternating weights and prefixes, also s3://, gs:// or az://; divided by --split."""
    train_data_path: tuple[str, ...] = flag((), nargs="+", metavar="[WEIGHT] PREFIX")
    """Training data; excludes --data-path and --split."""
    valid_data_path: tuple[str, ...] = flag((), nargs="+", metavar="[WEIGHT] PREFIX")
    """Validation data; excludes --data-path and --split."""
    test_data_path: tuple[str, ...] = flag((), nargs="+", metavar="[WEIGHT] PREFIX")
    """Test data; excludes --data-path and --split."""
    train_data: tuple[str, ...] = flag((), nargs="+", metavar="FILE")
    """Text, JSON lines or JSON arrays to train on, tokenized on first use with the run's tokenizer; divided by --split,
    unless --valid-data or --test-data is given."""
    valid_data: tuple[str, ...] = flag((), nargs="+", metavar="FILE", needs="train_data")
    """Text or JSON to validate on, tokenized on first use."""
    test_data: tuple[str, ...] = flag((), nargs="+", metavar="FILE", needs="train_data")
    """Text or JSON to test on, tokenized on first use."""
    text_key: str = flag("text", metavar="KEY", needs="train_data")
    """Key of the text in JSON of --train-data, --valid-data and --test-data."""
    data_args_path: str | None = flag(None, metavar="FILE")
    """File with the value of --data-path."""
    per_split_data_args_path: str | None = flag(None, metavar="FILE")
    """JSON file with lists train, valid and test, each as in --train-data-path."""
    split: str | None = flag(None, in_args=True)
    """Weights of training, validation and test set; by default 969,30,1."""
    mock_data: bool = False
    """Train on synthetic data."""
    data_cache_path: str | None = flag(None, metavar="DIR")
    """Folder of the index cache, also s3://, gs:// or az://; by default next to the data."""
    mmap_bin_files: bool = flag(True, negative="--no-mmap-bin-files")
    """Memory-map the token files. Off: read token files without memory mapping."""
    num_workers: int = flag(2, bounds=NOT_NEGATIVE, most=2**16)
    """Threads that prefetch micro-batches, on the first rank of a tensor-parallel group; 0 for none. More than one may
    read a custom data set concurrently."""
    dataloader_type: str = flag("single", choices=("single", "cyclic", "external"), in_args=True)
    """Order of samples: the data set's, a new permutation per epoch (cyclic), or the caller's (external)."""
    reset_position_ids: bool = flag(False, in_args=True)
    """Restart positions after each end-of-document token."""
    reset_attention_mask: bool = flag(False, in_args=True)
    """Do not attend across end-of-document tokens."""
    eod_mask_loss: bool = flag(False, in_args=True)
    """Exclude end-of-document tokens from the loss."""

    def __post_init__(self) -> None:
        """Set the fields that follow from others."""
        if self.train_mode == "finetune":
            object.__setattr__(self, "sft", True)
        if self.fim_data and not self.fim_rate:
            object.__setattr__(self, "fim_rate", 0.5)

    @property
    def has_padding(self) -> bool:
        """Return whether training samples may contain padding (SFT, external data)."""
        return self.sft or self.dataloader_type == "external" or self.is_registered

    @property
    def is_registered(self) -> bool:
        """Return whether --dataset names a data set that a script registered."""
        return self.dataset is not None and self.dataset not in (*INDEXED_DATASETS, *RAW_DATASETS)

    @property
    def has_data_per_split(self) -> bool:
        """Return whether the training, validation and test sets have separate data paths."""
        prefixes = self.train_data_path or self.valid_data_path or self.test_data_path
        return bool(prefixes or self.per_split_data_args_path or self.valid_data or self.test_data)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenizerConfig(Config, role="run", in_args=True):
    """Type, files and vocabulary size of the tokenizer."""

    tokenizer_type: str = flag(
        "GPT2BPETokenizer",
        choices=(*TOKENIZER_TYPES, _SFT_TOKENIZER),
        not_built=(
            "BertWordPieceLowerCase",
            "BertWordPieceCase",
            "MultimodalTokenizer",
            "NullMultimodalTokenizer",
        ),
    )
    """Type of tokenizer; SFTTokenizer is the same as HuggingFaceTokenizer with --sft."""
    vocab_file: str | None = flag(None, metavar="FILE")
    """Vocabulary file."""
    merge_file: str | None = flag(None, metavar="FILE")
    """File of the BPE merges."""
    patch_tokenizer_type: str | None = flag(
        None, choices=PATCH_TOKENIZER_TYPES, not_built=CODE_TOKENIZER_TYPES, in_args=False
    )
    """Type of tokenizer of Pai-Megatron-Patch, with its vocabulary size: that in the folder of --load, unless
    --tokenizer-type is given."""
    tokenizer_model: str | None = flag(None, metavar="PATH")
    """Model file, or folder with tokenizer.json."""
    vocab_size: int | None = flag(None, bounds=POSITIVE, most=2**31 - 2)
    """Vocabulary size for NullTokenizer; otherwise it must equal the tokenizer's."""
    vocab_extra_ids: int = flag(0, bounds=NOT_NEGATIVE, most=2**24)
    """Additional ids in the vocabulary."""
    extra_vocab_size: int = flag(0, bounds=NOT_NEGATIVE, most=2**24, in_args=False)
    """Rows beyond the tokenizer's vocabulary; with --patch-tokenizer-type, beyond the vocabulary without added
    tokens."""
    padded_vocab_size: int | None = flag(
        None, bounds=POSITIVE, most=2**31 - 1, in_args=False, excludes=("extra_vocab_size",)
    )
    """Total number of rows, instead of --extra-vocab-size."""
    tiktoken_pattern: str | None = flag(None, choices=("v1", "v2"))
    """Pattern that splits text before tiktoken merges it."""
    tiktoken_num_special_tokens: int = flag(1000, bounds=NOT_NEGATIVE, most=2**20)
    """Ids that tiktoken reserves for special tokens."""
    tiktoken_special_tokens: tuple[str, ...] = flag((), nargs="+", metavar="TOKEN", in_args=False)
    """Special tokens of tiktoken's vocabulary."""

    def __post_init__(self) -> None:
        """Resolve the alias SFTTokenizer."""
        if self.tokenizer_type == _SFT_TOKENIZER:
            object.__setattr__(self, "tokenizer_type", "HuggingFaceTokenizer")


PER_SPLIT_KEYS = ("train", "valid", "test")
RESERVED_NAMES = ("train", "validation", "valid", "test")
"""Names of the evaluations without --extra-valid-data-names."""

_DATALIST = "--extra-valid-datalist"


def read_data_list(path: str, flag: str) -> tuple[str, ...]:
    """Read a list file of weights and prefixes, separated by any white space.

    Raises:
        ConfigurationError: if the file cannot be read or is empty.
    """
    words = tuple(_read_text(path, flag).split())
    if not words:
        raise ConfigurationError(
            f"{flag} {path}: the file is empty; write data prefixes, or pairs of weight and prefix"
        )
    return words


def read_per_split_lists(path: str, flag: str) -> dict[str, tuple[str, ...]]:
    """Read a JSON object with the lists train, valid and test.

    Raises:
        ConfigurationError: if the file is not such an object.
    """
    try:
        lists = parse_json(_read_text(path, flag))
    except ValueError as error:
        raise ConfigurationError(f"{flag} {path}: not JSON ({error})") from error
    expected = "an object with the lists train, valid and test is expected"
    if not isinstance(lists, dict) or not set(lists) <= set(PER_SPLIT_KEYS):
        raise ConfigurationError(f"{flag} {path}: {expected}")
    if not all(isinstance(words, list) or words is None for words in lists.values()):
        raise ConfigurationError(f"{flag} {path}: {expected}")
    return {key: tuple(str(word) for word in lists.get(key) or ()) for key in PER_SPLIT_KEYS}


def extra_validation_sets(validation: ValidationConfig) -> tuple[ValidationSet, ...]:
    """Return the validation sets of ``--extra-valid-datalist``.

    A value may be the prefix of a data set instead of a list file. A set without a name has the name of its file.
    Without a number of samples, or with ``--full-validation``, a set is evaluated completely.

    Raises:
        ConfigurationError: a list is unusable, or the flags do not match.
    """
    lists = validation.extra_valid_datalist
    samples, names = validation.extra_valid_data_samples, validation.extra_valid_data_names
    problems = list(_find_misfits(lists, samples, names))
    if problems:
        raise ConfigurationError(problems)
    names = names or tuple(Path(path).name for path in lists)
    numbers = [None] * len(lists) if validation.full_validation or not samples else list(samples)
    sets = []
    for path, name, number in zip(lists, names, numbers):
        is_prefix = Path(path).suffix in (".jsonl", ".json") or (
            not os.path.exists(path) and os.path.exists(f"{path}.idx")
        )
        try:
            words = (path,) if is_prefix else read_data_list(path, _DATALIST)
        except ConfigurationError as error:
            problems.extend(error.problems)
            continue
        try:
            sets.append(ValidationSet(name, parse_blend(words), number))
        except ConfigurationError as error:
            problems.extend(f"{_DATALIST} {path}: {problem}" for problem in error.problems)
    if problems:
        raise ConfigurationError(problems)
    return tuple(sets)


def _find_misfits(lists: tuple[str, ...], samples: tuple[int, ...], names: tuple[str, ...]) -> Iterator[str]:
    for flag_name, values in (("--extra-valid-data-samples", samples), ("--extra-valid-data-names", names)):
        if values and len(values) != len(lists):
            yield (
                f"{flag_name} is passed {len(values)} times, but {_DATALIST} {len(lists)} times; pass both once per "
                f"validation set, or omit {flag_name}"
            )
    for number in samples:
        if number < 1:
            yield f"--extra-valid-data-samples {number}: use 1 or more, or omit the validation set"
    called = names or tuple(Path(path).name for path in lists)
    for name in dict.fromkeys(called):
        if name in RESERVED_NAMES or not name:
            yield f"--extra-valid-data-names {name!r} is already in use; use a different name for the validation set"
        elif called.count(name) > 1:
            yield f"two validation sets have the name {name}; set different names with --extra-valid-data-names"


def _read_text(path: str, flag: str) -> str:
    try:
        # The path may be a pipe: the shell's <(...).
        with open(path, "rb") as file:
            content = file.read(MAX_TEXT_BYTES + 1)
        if len(content) > MAX_TEXT_BYTES:
            raise ConfigurationError(
                f"{flag} {path}: it has more than {MAX_TEXT_BYTES} bytes; pass a list of data sets"
            )
        return content.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{flag} {path}: the file cannot be read ({error})") from error


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceConfig(Config, role="output"):
    """Preset and configuration files, whose values apply to flags that the command line does not set."""

    model_preset: str | None = flag(None, metavar="NAME")
    """Preset of the model shape; --config and flags override it."""
    config: tuple[str, ...] = flag((), append=True, metavar="FILE")
    """TOML or YAML file of flag values, as --print-config writes, or its URL; may be repeated: later files override
    earlier ones, the command line overrides all."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScheduleLengths:
    """Lengths of the schedules in samples (one scheduler step is one sample).

    A warm-up given as a fraction of the decay need not be a whole number of samples.
    """

    lr_warmup_steps: float
    lr_decay_steps: int
    wsd_decay_steps: int | None
    weight_decay_steps: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """All parts of a run's configuration, and the world size for which it is resolved."""

    model: GPTConfig
    training: TrainingConfig
    optimizer: OptimizerConfig
    scheduler: SchedulerConfig
    ddp: DistributedDataParallelConfig
    data: DataConfig
    tokenizer: TokenizerConfig
    validation: ValidationConfig
    checkpoint: CheckpointConfig
    logging: LoggingConfig
    initialization: InitializationConfig
    faults: FaultConfig = dataclasses.field(default_factory=FaultConfig)
    restart: RestartConfig = dataclasses.field(default_factory=RestartConfig)
    sources: SourceConfig = dataclasses.field(default_factory=SourceConfig)
    extra: ExtraArguments = dataclasses.field(default_factory=ExtraArguments)
    """Arguments that the script added with ``extra_args``: ``--my-flag`` is ``config.extra.my_flag``."""
    world_size: int = 1

    @property
    def parallel_sizes(self) -> ParallelSizes:
        """Return the rank grid; it is smaller than the world size if the model-parallel size does not divide it."""
        return self.model.parallel_sizes.in_world(self.world_size)

    @property
    def data_parallel_size(self) -> int:
        return self.parallel_sizes.dp

    @property
    def stage_layout(self) -> StageLayout:
        """Return which layers are on which pipeline stage.

        Raises:
            ConfigurationError: the layers cannot be split as configured; does not happen after validation.
        """
        return plan_stage_layout(self.model, self.model.num_layers, self.model.pipeline_model_parallel_layout)

    @property
    def pipeline_schedule(self) -> str:
        """Return the name of the pipeline schedule of training."""
        pp = self.model.pipeline_model_parallel_size
        return self.model.pipeline_schedule or default_schedule(pp, self.stage_layout.num_chunks)

    @property
    def train_samples(self) -> int:
        """Return the number of samples of the whole run."""
        if self.training.train_samples:
            return self.training.train_samples
        return self.training.batch_sizes.samples_of_iterations(self.training.train_iters)

    @property
    def train_iters(self) -> int:
        """Return the number of iterations of the whole run, batch-size ramp-up included."""
        if self.training.train_iters:
            return self.training.train_iters
        return self.training.batch_sizes.iterations_of_samples(self.training.train_samples)

    @property
    def schedule_lengths(self) -> ScheduleLengths:
        """Return the lengths of the learning-rate and weight-decay schedules in samples.

        As in Megatron, lengths in iterations count full global batches, even during the ramp-up.
        """
        schedule, batch = self.scheduler, self.training.global_batch_size
        wsd_decay: int | None
        if self.training.train_samples:
            total = self.training.train_samples
            decay = schedule.lr_decay_samples or total
            warmup: float = schedule.lr_warmup_samples
            wsd_decay = schedule.lr_wsd_decay_samples
        else:
            total = self.training.train_iters * batch
            decay = (schedule.lr_decay_iters or self.training.train_iters) * batch
            warmup = schedule.lr_warmup_iters * batch
            wsd_decay = None if schedule.lr_wsd_decay_iters is None else schedule.lr_wsd_decay_iters * batch
        if schedule.lr_warmup_fraction is not None:
            warmup = schedule.lr_warmup_fraction * decay
        return ScheduleLengths(
            lr_warmup_steps=warmup, lr_decay_steps=decay, wsd_decay_steps=wsd_decay, weight_decay_steps=total
        )

    @property
    def metrics_jsonl(self) -> str | None:
        """Return the metrics file, or None without --metrics-jsonl and --save."""
        save = self.checkpoint.local_save
        if self.logging.metrics_jsonl is not None or save is None:
            return self.logging.metrics_jsonl
        return f"{save}/metrics.jsonl"

    @property
    def profile_folder(self) -> str | None:
        """Return the folder for traces of torch's profiler, or None if no folder is given."""
        return self.logging.tensorboard_dir or self.checkpoint.local_save

    def flags(self, option: str | None = None) -> Iterator[tuple[FieldSpec, Any]]:
        """Yield every field with a flag, and its value; with ``option``, only fields for which this option is set."""
        parts = vars(self)
        for part, spec in command_line_fields(option):
            yield spec, field_value(parts[part], spec.name)

    def flag(self, name: str) -> tuple[FieldSpec, Any] | None:
        """Return the field of this name and its value, or None if the field has no flag."""
        part, spec = _fields_by_name(_parts_key()).get(name, ("", None))
        return None if spec is None else (spec, field_value(vars(self)[part], name))

    def to_dict(self) -> dict[str, Any]:
        return config_to_dict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RunConfig:
        """Rebuild the configuration from the output of `to_dict`; raise ConfigurationError for anything else."""
        extra = recorded_arguments(values.get("extra", {}))
        config = config_from_dict(cls, {name: value for name, value in values.items() if name != "extra"})
        return dataclasses.replace(config, extra=extra)


def config_parts() -> dict[str, type]:
    """Return the configuration classes by the name of the part."""
    hints = typing.get_type_hints(RunConfig) | {"extra": extra_class()}
    return {name: hint for name, hint in hints.items() if hint is not int}


def command_line_fields(option: str | None = None) -> tuple[tuple[str, FieldSpec], ...]:
    """Return (part, field) for every field with a flag; with ``option``, only fields for which this option is set."""
    return _fields_of(_parts_key(), option)


def _parts_key() -> tuple[tuple[str, Any], ...]:
    """Return what determines `config_parts`, which takes longer."""
    return (*RunConfig.__annotations__.items(), ("extra", extra_class()))


@functools.cache
def _fields_by_name(key: tuple[tuple[str, Any], ...]) -> dict[str, tuple[str, FieldSpec]]:
    return {spec.name: (part, spec) for part, spec in _fields_of(key, None)}


@functools.cache
def _fields_of(key: tuple[tuple[str, Any], ...], option: str | None) -> tuple[tuple[str, FieldSpec], ...]:
    """Return the result of `command_line_fields` for these parts of `RunConfig`."""
    return tuple(
        (part, spec)
        for part, config_class in config_parts().items()
        for spec in field_specs(config_class)
        if spec.options.cli and (option is None or getattr(spec.options, option))
    )
