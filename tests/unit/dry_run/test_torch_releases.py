"""What a dry run must not ask of torch, since some of the releases that are allowed do not answer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pretrain_gpt
from megatron.core.errors import ConfigurationError
from megatron.planner.gpu import find_gpu
from megatron.planner.simulation.dry_run import dry_run
from megatron.planner.simulation.recorder import Recorder
from megatron.training.config.arguments import resolve_arguments
from tests.unit.training.config.command_lines import MINIMAL


@pytest.mark.parametrize("operation", [torch.ops.aten.mm.dtype_out, torch.ops.aten.addmm.dtype_out], ids=str)
def test_a_product_into_wider_sums_is_not_traced(operation: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.11 decomposes it and multiplies a dtype by a tensor."""

    def traced(*args: Any, **kwargs: Any) -> None:
        raise TypeError("unsupported operand type(s) for *: 'torch.dtype' and 'FakeTensor'")

    monkeypatch.setattr(type(operation), "__call__", traced)
    sums = torch.zeros(2, 3)
    recorder = Recorder.__new__(Recorder)
    given = (sums, torch.zeros(2, 4), torch.zeros(4, 3), torch.float32)
    assert recorder._result(operation, operation._schema.name, given, {"out": sums}) is sums


def test_a_cuda_build_without_a_gpu_is_rejected_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its autograd engine raises in the first backward pass: hasPrimaryContext expects a valid device index."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config = resolve_arguments([*MINIMAL], 1).config
    with pytest.raises(ConfigurationError, match=r"is a CUDA build and finds no GPU, .*; install torch's CPU build"):
        dry_run(config, 0, find_gpu("h100-80gb"), pretrain_gpt.provide_model, pretrain_gpt.forward_step)
