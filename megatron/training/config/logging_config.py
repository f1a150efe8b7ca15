"""What a run reports, and where."""

from __future__ import annotations

import dataclasses

from megatron.core.config_base import NOT_NEGATIVE, POSITIVE, Config, flag


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
