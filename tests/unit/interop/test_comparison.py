"""Two sources compared: bits, not values; NaNs, zeros, shapes and dtypes."""

from __future__ import annotations

import math

import pytest
import torch

from megatron.checkpoint import comparison
from megatron.checkpoint.checkpoint_source import SourceView
from megatron.checkpoint.comparison import compare_sources
from tests.unit.interop.memory_source import COMMON, MemorySource, sample_tensors


def compared(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> dict[str, comparison.TensorComparison]:
    return {found.name: found for found in compare_sources(MemorySource(left), MemorySource(right))}


def test_equal_checkpoints_are_equal_nan_included() -> None:
    found = compared(sample_tensors(), sample_tensors())
    assert list(found) == sorted(sample_tensors())
    assert all(item.is_equal and item.is_close(0.0) for item in found.values())
    assert str(found["model.ids"]) == "model.ids: equal"


@pytest.mark.parametrize("box_bytes", [1 << 20, 24])
def test_differences_are_measured(monkeypatch: pytest.MonkeyPatch, box_bytes: int) -> None:
    monkeypatch.setattr(comparison, "MAX_BOX_BYTES", box_bytes)
    left, right = {"w": torch.full((4, 3), 8.0)}, {"w": torch.full((4, 3), 8.0)}
    left["w"][3, 1] += 0.5
    left["w"][0, 0] -= 0.25
    item = compared(left, right)["w"]
    assert (item.num_different, item.max_difference, item.max_value) == (2, 0.5, 8.0)
    assert item.relative_difference == 0.0625
    assert item.is_close(0.1)
    assert not item.is_close(0.01)
    assert str(item) == "w: 2 of 12 elements differ, by at most 5.000e-01 (relative 6.250e-02)"


def test_bits_decide() -> None:
    zeros = compared({"w": torch.tensor([0.0, 1.0])}, {"w": torch.tensor([-0.0, 1.0])})["w"]
    assert (zeros.num_different, zeros.max_difference, zeros.is_equal) == (1, 0.0, False)
    nan = compared({"w": torch.tensor([math.nan, 1.0])}, {"w": torch.tensor([2.0, 1.0])})["w"]
    assert (nan.num_different, nan.is_close(1.0)) == (1, False)
    assert nan.max_difference > 1e300
    infinities = compared({"w": torch.tensor([math.inf, 1.0])}, {"w": torch.tensor([math.inf, 1.5])})["w"]
    assert (infinities.num_different, infinities.max_difference) == (1, 0.5)


def test_shapes_dtypes_and_absence() -> None:
    found = compared(
        {"a": torch.ones(2, 3), "b": torch.ones(4), "c": torch.ones(2)},
        {"a": torch.ones(3, 2), "b": torch.ones(4).bfloat16(), "d": torch.ones(2)},
    )
    assert [str(item) for item in found.values()] == [
        "a: shape [2, 3] and [3, 2]",
        "b: dtype float32 and bfloat16",
        "c: only in the first",
        "d: only in the second",
    ]
    assert not any(item.is_equal or item.is_close(1.0) for item in found.values())


def test_a_view_leaves_out_converts_and_reports() -> None:
    reported: list[int] = []
    source = MemorySource(sample_tensors())
    view = SourceView(source, {"x": 1}, keeps_optimizer=False, weights_dtype=torch.float32, on_read=reported.append)
    assert view.common == {"x": 1}
    assert source.common == COMMON
    assert all(name.startswith("model.") for name in view.tensors)
    assert view.tensors["model.norm.bias"].dtype == torch.float32
    values = view.read("model.norm.bias")
    assert torch.equal(values, sample_tensors()["model.norm.bias"].float())
    assert reported == [values.nbytes]
    with pytest.raises(KeyError):
        view.read("optimizer.exp_avg.norm.bias")
    view.close()
    assert source.is_closed
