"""Train with an optimizer of your own, or with one of a library.

``megatron train --script examples/extend/optimizer.py --optimizer signum --optimizer-args momentum=0.95`` trains with
the class below (Bernstein et al. 2018, https://arxiv.org/abs/1802.04434), and ``--optimizer adafactor`` with torch's
Adafactor.
"""

from typing import Any

import torch

from megatron.training import pretrain, register_optimizer


class Signum(torch.optim.Optimizer):
    def __init__(self, params: Any, lr: float = 1e-3, momentum: float = 0.9, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(parameter)
                state["momentum"].lerp_(parameter.grad, 1 - group["momentum"])
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.sub_(state["momentum"].sign(), alpha=group["lr"])


register_optimizer("signum", Signum)
register_optimizer("adafactor", torch.optim.Adafactor)

if __name__ == "__main__":
    pretrain()
