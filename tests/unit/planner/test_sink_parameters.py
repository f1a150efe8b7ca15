"""Sinks in closed form: they are parameters of their own, cut with their heads."""

from __future__ import annotations

import dataclasses

import pytest

from megatron.core.device import Device
from megatron.core.model_parallel_config import ParallelSizes
from megatron.core.models.gpt.chunk_parameters import chunk_parameters
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.parallel_state import describe_parallel_state
from megatron.core.pipeline_parallel.stage_layout import StageContents
from megatron.core.sharding import spec_of
from megatron.core.tensor_parallel.random import RngStreams
from megatron.verification.cells import BASE_FLAGS
from megatron.verification.model_cells import ATTENTION_SHAPES
from megatron.verification.run_cell import resolve_cell


@pytest.mark.parametrize(("shape", "tp"), [("sinks", 1), ("gpt-oss", 2), ("off-by-one", 2)])
def test_parameters_are_those_of_the_model(shape: str, tp: int) -> None:
    config = resolve_cell((*BASE_FLAGS, *ATTENTION_SHAPES[shape]), 1, "float32").model
    config = dataclasses.replace(config, tensor_model_parallel_size=tp, expert_tensor_parallel_size=None)
    state = describe_parallel_state(tp - 1, tp, ParallelSizes(tp=tp))
    model = GPTModel(config, state.tp, RngStreams(Device("cpu"), 0, state.place), seed=7)
    contents = StageContents((0, 1, 2, 3), has_embedding=True, has_loss=True)
    planned = chunk_parameters(config, contents)
    found = [parameter.numel() for parameter in model.parameters()]
    assert [parameter.size for parameter in planned] == found
    names = [spec_of(parameter).name for parameter in model.parameters()]
    places = [place for place, name in enumerate(names) if name.endswith("core_attention.softmax_offset")]
    assert [planned[place].size for place in places] == [4 // tp] * (4 if shape in ("sinks", "gpt-oss") else 0)
