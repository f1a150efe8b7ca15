"""Where checkpoints are, and what is saved and loaded."""

from __future__ import annotations

import dataclasses

from megatron.core.config_base import NOT_NEGATIVE, POSITIVE, Config, flag
from megatron.core.object_store import is_url

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
