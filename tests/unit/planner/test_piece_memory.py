"""Memory of chunks and stages is put together from that of their pieces, as their passes run."""

from __future__ import annotations

import dataclasses

import pytest

from megatron.config.arguments import resolve_arguments
from megatron.core.pipeline_parallel.schedules import Action, Pass
from megatron.core.pipeline_parallel.stage_layout import StageContents
from megatron.planner.memory import NOTHING, ModelPieces, chunk_memory, fullest_moment, in_sequence
from megatron.planner.plan import Plan
from megatron.planner.traces import PieceMemory
from tests.unit.training.config.command_lines import MINIMAL

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
