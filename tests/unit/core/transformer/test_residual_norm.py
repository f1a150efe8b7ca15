"""Which calls of a residual norm go to Triton, and what the program is told."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.core.process_group import single_rank_group
from megatron.core.transformer import norm as residual_norm
from megatron.core.transformer.norm import ResidualNorm
from tests.unit.core.kernels.interpreted import needs_triton


def make(kind: str, centered_weight: bool) -> ResidualNorm:
    options: dict[str, Any] = {"partial_gradient": False, "centered_weight": centered_weight}
    return ResidualNorm(kind, 8, 1e-5, single_rank_group(), dtype=torch.float32, device="cpu", **options)


@needs_triton
def test_the_program_is_given_what_it_can_normalize(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.ops.triton import residual as programs

    calls: list[dict[str, Any]] = []

    def add_and_normalize(x: torch.Tensor, *given: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append(options)
        return x, x

    monkeypatch.setattr(residual_norm, "runs_on_triton", lambda *tensors: True)
    monkeypatch.setattr(programs, "add_and_normalize", add_and_normalize)
    x = torch.randn(2, 3, 8)
    for kind in ("LayerNorm", "RMSNorm"):
        for centered in (False, True):
            make(kind, centered)(x, x)
    given = [(call["subtracts_mean"], call["weight_offset"], call["probability"]) for call in calls]
    assert given == [(True, 0.0, 0.0), (True, 1.0, 0.0), (False, 0.0, 0.0), (False, 1.0, 0.0)]
    norm = make("RMSNorm", False)
    norm(x, x.double())
    monkeypatch.setattr(programs, "MAX_WIDTH", 7)
    norm(x, x)
    assert len(calls) == 4
    monkeypatch.setattr(programs, "MAX_WIDTH", 8)
    norm(x)
    assert len(calls) == 5
