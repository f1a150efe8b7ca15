"""Train on a data set of your own, here sums of two numbers: ``megatron train --script FILE --dataset sums``.

Add ``--dataloader-type cyclic`` to shuffle the samples in every epoch, and ``--tokenizer-type NullTokenizer
--vocab-size 64`` for a vocabulary of plain numbers.
"""

from typing import Any

import torch

from megatron.config import RunConfig
from megatron.core.tokenizers import Tokenizer
from megatron.training import pretrain, register_dataset


class Sums(torch.utils.data.Dataset[dict[str, Any]]):
    """Samples ``a, b, (a + b) mod 31, …``, of which only the sums count in the loss."""

    def __init__(self, length: int, first: int, last: int) -> None:
        self.length, self.first, self.last = length, first, last

    def __len__(self) -> int:
        return self.last - self.first

    def __getitem__(self, index: int) -> dict[str, Any]:
        numbers = torch.arange(self.length // 3 + 1) * (self.first + index + 1)
        a, b = numbers % 31, (numbers + index) % 29
        tokens = torch.stack((a, b, (a + b) % 31), dim=1).flatten()[: self.length + 1]
        return {"tokens": tokens, "loss_mask": torch.arange(len(tokens)) % 3 == 2}


def sums(config: RunConfig, tokenizer: Tokenizer) -> tuple[Sums, Sums, None]:
    """Return training, validation and test data."""
    length = config.data.seq_length
    return Sums(length, 0, 900), Sums(length, 900, 960), None


register_dataset("sums", sums)

if __name__ == "__main__":
    pretrain()
