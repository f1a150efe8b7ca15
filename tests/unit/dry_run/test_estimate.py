"""How much of the communication the kernels of a step hide."""

from __future__ import annotations

import pytest

from megatron.core.process_group import CollectiveCall
from megatron.planner.gpu import H100
from megatron.planner.simulation.dry_run import DryRun
from megatron.planner.simulation.estimate import Estimate, estimate_step
from megatron.planner.simulation.recorder import Communication, LinkEvent, Operation, StepRecord
from megatron.planner.simulation.roofline import operation_seconds, transfer_seconds

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
