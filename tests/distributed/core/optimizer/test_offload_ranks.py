"""Optimizer offload and state in few bytes over data-parallel ranks: the same bits, and checkpoints of any layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.core.optimizer.test_distrib_optimizer import load_and_train, train_and_save
from tests.distributed.core.optimizer.toy_training import (
    GATHER,
    GRADS,
    OPTIM,
    OVERLAP,
    Options,
    Trained,
    trained,
)
from tests.harness.distributed import run_distributed

HALF: Options = {
    "optimizer_cpu_offload": True,
    "optimizer_offload_fraction": 0.5,
    "overlap_cpu_optimizer_d2h_h2d": True,
    "initial_loss_scale": 2.0**6,
}
PLAIN: Options = {"initial_loss_scale": 2.0**6}
NARROW: Options = {
    "use_precision_aware_optimizer": True,
    "main_params_dtype": "fp16",
    "exp_avg_dtype": "fp16",
    "exp_avg_sq_dtype": "fp16",
}
SMALLEST: Options = NARROW | {"exp_avg_dtype": "fp8", "exp_avg_sq_dtype": "fp8"}


def trained_with_each(options: Options, optimizers: list[Options], **settings: Any) -> list[Trained]:
    return [trained(options, optimizer=optimizer, **settings) for optimizer in optimizers]


@pytest.mark.default(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.long)])
@pytest.mark.parametrize("options", [{}, OPTIM, GRADS | OVERLAP | GATHER], ids=["whole", "optim", "grads"])
def test_offload_computes_the_same_bits(options: Options, dtype: torch.dtype) -> None:
    for expected, *others in run_distributed(
        2, trained_with_each, options, [PLAIN, HALF, HALF | {"optimizer_offload_fraction": 1.0}], dtype=dtype
    ):
        for parameters, outcomes, kind in others:
            assert (outcomes, kind) == expected[1:]
            assert all(torch.equal(parameter, expected[0][name]) for name, parameter in parameters.items())


@pytest.mark.parametrize("narrow", [NARROW, SMALLEST], ids=["fp16", "fp8"])
def test_state_in_few_bytes_does_not_depend_on_the_sharding(narrow: Options) -> None:
    settings = {"dtype": torch.bfloat16, "optimizer": {"clip_grad": 0.0, **narrow}}
    (whole, *_), *_ = run_distributed(2, trained, {}, **settings)
    (shards, *_), *_ = run_distributed(2, trained, OPTIM, **settings)
    assert all(torch.equal(parameter, shards[name]) for name, parameter in whole.items())


def save_with(optimizer: Options, folder: str, options: Options) -> Any:
    return train_and_save(folder, options, torch.bfloat16, optimizer)


def load_with(optimizer: Options, folder: str, options: Options) -> Any:
    return load_and_train(folder, options, torch.bfloat16, optimizer)


@pytest.mark.default(2)
@pytest.mark.parametrize("options", [pytest.param({}, marks=pytest.mark.long), OPTIM], ids=["whole", "optim"])
@pytest.mark.parametrize(
    ("saver", "loader"), [(HALF, PLAIN), (PLAIN, HALF), (HALF, HALF), (NARROW, NARROW), (SMALLEST, SMALLEST)]
)
def test_resuming_with_and_without_is_bitwise_exact(
    tmp_path: Path, options: Options, saver: Options, loader: Options
) -> None:
    saved = run_distributed(2, save_with, saver, str(tmp_path), options)
    loaded = run_distributed(2, load_with, loader, str(tmp_path), options)
    for (parameters, outcome), (expected, wanted) in zip(loaded, saved, strict=True):
        assert outcome == wanted
        assert all(torch.equal(parameter, expected[name]) for name, parameter in parameters.items())


@pytest.mark.default(1)
@pytest.mark.parametrize("saver", [HALF, NARROW], ids=["offload", "narrow"])
def test_a_checkpoint_loads_at_another_layout(tmp_path: Path, saver: Options) -> None:
    saved = run_distributed(4, save_with, saver, str(tmp_path), OPTIM)
    for world_size, options, loader in ((1, {}, PLAIN), (2, GRADS | GATHER, HALF), (1, {}, NARROW)):
        for parameters, outcome in run_distributed(world_size, load_with, loader, str(tmp_path), options):
            assert outcome.grad_norm == pytest.approx(saved[0][1].grad_norm, rel=1e-2)
            for name, parameter in parameters.items():
                torch.testing.assert_close(parameter, saved[0][0][name], rtol=0.01, atol=0.004)
