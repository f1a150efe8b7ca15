"""What a dry run must not ask of torch, since some of the releases that are allowed do not answer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.planner.simulation.recorder import Recorder


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
