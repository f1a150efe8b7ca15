"""Checkpoints as models to compute with, whole or one layer at a time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint import inference_model
from megatron.checkpoint.checkpoint_source import TensorInfo
from megatron.checkpoint.inference_model import inference_config, inference_stage, load_model_from, sample_tokens
from megatron.core.config_base import config_to_dict
from megatron.core.device import Device
from megatron.core.errors import CheckpointError, ConfigurationError
from megatron.core.models.gpt.gpt_config import GPTConfig
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.parallel_config import ParallelSizes
from megatron.core.parallel_state import describe_parallel_state
from megatron.core.process_group import single_rank_group
from megatron.core.sharding import Box, spec_of
from tests.unit.checkpoint.small_checkpoint import MemorySource
from tests.unit.core.inference.small_models import build, odd_config

CPU = Device("cpu")


class ModelSource:
    """A whole model's weights as a checkpoint, with a note of what is read."""

    def __init__(self, model: GPTModel, config: GPTConfig) -> None:
        self.values = {f"model.{spec_of(p).name}": self._unpadded(p) for p in model.parameters()}
        self.common: Mapping[str, Any] = {"config": {"model": config_to_dict(config)}}
        self.folder = Path("checkpoint")
        self.elements_read = 0

    @staticmethod
    def _unpadded(parameter: torch.Tensor) -> torch.Tensor:
        return parameter.detach()[tuple(slice(0, length) for length in spec_of(parameter).global_shape)]

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        return {name: TensorInfo(tuple(value.shape), value.dtype) for name, value in self.values.items()}

    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        assert box is not None
        self.elements_read += box.num_elements
        return self.values[name][box.slices].contiguous()

    def close(self) -> None:
        pass


def source_of(**changes: object) -> ModelSource:
    config = odd_config(**changes)
    return ModelSource(build(config, single_rank_group()), config)


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (4, 1), (1, 3), (2, 2)])
@pytest.mark.parametrize("untied", [False, True])
@pytest.mark.parametrize("swiglu", [False, True])
def test_every_rank_gets_its_boxes_and_reads_no_more(tp: int, pp: int, untied: bool, swiglu: bool) -> None:
    source = source_of(untie_embeddings_and_output_weights=untied, swiglu=swiglu)
    seen: set[str] = set()
    for rank in range(tp * pp):
        source.elements_read = 0
        model = load_model_from(source, describe_parallel_state(rank, tp * pp, ParallelSizes(tp=tp, pp=pp)), CPU)
        held = 0
        for parameter in model.parameters():
            spec = spec_of(parameter)
            for shard in spec.shards:
                expected = source.values[f"model.{spec.name}"][shard.global_box.slices]
                assert torch.equal(parameter[shard.local_box.slices], expected), spec.name
                held += shard.global_box.num_elements
            seen.add(f"model.{spec.name}")
        assert source.elements_read == held
        assert not model.training
    assert seen == set(source.values)


def test_the_weights_can_take_another_precision() -> None:
    source = source_of(bf16=True)
    state = describe_parallel_state(0, 1)
    assert {p.dtype for p in load_model_from(source, state, CPU).parameters()} == {torch.bfloat16}
    wide = load_model_from(source, state, CPU, params_dtype="float32")
    assert wide.config.params_dtype == "float32"
    for parameter in wide.parameters():
        assert torch.equal(parameter[:5].bfloat16(), source.values[f"model.{spec_of(parameter).name}"][:5])


def test_what_does_not_fit_is_named() -> None:
    source = source_of()
    del source.values["model.decoder.layers.1.mlp.linear_fc2.bias"]
    name = "model.decoder.final_layernorm.weight"
    source.values[name] = source.values[name][:23]
    with pytest.raises(CheckpointError) as caught:
        load_model_from(source, describe_parallel_state(0, 1), CPU)
    message = str(caught.value)
    assert "model.decoder.layers.1.mlp.linear_fc2.bias is missing" in message
    assert f"{name} has shape (23,) instead of (24,)" in message


@pytest.mark.parametrize(
    ("layers", "stages", "expected"), [(7, 3, [3, 2, 2]), (4, 2, [2, 2]), (2, 2, [1, 1]), (5, 1, [5])]
)
def test_layers_spread_as_evenly_as_they_can(layers: int, stages: int, expected: list[int]) -> None:
    contents = [inference_stage(layers, stages, rank) for rank in range(stages)]
    assert [len(stage.layer_numbers) for stage in contents] == expected
    assert [number for stage in contents for number in stage.layer_numbers] == list(range(layers))
    assert [stage.has_embedding for stage in contents] == [True] + [False] * (stages - 1)
    assert [stage.has_loss for stage in contents] == [False] * (stages - 1) + [True]


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(
        ConfigurationError, match=("--pipeline-model-parallel-size 3 is greater than the number of layers 2")
    ):
        inference_stage(2, 3, 0)


def test_what_only_training_needs_is_left_behind() -> None:
    trained = odd_config(
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=2,
        pipeline_model_parallel_layout="Et|ttL",
        context_parallel_size=2,
        sequence_parallel=True,
        hidden_dropout=0.1,
        attention_dropout=0.1,
        params_dtype="float32",
    )
    config = inference_config(trained, ParallelSizes(tp=4, pp=3))
    assert (config.tensor_model_parallel_size, config.pipeline_model_parallel_size) == (4, 3)
    assert config.parallel_sizes.world_size == 12
    assert not config.sequence_parallel
    assert config.pipeline_model_parallel_layout is None
    assert (config.hidden_dropout, config.attention_dropout) == (0.0, 0.0)
    assert (config.num_layers, config.hidden_size, config.vocab_size) == (3, 24, 101)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"untie_embeddings_and_output_weights": True, "swiglu": True, "normalization": "RMSNorm"},
        {"position_embedding_type": "rope", "add_bias_linear": False, "add_qkv_bias": True},
    ],
)
def test_logits_are_those_of_the_whole_model(changes: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inference_model, "MAX_READ_BYTES", 1000)
    config = odd_config(params_dtype="float32", hidden_dropout=0.5, tensor_model_parallel_size=2, **changes)
    model = build(config, single_rank_group())
    tensors = {}
    for parameter in model.parameters():
        spec = spec_of(parameter)
        tensors[f"model.{spec.name}"] = parameter.detach()[tuple(slice(size) for size in spec.global_shape)]
    source = MemorySource(tensors, {"config": {"model": config_to_dict(config)}})
    tokens = sample_tokens(config)
    assert tokens.shape == (2, 12)
    assert int(tokens.max()) < config.vocab_size
    logits = inference_model.streamed_logits(source, tokens)
    assert logits.shape == (2, 12, config.vocab_size)
    with torch.no_grad():
        expected = model(tokens, torch.arange(12).expand(2, 12))[:, :, : config.vocab_size].transpose(0, 1)
    assert torch.allclose(logits, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
    assert float(expected.abs().max()) > 0.1


def test_tokens_stay_within_the_learned_positions() -> None:
    assert sample_tokens(odd_config(max_position_embeddings=5)).shape == (2, 5)
    assert sample_tokens(odd_config(max_position_embeddings=5, position_embedding_type="rope")).shape == (2, 12)
