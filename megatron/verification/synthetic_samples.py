"""Samples for verification: a function of the sample's number alone, whole, packed from documents, or mostly masked."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from megatron.core.datasets.batch import Batch, collate
from megatron.core.datasets.data_samplers import MicroBatchSampler, SampleOrder, sample_ids_hash
from megatron.core.datasets.gpt_dataset import GPTSample, make_sample
from megatron.core.datasets.gpt_dataset_config import GPTDatasetConfig
from megatron.core.process_group import Group

_NUM_SAMPLES = 1 << 16
_DOCUMENT_ENDS = 0.15


class SyntheticSource:
    """Give micro-batches of random tokens, cut into documents, in the order in which training reads samples.

    ``uneven`` samples count between one token and all of them; every third counts only its first two, so that a
    context-parallel rank can be left with nothing.
    """

    def __init__(self, dataset_config: GPTDatasetConfig, uneven: bool, micro_batch_size: int, dp: Group) -> None:
        self._config = dataset_config
        self._uneven = uneven
        self._order = SampleOrder("single", _NUM_SAMPLES)
        self._sampler = iter(MicroBatchSampler(self._order, 0, micro_batch_size, dp.rank, dp.size))

    def next(self) -> Batch:
        """Return the next micro-batch."""
        return collate([self._sample(sample_id) for sample_id in next(self._sampler)])

    def sample_ids(self, consumed_samples: int, count: int) -> NDArray[np.int64]:
        """Return the ids of the ``count`` samples after ``consumed_samples``."""
        return self._order.sample_ids(consumed_samples, count)

    def sample_ids_hash(self, sample_ids: NDArray[np.int64]) -> str:
        """Hash the numbers of the samples, of which they are a function."""
        return sample_ids_hash(sample_ids)

    def _sample(self, sample_id: int) -> GPTSample:
        config = self._config
        assert config.vocab_size is not None
        assert config.eod_token_id is not None
        generator = np.random.default_rng((config.random_seed, sample_id))
        length = config.sequence_length
        text = generator.integers(0, config.vocab_size, length + 1)
        text[generator.random(length + 1) < _DOCUMENT_ENDS] = config.eod_token_id
        mask = np.ones(length, np.float32)
        if self._uneven:
            mask[2 if sample_id % 3 == 0 else int(generator.integers(1, length + 1)) :] = 0.0
        return make_sample(text, length + 1, config, np.arange(length), mask)
