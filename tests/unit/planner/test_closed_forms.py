"""What is sent, recorded without a network, equals the closed forms, byte for byte, at every stage of every layout."""

from __future__ import annotations

import pytest

from megatron.config.run_config import RunConfig
from megatron.verification.cells import FAMILY_SHAPES, IN_PARTS, MODULES, TP_OVERLAP, Cell, Layout, make_cell, matrix
from megatron.verification.model_cells import ExpertLayout, make_attention_cell, make_expert_cell
from megatron.verification.run_cell import resolve_cell
from megatron.verification.traffic import Traffic, Volume
from megatron.verification.training_cells import fully_sharded, hybrid
from tests.closed_forms.step_traffic import step_traffic
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
