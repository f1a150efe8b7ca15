"""The distributed optimizer under models whose parameters are shared, split, or used by some ranks only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megatron.core.dist_checkpointing.load import load_index, load_tensors
from megatron.core.dist_checkpointing.planner import MODEL_PREFIX, OPTIMIZER_PREFIX, model_tensors, optimizer_tensors
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.distributed.fully_sharded_data_parallel import ShardedGradBuffer
from megatron.core.main_grad import main_grad_of
from megatron.core.model_parallel_config import ParallelSizes
from megatron.core.optimizer.distrib_optimizer import make_optimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.parallel_state import ParallelState, create_parallel_state
from megatron.core.process_group import Group
from megatron.core.sharding import ParamSpec, attach_spec, even_pieces, full_pieces, tie_over_pipeline
from megatron.core.tensor_parallel.layers import replicated_spec
from tests.distributed.core.optimizer.toy_training import (
    GATHER,
    GRADS,
    OPTIM,
    OVERLAP,
    Options,
    Wide,
    build,
)
from tests.harness.distributed import RankFailure, run_distributed
from tests.unit.core.dist_checkpointing.toy import save_tensors
from tests.unit.core.distributed.toy_model import ToyModel, batch


class TwoHeads(nn.Module):
    """Use other parameters on every other rank, so that buckets fill in different orders."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.toy = ToyModel()
        self.uses_all = rank % 2 == 0

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if self.uses_all:
            return self.toy(tokens, labels)
        return self.toy.norm.square().sum() + self.toy.fc1_bias.sum()


def train_two_heads(options: Options) -> dict[str, torch.Tensor]:
    state = create_parallel_state()
    ddp = DistributedDataParallel(TwoHeads(state.rank), DistributedDataParallelConfig(**options), state)  # type: ignore[arg-type]
    optimizer = make_optimizer(OptimizerConfig(lr=0.01, params_dtype="float64"), [ddp], state)
    for number in range(2):
        ddp.zero_grad_buffer()
        for _ in range(2):
            with ddp.no_sync():
                ddp(*batch(number)).backward()
        ddp(*batch(number + 5)).backward()
        finalize_model_grads([ddp], state)
        optimizer.step()
    ddp.finish_param_gather()
    return {name: p.detach() for name, p in ddp.module.named_parameters()}


@pytest.mark.default(2)
@pytest.mark.parametrize("options", [OPTIM | OVERLAP, GRADS, GRADS | OVERLAP | {"ddp_bucket_size": 1}])
def test_parameters_unused_on_some_ranks_do_not_mix_collectives_up(options: Options) -> None:
    expected = run_distributed(2, train_two_heads, {})[0]
    for parameters in run_distributed(2, train_two_heads, options):
        for name, parameter in parameters.items():
            torch.testing.assert_close(parameter, expected[name], rtol=1e-12, atol=1e-13)


class Pair(nn.Module):
    """Hold a matrix cut over the tensor-parallel ranks and a norm that each of them has a partial gradient of."""

    def __init__(self, tp: Group) -> None:
        super().__init__()
        shape = (62, 13)
        self.matrix = nn.Parameter(torch.ones(shape[0] // tp.size, shape[1], dtype=torch.float64))
        self.norm = nn.Parameter(torch.ones(301, dtype=torch.float64))
        attach_spec(self.matrix, ParamSpec("matrix.weight", shape, even_pieces(shape, 0, tp.rank, tp.size)))
        attach_spec(self.norm, replicated_spec("norm.weight", (301,), tp, partial_gradient=True))


def step_of_pair(options: Options) -> tuple[float, float, int, torch.Tensor, torch.Tensor]:
    state = create_parallel_state(ParallelSizes(tp=2))
    ddp = DistributedDataParallel(Pair(state.tp), DistributedDataParallelConfig(**options), state)  # type: ignore[arg-type]
    config = OptimizerConfig(lr=0.1, params_dtype="float64", log_num_zeros_in_grad=True, clip_grad=2.0)
    optimizer = make_optimizer(config, [ddp], state)
    params_norm = optimizer.params_norm()
    ddp.zero_grad_buffer()
    matrix = torch.arange(62 * 13, dtype=torch.float64).view(62, 13) * (state.dp.rank + 1)
    main_grad_of(ddp.module.matrix).add(matrix.chunk(2)[state.tp.rank])
    main_grad_of(ddp.module.norm).add(torch.full((301,), state.rank - 1.0))
    finalize_model_grads([ddp], state)
    outcome = optimizer.step()
    ddp.finish_param_gather()
    parameters = [p.detach() for p in ddp.parameters()]
    return outcome.grad_norm, params_norm, outcome.num_zeros, *parameters


@pytest.mark.default(2)
@pytest.mark.parametrize("options", [OPTIM, GRADS, GRADS | OVERLAP | GATHER])
def test_with_tensor_parallelism_partial_gradients_are_summed_and_each_element_counts_once(options: Options) -> None:
    expected = run_distributed(4, step_of_pair, {})
    matrix = torch.arange(62 * 13, dtype=torch.float64) * 1.5
    norm = (matrix.square().sum() + 301 * (((0 - 1 + 2 - 1) + (1 - 1 + 3 - 1)) / 2) ** 2).sqrt().item()
    for result, wanted in zip(run_distributed(4, step_of_pair, options), expected, strict=True):
        assert result[0] == pytest.approx(norm, rel=1e-12)
        assert wanted[0] == pytest.approx(norm, rel=1e-12)
        assert result[1] == pytest.approx((62 * 13 + 301) ** 0.5, rel=1e-12)
        assert result[2] == wanted[2] == 1
        for parameter, other in zip(result[3:], wanted[3:], strict=True):
            torch.testing.assert_close(parameter, other, rtol=1e-12, atol=1e-13)


class Stage(nn.Module):
    """Hold a word embedding's copy at both ends of a pipeline, beside weights that differ from stage to stage."""

    def __init__(self, state: ParallelState) -> None:
        super().__init__()
        rows = 31
        self.own = nn.Parameter(torch.ones(5 + 7 * state.pp.rank, 40, dtype=torch.float64))
        shape = tuple(self.own.shape)
        attach_spec(self.own, ParamSpec(f"stage{state.pp.rank}.weight", shape, full_pieces(shape)))
        self.word: nn.Parameter | None = None
        if state.pp.is_first or state.pp.is_last:
            self.word = nn.Parameter(torch.ones(rows, 11, dtype=torch.float64))
            spec = ParamSpec("weight", (rows, 11), full_pieces((rows, 11)))
            name = "embedding.word_embeddings.weight"
            attach_spec(self.word, tie_over_pipeline(spec, name=name, is_first_stage=state.pp.is_first))


def step_of_stages(folder: str, options: Options, pp: int) -> dict[str, Any]:
    state = create_parallel_state(ParallelSizes(pp=pp))
    chunks = [
        DistributedDataParallel(module, DistributedDataParallelConfig(**options), state)  # type: ignore[arg-type]
        for module in (Stage(state), Wide(torch.float64))
    ]
    for parameter in chunks[1].parameters():
        attach_spec(parameter, parameter.spec.with_prefix(f"extra{state.pp.rank}."))
    config = OptimizerConfig(lr=0.1, params_dtype="float64", clip_grad=2.0)
    optimizer = make_optimizer(config, chunks, state)
    params_norm = optimizer.params_norm()
    for number in range(2):
        for chunk in chunks:
            chunk.zero_grad_buffer()
        for microbatch in range(3):
            for chunk in chunks:
                with chunk.no_sync():
                    for parameter in reversed(list(chunk.parameters())):
                        values = torch.arange(parameter.numel(), dtype=torch.float64).view(parameter.shape).cos()
                        main_grad_of(parameter).add(values * (1 + state.rank + microbatch + number))
        finalize_model_grads(chunks, state)
        outcome = optimizer.step()
    for chunk in chunks:
        chunk.finish_param_gather()
    tensors = model_tensors([chunk.module for chunk in chunks]) + optimizer_tensors(optimizer)
    save_tensors(Path(folder), tensors, {}, state)
    index = load_index(Path(folder), state.world)
    for tensor in tensors:
        tensor.data.fill_(-1.0)
    load_tensors(Path(folder), index, tensors, (MODEL_PREFIX, OPTIMIZER_PREFIX), state)
    return {
        "norms": (params_norm, outcome.grad_norm),
        "parameters": {p.spec.name: p.detach() for chunk in chunks for p in chunk.parameters()},
        "bytes": sum(segment.gradient.nbytes for c in chunks for b in c.grad_buffers for segment in b.segments),
        "whole_bytes": sum(8 * b.layout.num_elements for c in chunks for b in c.grad_buffers),
        "pools": [b.pool.num_allocated for c in chunks for b in c.grad_buffers if isinstance(b, ShardedGradBuffer)],
        "stored": sorted(index.tensors),
    }


@pytest.mark.default(1)
@pytest.mark.parametrize(
    ("world_size", "pp"), [*(pytest.param(*each, marks=pytest.mark.long) for each in ((4, 2), (6, 3))), (8, 2)]
)
@pytest.mark.parametrize("options", [OPTIM, GRADS | OVERLAP | {"ddp_bucket_size": 600}], ids=["optim", "grads-overlap"])
def test_pipelines_with_a_tied_embedding(world_size: int, pp: int, options: Options, tmp_path: Path) -> None:
    """Both copies get the sum of both gradients and count and are saved once; gradients may be sharded (pp 2, dp 4)."""
    folders = [tmp_path / name for name in ("plain", "sharded")]
    for folder in folders:
        folder.mkdir()
    expected = run_distributed(world_size, step_of_stages, str(folders[0]), {}, pp)
    results = run_distributed(world_size, step_of_stages, str(folders[1]), options, pp)
    word = "embedding.word_embeddings.weight"
    dp = world_size // pp
    for rank, (result, wanted) in enumerate(zip(results, expected, strict=True)):
        assert result["norms"] == pytest.approx(wanted["norms"], rel=1e-12)
        assert wanted["norms"][0] ** 2 == pytest.approx(_sum_of_squares(pp), rel=1e-12)
        assert result["stored"] == wanted["stored"]
        assert sum(word in name for name in result["stored"]) == 3
        for name, parameter in result["parameters"].items():
            torch.testing.assert_close(parameter, wanted["parameters"][name], rtol=1e-12, atol=1e-13)
        assert (word in result["parameters"]) == (rank // dp in (0, pp - 1))
        if word in result["parameters"]:
            assert torch.equal(result["parameters"][word], results[0]["parameters"][word])
        assert result["bytes"] == result["whole_bytes"] / dp
        assert all(0 < count <= 3 for count in result["pools"])


def _sum_of_squares(pp: int) -> float:
    """Return the squared norm of all stages' first weights, the tied one counted once."""
    ones = 31 * 11 + sum((5 + 7 * stage) * 40 for stage in range(pp))
    return ones + pp * 0.25 * (67 * 33 + 160 * 48 + 160 + 48)


def use_outside_its_module() -> None:
    """Use a parameter of a module that is not called, while its new values are on their way."""
    run = build(OPTIM | GATHER | {"ddp_bucket_size": 1})
    run.step(0)
    loss = run.ddp.module.fc2.square().sum()
    loss.backward()


def test_use_of_a_parameter_that_nobody_waited_for_is_refused() -> None:
    with pytest.raises(RankFailure, match="used outside its module's forward"):
        run_distributed(2, use_outside_its_module)
