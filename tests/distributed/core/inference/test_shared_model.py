"""A model in training generates and scores what one process does, at layouts whose layers see parts of sequences."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.core.device import Device
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.inference.engine import InferenceEngine
from megatron.core.inference.inference_request import GenerationRequest
from megatron.core.inference.prompt_batch import Score, ScoredRow
from megatron.core.inference.sampling_config import SamplingConfig
from megatron.core.inference.staged_model import share_model
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.model import wrap_model
from megatron.core.parallel_config import ParallelSizes
from megatron.core.parallel_state import ExpertGroups, ParallelState, create_parallel_state, describe_parallel_state
from megatron.core.pipeline_parallel.p2p_communication import create_pipeline_links
from megatron.core.pipeline_parallel.stage_layout import plan_stage_layout
from megatron.core.process_group import single_rank_group
from megatron.core.tensor_parallel.random import RngStreams
from tests.harness.distributed import run_distributed
from tests.harness.toy_model import load_global_weights, named_values
from tests.unit.core.inference.small_models import odd_config

ROWS = (ScoredRow((3, 1, 4, 15), 2), ScoredRow((92, 6, 53, 58, 9, 79, 32), 6), ScoredRow((38, 4), 1))
REQUEST = GenerationRequest(
    prompts=((3, 1, 4), (15, 92, 6, 53, 58), (9,)),
    max_new_tokens=7,
    sampling=SamplingConfig(greedy=True),
    log_probabilities=True,
)
ROPE = {"position_embedding_type": "rope", "untie_embeddings_and_output_weights": True, "swiglu": True}
EXPERTS = {"num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 20, "moe_layer_freq": "[0,1,1,1]"}
SHARDED = DistributedDataParallelConfig(data_parallel_sharding_strategy="optim_grads_params")
REPLICATED = DistributedDataParallelConfig()
Found = tuple[list[list[int]], list[list[float]], list[Score]]


def train_chunks(
    state: ParallelState, fields: dict[str, Any], ddp: DistributedDataParallelConfig
) -> tuple[list[GPTModel], list[GPTModel]]:
    """Return this rank's chunks as training has them, with the toy's weights, and those that share their weights."""
    config = odd_config(num_layers=4, hidden_dropout=0.3, **state.sizes.model_fields(), **fields)
    chunks, shared = [], []
    for contents in plan_stage_layout(config, 4).chunks(state.pp.rank):
        chunk = GPTModel(
            config,
            state.tp,
            RngStreams(Device("cpu"), 1, state.place),
            seed=None,
            layer_numbers=contents.layer_numbers,
            pre_process=contents.has_embedding,
            post_process=contents.has_loss,
            cp=state.cp,
            experts=ExpertGroups.of(state),
        )
        load_global_weights(chunk, lambda spec: named_values(spec) * 3.0)
        shared.append(share_model(chunk, wrap_model(chunk, ddp, state), state))
        chunks.append(chunk)
    return chunks, shared


def found_by_rank(sizes: ParallelSizes, fields: dict[str, Any], ddp: DistributedDataParallelConfig) -> Found:
    state = create_parallel_state(sizes) if dist.is_initialized() else describe_parallel_state(0, 1)
    chunks, shared = train_chunks(state, fields, ddp)
    links = create_pipeline_links(state.pp, wraps_around=len(chunks) > 1) if state.pp.size > 1 else None
    alone = replace(state, dp=single_rank_group(("dp",)), cp=single_rank_group(("cp",)))
    engine = InferenceEngine(shared[0], alone, links, further_chunks=shared[1:], twins=state.dp_cp)
    texts = engine.generate(REQUEST)
    scores = engine.score(ROWS)
    assert all(chunk.training for chunk in chunks)
    assert all(chunk.cp.ranks == (state.rank,) and chunk.cp.axes == ("cp",) for chunk in shared)
    assert all(chunk.config.sequence_parallel == bool(fields.get("sequence_parallel")) for chunk in chunks)
    return [list(text.tokens) for text in texts], [list(text.log_probabilities or ()) for text in texts], scores


@pytest.mark.parametrize(
    ("sizes", "fields", "ddp"),
    [
        pytest.param(ParallelSizes(tp=2), {"sequence_parallel": True}, REPLICATED, marks=pytest.mark.long),
        pytest.param(ParallelSizes(cp=2), {**ROPE, "cp_comm_type": ("p2p",)}, REPLICATED, marks=pytest.mark.long),
        pytest.param(
            ParallelSizes(pp=2), {"num_layers_per_virtual_pipeline_stage": 1}, REPLICATED, marks=pytest.mark.long
        ),
        (
            ParallelSizes(tp=2, pp=2),
            {**ROPE, "num_layers_per_virtual_pipeline_stage": 1, "sequence_parallel": True},
            REPLICATED,
        ),
        (ParallelSizes(cp=2), ROPE, SHARDED),
        pytest.param(
            *(ParallelSizes(tp=2, cp=2, ep=2, etp=1), {**ROPE, **EXPERTS, "sequence_parallel": True}, REPLICATED),
            marks=pytest.mark.long,
        ),
    ],
    ids=["sp", "cp", "chunks", "chunks-sp", "cp-sharded-weights", "experts-cp-sp"],
)
def test_any_layout_gives_the_texts_and_scores_of_one_process(
    sizes: ParallelSizes, fields: dict[str, Any], ddp: DistributedDataParallelConfig
) -> None:
    """In float64, the layers of training with dropout; weights that are sharded come and go."""
    of_model = {name: value for name, value in fields.items() if name in ROPE or name in EXPERTS}
    texts, log_probabilities, scores = found_by_rank(ParallelSizes(), of_model, REPLICATED)
    assert len({token for text in texts for token in text}) > 3
    for found in run_distributed(sizes.world_size, found_by_rank, sizes, fields, ddp, timeout_s=60.0):
        assert found[0] == texts
        for ours, expected in zip(found[1], log_probabilities, strict=True):
            assert ours == pytest.approx(expected, rel=1e-11, abs=1e-11)
        for score, expected_score in zip(found[2], scores, strict=True):
            assert score.log_probability == pytest.approx(expected_score.log_probability, rel=1e-11)
            assert score.is_greedy == expected_score.is_greedy


def sharded_memory_of_rank() -> tuple[int, int]:
    """Return how many of this rank's weights have memory, of all, after a text was generated."""
    state = create_parallel_state(ParallelSizes(dp=2))
    _, shared = train_chunks(state, ROPE, SHARDED)
    alone = replace(state, dp=single_rank_group(("dp",)))
    InferenceEngine(shared[0], alone, twins=state.dp_cp).generate(REQUEST)
    weights = list(shared[0].parameters())
    return sum(weight.untyped_storage().nbytes() > 0 for weight in weights), len(weights)


def test_sharded_weights_leave_when_a_text_is_generated() -> None:
    for here, total in run_distributed(2, sharded_memory_of_rank):
        assert here == 0
        assert total > 20


def values_that_rank_shares(pp: int) -> list[float]:
    state = create_parallel_state(ParallelSizes(pp=pp, cp=2))
    _, shared = train_chunks(state, ROPE, REPLICATED)
    links = create_pipeline_links(state.pp) if state.pp.size > 1 else None
    alone = replace(state, cp=single_rank_group(("cp",)))
    engine = InferenceEngine(shared[0], alone, links, twins=state.cp)
    values = torch.tensor([float(state.rank)])
    engine.staged.share(values, values if state.pp.is_last else None)
    return values.tolist()


@pytest.mark.parametrize("pp", [1, 2])
def test_ranks_that_compute_the_same_follow_one(pp: int) -> None:
    """A GPU's sums may differ in their last bit from rank to rank: the first of the last stage decides."""
    first_of_last_stage = 0.0 if pp == 1 else 2.0
    assert run_distributed(2 * pp, values_that_rank_shares, pp) == [[first_of_last_stage]] * 2 * pp
