"""Garbage collection at chosen iterations, and unused device memory given back."""

from __future__ import annotations

import gc

from megatron.training.callbacks.callback import Callback, TrainingRun, is_due


class GarbageCollection(Callback):
    """Collect garbage every ``--manual-gc-interval`` iterations instead of whenever Python does."""

    def on_begin(self, run: TrainingRun) -> None:
        gc.disable()
        gc.collect()

    def after_iteration(self, run: TrainingRun) -> None:
        if is_due(run.config.training.manual_gc_interval, run.train_state.iteration):
            gc.collect()


class UnusedMemory(Callback):
    """Give unused device memory back after each iteration."""

    def after_iteration(self, run: TrainingRun) -> None:
        run.runtime.device.empty_cache()
