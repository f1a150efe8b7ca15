"""Ten optimizer steps on given batches against reference numbers made with NVIDIA's own code."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron.core.collectives import all_reduce
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.optimizer.optimizer_param_scheduler import OptimizerParamScheduler, ScheduleConfig
from megatron.core.parallel_config import ParallelSizes
from megatron.core.parallel_state import create_parallel_state, describe_parallel_state
from tests.golden.test_model_golden import model_settings
from tests.harness.closeness import assert_tensors_close
from tests.harness.distributed import run_distributed
from tests.harness.toy_model import Fragment, load_global_weights, make_model, parameter_fragments, reassemble

FOLDER = Path(__file__).parent / "model"
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Trained:
    losses: list[float]
    grad_norms: list[float]
    learning_rates: list[float]
    weights: list[Fragment]


def optimizer_config(settings: dict[str, Any]) -> OptimizerConfig:
    """Return the configuration of the reference's AdamW from the settings beside its numbers."""
    return OptimizerConfig(
        lr=settings["lr"],
        min_lr=settings["min_lr"],
        weight_decay=settings["wd"],
        clip_grad=settings["clip"],
        adam_beta1=settings["betas"][0],
        adam_beta2=settings["betas"][1],
        adam_eps=settings["eps"],
    )


def train(name: str, tp_size: int, sequence_parallel: bool) -> Trained:
    """Train this rank's part; data-parallel ranks share the sequences of each batch."""
    reference = np.load(FOLDER / f"{name}.npz")
    config = json.loads(str(reference["config"]))
    settings = config["optimizer"]
    state = create_parallel_state(ParallelSizes(tp=tp_size)) if dist.is_initialized() else describe_parallel_state(0, 1)
    module = make_model(state.tp, sequence_parallel=sequence_parallel, **model_settings(config))
    load_global_weights(module, lambda spec: reference[f"w/{spec.name}"])
    model = DistributedDataParallel(module, DistributedDataParallelConfig(), state)
    optimizer = MegatronOptimizer(optimizer_config(settings), [model], state)
    scheduler = OptimizerParamScheduler(
        optimizer,
        ScheduleConfig(
            max_lr=settings["lr"],
            min_lr=settings["min_lr"],
            lr_warmup_steps=settings["warmup"],
            lr_decay_steps=settings["decay"],
            lr_decay_style=settings["style"],
            start_wd=settings["wd"],
            end_wd=settings["wd"],
            wd_incr_steps=settings["decay"],
        ),
    )
    trained = Trained([], [], [], [])
    for tokens, labels in zip(reference["train/tokens"], reference["train/labels"]):
        mine = slice(state.dp.rank, None, state.dp.size)
        tokens, labels = (torch.from_numpy(ids[mine].astype(np.int64)) for ids in (tokens, labels))
        trained.learning_rates.append(scheduler.learning_rate)
        model.zero_grad_buffer()
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        loss = module(tokens, positions, labels=labels).mean()
        loss.backward()
        finalize_model_grads([model], state)
        outcome = optimizer.step()
        assert outcome.success
        scheduler.step(1)
        mean = loss.detach() / state.dp.size
        all_reduce(mean, state.dp)
        trained.losses.append(mean.item())
        trained.grad_norms.append(outcome.grad_norm or 0.0)
    if state.dp.is_first:
        trained.weights.extend(parameter_fragments(module))
    return trained


def is_determined(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return which elements of a final weight follow from the data: all but the key biases.

    A key bias moves every score of a row alike and has a gradient of zero in exact arithmetic. Adam scales the
    rounding that is left of it up to whole steps, so its values are chance, in the reference too.
    """
    if not name.endswith("linear_qkv.bias"):
        return np.ones(shape, dtype=bool)
    return np.broadcast_to(np.array([True, False, True])[None, :, None], (4, 3, 16)).reshape(shape)


@pytest.mark.default(1)
@pytest.mark.parametrize(
    ("num_processes", "tp_size", "sequence_parallel"),
    [
        pytest.param(1, 1, False, id="one-process"),
        pytest.param(2, 2, False, id="tp2", marks=pytest.mark.long),
        pytest.param(2, 2, True, id="tp2-sp", marks=pytest.mark.long),
        pytest.param(2, 1, False, id="dp2", marks=pytest.mark.long),
        pytest.param(4, 2, True, id="tp2-sp-dp2"),
    ],
)
@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen"])
def test_ten_steps_meet_reference_numbers(name: str, num_processes: int, tp_size: int, sequence_parallel: bool) -> None:
    if num_processes == 1:
        ranks = [train(name, tp_size, sequence_parallel)]
    else:
        ranks = run_distributed(num_processes, train, name, tp_size, sequence_parallel, timeout_s=60.0)
    reference = np.load(FOLDER / f"{name}.npz")
    for rank in ranks:
        assert rank.learning_rates == pytest.approx(reference["train/lr"].tolist(), rel=TOLERANCE, abs=0.0)
        assert rank.losses == pytest.approx(reference["train/loss"].tolist(), rel=TOLERANCE, abs=0.0)
        assert rank.grad_norms == pytest.approx(reference["train/grad_norm"].tolist(), rel=TOLERANCE, abs=0.0)
    final = {key[5:]: reference[key] for key in reference.files if key.startswith("wend/")}
    if name == "gpt2":
        assert final
    weights = reassemble(rank.weights for rank in ranks)
    for key, expected in final.items():
        counted = is_determined(key, expected.shape)
        assert_tensors_close(weights[key][counted], expected[counted], TOLERANCE, key)
