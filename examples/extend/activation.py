"""Train with an activation of your own: ``megatron train --script activation.py --activation-func mish FLAGS``.

Mish: Misra 2019, https://arxiv.org/abs/1908.08681. ``mish_glu`` multiplies half of the channels by the Mish of the
other half, as SwiGLU does with SiLU.
"""

import torch
import torch.nn.functional as F

from megatron.training import pretrain, register_activation


def mish(x: torch.Tensor) -> torch.Tensor:
    return x * torch.tanh(F.softplus(x))


register_activation("mish", mish)
register_activation("mish_glu", mish, gated=True)

if __name__ == "__main__":
    pretrain()
