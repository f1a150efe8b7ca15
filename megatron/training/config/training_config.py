"""How long and with which batches a run trains."""

from __future__ import annotations

import dataclasses

from megatron.core.batch_size_rampup import BatchSizeRampup
from megatron.core.config_base import flag


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Hold batch sizes, the run's length and the reasons to end it early."""

    micro_batch_size: int
    """Number of samples of one forward pass on one data-parallel rank."""
    global_batch_size: int = 0
    """Number of samples of one iteration over all ranks; by default micro batch size x data-parallel
    size."""
    rampup_batch_size: tuple[int, ...] = flag((), nargs="+", metavar="N")
    """Ramp the global batch size up: first size, increment, samples over which it grows."""
    train_iters: int = 0
    """Number of iterations of the whole run."""
    train_samples: int = 0
    """Number of samples of the whole run, in place of --train-iters."""
    exit_interval: int | None = None
    """End the program when the iteration is a multiple of this number."""
    exit_duration_in_mins: int | None = None
    """End the program after this many minutes."""
    exit_signal_handler: bool = False
    """Save a checkpoint and end on a signal (SIGTERM is always handled so)."""
    exit_signal: str = flag("SIGTERM", choices=("SIGTERM", "SIGUSR1", "SIGUSR2", "SIGINT"))
    """Signal that --exit-signal-handler waits for."""
    skip_train: bool = False
    """Do not train: only evaluate, then end."""
    calculate_per_token_loss: bool = False
    """Divide gradients by the number of tokens of the global batch in place of each micro-batch's own
    mean."""
    empty_unused_memory_level: int = 0
    """Give unused GPU memory back: 0 never, 1 after an iteration, 2 also before the optimizer."""
    check_weight_hash_across_dp_replicas_interval: int | None = None
    """Compare the weights of the data-parallel copies, bit for bit, after each of this number of iterations, and end
    the run where they differ."""
    manual_gc: bool = False
    """Run Python's garbage collector only at fixed iterations, so that all ranks stop together."""
    manual_gc_interval: int = 0
    """With --manual-gc: iterations from one collection to the next; 0 for never."""

    @property
    def batch_sizes(self) -> BatchSizeRampup:
        """Return the global batch size over the run."""
        return BatchSizeRampup(self.global_batch_size, self.rampup_batch_size)
