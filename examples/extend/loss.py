"""Train with a loss of your own: ``megatron train --script loss.py --loss label_smoothing FLAGS``.

A function returns the loss of every token, ``[s, b]``. The logits are sharded over the tensor-parallel ranks.
Label smoothing: Szegedy et al. 2016, https://arxiv.org/abs/1512.00567. Focal loss: Lin et al. 2017,
https://arxiv.org/abs/1708.02002. z-loss: Chowdhery et al. 2022, https://arxiv.org/abs/2204.02311.
"""

import torch

from megatron.core.tensor_parallel import LossInputs
from megatron.training import pretrain, register_loss

SMOOTHING, GAMMA, COEFFICIENT = 0.1, 2.0, 1e-4


def label_smoothing(inputs: LossInputs) -> torch.Tensor:
    mean_logit = inputs.sum_over_vocabulary(inputs.logits) / inputs.vocab_size
    uniform = inputs.log_normalizers() - mean_logit
    return (1 - SMOOTHING) * inputs.cross_entropy() + SMOOTHING * uniform


def focal(inputs: LossInputs) -> torch.Tensor:
    cross_entropy = inputs.cross_entropy()
    return (1 - torch.exp(-cross_entropy)) ** GAMMA * cross_entropy


def z_loss(inputs: LossInputs) -> torch.Tensor:
    return inputs.cross_entropy() + COEFFICIENT * inputs.log_normalizers().square()


register_loss("label_smoothing", label_smoothing)
register_loss("focal", focal)
register_loss("z_loss", z_loss)

if __name__ == "__main__":
    pretrain()
