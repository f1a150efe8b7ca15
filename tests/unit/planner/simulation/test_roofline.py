"""The roofline against published runs, the share of a GPU's peak, and how much communication kernels hide."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from benchmarks.gpu_dry_run.run import CASES, COMMON
from megatron.core.process_group import CollectiveCall
from megatron.planner.gpu import A100, GPUS, H100
from megatron.planner.simulation.dry_run import DryRun
from megatron.planner.simulation.estimate import Estimate, estimate_step
from megatron.planner.simulation.fake_cuda import find_compiler
from megatron.planner.simulation.recorder import Communication, Gemm, LinkEvent, Operation, StepRecord
from megatron.planner.simulation.roofline import operation_seconds, transfer_seconds
from tests.harness.dry_runs import DryRunCase, run_dry_runs

LAYERS, HIDDEN, HEADS, LENGTH, ROWS, VOCAB = 24, 1024, 16, 1024, 64 * 1024, 50304
NUM_PARAMETERS = 354_823_168
PUBLISHED_S = 0.820
"""A step of 524,288 tokens of GPT-2 350M on 8 A100 80GB SXM: github.com/karpathy/llm.c, scripts/run_gpt2_350M.sh."""


def product(rows: int, inner: int, columns: int) -> Operation:
    num_bytes = 2 * (rows * inner + inner * columns + rows * columns)
    shapes = ((rows, inner), (inner, columns))
    gemm = Gemm(1, rows, inner, columns)
    return Operation("", "mm", "", shapes, 2, num_bytes, gemm.flops, gemm)


def linear(inputs: int, outputs: int) -> Iterator[Operation]:
    """Yield the products of a linear map: forward, gradient of its input, gradient of its weight."""
    yield product(ROWS, inputs, outputs)
    yield product(ROWS, outputs, inputs)
    yield product(outputs, ROWS, inputs)


def attention(name: str, num_tensors: int, flops: float) -> Operation:
    shape = (ROWS // LENGTH, HEADS, LENGTH, HIDDEN // HEADS)
    return Operation("", name, "", (shape, shape, shape), 2, 2 * num_tensors * ROWS * HIDDEN, flops)


def pass_over(num_tensors: int, width: int = HIDDEN) -> Operation:
    """Return a kernel that reads and writes so many tensors of 16 bits with a row for each token."""
    return Operation("", "kernel", "", (), 2, 2 * num_tensors * ROWS * width)


def published_step() -> Iterator[Operation]:
    """Yield the kernels of that run on one of its 8 GPUs, as its source has them: one micro-batch, nothing recomputed.

    Residual and norm are one kernel, as are cross-entropy and its gradient; GELU and bias gradients are their own.
    """
    causal_flops = 2.0 * ROWS * LENGTH * HIDDEN
    for _ in range(LAYERS):
        for inputs, outputs in ((HIDDEN, 3 * HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, 4 * HIDDEN), (4 * HIDDEN, HIDDEN)):
            yield from linear(inputs, outputs)
            yield pass_over(1, outputs)
        yield attention("_scaled_dot_product_cudnn_attention", 4, causal_flops)
        yield attention("_scaled_dot_product_cudnn_attention_backward", 8, 2.5 * causal_flops)
        yield from (pass_over(4), pass_over(4), pass_over(2, 4 * HIDDEN), pass_over(3, 4 * HIDDEN))
        yield from (pass_over(4), pass_over(4))
    yield from linear(HIDDEN, VOCAB)
    yield pass_over(2, VOCAB)
    # AdamW on an eighth of the parameters: 16-bit gradient and weight, float32 moments and main weight.
    yield Operation("", "adam", "", (), 4, (2 + 2 + 2 * 12) * NUM_PARAMETERS // 8)


def test_a_published_step_is_predicted_within_a_tenth() -> None:
    seconds = sum(operation_seconds(operation, A100) for operation in published_step())
    # Gradients are reduced behind the backward pass, but for the embedding; the shards are gathered after the update.
    for operation, num_bytes in (("reduce_scatter", 2 * VOCAB * HIDDEN), ("all_gather", 2 * NUM_PARAMETERS)):
        call = CollectiveCall(operation, ("dp",), 8, num_bytes)
        seconds += transfer_seconds(Communication("", "", call, crosses_machines=False), A100)
    assert seconds == pytest.approx(PUBLISHED_S, rel=0.1)


def test_no_operation_is_faster_than_the_published_peaks() -> None:
    for gpu in GPUS.values():
        for operation in published_step():
            seconds = operation_seconds(operation, gpu)
            assert operation.flops / seconds < gpu.half_flops
            assert operation.num_bytes / seconds < gpu.memory_bandwidth


def test_one_tile_more_than_the_multiprocessors_takes_another_wave() -> None:
    one_less, full, one_more = (operation_seconds(product(128 * n, 4096, 256), H100) for n in (131, 132, 133))
    assert one_less == full
    assert one_more > 1.25 * full


def test_a_grouped_product_is_as_slow_as_its_groups_together() -> None:
    one = product(8192, 4096, 14336)
    groups = replace(one, name="_grouped_mm", gemm=Gemm(8, 1024, 4096, 14336))
    assert operation_seconds(groups, H100) == pytest.approx(operation_seconds(one, H100), rel=0.05)
    assert one.flops / operation_seconds(groups, H100) > 0.5 * H100.half_flops
    # Half of each tile of 64 rows is empty.
    narrow = replace(one, name="_grouped_mm", gemm=Gemm(256, 32, 4096, 14336))
    assert operation_seconds(narrow, H100) > 1.5 * operation_seconds(one, H100)


def test_what_has_flops_and_is_no_gemm_is_not_free() -> None:
    convolution = Operation("", "convolution", "", ((1, 1),), 2, 0, 1e12)
    assert operation_seconds(convolution, H100) == pytest.approx(1e12 / (H100.half_flops * H100.product_share))


def test_single_precision_and_a_kernel_that_does_nothing() -> None:
    half = product(4096, 4096, 4096)
    assert operation_seconds(replace(half, itemsize=4), H100) > 10 * operation_seconds(half, H100)
    assert operation_seconds(Operation("", "add", "", (), 2, 0), H100) == 2.5e-6


def test_communication_is_priced_by_what_leaves_a_rank() -> None:
    def seconds(operation: str, ranks: int, crosses: bool = False) -> float:
        call = CollectiveCall(operation, ("tp",), ranks, 10**9)
        return transfer_seconds(Communication("", "", call, crosses), H100)

    assert seconds("all_reduce", 2) == pytest.approx(2 * seconds("all_gather", 2), rel=0.01)
    assert seconds("all_gather", 8) == pytest.approx(7 / 4 * seconds("all_gather", 2), rel=0.01)
    assert seconds("send", 2, crosses=True) == pytest.approx(9 * seconds("send", 2), rel=0.02)


BY_NAME = {case.name: case for case in CASES}


@pytest.mark.long
@pytest.mark.skipif(find_compiler() is None, reason="a CPU build of torch needs a C++ compiler for this")
@pytest.mark.parametrize(
    ("name", "least"),
    [
        ("GPT-2 345M without dropout, batch 128", 0.45),
        ("8B, TP 1 · DP 8", 0.57),
        ("8B, TP 2 + SP · DP 4, communication beside products and the update", 0.57),
    ],
)
def test_a_model_reaches_the_share_of_the_peak_that_is_said(name: str, least: float) -> None:
    case = BY_NAME[name]
    result = run_dry_runs([DryRunCase(name, (*case.flags, *COMMON), case.world_size)])[name]
    assert result.error == ""
    assert result.report["mfu"] >= least
    assert len(result.report["waits"]) <= 5


KERNEL = Operation("backward", "kernel", "", (), 2, 10**9)
KERNEL_S = operation_seconds(KERNEL, H100)


def transfer(operation: str, num_bytes: int = 10**9) -> Communication:
    call = CollectiveCall(operation, ("tp",), 2, num_bytes)
    return Communication("backward", "", call, crosses_machines=False)


def seconds_of(communication: Communication) -> float:
    return transfer_seconds(communication, H100)


def estimate(*events: tuple[int, Communication, bool], num_kernels: int = 8, num_carried: int = 0) -> Estimate:
    """Return the estimate of a step of kernels, where (kernels before it, communication, whether it is waited for).

    The first ``num_carried`` of them are under way when the step begins.
    """
    record = StepRecord(
        operations=[KERNEL] * num_kernels,
        communications=list({id(each): each for _, each, _ in events}.values()),
        link_events=[LinkEvent("backward", *event) for event in events],
        num_carried=num_carried,
    )
    run = DryRun(
        *(record, 0, 2, 0, 1, True, 1, 1, 1, 1),
        model_flops=1e12,
    )
    return estimate_step(run, H100)


def test_what_is_waited_for_at_once_is_not_hidden() -> None:
    each = transfer("all_reduce")
    result = estimate((3, each, False), (3, each, True))
    assert result.communication_seconds == pytest.approx(seconds_of(each))
    assert result.seconds == pytest.approx(8 * KERNEL_S + seconds_of(each))


def test_kernels_between_beginning_and_wait_hide_what_they_take() -> None:
    each = transfer("all_reduce")
    assert 2 * KERNEL_S < seconds_of(each) < 8 * KERNEL_S
    result = estimate((1, each, False), (3, each, True))
    assert result.communication_seconds == pytest.approx(seconds_of(each) - 2 * KERNEL_S)
    assert result.hidden_communication_seconds == pytest.approx(2 * KERNEL_S)
    assert estimate((0, each, False), (8, each, True)).communication_seconds == 0
    assert estimate((0, each, False)).communication_seconds == 0


def test_messages_of_one_direction_follow_each_other() -> None:
    first, second, back = transfer("send"), transfer("send"), transfer("receive")
    both = estimate((0, first, False), (0, second, False), (0, second, True))
    assert both.communication_seconds == pytest.approx(2 * seconds_of(first))
    there_and_back = estimate((0, first, False), (0, back, False), (0, first, True), (0, back, True))
    assert there_and_back.communication_seconds == pytest.approx(seconds_of(first))


def test_a_collective_takes_both_directions() -> None:
    sent, reduced = transfer("send"), transfer("all_reduce")
    result = estimate((0, sent, False), (0, reduced, False), (0, reduced, True))
    assert result.communication_seconds == pytest.approx(seconds_of(sent) + seconds_of(reduced))


def test_what_the_step_before_has_waited_out_is_not_waited_for_again() -> None:
    before, after, last = transfer("all_gather"), transfer("all_gather"), transfer("all_reduce", 8)
    kept_up = estimate(
        (0, before, False), (2, before, True), (6, after, False), (8, last, False), (8, last, True), num_carried=1
    )
    assert kept_up.communication_seconds == pytest.approx(seconds_of(after) + seconds_of(last) - 2 * KERNEL_S)
    # Begun with two kernels to go, it lasts into the next step for the rest of its time.
    carried = estimate((0, before, False), (1, before, True), (6, after, False), num_carried=1)
    assert carried.communication_seconds == pytest.approx(seconds_of(before) - 3 * KERNEL_S)
