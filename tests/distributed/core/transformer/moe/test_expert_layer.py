"""Experts over ranks: few tokens, also fewer than ranks, and padding that changes nothing of what is learned."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch

import pretrain_gpt
from megatron.checkpoint.train_state import TrainState
from megatron.core.collectives import all_gather_last_dim
from megatron.core.datasets.gpt_dataset import GPTSample
from megatron.core.device import Device
from megatron.core.timers import Timers
from megatron.training.batch_source import BatchSource
from megatron.training.initialize import make_runtime
from megatron.training.model_setup import build_model_and_optimizer
from megatron.training.training_step import TrainingStep
from megatron.verification.model_cells import ExpertLayout, make_expert_cell
from megatron.verification.run_cell import resolve_cell
from tests.harness.distributed import run_distributed
from tests.harness.toy_model import load_global_weights, make_model, tensor_parallel_group

VOCABULARY = 53


def logits_of(dispatcher: str, shape: tuple[int, int]) -> np.ndarray:
    tp = tensor_parallel_group()
    experts = {"num_experts": 4, "moe_ffn_hidden_size": 8, "moe_token_dispatcher_type": dispatcher}
    model = make_model(tp, params_dtype="float64", **experts).eval()
    load_global_weights(model)
    tokens = torch.arange(shape[0] * shape[1]).view(shape)
    positions = torch.arange(shape[1]).expand(shape)
    with torch.no_grad():
        return all_gather_last_dim(model(tokens, positions), tp)[..., :VOCABULARY].numpy().copy()


@pytest.mark.parametrize("shape", [(3, 5), (1, 1)])
@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
def test_logits_of_few_tokens_are_those_of_one_process(dispatcher: str, shape: tuple[int, int]) -> None:
    whole = logits_of(dispatcher, shape)
    for rank in run_distributed(2, logits_of, dispatcher, shape):
        np.testing.assert_allclose(rank, whole, rtol=0, atol=1e-13)


ROW, PADDED, STEPS = 10, 16, 3
ALL_LOSSES = ("aux_loss", "seq_aux_loss", "global_aux_loss")
LAYOUTS = (
    ExpertLayout(tp=2, ep=2, etp=1, sequence_parallel=True),
    ExpertLayout(cp=2, ep=2),
    ExpertLayout(pp=2, dp=2, ep=2),
    ExpertLayout(tp=2, cp=2, ep=2, dispatcher="allgather"),
    ExpertLayout(tp=2, recompute=("full", "uniform", "1")),
)


class Rows:
    """Give rows of random tokens, of which the last but one is as if a user had said the first half: no answer."""

    def __init__(self, length: int) -> None:
        self.length = length

    def read_microbatches(
        self, consumed_samples: int, micro_batch_size: int, data_parallel_rank: int, data_parallel_size: int
    ) -> Iterator[Sequence[GPTSample]]:
        first = consumed_samples + data_parallel_rank * micro_batch_size
        while True:
            yield [self.sample(number) for number in range(first, first + micro_batch_size)]
            first += micro_batch_size * data_parallel_size

    def sample(self, number: int) -> GPTSample:
        text = np.random.default_rng(number).integers(1, 50, ROW + 1)
        missing = self.length - ROW
        loss_mask = np.arange(ROW) >= number % 4
        sample: GPTSample = {
            # Padding is one token over and over, which goes to few experts.
            "tokens": np.pad(text[:-1], (0, missing), constant_values=7),
            "labels": np.pad(text[1:], (0, missing), constant_values=7),
            "loss_mask": np.pad(loss_mask, (0, missing)).astype(np.float32),
        }
        if missing:
            sample["padding_mask"] = np.arange(self.length) >= ROW
        return sample


def train(flags: Sequence[str], world_size: int, length: int) -> list[tuple[Any, ...]]:
    config = resolve_cell((*flags, "--seq-length", str(length), "--dataloader-type", "external"), world_size, "float64")
    runtime = make_runtime(config, Device("cpu"))
    parts = build_model_and_optimizer(config, runtime, pretrain_gpt.provide_model, log=lambda line: None)
    step = TrainingStep(config, runtime, parts, pretrain_gpt.forward_step, Timers())
    found, state = [], TrainState()
    with closing(BatchSource(Rows(length), config, runtime, config.model.vocab_size, 0)) as source:
        for _ in range(STEPS):
            report, _ = step.run(state, source, config.training.global_batch_size, None)
            found.append((report.lm_loss, report.grad_norm, dict(report.auxiliary)))
    return found


@pytest.mark.default(1)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_padded_rows_train_as_rows_without_padding(layout: ExpertLayout) -> None:
    # Recompute of layers would count the global batch so far again.
    losses = ALL_LOSSES[: -1 if layout.recompute else None]
    extra = ("--moe-router-load-balancing-type", *losses, "--moe-aux-loss-coeff", *("0.1", "0.2", "0.3")[: len(losses)])
    extra += ("--micro-batch-size", "2")
    cell = make_expert_cell("deepseek-experts", layout, extra=extra)
    alone = make_expert_cell("deepseek-experts", ExpertLayout(dp=layout.dp), extra=extra)
    expected = run_distributed(layout.dp, train, alone.flags, layout.dp, ROW, timeout_s=60.0)[0]
    for of_rank in run_distributed(cell.world_size, train, cell.flags, cell.world_size, PADDED, timeout_s=60.0):
        for step, other in zip(of_rank, expected, strict=True):
            for mine, theirs in zip(step, other, strict=True):
                assert mine == pytest.approx(theirs, rel=1e-9, abs=1e-12)
