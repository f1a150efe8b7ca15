"""megatron-core's forward-backward functions compute what one process computes, and call what its users configure."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron.core import parallel_state
from megatron.core.hyper_comm_grid import HyperCommGrid
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.pipeline_parallel import schedules
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from tests.harness.distributed import RankFailure, run_distributed

SEQ, BATCH, HIDDEN = 4, 2, 6


class Stage(nn.Module):
    """A linear layer whose weights depend on its number in the whole model only."""

    def __init__(self, config: ModelParallelConfig, number: int) -> None:
        super().__init__()
        self.config = config
        self.layer = nn.Linear(HIDDEN, HIDDEN).double()
        generator = torch.Generator().manual_seed(number)
        for parameter in self.layer.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.4
        self.input_tensor: torch.Tensor | None = None

    def set_input_tensor(self, input_tensor: list[torch.Tensor | None]) -> None:
        (self.input_tensor,) = input_tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = torch.tanh(self.layer(x if self.input_tensor is None else self.input_tensor))
        return output


class Wrapped(nn.Module):
    """A wrapper as megatron-core's data parallelism is: the model's attributes are those of ``module``."""

    def __init__(self, module: Stage) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.module(x)
        return output


def batches() -> Iterator[torch.Tensor]:
    for number in itertools.count():
        generator = torch.Generator().manual_seed(1000 + number)
        yield torch.randn((SEQ, BATCH, HIDDEN), generator=generator, dtype=torch.float64)


def mean_loss(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
    loss = output.square().mean()
    return loss, {"loss": loss.item()}


def counted_loss(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, float]]:
    mask = output.detach()[..., 0] > -0.2
    loss = (output.square().sum(dim=-1) * mask).sum()
    return loss, mask.sum().int(), {"loss": loss.item()}


def make_config(pp: int, chunks: int, **further: Any) -> Any:
    config = ModelParallelConfig(
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        pipeline_dtype=torch.float64,
        **further,
    )
    config.hidden_size = HIDDEN  # type: ignore[attr-defined]
    return config


def run_step(
    pp: int, chunks: int, num_microbatches: int, loss: str, forward_only: bool = False, passes_groups: bool = False
) -> tuple[list[Any], list[list[torch.Tensor]], list[Any]]:
    """Run one step on this rank; return its reports, its gradients by chunk, and the totals of tokens."""
    if not passes_groups:
        parallel_state.initialize_model_parallel(1, pp, chunks if chunks > 1 else None)
    config = make_config(pp, chunks)
    config.calculate_per_token_loss = loss == "per token"
    rank = dist.get_rank()
    model: list[nn.Module] = [Wrapped(Stage(config, chunk * pp + rank)) for chunk in range(chunks)]
    totals: list[Any] = []
    config.grad_scale_func = lambda value: value * 8.0
    config.finalize_model_grads_func = lambda models, num_tokens, **_: totals.append(num_tokens)
    loss_func = mean_loss if loss == "mean" else counted_loss
    groups: dict[str, Any] = {}
    if passes_groups:
        grid = HyperCommGrid([1, 1, pp], ["tp", "cp", "pp"])
        collection = ProcessGroupCollection(**{name: grid.create_pg(name) for name in ("tp", "cp", "pp")})
        assert collection.pp is grid.get_pg("pp")
        groups = {"pg_collection": collection}
        if pp > 1:
            groups["p2p_communicator"] = P2PCommunicator(collection.pp, config)
    reports = schedules.get_forward_backward_func(pp, chunks if chunks > 1 else None)(
        forward_step_func=lambda iterator, stage: (stage(next(iterator)), loss_func),
        data_iterator=[batches() for _ in model],
        model=model,
        num_microbatches=num_microbatches,
        seq_length=SEQ,
        micro_batch_size=BATCH,
        forward_only=forward_only,
        **groups,
    )
    gradients = [[p.grad for p in chunk.parameters() if p.grad is not None] for chunk in model]
    return reports, gradients, totals


def one_process(num_stages: int, num_microbatches: int, loss: str) -> tuple[list[Any], list[torch.Tensor], int]:
    """The same step by plain autograd, written apart from the schedules."""
    config = make_config(1, 1)
    stages = [Stage(config, number) for number in range(num_stages)]
    reports, total = [], 0
    for x in itertools.islice(batches(), num_microbatches):
        output = functools.reduce(lambda hidden, stage: stage(hidden), stages, x)
        value, *counted, report = mean_loss(output) if loss == "mean" else counted_loss(output)
        divisor = 1 if loss == "per token" else num_microbatches * (int(counted[0]) if counted else 1)
        (8.0 * value / divisor).backward()
        reports.append(report)
        total += int(counted[0]) if counted else 0
    return reports, [p.grad for stage in stages for p in stage.parameters() if p.grad is not None], total


@pytest.mark.parametrize(
    ("pp", "chunks", "num_microbatches", "loss"),
    [
        (1, 1, 3, "mean"),
        (1, 1, 3, "mean per token of a micro-batch"),
        (2, 1, 3, "per token"),
        (4, 1, 5, "mean"),
        (2, 3, 4, "mean"),
        (4, 2, 8, "per token"),
    ],
)
def test_a_step_computes_what_one_process_computes(pp: int, chunks: int, num_microbatches: int, loss: str) -> None:
    ranks = run_distributed(pp, run_step, pp, chunks, num_microbatches, loss, timeout_s=40.0)
    reports, gradients, total = one_process(pp * chunks, num_microbatches, loss)
    assert ranks[-1][0] == [{"loss": pytest.approx(each["loss"], rel=1e-12)} for each in reports]
    assert all(of_rank == [] for of_rank, _, _ in ranks[:-1])
    actual = list(itertools.chain(*(ranks[rank][1][chunk] for chunk in range(chunks) for rank in range(pp))))
    assert len(actual) == len(gradients)
    for mine, theirs in zip(actual, gradients):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-14)
    assert ranks[-1][2] == ([torch.tensor(total)] if loss == "per token" else [None])


@pytest.mark.parametrize(("pp", "chunks"), [(1, 1), (2, 1), (2, 2)])
def test_groups_can_be_passed_and_evaluation_leaves_no_gradients(pp: int, chunks: int) -> None:
    ranks = run_distributed(pp, run_step, pp, chunks, 4, "mean", forward_only=True, passes_groups=True)
    reports, _, _ = one_process(pp * chunks, 4, "mean")
    assert ranks[-1][0] == [{"loss": pytest.approx(each["loss"], rel=1e-12)} for each in reports]
    assert all(gradients == [[]] * chunks and totals == [] for _, gradients, totals in ranks)


def run_toy_step(pp: int, virtual: int | None, shape: tuple[int, ...]) -> list[dict[str, int]]:
    """Outputs that do not depend on the model, and losses that are plain numbers."""
    parallel_state.initialize_model_parallel(1, pp, virtual)
    model = nn.Linear(4, 1)
    model.config = make_config(pp, virtual or 1)
    model.set_input_tensor = lambda input_tensor: None  # type: ignore[assignment]
    rank = dist.get_rank()
    count = virtual or 1
    reports: list[dict[str, int]] = schedules.get_forward_backward_func()(
        forward_step_func=lambda iterator, chunk: (
            torch.rand(shape, dtype=torch.float64),
            lambda output: (rank, {"rank": rank}),
        ),
        data_iterator=None if virtual is None else [range(100)] * count,
        model=[model] * count,
        num_microbatches=8,
        seq_length=SEQ,
        micro_batch_size=BATCH,
        forward_only=True,
    )
    return reports


@pytest.mark.parametrize(("pp", "virtual"), [(1, None), (4, None), (4, 2)])
def test_toy_steps_report_numbers_on_the_last_stage(pp: int, virtual: int | None) -> None:
    ranks = run_distributed(pp, run_toy_step, pp, virtual, (SEQ, BATCH, HIDDEN))
    assert ranks[-1] == [{"rank": pp - 1}] * 8
    assert ranks[:-1] == [[]] * (pp - 1)


def run_with_unknown_lengths() -> str:
    parallel_state.initialize_model_parallel(1, 2)
    config = make_config(2, 1, variable_seq_lengths=True)
    with pytest.raises(RuntimeError) as caught:
        schedules.forward_backward_pipelining_without_interleaving(
            forward_step_func=lambda iterator, stage: (stage(next(iterator)), mean_loss),
            data_iterator=batches(),
            model=Stage(config, 0),
            num_microbatches=1,
            seq_length=SEQ,
            micro_batch_size=BATCH,
        )
    return str(caught.value)


def test_lengths_that_are_sent_are_rejected() -> None:
    assert all("variable_seq_lengths is True" in message for message in run_distributed(2, run_with_unknown_lengths))


def test_an_output_of_another_shape_is_named() -> None:
    with pytest.raises(RankFailure, match=r"returned torch.float64 \(1, 2, 6\), but the next stage expects"):
        run_distributed(2, run_toy_step, 2, None, (1, BATCH, HIDDEN))


def see_callbacks(chunks: int) -> tuple[list[str], list[str], list[bool]]:
    pp = 2
    parallel_state.initialize_model_parallel(1, pp, chunks if chunks > 1 else None)
    config = make_config(pp, chunks)
    seen: list[str] = []

    class Timer:
        def __init__(self, name: str) -> None:
            self.name = name

        def start(self, barrier: bool = False) -> None:
            timed.append(self.name)

        def stop(self) -> None:
            timed.append(f"end {self.name}")

    @contextlib.contextmanager
    def no_sync() -> Iterator[None]:
        seen.append("(")
        yield
        seen.append(")")

    timed: list[str] = []
    recomputed: list[bool] = []

    def forward_step(iterator: Iterator[torch.Tensor], stage: Stage, recomputes_all: bool) -> tuple[torch.Tensor, Any]:
        recomputed.append(recomputes_all)
        return stage(next(iterator)), mean_loss

    config.num_microbatches_with_partial_activation_checkpoints = 1
    config.timers = lambda name, log_level=0: Timer(name)
    config.no_sync_func = [no_sync] * chunks if chunks > 1 else no_sync
    config.grad_sync_func = lambda parameters: seen.append(f"reduce {len(list(parameters))}")
    config.param_sync_func = lambda parameters: seen.append("gather")
    config.finalize_model_grads_func = lambda models, num_tokens, pg_collection=None, force_all_reduce=False: (
        seen.append("finalize")
    )
    rank = parallel_state.get_pipeline_model_parallel_rank()
    schedules.get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[batches() for _ in range(chunks)],
        model=[Stage(config, chunk * pp + rank) for chunk in range(chunks)],
        num_microbatches=2,
        seq_length=SEQ,
        micro_batch_size=BATCH,
    )
    return seen, timed, recomputed


@pytest.mark.parametrize("chunks", [1, 2])
def test_configured_functions_are_called(chunks: int) -> None:
    ranks = run_distributed(2, see_callbacks, chunks)
    # From megatron-core's rule: the first of every (warmup passes + 1) forward passes.
    by_rank = (
        [[False, True], [False, False]] if chunks == 1 else [[False, True, True, True], [False, True, True, False]]
    )
    assert [recomputed for _, _, recomputed in ranks] == by_rank
    for seen, timed, _ in ranks:
        outside = [each for each in seen if each not in "()"]
        assert outside == [*["gather"] * chunks, *["reduce 2"] * chunks, "finalize"]
        # Everything between is without reductions.
        assert (seen[chunks], seen[-2 - chunks]) == ("(", ")")
        assert (timed[0], timed[-1]) == ("forward-backward", "end forward-backward")
        assert timed.count("forward-compute") == timed.count("end forward-compute") == 2 * chunks
        assert timed.count("backward-compute") == 2 * chunks


def exchange_between_neighbors() -> list[Any]:
    parallel_state.initialize_model_parallel(1, 2)
    config = make_config(2, 1)
    rank = dist.get_rank()
    communicator = P2PCommunicator(parallel_state.get_pipeline_model_parallel_group(), config)
    shape = (SEQ, BATCH, HIDDEN)
    results: list[Any] = []
    for has_own_shapes in (False, True):
        config.variable_seq_lengths = has_own_shapes
        tensor = torch.full((SEQ + 1, BATCH, 1) if has_own_shapes else shape, float(rank), dtype=torch.float64)
        if rank == 0:
            assert communicator.recv_forward(shape, is_first_stage=True) is None
            communicator.send_forward(tensor, is_last_stage=False)
            got = communicator.recv_backward(shape, is_last_stage=False)
            second = communicator.send_forward_recv_backward([tensor * 0 + 5], [shape], is_last_stage=False)
            communicator.send_backward(tensor, is_first_stage=True)
        else:
            got = communicator.recv_forward(shape, is_first_stage=False)
            communicator.send_backward(tensor, is_first_stage=False)
            second = [communicator.send_backward_recv_forward(tensor * 0 + 7, shape, is_first_stage=False)]
            assert communicator.send_forward_recv_backward(tensor, shape, is_last_stage=True) is None
        assert isinstance(got, torch.Tensor)
        assert got.requires_grad
        assert got.shape == tensor.shape
        results.append((got.mean().item(), [each.mean().item() for each in second]))
    config.variable_seq_lengths = False
    # Around the ring, as interleaved schedules send.
    own = torch.full(shape, float(rank), dtype=torch.float64)
    received = communicator.send_forward_recv_forward(own, recv_prev=True, tensor_shape=shape)
    gradient, works = communicator.send_backward_recv_backward(own, True, shape, overlap_p2p_comm=True)
    for work in works.values():
        work.wait()
    both = communicator.send_forward_backward_recv_forward_backward(own, own + 10, True, True, shape)
    return [*results, received.mean().item(), gradient.mean().item(), [each.mean().item() for each in both]]


def test_the_communicator_exchanges_tensors_of_given_or_sent_shapes() -> None:
    first, second = run_distributed(2, exchange_between_neighbors)
    assert first == [(1.0, [7.0])] * 2 + [1.0, 1.0, [1.0, 11.0]]
    assert second == [(0.0, [5.0])] * 2 + [0.0, 0.0, [0.0, 10.0]]
