"""The flags of weights that are sharded over the data-parallel ranks."""

from __future__ import annotations

import dataclasses

import pytest

from megatron.config.arguments import resolve_arguments
from megatron.config.checks import parallelism
from megatron.core.errors import ConfigurationError
from tests.unit.training.config.test_arguments import MINIMAL

WEIGHTS = "--data-parallel-sharding-strategy optim_grads_params"


@pytest.mark.parametrize("text", [WEIGHTS, "--use-torch-fsdp2", "--use-megatron-fsdp", "--use-custom-fsdp"])
def test_each_spelling_shards_weights(text: str) -> None:
    resolved = resolve_arguments([*MINIMAL, *text.split()], 2)
    assert resolved.notes == ()
    ddp = resolved.config.ddp
    assert ddp.shards_weights
    assert ddp.shards_gradients
    assert ddp.use_distributed_optimizer
    assert not resolve_arguments([*MINIMAL, *text.split()], 1).config.ddp.shards_weights


def test_megatron_fsdp_shards_what_the_strategy_says() -> None:
    text = "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads"
    ddp = resolve_arguments([*MINIMAL, *text.split()], 2).config.ddp
    assert ddp.shards_gradients
    assert not ddp.shards_weights


def test_gathering_ahead_is_always_on() -> None:
    resolved = resolve_arguments([*MINIMAL, *WEIGHTS.split(), "--overlap-param-gather"], 2)
    (note,) = resolved.notes
    assert note.startswith("--overlap-param-gather has no effect with --data-parallel-sharding-strategy optim_grads_p")
    assert not resolved.config.ddp.overlap_param_gather


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("--use-torch-fsdp2 --data-parallel-sharding-strategy optim", "leave one of them out"),
        ("--num-distributed-optimizer-instances 2", "add --use-distributed-optimizer, or leave it out"),
        (
            f"{WEIGHTS} --num-distributed-optimizer-instances 3",
            "3 does not divide the 2 ranks with the same weights; use 1",
        ),
        (f"{WEIGHTS} --num-distributed-optimizer-instances 0", "a value greater than 0 is expected"),
        (f"{WEIGHTS} --num-distributed-optimizer-instances 2", "2 ranks with the same weights would be a copy"),
        (f"{WEIGHTS} --lora-rank 4", "--lora-rank 4 with --data-parallel-sharding-strategy optim_grads_params"),
        (f"{WEIGHTS} --bf16 --fp8-format hybrid --fp8-param-gather", "--fp8-param-gather with"),
        (
            f"{WEIGHTS} --overlap-param-gather --overlap-param-gather-with-optimizer-step",
            "--overlap-param-gather-with-optimizer-step with",
        ),
        (f"{WEIGHTS} --cuda-graph-impl local --attention-dropout 0", "--cuda-graph-impl local: with"),
        (f"{WEIGHTS} --cpu-offloading --cpu-offloading-num-layers 1 --cpu-offloading-weights", "--cpu-offloading-weig"),
    ],
)
def test_what_cannot_be_combined_is_refused_in_one_line(text: str, named: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        resolve_arguments([*MINIMAL, *text.split()], 2)
    (problem,) = caught.value.problems
    assert named in problem


def test_a_model_is_taken_out_of_a_run_with_instances() -> None:
    text = "--use-distributed-optimizer --num-distributed-optimizer-instances 2"
    config = resolve_arguments([*MINIMAL, *text.split()], 4).config
    alone = dataclasses.replace(config, world_size=1)
    assert [problem for check in parallelism.LAYOUT_CHECKS for problem in check.find(alone)] == []
