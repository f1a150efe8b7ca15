"""The estimate of activations, with which training decides what to offload, is close to the closed forms."""

from __future__ import annotations

import dataclasses

import pytest

from megatron.config.arguments import resolve_arguments
from megatron.config.run_config import RunConfig
from megatron.training.theoretical_memory_usage import (
    activation_bytes,
    kept_layer_bytes,
    offloaded_bytes,
    tokens_of_rank,
)
from tests.closed_forms import saved_activations

MODEL = """
    --num-layers 8 --hidden-size 1024 --num-attention-heads 8 --seq-length 1024 --max-position-embeddings 1024
    --micro-batch-size 1 --global-batch-size 8 --train-iters 10 --lr 1e-4 --mock-data --bf16 --tokenizer-type
    NullTokenizer --vocab-size 127
"""
LLAMA = """
    --position-embedding-type rope --swiglu --normalization RMSNorm --disable-bias-linear --group-query-attention
    --num-query-groups 2 --untie-embeddings-and-output-weights --ffn-hidden-size 3584
"""
EXPERTS = f"{LLAMA} --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 2048"
LATENT = """
    --position-embedding-type rope --swiglu --normalization RMSNorm --disable-bias-linear --multi-latent-attention
    --q-lora-rank 512 --kv-lora-rank 256 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128
"""
FP8 = "--fp8-format hybrid --fp8-recipe tensorwise"
LORA = "--lora-rank 8 --load somewhere --finetune"
SHARED = "--moe-shared-expert-intermediate-size 2048"
RECOMPUTE = "--recompute-granularity selective --recompute-modules"


def configure(flags: str, world_size: int) -> RunConfig:
    config = resolve_arguments(f"{MODEL} {flags}".split(), world_size, needs_files=False).config
    return dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=128))


@pytest.mark.parametrize(
    ("flags", "world_size"),
    [
        ("", 1),
        (LLAMA, 1),
        (f"{LLAMA} --tensor-model-parallel-size 2 --sequence-parallel", 2),
        (f"{LLAMA} {RECOMPUTE} core_attn", 1),
        (f"{LLAMA} {RECOMPUTE} mlp", 1),
        (f"{LLAMA} {RECOMPUTE} layernorm", 1),
        (f"{LLAMA} {RECOMPUTE} mlp layernorm core_attn", 1),
        (f"{LLAMA} --qk-layernorm", 1),
        (f"{LLAMA} --norm-placement both", 1),
        (f"{LLAMA} --context-parallel-size 4 --cp-comm-type p2p", 4),
        (f"{LLAMA} --context-parallel-size 4 --cp-comm-type a2a", 4),
        (f"{LLAMA} --context-parallel-size 4 --cp-comm-type all_gather", 4),
        (f"{LLAMA} --context-parallel-size 4 --cp-comm-type all_gather {RECOMPUTE} core_attn", 4),
        (f"{LLAMA} {FP8}", 1),
        (f"{LLAMA} {FP8} {RECOMPUTE} mlp layernorm", 1),
        (f"{LLAMA} {LORA}", 1),
        (f"{LLAMA} {LORA} --lora-target-modules q_proj v_proj", 1),
        (f"{LLAMA} {LORA} --lora-dropout 0.1", 1),
        (EXPERTS, 1),
        (f"{EXPERTS} {SHARED}", 1),
        (f"{EXPERTS} {SHARED} {RECOMPUTE} shared_experts", 1),
        (f"{EXPERTS} {RECOMPUTE} moe", 1),
        (f"{EXPERTS} {RECOMPUTE} moe_act", 1),
        (f"{EXPERTS} {RECOMPUTE} layernorm", 1),
        (f"{EXPERTS} --expert-model-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel", 4),
        (f"{EXPERTS} {LORA}", 1),
        (LATENT, 1),
        (f"{LATENT} --qk-layernorm", 1),
        (f"{LATENT} {RECOMPUTE} mla_up_proj", 1),
        (f"{LATENT} --context-parallel-size 2 --cp-comm-type all_gather", 2),
    ],
)
def test_a_layer_keeps_what_the_closed_form_says(flags: str, world_size: int) -> None:
    config = configure(flags, world_size)
    parts = saved_activations.saved_bytes(config.model, config.data.seq_length, config.training.micro_batch_size, 1)
    # Small numbers per token are left out.
    assert kept_layer_bytes(config.model, tokens_of_rank(config), 1, 0) == pytest.approx(sum(parts.values()), rel=0.06)


OFFLOAD = "--cpu-offloading --cpu-offloading-num-layers 1"
PIPELINE = "--pipeline-model-parallel-size 4"
BLOCK = "--recompute-granularity full --recompute-method block --recompute-num-layers"
UNIFORM = "--recompute-granularity full --recompute-method uniform --recompute-num-layers"


@pytest.mark.parametrize(
    ("flags", "world_size"),
    [
        (LLAMA, 1),
        (f"{LLAMA} {PIPELINE}", 4),
        (f"{LLAMA} {PIPELINE} --num-layers-per-virtual-pipeline-stage 1", 4),
        (f"{LLAMA} {PIPELINE} --num-layers-per-virtual-pipeline-stage 1 --global-batch-size 6 {RECOMPUTE} mlp", 4),
        (f"{LLAMA} {PIPELINE} {OFFLOAD}", 4),
        (f"{LLAMA} {PIPELINE} {OFFLOAD} {BLOCK} 1", 4),
        (f"{LLAMA} {OFFLOAD} {BLOCK} 5", 1),
        (f"{LLAMA} {UNIFORM} 2", 1),
        (f"{LLAMA} --mtp-num-layers 2", 1),
        (f"{LLAMA} --mtp-num-layers 2 {UNIFORM} 1", 1),
        (f"{LLAMA} --mtp-num-layers 1 {PIPELINE}", 4),
        (f"{EXPERTS} --mtp-num-layers 2", 1),
    ],
)
def test_a_rank_holds_what_the_closed_forms_say(flags: str, world_size: int) -> None:
    config = configure(flags, world_size)
    model = config.model
    whole = dataclasses.replace(model, recompute_granularity=None)
    working = max(kept_layer_bytes(whole, 1024, number, 0) for number in range(2))
    if model.recompute_method == "uniform":
        working *= model.recompute_num_layers or 1
    for rank in (0, world_size - 1):
        has_loss = config.stage_layout.chunks(rank)[-1].has_loss
        # States before and after the last norm; logits in bf16, and in float32 twice.
        loss = (1 + model.mtp_depth) * 1024 * (2 * 2 * 1024 + 10 * 128) * has_loss
        seen, planned = activation_bytes(config, rank), saved_activations.activation_bytes(config, rank)
        # In addition to saved activations the estimate counts a whole layer's backward pass, or the loss if it is more.
        assert 0.98 * planned - min(working, loss) <= seen <= 1.02 * planned + working


def test_layers_that_are_not_offloaded_are_recomputed_as_the_chunk_says() -> None:
    """Of the first five layers, which are recomputed, three are offloaded: the last three keep everything."""
    plain, offloaded = (
        configure(f"{LLAMA} {BLOCK} 5 {more}", 1) for more in ("", f"{OFFLOAD} --cpu-offloading-num-layers 3")
    )
    stream = 1024 * 1024 * 2
    assert offloaded_bytes(offloaded) == 3 * stream
    # Two of them are on their way.
    assert activation_bytes(plain, 0) - activation_bytes(offloaded, 0) == (3 - 2) * stream
