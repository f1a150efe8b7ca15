"""Where ranks get their micro-batches from: who reads, who receives, and that every rank has its part of the same."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from megatron.config.arguments import resolve_arguments
from megatron.config.run_config import RunConfig
from megatron.core.context_parallel.partition import positions_of
from megatron.core.datasets.batch import Batch
from megatron.core.datasets.gpt_dataset import GPTSample, MockGPTDataset
from megatron.core.datasets.gpt_dataset_config import GPTDatasetConfig
from megatron.core.device import Device
from megatron.core.process_group import CollectiveCall
from megatron.training.batch_source import BatchSource
from megatron.training.initialize import make_runtime
from tests.harness.distributed import run_distributed

LENGTH, MICRO_BATCH, VOCABULARY = 24, 3, 61
NUM_BATCHES, CONSUMED = 7, 12
COMMON = f"""
    --num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length {LENGTH} --max-position-embeddings {LENGTH}
    --micro-batch-size {MICRO_BATCH} --global-batch-size 24 --train-iters 2 --lr 1e-3 --mock-data
    --tokenizer-type NullTokenizer --vocab-size {VOCABULARY - 1} --distributed-backend gloo
"""
PACKED = "--reset-position-ids --reset-attention-mask --eod-mask-loss"
# What is made up in place of positions is there at every stage.
MIDDLE = {"position_ids"}
FIRST, LAST = MIDDLE | {"tokens"}, MIDDLE | {"labels", "loss_mask", "num_tokens"}
BOTH_ENDS = FIRST | LAST


class WatchedDataset(MockGPTDataset):
    """Note which samples are read."""

    def __init__(self, config: RunConfig) -> None:
        data = config.data
        super().__init__(
            400,
            "train",
            GPTDatasetConfig(
                sequence_length=LENGTH,
                mock=True,
                vocab_size=VOCABULARY,
                eod_token_id=VOCABULARY - 1,
                reset_position_ids=data.reset_position_ids,
                reset_attention_mask=data.reset_attention_mask,
                eod_mask_loss=data.eod_mask_loss,
            ),
        )
        self.read: list[int] = []

    def __getitem__(self, index: int) -> GPTSample:
        self.read.append(index)
        return super().__getitem__(index)


@dataclass(frozen=True)
class Received:
    """Hold what a rank was given, read and sent, and its coordinates."""

    batches: list[Batch]
    read: list[int]
    calls: list[CollectiveCall]
    tp_size: int
    tp: int
    cp: int
    dp: int
    pp: int


def receive(flags: str, world_size: int) -> Received:
    config = resolve_arguments([*COMMON.split(), *flags.split()], world_size).config
    calls: list[CollectiveCall] = []
    runtime = make_runtime(config, Device("cpu"), observer=calls.append)
    dataset = WatchedDataset(config)
    with closing(BatchSource(dataset, config, runtime, VOCABULARY, CONSUMED)) as source:
        batches = [source.next() for _ in range(NUM_BATCHES)]
    state = runtime.state
    return Received(
        batches, dataset.read, calls, state.tp.size, state.tp.rank, state.cp.rank, state.dp.rank, state.pp.rank
    )


def receive_several(several: Sequence[str], world_size: int) -> list[Received]:
    return [receive(flags, world_size) for flags in several]


@dataclass(frozen=True)
class Case:
    """Say what the ranks of each pipeline stage are given, and the bytes of each broadcast among them."""

    flags: str
    stages: tuple[set[str], ...]
    num_bytes: tuple[int, ...]
    cp: int = 1
    dp: int = 1


def expected_batch(case: Case, number: int, rank: Received) -> dict[str, torch.Tensor]:
    """Return every field of a rank's part of a micro-batch, from the samples themselves."""
    dataset = WatchedDataset(resolve_arguments([*COMMON.split(), *case.flags.split()], 4).config)
    first = CONSUMED + (number * case.dp + rank.dp) * MICRO_BATCH
    samples: list[Any] = [dataset[index] for index in range(first, first + MICRO_BATCH)]
    whole = {name: torch.stack([torch.from_numpy(sample[name].copy()) for sample in samples]) for name in samples[0]}
    cut = {
        name: tensor if name == "document_ids" else tensor[:, positions_of(rank.cp, case.cp, tensor.shape[1])]
        for name, tensor in whole.items()
    }
    return cut | {"num_tokens": whole["loss_mask"].sum().long()}


DOCUMENTS = {"document_ids"}
CASES = {
    "tp4": Case("--tensor-model-parallel-size 4", (BOTH_ENDS,), (72 * 5 + 8,)),
    "tp2 dp2": Case("--tensor-model-parallel-size 2 --num-workers 0", (BOTH_ENDS,), (72 * 5 + 8,), dp=2),
    "tp2 cp2 packed": Case(
        f"--tensor-model-parallel-size 2 --context-parallel-size 2 {PACKED}",
        (BOTH_ENDS | DOCUMENTS,),
        (36 * 7 + 8 + 72 * 2,),
        cp=2,
    ),
    "tp2 pp2 rotary packed, many threads": Case(
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --position-embedding-type rope "
        f"--num-workers 5 {PACKED}",
        (FIRST | DOCUMENTS, LAST | DOCUMENTS),
        (72 * 6, 72 * 7 + 8),
    ),
    "tp2 pp2 interleaved": Case(
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2",
        (FIRST, LAST),
        (72 * 2, 72 * 3 + 8),
    ),
    "pp4": Case("--pipeline-model-parallel-size 4", (FIRST, MIDDLE, MIDDLE, LAST), (0,) * 4),
    "pp4 packed": Case(
        f"--pipeline-model-parallel-size 4 {PACKED}",
        (FIRST | DOCUMENTS, MIDDLE | DOCUMENTS, MIDDLE | DOCUMENTS, LAST | DOCUMENTS),
        (0,) * 4,
    ),
}


@pytest.fixture(scope="module")
def received() -> dict[str, list[Received]]:
    """Return what every rank of each case was given."""
    ranks = run_distributed(4, receive_several, [case.flags for case in CASES.values()], 4)
    return {name: [rank[number] for rank in ranks] for number, name in enumerate(CASES)}


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
def test_every_rank_is_given_its_part_of_the_same_samples(name: str, received: dict[str, list[Received]]) -> None:
    case = CASES[name]
    for rank in received[name]:
        given = case.stages[rank.pp]
        for number, batch in enumerate(rank.batches):
            expected = expected_batch(case, number, rank)
            assert {name for name, tensor in vars(batch).items() if tensor is not None} == given
            for field in given - ({"position_ids"} if rank.pp and "rope" not in case.flags else set()):
                assert getattr(batch, field).dtype == expected[field].dtype, field
                assert torch.equal(getattr(batch, field), expected[field]), field


@pytest.mark.parametrize("name", CASES)
def test_only_the_first_tensor_parallel_rank_reads_and_sends(name: str, received: dict[str, list[Received]]) -> None:
    case = CASES[name]
    for rank in received[name]:
        step = MICRO_BATCH * case.dp
        needs = case.stages[rank.pp] != MIDDLE
        read = [
            CONSUMED + number * step + rank.dp * MICRO_BATCH + row
            for number in range(NUM_BATCHES)
            for row in range(MICRO_BATCH)
        ]
        if rank.tp > 0 or not needs:
            assert rank.read == []
        else:
            # Several threads read in no order; some have read ahead.
            assert sorted(rank.read)[: len(read)] == read
        size = case.num_bytes[rank.pp]
        assert rank.calls == [CollectiveCall("broadcast", ("tp",), rank.tp_size, size)] * (NUM_BATCHES * (size > 0))
