"""The program that casts to fp8, interpreted on the CPU, against its torch twin."""

from __future__ import annotations

import pytest
import torch

from megatron.core.ops.fp8_tensor import E4M3, E5M2, quantize_whole
from tests.unit.core.kernels.interpreted import cpu_runs_on_triton, interpret, needs_triton

pytestmark = needs_triton


def check_cast(dtype: torch.dtype) -> None:
    torch.manual_seed(5)
    for rows, width in [(70, 45), (64, 128), (1, 3)]:
        x = torch.randn(rows, width) * torch.logspace(-6, 3, width)
        x[0, : min(3, width)] = torch.tensor([torch.inf, -1e30, torch.nan])[: min(3, width)]
        for given in (x.bfloat16(), x, x.bfloat16().t()):
            scale, amax, expected_amax = torch.full((1, 1), 0.5), torch.zeros(()), torch.zeros(())
            expected = quantize_whole(given, dtype, scale, expected_amax, transpose=True)
            with cpu_runs_on_triton():
                actual = quantize_whole(given, dtype, scale, amax, transpose=True)
                one = quantize_whole(given, dtype, scale, None, plain=False, transpose=True)
            for ours, theirs in zip(actual, expected):
                assert ours is not None
                assert theirs is not None
                assert ours.data.is_contiguous()
                torch.testing.assert_close(ours.values(), theirs.values(), rtol=0, atol=0, equal_nan=True)
            assert one[0] is None
            assert one[1] is not None
            assert torch.equal(one[1].data.view(torch.uint8), actual[1].data.view(torch.uint8))  # type: ignore[union-attr]
            assert amax == torch.inf
            assert not expected_amax.isfinite()


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_bytes_are_those_of_torch(dtype: torch.dtype) -> None:
    interpret(check_cast, dtype)
