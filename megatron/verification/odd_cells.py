"""Layouts with three ranks along an axis, where divisions are inexact."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron.verification.cells import DROPOUT, RECOMPUTE, Cell, Layout, make_cell
from megatron.verification.expert_cells import ExpertLayout, make_expert_cell
from megatron.verification.latent_cells import make_latent_cell
from megatron.verification.prediction_cells import make_prediction_cell
from megatron.verification.recipe_cells import MUON, Z_LOSS
from megatron.verification.sharding_cells import fully_sharded

_SIZES = (
    *("--num-attention-heads", "6", "--hidden-size", "24", "--ffn-hidden-size", "42", "--global-batch-size", "9"),
    *("--seq-length", "36", "--max-position-embeddings", "36", "--make-vocab-size-divisible-by", "3"),
)
"""Sizes that three divides."""
_FOR_TWO = ("--global-batch-size", "6")
"""Three micro-batches on each of two data-parallel ranks."""
_THREE_GROUPS = ("--num-query-groups", "3")
_SIX_EXPERTS = ("--num-experts", "6")


def odd_matrix() -> list[Cell]:
    """Return the layouts with an odd size that every release must pass."""
    return list(_cells())


def _cells() -> Iterator[Cell]:
    yield from _dense()
    yield from _experts()
    sequence_parallel = Layout(tp=3, sequence_parallel=True)
    yield make_prediction_cell("qwen-mtp", fully_sharded(Layout(cp=3, cp_comm_type="a2a")), "packed", _SIZES)
    yield make_prediction_cell("llama-mtp", Layout(cp=3, dp=2, sharding="optim"), "uneven", (*_SIZES, *_FOR_TWO))
    yield make_prediction_cell("gemma3-mtp", Layout(pp=3), extra=(*_SIZES, "--num-layers", "6"))
    yield make_latent_cell("latent", sequence_parallel, extra=(*_SIZES, "--num-query-groups", "6"))


def _dense() -> Iterator[Cell]:
    def cell(shape: str, layout: Layout, data: str = "plain", extra: Sequence[str] = (), num_layers: int = 4) -> Cell:
        return make_cell(shape, layout, data, (*_SIZES, *extra), num_layers)

    yield cell("gpt2", Layout(tp=3))
    yield cell("llama", Layout(tp=3, sequence_parallel=True, dp=2, sharding="optim"), extra=(*_THREE_GROUPS, *_FOR_TWO))
    yield cell("llama-one-group", Layout(tp=3, sequence_parallel=True, pp=2, recompute=RECOMPUTE[1]))
    yield cell("gpt2", Layout(pp=3), num_layers=3)
    yield cell("gpt2-untied", Layout(pp=3, virtual_stages=3), num_layers=9)
    yield cell("llama", Layout(pp=3, schedule="zero-bubble", dp=2), extra=("--global-batch-size", "10"), num_layers=3)
    yield cell("qwen", Layout(pp=3, tp=2, sequence_parallel=True, recompute=RECOMPUTE[2]), "packed", num_layers=6)
    yield cell("gpt2", Layout(dp=3), "uneven", ("--micro-batch-size", "3"))
    yield cell("llama", Layout(dp=3, sharding="optim_grads", overlap=True))
    yield cell("qwen", fully_sharded(Layout(dp=3, pp=2), overlap=True), extra=DROPOUT)
    yield cell("gpt2", Layout(dp=3, tp=2, sharding="optim"), extra=MUON)
    yield cell("gpt2", Layout(cp=3), "packed", DROPOUT)
    yield cell("llama", Layout(cp=3, cp_comm_type="all_gather", dp=2, sharding="optim"), extra=(*Z_LOSS, *_FOR_TWO))
    yield cell("llama", Layout(cp=3, cp_comm_type="a2a", pp=2), "uneven", _THREE_GROUPS)
    yield cell("mistral", Layout(cp=3, tp=2, sequence_parallel=True), "packed")


def _experts() -> Iterator[Cell]:
    extra = (*_SIZES, *_SIX_EXPERTS)
    dropping = ExpertLayout(tp=3, sequence_parallel=True, ep=3, etp=1)
    yield make_expert_cell("mixtral", ExpertLayout(dp=3, ep=3), extra=extra)
    yield make_expert_cell("gpt2-experts", ExpertLayout(dp=3, ep=3, pp=2, dispatcher="allgather"), "packed", extra)
    yield make_expert_cell("gpt2-experts", ExpertLayout(tp=3, sequence_parallel=True, etp=3), extra=extra)
    yield make_expert_cell("dropping", dropping, extra=(*extra, "--moe-shared-expert-intermediate-size", "18"))
    yield make_expert_cell("qwen3-moe", ExpertLayout(cp=3, ep=3, dp=2, sharding="optim"), extra=(*extra, *_FOR_TWO))
