"""A toy model that the optimizers train on a few ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.optimizer.distrib_optimizer import make_optimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer, StepOutcome
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.parallel_config import ParallelSizes
from megatron.core.parallel_state import ParallelState, create_parallel_state
from megatron.core.sharding import ParamSpec, attach_spec, full_shards
from tests.unit.core.distributed.toy_model import ToyModel, batch

NUM_STEPS = 3
NUM_MICROBATCHES = 12
DTYPE_NAMES = {torch.float64: "float64", torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
Options = dict[str, object]
OPTIM: Options = {"use_distributed_optimizer": True}
GRADS: Options = {"data_parallel_sharding_strategy": "optim_grads", "ddp_bucket_size": 65}
WEIGHTS: Options = {"data_parallel_sharding_strategy": "optim_grads_params", "ddp_bucket_size": 65}
OVERLAP: Options = {"overlap_grad_reduce": True, "ddp_bucket_size": 65}
GATHER: Options = {"overlap_param_gather": True, "ddp_bucket_size": 65}
IN_STEP: Options = GATHER | {"overlap_param_gather_with_optimizer_step": True}
Trained = tuple[dict[str, torch.Tensor], list[StepOutcome], type]


@dataclass
class Run:
    """Hold a model, its wrapper and its optimizer on one rank."""

    state: ParallelState
    ddp: DistributedDataParallel
    optimizer: MegatronOptimizer
    per_token: bool = False
    outcomes: list[StepOutcome] = field(default_factory=list)

    def step(self, number: int) -> StepOutcome:
        """Train one iteration on this rank's share of its micro-batches."""
        self.ddp.zero_grad_buffer()
        mine = range(self.state.dp_cp.rank, NUM_MICROBATCHES, self.state.dp_cp.size)
        for index in mine:
            loss = self.ddp(*batch(number * NUM_MICROBATCHES + index)) * self.optimizer.loss_scale
            if not self.per_token:
                loss = loss / len(mine)
            if index == mine[-1]:
                loss.backward()
            else:
                with self.ddp.no_sync():
                    loss.backward()
        finalize_model_grads([self.ddp], self.state, torch.tensor(7.0 * len(mine)) if self.per_token else None)
        self.outcomes.append(self.optimizer.step())
        return self.outcomes[-1]

    def parameters(self) -> dict[str, torch.Tensor]:
        """Return the parameters, gathered."""
        self.ddp.finish_param_gather()
        if self.ddp.weights is not None:
            self.ddp.weights.use_all()
        whole = {name: p.detach().clone() for name, p in self.ddp.module.named_parameters()}
        if self.ddp.weights is not None:
            self.ddp.weights.free_all()
        return whole


def build(
    options: Options,
    *,
    dtype: torch.dtype = torch.float64,
    per_token: bool = False,
    cp: int = 1,
    optimizer: Options | None = None,
    state: ParallelState | None = None,
) -> Run:
    state = state or create_parallel_state(ParallelSizes(cp=cp))
    config = DistributedDataParallelConfig(**options)  # type: ignore[arg-type]
    ddp = DistributedDataParallel(ToyModel(dtype), config, state, calculate_per_token_loss=per_token)
    settings: Options = {"lr": 0.01, "clip_grad": 0.4, "weight_decay": 0.1, "log_num_zeros_in_grad": True}
    settings |= {"params_dtype": DTYPE_NAMES[dtype], **(optimizer or {})}
    return Run(state, ddp, make_optimizer(OptimizerConfig(**settings), [ddp], state), per_token)  # type: ignore[arg-type]


def trained(options: Options, **settings: Any) -> Trained:
    run = build(options, **settings)
    for number in range(NUM_STEPS):
        run.step(number)
    return run.parameters(), run.outcomes, type(run.optimizer)


def trained_each(variants: Sequence[Options], **settings: Any) -> list[Trained]:
    """Train anew with each set of options, in one job."""
    return [trained(options, **settings) for options in variants]


class Wide(nn.Module):
    """Hold a matrix, a table whose size is no multiple of anything, and two vectors."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        for name, shape in (("table", (67, 33)), ("matrix", (160, 48)), ("bias", (160,)), ("norm", (48,))):
            parameter = nn.Parameter(torch.full(shape, 0.5, dtype=dtype))
            attach_spec(parameter, ParamSpec(f"{name}.weight", shape, full_shards(shape)))
            self.register_parameter(name, parameter)
