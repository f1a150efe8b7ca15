"""The executor over real ranks computes what one process computes, and its bubble is that of the papers."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from benchmarks.pipeline_bubble import CASES, Case, measure
from megatron.core.main_grad import MainGrad, WeightGradQueue, attach_main_grad, main_grad_of
from megatron.core.parallel_config import ParallelSizes
from megatron.core.parallel_state import create_parallel_state
from megatron.core.pipeline_parallel.executor import (
    MicrobatchLoss,
    ModelChunk,
    PipelineConnection,
    ScheduleResult,
    gather_timeline,
    run_schedule,
)
from megatron.core.pipeline_parallel.p2p_communication import MessageOrders, SendQueue, create_pipeline_links
from megatron.core.pipeline_parallel.schedule_actions import SCHEDULES, Action, StagePlace
from megatron.core.process_group import single_rank_group
from megatron.core.tensor_parallel.mappings import InputRegion
from megatron.core.tensor_parallel.sharded_layers import tensor_parallel_linear
from tests.harness.distributed import run_distributed

WIDTH, INNER = 5, 7
CPU = torch.device("cpu")


class Stage(nn.Module):
    """Two linear maps and a scale; weights depend on the global stage only."""

    def __init__(self, global_stage: int, is_last: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(100 + global_stage)
        for name, shape in (("up", (INNER, WIDTH)), ("down", (WIDTH, INNER)), ("bias", (WIDTH,)), ("scale", (WIDTH,))):
            values = torch.randn(shape, generator=generator, dtype=torch.float64) * 0.4
            self.register_parameter(name, nn.Parameter(values))
        self.is_last = is_last

    def forward(self, microbatch: int, hidden: torch.Tensor | None) -> torch.Tensor | MicrobatchLoss:
        x = model_input(microbatch) if hidden is None else hidden
        tp = single_rank_group()
        inner = torch.tanh(tensor_parallel_linear(x, self.up, None, InputRegion.SPLIT, tp))
        x = x + self.scale * tensor_parallel_linear(inner, self.down, self.bias, InputRegion.SPLIT, tp)
        if not self.is_last:
            return x
        mask = loss_mask(microbatch)
        return MicrobatchLoss((x.square().sum(dim=-1) * mask).sum(), mask.sum())


def length_of(microbatch: int) -> int:
    """Micro-batches have different lengths, so that none can pass for another."""
    return 2 + microbatch % 3


def model_input(microbatch: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(microbatch)
    return torch.randn((length_of(microbatch), 3, WIDTH), generator=generator, dtype=torch.float64)


def loss_mask(microbatch: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 + microbatch)
    return (torch.rand((length_of(microbatch), 3), generator=generator) > 0.4).to(torch.float64)


def message_shape(microbatch: int) -> tuple[int, ...]:
    return length_of(microbatch), 3, WIDTH


def one_process(num_stages: int, num_microbatches: int, per_token: bool) -> tuple[float, float, list[torch.Tensor]]:
    """Return loss sum, token count and every gradient by plain autograd; the oracle, written apart."""
    stages = [Stage(index, index == num_stages - 1) for index in range(num_stages)]
    loss_sum = num_tokens = 0.0
    for microbatch in range(num_microbatches):
        value = functools.reduce(lambda hidden, stage: stage(microbatch, hidden), stages, None)
        assert isinstance(value, MicrobatchLoss)
        divisor = 1.0 if per_token else num_microbatches * max(1.0, value.num_tokens.item())
        (value.loss_sum / divisor).backward()
        loss_sum += value.loss_sum.item()
        num_tokens += value.num_tokens.item()
    return loss_sum, num_tokens, [p.grad for stage in stages for p in stage.parameters()]


@dataclass(frozen=True)
class ExecutorCase:
    schedule: str
    num_microbatches: int
    num_chunks: int = 1
    per_token: bool = False
    main_grads: bool = False


def connect(num_chunks: int, in_one_order: bool = False, waits: bool = False) -> PipelineConnection:
    pp = create_parallel_state(ParallelSizes(pp=dist.get_world_size())).pp
    links = create_pipeline_links(pp, wraps_around=num_chunks > 1)
    assert links.post_receives_ahead
    place = StagePlace(pp.size, pp.rank, num_chunks)
    orders = MessageOrders(place) if in_one_order else None
    return PipelineConnection(place, links, message_shape, torch.float64, orders, overlaps_sends=not waits)


def make_stages(place: StagePlace) -> list[Stage]:
    return [Stage(chunk * place.pp + place.rank, place.is_last(chunk)) for chunk in range(place.num_chunks)]


def run_case(case: ExecutorCase, connection: PipelineConnection) -> tuple[ScheduleResult, list[list[torch.Tensor]]]:
    place = connection.place
    stages = make_stages(place)
    if case.main_grads:
        for parameter in itertools.chain(*(stage.parameters() for stage in stages)):
            attach_main_grad(parameter, MainGrad(torch.full_like(parameter, torch.nan)))
            parameter.register_post_accumulate_grad_hook(move_into_main_grad)
    chunks = [
        ModelChunk(stage, weight_grad_queue=WeightGradQueue(stage.parameters()) if case.main_grads else None)
        for stage in stages
    ]

    def actions_of(rank: int) -> Sequence[Action]:
        return SCHEDULES[case.schedule](place.pp, rank, case.num_microbatches, case.num_chunks, None)

    result = run_schedule(
        actions_of(place.rank),
        chunks,
        device=CPU,
        connection=connection,
        order=connection.order_of(actions_of),
        calculate_per_token_loss=case.per_token,
        loss_scale=4.0,
    )
    if case.main_grads:
        return result, [[main_grad_of(p).tensor for p in stage.parameters()] for stage in stages]
    return result, [[p.grad for p in stage.parameters()] for stage in stages]


def move_into_main_grad(parameter: torch.Tensor) -> None:
    if parameter.grad is not None:
        main_grad_of(parameter).add(parameter.grad)
        parameter.grad = None


def run_cases(
    cases: list[ExecutorCase], in_one_order: bool, waits: bool
) -> list[tuple[float, float, list[list[torch.Tensor]]]]:
    connections = {num_chunks: connect(num_chunks, in_one_order, waits) for num_chunks in (1, 2)}
    send = SendQueue.send

    def waited_send(queue: SendQueue, tensor: torch.Tensor) -> None:
        send(queue, tensor)
        assert not queue._unfinished, "a message is under way while the next pass runs"

    if waits:
        SendQueue.send = waited_send  # type: ignore[method-assign]
    results = []
    for case in cases:
        connection = connections[case.num_chunks]
        if in_one_order:
            # Orders are told apart by a rank's own actions: those of the last stage are alike in several schedules, of
            # which a run has one.
            connection = replace(connection, orders=MessageOrders(connection.place))
        result, gradients = run_case(case, connection)
        results.append((result.loss_sum.item(), result.num_tokens.item(), gradients))
    return results


EXECUTOR_CASES = [
    *(ExecutorCase(name, m) for name in ("no-pipelining", "1f1b", "zero-bubble") for m in (1, 2, 5)),
    *(ExecutorCase(name, m, num_chunks=2) for name in ("no-pipelining", "interleaved") for m in (1, 3, 4, 7)),
    ExecutorCase("1f1b", 5, per_token=True, main_grads=True),
    ExecutorCase("interleaved", 6, num_chunks=2, per_token=True, main_grads=True),
    ExecutorCase("zero-bubble", 1, main_grads=True),
    ExecutorCase("zero-bubble", 7, main_grads=True),
    ExecutorCase("zero-bubble", 6, per_token=True, main_grads=True),
]


@pytest.mark.default(1)
@pytest.mark.parametrize(
    ("pp", "in_one_order", "waits"),
    [*((pp, False, False) for pp in (1, 2, 4)), *((pp, True, False) for pp in (2, 4)), (3, True, True)],
)
def test_every_schedule_computes_what_one_process_computes(pp: int, in_one_order: bool, waits: bool) -> None:
    ranks = run_distributed(pp, run_cases, EXECUTOR_CASES, in_one_order, waits, timeout_s=40.0)
    for index, case in enumerate(EXECUTOR_CASES):
        loss_sum, num_tokens, expected = one_process(pp * case.num_chunks, case.num_microbatches, case.per_token)
        results = [rank[index] for rank in ranks]
        assert results[-1][0] == pytest.approx(loss_sum, rel=1e-12), case
        assert results[-1][1] == num_tokens, case
        assert all(result[:2] == (0.0, 0.0) for result in results[:-1]), case
        by_stage = [results[rank][2][chunk] for chunk in range(case.num_chunks) for rank in range(pp)]
        actual = list(itertools.chain(*by_stage))
        assert len(actual) == len(expected)
        for mine, theirs in zip(actual, expected):
            difference = (mine / 4.0 - theirs).abs().max() / theirs.abs().max()
            assert difference <= 1e-12, case


def evaluate_on_ranks(num_chunks: int, num_microbatches: int) -> tuple[float, float, bool]:
    connection = connect(num_chunks)
    stages = make_stages(connection.place)
    actions = SCHEDULES["forward-only"](connection.place.pp, connection.place.rank, num_microbatches, num_chunks, None)
    result = run_schedule(actions, [ModelChunk(stage) for stage in stages], device=CPU, connection=connection)
    has_grads = any(p.grad is not None for stage in stages for p in stage.parameters())
    return result.loss_sum.item(), result.num_tokens.item(), has_grads


@pytest.mark.parametrize(("num_chunks", "num_microbatches"), [(1, 5), (2, 7)])
def test_evaluation_runs_through_the_same_executor(num_chunks: int, num_microbatches: int) -> None:
    results = run_distributed(3, evaluate_on_ranks, num_chunks, num_microbatches)
    loss_sum, num_tokens, _ = one_process(3 * num_chunks, num_microbatches, per_token=True)
    assert results[-1][0] == pytest.approx(loss_sum, rel=1e-12)
    assert results[-1][1] == num_tokens
    assert not any(has_grads for _, _, has_grads in results)


def count_live_outputs(num_microbatches: int) -> int:
    """Return how many outputs of earlier micro-batches are in memory at most when a forward pass starts."""
    connection = connect(1)
    stage = make_stages(connection.place)[0]
    outputs: list[StorageWeakRef] = []
    counts: list[int] = []

    def forward(microbatch: int, hidden: torch.Tensor | None) -> torch.Tensor | MicrobatchLoss:
        counts.append(sum(not output.expired() for output in outputs))
        result = stage(microbatch, hidden)
        if isinstance(result, torch.Tensor):
            outputs.append(StorageWeakRef(result.untyped_storage()))
        return result

    place = connection.place
    actions = SCHEDULES["1f1b"](place.pp, place.rank, num_microbatches, 1, None)
    run_schedule(actions, [ModelChunk(forward)], device=CPU, connection=connection)
    return max(counts)


def test_outputs_that_were_sent_are_freed_before_their_backward_pass() -> None:
    # The first rank runs four forward passes before its first backward pass; one send may be under way.
    assert max(run_distributed(4, count_live_outputs, 8)) <= 1


def count_live_inputs(num_microbatches: int) -> int:
    """Return how many inputs of earlier micro-batches, which no graph needs, are in memory when a pass starts."""
    connection = connect(1)
    stage = make_stages(connection.place)[0]
    inputs: list[StorageWeakRef] = []
    counts: list[int] = []

    def forward(microbatch: int, hidden: torch.Tensor | None) -> torch.Tensor | MicrobatchLoss:
        counts.append(sum(not each.expired() for each in inputs))
        if hidden is None:
            return stage(microbatch, None)
        inputs.append(StorageWeakRef(hidden.untyped_storage()))
        return stage(microbatch, hidden + 0.0)

    place = connection.place
    actions = SCHEDULES["1f1b"](place.pp, place.rank, num_microbatches, 1, None)
    run_schedule(actions, [ModelChunk(forward)], device=CPU, connection=connection)
    return max(counts)


def test_inputs_that_no_graph_needs_are_freed_before_their_backward_pass() -> None:
    # The second rank runs three forward passes before its first backward pass.
    assert max(run_distributed(4, count_live_inputs, 8)) == 0


def record_on_ranks(num_microbatches: int) -> tuple[float, float, int]:
    connection = connect(1)
    ticks = itertools.count()
    clock: Callable[[], float] = lambda: float(next(ticks))  # noqa: E731
    actions = SCHEDULES["zero-bubble"](connection.place.pp, connection.place.rank, num_microbatches, 1, None)
    stages = make_stages(connection.place)
    result = run_schedule(
        actions, [ModelChunk(stage) for stage in stages], device=CPU, connection=connection, clock=clock
    )
    assert result.timeline is not None
    assert result.timeline.actions == actions
    pp = create_parallel_state(ParallelSizes(pp=dist.get_world_size())).pp
    timeline = gather_timeline(result.timeline, pp)
    return timeline.makespan, timeline.ranks[0].busy, timeline.pipeline_size


def test_a_run_is_recorded_with_the_clock_that_it_is_given() -> None:
    # Three actions a micro-batch, each one tick long, with one tick in between.
    assert run_distributed(2, record_on_ranks, 4) == [(23.0, 12.0, 2)] * 2


RECORDED = Path(__file__).parents[4] / "benchmarks" / "results" / "pipeline_bubble_cpu.json"
TWO_POINTS = 0.02


def check(case: Case, bubble: float, bubble_of_1f1b: float) -> None:
    if case.schedule == "zero-bubble":
        assert bubble <= 0.45 * bubble_of_1f1b
    else:
        assert bubble == pytest.approx(case.formula, abs=TWO_POINTS)


@pytest.mark.long
@pytest.mark.parametrize("pp", [2, 4, 8])
def test_measured_bubbles_are_those_of_the_formulas(pp: int) -> None:
    bubbles = {case: min(measure(case, unit_s=0.1, repeats=3)) for case in CASES if case.pp == pp}
    for case, bubble in bubbles.items():
        check(case, bubble, bubbles[Case("1f1b", pp, 2 * pp)])


def test_the_committed_measurements_are_those_of_the_formulas() -> None:
    rows = json.loads(RECORDED.read_text())["rows"]
    bubbles = {Case(**{key: row[key] for key in asdict(CASES[0])}): row["smallest"] for row in rows}
    assert tuple(bubbles) == CASES
    for case, bubble in bubbles.items():
        check(case, bubble, bubbles[Case("1f1b", case.pp, 2 * case.pp)])
