"""A dry run's FLOPs compared with the closed form of the model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron.config.arguments import resolve_arguments
from megatron.config.run_config import RunConfig
from megatron.planner.simulation.dry_run import ModelFlops, check_flops, count_flops, needed_flops
from megatron.planner.simulation.recorder import Gemm, Operation

MODEL = (
    *("--num-layers", "4", "--hidden-size", "64", "--num-attention-heads", "4", "--ffn-hidden-size", "96"),
    *("--seq-length", "32", "--max-position-embeddings", "32", "--micro-batch-size", "2", "--global-batch-size", "8"),
    *("--train-iters", "2", "--lr", "1e-4", "--mock-data", "--vocab-size", "1000", "--tokenizer-type", "NullTokenizer"),
)
EXPERTS = (
    *("--num-experts", "8", "--moe-router-topk", "2", "--moe-ffn-hidden-size", "48", "--disable-bias-linear"),
    *("--moe-token-dispatcher-type", "alltoall"),
)


def config_of(*flags: str, world_size: int = 1) -> RunConfig:
    return resolve_arguments((*MODEL, *flags), world_size, needs_files=False).config


def gemm(phase: str, name: str = "mm", *, is_recomputed: bool = False, is_uncounted: bool = False) -> Operation:
    sizes = Gemm(1, 10, 10, 5)
    operation = Operation(phase, name, "megatron/core/transformer/mlp.py:1", (), 2, 0, sizes.flops, sizes)
    return replace(operation, is_recomputed=is_recomputed, is_uncounted=is_uncounted)


def test_recomputed_and_optimizer_flops_are_none_of_the_models() -> None:
    scores = replace(gemm("forward", "bmm"), where="gradient of megatron/core/ops/dot_product_attention.py:61")
    counted = count_flops(
        [gemm("forward"), gemm("backward"), gemm("backward", is_recomputed=True), gemm("optimizer"), scores]
    )
    assert (counted.gemms, counted.attention, counted.recomputed, counted.optimizer) == (2000, 1000, 1000, 1000)
    assert counted.hardware == 5000
    assert counted.of_model(ModelFlops(2000, 600)) == 2600


def test_a_step_that_computes_less_than_its_model_is_an_internal_error() -> None:
    counted = count_flops([gemm("forward"), replace(gemm("forward", "mine::product", is_uncounted=True), flops=0.0)])
    check_flops(counted, ModelFlops(1000, 0))
    with pytest.raises(RuntimeError, match=r"counted 1000 FLOPs .* need 2000 .* unknown FLOPs: mine::product$"):
        check_flops(counted, ModelFlops(1900, 100))


def test_the_excess_of_attention_hides_no_missing_gemm() -> None:
    scores = replace(gemm("forward", "bmm"), where="megatron/core/ops/dot_product_attention.py:61")
    counted = count_flops([gemm("forward"), scores, scores])
    check_flops(counted, ModelFlops(1000, 1200))
    with pytest.raises(RuntimeError, match="counted 2200 FLOPs"):
        check_flops(counted, ModelFlops(1800, 1200))


@pytest.mark.parametrize(
    ("flags", "world_size"),
    [
        ((), 1),
        (("--pipeline-model-parallel-size", "2"), 4),
        (("--pipeline-model-parallel-size", "2", "--tensor-model-parallel-size", "2"), 4),
        (("--context-parallel-size", "2", *EXPERTS), 4),
        (("--mtp-num-layers", "1", "--position-embedding-type", "rope", "--pipeline-model-parallel-size", "4"), 4),
    ],
)
def test_the_stages_together_need_what_the_model_needs(flags: tuple[str, ...], world_size: int) -> None:
    config = config_of(*flags, world_size=world_size)
    pp = config.parallel_sizes.pp
    together = sum(needed_flops(config, stage).total for stage in range(pp)) * world_size / pp
    assert together == pytest.approx(3.0 * 8 * config.model.forward_flops_per_sequence(32))


def test_full_experts_and_documents_need_less() -> None:
    whole, dropping = (
        needed_flops(config_of(*EXPERTS, *more), 0) for more in ((), ("--moe-expert-capacity-factor", "0.5"))
    )
    # Half of two matrices of 64 x 48 for each of 2 experts and 4 layers, 8 sequences of 32 tokens.
    assert whole.gemms - dropping.gemms == 3 * 2 * 8 * 32 * 4 * 2 * (2 * 64 * 48) / 2
    packed, plain = (needed_flops(config_of(*more), 0) for more in (("--reset-attention-mask",), ()))
    assert packed.attention == plain.attention / 2
    assert packed.gemms == plain.gemms


def test_beside_adapters_weights_need_no_gradients() -> None:
    plain, adapted = (needed_flops(config_of(*more), 0) for more in ((), ("--lora-rank", "4")))
    assert adapted.gemms < 2 / 3 * plain.gemms
