"""Linear layers in NVFP4 over tensor-parallel ranks with sequence parallelism, against the same layers on one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.core.models.fp8_layers import _output_features
from megatron.core.ops.dropout import DropoutKeys, DropoutSamples
from megatron.core.ops.fp8_quantizers import Float8Recipe
from megatron.core.ops.nvfp4_quantizers import Nvfp4Quantizers
from megatron.core.parallel_config import Fp8Config, ParallelConfig
from megatron.core.process_group import Group, single_rank_group
from megatron.core.sharding import spec_of
from megatron.core.tensor_parallel.sharded_layers import ColumnShardedLinear, RowShardedLinear
from tests.harness.distributed import run_distributed
from tests.harness.toy_model import load_global_weights, tensor_parallel_group

LENGTH, BATCH, WIDTH = 64, 2, 64
LAYERS = {"column": ColumnShardedLinear, "row": RowShardedLinear}


def draw(seed: int) -> torch.Tensor:
    """Return rows of which the second half is 64 times as large: the ranks' parts have different largest values."""
    rows = torch.randn(LENGTH, BATCH, WIDTH, generator=torch.Generator().manual_seed(seed))
    rows[LENGTH // 2 :] *= 64
    return rows.bfloat16()


def run_layer(kind: str, tp: Group) -> tuple[Any, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the weight's box, and this rank's output and gradients of the input and the weight."""
    config = ParallelConfig(params_dtype="bfloat16", sequence_parallel=True)
    layer = LAYERS[kind](WIDTH, WIDTH, tp, config=config, bias=False)
    load_global_weights(layer)  # type: ignore[arg-type]
    tokens, features = (slice(tp.rank * size // tp.size, (tp.rank + 1) * size // tp.size) for size in (LENGTH, WIDTH))
    keys = DropoutKeys(DropoutSamples.at(1, 2, 0, BATCH, "cpu"), torch.arange(LENGTH), tokens, range(2))
    recipe = Float8Recipe.of(Fp8Config(fp4_format="e2m1"))
    layer.quantizers = Nvfp4Quantizers(recipe, (1, 2), _output_features(layer))
    layer.quantizers.keys = keys
    x, grad = draw(1), draw(2)
    x, grad = (x[tokens], grad[..., features]) if kind == "column" else (x[..., features], grad[tokens])
    x = x.clone().requires_grad_()
    output = layer(x)
    output.backward(grad)
    assert x.grad is not None
    assert layer.weight.grad is not None
    (shard,) = spec_of(layer.weight).shards
    return shard.global_box.slices, output.detach(), x.grad, layer.weight.grad


def differences(kind: str) -> list[float]:
    """Return the differences of output and gradients from those on one rank, relative to the largest value of a row."""
    tp = tensor_parallel_group()
    box, *found = run_layer(kind, tp)
    _, *whole = run_layer(kind, single_rank_group())
    tokens, features = (slice(tp.rank * size // tp.size, (tp.rank + 1) * size // tp.size) for size in (LENGTH, WIDTH))
    parts = [(..., features), (tokens,)]
    at = [*(parts if kind == "column" else reversed(parts)), box]
    rest = []
    for mine, theirs, index in zip(found, whole, at, strict=True):
        expected = theirs[index].float()
        largest = expected.abs().amax(-1, keepdim=True)
        rest.append(float(((mine.float() - expected).abs() / largest).max()))
    return rest


@pytest.mark.parametrize("kind", sorted(LAYERS))
def test_ranks_quantize_their_parts_like_one_rank(kind: str) -> None:
    """Only the sums over ranks of bfloat16 numbers differ, and weight gradients, which no rank sums, do not."""
    for output, x_grad, weight_grad in run_distributed(2, differences, kind):
        assert output <= (2**-8 if kind == "column" else 2**-6)
        assert x_grad <= (2**-6 if kind == "column" else 2**-8)
        assert weight_grad <= 2**-8
