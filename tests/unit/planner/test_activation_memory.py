"""Memory of activations in closed form: what layers keep, of chunks and stages, and the estimate of training."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from megatron.config.arguments import resolve_arguments
from megatron.config.run_config import RunConfig
from megatron.core.models.fp8_layers import compute_in_float8
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel.schedule_actions import Action, Pass
from megatron.core.pipeline_parallel.stage_layout import StageContents
from megatron.planner.memory import NOTHING, ModelPieces, chunk_memory, fullest_moment, in_sequence
from megatron.planner.plan import Plan
from megatron.planner.traces import PieceMemory
from megatron.training.theoretical_memory_usage import (
    activation_bytes,
    kept_layer_bytes,
    offloaded_bytes,
    saved_layer_bytes,
    tokens_of_rank,
)
from tests.closed_forms import saved_activations
from tests.closed_forms.saved_activations import saved_bytes
from tests.harness.toy_model import load_global_weights, make_batch, make_model, tensor_parallel_group
from tests.unit.config.command_lines import MINIMAL

LENGTH, BATCH = 12, 3
FP8: dict[str, Any] = {"fp8_format": "hybrid", "fp8_recipe": "tensorwise"}
NVFP4: dict[str, Any] = {
    "fp4_format": "e2m1",
    "hidden_size": 32,
    "kv_channels": 16,
    "ffn_hidden_size": 48,
    "max_position_embeddings": 16,
}
GATED: dict[str, Any] = {"swiglu": True, "num_query_groups": 2}
LORA: dict[str, Any] = {"lora_rank": 3, "lora_target_modules": ("linear_qkv",)}


def again(*modules: str) -> dict[str, Any]:
    return {"recompute_granularity": "selective", "recompute_modules": modules}


def make(num_layers: int, **config: Any) -> GPTModel:
    # In float32 a CPU's norms keep what the fused ones do, and torch's fused attention what a GPU's does.
    settings = {
        "params_dtype": "float32",
        "position_embedding_type": "learned_absolute",
        "attention_backend": "fused",
        **config,
    }
    model = make_model(tensor_parallel_group(), num_layers=num_layers, **settings)
    load_global_weights(model)
    compute_in_float8([model], model.config, "cpu")
    return model


def kept(model: GPTModel) -> int:
    """Return the bytes that autograd saves of one micro-batch, parameters left out."""
    owned = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    found: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        is_kept = tensor.is_floating_point() or tensor.dtype == torch.uint8
        if is_kept and storage._cdata not in owned:
            found[storage._cdata] = tensor
        return tensor

    tokens, labels, positions, _ = make_batch(LENGTH, BATCH, 53)
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(tokens, positions, labels=labels).mean()
    assert loss.requires_grad
    return sum(tensor.untyped_storage().nbytes() for tensor in found.values())


def kept_by_a_layer(**config: Any) -> int:
    """Return what a third layer keeps: the first one may have an input that no gradient is wanted of."""
    return kept(make(3, **config)) - kept(make(2, **config))


def formula(**config: Any) -> int:
    return sum(saved_bytes(make(3, **config).config, LENGTH, BATCH, layer_number=2).values())


@pytest.mark.default(11)
@pytest.mark.parametrize(
    "config",
    [
        pytest.param({}, id="plain"),
        *(
            pytest.param({"fp8_format": "hybrid", "fp8_recipe": recipe}, id=recipe)
            for recipe in ("delayed", "tensorwise", "rowwise", "blockwise", "mxfp8")
        ),
        pytest.param(FP8 | {"fp8_wgrad": False}, id="no-wgrad"),
        pytest.param(FP8 | again("core_attn"), id="core_attn"),
        pytest.param(FP8 | again("layernorm"), id="layernorm"),
        pytest.param({"fp8_format": "hybrid", "fp8_recipe": "mxfp8"} | again("layernorm"), id="layernorm-mxfp8"),
        pytest.param(FP8 | again("core_attn", "layernorm", "mlp"), id="modules"),
        pytest.param(LORA, id="lora-qkv"),
        pytest.param(LORA | again("layernorm"), id="lora-layernorm"),
        pytest.param(LORA | again("core_attn"), id="lora-core_attn"),
        pytest.param(LORA | {"lora_target_modules": ()}, id="lora-everywhere"),
    ],
)
def test_a_layer_keeps_what_the_closed_form_says(config: dict[str, Any]) -> None:
    assert kept_by_a_layer(**config) == formula(**config)


@pytest.mark.parametrize("more", [{}, again("core_attn")], ids=str)
def test_a_layer_with_alibi_keeps_wider_queries_keys_and_values(more: dict[str, Any]) -> None:
    plain, biased = ({"position_embedding_type": kind} | more for kind in ("none", "alibi"))
    models = [make(3, **config).config for config in (plain, biased)]
    expected = [saved_layer_bytes(model, LENGTH * BATCH, 2, model.recomputed_modules) for model in models]
    assert kept_by_a_layer(**biased) - kept_by_a_layer(**plain) == expected[1] - expected[0]
    assert (expected[1] > expected[0]) == (not more)


@pytest.mark.parametrize(
    "more", [{}, again("layernorm"), again("core_attn", "layernorm", "mlp"), {"fp8_wgrad": False}], ids=str
)
def test_a_layer_in_nvfp4_keeps_what_the_closed_form_says(
    monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "LENGTH", 16)
    assert kept_by_a_layer(**NVFP4, **more) == formula(**NVFP4, **more)


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(FP8, id="fp8"),
        pytest.param(FP8 | again("core_attn", "layernorm"), id="modules"),
        pytest.param(LORA | {"lora_target_modules": ("v_proj", "down_proj")}, id="lora-down"),
        pytest.param(LORA | FP8 | {"lora_target_modules": ("q_proj", "o_proj")}, id="lora-fp8"),
    ],
)
def test_gated_layers_keep_as_much_more_or_less_as_the_closed_form_says(config: dict[str, Any]) -> None:
    """A CPU computes a gate in several steps, which keep more than the fused ones."""
    changed = kept_by_a_layer(**GATED, **config) - kept_by_a_layer(**GATED)
    assert changed == formula(**GATED, **config) - formula(**GATED)


def test_frozen_weights_keep_no_input() -> None:
    """Attention and activation keep what they need themselves: gone are a norm's output and the activation's."""
    trained = kept_by_a_layer()
    frozen = kept_by_a_layer(**LORA)
    tokens, hidden, ffn, rank = LENGTH * BATCH, 28, 36, 3
    # Query, key and value have an adapter, which keeps the first norm's output.
    assert trained - frozen == 4 * tokens * (hidden + ffn - rank)


def test_recomputed_norms_free_what_fp8_keeps_of_their_outputs() -> None:
    for recipe in ("delayed", "mxfp8"):
        config = {"fp8_format": "hybrid", "fp8_recipe": recipe}
        freed = kept_by_a_layer(**config) - kept_by_a_layer(**config, **again("layernorm"))
        assert freed >= 2 * LENGTH * BATCH * 28


def test_layers_that_stay_in_bf16_keep_as_much_as_those() -> None:
    config = make(3, **FP8, first_last_layers_bf16=True, num_layers_at_end_in_bf16=0).config
    plain = make(3).config
    assert saved_bytes(config, LENGTH, BATCH, 0) == saved_bytes(plain, LENGTH, BATCH, 0)
    assert saved_bytes(config, LENGTH, BATCH, 1) == saved_bytes(config, LENGTH, BATCH)
    assert sum(saved_bytes(config, LENGTH, BATCH, 1).values()) < sum(saved_bytes(plain, LENGTH, BATCH, 1).values())


LAYER = PieceMemory(kept=10, forward_peak=25, backward_peak=18)
LOSS = PieceMemory(kept=40, forward_peak=60, backward_peak=70, logits=30)


def plan_of(flags: str = "", num_layers: int = 4) -> Plan:
    words = [*MINIMAL, *f"--num-layers {num_layers} --micro-batch-size 1 {flags}".split()]
    return Plan.of(resolve_arguments(words, 1).config)


def chunk_of(flags: str, pieces: ModelPieces, whole_weights: tuple[int, int] = (0, 0)) -> PieceMemory:
    return chunk_memory(plan_of(flags), pieces, StageContents((0, 1, 2, 3)), whole_weights)


PIECES = ModelPieces([LAYER] * 4, NOTHING, LOSS, input_bytes=2, gradient_bytes=2)


def test_pieces_run_over_what_the_pieces_before_them_keep() -> None:
    assert in_sequence([LAYER] * 3) == PieceMemory(kept=30, forward_peak=45, backward_peak=38)
    assert in_sequence([LAYER, LAYER, LOSS]) == PieceMemory(60, 80, 90, 0, 30)
    split = PieceMemory(kept=10, forward_peak=25, backward_peak=18, deferred=7)
    # The last piece's backward pass comes first; what it defers waits while the others run.
    assert in_sequence([split, split]) == PieceMemory(20, 35, max(10 + 18, 18 + 7), 14)


def test_layers_that_run_again_keep_their_inputs() -> None:
    flags = "--recompute-granularity full --recompute-method"
    two = chunk_of(f"{flags} uniform --recompute-num-layers 2", PIECES)
    # The second layer runs forward while the saved activations of the first and the incoming gradient are live.
    assert two == PieceMemory(kept=4, forward_peak=2 + 25, backward_peak=2 + 10 + 25 + 2)
    block = chunk_of(f"{flags} block --recompute-num-layers 1", PIECES)
    assert block.kept == 2 + 3 * 10
    traced = dataclasses.replace(PIECES, again=[PieceMemory(3, 26, 31)] * 4)
    assert chunk_of(f"{flags} uniform --recompute-num-layers 1", traced) == PieceMemory(12, 9 + 26, 9 + 31)
    # What the traced layer has at work beyond what follows from its passes is there in a group too.
    assert chunk_of(f"{flags} uniform --recompute-num-layers 4", traced).backward_peak == 30 + 25 + 2 + (31 - 27)


def test_two_offloaded_layers_are_on_their_way() -> None:
    offloaded = chunk_of("--cpu-offloading --cpu-offloading-num-layers 3", PIECES)
    assert offloaded.kept == 10
    assert offloaded.backward_peak == 18 + 2 * 10 - 10


def test_whole_weights_are_there_while_layers_run() -> None:
    assert chunk_of("", PIECES, (100, 0)) == PieceMemory(40, 30 + 125, 30 + 118)


@pytest.mark.parametrize(("in_flight", "kept"), [(1, 10), (3, 30)])
def test_a_stage_is_fullest_in_its_first_backward_pass(in_flight: int, kept: int) -> None:
    forward = [Action(Pass.FORWARD, number, 0) for number in range(in_flight)]
    backward = [Action(Pass.BACKWARD, number, 0) for number in range(in_flight)]
    moment = fullest_moment([*forward, *backward], [PieceMemory(10, 12, 18)], 0)
    assert (moment.kept, moment.working, moment.logits) == (kept, 8, 0)
    last = fullest_moment([*forward, *backward], [LOSS], 0)
    assert (last.total, last.logits) == (40 * (in_flight - 1) + 70, 30)


def test_deferred_weight_gradients_keep_their_operands() -> None:
    split = PieceMemory(10, 10, 10, deferred=8)
    kinds = (Pass.FORWARD, Pass.BACKWARD_INPUT, Pass.FORWARD, Pass.BACKWARD_INPUT)
    actions = [Action(kind, number // 2, 0) for number, kind in enumerate(kinds)]
    assert fullest_moment(actions, [split], 0).total == 8 + 10
    late = [Action(Pass.FORWARD, 0, 0), Action(Pass.BACKWARD, 0, 0), Action(Pass.FORWARD, 1, 0)]
    late += [Action(Pass.BACKWARD, 1, 0), Action(Pass.OUTPUT_WEIGHT, 0, 0), Action(Pass.OUTPUT_WEIGHT, 1, 0)]
    assert fullest_moment(late, [PieceMemory(10, 10, 10)], 5).total == 5 + 10


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
ESTIMATED_FP8 = "--fp8-format hybrid --fp8-recipe tensorwise"
ESTIMATED_LORA = "--lora-rank 8 --load somewhere --finetune"
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
        (f"{LLAMA} --norm-placement sandwich", 1),
        (f"{LLAMA} --context-parallel-size 4 --cp-comm-type p2p", 4),
        (f"{LLAMA} --context-parallel-size 4 --cp-comm-type a2a", 4),
        (f"{LLAMA} --context-parallel-size 4 --cp-comm-type all_gather", 4),
        (f"{LLAMA} --context-parallel-size 4 --cp-comm-type all_gather {RECOMPUTE} core_attn", 4),
        (f"{LLAMA} {ESTIMATED_FP8}", 1),
        (f"{LLAMA} {ESTIMATED_FP8} {RECOMPUTE} mlp layernorm", 1),
        (f"{LLAMA} {ESTIMATED_LORA}", 1),
        (f"{LLAMA} {ESTIMATED_LORA} --lora-target-modules q_proj v_proj", 1),
        (f"{LLAMA} {ESTIMATED_LORA} --lora-dropout 0.1", 1),
        (EXPERTS, 1),
        (f"{EXPERTS} {SHARED}", 1),
        (f"{EXPERTS} {SHARED} {RECOMPUTE} shared_experts", 1),
        (f"{EXPERTS} {RECOMPUTE} moe", 1),
        (f"{EXPERTS} {RECOMPUTE} moe_act", 1),
        (f"{EXPERTS} {RECOMPUTE} layernorm", 1),
        (f"{EXPERTS} --expert-model-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel", 4),
        (f"{EXPERTS} {ESTIMATED_LORA}", 1),
        (LATENT, 1),
        (f"{LATENT} --qk-layernorm", 1),
        (f"{LATENT} {RECOMPUTE} mla_up_proj", 1),
        (f"{LATENT} --context-parallel-size 2 --cp-comm-type all_gather", 2),
    ],
)
def test_a_layer_keeps_what_the_closed_form_says_where_it_is_estimated(flags: str, world_size: int) -> None:
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
        loss = (1 + model.mtp.mtp_depth) * 1024 * (2 * 2 * 1024 + 10 * 128) * has_loss
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
