"""Every layout and feature on a simulated H100: devices, host waits, kernels and memory, offloaded state included.

About a third of the layouts are in the full tests, all of them in the long ones.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from benchmarks.gpu_dry_run.run import COMMON, GPT2_345M, LLAMA_8B
from megatron.config.arguments import resolve_arguments
from megatron.planner.explanation import with_known_vocabulary
from megatron.planner.gpu import find_gpu
from megatron.planner.simulation.fake_cuda import find_compiler
from megatron.training.theoretical_memory_usage import activation_bytes
from megatron.verification.cells import (
    EXCHANGES,
    IN_PARTS,
    MODULES,
    PP_OVERLAP,
    RECOMPUTE,
    SHAPES,
    SHARDING,
    Layout,
    make_cell,
)
from tests.closed_forms.saved_activations import saved_bytes
from tests.harness.dry_runs import DryRunCase, DryRunResult, run_dry_runs
from tests.harness.long_cases import some_long

_SIZES = (
    *("--hidden-size", "64", "--ffn-hidden-size", "96", "--seq-length", "32", "--max-position-embeddings", "32"),
    *("--query-pre-attn-scalar", "16"),
)
_BLOCKS = ("--bf16", "--seq-length", "512", "--max-position-embeddings", "512")
"""A sequence that FlexAttention takes: under context parallelism each rank has chunks of its blocks' length."""
_FP8 = ("--bf16", "--fp8-format", "hybrid")
SINKS = ("--softmax-type", "learnable")
EXPERTS = (
    *("--bf16", "--num-experts", "8", "--moe-router-topk", "3", "--moe-ffn-hidden-size", "48"),
    *("--moe-aux-loss-coeff", "0.01", "--disable-bias-linear"),
)
_TO_RANKS = ("--moe-token-dispatcher-type", "alltoall", "--expert-model-parallel-size", "2")
LION = ("--optimizer", "lion")
_DROPOUT = ("--hidden-dropout", "0.1", "--attention-dropout", "0.1")


def layouts() -> list[DryRunCase]:
    """Return the cases."""
    return [*_plain(), *_float8(), *_sharded(), *_blocks(), *_features(), *_sinks(), *_experts()]


def _case(
    layout: Layout, shape: str = "gpt2", data: str = "plain", *, rank: int = 0, extra: tuple[str, ...] = ("--bf16",)
) -> DryRunCase:
    num_layers = 2 if layout.pp * layout.virtual_stages <= 2 and shape != "gemma3" else 4
    cell = make_cell(shape, layout, data, num_layers=num_layers)
    sizes = _SIZES if shape == "gemma2" else _SIZES[:-2]
    batch = ("--global-batch-size", str(layout.dp * max(2, layout.pp)))
    name = " ".join([cell.name, *extra, *([f"rank {rank}"] if rank else [])])
    # Rotary frequencies go to the device once, in the first step of a run.
    # So are the products by which kinds of fp8 are tried.
    num_steps = 2 if "rope" in cell.flags or "--fp8-format" in extra else 1
    return DryRunCase(name, (*cell.flags, *sizes, *batch, *extra), layout.world_size, rank, num_steps=num_steps)


def _plain() -> Iterator[DryRunCase]:
    for precision in ((), ("--bf16",), ("--fp16",)):
        yield _case(Layout(), extra=precision)
    for shape in SHAPES:
        if shape != "gpt2":
            yield _case(Layout(), shape)
    for recompute in RECOMPUTE[1:]:
        yield _case(Layout(recompute=recompute))
    yield _case(Layout(recompute=MODULES, offloaded_layers=1), "llama")
    yield _case(Layout(), data="packed")
    yield _case(Layout(), data="uneven")


def _float8() -> Iterator[DryRunCase]:
    for recipe in ("delayed", "tensorwise", "rowwise"):
        yield _case(Layout(), extra=(*_FP8, "--fp8-recipe", recipe))
    yield _case(Layout(tp=2, sequence_parallel=True), extra=_FP8, rank=1)
    yield _case(Layout(pp=2, schedule="zero-bubble"), extra=_FP8)


def _sharded() -> Iterator[DryRunCase]:
    yield _case(Layout(tp=2))
    yield _case(Layout(tp=2, sequence_parallel=True), rank=1)
    yield _case(Layout(tp=2, sequence_parallel=True), "llama", "packed")
    for rank in (0, 1):
        yield _case(Layout(pp=2), rank=rank)
        yield _case(Layout(pp=2, virtual_stages=2), rank=rank)
        yield _case(Layout(pp=2, schedule="zero-bubble"), rank=rank)
    yield _case(Layout(pp=4), rank=2)
    yield _case(Layout(dp=2, offloaded_layers=1, offloads_weights=True))
    yield _case(Layout(tp=2, pp=2, virtual_stages=2, recompute=IN_PARTS, offloaded_layers=1), rank=2)
    yield _case(Layout(tp=2, sequence_parallel=True, pp=2, schedule="zero-bubble", offloaded_layers=1), rank=1)
    by_copies = ("--tp-comm-overlap", "--tp-comm-overlap-impl", "symmetric-memory")
    yield _case(Layout(tp=2, sequence_parallel=True, tp_overlap=by_copies))
    yield _case(Layout(cp=4, cp_comm_type="a2a+p2p", cp_levels=(2, 2)), "llama", "packed", rank=2)
    for flags in PP_OVERLAP[:3]:
        yield _case(Layout(pp=2, pp_overlap=flags), rank=1)
    for exchange in EXCHANGES:
        yield _case(Layout(cp=2, cp_comm_type=exchange))
        yield _case(Layout(cp=2, cp_comm_type=exchange), data="packed", rank=1)
        yield _case(Layout(cp=2, cp_comm_type=exchange), extra=("--bf16", *_DROPOUT))
    yield _case(Layout(cp=2), "mistral")
    yield _case(Layout(cp=2), "gemma2")
    for sharding in SHARDING:
        yield _case(Layout(dp=4, sharding=sharding))
        yield _case(Layout(dp=4, sharding=sharding, overlap=True), rank=3)
    yield _case(Layout(tp=2, sequence_parallel=True, pp=2, dp=2, sharding=SHARDING[1], overlap=True), rank=7)
    yield _case(Layout(tp=2, sequence_parallel=True, pp=2, cp=2), "llama", "packed", rank=5)


def _blocks() -> Iterator[DryRunCase]:
    yield _case(Layout(), data="packed", extra=_BLOCKS)
    yield _case(Layout(), "mistral", "packed", extra=_BLOCKS)
    yield _case(Layout(), "gemma2", extra=_BLOCKS)
    for exchange in EXCHANGES:
        yield _case(Layout(cp=2, cp_comm_type=exchange), data="packed", extra=_BLOCKS)
    yield _case(Layout(tp=2, sequence_parallel=True, pp=2), "llama", "packed", rank=2, extra=_BLOCKS)
    for shape, data in (("llama", "plain"), ("llama", "packed")):
        case = _case(Layout(), shape, data, extra=_BLOCKS)
        yield replace(case, name=f"{case.name} without Triton", has_triton=False)


def _features() -> Iterator[DryRunCase]:
    for extra in (
        _DROPOUT,
        ("--attention-backend", "unfused"),
        ("--optimizer", "sgd"),
        LION,
        ("--optimizer", "muon", "--muon-scalar-optimizer", "lion"),
        ("--clip-grad", "0"),
        ("--log-num-zeros-in-grad",),
        ("--log-params-norm",),
        ("--spike-policy", "skip"),
    ):
        yield _case(Layout(), extra=("--bf16", *extra))
    yield _case(Layout(tp=2, sequence_parallel=True), extra=("--bf16", *_DROPOUT))
    yield _case(Layout(), extra=("--fp16", *_DROPOUT, "--recompute-granularity", "selective"))
    yield _case(Layout(), "llama", "packed", extra=(*_BLOCKS, *_DROPOUT))
    yield _case(Layout(tp=2, sequence_parallel=True, pp=2), rank=1, extra=("--fp16", *_DROPOUT))


def _sinks() -> Iterator[DryRunCase]:
    yield _case(Layout(), "mistral", extra=("--bf16", *SINKS))
    yield _case(Layout(), "mistral", "packed", extra=(*_BLOCKS, *SINKS))


def _experts() -> Iterator[DryRunCase]:
    yield _case(Layout(), extra=EXPERTS)
    shared = ("--moe-shared-expert-intermediate-size", "48", "--moe-shared-expert-overlap")
    yield _case(Layout(dp=2), rank=1, extra=(*EXPERTS, *_TO_RANKS, *shared))
    padded = ("--moe-expert-capacity-factor", "1.0", "--moe-pad-expert-input-to-capacity")
    whole = ("--expert-tensor-parallel-size", "1")
    yield _case(Layout(tp=2, sequence_parallel=True), rank=1, extra=(*EXPERTS, *_TO_RANKS, *whole, *padded))
    yield _case(Layout(dp=2), extra=(*EXPERTS, "--expert-model-parallel-size", "2"))


pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(find_compiler() is None, reason="a CPU build of torch needs a C++ compiler for this"),
]

Wait = tuple[str, str, str]
ALLOWED: dict[Wait, tuple[int, str]] = {
    ("end", "megatron/training/training_step.py", "value read"): (
        1,
        "the loss and the gradient norm are logged, and the ranks' exit agreed on",
    ),
    ("end", "megatron/core/optimizer/optimizer.py", "value read"): (1, "--log-params-norm is logged"),
    ("end", "megatron/core/transformer/moe/load_balancing.py", "value read"): (1, "the load of experts is logged"),
    ("forward", "megatron/core/transformer/moe/expert_dispatch.py", "tolist"): (
        4,
        "two layers of experts on several ranks, two micro-batches: the host allocates memory for the rows that come",
    ),
}
"""Waits of one step by phase, file and kind: how many at most, and why."""

EIGHT_BILLION = (*LLAMA_8B, *COMMON, "--global-batch-size", "4")
HALVED = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
SHARED = ("--num-layers", "4", "--context-parallel-size", "2", "--cp-comm-type")
FOUR_LAYERS = (*EIGHT_BILLION, *HALVED, "--num-layers", "4")
_AGAIN = ("--recompute-granularity", "selective", "--recompute-modules", "core_attn", "layernorm")
_OFFLOAD = ("--cpu-offloading", "--cpu-offloading-num-layers", "2")
KEPT: dict[str, tuple[str, ...]] = {
    "all is kept": (),
    "modules again": _AGAIN,
    "two offloaded": _OFFLOAD,
    "modules again, two offloaded": (*_AGAIN, *_OFFLOAD),
}
"""What four layers of the 8B model keep for the backward pass."""
_ONE_BATCH = ("--global-batch-size", "1")
TWO_RANKS = {"8B on two ranks": (), "8B overlapped": ("--tp-comm-overlap",)}
LARGE = (
    DryRunCase("345M", (*GPT2_345M, *COMMON, "--global-batch-size", "8")),
    *(DryRunCase(name, (*FOUR_LAYERS, *_ONE_BATCH, *flags), 2) for name, flags in TWO_RANKS.items()),
    DryRunCase("8B packed", (*FOUR_LAYERS, "--reset-attention-mask"), 8),
    DryRunCase("8B p2p", (*EIGHT_BILLION, *SHARED, "p2p"), 8),
    DryRunCase("8B all_gather", (*EIGHT_BILLION, *SHARED, "all_gather"), 8),
    *(DryRunCase(name, (*FOUR_LAYERS, *flags), 8) for name, flags in KEPT.items()),
)
"""Layers of models of their whole size, in steps of one micro-batch."""
WHOLE = DryRunCase("8B", (*EIGHT_BILLION, *HALVED), 8)

CAUSAL = {"_scaled_dot_product_cudnn_attention", "_scaled_dot_product_cudnn_attention_backward"}
LARGE_NAMES = [case.name for case in LARGE]
BUDGETS = {"345M": (598, 12.79), "all is kept": (212, 11.41), "8B": (1164, 51.89)}
"""The operations of a step, and the GiB of its peak; "all is kept" has four layers of the 8B model."""

CASES = {case.name: case for case in layouts()}
GPT2 = "gpt2 plain tp1 pp1 cp1 dp1 --num-layers 2 --bf16"
STAGES = "gpt2 plain tp1 pp2 cp1 dp1 --num-layers 2 --bf16"
_LONG = "--num-layers 2 --bf16 --seq-length 512 --max-position-embeddings 512"
IN_BLOCKS = {
    "8B packed": 4,
    f"gpt2 packed tp1 pp1 cp1 dp1 {_LONG}": 4,
    f"mistral packed tp1 pp1 cp1 dp1 {_LONG}": 4,
    f"mistral packed tp1 pp1 cp1 dp1 {_LONG} {' '.join(SINKS)}": 4,
    f"gemma2 plain tp1 pp1 cp1 dp1 {_LONG}": 4,
    f"gpt2 packed tp1 pp1 cp2-all_gather dp1 {_LONG}": 8,
    f"gpt2 packed tp1 pp1 cp2-a2a dp1 {_LONG}": 4,
    f"llama packed tp2sp pp2 cp1 dp1 {_LONG} rank 2": 2,
}
"""Cases whose attention is FlexAttention's, with the calls of a step."""


OF_SINKS = {name for name in CASES if name.endswith(" ".join(SINKS))}
NAMED = {*IN_BLOCKS, *OF_SINKS, STAGES, f"{STAGES} rank 1", f"{GPT2} --log-params-norm", f"{GPT2} {' '.join(LION)}"}
NAMED |= {name for name, case in CASES.items() if not case.has_triton or name.find(" ".join(EXPERTS)) > 0}
DEFAULT = NAMED & CASES.keys() | set(random.Random(5).sample(sorted(CASES.keys() - NAMED), 6))


class Results:
    """Run cases when one of them is asked for: those of the default tests in one process, the others in another."""

    def __init__(self) -> None:
        self._waiting: list[Sequence[DryRunCase]] = [
            [*(case for name, case in CASES.items() if name in DEFAULT), *LARGE],
            [*(case for name, case in CASES.items() if name not in DEFAULT), WHOLE],
        ]
        self._done: dict[str, DryRunResult] = {}

    def __getitem__(self, name: str) -> DryRunResult:
        """Return the result of a case."""
        for cases in [each for each in self._waiting if name in {case.name for case in each}]:
            self._waiting.remove(cases)
            self._done |= run_dry_runs(cases)
        return self._done[name]


@pytest.fixture(scope="module")
def results() -> Results:
    return Results()


def waits_of(result: DryRunResult) -> Counter[Wait]:
    return Counter(
        (wait["phase"], wait["where"].partition(":")[0], wait["what"]) for wait in result.report.get("waits", ())
    )


def kernels_of(result: DryRunResult, part: str) -> dict[str, int]:
    """Return how often the operations were launched whose name has a part."""
    return {name: count for name, count in result.report["by_operation"].items() if part in name}


def test_there_are_many_layouts() -> None:
    assert len(CASES) >= 60
    assert len(DEFAULT) >= 24


@pytest.mark.parametrize("name", some_long(CASES, DEFAULT))
def test_no_tensor_is_on_another_device(results: Results, name: str) -> None:
    assert results[name].error == ""
    # A rank has at least one layer: four linear layers, each with its output and two gradients.
    counts = results[name].report["by_operation"]
    assert sum(count for operation, count in counts.items() if operation.endswith("mm")) >= 12


@pytest.mark.parametrize("name", some_long(CASES, DEFAULT))
def test_a_step_waits_only_where_it_must(results: Results, name: str) -> None:
    seen = waits_of(results[name])
    assert {wait: count for wait, count in seen.items() if count > ALLOWED.get(wait, (0, ""))[0]} == {}


@pytest.mark.parametrize("name", some_long([*CASES, *LARGE_NAMES, "8B"], {*DEFAULT, *LARGE_NAMES}))
def test_the_kernels_compute_what_the_model_needs(results: Results, name: str) -> None:
    report = results[name].report
    gemms, attention = report["gemm_flops"], report["attention_flops"]
    needed, needed_attention = report["needed_gemm_flops"], report["needed_attention_flops"]
    assert report["uncounted"] == {}
    assert gemms == pytest.approx(needed, rel=0.01)
    is_whole = "packed" not in name and "cp" not in name.replace("cp1", "")
    if is_whole and set(kernels_of(results[name], "attention")) == CAUSAL:
        # The backward pass computes the scores a second time: five products in place of four.
        assert attention == pytest.approx((2 + 5) / (2 + 4) * needed_attention, rel=0.01)
    else:
        assert attention >= needed_attention
    assert (report["recomputed_flops"] > 0) == ("recompute" in name or "again" in name)
    assert report["flops"] >= gemms + attention + report["recomputed_flops"]


def test_every_allowed_wait_still_happens(results: Results) -> None:
    seen = Counter[Wait]()
    for name in DEFAULT:
        seen |= waits_of(results[name])
    assert {wait: seen[wait] for wait in ALLOWED} == {wait: count for wait, (count, _) in ALLOWED.items()}


@pytest.mark.parametrize("name", some_long(BUDGETS, ["345M", "all is kept"]))
def test_kernels_and_memory_do_not_grow(results: Results, name: str) -> None:
    operations, peak_gib = BUDGETS[name]
    report = results[name].report
    assert report["operations"] <= operations
    assert report["peak_bytes"] / 2**30 <= peak_gib


def test_memory_and_parameters_of_345m(results: Results) -> None:
    report = results["345M"].report
    parameters = report["parameters"]
    assert parameters == 354_871_296
    # Weights of 16 bits, gradients of 32, and main weights and two moments of 32; buffers are padded a little.
    for holder, width in (("weights", 2), ("gradients", 4), ("optimizer", 12)):
        assert report["peak_holders"][holder] == pytest.approx(width * parameters, rel=0.01)
    # The logits themselves at least, and at most with two copies of them in float32.
    assert 2 * 8192 * 50304 <= report["peak_holders"]["logits"] <= 10 * 8192 * 50304


def test_chunks_hide_communication_behind_products(results: Results) -> None:
    whole, chunked = results["8B on two ranks"].report, results["8B overlapped"].report
    assert chunked["communication_ms"] < 0.25 * whole["communication_ms"]
    assert chunked["hidden_communication_ms"] > whole["hidden_communication_ms"]
    assert chunked["predicted_ms"] < whole["predicted_ms"]
    assert chunked["peak_bytes"] <= 1.01 * whole["peak_bytes"]


def test_weight_gradients_hide_the_communication_of_the_backward_pass(results: Results) -> None:
    report = results["8B on two ranks"].report
    calls = report["collectives"]
    gathers = [call for call in calls if call["phase"] == "backward" and call["operation"] == "all_gather"]
    # Two of an input and two of a gradient in each layer, and those of the output layer's input and of the embedding.
    assert len(gathers) == 4 * 4 + 2
    of_others = sum(call["predicted_ms"] for call in calls if call["phase"] != "backward")
    of_others += sum(copy["predicted_ms"] for copy in report["host_copies"])
    # No weight gradient was computed before the first gradient is gathered.
    assert report["communication_ms"] <= of_others + gathers[0]["predicted_ms"] + 1e-6


def test_gathers_do_not_hold_up_what_the_host_waits_for(results: Results) -> None:
    at_end = [call["operation"] for call in results["all is kept"].report["collectives"] if call["phase"] == "end"]
    assert at_end[0] == "all_reduce"
    assert set(at_end[1:]) == {"all_gather"}


@pytest.mark.parametrize(("name", "other"), [("8B packed", "all is kept"), ("8B all_gather", "8B p2p")])
def test_the_mask_of_documents_and_gathered_keys_take_hardly_any_memory(
    results: Results, name: str, other: str
) -> None:
    assert results[name].report["peak_bytes"] <= 1.05 * results[other].report["peak_bytes"]


def kept_by_a_layer(name: str) -> int:
    config = resolve_arguments((*FOUR_LAYERS, *KEPT[name]), 8).config
    return sum(saved_bytes(config.model, config.data.seq_length, config.training.micro_batch_size).values())


@pytest.mark.parametrize("name", [name for name in KEPT if name != "all is kept"])
def test_memory_falls_by_what_is_not_kept_on_the_device(results: Results, name: str) -> None:
    peak, of_all = (results[each].report["peak_bytes"] for each in (name, "all is kept"))
    num_on_device = 2 if "offloaded" in name else 4
    fallen = 4 * kept_by_a_layer("all is kept") - num_on_device * kept_by_a_layer(name)
    # Recomputed attention keeps no state of a generator either: two numbers a layer, in blocks of 512 bytes.
    assert 0 <= of_all - peak - fallen <= 4 * 1024


@pytest.mark.parametrize("name", ["two offloaded", "modules again, two offloaded"])
def test_what_is_offloaded_goes_out_and_comes_back_behind_the_kernels(results: Results, name: str) -> None:
    report = results[name].report
    copies = [each for each in report["host_copies"] if "cpu_offload.py" in each["where"]]
    moved = Counter[str]()
    for each in copies:
        moved[each["direction"]] += each["bytes"]
    expected = 2 * kept_by_a_layer(name)
    assert moved == {"to the host": expected, "to the device": expected}
    assert all(0 < each["hidden_ms"] <= each["predicted_ms"] for each in copies)
    assert not [each for each in report["collectives"] if "host" in each["axes"]]
    without = results["all is kept"].report["hidden_communication_ms"]
    assert results[name].report["hidden_communication_ms"] > without


def test_documents_and_capped_scores_go_to_flex_attention(results: Results) -> None:
    attention = {name: kernels_of(results[name], "attention") for name in IN_BLOCKS}
    assert attention == {
        name: {"_flex_attention": count, "_flex_attention_backward": count} for name, count in IN_BLOCKS.items()
    }


def test_sinks_and_windows_go_to_torchs_flash_kernel(results: Results) -> None:
    name = f"mistral plain tp1 pp1 cp1 dp1 --num-layers 2 --bf16 {' '.join(SINKS)}"
    kernels = kernels_of(results[name], "attention")
    assert kernels == {"_flash_attention_forward": 4, "_flash_attention_backward": 4}


def test_blocks_of_a_ring_go_to_the_kernel_that_whole_sequences_go_to(results: Results) -> None:
    for name in ("8B p2p", "all is kept"):
        assert set(kernels_of(results[name], "attention")) == CAUSAL


def test_flex_attention_computes_the_blocks_of_two_documents(results: Results) -> None:
    packed, whole = (results[name].report["by_kind"]["attention"]["flops"] for name in ("8B packed", "all is kept"))
    # Of 64 blocks of 128 each way: two triangles of 32 with their diagonals; cuDNN's half of the square beside it.
    assert packed / whole == 2 * (32 * 33 / 2) / (64**2 / 2)


def test_a_program_of_triton_is_one_kernel(results: Results) -> None:
    programs = kernels_of(results["all is kept"], ".")
    assert {name: count for name, count in programs.items() if not name.startswith("residual.")} == {
        "column_sums.sums_program": 8,
        "query_key_value.rotate_program": 8,
        "activation.gated_forward_program": 4,
        "activation.gated_backward_program": 4,
        "cross_entropy.normalizer_program": 1,
        "cross_entropy.gradient_program": 1,
        "adamw.adamw_program": 9,
    }


def test_a_machine_without_triton_has_neither(results: Results) -> None:
    names = [name for name, case in CASES.items() if not case.has_triton]
    assert len(names) == 2
    for name in names:
        assert kernels_of(results[name], ".") == {}
        assert set(kernels_of(results[name], "attention")) == CAUSAL


def test_a_stage_receives_as_often_as_the_one_before_sends(results: Results) -> None:
    sent, received = (
        Counter(each["operation"] for each in results[f"{STAGES}{rank}"].report["collectives"])
        for rank in ("", " rank 1")
    )
    assert (sent["send"], received["receive"]) == (sent["receive"], received["send"]) == (2, 2)


def test_collectives_of_the_backward_pass_hide_behind_weight_gradients(results: Results) -> None:
    report = results["all is kept"].report
    backward = [each for each in report["collectives"] if each["phase"] == "backward"]
    assert 0 < report["hidden_communication_ms"] < sum(each["predicted_ms"] for each in backward)
    whole = sum(each["predicted_ms"] for kind in ("collectives", "host_copies") for each in report[kind])
    assert report["communication_ms"] + report["hidden_communication_ms"] == pytest.approx(whole)


GIB = 2**30
SMALL = (*LLAMA_8B, *COMMON, "--global-batch-size", "1", "--num-layers", "2")
OPTIMIZER_LARGE = (*LLAMA_8B, *COMMON, "--global-batch-size", "1", "--num-layers", "14", "--micro-batch-size", "1")
"""Fourteen layers of an 8B model with all their state are more than a GPU holds."""
AUTO = ("--optimizer", "hybridadam", "--optimizer-offload-policy", "auto")
OPTIMIZER_CASES = (
    DryRunCase("plain", SMALL, num_steps=2),
    DryRunCase("half", (*SMALL, "--optimizer", "hybridadam", "--overlap-cpu-optimizer-d2h-h2d"), num_steps=2),
    DryRunCase("room", (*SMALL, *AUTO)),
    DryRunCase("large", OPTIMIZER_LARGE),
    DryRunCase("large auto", (*OPTIMIZER_LARGE, *AUTO)),
    DryRunCase(
        "narrow",
        (*SMALL, *("--use-precision-aware-optimizer", "--main-params-dtype", "fp16", "--exp-avg-dtype", "bf16")),
    ),
)


@pytest.fixture(scope="module")
def reports() -> dict[str, dict]:
    """Run every case once, all in one process."""
    results: dict[str, DryRunResult] = run_dry_runs(OPTIMIZER_CASES)
    assert {name: result.error for name, result in results.items() if result.error} == {}
    return {name: result.report for name, result in results.items()}


def copied(report: dict, direction: str) -> dict[str, int]:
    """Return the bytes that the optimizer copied in a direction by file."""
    return {
        copy["where"].partition(":")[0]: copy["bytes"]
        for copy in report["host_copies"]
        if copy["phase"] == "optimizer" and copy["direction"] == direction
    }


def test_half_of_the_state_leaves_the_device_and_its_bytes_cross(reports: dict[str, dict]) -> None:
    plain, half = reports["plain"], reports["half"]
    parameters = plain["parameters"]
    on_host = -(-parameters // 256) * 128
    assert plain["peak_holders"]["optimizer"] == pytest.approx(12 * parameters, rel=1e-5)
    assert half["peak_holders"]["optimizer"] == pytest.approx(12 * (parameters - on_host), rel=1e-5)
    # AdamW's kernel reads one byte, whether to decay, of each 128 elements on the device.
    assert plain["peak_bytes"] - half["peak_bytes"] == pytest.approx(12 * on_host + on_host // 128, rel=1e-5)
    file = "megatron/core/optimizer/cpu_offloading.py"
    # The first gradients come while the device updates its own part, and parameters go while gradients come.
    for copy in half["host_copies"]:
        if copy["where"].startswith(file):
            assert copy["predicted_ms"] >= copy["bytes"] / 64e9 * 1e3
            assert 0 < copy["hidden_ms"] < copy["predicted_ms"]
    assert copied(half, "to the host") == {file: 4 * on_host}
    assert copied(half, "to the device") == {file: 2 * on_host}
    assert copied(plain, "to the host") == copied(plain, "to the device") == {}


def test_the_host_waits_for_the_norm_and_for_copies_only(reports: dict[str, dict]) -> None:
    waits = [(wait["phase"], wait["what"]) for wait in reports["half"]["waits"] if wait["phase"] == "optimizer"]
    assert waits[0] == ("optimizer", "value read")
    assert set(waits[1:]) == {("optimizer", "copies")}
    assert [wait for wait in reports["plain"]["waits"] if wait["phase"] == "optimizer"] == []


def test_auto_fills_the_device_up_to_its_margin(reports: dict[str, dict]) -> None:
    memory = find_gpu("h100-80gb").memory_bytes
    assert not reports["large"]["fits"]
    assert reports["room"]["peak_holders"]["optimizer"] == reports["plain"]["peak_holders"]["optimizer"]
    chosen = reports["large auto"]
    assert 0.8 * memory < chosen["peak_bytes"] <= memory - 2 * GIB
    assert 0 < chosen["peak_holders"]["optimizer"] < reports["large"]["peak_holders"]["optimizer"]


def test_narrow_state_takes_fewer_bytes(reports: dict[str, dict]) -> None:
    assert reports["narrow"]["peak_holders"]["optimizer"] == pytest.approx(8 * reports["plain"]["parameters"], rel=1e-5)


@pytest.mark.parametrize(("name", "flags"), [("plain", SMALL), ("large", OPTIMIZER_LARGE)])
def test_the_estimate_of_activations_is_no_less_and_not_much_more(
    reports: dict[str, dict], name: str, flags: tuple[str, ...]
) -> None:
    holders = reports[name]["peak_holders"]
    seen = holders["activations"] + holders["logits"] + holders["buffers"]
    estimate = activation_bytes(with_known_vocabulary(resolve_arguments(flags, 1).config), 0)
    # Logits in float32 are what torch's own operations keep; Triton's program does without.
    logits = 8192 * 128256 * 8
    assert seen <= estimate <= 1.1 * seen + logits
