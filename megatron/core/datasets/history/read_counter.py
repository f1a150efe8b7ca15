"""Count what a run has read of each data set."""

from __future__ import annotations

import numpy as np

from megatron.core.datasets.history.data_history import DataHistory
from megatron.core.datasets.history.sample_keys import data_set_numbers
from megatron.core.datasets.samples.data_samplers import SampleOrder
from megatron.core.datasets.samples.gpt_dataset import SampleDataset

_CHUNK = 1 << 20


class ReadCounter:
    """Keep the counts of a history up to date with the consumed samples of a run that reads ``dataset`` in ``order``.

    The dataset is that of the history's last phase; counts are carried on, so that each sample is looked at once.
    """

    def __init__(self, history: DataHistory, dataset: SampleDataset, order: SampleOrder) -> None:
        self._history = history
        self._dataset = dataset
        self._order = order
        phase = history.phases[-1]
        self._numbers = [number for number, weight in zip(phase.data_sets, phase.weights) if weight > 0]
        self._counts = np.array([record.consumed_samples for record in history.data_sets], np.int64)
        self._position = history.consumed_samples

    def history_at(self, consumed_samples: int) -> DataHistory:
        """Return the history of a run that has consumed so many samples, no fewer than when last asked."""
        assert consumed_samples >= self._position, "a run does not go back"
        for begin in range(self._position, consumed_samples, _CHUNK):
            ids = self._order.sample_ids(begin, min(_CHUNK, consumed_samples - begin))
            taken = np.bincount(data_set_numbers(self._dataset, ids), minlength=len(self._numbers))
            self._counts[self._numbers] += taken
        self._position = consumed_samples
        return self._history.with_consumed(consumed_samples, self._counts.tolist())
