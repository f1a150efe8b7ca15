"""A whole model whose layers and loss run on Triton, interpreted on the CPU, against the same model in torch."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from megatron.core.ops.dropout import DropoutSamples
from tests.harness.toy_model import make_batch, make_model, tensor_parallel_group
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
PARALLEL = {"use_parallel_residual": True}
GPT2 = {"openai_gelu": True}
THROUGH = {"apply_residual_connection_post_layernorm": True}
DROPOUT = {"hidden_dropout": 0.2, "attention_dropout": 0.3}


def check_model(settings: dict[str, Any]) -> None:
    from megatron.core.ops.triton import activation, column_sums, cross_entropy
    from megatron.core.ops.triton import activation as gated_activation
    from megatron.core.ops.triton import query_key_value as rotary
    from megatron.core.ops.triton import query_key_value as split
    from megatron.core.ops.triton import residual as dropout
    from megatron.core.ops.triton import residual as residual_norm

    launches: Counter[str] = Counter()
    for module, attribute, name in [
        (rotary, "rotate_program", "rotate"),
        (gated_activation, "gated_forward_program", "gate"),
        (gated_activation, "gated_backward_program", "gate gradient"),
        (activation, "plain_backward_program", "activation gradient"),
        (split, "join_program", "join"),
        (column_sums, "sums_program", "sums"),
        (residual_norm, "forward_program", "norm"),
        (residual_norm, "backward_program", "norm gradient"),
        (dropout, "dropout_program", "dropout"),
        (cross_entropy, "normalizer_program", "normalizer"),
        (cross_entropy, "gradient_program", "loss gradient"),
    ]:
        setattr(module, attribute, Counted(getattr(module, attribute), launches, name))
    tp = tensor_parallel_group()
    model = make_model(tp, sequence_parallel=tp.size > 1, **settings)
    tokens, labels, positions, _ = make_batch(8, 3, 53)
    samples = DropoutSamples.at(5, 0, 0, 3, "cpu")

    def step() -> list[torch.Tensor]:
        losses = model(tokens, positions, labels=labels, dropout_samples=samples)
        return [losses.detach(), *torch.autograd.grad(losses.mean(), list(model.parameters()))]

    expected = step()
    assert not launches
    with cpu_runs_on_triton():
        launches.clear()
        actual = step()
    # In both directions: behind the embedding, at the end of the last layer, and where attention has no norm behind it.
    num_drops = 2 * (1 + 1 + 2 * settings.get("use_parallel_residual", False)) if "hidden_dropout" in settings else 0
    is_gated = settings.get("swiglu", False) or settings.get("geglu", False)
    has_bias = settings.get("add_bias_linear", True)
    # Branches with a bias that meet a norm; several ranks of a CPU add it to their sum.
    num_branches = (1 if settings.get("use_parallel_residual", False) else 3) if has_bias and tp.size == 1 else 0
    num_joins = 2 if settings.get("position_embedding_type") is None else 0
    num_activations = 0 if is_gated or not has_bias else 2
    assert launches == {
        **({} if num_joins else {"rotate": 4}),
        **({"gate": 2, "gate gradient": 2} if is_gated else {}),
        **({"activation gradient": num_activations} if num_activations else {}),
        **({"join": num_joins} if num_joins else {}),
        "sums": 4 + num_branches + num_activations + num_joins,
        "norm": 4,
        "norm gradient": 4,
        **({"dropout": num_drops} if num_drops else {}),
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


@pytest.mark.full
@pytest.mark.parametrize(
    ("settings", "world_size"),
    [
        pytest.param(LLAMA, 1, marks=pytest.mark.long),
        (LLAMA | DROPOUT, 2),
        pytest.param(NEOX, 1, marks=pytest.mark.long),
        pytest.param(NEOX | DROPOUT, 1, marks=pytest.mark.long),
        (NEOX | DROPOUT | PARALLEL, 2),
        pytest.param(GPT2, 1, marks=pytest.mark.long),
        pytest.param(GPT2 | DROPOUT, 2, marks=pytest.mark.long),
        (GPT2 | THROUGH, 1),
    ],
    ids=[
        "llama",
        "llama, dropout, 2 ranks",
        "neox",
        "neox, dropout",
        "neox, parallel, dropout, 2 ranks",
        "gpt2",
        "gpt2, dropout, 2 ranks",
        "gpt2, stream through the norms",
    ],
)
def test_a_model_on_triton_equals_the_model_in_torch(settings: dict[str, Any], world_size: int) -> None:
    interpret(check_model, settings, world_size=world_size)
