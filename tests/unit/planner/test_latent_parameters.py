"""Latent attention and further tokens in closed form: their parameters, and what further ones add."""

from __future__ import annotations

import dataclasses

import pytest

from megatron.config.arguments import resolve_arguments
from megatron.core.device import Device
from megatron.core.model_parallel_config import ParallelSizes
from megatron.core.models.gpt.chunk_parameters import ChunkParameter, chunk_parameters
from megatron.core.models.gpt.gpt_config import GPTConfig
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer.muon import is_orthogonalized
from megatron.core.parallel_state import describe_parallel_state
from megatron.core.pipeline_parallel.stage_layout import StageContents
from megatron.core.sharding import spec_of
from megatron.core.tensor_parallel.random import RngStreams
from megatron.planner.explanation import with_known_vocabulary
from megatron.planner.gpu import H100
from megatron.planner.implementations import OURS
from megatron.planner.plan import Plan
from megatron.planner.prediction import predict
from megatron.training.theoretical_memory_usage import model_size
from megatron.verification.cells import BASE_FLAGS
from megatron.verification.model_cells import LATENT_SHAPES

STAGES = (
    StageContents((0, 1), has_embedding=True, has_loss=True),
    StageContents((0,), has_embedding=True),
    StageContents((1,), has_loss=True),
)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("contents", STAGES, ids=["whole", "first", "last"])
@pytest.mark.parametrize(("is_untied", "q_lora_rank"), [(True, 6), (False, None)])
def test_parameters_are_those_of_the_model(
    tp: int, contents: StageContents, is_untied: bool, q_lora_rank: int | None
) -> None:
    config = GPTConfig(
        num_layers=2,
        hidden_size=24,
        num_attention_heads=4,
        ffn_hidden_size=40,
        vocab_size=52,
        make_vocab_size_divisible_by=4,
        position_embedding_type="rope",
        untie_embeddings_and_output_weights=is_untied,
        multi_latent_attention=True,
        qk_layernorm=True,
        q_lora_rank=q_lora_rank,
        kv_lora_rank=10,
        qk_head_dim=8,
        qk_pos_emb_head_dim=4,
        v_head_dim=6,
        mtp_num_layers=2,
        tensor_model_parallel_size=tp,
        sequence_parallel=tp > 1,
    )
    state = describe_parallel_state(tp - 1, tp, ParallelSizes(tp=tp))
    model = GPTModel(
        config,
        state.tp,
        RngStreams(Device("cpu"), 0, state.place),
        seed=7,
        layer_numbers=contents.layer_numbers,
        pre_process=contents.has_embedding,
        post_process=contents.has_loss,
    )
    found = []
    for parameter in model.parameters():
        spec = spec_of(parameter)
        copies = spec.num_replicas if "tp" in spec.gradient_sum_axes else 0
        kind = {"is_tied": spec.is_tied_over_pipeline, "is_matrix": is_orthogonalized(spec)}
        found.append(ChunkParameter(parameter.numel(), copies, **kind))
    assert chunk_parameters(config, contents) == found


def test_further_tokens_take_memory_and_time_on_the_last_stage() -> None:
    flags = [*BASE_FLAGS, *LATENT_SHAPES["latent-yarn"], "--bf16"]
    config = with_known_vocabulary(resolve_arguments(flags, 1, needs_files=False).config)
    size = model_size(config)
    assert size.block + size.embedding == size.shards[0]
    plan = Plan.of(config)
    assert plan.model.mtp_depth > 0
    without = dataclasses.replace(plan, model=dataclasses.replace(plan.model, mtp_num_layers=None))
    assert plan.num_predictions == without.num_predictions * (1 + plan.model.mtp_depth)
    more, fewer = (predict(each, OURS, H100) for each in (plan, without))
    for part in ("weights", "activations", "logits"):
        assert getattr(more.stages[-1], part) > getattr(fewer.stages[-1], part), part
    assert more.time is not None
    assert fewer.time is not None
    assert more.time.layer == fewer.time.layer
    # What follows the layers has as many MTP modules.
    assert more.time.output_layer > fewer.time.output_layer + plan.model.mtp_depth * more.time.layer.total
    assert more.time.slowest_stage > fewer.time.slowest_stage
