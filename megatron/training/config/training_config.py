"""How a run trains: seed and processes, batches and length, schedule, evaluation."""

from __future__ import annotations

import dataclasses

from megatron.core.batch_size_rampup import BatchSizeRampup
from megatron.core.config_base import BELOW_ONE, NOT_NEGATIVE, POSITIVE, Config, flag


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
