"""The layouts of models that predict further tokens that are verified."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from megatron.verification.cells import DROPOUT, EXCHANGES, SHAPES, Cell, Layout, make_cell
from megatron.verification.expert_cells import ExpertLayout, make_expert_cell

_ONE = ("--mtp-num-layers", "1", "--mtp-loss-scaling-factor", "0.5")
_TWO = ("--mtp-num-layers", "2", "--mtp-loss-scaling-factor", "0.5")
PREDICTION_SHAPES: dict[str, tuple[str, ...]] = {
    "llama-mtp": (*SHAPES["llama"], *_ONE),
    "qwen-mtp": (*SHAPES["qwen"], *_TWO),
    "gemma3-mtp": (*SHAPES["gemma3"], *_ONE),
}
"""Model shapes with further tokens by name: what each adds to the base command line. The second is tied."""


def make_prediction_cell(shape: str, layout: Layout, data: str = "plain", extra: Sequence[str] = ()) -> Cell:
    """Return the cell of a shape with further tokens at a layout; ``extra`` flags go to the reference too."""
    cell = make_cell("gpt2", layout, data, (*PREDICTION_SHAPES[shape], *extra))
    further = "".join(f" {flag}" for flag in extra)
    return replace(cell, name=f"{shape} {data} {layout.name}{further}")


_LAYOUTS = (
    Layout(),
    Layout(dp=2),
    Layout(tp=2),
    Layout(tp=2, sequence_parallel=True),
    Layout(pp=2),
    Layout(pp=4, pipeline_layout="E|tt|tt|L"),
    Layout(pp=2, virtual_stages=2),
    Layout(pp=2, schedule="zero-bubble"),
    Layout(cp=2),
    Layout(tp=2, pp=2, cp=2, sequence_parallel=True),
    Layout(tp=2, pp=2, dp=2, sequence_parallel=True, sharding="optim", overlap=True),
    Layout(pp=2, dp=2, sharding="optim_grads", overlap=True),
    Layout(pp=2, recompute=("full", "uniform", "1")),
    Layout(tp=2, sequence_parallel=True, recompute=("selective", "core_attn", "layernorm", "mlp")),
    Layout(pp=2, pp_overlap=("--defer-embedding-wgrad-compute",)),
)


def prediction_matrix() -> list[Cell]:
    """Return the layouts of models with further tokens that every release must pass."""
    return list(_cells())


def _cells() -> Iterator[Cell]:
    for shape in PREDICTION_SHAPES:
        for layout in _LAYOUTS:
            is_untied = "--untie-embeddings-and-output-weights" in PREDICTION_SHAPES[shape]
            if is_untied or not layout.pp_overlap:
                yield make_prediction_cell(shape, layout)
    for exchange in EXCHANGES[1:]:
        yield make_prediction_cell("llama-mtp", Layout(cp=2, cp_comm_type=exchange))
    for data in ("packed", "uneven"):
        for layout in (Layout(dp=2), Layout(cp=2), Layout(tp=2, pp=2, sequence_parallel=True)):
            yield make_prediction_cell("qwen-mtp", layout, data)
    for layout in (Layout(tp=2, pp=2, sequence_parallel=True), Layout(cp=2, pp=2)):
        yield make_prediction_cell("qwen-mtp", layout, extra=DROPOUT)
    for layout in (
        ExpertLayout(dp=2, ep=2),
        ExpertLayout(pp=2, dp=2, ep=2),
        ExpertLayout(tp=2, ep=2, etp=1, sequence_parallel=True),
    ):
        for shape in ("mixtral", "deepseek-experts"):
            yield make_expert_cell(shape, layout, extra=_ONE)
