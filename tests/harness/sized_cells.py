"""Configurations for planner tests, with layers wide enough that the planner's small omissions stay below 1 percent."""

from __future__ import annotations

from megatron.verification.cells import Cell, Layout
from megatron.verification.model_cells import ExpertLayout, make_expert_cell, make_latent_cell, make_prediction_cell

SIZES = (
    *("--hidden-size", "128", "--ffn-hidden-size", "256", "--num-attention-heads", "4", "--num-query-groups", "4"),
    *("--group-query-attention", "--seq-length", "64", "--max-position-embeddings", "64", "--vocab-size", "200"),
    *("--hidden-dropout", "0", "--attention-dropout", "0"),
)
UNCHECKED = ("--no-check-for-nan-in-loss-and-grad",)
"""For a process that acts as one rank: the numbers that it receives from other ranks are not initialized."""
EXPERT_SIZES = ("--moe-ffn-hidden-size", "96")


def short_name(cell: Cell) -> str:
    """Shorten a configuration's name to a test id: without `SIZES`, which all configurations share."""
    return cell.name.replace(f" {' '.join(SIZES)}", "").replace(" plain ", " ")


_MTP_LATENT = (
    *("--q-lora-rank", "40", "--kv-lora-rank", "48", "--qk-head-dim", "24", "--qk-pos-emb-head-dim", "16"),
    *("--v-head-dim", "32"),
)
ONE_MTP_MODULE, TWO_MTP_MODULES = ("--mtp-num-layers", "1"), ("--mtp-num-layers", "2")


def mtp_cell(shape: str, layout: Layout, extra: tuple[str, ...] = ()) -> Cell:
    """Return a dense model with multi-token prediction (MTP) modules at a layout."""
    return make_prediction_cell(shape, layout, extra=(*SIZES, *UNCHECKED, *extra))


def mtp_expert_cell(shape: str, layout: ExpertLayout, mtp: tuple[str, ...]) -> Cell:
    """Return a model with experts and MTP modules at a layout."""
    return make_expert_cell(shape, layout, extra=(*SIZES, *UNCHECKED, *EXPERT_SIZES, *mtp))


def mtp_latent_cell(layout: Layout) -> Cell:
    """Return a model with multi-head latent attention (MLA) and MTP modules at a layout."""
    return make_latent_cell("latent", layout, extra=(*SIZES, *UNCHECKED, *_MTP_LATENT, *TWO_MTP_MODULES))


def fp8_flags(recipe: str) -> tuple[str, ...]:
    """Return the flags of an FP8 recipe."""
    return ("--bf16", "--fp8-format", "hybrid", "--fp8-recipe", recipe)


_LATENT_SIZES = (
    *(*SIZES, *UNCHECKED, "--micro-batch-size", "2"),
    *("--kv-lora-rank", "48", "--qk-head-dim", "24", "--qk-pos-emb-head-dim", "16"),
)
WIDE_LATENT = (*_LATENT_SIZES, "--v-head-dim", "56")
NARROW_LATENT = (*_LATENT_SIZES, "--q-lora-rank", "40", "--v-head-dim", "32")
_WHOLE_LATENT = (*_LATENT_SIZES, "--v-head-dim", "40")
UP_PROJECTIONS, CORE_AND_UP_PROJECTIONS = ("selective", "mla_up_proj"), ("selective", "core_attn", "mla_up_proj")
LATENT_CELLS = tuple(
    make_latent_cell(shape, layout, extra=extra)
    for shape, layout, extra in (
        ("latent", Layout(tp=2, sequence_parallel=True, recompute=UP_PROJECTIONS), NARROW_LATENT),
        ("latent", Layout(tp=2, sequence_parallel=True, pp=2), NARROW_LATENT),
        ("latent-wide-values", Layout(), WIDE_LATENT),
        ("latent-wide-values", Layout(tp=2, sequence_parallel=True), _WHOLE_LATENT),
        ("latent-wide-values", Layout(recompute=UP_PROJECTIONS), WIDE_LATENT),
        ("latent", Layout(pp=2, recompute=("full", "uniform", "1")), NARROW_LATENT),
        ("latent", Layout(recompute=CORE_AND_UP_PROJECTIONS), NARROW_LATENT),
        ("latent", Layout(tp=2, cp=2, sequence_parallel=True, recompute=CORE_AND_UP_PROJECTIONS), NARROW_LATENT),
        *(("latent", Layout(cp=2, cp_comm_type=exchange), NARROW_LATENT) for exchange in ("p2p", "all_gather")),
        ("latent-wide-values", Layout(cp=2, cp_comm_type="a2a"), WIDE_LATENT),
        ("latent-wide-values", Layout(cp=2, cp_comm_type="all_gather", recompute=UP_PROJECTIONS), WIDE_LATENT),
        *(
            ("latent", Layout(cp=2, cp_comm_type=exchange, recompute=UP_PROJECTIONS), NARROW_LATENT)
            for exchange in ("a2a", "all_gather")
        ),
    )
)
"""Models with MLA at layouts whose memory and whose traffic are both tested."""
