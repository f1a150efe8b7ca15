"""Memory of a chunk and of a stage, put together from that of their pieces: layers, and the ends of the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron.core.models.gpt.gpt_config import GPTConfig
from megatron.core.pipeline_parallel.schedules import Action, Pass
from megatron.core.pipeline_parallel.stage_layout import StageContents
from megatron.planner.plan import Plan
from megatron.planner.traces import PieceMemory

NOTHING = PieceMemory(0, 0, 0)


@dataclass(frozen=True)
class ModelPieces:
    """Hold the memory of every piece of a model for one micro-batch, recompute and offload left out.

    ``layers`` are in the order of the model, ``embedding`` and ``loss`` its ends; ``loss`` has the final norm, the MTP
    modules, the output layer and the loss. ``input_bytes`` are those of a layer's input as recompute keeps it, and
    ``gradient_bytes`` those of a layer's incoming gradient. ``output_deferred`` is what the deferred weight gradient of
    the output layer keeps. ``again`` are the layers with full recompute, each alone, where they were traced so.
    """

    layers: Sequence[PieceMemory]
    embedding: PieceMemory
    loss: PieceMemory
    input_bytes: int
    gradient_bytes: int
    output_deferred: int = 0
    again: Sequence[PieceMemory] = ()


@dataclass(frozen=True)
class FullestMoment:
    """Hold activations of a stage at its fullest moment: what waits for backward passes, and what a pass adds.

    ``logits`` are a part of neither.
    """

    kept: int
    working: int
    logits: int

    @property
    def total(self) -> int:
        """Return all bytes together."""
        return self.kept + self.working + self.logits


def chunk_memory(plan: Plan, pieces: ModelPieces, chunk: StageContents, whole_weights: tuple[int, int]) -> PieceMemory:
    """Return the memory of a chunk's forward and backward pass, with the recompute and the offload of the plan.

    ``whole_weights`` are the bytes of sharded weights that are gathered while a layer runs, and while the embedding
    does.
    """
    of_layer, of_first = whole_weights
    members = [_with_weights(pieces.embedding, of_first)] if chunk.has_embedding else []
    groups = _offloaded(plan, _groups(plan, pieces, chunk.layer_numbers))
    members += [_with_weights(each, of_layer) for each in groups]
    if chunk.has_loss:
        members.append(pieces.loss)
    return in_sequence(members)


def in_sequence(members: Sequence[PieceMemory]) -> PieceMemory:
    """Return the memory of pieces that run one after the other, and backward in the opposite order."""
    before = forward = backward = logits = 0
    waiting = sum(each.deferred for each in members)
    for each in members:
        waiting -= each.deferred
        forward = max(forward, before + each.forward_peak)
        peak = before + each.backward_peak + waiting
        backward, logits = max((backward, logits), (peak, each.logits))
        before += each.kept
    return PieceMemory(before, forward, backward, sum(each.deferred for each in members), logits)


def fullest_moment(actions: Sequence[Action], chunks: Sequence[PieceMemory], output_deferred: int) -> FullestMoment:
    """Return the activations of a stage at the fullest moment of its actions."""
    late = {action.microbatch for action in actions if action.kind is Pass.OUTPUT_WEIGHT}
    held, last, most = 0, len(chunks) - 1, FullestMoment(0, 0, 0)
    for kind, microbatch, number in actions:
        chunk = chunks[number]
        if kind is Pass.FORWARD:
            moment = _moment(held, chunk, chunk.forward_peak)
            held += chunk.kept
        elif kind in (Pass.BACKWARD, Pass.BACKWARD_INPUT):
            held -= chunk.kept
            moment = _moment(held, chunk, chunk.backward_peak)
            held += chunk.deferred if kind is Pass.BACKWARD_INPUT else 0
            held += output_deferred if kind is Pass.BACKWARD and number == last and microbatch in late else 0
        else:
            held -= chunk.deferred if kind is Pass.BACKWARD_WEIGHT else output_deferred
            continue
        most = max(most, moment, key=lambda each: each.total)
    return most


def _moment(held: int, chunk: PieceMemory, peak: int) -> FullestMoment:
    """Return a pass's fullest moment where so much is ``held`` for other passes; logits may be among what is kept."""
    logits = min(chunk.logits, peak)
    kept = min(max(0, chunk.kept - logits), peak - logits)
    return FullestMoment(held + kept, peak - logits - kept, logits)


def _with_weights(piece: PieceMemory, num_bytes: int) -> PieceMemory:
    if not num_bytes:
        return piece
    return replace(piece, forward_peak=piece.forward_peak + num_bytes, backward_peak=piece.backward_peak + num_bytes)


def _offloaded(plan: Plan, groups: Sequence[tuple[int, PieceMemory]]) -> Sequence[PieceMemory]:
    """Return a chunk's groups of layers where the first ones leave what they keep on the host: two are on their way at
    once. Each group comes with the place of its first layer.
    """
    model = plan.model
    number = model.num_offloaded_layers if model.cpu_offloading_activations else 0
    under_way = sum(sorted(each.kept for place, each in groups if place < number)[-2:])
    return [
        replace(each, kept=0, backward_peak=each.backward_peak + under_way - each.kept) if place < number else each
        for place, each in groups
    ]


def _groups(plan: Plan, pieces: ModelPieces, numbers: Sequence[int]) -> Sequence[tuple[int, PieceMemory]]:
    """Return the place of each group of layers in its chunk, and its memory: groups that keep their input alone and run
    forward again, and layers that keep all they save.
    """
    several, again = recomputed_groups(plan.model, len(numbers))
    groups = [(group[0], _run_again(pieces, [numbers[place] for place in group])) for group in several]
    return [*groups, *((place, pieces.layers[numbers[place]]) for place in range(again, len(numbers)))]


def recomputed_groups(model: GPTConfig, num_layers: int) -> tuple[Sequence[range], int]:
    """Return the places of a chunk's layers that full recompute runs again, by group, and the number of these layers.

    They are the first ones of the chunk.
    """
    if model.recompute_granularity != "full":
        return [], 0
    length = model.recompute_num_layers or 1
    again, step = (min(length, num_layers), 1) if model.recompute_method == "block" else (num_layers, length)
    return [range(start, min(start + step, again)) for start in range(0, again, step)], again


def _run_again(pieces: ModelPieces, numbers: Sequence[int]) -> PieceMemory:
    """Return the memory of layers that run forward again together before their backward passes."""
    group = [pieces.layers[number] for number in numbers]
    if not pieces.again:
        return _derived(pieces, group)
    of_first = pieces.again[numbers[0]]
    if len(numbers) == 1:
        return of_first
    # What a layer's second forward pass leaves at work is seen in its own trace.
    more = of_first.backward_peak - _derived(pieces, group[:1]).backward_peak
    derived = _derived(pieces, group)
    return replace(derived, kept=of_first.kept, backward_peak=derived.backward_peak + max(0, more))


def _derived(pieces: ModelPieces, group: Sequence[PieceMemory]) -> PieceMemory:
    whole = in_sequence(group)
    again = max(whole.forward_peak + pieces.gradient_bytes, whole.backward_peak)
    # In the first forward pass, each layer's memory is free when it ends.
    forward = max(each.forward_peak for each in group)
    return PieceMemory(pieces.input_bytes, forward, again, whole.deferred, whole.logits)
