"""Quantized weights: the same codes and scales at any layout, their names and boxes, and no memory of their own."""

from __future__ import annotations

import pytest
import torch

from megatron.core.dist_checkpointing.planner import from_spec, model_tensors
from megatron.core.parallel_config import ParallelSizes
from megatron.core.parallel_state import describe_parallel_state
from megatron.core.sharding import attach_spec, held_of, quantized_of, spec_of
from megatron.core.tensor_parallel.initialization import draw_box
from megatron.core.tensor_parallel.quantized_weight import QuantizedWeight, stacked_weights
from megatron.core.tensor_parallel.sharded_layers import ColumnShardedLinear, RowShardedLinear

OUT, IN = 768, 512
Linear = ColumnShardedLinear | RowShardedLinear


def quantized(kind: type[Linear], rank: int, size: int, *, doubly: bool = True, dtype: str = "float32") -> Linear:
    """Return a layer with this rank's shard of a random weight in 4 bits."""
    tp = describe_parallel_state(rank, size, ParallelSizes(tp=size)).tp
    linear = kind(IN, OUT, tp, bias=False)
    linear.weight.data = linear.weight.data.to(getattr(torch, dtype))
    storage = QuantizedWeight(linear.weight, "nf4", doubly=doubly, group_dim=-1 if kind is ColumnShardedLinear else -2)
    storage.open()
    with torch.no_grad():
        for shard in spec_of(linear.weight).shards:
            linear.weight[shard.local_box.slices] = draw_box(spec_of(linear.weight), shard.global_box, 3)
    storage.close()
    return linear


@pytest.mark.parametrize("doubly", [True, False])
@pytest.mark.parametrize("kind", [ColumnShardedLinear, RowShardedLinear])
def test_shards_have_the_codes_and_scales_of_the_whole_weight(kind: type[Linear], doubly: bool) -> None:
    whole = {spec.name: values for spec, values in held_of(quantized(kind, 0, 1, doubly=doubly).weight)}
    names = ("codes", "absmax", *(("absmax_scale", "absmax_mean") if doubly else ()))
    assert tuple(whole) == tuple(f"weight.{name}" for name in names)
    for rank in range(4):
        for spec, values in held_of(quantized(kind, rank, 4, doubly=doubly).weight):
            assert spec.global_shape == tuple(whole[spec.name].shape)
            (shard,) = from_spec(spec, values).shards
            assert tuple(values.shape) == shard.global_box.shape
            assert torch.equal(values, whole[spec.name][shard.global_box.slices])


def test_a_weight_takes_half_a_byte_per_element_and_its_scales() -> None:
    weight = quantized(ColumnShardedLinear, 0, 1, dtype="bfloat16").weight
    assert weight.untyped_storage().nbytes() == 0
    assert weight.numel() == OUT * IN
    held = {spec.name.removeprefix("weight."): values for spec, values in held_of(weight)}
    assert held["codes"].nbytes == OUT * IN // 2
    assert held["absmax"].nbytes == OUT * IN // 64
    assert held["absmax_scale"].nbytes == held["absmax_mean"].nbytes == 4 * OUT
    plain = {spec.name: values for spec, values in held_of(quantized(ColumnShardedLinear, 0, 1, doubly=False).weight)}
    assert plain["weight.absmax"].nbytes == 4 * OUT * IN // 64


def test_both_passes_use_the_dequantized_weight_and_save_nothing_of_it() -> None:
    linear = quantized(RowShardedLinear, 0, 1, dtype="float64")
    storage = quantized_of(linear.weight)
    assert storage is not None
    dense = storage.dense()
    linear.weight.requires_grad_(False)
    x = torch.randn(3, 2, IN, dtype=torch.float64, requires_grad=True)
    saved: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = linear(x)
    assert not saved
    assert torch.equal(y, x @ dense.t())
    grad = torch.randn_like(y)
    assert torch.allclose(torch.autograd.grad(y, x, grad)[0], grad @ dense)


def test_stacked_weights_are_dequantized_in_the_gemm() -> None:
    first, second = (quantized(ColumnShardedLinear, rank, 2) for rank in range(2))
    stacked = stacked_weights(first.weight, second.weight)
    assert tuple(stacked.shape) == (OUT, IN)
    assert stacked.untyped_storage().nbytes() == stacked.element_size()
    storage, whole = quantized_of(stacked), quantized_of(quantized(ColumnShardedLinear, 0, 1).weight)
    assert storage is not None
    assert whole is not None
    assert torch.equal(storage.dense(), whole.dense())


def test_a_checkpoint_fills_codes_or_is_quantized_while_it_is_loaded() -> None:
    linear = quantized(ColumnShardedLinear, 0, 1)
    attach_spec(linear.weight, spec_of(linear.weight).with_prefix("layer."))
    names = [tensor.name for tensor in model_tensors([linear])]
    assert names == [f"model.layer.weight.{part}" for part in ("codes", "absmax", "absmax_scale", "absmax_mean")]
    (tensor,) = model_tensors([linear], ["model.layer.weight"])
    before = {spec.name: values.clone() for spec, values in held_of(linear.weight)}
    with tensor.opened():
        assert [spec.name for spec, _ in held_of(linear.weight)] == ["layer.weight"]
        tensor.data.copy_(draw_box(spec_of(linear.weight), spec_of(linear.weight).shards[0].global_box, 4))
    assert linear.weight.untyped_storage().nbytes() == 0
    assert all(not torch.equal(values, before[spec.name]) for spec, values in held_of(linear.weight))
