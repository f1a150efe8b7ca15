"""Samples for verification: a function of the sample's number alone, whole, packed from documents, or mostly masked."""

from __future__ import annotations

import numpy as np

from megatron.core.datasets.gpt_dataset import GPTSample, make_sample
from megatron.core.datasets.gpt_dataset_config import GPTDatasetConfig

_NUM_SAMPLES = 1 << 16
_DOCUMENT_ENDS = 0.15


class SyntheticDataset:
    """Give samples of random tokens, cut into documents; training reads them in order.

    ``uneven`` samples count between one token and all of them; every third counts only its first two, so that a
    context-parallel rank can be left with nothing.
    """

    def __init__(self, dataset_config: GPTDatasetConfig, uneven: bool) -> None:
        self._config = dataset_config
        self._uneven = uneven

    def __len__(self) -> int:
        return _NUM_SAMPLES

    def source_of(self, index: int) -> str:
        """Say that the data is made up; ``index`` does not matter here."""
        return "random tokens"

    def __getitem__(self, index: int) -> GPTSample:
        config = self._config
        assert config.vocab_size is not None
        assert config.eod_token_id is not None
        generator = np.random.default_rng((config.random_seed, index))
        length = config.sequence_length
        text = generator.integers(0, config.vocab_size, length + 1)
        text[generator.random(length + 1) < _DOCUMENT_ENDS] = config.eod_token_id
        mask = np.ones(length, np.float32)
        if self._uneven:
            mask[2 if index % 3 == 0 else int(generator.integers(1, length + 1)) :] = 0.0
        return make_sample(text, length + 1, config, np.arange(length), mask)
