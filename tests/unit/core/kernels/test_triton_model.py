"""A whole model whose layers and loss run on Triton, interpreted on the CPU, against the same model in torch."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from megatron.core.process_group import single_rank_group
from tests.harness.toy_model import make_model
from tests.unit.core.kernels.interpreted import close, cpu_runs_on_triton, interpret, needs_triton

pytestmark = needs_triton
LLAMA = {
    "swiglu": True,
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "num_query_groups": 2,
    "add_bias_linear": False,
}
NEOX = {"position_embedding_type": "rope", "rotary_percent": 0.4, "apply_layernorm_1p": True, "geglu": True}


def check_model(settings: dict[str, Any]) -> None:
    from megatron.core.kernels.triton_programs import cross_entropy, gated_activation, residual_norm, rotary

    launches: Counter[str] = Counter()
    for module, attribute, name in [
        (rotary, "rotate_program", "rotate"),
        (gated_activation, "forward_program", "gate"),
        (gated_activation, "backward_program", "gate gradient"),
        (residual_norm, "forward_program", "norm"),
        (residual_norm, "backward_program", "norm gradient"),
        (cross_entropy, "normalizer_program", "normalizer"),
        (cross_entropy, "gradient_program", "loss gradient"),
    ]:
        setattr(module, attribute, Counted(getattr(module, attribute), launches, name))
    model = make_model(single_rank_group(), **settings)
    tokens = torch.randint(0, 53, (3, 8), generator=torch.Generator().manual_seed(1))
    labels = tokens.roll(1, dims=1)
    positions = torch.arange(8).expand(3, 8)

    def step() -> list[torch.Tensor]:
        losses = model(tokens, positions, labels=labels)
        return [losses.detach(), *torch.autograd.grad(losses.mean(), list(model.parameters()))]

    expected = step()
    assert not launches
    with cpu_runs_on_triton():
        launches.clear()
        actual = step()
    assert launches == {
        "rotate": 4,
        "gate": 2,
        "gate gradient": 2,
        "norm": 2,
        "norm gradient": 2,
        "normalizer": 1,
        "loss gradient": 1,
    }
    for one, other in zip(actual, expected, strict=True):
        close(one, other)


class Counted:
    """Count a program's launches."""

    def __init__(self, program: Any, launches: Counter[str], name: str) -> None:
        self.program, self.launches, self.name = program, launches, name

    def __getitem__(self, grid: Any) -> Any:
        self.launches[self.name] += 1
        return self.program[grid]


@pytest.mark.parametrize("settings", [LLAMA, NEOX], ids=["llama", "neox"])
def test_a_model_on_triton_equals_the_model_in_torch(settings: dict[str, Any]) -> None:
    interpret(check_model, settings)
