"""Real models on the meta device: every stage has the number of parameters that Megatron logs for it."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from megatron.config.arguments import resolve_arguments
from megatron.core.device import Device
from megatron.core.model_parallel_config import ParallelSizes
from megatron.core.parallel_state import ParallelState, describe_parallel_state
from megatron.core.tensor_parallel.random import RngStreams
from megatron.training.initialize import Runtime
from pretrain_gpt import provide_model
from tests.unit.training.config.command_lines import TRAINING

GPT2_345M = "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024"
VOCABULARY = "--max-position-embeddings 1024 --tokenizer-type NullTokenizer --vocab-size 50256 --mock-data"


class MetaDevice(Device):
    """Stand where nothing has memory: a model on it has shapes only."""

    @property
    def torch_device(self) -> torch.device:
        """Return the device of parameters."""
        return torch.device("meta")


def count_parameters(layout: str, state: ParallelState) -> int:
    words = f"{GPT2_345M} {VOCABULARY} {layout}".split()
    config = resolve_arguments([*words, *TRAINING], state.world_size).config
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=50257))
    rng = RngStreams(Device("cpu"), 1, state.place)
    runtime = Runtime(MetaDevice("cpu"), state, rng)
    chunks = [provide_model(config, runtime, contents) for contents in config.stage_layout.chunks(state.pp.rank)]
    return sum(parameter.numel() for chunk in chunks for parameter in chunk.parameters())


@pytest.mark.parametrize(
    ("tp", "pp", "expected"),
    [
        (1, 1, (354_871_296,)),
        (2, 2, (102_483_968, 101_437_440)),
        (1, 4, (128_137_216, 75_577_344, 75_577_344, 127_090_688)),
        (2, 3, (77_279_232, 50_409_472, 76_232_704)),
    ],
)
def test_stages_of_gpt2_345m_have_the_logged_sizes(tp: int, pp: int, expected: tuple[int, ...]) -> None:
    layout = f"--tensor-model-parallel-size {tp} --pipeline-model-parallel-size {pp}"
    for rank in range(tp * pp):
        state = describe_parallel_state(rank, tp * pp, ParallelSizes(tp=tp, pp=pp))
        assert count_parameters(layout, state) == expected[state.pp.rank], rank


def test_virtual_stages_share_a_ranks_layers_out() -> None:
    layout = "--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 2"
    counts = [count_parameters(layout, describe_parallel_state(rank, 4, ParallelSizes(pp=4))) for rank in range(4)]
    assert counts == [128_137_216, 75_577_344, 75_577_344, 127_090_688]
