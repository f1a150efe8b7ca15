"""A parameter that a layer gains is counted by every plan, without an edit of the planner."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from megatron.cli.planner_arguments import read_planned_run
from megatron.config.run_config import RunConfig
from megatron.core.models.gpt import chunk_parameters
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.parallel_config import ParallelSizes
from megatron.core.parallel_state import describe_parallel_state
from megatron.core.tensor_parallel.sharded_layers import make_parameter, replicated_spec
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.mlp import FeedForward
from megatron.core.transformer.norm import Norm
from megatron.planner.implementations import NATIVE
from megatron.planner.memory import stage_state
from megatron.planner.plan import Plan
from megatron.training.theoretical_memory_usage import model_size

MODEL = (
    *("--num-layers", "4", "--hidden-size", "64", "--num-attention-heads", "4", "--ffn-hidden-size", "96"),
    *("--seq-length", "32", "--max-position-embeddings", "32", "--micro-batch-size", "2", "--global-batch-size", "8"),
    *("--train-iters", "2", "--lr", "1e-4", "--mock-data", "--vocab-size", "1000", "--tokenizer-type", "NullTokenizer"),
)
NO_GROUP = describe_parallel_state(0, 1, ParallelSizes()).tp
LAYOUTS = {
    "one": ((), 1),
    "tp2 pp2": (("--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"), 4),
    "fsdp": (("--data-parallel-sharding-strategy", "optim_grads_params", "--use-distributed-optimizer"), 4),
}
SIZE = 12800
"""Large compared with the padding of flat buffers."""


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Describe the model of each test anew."""
    monkeypatch.setattr(chunk_parameters, "_built", {})


def config_of(layout: str) -> RunConfig:
    flags, world_size = LAYOUTS[layout]
    return read_planned_run((*MODEL, *flags), world_size).config


@pytest.mark.default
def test_a_description_leaves_the_generator_of_a_run_alone() -> None:
    config, state = config_of("tp2 pp2"), torch.get_rng_state()
    torch.rand(3)
    drawn = torch.get_rng_state()
    assert model_size(config).block > 0
    assert torch.equal(torch.get_rng_state(), drawn)
    torch.set_rng_state(state)


def add_parameter(monkeypatch: pytest.MonkeyPatch, kind: type[nn.Module], size: int) -> None:
    build: Callable[..., None] = kind.__init__

    @functools.wraps(build)
    def build_with_more(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        if kind is not GPTModel:
            spec = replicated_spec("gate", (size,), NO_GROUP, partial_gradient=False)
            self.gate = make_parameter((size,), spec, torch.float32, "meta")
        else:
            # A parameter without a `ParamSpec`.
            self.gate = nn.Parameter(torch.empty(size, device="meta"))

    monkeypatch.setattr(kind, "__init__", build_with_more)
    monkeypatch.setattr(chunk_parameters, "_built", {})


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("kind", "in_layer", "in_model"),
    [(SelfAttention, 1, 0), (FeedForward, 1, 0), (Norm, 2, 1), (GPTModel, 0, 1)],
    ids=["attention", "feed-forward", "norm", "model"],
)
def test_a_new_parameter_is_counted(
    monkeypatch: pytest.MonkeyPatch, layout: str, kind: type[nn.Module], in_layer: int, in_model: int
) -> None:
    config = config_of(layout)
    plan, stages = Plan.of(config), range(config.parallel_sizes.pp)
    before = model_size(config), [stage_state(plan, stage, NATIVE) for stage in stages]
    add_parameter(monkeypatch, kind, SIZE)
    after = model_size(config), [stage_state(plan, stage, NATIVE) for stage in stages]
    for stage in stages:
        # A model is a chunk of a stage; its last norm is on the last one.
        more = in_layer * 4 // len(stages) + (in_model if kind is GPTModel or stage == len(stages) - 1 else 0)
        assert after[0].shards[stage] - before[0].shards[stage] == more * SIZE
        assert after[0].trained[stage] - before[0].trained[stage] == more * SIZE
        assert after[1][stage].parameters - before[1][stage].parameters == more * SIZE
        shards = 4 if layout == "fsdp" else 1
        assert after[1][stage].weights - before[1][stage].weights == pytest.approx(4 * more * SIZE / shards, rel=0.05)
        assert after[1][stage].optimizer - before[1][stage].optimizer == 8 * more * SIZE // shards
    assert after[0].block + after[0].embedding > before[0].block + before[0].embedding
