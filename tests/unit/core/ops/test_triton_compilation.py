"""What the compiler makes of Triton's programs for A100, H100 and B200: it needs none of them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness.distributed import run_distributed
from tests.unit.core.ops.compiled import SHARED_BYTES, Program, compile_programs
from tests.unit.core.ops.interpreted import needs_triton

pytestmark = needs_triton
MAX_REGISTERS = 64
"""With these, 1024 threads of any program are at work on a multiprocessor at once."""
MIN_FLOAT8_CAPABILITY = 90
NUM_PROGRAMS, NUM_FLOAT8 = 59, 31
MAX_NORM_GRADIENT_REGISTERS = 128
"""Its threads keep their part of the weight gradients while the rows pass."""
MAX_WIDE_GATE_STACK_BYTES = 40
"""Of the spilled registers of a thread in the gradient of a gated norm of 8192 channels, of which it has 8."""
MAX_CONVOLUTION_REGISTERS = 96
"""Its threads load all places of their windows at once."""
MAX_FLOAT8_GRADIENT_REGISTERS = 80
"""Its threads hold three results of 16 elements each, so that they can store 16 bytes. 768 are at work at once."""
MAX_FLOAT8_ACTIVATION_REGISTERS = 96
"""Its threads hold three results of 16 elements each, and the scales of two matrices. 512 are at work at once, which
load 48 KiB."""
MAX_STACK_BYTES = {"bf16 per head": 0, "bf16 per channel": 80, "fp32 per head": 272, "fp32 per channel": 256}
"""Of the spilled registers of a thread, in programs with matmuls: operands of float32 are split into parts."""


def programs(capability: int) -> Iterator[Program]:
    """Yield name, program, types of the arguments that are no bf16 pointers, compile-time sizes, warps."""
    from megatron.core.ops.dropout import _FACTORS, _STEP
    from megatron.core.ops.triton import (
        activation,
        adamw,
        causal_convolution,
        column_sums,
        cross_entropy,
        dropout_keys,
        fp8_cast,
        fp8_gated_cast,
        fp8_gated_gradient,
        fp8_group_cast,
        gated_norm,
        query_key_value,
        residual,
        token_rows,
    )
    from megatron.core.ops.triton import fp8_scaled_cast as scaled

    rows = {"labels": "*i64", "width": "i32", "num_columns": "odd", "normalizer": "*fp32", "label_logit": "*fp32"}
    rows |= {"log_normalizer": "*fp32", "row_grad": "*fp32"}
    block = cross_entropy._FORWARD_BLOCK
    yield "cross-entropy", cross_entropy.normalizer_program, rows, {"BLOCK": block}, 8
    block = cross_entropy._BACKWARD_BLOCK
    yield "cross-entropy gradient", cross_entropy.gradient_program, rows, {"BLOCK": block}, 4
    for kind in activation.GATED_KINDS:
        sizes = {"BLOCK": activation._BLOCK, "KIND": kind}
        yield kind, activation.gated_forward_program, {"width": "i32"}, sizes, 4
        yield f"{kind} gradient", activation.gated_backward_program, {"width": "i32"}, sizes, 4
    kinds = dict.fromkeys(query_key_value.rotate_program.arg_names[8:], "i32")
    kinds |= {"cos": "*fp32", "sin": "*fp32", "batch": "odd", "num_groups": "odd", "heads_per_group": "odd"}
    for rotary_dim, head_dim in ((128, 128), (32, 80)):
        for is_interleaved in (False, True):
            sizes = query_key_value.block_sizes(rotary_dim, head_dim)
            sizes |= {"IS_INTERLEAVED": is_interleaved, "IS_INVERSE": True}
            name = f"rotary {rotary_dim} {is_interleaved}"
            yield name, query_key_value.rotate_program, kinds | {"value": None, "value_out": None}, sizes, 4
            yield f"{name} of a projection", query_key_value.rotate_program, kinds, sizes, 4
    kinds = dict.fromkeys(query_key_value.join_program.arg_names[6:], "i32") | {"bias_parts": "*fp32"}
    kinds |= dict.fromkeys(("num_tokens", "tokens_per_part", "batch", "num_groups", "heads_per_group"), "odd")
    for head_dim, channels in ((64, 64), (80, 128)):
        sizes = {"HEAD_DIM": head_dim, "HEADS": query_key_value._TILE // channels, "CHANNELS": channels}
        yield f"joined heads of {head_dim}", query_key_value.join_program, kinds, sizes, 4
    kinds = {"bias_parts": "*fp32", "num_rows": "odd", "rows_per_part": "odd", "width": "i32"}
    for kind in activation.PLAIN_KINDS:
        sizes = {"BLOCK": activation._BLOCK, "KIND": kind}
        yield f"{kind} gradient", activation.plain_backward_program, kinds, sizes, 4
    names = {"parts": "*fp32", "total": "*fp32", "num_parts": "odd", "width": "i32"}
    numbers = range(column_sums.MAX_TOTALS)
    kinds = {f"{name}{number}": kind for name, kind in names.items() for number in numbers}
    sizes = {"ROWS": column_sums._ROWS, "COLUMNS": column_sums._COLUMNS}
    sizes |= {f"ADDS{number}": number % 2 == 0 for number in numbers}
    yield "sums", column_sums.sums_program, kinds, sizes, 4
    few = kinds | {f"{name}{number}": None for name in ("parts", "total") for number in numbers[2:]}
    yield "two sums", column_sums.sums_program, few, sizes, 4
    kinds = {"states": "*i64", "positions": "*i64", "first_key": "*i32", "second_key": "*i32", "base": "i64"}
    kinds |= dict.fromkeys(("batch", "num_rows", "first_site", "count", "first_number"), "odd")
    sizes = {"STEP": _STEP, "FIRST": _FACTORS[0], "SECOND": _FACTORS[1], "BLOCK": dropout_keys._BLOCK}
    yield "dropout keys", dropout_keys.keys_program, kinds, sizes, 4
    yield "dropout states", dropout_keys.states_program, kinds, sizes, 4
    kinds = dict.fromkeys(("weight_parts", "bias_parts", "branch_parts", "means", "scales"), "*fp32")
    kinds |= dict.fromkeys(("epsilon", "weight_offset", "kept_scale"), "fp32")
    kinds |= {
        "first_key": "*i32",
        "second_key": "*i32",
        "width": "i32",
        "num_rows": "odd",
        "rows_per_part": "odd",
        "threshold": "odd",
    }
    for name, arguments in [("dropout", kinds | {"residual": None}), ("dropout and sum", kinds)]:
        yield name, residual.dropout_program, arguments, {"BLOCK": residual._BLOCK}, 4
    rms = kinds | {"means": None, "first_key": None, "bias": None, "bias_parts": None, "branch_parts": None}
    width = residual._MAX_SUMMED_WIDTH
    sizes = {"BLOCK": width}
    yield "LayerNorm, branch's sum, gradient", residual.backward_program, kinds, sizes, residual.warps(width)
    width = residual.MAX_WIDTH
    for name, arguments in [
        ("RMSNorm of the stream", rms | {"branch": None}),
        ("RMSNorm", rms),
        ("LayerNorm, dropout", kinds | {"branch_parts": None}),
    ]:
        warps = residual.warps(width)
        yield name, residual.forward_program, arguments, {"BLOCK": width}, warps
        yield f"{name}, gradient", residual.backward_program, arguments, {"BLOCK": width}, warps
    kinds = dict.fromkeys(("parameter", "exp_avg", "exp_avg_sq"), "*fp32") | {"is_wanted": "*u8", "is_second": "*u8"}
    kinds |= {"num_elements": "i32", "multiplier": "*fp64", "corrections": "*fp64"}
    kinds |= dict.fromkeys(adamw.adamw_program.arg_names[10:17], "fp32") | {"rates": None}
    sizes = {"GRAIN": 128, "BLOCK": adamw._BLOCK}
    yield "AdamW, fp32 gradients", adamw.adamw_program, kinds | {"gradient": "*fp32"}, sizes, 4
    yield "AdamW, bf16 gradients", adamw.adamw_program, kinds, sizes, 4
    yield "AdamW, rates on the device", adamw.adamw_program, kinds | {"rates": "*fp64"}, sizes, 4
    single = {"gradient": "*fp32", "rounded": None, "is_second": None, "num_elements": "i64"}
    yield "AdamW of fp32 weights", adamw.adamw_program, kinds | single, sizes, 4
    kinds = dict.fromkeys(("choices", "slots"), "*i64") | {"width": "i32", "ends": "*i32", "size": "i32"}
    kinds |= dict.fromkeys(("per_token", "num_choices", "num_rows"), "odd")
    sizes, wide = {"BLOCK": token_rows._BLOCK}, {"weights": "*fp32", "weights_grad": "*fp32"}
    yield "gathered rows", token_rows.gather_program, kinds, sizes, 4
    yield "summed rows", token_rows.sum_program, kinds | {"weights": None}, sizes | {"PER_TOKEN": 8}, 4
    yield "combined rows", token_rows.sum_program, kinds | {"weights": "*fp32"}, sizes | {"PER_TOKEN": 2}, 4
    yield "combined rows, gradient", token_rows.combine_gradient_program, kinds | wide, sizes, 4
    of_weights = kinds | wide | {"rows_grad": None}
    yield "gradient of weights", token_rows.combine_gradient_program, of_weights, sizes, 4
    yield "added groups", token_rows.add_groups_program, kinds | {"total": "*fp32"}, sizes | {"ADDS": True}, 4
    kinds = dict.fromkeys(("state", "visible", "weight", "bias", "sums_grad", "parts"), "*fp32")
    kinds |= dict.fromkeys(("last_state_grad", "state_grad"), "*fp32")
    kinds |= {"batch": "odd", "num_positions": "odd", "channels": "i32"}
    sizes = {"WIDTH": 4, "ROWS": causal_convolution._ROWS, "COLUMNS": causal_convolution._COLUMNS}
    for name, arguments in [("convolution", kinds), ("convolution, no documents", kinds | {"visible": None})]:
        silu = sizes | {"SILU": True}
        yield name, causal_convolution.forward_program, arguments, silu, 4
        yield f"{name}, weights", causal_convolution.weights_program, arguments, silu, 4
        yield f"{name}, inputs", causal_convolution.inputs_program, arguments, sizes, 4
    kinds = {"scales": "*fp32", "weight_parts": "*fp32", "epsilon": "fp32", "width": "i32"}
    kinds |= dict.fromkeys(("num_positions", "num_rows", "rows_per_part"), "odd")
    for program in (gated_norm.forward_program, gated_norm.backward_program):
        strides = [name for name in program.arg_names if name.endswith(("_batch", "_row"))]
        kinds |= dict.fromkeys(strides, "i32")
        name = "gated norm" if program is gated_norm.forward_program else "gated Norm's gradient"
        for block in (1024, gated_norm.MAX_GROUP_WIDTH):
            for gate_first in (True, False):
                sizes = {"BLOCK": block, "GATE_FIRST": gate_first}
                order = "gate first" if gate_first else "gate last"
                yield f"{name}, {block}, {order}", program, kinds, sizes, gated_norm.warps(block)
    kinds = dict.fromkeys(("rows", "columns", "whole"), "*i32") | {"num_rows": "i32", "width": "i32"}
    for name, absent in [("rows and columns", ["whole"]), ("matrix", ["rows", "columns"])]:
        arguments = kinds | dict.fromkeys(absent)
        yield f"amax of {name}", scaled.amax_program, arguments, {"BLOCK": scaled._AMAX_BLOCK}, scaled._AMAX_WARPS
    kinds = {"amax": "*i32", "scale": "*fp32", "count": "i32"}
    yield "float8 scales", scaled.scales_program, kinds, {"BLOCK": scaled._SCALES_BLOCK, "IS_E5M2": False}, 4
    if capability >= MIN_FLOAT8_CAPABILITY:
        kinds = {"scale": "*fp32", "amax": "*fp32", "data": "*u8", "turned": "*u8", "num_rows": "i32", "width": "i32"}
        for is_e5m2 in (False, True):
            sizes = {"BLOCK": fp8_cast._BLOCK, "IS_E5M2": is_e5m2}
            yield f"float8 {is_e5m2}", fp8_cast.cast_program, kinds, sizes, 4
            weights = kinds | {"amax": None, "data": None}
            yield f"float8 transpose {is_e5m2}", fp8_cast.cast_program, weights, sizes, 4
            kinds |= {"row_amax": "*i32", "column_amax": "*i32", "turned_scale": "*fp32"}
            sizes = {"BLOCK": scaled._ROWS_BLOCK, "IS_E5M2": is_e5m2}
            yield f"float8 rows {is_e5m2}", scaled.rows_program, kinds, sizes, 4
            sizes = {"BLOCK": scaled.TILE, "IS_E5M2": is_e5m2}
            yield f"float8 squares {is_e5m2}", scaled.squares_program, kinds, sizes, scaled._TILE_WARPS
            sizes |= {"LENGTH": 128, "IS_TILED": False}
            yield f"float8 segments {is_e5m2}", scaled.segments_program, kinds, sizes, scaled._TILE_WARPS
            sizes |= {"LENGTH": 32, "IS_TILED": True}
            tiled = kinds | {"scale": "*u8", "turned_scale": "*u8"}
            yield f"float8 mx {is_e5m2}", scaled.segments_program, tiled, sizes, scaled._TILE_WARPS
        scales = dict.fromkeys(("scale", "activated_scale", "amax"), "*fp32") | {"num_rows": "i32", "width": "i32"}
        kinds = scales | dict.fromkeys(("data", "turned", "activated_turned"), "*u8")
        for kind in activation.GATED_KINDS:
            sizes, warps = {"BLOCK": fp8_gated_cast._BLOCK, "KIND": kind}, fp8_gated_cast._CAST_WARPS
            yield f"float8 activation, {kind}", fp8_gated_cast.gated_cast_program, kinds, sizes, warps
            for is_e5m2 in (False, True):
                of_dtype = kinds, sizes | {"IS_E5M2": is_e5m2}, fp8_gated_cast._GRADIENT_WARPS
                name = f"float8 gradient of activation, {kind}, {is_e5m2}"
                yield name, fp8_gated_cast.gated_gradient_cast_program, *of_dtype
        kinds = dict.fromkeys(("group_of", "rows", "columns", "row_amax", "column_amax"), "*i32") | {"choices": "*i64"}
        kinds |= dict.fromkeys(("data", "turned"), "*u8") | dict.fromkeys(("num_rows", "width"), "i32")
        kinds |= dict.fromkeys(("per_token", "num_choices", "num_groups"), "odd")
        sizes = {"ROWS": fp8_group_cast._WHOLE_ROWS, "BLOCK": fp8_group_cast._WHOLE_ROW}
        sizes |= {"IS_PADDED": False, "GRAIN": fp8_group_cast.GRAIN}
        kinds |= dict.fromkeys(("activated_columns", "activated_amax"), "*i32") | {"activated_turned": "*u8"}
        whole, warps = kinds | {"scale": "*fp32"}, fp8_group_cast._WARPS
        tile = {"ROWS": fp8_group_cast.GRAIN, "BLOCK": fp8_group_cast._BLOCK, "IS_PADDED": False}
        for kind in (None, *activation.GATED_KINDS):
            of_kind = {"KIND": kind, "IS_PADDED": kind is not None}
            given = {"weights": "*fp32" if kind is None else None}
            rows = whole | given, sizes | of_kind, warps
            some = kinds | given, tile | of_kind, warps
            yield f"float8 rows of groups, {kind}", fp8_group_cast.whole_rows_program, *rows
            yield f"amax of groups, {kind}", fp8_group_cast.group_amax_program, *some
            yield f"float8 groups, {kind}", fp8_group_cast.group_rows_program, *some
        tile = {"ROWS": fp8_group_cast.GRAIN, "BLOCK": fp8_gated_gradient._BLOCK}
        for kind in activation.GATED_KINDS:
            of_amax = kinds, tile | {"KIND": kind}, fp8_gated_gradient._AMAX_WARPS
            of_rows = *of_amax[:2], fp8_gated_gradient._ROWS_WARPS
            yield f"amax of gradients, {kind}", fp8_gated_gradient.gradient_amax_program, *of_amax
            yield f"float8 gradients, {kind}", fp8_gated_gradient.gradient_rows_program, *of_rows


def matmul_programs(capability: int) -> Iterator[Program]:
    """Yield the programs with matmuls, and what they need, at the most channels of keys in one and in two blocks."""
    from megatron.core.ops.triton import gated_delta_rule as rule

    wide = ("sums", "initial_state", "last_state", "last_state_grad", "initial_grad", "log_decay", "log_decay_grad")
    kinds = dict.fromkeys(wide, "*fp32") | {"documents": "*i32", "columns": "i32", "key_dim": "i32", "value_dim": "i32"}
    kinds |= {"num_positions": "odd", "heads": "odd"}
    decayed = dict.fromkeys(("q_in", "k_in", "k_out"))
    sizes = {"LEAST": -50.0, "LENGTH": rule._BLOCKS[torch.bfloat16][0], "COLUMNS": rule._SUMS_COLUMNS}
    yield "sums of decays", rule.sums_program, kinds, sizes, 4
    for dtype, kind in ((torch.bfloat16, "bf16"), (torch.float32, "fp32")):
        length, keys, values = rule._BLOCKS[dtype]
        pointers = ("q", "k", "v", "beta", "attention", "inverse", "output", "states", "corrections", "grad")
        pointers += ("state_grads", "rows_grad", "q_in", "k_in", "k_out", "q_grad", "k_grad", "v_grad", "beta_grad")
        of_dtype = dict.fromkeys(pointers, f"*{kind}")
        for name, sizes in (
            (f"{kind} per head", {"PER_CHANNEL": False, "LENGTH": length}),
            (f"{kind} per channel", {"PER_CHANNEL": True, "LENGTH": length}),
        ):
            arguments = of_dtype | kinds | ({} if sizes["PER_CHANNEL"] else decayed)
            blocks = {"KEYS": rule._MIN_BLOCK if sizes["PER_CHANNEL"] else keys}
            more = blocks | {"BLOCK": rule._SUBSTITUTED_ROWS, "PRECISION": "tf32" if kind == "bf16" else "tf32x3"}
            yield f"{name}, products", rule.products_program, arguments, sizes | more, 4
            columns = sizes | {"KEYS": rule._MAX_KEY_BLOCK, "VALUES": values, "IS_WIDE": False}
            some = arguments | {"states": None, "corrections": None}
            yield f"{name}, output", rule.states_program, some, columns, 8
            some = arguments | dict.fromkeys(("q", "attention", "output", "last_state"))
            yield f"{name}, states", rule.states_program, some, columns, 8
            yield f"{name}, gradients of states", rule.state_gradients_program, arguments, columns, 8
            columns |= {"VALUES": rule._WIDE_VALUES, "IS_WIDE": True}
            some = arguments | dict.fromkeys(("q", "attention", "output"))
            yield f"{name}, states of wide keys", rule.states_program, some, columns, 8
            yield f"{name}, gradients of states of wide keys", rule.state_gradients_program, arguments, columns, 8
            more = {"KEYS": keys, "VALUES": values}
            yield f"{name}, output of wide keys", rule.output_program, arguments, sizes | more, 4
            more = blocks | {"VALUES": values, "LEAST": -50.0}
            yield f"{name}, gradients", rule.gradients_program, arguments, sizes | more, 8


@pytest.mark.full
@pytest.mark.parametrize(
    "capability", [pytest.param(80, marks=pytest.mark.long), 90, pytest.param(100, marks=pytest.mark.long)]
)
def test_programs_keep_to_registers_and_move_sixteen_bytes_at_a_time(capability: int, tmp_path: Path) -> None:
    (results,) = run_distributed(1, compile_programs, programs, capability, tmp_path, timeout_s=120.0)
    assert len(results) == NUM_PROGRAMS + NUM_FLOAT8 * (capability >= MIN_FLOAT8_CAPABILITY)
    for result in results:
        is_wide_gate = result.name == "gated Norm's gradient, 8192, gate first"
        assert result.stack_bytes <= (MAX_WIDE_GATE_STACK_BYTES if is_wide_gate else 0), result
        is_norm_gradient = "Norm" in result.name and "gradient" in result.name
        limit = MAX_NORM_GRADIENT_REGISTERS if is_norm_gradient else MAX_REGISTERS
        limit = MAX_CONVOLUTION_REGISTERS if result.name.startswith("convolution") else limit
        limit = MAX_FLOAT8_GRADIENT_REGISTERS if result.name.startswith("float8 gradients") else limit
        is_activation_gradient = result.name.startswith("float8 gradient of activation")
        limit = MAX_FLOAT8_ACTIVATION_REGISTERS if is_activation_gradient else limit
        assert 0 < result.registers <= limit, result
        # Keys are few, and their states are gathered.
        draws_keys = result.name in ("dropout keys", "dropout states")
        reads_one = result.name in ("dropout", "float8 scales", "gathered rows")
        assert result.wide_loads >= (0 if draws_keys else 1 if reads_one else 2), result
        # The normalizer's program writes two numbers a row, and reads the label's logit by itself. Sums are few, and
        # amaxes are atomic updates.
        is_normalizer = result.name == "cross-entropy"
        writes_little = is_normalizer or result.name.endswith("sums") or draws_keys or result.name.startswith("amax")
        writes_little = writes_little or result.name == "gradient of weights"
        assert result.wide_stores >= (0 if writes_little else 1), result
        assert result.narrow_accesses == (1 if is_normalizer else 0), result


@pytest.mark.long
def test_programs_compile_for_one_row_one_sample_and_one_head(tmp_path: Path) -> None:
    (results,) = run_distributed(1, compile_programs, programs, 90, tmp_path, odd_is_one=True, timeout_s=120.0)
    assert len(results) == NUM_PROGRAMS + NUM_FLOAT8


def check_matmul_programs(capability: int, folder: Path) -> None:
    from megatron.core.ops.triton import gated_delta_rule as rule

    results = []
    for of_wide_keys, num_stages in ((False, rule._STAGES), (True, rule._WIDE_STAGES)):

        def some(capability: int, of_wide_keys: bool = of_wide_keys) -> Iterator[Program]:
            return (each for each in matmul_programs(capability) if each[0].endswith("wide keys") == of_wide_keys)

        results += compile_programs(some, capability, folder, num_stages=num_stages)
    assert len(results) == 33
    for result in results:
        assert result.stack_bytes <= MAX_STACK_BYTES.get(result.name.partition(",")[0], 0), result
        assert 0 < result.registers <= 255, result
        assert result.shared_bytes <= SHARED_BYTES[capability], result


@pytest.mark.full
@pytest.mark.parametrize(
    "capability", [pytest.param(80, marks=pytest.mark.long), 90, pytest.param(100, marks=pytest.mark.long)]
)
def test_programs_with_matmuls_keep_to_registers_and_shared_memory(capability: int, tmp_path: Path) -> None:
    run_distributed(1, check_matmul_programs, capability, tmp_path, timeout_s=1800.0)


def gemm_programs(capability: int, tile: Any) -> Iterator[Program]:
    """Yield the GEMMs with an activation; the largest tiles are compiled with each activation."""
    from megatron.core.ops.triton import activation, gemm_activation

    kinds = {"bias_parts": "*fp32", "num_rows": "odd", "num_columns": "i32", "depth": "i32"}
    if tile is gemm_activation.TILE_OF_FLOAT32:
        kinds |= dict.fromkeys(("left", "right", "bias", "inner", "output", "inner_grad"), "*fp32")
    sizes = {"PRECISION": "ieee", "ROWS": tile.rows, "COLUMNS": tile.columns, "DEPTH": tile.depth, "GROUP": 8}
    for kind in activation.PLAIN_KINDS if tile.columns == 256 else ("gelu",):
        of_kind = sizes | {"KIND": kind}
        yield f"{kind}, {tile}", gemm_activation.forward_program, kinds, of_kind, tile.num_warps
        yield f"{kind} gradient, {tile}", gemm_activation.gradient_program, kinds, of_kind, tile.num_warps
    if tile is gemm_activation.TILE_OF_FLOAT32:
        rounded = sizes | {"KIND": "gelu", "PRECISION": "tf32"}
        yield f"tf32, {tile}", gemm_activation.forward_program, kinds | {"bias": None}, rounded, tile.num_warps


def check_gemm_programs(capability: int, folder: Path) -> None:
    from megatron.core.ops.triton import gemm_activation

    tiles = gemm_activation.TILES if capability >= 90 else gemm_activation.TILES_BEFORE_HOPPER
    for tile in (*tiles, gemm_activation.TILE_OF_FLOAT32):
        of = partial(gemm_programs, tile=tile)
        results = compile_programs(of, capability, folder, num_stages=tile.num_stages)
        assert len(results) == (6 if tile.columns == 256 else 3 if tile is gemm_activation.TILE_OF_FLOAT32 else 2)
        for result in results:
            assert result.stack_bytes == 0, result
            assert 0 < result.registers <= 65536 // (32 * tile.num_warps), result
            assert result.shared_bytes <= SHARED_BYTES[capability], result
            # Tensor cores, and operands that are copied to shared memory sixteen bytes at a time.
            if tile is not gemm_activation.TILE_OF_FLOAT32:
                assert result.matmuls > 0, result
                assert result.wide_copies > 0, result
                assert result.narrow_copies == 0, result
            assert result.wide_stores > 0, result
            assert result.narrow_accesses == 0, result


@pytest.mark.full
@pytest.mark.parametrize(
    "capability", [pytest.param(80, marks=pytest.mark.long), 90, pytest.param(100, marks=pytest.mark.long)]
)
def test_gemms_with_an_activation_keep_to_registers_and_shared_memory(capability: int, tmp_path: Path) -> None:
    run_distributed(1, check_gemm_programs, capability, tmp_path, timeout_s=600.0)
