"""One training step of whole models over context-parallel ranks, in float64, against one process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron.core.context_parallel.partition import cut_sequence, positions_of
from megatron.core.datasets.batch import Batch
from megatron.core.parallel_config import ParallelSizes
from megatron.core.parallel_state import ParallelState, create_parallel_state, describe_parallel_state
from megatron.core.process_group import Group, single_rank_group
from pretrain_gpt import forward_step
from tests.harness.closeness import GRADIENT_FLOOR, assert_gradients_close, relative_difference
from tests.harness.distributed import run_distributed
from tests.harness.toy_model import (
    Fragment,
    fragments,
    load_global_weights,
    make_batch,
    make_model,
    reassemble,
    summed_gradients,
)

TOLERANCE = 1e-9
LENGTH, BATCH = 24, 3
DOCUMENT_STARTS = ((1, 7), (3, 6, 12, 23), ())

GPT2: dict[str, Any] = {"max_position_embeddings": 26}
LLAMA: dict[str, Any] = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "num_attention_heads": 8,
    "num_query_groups": 4,
    "untie_embeddings_and_output_weights": True,
}
QWEN = LLAMA | {"add_qkv_bias": True, "num_query_groups": 2, "untie_embeddings_and_output_weights": False}
FULL_RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SELECTIVE_RECOMPUTE = {"recompute_granularity": "selective"}


@dataclass(frozen=True)
class Case:
    """``packed`` resets positions and attention at documents; ``mask`` names what the loss leaves out."""

    settings: dict[str, Any]
    packed: bool = False
    mask: str = "random"


CASES = {
    "gpt2": Case(GPT2),
    "llama": Case(LLAMA),
    "qwen": Case(QWEN),
    "one-key-value-head": Case(QWEN | {"num_query_groups": 1}),
    "query-key-norm": Case(QWEN | {"qk_layernorm": True}, packed=True),
    "packed-gpt2": Case(GPT2, packed=True),
    "packed-llama": Case(LLAMA, packed=True, mask="ends of documents"),
    "a-rank-without-loss": Case(GPT2, mask="rank 0"),
    "a-rank-without-loss-packed": Case(QWEN, packed=True, mask="rank 0"),
    "one-token-with-loss": Case(LLAMA, mask="all but one"),
    "unfused": Case(GPT2 | {"attention_backend": "unfused"}),
    "full-recompute": Case(QWEN | FULL_RECOMPUTE, packed=True),
    "selective-recompute": Case(GPT2 | SELECTIVE_RECOMPUTE),
    "selective-recompute-packed": Case(QWEN | SELECTIVE_RECOMPUTE, packed=True),
}
ROUNDED = Case(QWEN, packed=True)
SINGLE = (("p2p",), ("all_gather",), ("a2a",))
# (tp, cp) and the exchanges that run there, one for all layers or one a layer.
LAYOUTS = {(1, 2): SINGLE, (1, 4): SINGLE, (2, 2): (("all_gather",), ("a2a", "p2p"))}


@dataclass(frozen=True)
class StepResult:
    """Hold one rank's part of the loss and of the token count, and the gradients after every reduction."""

    loss_sum: float
    num_tokens: float
    gradients: list[Fragment]


def case_batch(case: Case, cp: Group) -> Batch:
    """Return a rank's part of the case's micro-batch."""
    tokens, labels, positions, mask = make_batch(LENGTH, BATCH, 53)
    document_ids = torch.zeros(BATCH, LENGTH, dtype=torch.int64)
    positions = positions.clone()
    for row, starts in enumerate(DOCUMENT_STARTS):
        for start in starts:
            document_ids[row, start:] += 1
            positions[row, start:] = torch.arange(LENGTH - start)
    if case.mask == "ends of documents":
        mask[:, :-1] = (document_ids[:, 1:] == document_ids[:, :-1]).to(mask)
    elif case.mask == "rank 0":
        # What rank 0 of four holds is a part of what rank 0 of two holds.
        mask[:, positions_of(0, 2, LENGTH)] = 0.0
    elif case.mask == "all but one":
        mask = torch.zeros_like(mask)
        mask[1, 17] = 1.0
    if not case.packed:
        positions = torch.arange(LENGTH).expand(BATCH, LENGTH)
    cut = (cut_sequence(whole, cp, dim=1) for whole in (tokens, labels, mask, positions))
    return Batch(*cut, document_ids if case.packed else None, mask.sum().long())


def run_step(case: Case, state: ParallelState, exchange: tuple[str, ...]) -> StepResult:
    """Compute gradients as training does: of the loss per token of the micro-batch, averaged over the cp ranks."""
    model = make_model(
        state.tp,
        cp=state.cp,
        params_dtype="float64",
        sequence_parallel=state.tp.size > 1,
        cp_comm_type=exchange,
        **case.settings,
    )
    load_global_weights(model)
    loss = forward_step(case_batch(case, state.cp), model, None)
    (loss.loss_sum / loss.num_tokens).backward()
    gradients = summed_gradients(model, state.tp)
    for _, gradient in gradients:
        if state.cp.size > 1:
            dist.all_reduce(gradient, group=state.cp.handle)
        gradient /= state.cp.size
    return StepResult(loss.loss_sum.item(), loss.num_tokens.item(), fragments(gradients))


def run_layouts(case: Case) -> dict[tuple[int, int, tuple[str, ...]], StepResult]:
    results = {}
    for (tp, cp), exchanges in LAYOUTS.items():
        state = create_parallel_state(ParallelSizes(tp=tp, cp=cp))
        for exchange in exchanges:
            results[tp, cp, exchange] = run_step(case, state, exchange)
    return results


# Each differs from another case in the model alone.
DOUBLES = (
    *("llama", "qwen", "packed-gpt2", "a-rank-without-loss"),
    *("selective-recompute", "selective-recompute-packed"),
)


@pytest.mark.default(1)
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.long] * (n in DOUBLES)) for n in CASES])
def test_loss_and_gradients_do_not_depend_on_the_layout(name: str) -> None:
    case = CASES[name]
    expected = run_step(case, describe_parallel_state(0, 1), ("p2p",))
    expected_gradients = reassemble([expected.gradients])
    ranks = run_distributed(4, run_layouts, case)
    for layout in ranks[0]:
        tp, cp, _ = layout
        one_model = [rank[layout] for rank in ranks[: tp * cp]]
        assert sum(r.loss_sum for r in one_model) / tp == pytest.approx(expected.loss_sum, rel=TOLERANCE, abs=0.0)
        assert sum(r.num_tokens for r in one_model) / tp == pytest.approx(expected.num_tokens, rel=1e-12, abs=0.0)
        # Every cp rank has the same gradients now; the first tp ranks hold all of them.
        gradients = reassemble([r.gradients for r in one_model[:tp]], copy_tolerance=1e-12)
        assert_gradients_close(gradients, expected_gradients, TOLERANCE)


def test_every_case_has_losses_of_its_own() -> None:
    alike = ("unfused", "full-recompute", "selective-recompute", "selective-recompute-packed")
    losses = {
        name: run_step(case, describe_parallel_state(0, 1), ("p2p",)).loss_sum
        for name, case in CASES.items()
        if name not in alike
    }
    assert len({round(loss, 9) for loss in losses.values()}) == len(losses), losses


def mask_per_rank(case: Case) -> list[float]:
    """Return how many counting tokens each of two ranks holds."""
    mask = case_batch(case, single_rank_group(("cp",))).loss_mask
    assert mask is not None
    return [float(mask[:, positions_of(rank, 2, LENGTH)].sum()) for rank in range(2)]


def test_cases_leave_ranks_with_unequal_token_counts() -> None:
    counts = {name: mask_per_rank(case) for name, case in CASES.items()}
    assert counts["a-rank-without-loss"][0] == 0.0
    assert sorted(counts["one-token-with-loss"]) == [0.0, 1.0]
    assert all(first != second for first, second in counts.values()), counts


def rounded_step(dtype: str, state: ParallelState, exchange: str) -> dict[str, np.ndarray]:
    """Return the loss sum and the gradients of the whole model in a low precision, reduced in float32."""
    model = make_model(state.tp, cp=state.cp, params_dtype=dtype, cp_comm_type=(exchange,), **QWEN)
    load_global_weights(model)
    loss = forward_step(case_batch(ROUNDED, state.cp), model, None)
    (loss.loss_sum / loss.num_tokens).backward()
    tensors = {spec.name: gradient.float() for spec, gradient in summed_gradients(model, state.tp)}
    tensors["loss sum"] = loss.loss_sum.detach().float() * state.cp.size
    for tensor in tensors.values():
        if state.cp.size > 1:
            dist.all_reduce(tensor, group=state.cp.handle)
        tensor /= state.cp.size
    return {name: tensor.numpy() for name, tensor in tensors.items()}


def rounded_steps(dtype: str) -> dict[str, dict[str, np.ndarray]]:
    state = create_parallel_state(ParallelSizes(cp=2))
    return {exchange: rounded_step(dtype, state, exchange) for exchange in ("p2p", "all_gather", "a2a")}


def largest_error(tensors: dict[str, np.ndarray], exact: dict[str, np.ndarray]) -> float:
    floor = GRADIENT_FLOOR * max(float(np.abs(values).max()) for values in exact.values())
    return max(relative_difference(tensors[name], values, floor) for name, values in exact.items())


@pytest.mark.default(1)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-5), ("bfloat16", 0.15)])
def test_lower_precisions_round_no_worse_than_one_process(dtype: str, tolerance: float) -> None:
    alone = describe_parallel_state(0, 1)
    exact = rounded_step("float64", alone, "p2p")
    limit = min(2 * largest_error(rounded_step(dtype, alone, "p2p"), exact), tolerance)
    for results in run_distributed(2, rounded_steps, dtype):
        errors = {exchange: largest_error(tensors, exact) for exchange, tensors in results.items()}
        assert all(error <= limit for error in errors.values()), (errors, limit)
