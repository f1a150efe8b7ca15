"""Reduce the results of a step over ranks: losses, the losses of each data set, and reasons to exit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from megatron.core.collectives import all_reduce
from megatron.core.datasets.batch import Batch
from megatron.core.pipeline_parallel.executor import ChunkResult, MicrobatchLoss, ScheduleResult
from megatron.training.dist_signal_handler import ExitRequest
from megatron.training.initialize import Runtime


@dataclass(frozen=True)
class DataSetLoss:
    """Hold the mean loss over the tokens that an iteration had of one data set, and their number."""

    lm_loss: float
    num_tokens: int


class DataSetSums:
    """Sum the losses and the tokens of each data set on this rank, all on the device.

    ``names`` are those of the blend's data sets in its order, the same on all ranks; there is nothing to sum where
    there are none.
    """

    def __init__(self, names: Sequence[str], device: torch.device) -> None:
        self._names = tuple(names)
        self._numbers = torch.arange(len(self._names), device=device)
        self._sums: torch.Tensor | None = None

    def begin(self) -> torch.Tensor | None:
        """Return the sums of a step that begins, which `add` adds to; None where no data sets are told apart.

        A rank that computes no loss has them too: all ranks sum as many numbers.

        Shapes: ``-> [n, 2]`` float64, the loss sum and the number of tokens.
        """
        if self._names:
            self._sums = torch.zeros(len(self._names), 2, dtype=torch.float64, device=self._numbers.device)
        return self._sums

    def add(self, batch: Batch, result: ChunkResult) -> None:
        """Add the samples of a micro-batch, where this chunk has made their losses."""
        if self._sums is not None and isinstance(result, MicrobatchLoss) and result.samples is not None:
            assert batch.data_sets is not None, "the source says which data set a sample is of"
            # A product adds in one order; on CUDA, adding by index would take any.
            chosen = self._numbers[:, None] == batch.data_sets
            self._sums += chosen.to(result.samples.dtype) @ result.samples

    def losses(self, totals: Sequence[tuple[float, float]]) -> Mapping[str, DataSetLoss]:
        """Return, by name, the losses of the data sets that have tokens in the sums over all ranks."""
        return {
            name: DataSetLoss(loss_sum / num_tokens, round(num_tokens))
            for name, (loss_sum, num_tokens) in zip(self._names, totals)
            if num_tokens > 0
        }


@dataclass(frozen=True)
class StepReduction:
    """Hold what all ranks have summed over the world after a step; ``auxiliary`` are means by name.

    ``data_sets`` are the loss sum and the number of tokens of each data set of a blend, where they are told apart.
    ``read_along`` are numbers of this rank's own that were read from the device in the same go.
    """

    loss_sum: float
    num_tokens: float
    signal_received: bool
    time_is_up: bool
    auxiliary: Mapping[str, float] = field(default_factory=dict)
    read_along: tuple[float, ...] = ()
    data_sets: tuple[tuple[float, float], ...] = ()

    @property
    def lm_loss(self) -> float:
        return self.loss_sum / max(self.num_tokens, 1.0)


def agree(
    result: ScheduleResult,
    exit_request: ExitRequest | None,
    runtime: Runtime,
    auxiliary_names: Sequence[str] = (),
    read_along: torch.Tensor | None = None,
) -> StepReduction:
    """Sum losses and reasons to exit over all ranks, in one collective, so that every rank decides alike.

    Of the ranks that computed the same loss only the first tensor-parallel rank counts. ``auxiliary_names`` are the
    auxiliary losses that are reported, the same on every rank. This is where the host waits for the device: what else
    it has to know comes with the sums, as ``read_along``.

    Shapes: ``read_along: [n]`` float64.
    """
    values = sum_over_ranks(result, exit_request, runtime, auxiliary_names)
    return read_agreement(values, runtime, auxiliary_names, read_along)


def agree_to_exit(exit_request: ExitRequest | None, runtime: Runtime) -> StepReduction:
    """Agree on reasons to exit alone, where the ranks have computed nothing."""
    nothing = torch.zeros((), dtype=torch.float64, device=runtime.device.torch_device)
    return agree(ScheduleResult(nothing, nothing, {}), exit_request, runtime)


def sum_over_ranks(
    result: ScheduleResult, exit_request: ExitRequest | None, runtime: Runtime, auxiliary_names: Sequence[str] = ()
) -> torch.Tensor:
    """Return the sums of `agree`, on the device, for `read_agreement`: first the loss sum and the tokens.

    Where the result tells ``n`` data sets apart, their sums are the last.

    Shapes: ``-> [4 + 2 * len(auxiliary_names) + 2 * n]`` float64.
    """
    signal_received = exit_request is not None and exit_request.signal_received
    time_is_up = exit_request is not None and exit_request.time_is_up
    of_data_sets = result.data_sets
    num_sums = 4 + 2 * len(auxiliary_names)
    size = num_sums + (0 if of_data_sets is None else of_data_sets.numel())
    values = torch.zeros(size, dtype=torch.float64, device=runtime.device.torch_device)
    if runtime.state.tp.is_first:
        if runtime.state.pp.is_last:
            values[0], values[1] = result.loss_sum, result.num_tokens
        for index, name in enumerate(auxiliary_names, start=2):
            if name in result.auxiliary:
                values[2 * index : 2 * index + 2] = result.auxiliary[name]
        if of_data_sets is not None:
            values[num_sums:] = of_data_sets.flatten()
    # Not by assignment, which would copy a number from the host and wait for the copy.
    values[2].fill_(signal_received)
    values[3].fill_(time_is_up)
    all_reduce(values, runtime.state.world)
    return values


def read_agreement(
    values: torch.Tensor, runtime: Runtime, auxiliary_names: Sequence[str], read_along: torch.Tensor | None = None
) -> StepReduction:
    """Return what the sums say; the host waits for the device here.

    Raises:
        GivenUpError: communication was given up meanwhile, and they say nothing.
    """
    num_values = len(values)
    read = (values if read_along is None else torch.cat((values, read_along))).tolist()
    runtime.flight.ensure_not_given_up()
    loss_sum, num_tokens, signals, times, *sums_and_counts = read[:num_values]
    pairs = list(zip(sums_and_counts[::2], sums_and_counts[1::2]))
    auxiliary = {name: total / max(count, 1.0) for name, (total, count) in zip(auxiliary_names, pairs)}
    data_sets = tuple(pairs[len(auxiliary_names) :])
    return StepReduction(loss_sum, num_tokens, signals > 0, times > 0, auxiliary, tuple(read[num_values:]), data_sets)
