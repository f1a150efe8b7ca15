"""Initial values that ranks divide among them are those that each rank would draw alone, and each is drawn once."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

import pretrain_gpt
from megatron.core.device import Device
from megatron.core.sharding import attach_spec, held_of, spec_of
from megatron.core.tensor_parallel import initialization
from megatron.core.tensor_parallel.initialization import initialize_parameter
from megatron.training.initialize import make_runtime
from megatron.training.model_setup import build_model_and_optimizer
from megatron.verification.run_cell import resolve_cell
from tests.harness.distributed import run_distributed

MODEL = (
    "--num-layers 2 --hidden-size 96 --num-attention-heads 6 --ffn-hidden-size 600 --seq-length 24 "
    "--max-position-embeddings 24 --micro-batch-size 1 --global-batch-size 4 --lr 1e-3 --train-iters 2 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 1101 --make-vocab-size-divisible-by 4"
)
EXPERTS = "--num-experts 4 --swiglu --moe-ffn-hidden-size 232 --disable-bias-linear"


@contextmanager
def counted_values() -> Iterator[list[int]]:
    """Count inside the context how many random values are drawn, one number per drawing."""
    counts: list[int] = []
    make = np.random.Generator

    class DedupMask:
        def __init__(self, bits: Any) -> None:
            self._generator = make(bits)

        def standard_normal(self, *args: Any, **kwargs: Any) -> np.ndarray:
            return self._counted(self._generator.standard_normal(*args, **kwargs))

        def random(self, *args: Any, **kwargs: Any) -> np.ndarray:
            return self._counted(self._generator.random(*args, **kwargs))

        def _counted(self, values: np.ndarray) -> np.ndarray:
            counts.append(values.size)
            return values

    with patch.object(np.random, "Generator", DedupMask):
        yield counts


def draw(flags: str, world_size: int, dtype: str) -> tuple[int, int, tuple[int, ...], list[str]]:
    """Build what is trained; return how many values this rank draws, and how many it would alone.

    Then the ranks of its replica group, and the names of parameters that are not what it would have drawn alone.
    """
    config = resolve_cell(f"{MODEL} {flags}".split(), world_size, dtype)
    runtime = make_runtime(config, Device("cpu"))
    torch.set_num_threads(2)
    # Rounds as small as a block: there are several.
    with counted_values() as divided, patch.object(initialization, "_GATHERED_ELEMENTS", 1):
        parts = build_model_and_optimizer(config, runtime, pretrain_gpt.provide_model, log=lambda line: None)
    wrong = []
    with counted_values() as alone:
        for parameter in (parameter for chunk in parts.chunks for parameter in chunk.parameters()):
            for spec, values in held_of(parameter):
                expected = torch.nn.Parameter(torch.full(values.shape, math.nan, dtype=values.dtype))
                attach_spec(expected, spec)
                initialize_parameter(expected, config.initialization.seed)
                # As bytes: equal zeros may differ in sign.
                same = torch.equal(expected.detach().view(torch.uint8), values.detach().contiguous().view(torch.uint8))
                wrong += [] if same else [spec_of(parameter).name]
    return sum(divided), sum(alone), runtime.state.dp_cp.ranks, wrong


DENSE = [
    (2, "", "float32"),
    (4, "--context-parallel-size 2 --bf16", "bfloat16"),
    (4, "--tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer --bf16", "bfloat16"),
    (4, "--pipeline-model-parallel-size 2 --num-query-groups 2 --group-query-attention", "float64"),
    (3, "--untie-embeddings-and-output-weights --use-mup --mup-base-hidden-size 48 --global-batch-size 3", "float32"),
    (2, "--lora-rank 4 --lora-alpha 8 --tensor-model-parallel-size 1", "float32"),
]


@pytest.mark.parametrize(("world_size", "flags", "dtype"), DENSE)
@pytest.mark.default(3)
def test_replicas_draw_each_value_once(world_size: int, flags: str, dtype: str) -> None:
    results = run_distributed(world_size, draw, flags, world_size, dtype, timeout_s=60)
    for rank, (own, alone, replicas, wrong) in enumerate(results):
        assert not wrong, (rank, wrong)
        assert len(replicas) > 1
        assert sum(results[replica][0] for replica in replicas) == alone
        # The largest block here is 256 × 600.
        assert own <= alone / len(replicas) + 256 * 2048


TENSOR = "--tensor-model-parallel-size 2 --sequence-parallel"
SPREAD = [
    (4, "--expert-model-parallel-size 2 --bf16", "bfloat16", 0.3),
    (4, "--expert-model-parallel-size 4", "float32", 0.3),
    (4, f"--expert-model-parallel-size 2 {TENSOR}", "float32", 0.5),
    (4, f"--expert-model-parallel-size 2 {TENSOR} --expert-tensor-parallel-size 1", "float64", 0.5),
    (2, TENSOR, "float32", 0.95),
]


@pytest.mark.parametrize(("world_size", "flags", "dtype", "share"), SPREAD)
@pytest.mark.default(1)
def test_ranks_with_different_experts_draw_their_tiles_once(
    world_size: int, flags: str, dtype: str, share: float
) -> None:
    """``share`` is about how much of what all ranks drew alone they draw now; dense layers' shards are theirs alone."""
    results = run_distributed(world_size, draw, f"{EXPERTS} {flags}", world_size, dtype, timeout_s=60)
    assert not [wrong for *_, wrong in results if wrong]
    drawn, alone = (sum(result[number] for result in results) for number in (0, 1))
    assert drawn / alone < share


def test_a_rank_draws_its_shards_alone() -> None:
    flags = "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params --use-distributed-optimizer"
    results = run_distributed(2, draw, flags, 2, "float32", timeout_s=60)
    assert not [wrong for *_, wrong in results if wrong]
    assert [own for own, *_ in results] == [alone for _, alone, *_ in results]
