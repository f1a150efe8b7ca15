"""The history of the data in a checkpoint: what was read of each data set."""

from __future__ import annotations

from megatron.training.callbacks.callback import Callback, TrainingRun


class DataHistory(Callback):
    """Write into ``run.train_state`` what was read of each data set; data that is not read from files has none."""

    def before_save(self, run: TrainingRun) -> None:
        state = run.train_state
        if run.counter is not None:
            state.train_data = run.counter.history_at(state.consumed_train_samples).to_dict()
