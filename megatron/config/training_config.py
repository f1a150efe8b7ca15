"""Training configuration: schedule, batches, evaluation, logging and checkpoints."""

from __future__ import annotations

import dataclasses

from megatron.core.batch_size_rampup import BatchSizeRampup
from megatron.core.config_base import BELOW_ONE, NOT_NEGATIVE, POSITIVE, Config, flag
from megatron.core.object_store import is_url


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingConfig(Config, role="run"):
    """Hold batch sizes, the run's length and the reasons to end it early."""

    micro_batch_size: int = flag(1, bounds=POSITIVE, most=2**24, in_args=True)
    """Number of samples of one forward pass on one data-parallel rank."""
    global_batch_size: int = flag(0, bounds=NOT_NEGATIVE, most=2**31 - 1, in_args=True)
    """Number of samples of one iteration over all ranks; by default micro batch size x data-parallel
    size."""
    rampup_batch_size: tuple[int, ...] = flag((), nargs="+", metavar="N", in_args=True)
    """Ramp the global batch size up: first size, increment, samples over which it grows."""
    step_batch_size_schedule: str | None = flag(None, metavar="'TOKENS:SIZE ...'", excludes=("rampup_batch_size",))
    """Give the global batch size in steps, such as '0:16 2.4B:320': 16 at first, 320 from 2.4 billion tokens on (K, M,
    B and T are thousands to trillions)."""
    batch_size_steps: tuple[int, ...] = flag((), cli=False)
    """What --step-batch-size-schedule comes to: each size but the last, and the samples at which it ends."""
    train_iters: int = flag(0, bounds=NOT_NEGATIVE, in_args=True, excludes=("train_samples",))
    """Number of iterations of the whole run."""
    train_samples: int = flag(0, bounds=NOT_NEGATIVE, in_args=True)
    """Number of samples of the whole run, in place of --train-iters."""
    exit_interval: int | None = flag(None, bounds=POSITIVE)
    """Stop, and save where --save is given, after the first iteration that this number divides."""
    exit_duration_in_mins: int | None = flag(None, bounds=POSITIVE)
    """Stop, and save where --save is given, once the run has lasted this many minutes."""
    exit_signal_handler: bool = False
    """Save a checkpoint and end on a signal (SIGTERM is always handled so)."""
    exit_signal: str = flag(
        "SIGTERM", choices=("SIGTERM", "SIGUSR1", "SIGUSR2", "SIGINT"), where=("exit_signal_handler", True)
    )
    """Signal that --exit-signal-handler waits for."""
    skip_train: bool = False
    """Do not train: only evaluate, then end."""
    calculate_per_token_loss: bool = flag(False, in_args=True)
    """Divide gradients by the number of tokens of the global batch in place of each micro-batch's own
    mean."""
    empty_unused_memory_level: int = flag(0, choices=("0", "1", "2"))
    """When unused GPU memory is given back: 0 never, 1 after each iteration, 2 also between its backward pass and the
    optimizer's step."""
    check_weight_hash_across_dp_replicas_interval: int | None = flag(None, bounds=POSITIVE)
    """Compare the weights of the data-parallel copies, bit for bit, after each of this number of iterations, and end
    the run where they differ."""
    compile: bool = False
    """Compile norms and activations by torch.compile: it takes some seconds at the start, and last bits differ. One
    line says how long it took."""
    cuda_graph_impl: str = flag("none", choices=("none", "local"), not_built=("transformer_engine",))
    """Record each layer's forward and backward pass as CUDA graphs (local), which cost the host next to nothing to
    launch, at the price of memory that stays in use between micro-batches."""
    enable_cuda_graph: bool = False
    """Same as --cuda-graph-impl local."""
    cuda_graph_warmup_steps: int = flag(3, bounds=POSITIVE, where=("cuda_graph_impl", "local"))
    """Iterations without graphs before they are recorded, at least 2 with --fp8-recipe delayed."""
    manual_gc: bool = False
    """Run Python's garbage collector only at fixed iterations, so that all ranks stop together."""
    manual_gc_interval: int = flag(0, bounds=NOT_NEGATIVE, needs="manual_gc")
    """With --manual-gc: iterations from one collection to the next; 0 for never."""

    def __post_init__(self) -> None:
        """Fill in the value that follows from another."""
        if self.enable_cuda_graph:
            object.__setattr__(self, "cuda_graph_impl", "local")

    @property
    def batch_sizes(self) -> BatchSizeRampup:
        """Return the global batch size over the run."""
        steps = tuple(zip(self.batch_size_steps[::2], self.batch_size_steps[1::2]))
        return BatchSizeRampup(self.global_batch_size, self.rampup_batch_size, steps)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SchedulerConfig(Config, role="run", in_args=True):
    """Hold the schedule as it was given; `RunConfig.schedule_lengths` turns it into samples."""

    lr_decay_style: str = flag("linear", choices=("constant", "linear", "cosine", "inverse-square-root", "WSD"))
    """Shape of the learning rate after the warm-up."""
    lr_decay_iters: int | None = flag(None, bounds=NOT_NEGATIVE)
    """Iterations over which the learning rate falls; by default --train-iters."""
    lr_decay_samples: int | None = flag(None, bounds=NOT_NEGATIVE)
    """Samples over which the learning rate falls; by default --train-samples."""
    lr_wsd_decay_style: str = flag("exponential", choices=("exponential", "linear", "cosine", "minus_sqrt"))
    """Shape of the last part of the WSD schedule."""
    lr_wsd_decay_iters: int | None = flag(None, bounds=NOT_NEGATIVE)
    """Iterations of the last part of the WSD schedule."""
    lr_wsd_decay_samples: int | None = flag(None, bounds=NOT_NEGATIVE)
    """Samples of the last part of the WSD schedule."""
    lr_warmup_fraction: float | None = flag(None, bounds=BELOW_ONE)
    """Share of the decay's length over which the learning rate rises."""
    lr_warmup_iters: int = flag(0, bounds=NOT_NEGATIVE)
    """Iterations over which the learning rate rises."""
    lr_warmup_samples: int = flag(0, bounds=NOT_NEGATIVE)
    """Samples over which the learning rate rises."""
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
    )
    """On resume, take the schedule from the command line where it differs from the checkpoint's."""
    use_checkpoint_opt_param_scheduler: bool = flag(
        False, aliases=("--use-checkpoint-opt_param-scheduler",), in_args=False, needs="load"
    )
    """On resume, take the schedule from the checkpoint and ignore the command line's."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ValidationConfig(Config, role="run"):
    """Hold the evaluation's interval, its length and its further data sets."""

    eval_interval: int = flag(1000, bounds=NOT_NEGATIVE, in_args=True)
    """Iterations from one evaluation on the validation set to the next; 0 for never."""
    eval_iters: int = flag(100, bounds=NOT_NEGATIVE, in_args=True)
    """Number of iterations of one evaluation; 0 for none."""
    full_validation: bool = False
    """Evaluate on all of each validation set, every sample once, in place of --eval-iters iterations."""
    extra_valid_datalist: tuple[str, ...] = flag((), append=True, metavar="FILE")
    """File with a list of data prefixes, or of weights and prefixes, that makes one more validation set (or a prefix
    itself); may be repeated."""
    extra_valid_data_samples: tuple[int, ...] = flag((), append=True, metavar="N")
    """Number of samples of one more validation set, the same in every evaluation; one for each
    --extra-valid-datalist, or none: all of each set."""
    extra_valid_data_names: tuple[str, ...] = flag((), append=True, metavar="NAME")
    """Name under which one more validation set is reported; one for each --extra-valid-datalist, or none: the names
    of the files."""
    eval_tasks: tuple[str, ...] = flag((), nargs="+", metavar="TASK")
    """Tasks of lm-evaluation-harness, by name or file, that the model is asked at intervals; needs the package
    lm-eval."""
    eval_tasks_interval: int | None = flag(None, bounds=POSITIVE, needs="eval_tasks")
    """Iterations from one time to the next; by default those of --eval-interval."""
    eval_tasks_include_path: str | None = flag(None, metavar="DIR", needs="eval_tasks")
    """Folder with further task files."""
    eval_tasks_num_fewshot: int | None = flag(None, bounds=NOT_NEGATIVE, needs="eval_tasks")
    """Solved examples before each question; by default as the task says."""
    eval_tasks_limit: int | None = flag(None, bounds=POSITIVE, needs="eval_tasks")
    """Ask the first N questions of each task only."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class InitializationConfig(Config, role="run"):
    """Hold the seed and the process groups' backend."""

    seed: int = flag(1234, bounds=NOT_NEGATIVE, in_args=True)
    """Seed of initial weights, data order and dropout."""
    deterministic_mode: bool = False
    """Use only algorithms that give the same bits again."""
    disable_bf16_reduced_precision_matmul: bool = False
    """Keep sums within bfloat16 matrix products in float32 to the end, on CUDA, where partial sums may be rounded."""
    distributed_backend: str = flag("nccl", choices=("nccl", "gloo"), not_built=("ccl", "mpi", "ucc"))
    """Backend of the process groups; nccl becomes gloo where there is no CUDA."""
    distributed_timeout_minutes: int = flag(10, bounds=POSITIVE, most=10**8)
    """Minutes after which a collective that does not end is an error."""
    hang_report_seconds: int | None = flag(None, bounds=NOT_NEGATIVE)
    """Report who holds up the others, and end the run with status 1, where nothing has got done for this many seconds,
    or for five times the longest iteration where that is more; by default 60 (20 where a process is stopped or gone);
    0 to wait for --distributed-timeout-minutes. Loading, saving and first iterations may take longer."""
    local_rank: int | None = flag(None, aliases=("--local_rank",), bounds=NOT_NEGATIVE)
    """Device of this process on its node; the environment's LOCAL_RANK is used where it is set."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoggingConfig(Config, role="output"):
    """Hold the log's interval and contents, and where metrics go."""

    log_interval: int = flag(100, bounds=POSITIVE)
    """Iterations from one log line to the next."""
    log_arguments: bool = False
    """Print all arguments on a terminal too, where a summary stands for them; files and pipes always get them all."""
    log_throughput: bool = False
    """Log the floating-point throughput of each GPU."""
    log_params_norm: bool = False
    """Log the norm of the parameters."""
    log_megatron_lines: bool = False
    """Print Megatron's long start-up lines too: the parameters of each gradient bucket, each data set of a blend, the
    files of its index, and those of compilers, which have nothing to do here."""
    log_layer_norms: int | None = flag(None, bounds=POSITIVE)
    """Log the norms of each layer's parameters and gradients every N iterations, and write them to TensorBoard."""
    log_max_attention_logit: bool = False
    """Log the largest attention logit of the iterations that have a line, which computes their logits once more."""
    log_straggler: bool = False
    """Log every --log-interval iterations which rank takes longer than its like, at what part of an iteration, and
    since when."""
    straggler_minmax_count: int = flag(1, bounds=POSITIVE, needs="log_straggler")
    """How many of the slowest and of the fastest ranks the line of --log-straggler shows."""
    log_progress: bool = flag(False, needs="save")
    """Append each start of a job and each checkpoint, with throughputs, to progress.txt in the folder of --save."""
    timing_log_level: int = flag(0, choices=("0", "1", "2"))
    """How much is timed: 0 the iteration, 1 its large parts, 2 each operation."""
    timing_log_option: str = flag("minmax", choices=("max", "minmax", "all"))
    """Times over the ranks: the longest, shortest and longest, or all."""
    tensorboard_dir: str | None = flag(None, metavar="DIR")
    """Folder of the TensorBoard files."""
    tensorboard_log_interval: int = flag(1, bounds=POSITIVE)
    """Iterations from one TensorBoard point to the next."""
    tensorboard_queue_size: int = flag(1000, bounds=POSITIVE)
    """Number of TensorBoard events that may wait before they are written."""
    log_timers_to_tensorboard: bool = False
    """Write the times to TensorBoard."""
    log_batch_size_to_tensorboard: bool = False
    """Write the global batch size to TensorBoard."""
    log_learning_rate_to_tensorboard: bool = flag(True, negative="--no-log-learning-rate-to-tensorboard")
    """Write the learning rate to TensorBoard. Off: do not write the learning rate to TensorBoard."""
    log_loss_scale_to_tensorboard: bool = flag(True, negative="--no-log-loss-scale-to-tensorboard")
    """Write the loss scale to TensorBoard. Off: do not write the loss scale to TensorBoard."""
    log_validation_ppl_to_tensorboard: bool = False
    """Write the perplexity of evaluations to TensorBoard."""
    log_memory_to_tensorboard: bool = False
    """Write memory figures to TensorBoard."""
    log_memory_interval: int | None = flag(None, bounds=POSITIVE)
    """Print the memory line every N iterations too, which otherwise comes once, with the first report."""
    log_device_memory_used: bool = False
    """Add to the memory line what is used of the device by all processes: of the machine's memory, on a CPU."""
    log_world_size_to_tensorboard: bool = False
    """Write the world size to TensorBoard."""
    wandb_project: str = flag("", metavar="NAME")
    """Project of Weights & Biases that receives the figures that TensorBoard would, the configuration and texts."""
    wandb_exp_name: str = flag("", metavar="NAME")
    """Name of the run there; by default that of the folder of --save."""
    wandb_save_dir: str = flag("", metavar="DIR")
    """Folder of the run's own files; by default wandb in the folder of --save, or else here."""
    wandb_entity: str = flag("", metavar="NAME")
    """User or team that the project belongs to."""
    mlflow_experiment: str = flag("", metavar="NAME")
    """Experiment of MLflow that receives the figures that TensorBoard would, the flags and texts."""
    mlflow_run_name: str = flag("", metavar="NAME")
    """Name of the run there; by default that of the folder of --save."""
    mlflow_tracking_uri: str = flag("", metavar="URI")
    """Server, data base or folder of MLflow; by default what MLFLOW_TRACKING_URI says, or else mlflow.db here."""
    metrics_jsonl: str | None = flag(None, metavar="FILE")
    """File that receives one JSON object an iteration; by default metrics.jsonl in the folder of --save."""
    profile: bool = False
    """Profile some iterations: NVTX ranges and the start and stop that nsys waits for, or --use-pytorch-profiler."""
    profile_step_start: int = flag(10, bounds=NOT_NEGATIVE, where=("profile", True))
    """Profile the iterations after this one."""
    profile_step_end: int = flag(12, bounds=POSITIVE, where=("profile", True))
    """Last iteration that is profiled."""
    profile_ranks: tuple[int, ...] = flag((0,), nargs="+")
    """Ranks that --profile and --record-memory-history are about."""
    use_pytorch_profiler: bool = flag(False, where=("profile", True))
    """Profile with torch's profiler, which writes a Chrome trace for each rank into the folder of --tensorboard-dir, or
    else of --save. On a CPU --profile always does."""
    sample_interval: int | None = flag(None, bounds=POSITIVE)
    """Let the model continue --sample-prompts every N iterations, into the log, the metrics file and TensorBoard."""
    sample_prompts: tuple[str, ...] = flag((), nargs="+", metavar="TEXT", needs="sample_interval")
    """Texts to continue, or one file with a text a line."""
    sample_tokens: int = flag(32, bounds=POSITIVE, needs="sample_interval")
    """Most tokens that follow each text."""
    record_schedule: str | None = flag(None, metavar="FILE")
    """File of when each pass of the second iteration that this job trains ran on each pipeline rank, which
    tools/visualize_pipeline.py --recorded draws."""
    record_memory_history: bool = False
    """Record every allocation of CUDA memory, and write --memory-snapshot-path when the run ends, in an error too."""
    memory_snapshot_path: str = flag("snapshot.pickle", metavar="FILE", where=("record_memory_history", True))
    """File of the memory history, which pytorch.org/memory_viz draws; where several ranks write, NAME-rankN."""
    print_config: bool = False
    """Print the resolved configuration as a file that --config reads back, in TOML with comments, and end."""
    explain: bool = False
    """Print what the configuration does, needs and costs, and end; the flags of tools/explain.py say where it would run
    (--world-size N, --gpu TYPE) and what is written (--json, --html FILE)."""


NATIVE_FORMAT = "safetensors"
"""The name of the native format on the command line."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Config, role="output"):
    """Hold what saving, retention and loading need."""

    save: str | None = flag(None, metavar="DIR")
    """Folder that checkpoints are written to, also s3://, gs:// or az://."""
    save_interval: int | None = flag(None, bounds=POSITIVE)
    """Iterations from one checkpoint to the next; without it only the end of the run is saved."""
    no_save_optim: bool = False
    """Do not save the optimizer's state."""
    no_save_rng: bool = False
    """Do not save the state of the random number generators."""
    load: str | None = flag(None, metavar="DIR")
    """Folder that a checkpoint is read from, also s3://, gs:// or az://."""
    pretrained_checkpoint: str | None = flag(None, metavar="DIR")
    """Folder whose weights a run begins with while the folder of --load holds no checkpoint: --load DIR --finetune."""
    no_load_optim: bool = False
    """Do not load the optimizer's state."""
    no_load_rng: bool = False
    """Do not load the state of the random number generators."""
    finetune: bool = flag(False, needs="load")
    """Load the weights alone and begin at iteration 0."""
    ckpt_step: int | None = flag(None, bounds=NOT_NEGATIVE, needs="load")
    """Iteration to load, in place of the newest."""
    ckpt_format: str = flag(
        NATIVE_FORMAT, choices=(NATIVE_FORMAT, "torch_dist", "torch"), not_built=("zarr", "torch_dcp", "fsdp_dtensor")
    )
    """Format of the checkpoints written; safetensors is the native one, torch_dist and torch are Megatron's."""
    async_save: bool = flag(False, needs="save")
    """Write checkpoints while training goes on."""
    exit_warning_seconds: int | None = flag(None, bounds=POSITIVE, needs="save")
    """Seconds from SIGTERM, or --exit-signal, to the kill that follows: the run says so when a checkpoint does not fit,
    and leaves out an evaluation that would come before it."""
    keep_last: int | None = flag(None, bounds=POSITIVE, needs="save")
    """Number of newest checkpoints that are kept; by default all."""
    keep_every: int | None = flag(None, bounds=POSITIVE, needs="save")
    """Keep each checkpoint whose iteration is a multiple of this number, whatever --keep-last says."""
    save_retain_interval: int | None = flag(None, bounds=POSITIVE, needs="save", excludes=("keep_last", "keep_every"))
    """Keep the newest checkpoint, and each whose iteration is a multiple of this number: --keep-last 1 --keep-every
    N."""
    use_checkpoint_args: bool = flag(False, needs="load")
    """Take what shapes the model, the sequence length, the precision and the tokenizer from the checkpoint where no
    flag gives it."""
    verify_checkpoint: bool = flag(True, negative="--no-verify-checkpoint")
    """Compare checksums while loading. Off: load without comparing checksums."""
    exit_on_missing_checkpoint: bool = flag(False, needs="load")
    """End with an error when --load holds no checkpoint, in place of starting from random weights."""
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
    )
    """What tensors mean that the checkpoint lacks (to Megatron, unexpected ones) or has too many. raise_all: both are
    refused. raise_unexpected, assume_ok_unexpected: what it lacks is refused. All others leave what it lacks at its
    initial value and list it; log_all and return_all also list what it has too many."""

    @property
    def local_save(self) -> str | None:
        """Return the folder of --save where it is on a file system: what a run reports goes there too."""
        return None if self.save is None or is_url(self.save) else self.save

    def resumed(self, iteration: int | None = None) -> CheckpointConfig:
        """Return the configuration that loads what the run itself saves: the newest checkpoint, or an iteration's.

        What the run began without is loaded too, unless it does not save it either.
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
        """Return how many of the newest checkpoints are kept; None is all."""
        return self.keep_last if self.save_retain_interval is None else 1

    @property
    def kept_multiple(self) -> int | None:
        """Return the number of whose multiples checkpoints are kept beside the newest ones, if there is one."""
        return self.keep_every if self.save_retain_interval is None else self.save_retain_interval
