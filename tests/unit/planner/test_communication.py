"""What a step sends, recorded without a network, equals the closed forms, byte for byte, at every kind of layout."""

from __future__ import annotations

from contextlib import nullcontext
from unittest.mock import patch

import pytest

import pretrain_gpt
from megatron.config.arguments import resolve_arguments
from megatron.config.run_config import RunConfig
from megatron.core.ops.fp8_quantizers import Float8State
from megatron.planner.communication import step_traffic as planned_traffic
from megatron.planner.explanation import with_known_vocabulary
from megatron.planner.simulation.fake_cuda import find_compiler
from megatron.verification.cells import FAMILY_SHAPES, IN_PARTS, MODULES, TP_OVERLAP, Cell, Layout, make_cell, matrix
from megatron.verification.collective_recorder import record_step
from megatron.verification.model_cells import (
    ExpertLayout,
    make_attention_cell,
    make_expert_cell,
    make_latent_cell,
    make_prediction_cell,
    prediction_matrix,
)
from megatron.verification.run_cell import resolve_cell
from megatron.verification.traffic import Traffic, Volume
from megatron.verification.training_cells import fully_sharded, hybrid
from tests.closed_forms.step_traffic import step_traffic
from tests.harness.balanced_experts import balanced_experts
from tests.harness.sized_cells import (
    LATENT_CELLS,
    NARROW_LATENT,
    ONE_MTP_MODULE,
    TWO_MTP_MODULES,
    UP_PROJECTIONS,
    fp8_flags,
    mtp_cell,
    mtp_expert_cell,
    mtp_latent_cell,
    short_name,
)
from tests.harness.step_traffic import assert_same_traffic


def ranks_of_all_stages(config: RunConfig) -> list[int]:
    """Return a rank of every stage, each at another place within it."""
    per_stage = config.world_size // config.model.pipeline_model_parallel_size
    stages = range(config.model.pipeline_model_parallel_size)
    return sorted({stage * per_stage + stage % per_stage for stage in stages} | {config.world_size - 1})


def assert_equal(cell: Cell, dtype: str) -> None:
    config = resolve_cell(cell.flags, cell.world_size, dtype)
    for rank in ranks_of_all_stages(config):
        assert_same_traffic(config, rank, cell.data)


FULL = ("full", "uniform", "1")
CELLS = [
    ("bfloat16", make_cell("gpt2", Layout(tp=2), extra=("--spike-policy", "skip"))),
    ("float32", make_cell("gpt2", Layout(tp=2, recompute=("full", "uniform", "2")), extra=("--hidden-dropout", "0.1"))),
    ("float32", make_cell("gpt2", Layout(tp=2, recompute=("full", "uniform", "3")))),
    ("bfloat16", make_cell("llama", Layout(tp=4, sequence_parallel=True, recompute=("full", "block", "3")))),
    ("bfloat16", make_cell("llama", Layout(tp=2, sequence_parallel=True, cp=2, recompute=MODULES, offloaded_layers=2))),
    ("float32", make_cell("gpt2", Layout(tp=2, recompute=MODULES))),
    ("float32", make_cell("gpt2", Layout(tp=2, cp=2, recompute=("selective", "mlp")))),
    ("bfloat16", make_cell("gpt2", Layout(tp=2, pp=2, recompute=IN_PARTS, offloaded_layers=1))),
    ("float32", make_cell("gpt2", Layout(tp=2, recompute=("full", "block", "3", "distributed")))),
    ("float32", make_cell("gpt2", Layout(tp=2, recompute=("full", "uniform", "3", "distributed")))),
    ("float64", make_cell("qwen", Layout(tp=4, sequence_parallel=True))),
    *(
        ("bfloat16", make_cell("gpt2-untied", Layout(tp=4, sequence_parallel=True, tp_overlap=flags)))
        for flags in TP_OVERLAP
    ),
    ("float32", make_cell("gpt2", Layout(tp=2, sequence_parallel=True, tp_overlap=TP_OVERLAP[0], recompute=FULL))),
    ("float32", make_cell("llama", Layout(pp=2, virtual_stages=2))),
    ("bfloat16", make_cell("gpt2", Layout(pp=4, schedule="zero-bubble"))),
    ("bfloat16", make_cell("gpt2", Layout(tp=2, sequence_parallel=True, pp=2, pipeline_layout="E|tt|tt|L", dp=2))),
    ("float32", make_cell("gpt2", Layout(pp=2, first_stage_layers=1), "uneven")),
    *(
        (dtype, make_cell("llama", Layout(cp=cp, cp_comm_type=exchange, recompute=recompute)))
        for dtype, cp, exchange, recompute in (
            ("bfloat16", 4, "p2p", ()),
            ("float32", 2, "p2p", ("selective",)),
            ("bfloat16", 4, "all_gather", ()),
            ("float32", 2, "all_gather", FULL),
            ("bfloat16", 4, "a2a", ()),
            ("float32", 2, "a2a", ("selective",)),
            ("bfloat16", 2, "a2a", FULL),
        )
    ),
    *(
        ("bfloat16", make_cell("llama", Layout(cp=4, cp_comm_type="a2a+p2p", cp_levels=levels, recompute=recompute)))
        for levels, recompute in (((2, 2), ()), ((2, 2), FULL), ((2, 2), ("selective",)), ((4, 1), ()), ((1, 4), ()))
    ),
    ("bfloat16", make_cell("gpt2", Layout(dp=4))),
    ("float32", make_cell("gpt2", Layout(dp=2, sharding="optim"), "uneven")),
    ("bfloat16", make_cell("gpt2", Layout(dp=4, sharding="optim_grads", overlap=True))),
    ("bfloat16", make_cell("gpt2", Layout(pp=2, dp=2, sharding="optim_grads", schedule="zero-bubble", overlap=True))),
    ("bfloat16", make_cell("gpt2", Layout(tp=2, sequence_parallel=True, pp=2, dp=2, sharding="optim_grads"))),
    ("bfloat16", make_cell("gpt2", fully_sharded(Layout(dp=4)))),
    ("float32", make_cell("llama", fully_sharded(Layout(pp=2, virtual_stages=2, dp=2), overlap=True))),
    ("bfloat16", make_cell("gpt2", fully_sharded(Layout(tp=2, pp=2, cp=2, recompute=FULL)))),
    ("float32", hybrid(make_cell("llama", fully_sharded(Layout(tp=2, cp=2, dp=2), overlap=True)))),
    ("float32", hybrid(make_cell("gpt2", Layout(dp=4, sharding="optim")))),
    ("float32", hybrid(make_expert_cell("mixtral", ExpertLayout(dp=8, ep=2, sharding="optim")))),
    ("bfloat16", make_cell("gpt2", Layout(cp=2, dp=2), extra=("--z-loss-coeff", "1e-3", "--clip-grad-vectors", "0.5"))),
    ("float32", make_cell("qwen", Layout(tp=4, pp=2, dp=1), "packed")),
    ("bfloat16", make_cell("llama", Layout(tp=2, sequence_parallel=True, pp=2, cp=2, recompute=FULL), "packed")),
    *(("bfloat16", make_cell(shape, Layout(tp=2, sequence_parallel=True, dp=2))) for shape in FAMILY_SHAPES),
    ("float32", make_attention_cell("gpt-oss", ExpertLayout(tp=2, sequence_parallel=True, pp=2, dp=2, ep=2))),
]


@pytest.mark.default(1)
@pytest.mark.parametrize(
    ("dtype", "cell"),
    # Neighbors are alike: every other one by default.
    [pytest.param(*case, marks=[pytest.mark.long] * (number % 2)) for number, case in enumerate(CELLS)],
    ids=[f"{cell.name} {dtype}" for dtype, cell in CELLS],
)
def test_recorded_bytes_equal_the_closed_form(dtype: str, cell: Cell) -> None:
    assert_equal(cell, dtype)


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_recorded_bytes_equal_the_closed_form_in_the_whole_matrix(dtype: str) -> None:
    for cell in (*matrix(), *(make_cell(shape, Layout(tp=4, recompute=FULL)) for shape in FAMILY_SHAPES)):
        assert_equal(cell, dtype)


def config_of(*flags: str, world_size: int, dtype: str = "bfloat16") -> RunConfig:
    return resolve_cell((*make_cell("gpt2", Layout()).reference_flags, *flags), world_size, dtype)


def test_tensor_parallelism_by_hand() -> None:
    config = config_of("--tensor-model-parallel-size", "2", world_size=2)
    a, tokens = 16 * 24 * 2, 16
    # Four a layer, one for the embedding, one for the output layer; two for the loss, in float32.
    loss = Volume(1, tokens * 4) + Volume(1, 2 * tokens * 4)
    assert step_traffic(config, 0) == {
        ("all_reduce", ("tp",)): (Volume(1, a) * (4 * 4 + 2) + loss) * 8,
        ("broadcast", ("tp",)): Volume(1, tokens * (2 + 2 + 1) + 8) * 8,
        ("all_reduce", ("pp", "tp")): Volume(1, 8),
        ("all_reduce", ("pp", "dp", "cp", "tp")): Volume(1, 32),
    }


def test_chunks_send_what_a_ring_of_whole_collectives_sends() -> None:
    layout = ("--tensor-model-parallel-size", "4", "--sequence-parallel")
    whole = step_traffic(config_of(*layout, world_size=4), 0)
    chunked = step_traffic(config_of(*layout, "--tp-comm-overlap", "--tp-comm-overlap-rs-dgrad", world_size=4), 0)

    def sent(traffic: Traffic) -> int:
        volumes = [traffic[operation, ("tp",)].num_bytes * 3 // 4 for operation in ("all_gather", "reduce_scatter")]
        return sum(volumes) + traffic.get(("send", ("tp",)), Volume(0, 0)).num_bytes

    assert sent(whole) == sent(chunked)
    a, layers, microbatches = 16 * 24 * 2, 4, 8
    # Eight a layer, four each way, and two of the output layer: three messages of a quarter each.
    assert chunked["send", ("tp",)] == Volume(3, 3 * a // 4) * (8 * layers + 2) * microbatches
    # Two inputs a layer and the output layer's come once more, and the embedding's gradient.
    assert chunked["all_gather", ("tp",)] == Volume(1, a) * (2 * layers + 2) * microbatches


def samples_sent(*flags: str, world_size: int, stages: int) -> list[Volume]:
    """Return what the ranks of each stage broadcast of the samples."""
    config = config_of(*flags, "--tensor-model-parallel-size", "2", world_size=world_size)
    per_stage = world_size // stages
    traffics = [step_traffic(config, stage * per_stage) for stage in range(stages)]
    return [traffic.get(("broadcast", ("tp",)), Volume(0, 0)) for traffic in traffics]


def test_samples_go_to_the_stages_that_use_them_by_hand() -> None:
    pipeline = ("--pipeline-model-parallel-size", "4", "--global-batch-size", "6")
    tokens, none = 16, Volume(0, 0)
    first, last = Volume(6, 6 * 2 * tokens), Volume(6, 6 * (3 * tokens + 8))
    assert samples_sent(*pipeline, world_size=8, stages=4) == [first, none, none, last]
    # Documents are of whole sequences, and every layer attends inside them; learned positions are looked up first.
    packed = ("--reset-position-ids", "--reset-attention-mask", "--eod-mask-loss")
    documents = Volume(0, 6 * 2 * tokens)
    middle = Volume(6, 0) + documents
    positions = Volume(0, 6 * 2 * tokens)
    expected = [first + documents + positions, middle, middle, last + documents]
    assert samples_sent(*pipeline, *packed, world_size=8, stages=4) == expected
    halved = [Volume(6, 6 * (2 * 8 + 2 * 16 + 2 * 8)), middle, middle, Volume(6, 6 * (3 * 8 + 8 + 2 * 16))]
    context = ("--context-parallel-size", "2")
    assert samples_sent(*pipeline, *packed, *context, world_size=16, stages=4) == halved
    rotary = ("--position-embedding-type", "rope")
    expected = [first + documents + positions, *[middle + positions] * 2, last + documents + positions]
    assert samples_sent(*pipeline, *packed, *rotary, world_size=8, stages=4) == expected
    assert samples_sent(*pipeline, *rotary, world_size=8, stages=4) == [first, none, none, last]


def test_larger_vocabularies_take_four_bytes_a_token() -> None:
    for vocab_size, size in ((65535, 2), (65536, 4)):  # and the end-of-document token
        (volume,) = samples_sent("--vocab-size", str(vocab_size), world_size=2, stages=1)
        assert volume == Volume(8, 8 * (16 * (2 * size + 1) + 8))


def test_sequence_parallelism_sends_the_same_bytes_as_tensor_parallelism_but_for_one_gather_a_linear_map() -> None:
    """An all-reduce is a reduce-scatter and an all-gather; the weights' gradients gather their input once more."""
    config = config_of("--tensor-model-parallel-size", "2", "--sequence-parallel", world_size=2)
    traffic, a, layers, m = step_traffic(config, 0), 16 * 24 * 2, 4, 8
    assert traffic["reduce_scatter", ("tp",)] == Volume(1, a) * (m * (4 * layers + 2))
    assert traffic["all_gather", ("tp",)] == Volume(1, a) * (m * ((4 + 2) * layers + 3))


def test_pipeline_by_hand() -> None:
    flags = ("--pipeline-model-parallel-size", "4", "--untie-embeddings-and-output-weights")
    for rank, directions in enumerate((1, 2, 2, 1)):
        traffic = step_traffic(config_of(*flags, world_size=4), rank)
        assert traffic["send", ("pp",)] == Volume(1, 16 * 24 * 2) * (directions * 8)
        assert not any(axes == ("embedding",) for _, axes in traffic)


def test_data_parallelism_by_hand() -> None:
    h, f, vocabulary, positions = 24, 40, 56, 16
    layer = [h, h, h * h, h, 3 * h * h, 3 * h, h, h, f * h, f, h * f, h]
    sizes = [vocabulary * h, positions * h, *layer * 4, h, h]
    padded = sum(-(-size // 128) * 128 for size in sizes)
    length = -(-padded // 256) * 256
    copies = step_traffic(config_of(world_size=2), 1)
    assert copies["all_reduce", ("dp", "cp")] == Volume(1, 4 * length)
    sharded = step_traffic(config_of("--use-distributed-optimizer", world_size=2), 1)
    assert sharded["reduce_scatter", ("dp", "cp")] == Volume(1, 4 * length)
    assert sharded["all_gather", ("dp", "cp")] == Volume(1, 2 * length)


def test_context_parallelism_by_hand() -> None:
    keys_and_values = 2 * 8 * 24
    ring = step_traffic(config_of("--context-parallel-size", "2", world_size=2), 0)
    # Forward one hop, backward one more and two of the float32 gradients.
    assert ring["send", ("cp",)] == (Volume(2, 2 * keys_and_values * 2) + Volume(2, 2 * keys_and_values * 4)) * (4 * 8)


EXPERT_FULL, MOE = ("full", "uniform", "2"), ("selective", "moe")
GLOBAL = ("--moe-router-load-balancing-type", "global_aux_loss")
PARTS = ("selective", "core_attn", "layernorm", "moe_act", "shared_experts")
GATE = ("--moe-shared-expert-gate",)
RECIPES = ("tensorwise", "rowwise", "mxfp8", "blockwise")


def in_float8(recipe: str) -> tuple[str, ...]:
    """Return the flags of a recipe and of sizes that it can round."""
    sizes = "--hidden-size 64 --ffn-hidden-size 96 --moe-ffn-hidden-size 32 --moe-shared-expert-intermediate-size 64"
    return (*sizes.split(), "--seq-length", "64", "--max-position-embeddings", "64", *_HALF, "--fp8-recipe", recipe)


_HALF = ("--bf16", "--fp8-format", "hybrid")
FLOAT8 = (*in_float8("tensorwise"), "--first-last-layers-bf16")
EXPERT_CELLS = (
    ("mixtral", ExpertLayout(dp=2, ep=2), ()),
    ("mixtral", ExpertLayout(tp=2), ()),
    ("mixtral", ExpertLayout(cp=2, dp=2, ep=4, expert_flags=GLOBAL), ()),
    ("deepseek-experts", ExpertLayout(tp=2, dp=2, ep=2, dispatcher="allgather", recompute=EXPERT_FULL), ()),
    ("qwen3-moe", ExpertLayout(tp=2, pp=2, ep=2, etp=1, sequence_parallel=True, recompute=EXPERT_FULL), ()),
    ("deepseek-experts", ExpertLayout(tp=2, dp=2, pp=2, ep=2, sequence_parallel=True, sharding="optim"), ()),
    ("deepseek-experts", ExpertLayout(tp=2, ep=2, etp=1, sequence_parallel=True, recompute=MOE), ()),
    ("deepseek-experts", ExpertLayout(tp=2, sequence_parallel=True, recompute=MOE), ("--hidden-dropout", "0.1")),
    ("dropping", ExpertLayout(tp=2, cp=2, ep=2, etp=2), ("--moe-expert-capacity-factor", "1")),
    ("gpt2-experts", ExpertLayout(dp=4, ep=2, sharding="optim_grads", overlap=True), ()),
    ("deepseek-experts", ExpertLayout(tp=2, ep=2, etp=1, sequence_parallel=True, recompute=PARTS), ()),
    ("deepseek-experts", ExpertLayout(tp=2, ep=2, etp=1, sequence_parallel=True, recompute=PARTS), GATE),
    *(("deepseek-experts", ExpertLayout(tp=2, sequence_parallel=True), in_float8(recipe)) for recipe in RECIPES),
    ("deepseek-experts", ExpertLayout(tp=2, ep=2, etp=1, sequence_parallel=True, recompute=PARTS), FLOAT8),
    ("deepseek-experts", ExpertLayout(tp=2, ep=2, etp=1, sequence_parallel=True, recompute=MOE), FLOAT8),
    ("mixtral", ExpertLayout(tp=2, dp=2, ep=2, dispatcher="allgather", recompute=MOE), ("--moe-router-dtype", "fp32")),
    ("gpt2-experts", ExpertLayout(tp=2, ep=2, etp=1, sequence_parallel=True), ("--moe-router-dtype", "fp64")),
    ("mixtral", ExpertLayout(tp=2, pp=2, ep=2, etp=1), ("--dataloader-type", "external")),
)
ADAPTERS = ("--lora-rank", "3")
OF_EXPERTS = (*ADAPTERS, "--lora-target-modules", "linear_fc1", "linear_fc2")
OF_SECOND = (*ADAPTERS, "--lora-target-modules", "linear_fc2")
STILL = ("--moe-router-bias-update-rate", "0")
FULL_LAYERS = ("full", "uniform", "1")
ADAPTED = (
    ("mixtral", ExpertLayout(tp=2, dp=2, ep=2), ADAPTERS),
    ("mixtral", ExpertLayout(tp=2, dp=2, ep=2, dispatcher="allgather"), OF_EXPERTS),
    ("mixtral", ExpertLayout(tp=2, dp=2, ep=4, etp=1), OF_EXPERTS),
    ("mixtral", ExpertLayout(tp=2, ep=2, etp=1, sequence_parallel=True), OF_SECOND),
    ("qwen3-moe", ExpertLayout(tp=2, pp=2, ep=2, etp=1, sequence_parallel=True, recompute=FULL_LAYERS), OF_SECOND),
    ("mixtral", ExpertLayout(tp=2, recompute=FULL_LAYERS), ADAPTERS),
    ("deepseek-experts", ExpertLayout(tp=2, dp=2, ep=2), (*OF_EXPERTS, *STILL)),
    ("deepseek-experts", ExpertLayout(tp=2, dp=2, pp=2, ep=2, sequence_parallel=True), (*ADAPTERS, *STILL)),
    ("deepseek-experts", ExpertLayout(tp=2, ep=2, etp=1, recompute=FULL_LAYERS), (*OF_SECOND, *STILL)),
    ("deepseek-experts", ExpertLayout(tp=2, ep=2, etp=1, sequence_parallel=True, recompute=MOE), (*ADAPTERS, *STILL)),
    ("deepseek-experts", ExpertLayout(tp=2, ep=2, etp=1, sequence_parallel=True, recompute=PARTS), (*ADAPTERS, *STILL)),
    ("deepseek-experts", ExpertLayout(tp=2, recompute=("selective", "mlp")), (*ADAPTERS, *STILL)),
    ("gpt2-experts", ExpertLayout(tp=2, dp=2, ep=2, sharding="optim"), OF_EXPERTS),
    ("dropping", ExpertLayout(tp=2, dp=2, ep=2), (*OF_EXPERTS, "--moe-expert-capacity-factor", "1")),
    ("dropping", ExpertLayout(tp=2, sequence_parallel=True), (*OF_SECOND, "--moe-expert-capacity-factor", "1")),
)


FEW = (0, 3, 4)
"""Layouts of every kind, which the default tests take."""


@pytest.mark.parametrize(
    "number", FEW, ids=[f"{EXPERT_CELLS[number][0]} {EXPERT_CELLS[number][1].name}" for number in FEW]
)
def test_recorded_bytes_equal_the_closed_form_of_experts(number: int) -> None:
    assert_equal_expert_traffic(*EXPERT_CELLS[number])


@pytest.mark.long
def test_recorded_bytes_equal_the_closed_form_at_all_layouts() -> None:
    for cell in EXPERT_CELLS:
        assert_equal_expert_traffic(*cell)


@pytest.mark.long
@pytest.mark.parametrize("number", range(len(ADAPTED)))
def test_recorded_bytes_of_adapted_experts_equal_the_closed_form(number: int) -> None:
    assert_equal_expert_traffic(*ADAPTED[number])


def assert_equal_expert_traffic(shape: str, layout: ExpertLayout, extra: tuple[str, ...]) -> None:
    cell = make_expert_cell(shape, layout, extra=extra)
    config = resolve_cell(cell.flags, cell.world_size, "bfloat16")
    with balanced_experts():
        for rank in {0, config.world_size - 1}:
            assert_same_traffic(config, rank, cell.data)


@pytest.mark.parametrize(
    "cell",
    [LATENT_CELLS[0], *(pytest.param(cell, marks=pytest.mark.long) for cell in LATENT_CELLS[1:])],
    ids=short_name,
)
def test_recorded_bytes_equal_the_closed_form_of_latent_attention(cell: Cell) -> None:
    assert_sent(cell)


def test_whole_sequences_are_summed_where_heads_begin() -> None:
    """Without sequence parallelism every rank multiplies by the whole down-projection weights."""
    assert_sent(make_latent_cell("latent", Layout(tp=2), extra=NARROW_LATENT))


def assert_sent(cell: Cell) -> None:
    config = resolve_cell(cell.flags, cell.world_size, "bfloat16")
    for rank in sorted({0, config.world_size - 1}):
        assert_same_traffic(config, rank, cell.data)


MTP_FULL = ("full", "uniform", "2")
MTP_CELLS = (
    make_prediction_cell("llama-mtp", Layout(tp=2, pp=2, cp=2, sequence_parallel=True, recompute=MTP_FULL)),
    make_prediction_cell("qwen-mtp", Layout(tp=2, recompute=("full", "block", "1", "distributed"))),
    make_prediction_cell("llama-mtp", Layout(tp=4, sequence_parallel=True, tp_overlap=("--tp-comm-overlap",))),
    make_prediction_cell("qwen-mtp", fully_sharded(Layout(tp=2, pp=2, dp=2), overlap=True)),
    hybrid(make_prediction_cell("qwen-mtp", fully_sharded(Layout(pp=2, dp=4), overlap=True))),
    make_prediction_cell("qwen-mtp", Layout(pp=2, dp=2), extra=("--z-loss-coeff", "1e-3")),
    mtp_cell(
        "llama-mtp",
        Layout(tp=2, pp=2, dp=2, sequence_parallel=True, sharding="optim"),
        (*fp8_flags("tensorwise"), "--fp8-param-gather"),
    ),
    mtp_expert_cell(
        "deepseek-experts", ExpertLayout(tp=2, ep=2, etp=1, sequence_parallel=True, recompute=MTP_FULL), TWO_MTP_MODULES
    ),
    mtp_expert_cell(
        "mixtral", ExpertLayout(tp=2, pp=2, sequence_parallel=True, dispatcher="allgather"), ONE_MTP_MODULE
    ),
    mtp_latent_cell(Layout(tp=2, pp=2, sequence_parallel=True, recompute=UP_PROJECTIONS)),
    mtp_latent_cell(Layout(cp=2, cp_comm_type="a2a")),
)


@pytest.mark.parametrize(
    "cell", [MTP_CELLS[0], *(pytest.param(cell, marks=pytest.mark.long) for cell in MTP_CELLS[1:])], ids=short_name
)
def test_recorded_bytes_equal_the_closed_form_of_further_tokens(cell: Cell) -> None:
    assert_mtp_sent(cell)


@pytest.mark.long
def test_recorded_bytes_equal_the_closed_form_in_the_whole_matrix_of_further_tokens() -> None:
    for cell in prediction_matrix():
        assert_mtp_sent(cell)


def assert_mtp_sent(cell: Cell) -> None:
    # Received numbers are not initialized and may be large: in float64 their norm is still finite.
    dtype = "bfloat16" if "--bf16" in cell.flags else "float64"
    config = resolve_cell(cell.flags, cell.world_size, dtype)
    for rank in sorted({0, config.world_size - 1}):
        with balanced_experts() if config.model.moe.num_experts else nullcontext():
            assert_same_traffic(config, rank, cell.data)


SHAPE = """--hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 96 --seq-length 64 --max-position-embeddings 64
    --bf16 --fp8-format hybrid"""
FLOAT8_RECIPES = ("delayed", "tensorwise", "rowwise", "blockwise", "mxfp8")
SEQUENCE = "--tensor-model-parallel-size 2 --sequence-parallel"
FLOAT8_MODULES = "--recompute-granularity selective --recompute-modules"
LATENT = """--multi-latent-attention --position-embedding-type rope --kv-lora-rank 16 --qk-head-dim 24
    --qk-pos-emb-head-dim 16 --v-head-dim 8 --qk-layernorm --no-check-for-nan-in-loss-and-grad"""
EXPERTS = "--num-experts 4 --moe-router-topk 4 --moe-ffn-hidden-size 64 --moe-token-dispatcher-type alltoall"
FLOAT8_FULL = "--recompute-granularity full --recompute-method"
FURTHER = "--mtp-num-layers 2 --position-embedding-type rope --no-check-for-nan-in-loss-and-grad"


def assert_float8_sent(flags: str, world_size: int = 2) -> Traffic:
    """Assert that all accounts of a step with a history agree, and return what is sent."""
    words = (*make_cell("gpt2", Layout()).reference_flags, *SHAPE.split(), *flags.split())
    config = resolve_cell(words, world_size, "bfloat16")
    with patch.object(Float8State, "has_history", property(lambda self: True, lambda self, value: None), create=True):
        return assert_same_traffic(config, 0)


ALWAYS = [
    *(f"{SEQUENCE} --fp8-recipe {recipe}" for recipe in ("delayed", "tensorwise")),
    f"{SEQUENCE} --fp8-recipe rowwise {FLOAT8_MODULES} layernorm mlp",
    f"{SEQUENCE} --fp8-recipe mxfp8 {FLOAT8_FULL} block --recompute-num-layers 1 --first-last-layers-bf16",
]
MORE = [
    *(f"{SEQUENCE} --fp8-recipe {recipe} {FURTHER}" for recipe in FLOAT8_RECIPES),
    *(f"{SEQUENCE} --fp8-recipe {recipe} {FURTHER} {FLOAT8_MODULES} layernorm mlp" for recipe in ("rowwise", "mxfp8")),
    f"{SEQUENCE} --fp8-recipe tensorwise {FURTHER} --no-fp8-wgrad --first-last-layers-bf16",
    f"{SEQUENCE} --fp8-recipe delayed {FURTHER} {FLOAT8_FULL} uniform --recompute-num-layers 1",
    f"--tensor-model-parallel-size 2 --fp8-recipe tensorwise {FURTHER}",
    f"--fp8-recipe delayed {FURTHER} --use-distributed-optimizer --fp8-param-gather",
    f"{SEQUENCE} --fp8-recipe delayed {LATENT} --q-lora-rank 48 {EXPERTS} --first-last-layers-bf16",
    *(f"{SEQUENCE} --fp8-recipe {recipe}" for recipe in ("rowwise", "mxfp8")),
    f"{SEQUENCE} --fp8-recipe blockwise",
    "--tensor-model-parallel-size 2 --fp8-recipe tensorwise",
    f"{SEQUENCE} --fp8-recipe tensorwise --no-fp8-wgrad",
    f"{SEQUENCE} --fp8-recipe tensorwise {FLOAT8_MODULES} core_attn mlp",
    f"{SEQUENCE} --fp8-recipe delayed {FLOAT8_FULL} uniform --recompute-num-layers 3",
    *(
        f"{SEQUENCE} --fp8-recipe {recipe} {LATENT} --q-lora-rank 48 {FLOAT8_MODULES} mla_up_proj"
        for recipe in FLOAT8_RECIPES
    ),
    *(
        f"{SEQUENCE} --fp8-recipe {recipe} {LATENT} {FLOAT8_MODULES} layernorm core_attn mlp"
        for recipe in FLOAT8_RECIPES
    ),
    f"{SEQUENCE} --fp8-recipe tensorwise --no-fp8-wgrad {LATENT} --q-lora-rank 48",
    f"{SEQUENCE} --fp8-recipe delayed {LATENT} {FLOAT8_FULL} uniform --recompute-num-layers 1 --first-last-layers-bf16",
    f"--tensor-model-parallel-size 2 --fp8-recipe tensorwise {LATENT}",
    f"--expert-model-parallel-size 2 --fp8-recipe delayed {EXPERTS} --use-distributed-optimizer",
    f"{SEQUENCE} --expert-model-parallel-size 2 --expert-tensor-parallel-size 1 --fp8-recipe delayed {EXPERTS}",
]


@pytest.mark.default(1)
@pytest.mark.parametrize("flags", [*ALWAYS, *(pytest.param(flags, marks=pytest.mark.long) for flags in MORE)])
def test_recorded_bytes_equal_the_closed_form_in_fp8(flags: str) -> None:
    assert_float8_sent(flags)


@pytest.mark.default(1)
@pytest.mark.parametrize(
    "more",
    [
        "--first-last-layers-bf16",
        "--overlap-param-gather-with-optimizer-step",
        *(pytest.param(f"{LATENT} {queries}", marks=pytest.mark.long) for queries in ("", "--q-lora-rank 48")),
    ],
)
def test_gathered_weights_are_as_the_closed_form_says(more: str) -> None:
    sharded = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 9000"
    assert_float8_sent(f"{sharded} --fp8-param-gather {more}")


@pytest.mark.long
@pytest.mark.parametrize(
    ("more", "world_size"),
    [
        ("", 2),
        ("--expert-model-parallel-size 2", 4),
        ("--expert-model-parallel-size 2 --add-qkv-bias --overlap-param-gather-with-optimizer-step", 4),
        (f"--expert-model-parallel-size 2 {SEQUENCE} --expert-tensor-parallel-size 1", 4),
        (f"--expert-model-parallel-size 2 {SEQUENCE} --expert-tensor-parallel-size 2", 4),
        ("--num-distributed-optimizer-instances 2", 4),
        (f"--expert-model-parallel-size 2 {LATENT} --data-parallel-sharding-strategy optim_grads", 4),
    ],
)
def test_gathered_weights_of_experts_are_as_the_closed_form_says(more: str, world_size: int) -> None:
    sharded = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 9000"
    assert_float8_sent(f"{sharded} --fp8-param-gather --fp8-recipe delayed {EXPERTS} {more}", world_size)


@pytest.mark.full
def test_gathers_are_of_half_the_bytes() -> None:
    """All six of a layer and micro-batch are: two forward, two of gradients, and two of inputs once more."""
    one = "--first-last-layers-bf16 --num-layers-at-start-in-bf16 3 --num-layers-at-end-in-bf16 0"
    in_all, in_one = (assert_float8_sent(f"{SEQUENCE} --fp8-recipe delayed {flags}") for flags in ("", one))
    few, many = (traffic["all_gather", ("tp",)] for traffic in (in_all, in_one))
    scattered = in_all["reduce_scatter", ("tp",)]
    hidden_bytes, num_microbatches = scattered.num_bytes // scattered.num_calls, 8
    assert few.num_calls == many.num_calls
    assert many.num_bytes - few.num_bytes == 3 * 6 * num_microbatches * hidden_bytes // 2


ADAPTER_FLAGS = "--lora-rank 3 --load somewhere --finetune --bf16"
TENSOR = "--tensor-model-parallel-size 2"
ADAPTER_SEQUENCE = f"{TENSOR} --sequence-parallel"
PIPELINE = "--pipeline-model-parallel-size 2"
ADAPTER_MODULES = "--recompute-granularity selective --recompute-modules"
ADAPTER_FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 3"
FP8_LORA = """--hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 96 --seq-length 64 --max-position-embeddings 64
    --fp8-format hybrid --fp8-recipe tensorwise"""


@pytest.mark.default(1)
@pytest.mark.parametrize(
    ("flags", "targets", "world_size"),
    [
        pytest.param(TENSOR, "", 2, marks=pytest.mark.long),
        (f"{TENSOR} {PIPELINE} --use-distributed-optimizer", "q_proj v_proj linear_fc2", 8),
        pytest.param(ADAPTER_SEQUENCE, "", 2, marks=pytest.mark.long),
        pytest.param(f"{ADAPTER_SEQUENCE} {ADAPTER_FULL}", "linear_fc1", 2, marks=pytest.mark.long),
        (f"{ADAPTER_SEQUENCE} {FP8_LORA}", "linear_proj", 2),
        pytest.param(f"{TENSOR} {ADAPTER_FULL}", "linear_fc2", 2, marks=pytest.mark.long),
        pytest.param(f"{TENSOR} {ADAPTER_MODULES} core_attn mlp", "linear_qkv linear_fc2", 2, marks=pytest.mark.long),
        pytest.param(
            f"{ADAPTER_SEQUENCE} {ADAPTER_MODULES} mlp layernorm", "linear_proj linear_fc1", 2, marks=pytest.mark.long
        ),
        pytest.param(f"{ADAPTER_SEQUENCE} {ADAPTER_MODULES} mlp", "", 2, marks=pytest.mark.long),
        pytest.param(f"{ADAPTER_SEQUENCE} --tp-comm-overlap", "linear_fc1", 2, marks=pytest.mark.long),
    ],
)
def test_recorded_bytes_equal_the_closed_form_of_adapters(flags: str, targets: str, world_size: int) -> None:
    named = ["--lora-target-modules", *targets.split()] if targets else []
    words = [*make_cell("gpt2", Layout()).reference_flags, *ADAPTER_FLAGS.split(), *flags.split(), *named]
    config = with_known_vocabulary(resolve_arguments(words, world_size, needs_files=False).config)
    for rank in {0, world_size - 1}:
        assert_same_traffic(config, rank)


@pytest.mark.parametrize("recompute", [(), MODULES])
def test_states_between_context_parallel_ranks_are_counted(recompute: tuple[str, ...]) -> None:
    """By hand: two segments per rank, with the ends of the convolution's input and the states."""
    flags = "--hybrid-override-pattern KM --linear-key-head-dim 4 --linear-value-head-dim 6 --linear-num-key-heads 4"
    flags += " --linear-num-value-heads 8 --mamba-state-dim 5 --mamba-head-dim 6 --mamba-num-groups 4"
    flags += " --no-position-embedding"
    layout = Layout(tp=2, sequence_parallel=True, cp=4, passes_states=True, recompute=recompute)
    cell = make_cell("gpt2", layout, extra=flags.split(), num_layers=2)
    config = resolve_cell(cell.flags, cell.world_size, "float32")
    recorded = record_step(config, 0, pretrain_gpt.provide_model, pretrain_gpt.forward_step, cell.data)
    gathered, reduced = (recorded[name, ("cp",)] for name in ("all_gather", "reduce_scatter"))
    heads, mamba = 8 // 2, config.model.hybrid.mamba_heads(config.model.hidden_size) // 2
    # A segment has two positions, and a convolution reaches three back.
    of_ends = 2 * (2 * 2 * 4 + heads * 6 + mamba * 6 + 2 * 2 * 5)
    of_states = heads * 4 * (6 + 4) + mamba * (6 * 5 + 1)
    microbatches = config.training.global_batch_size // config.training.micro_batch_size
    num_bytes = 4 * 2 * 4 * config.training.micro_batch_size * (of_ends + of_states) * microbatches
    assert reduced == Volume(4 * microbatches, num_bytes)
    times = 2 if recompute else 1
    assert gathered == Volume(4 * microbatches * times, num_bytes * times)
    if find_compiler() is not None:
        assert planned_traffic(config, 0, (9, 0)) == recorded
