"""Parameters and memory in closed form: users' figures, experts, latent attention, adapters and sinks."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

import pretrain_gpt
from megatron.config.arguments import resolve_arguments
from megatron.config.run_config import RunConfig
from megatron.core.config_base import from_fields, with_fields
from megatron.core.device import Device
from megatron.core.models.gpt.chunk_parameters import ChunkParameter, chunk_parameters
from megatron.core.models.gpt.gpt_config import GPTConfig
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer.muon import is_orthogonalized
from megatron.core.parallel_config import ParallelSizes
from megatron.core.parallel_state import ExpertGroups, create_parallel_state, describe_parallel_state
from megatron.core.pipeline_parallel.stage_layout import StageContents
from megatron.core.sharding import spec_of
from megatron.core.tensor_parallel.random import RngStreams
from megatron.planner.explanation import with_known_vocabulary
from megatron.planner.gpu import H100
from megatron.planner.implementations import NATIVE
from megatron.planner.plan import Plan
from megatron.planner.prediction import predict
from megatron.training.initialize import Runtime
from megatron.training.model_setup import build_model_and_optimizer
from megatron.training.theoretical_memory_usage import describe_theoretical_memory, model_size, theoretical_memory
from megatron.verification.cells import BASE_FLAGS
from megatron.verification.model_cells import ATTENTION_SHAPES, LATENT_SHAPES
from megatron.verification.run_cell import resolve_cell

GPT2_345M = """
    --num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --max-position-embeddings 1024
    --micro-batch-size 4 --global-batch-size 32 --train-iters 10 --lr 1e-4 --fp16 --mock-data --vocab-file v
    --merge-file m
"""
SMALL = """
    --num-layers 3 --hidden-size 32 --num-attention-heads 4 --seq-length 24 --max-position-embeddings 24
    --micro-batch-size 2 --global-batch-size 4 --train-iters 10 --lr 1e-4 --mock-data
"""
LLAMA = """
    --position-embedding-type rope --swiglu --normalization RMSNorm --disable-bias-linear --group-query-attention
    --num-query-groups 2 --untie-embeddings-and-output-weights
"""


def configure(flags: str, world_size: int = 1, vocab_size: int = 50257) -> RunConfig:
    config = resolve_arguments(flags.split(), world_size, needs_files=False).config
    return dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=vocab_size))


@pytest.mark.parametrize(
    ("layout", "world_size", "shards"),
    [
        ("", 1, (354871296,)),
        ("--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2", 4, (102483968, 101437440)),
        ("--tensor-model-parallel-size 4", 4, (89714688,)),
        ("--pipeline-model-parallel-size 4", 4, (128137216, 75577344, 75577344, 127090688)),
    ],
)
def test_shards_have_the_sizes_that_users_report(layout: str, world_size: int, shards: tuple[int, ...]) -> None:
    size = model_size(configure(f"{GPT2_345M} {layout}", world_size))
    assert size.shards == shards
    padding = {1: 47, 2: 175, 4: 431}[2 if "size 2" in layout else 4 if "tensor" in layout else 1]
    assert size.embedding == (50257 + padding + 1024) * 1024
    assert size.block == 24 * (12 * 1024**2 + 13 * 1024) + 2 * 1024


@pytest.mark.parametrize("flags", ["", "--bf16", f"{LLAMA} --bf16 --grad-reduce-in-bf16", f"{LLAMA} --optimizer sgd"])
def test_weights_and_optimizer_are_what_a_run_holds(flags: str) -> None:
    config = configure(f"{SMALL} {flags} --tokenizer-type NullTokenizer --vocab-size 127", vocab_size=128)
    device, state = Device("cpu"), create_parallel_state()
    runtime = Runtime(device, state, RngStreams(device, 1, state.place))
    parts = build_model_and_optimizer(config, runtime, pretrain_gpt.provide_model, lambda line: None)
    parameters = list(parts.chunks[0].parameters())
    (size,) = model_size(config).shards
    assert size == sum(parameter.numel() for parameter in parameters)
    (buffer,) = parts.ddp_chunks[0].grad_buffers
    gradients = size * buffer.grad_data.element_size()  # padding left out
    optimizer = sum(tensor.nbytes for _, tensor in parts.optimizer.sharded_state().values())
    weights = sum(parameter.nbytes for parameter in parameters)
    assert theoretical_memory(config).weights_and_optimizer == weights + gradients + optimizer


def test_sharding_divides_what_it_shards() -> None:
    per_parameter = [
        theoretical_memory(configure(f"{GPT2_345M} {flags}", 4)).weights_and_optimizer / 354871296
        for flags in (
            "",
            "--use-distributed-optimizer",
            "--data-parallel-sharding-strategy optim_grads",
            "--data-parallel-sharding-strategy optim_grads_params",
        )
    ]
    assert per_parameter == [18, 6 + 12 / 4, 2 + 16 / 4, 18 / 4]


def test_activations_are_those_of_the_published_form() -> None:
    layer = 1024 * 4 * 1024 * 32  # 34 bytes of the table without the two dropout masks of 1 byte
    whole = configure(f"{GPT2_345M} --recompute-granularity selective")
    ends = 4 * 1024 * (2 * 1024 + 4 * 1024 + 4 * 50304)
    assert theoretical_memory(whole).activations == 24 * layer + ends
    flags = f"{GPT2_345M} --recompute-granularity selective --tensor-model-parallel-size 2 --sequence-parallel"
    cut = configure(f"{flags} --pipeline-model-parallel-size 2", 4)
    assert theoretical_memory(cut).activations == (12 * layer + 4 * 1024 * 2 * 1024) * 2 / 2
    lines = describe_theoretical_memory(cut)
    assert lines[0] == "Number of parameters in transformer block in billions:  0.30"
    assert lines[3:] == [
        "Number of parameters in most loaded shard in billions: 0.1025",
        "Number of parameters in other shards in billions: 0.1014",
        "Theoretical memory footprints: weight and optimizer=1759.25 MB, activation=1544.00 MB, total=3303.25 MB",
    ]


def test_activations_are_without_the_modules_that_are_recomputed() -> None:
    """A feed-forward that is recomputed keeps its input alone: no element of the 4h that fc1 writes and fc2 reads."""
    flags = f"{GPT2_345M} --recompute-granularity selective --recompute-modules"
    core, mlp = (theoretical_memory(configure(f"{flags} {modules}")).activations for modules in ("core_attn", "mlp"))
    assert core is not None
    assert mlp is not None
    assert core - mlp == 24 * 4 * 1024 * 2 * 8 * 1024


@pytest.mark.parametrize("flags", ["", "--tensor-model-parallel-size 2 --recompute-granularity selective"])
def test_activations_without_a_form_are_left_out(flags: str) -> None:
    config = configure(f"{GPT2_345M} {flags}", 2)
    assert theoretical_memory(config).activations is None
    assert "activation" not in describe_theoretical_memory(config)[-1]


WHOLE = StageContents((0, 1, 2), has_embedding=True, has_loss=True)
EXPERT_SMALL = """
    --num-layers 3 --hidden-size 32 --num-attention-heads 4 --seq-length 24 --max-position-embeddings 24
    --micro-batch-size 1 --global-batch-size 4 --train-iters 10 --lr 1e-4 --mock-data --ffn-hidden-size 40
    --tokenizer-type NullTokenizer --vocab-size 127 --num-experts 8 --moe-ffn-hidden-size 16 --moe-layer-freq 2
"""


@pytest.mark.parametrize(("tp", "ep", "etp"), [(1, 1, None), (2, 1, None), (2, 2, 1), (4, 2, 2)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_parameters_are_those_of_the_model(tp: int, ep: int, etp: int | None, has_bias: bool) -> None:
    config = from_fields(
        GPTConfig,
        num_layers=3,
        hidden_size=24,
        num_attention_heads=4,
        ffn_hidden_size=40,
        vocab_size=52,
        make_vocab_size_divisible_by=4,
        max_position_embeddings=16,
        swiglu=True,
        add_bias_linear=has_bias,
        num_experts=6,
        moe_layer_freq="[0,1,1]",
        moe_ffn_hidden_size=12,
        moe_shared_expert_intermediate_size=20,
        moe_shared_expert_gate=True,
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        tensor_model_parallel_size=tp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
        sequence_parallel=tp > 1,
    )
    state = describe_parallel_state(tp - 1, tp, ParallelSizes(tp=tp, ep=ep, etp=etp))
    rng = RngStreams(Device("cpu"), 0, state.place)
    model = GPTModel(config, state.tp, rng, seed=7, experts=ExpertGroups.of(state))
    found = []
    for parameter in model.parameters():
        spec = spec_of(parameter)
        copies = spec.num_replicas if spec.gradient_sum_axes else 0
        is_trained = parameter.requires_grad
        kind = {"is_expert": spec.is_expert, "is_matrix": is_orthogonalized(spec)}
        found.append(ChunkParameter(parameter.numel(), copies, is_trained=is_trained, **kind))
    assert chunk_parameters(config, WHOLE) == found


@pytest.mark.parametrize("optimizer", ["adam", "muon"])
def test_experts_have_their_own_share_of_sharded_state(optimizer: str) -> None:
    flags = f"{EXPERT_SMALL} --use-distributed-optimizer --optimizer {optimizer} --disable-bias-linear"
    dense, spread = (
        resolve_arguments([*flags.split(), *more.split()], 4, needs_files=False).config
        for more in ("", "--expert-model-parallel-size 4")
    )
    spread_size = model_size(spread)
    assert model_size(dense).block == spread_size.block
    assert spread_size.experts[0] * 4 == model_size(dense).experts[0]
    # Each rank has a quarter of the experts' state either way; of weights and gradients a quarter only when spread.
    saved = 8.0 * (model_size(dense).experts[0] - spread_size.experts[0])
    difference = theoretical_memory(dense).weights_and_optimizer - theoretical_memory(spread).weights_and_optimizer
    assert difference == pytest.approx(saved)


def test_what_depends_on_the_choices_of_tokens_is_not_in_megatrons_line() -> None:
    config = resolve_arguments(EXPERT_SMALL.split(), 1, needs_files=False).config
    assert theoretical_memory(config).activations is None


STAGES = (
    StageContents((0, 1), has_embedding=True, has_loss=True),
    StageContents((0,), has_embedding=True),
    StageContents((1,), has_loss=True),
)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("contents", STAGES, ids=["whole", "first", "last"])
@pytest.mark.parametrize(("is_untied", "q_lora_rank"), [(True, 6), (False, None)])
def test_parameters_are_those_of_the_model_with_latent_attention(
    tp: int, contents: StageContents, is_untied: bool, q_lora_rank: int | None
) -> None:
    config = from_fields(
        GPTConfig,
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
    assert plan.model.mtp.mtp_depth > 0
    without = dataclasses.replace(plan, model=with_fields(plan.model, mtp_num_layers=None))
    assert plan.num_predictions == without.num_predictions * (1 + plan.model.mtp.mtp_depth)
    more, fewer = (predict(each, NATIVE, H100) for each in (plan, without))
    for part in ("weights", "activations", "logits"):
        assert getattr(more.stages[-1], part) > getattr(fewer.stages[-1], part), part
    assert more.time is not None
    assert fewer.time is not None
    assert more.time.layer == fewer.time.layer
    # What follows the layers has as many MTP modules.
    assert more.time.output_layer > fewer.time.output_layer + plan.model.mtp.mtp_depth * more.time.layer.total
    assert more.time.slowest_stage > fewer.time.slowest_stage


ADAPTER_WHOLE = StageContents((0, 1), has_embedding=True, has_loss=True)
ADAPTER_SMALL = """
    --num-layers 3 --hidden-size 32 --num-attention-heads 4 --seq-length 24 --max-position-embeddings 24 --bf16
    --micro-batch-size 2 --global-batch-size 4 --train-iters 10 --lr 1e-4 --mock-data
    --tokenizer-type NullTokenizer --vocab-size 127 --lora-rank 3 --load somewhere --finetune
"""


def test_experts_beside_adapters_have_no_gradients() -> None:
    experts = "--num-experts 4 --moe-shared-expert-intermediate-size 16 --lora-target-modules linear_qkv linear_proj"
    config = resolve_arguments(f"{ADAPTER_SMALL} {experts}".split(), 1).config
    state = describe_parallel_state(0, 1, ParallelSizes())
    model = GPTModel(config.model, state.tp, RngStreams(Device("cpu"), 0, state.place), seed=7)
    size = model_size(config)
    assert size.trained == (sum(p.numel() for p in model.parameters() if p.requires_grad),)
    assert size.shards == (sum(p.numel() for p in model.parameters()),)
    assert size.experts == (0,)


def test_quantized_weights_take_half_a_byte_and_their_scales() -> None:
    widths = f"{ADAPTER_SMALL} --hidden-size 128 --ffn-hidden-size 256"
    quantized_flags = "--lora-base-quantization nf4 --no-lora-double-quantization"
    configs = [
        with_known_vocabulary(resolve_arguments(f"{widths} {more}".split(), 1).config) for more in (quantized_flags, "")
    ]
    (quantized,), (plain,) = (model_size(config).weight_bytes for config in configs)
    in_linears = 3 * (4 * 128 * 128 + 2 * 128 * 256)
    assert plain - quantized == in_linears * 2 - (in_linears // 2 + in_linears // 64 * 4)
    of_state, more = (theoretical_memory(config).weights_and_optimizer for config in configs)
    assert more - of_state == plain - quantized
    ours, theirs = (predict(Plan.of(config), NATIVE, H100).stages[0].weights for config in configs)
    assert theirs - ours == plain - quantized


EXPERTS = {"num_experts": 4, "moe_ffn_hidden_size": 12, "moe_layer_freq": "([0]+[1])"}
SHARED = {"moe_shared_expert_intermediate_size": 16, "moe_shared_expert_gate": True}


@pytest.mark.parametrize("experts", [{}, EXPERTS, EXPERTS | SHARED, EXPERTS | {"expert_tensor_parallel_size": 1}])
@pytest.mark.parametrize("targets", [(), ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "down_proj")])
@pytest.mark.parametrize(("tp", "sequence_parallel"), [(1, False), (2, False), (2, True), (4, True)])
def test_parameters_are_those_of_the_model_with_adapters(
    targets: tuple[str, ...], tp: int, sequence_parallel: bool, experts: dict[str, Any]
) -> None:
    """At tensor-parallel size 4 two ranks share a group of keys and values."""
    config = from_fields(
        GPTConfig,
        num_layers=2,
        hidden_size=24,
        num_attention_heads=4,
        num_query_groups=2,
        ffn_hidden_size=40,
        vocab_size=52,
        make_vocab_size_divisible_by=4,
        max_position_embeddings=16,
        swiglu=True,
        lora_rank=3,
        lora_target_modules=targets,
        tensor_model_parallel_size=tp,
        sequence_parallel=sequence_parallel,
        **experts,
    )
    state = describe_parallel_state(tp - 1, tp, config.parallel_sizes)
    groups = ExpertGroups.of(state) if experts else None
    model = GPTModel(config, state.tp, RngStreams(Device("cpu"), 0, state.place), seed=7, experts=groups)
    found = []
    for parameter in model.parameters():
        spec = spec_of(parameter)
        # What is summed over the ranks is of as many copies as the parameter has.
        copies = spec.num_replicas if spec.gradient_sum_axes else 0
        kind = {"is_trained": parameter.requires_grad, "is_matrix": is_orthogonalized(spec)}
        kind["is_expert"] = spec.is_expert
        found.append(ChunkParameter(parameter.numel(), copies, **kind))
    assert chunk_parameters(config, ADAPTER_WHOLE) == found


def test_weights_and_optimizer_are_what_a_run_holds_with_adapters() -> None:
    config = resolve_arguments(ADAPTER_SMALL.split(), 1, needs_files=False).config
    device, state = Device("cpu"), create_parallel_state()
    runtime = Runtime(device, state, RngStreams(device, 1, state.place))
    parts = build_model_and_optimizer(config, runtime, pretrain_gpt.provide_model, lambda line: None)
    size = model_size(config)
    trained = sum(parameter.numel() for parameter in parts.chunks[0].parameters() if parameter.requires_grad)
    assert size.trained == (trained,)
    assert size.shards == (sum(parameter.numel() for parameter in parts.chunks[0].parameters()),)
    optimizer = sum(tensor.nbytes for _, tensor in parts.optimizer.sharded_state().values())
    weights = sum(parameter.nbytes for parameter in parts.chunks[0].parameters())
    assert theoretical_memory(config).weights_and_optimizer == weights + 4 * trained + optimizer


@pytest.mark.parametrize(("shape", "tp"), [("sinks", 1), ("gpt-oss", 2), ("off-by-one", 2)])
def test_parameters_are_those_of_the_model_with_sinks(shape: str, tp: int) -> None:
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
