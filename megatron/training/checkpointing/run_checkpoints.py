"""Tie a run's model, optimizer, schedule and random streams to its checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.state_dict import RunTensors
from megatron.core.tokenizers.tokenizer import Tokenizer
from megatron.core.tokenizers.tokenizer_record import record_tokenizer
from megatron.training.checkpointing.checkpoint_loading import load_checkpoint
from megatron.training.checkpointing.checkpoint_saver import CheckpointSaver
from megatron.training.checkpointing.checkpoint_saving import CommonState
from megatron.training.config.run_config import RunConfig
from megatron.training.model_setup import TrainingParts
from megatron.training.process.initialize import Runtime
from megatron.training.train_state import TrainState


@dataclass(eq=False)
class RunCheckpoints:
    """Save a run and pick it up again, as ``--save`` and ``--load`` say; ``saver`` is None without ``--save``.

    What a loaded checkpoint says of the Hugging Face folder that its model came from is passed on to those saved.
    """

    config: RunConfig
    runtime: Runtime
    parts: TrainingParts
    tokenizer: Tokenizer
    saver: CheckpointSaver | None
    log: Callable[[str], None]
    model_record: Mapping[str, Any] | None = field(default=None, init=False)

    def resume(self) -> TrainState:
        """Fill everything from the newest checkpoint of ``--load`` and return where the run stands.

        A run without ``--load``, or whose folder holds no checkpoint yet, stands at its beginning.
        """
        if self.config.checkpoint.load is None:
            return TrainState()
        loaded = load_checkpoint(
            self.config.checkpoint.load,
            self._tensors(),
            self.runtime.state,
            self.config.checkpoint,
            self.config.to_dict(),
            self.log,
        )
        if loaded is None:
            return TrainState()
        self.model_record = loaded.model_record
        if not loaded.optimizer_loaded:
            self.parts.optimizer.reload_main_params()
            if not self.config.checkpoint.finetune:
                self.log(
                    f"--no-load-optim: training goes on at iteration {loaded.progress.iteration}, with new optimizer "
                    "state and the learning-rate schedule from its beginning"
                )
        if loaded.rng is not None:
            self.runtime.rng.resume(loaded.rng, loaded.progress.iteration)
        if loaded.scheduler is not None:
            changes = self.parts.scheduler.load_state_dict(
                loaded.scheduler,
                override=self.config.scheduler.override_opt_param_scheduler,
                use_checkpoint=self.config.scheduler.use_checkpoint_opt_param_scheduler,
            )
            for change in changes:
                self.log(f"schedule changed since the checkpoint: {change}")
        return TrainState.from_progress(loaded.progress)

    def save(self, train_state: TrainState) -> None:
        """Save a checkpoint of this moment, or with ``--async-save`` begin to; nothing without ``--save``."""
        if self.saver is None:
            return
        common = CommonState(
            progress=train_state.freeze(),
            config=self.config.to_dict(),
            scheduler=self.parts.scheduler.state_dict(),
            model_record=self.model_record,
            write_tokenizer=self._write_tokenizer,
        )
        self.saver.save(self._tensors(), common)

    def poll(self) -> None:
        """Let a save that is under way go on, without waiting for it; to be called between iterations."""
        if self.saver is not None:
            self.saver.poll()

    def finish(self) -> None:
        """Wait until the last save is complete or given up."""
        if self.saver is not None:
            self.saver.finish()

    def check_last(self) -> None:
        """Refuse to call a run done whose last checkpoint could not be written.

        Raises:
            TrainingError: the newest save failed, on every rank alike.
        """
        if self.saver is not None:
            self.saver.check_last()

    def _tensors(self) -> RunTensors:
        for chunk in self.parts.ddp_chunks:
            chunk.finish_param_gather()
        return RunTensors(models=self.parts.chunks, optimizer=self.parts.optimizer, rng=self.runtime.rng.state_dict())

    def _write_tokenizer(self, folder: Path) -> None:
        # The record makes the folder of this name itself.
        record_tokenizer(self.tokenizer, folder.parent)
