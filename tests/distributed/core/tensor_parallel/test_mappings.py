"""Regions: forward values, and backward against the forward of the conjugate collective."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from megatron.core.errors import ConfigurationError
from megatron.core.process_group import Group, single_rank_group
from megatron.core.tensor_parallel import mappings
from tests.harness.distributed import run_distributed
from tests.harness.toy_model import tensor_parallel_group

MAPPINGS: dict[str, Callable[[torch.Tensor, Group], torch.Tensor]] = {
    "reduce": lambda tensor, tp: mappings.reduce_from_tensor_model_parallel_region(tensor.contiguous(), tp),
    "copy": mappings.copy_to_tensor_model_parallel_region,
    "scatter": mappings.scatter_to_tensor_model_parallel_region,
    "gather": mappings.gather_from_tensor_model_parallel_region,
    "scatter_sequence": mappings.scatter_to_sequence_parallel_region,
    "gather_sequence": mappings.gather_from_sequence_parallel_region,
    "reduce_scatter": mappings.reduce_scatter_to_sequence_parallel_region,
}


def values(rank: int, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 * seed + rank), dtype=torch.float64)


def forward_and_backward() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    tp = tensor_parallel_group()
    results = {}
    for name, mapping in MAPPINGS.items():
        x = values(tp.rank, (6, 2, 9), seed=1).requires_grad_()
        # A transposed view, but where the sum is written in place: no collective may take its memory for the tensor.
        entering = x.clone() if name == "reduce" else x.transpose(0, 2).contiguous().transpose(0, 2)
        output = mapping(entering, tp)
        output.backward(values(tp.rank, tuple(output.shape), seed=2))
        assert x.grad is not None
        results[name] = (output.detach().clone(), x.grad)
    return results


def test_mappings_over_three_ranks() -> None:
    xs = [values(rank, (6, 2, 9), seed=1) for rank in range(3)]
    total = torch.stack(xs).sum(dim=0)

    def grads(shape: tuple[int, ...]) -> list[torch.Tensor]:
        return [values(rank, shape, seed=2) for rank in range(3)]

    same, short, long = grads((6, 2, 9)), grads((2, 2, 9)), grads((18, 2, 9))
    narrow, wide = grads((6, 2, 3)), grads((6, 2, 27))
    for rank, results in enumerate(run_distributed(3, forward_and_backward)):
        expected = {
            "reduce": (total, same[rank]),
            "copy": (xs[rank], torch.stack(same).sum(dim=0)),
            "scatter": (xs[rank].chunk(3, dim=-1)[rank], torch.cat(narrow, dim=-1)),
            "gather": (torch.cat(xs, dim=-1), wide[rank].chunk(3, dim=-1)[rank]),
            "scatter_sequence": (xs[rank].chunk(3)[rank], torch.cat(short)),
            "gather_sequence": (torch.cat(xs), sum(long).chunk(3)[rank]),  # type: ignore[union-attr]
            "reduce_scatter": (total.chunk(3)[rank], torch.cat(short)),
        }
        for name, (output, gradient) in expected.items():
            torch.testing.assert_close(results[name][0], output, msg=f"{name} forward")
            torch.testing.assert_close(results[name][1], gradient, msg=f"{name} backward")


@pytest.mark.parametrize("name", MAPPINGS)
def test_one_rank_passes_the_tensor_through(name: str) -> None:
    x = torch.randn(6, 2, 9, requires_grad=True)
    assert MAPPINGS[name](x, single_rank_group()) is x


@pytest.mark.parametrize(("name", "dim"), [("scatter", -1), ("scatter_sequence", 0)])
def test_what_cannot_be_cut_evenly_is_refused(name: str, dim: int) -> None:
    tp = Group(axes=("tp",), ranks=(0, 1), rank=0)
    with pytest.raises(ConfigurationError, match=rf"dim {dim} of a tensor \[7, 2, 9\] is not divisible by .* size 2"):
        MAPPINGS[name](torch.zeros(7, 2, 9), tp)
