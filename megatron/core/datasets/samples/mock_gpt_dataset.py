"""Generate mock samples, for runs without data."""

from __future__ import annotations

import hashlib

import numpy as np

from megatron.core.datasets.samples.gpt_dataset import DataUsage, GPTSample, make_sample
from megatron.core.datasets.samples.gpt_dataset_config import GPTDatasetConfig
from megatron.core.errors import DataError


class MockGPTDataset:
    """Make up samples that a model can learn: each token is followed by the same one, wherever it occurs.

    The sequences walk along one cycle through part of the vocabulary. Where the tokenizer has an end-of-document token,
    documents of a length that depends on the sample end with it. A sample is a function of (seed, split, index).
    """

    MAX_CYCLE = 1024

    def __init__(self, num_samples: int | None, split_name: str, config: GPTDatasetConfig) -> None:
        self.config = config
        self.split_name = split_name
        self._num_samples = 1024 if num_samples is None else num_samples
        vocab_size = self.MAX_CYCLE if config.vocab_size is None else config.vocab_size
        words = np.arange(min(vocab_size, self.MAX_CYCLE), dtype=np.int64)
        self._cycle = np.random.RandomState(config.random_seed).permutation(words[words != config.eod_token_id])
        if len(self._cycle) == 0:
            raise DataError(f"a vocabulary of {vocab_size} ids leaves no tokens to make data of; give --vocab-size 2")
        self.usage = DataUsage(f"{split_name} data (mock)", num_samples, self._num_samples, 1)

    def __len__(self) -> int:
        return self._num_samples

    def source_of(self, index: int) -> str:
        """Name the source; ``index`` does not matter here."""
        return "mock data"

    def __getitem__(self, index: int) -> GPTSample:
        if not 0 <= index < self._num_samples:
            raise IndexError(f"sample {index} of {self._num_samples}")
        key = f"{self.config.random_seed}/{self.split_name}/{index}".encode()
        start = int.from_bytes(hashlib.blake2b(key, digest_size=4).digest(), "little")
        steps = np.arange(self.config.sequence_length + 1, dtype=np.int64)
        text = self._cycle[(start + steps) % len(self._cycle)]
        if self.config.eod_token_id is not None:
            document_length = 16 + start % 49
            text[(steps + 1) % document_length == 0] = self.config.eod_token_id
        return make_sample(text, len(text), self.config, steps[:-1], np.ones(len(text) - 1, np.float32))
