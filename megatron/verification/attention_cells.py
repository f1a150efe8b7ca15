"""The layouts of models with attention sinks, or with layers that know no positions, that are verified."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from megatron.verification.cells import DROPOUT, MODULES, Cell, Layout, make_cell
from megatron.verification.expert_cells import ExpertLayout
from megatron.verification.latent_cells import make_latent_cell

_GROUPED = (
    *("--normalization", "RMSNorm", "--position-embedding-type", "rope", "--untie-embeddings-and-output-weights"),
    *("--group-query-attention", "--num-query-groups", "2"),
)
_WINDOWS = ("--window-size", "4,0", "--window-attn-skip-freq", "2")
ATTENTION_SHAPES: dict[str, tuple[str, ...]] = {
    "sinks": (*_GROUPED, *_WINDOWS, "--swiglu", "--softmax-type", "learnable"),
    "off-by-one": (*_GROUPED, "--swiglu", "--softmax-type", "off-by-one"),
    "no-rope": (*_GROUPED, "--swiglu", "--disable-bias-linear", "--no-rope-freq", "2"),
    "gpt-oss": (
        *(*_GROUPED, *_WINDOWS, "--softmax-type", "learnable"),
        *("--quick-geglu", "--glu-linear-offset", "1", "--activation-func-clamp-value", "0.3"),
        *("--rope-type", "yarn", "--rotary-scaling-factor", "4", "--original-max-position-embeddings", "8"),
        *("--no-yarn-correction-range-round-to-int", "--beta-fast", "4"),
        *("--num-experts", "8", "--moe-ffn-hidden-size", "12", "--moe-router-topk", "3"),
        *("--moe-aux-loss-coeff", "0.1"),
    ),
}
"""Model shapes by name: what each adds to the base command line."""


def make_attention_cell(shape: str, layout: Layout, data: str = "plain", extra: Sequence[str] = ()) -> Cell:
    """Return the cell of one of these shapes at a layout; ``extra`` flags go to the reference too."""
    cell = make_cell("gpt2", layout, data, (*ATTENTION_SHAPES[shape], *extra))
    further = "".join(f" {flag}" for flag in extra)
    return replace(cell, name=f"{shape} {data} {layout.name}{further}")


_LAYOUTS = (
    Layout(tp=2),
    Layout(tp=2, sequence_parallel=True),
    Layout(pp=2),
    Layout(cp=2),
    Layout(cp=2, cp_comm_type="all_gather"),
    Layout(cp=2, cp_comm_type="a2a"),
    Layout(tp=2, pp=2, cp=2, sequence_parallel=True),
)
_FURTHER = (
    Layout(tp=4, sequence_parallel=True),
    Layout(pp=2, virtual_stages=2),
    Layout(pp=2, schedule="zero-bubble"),
    Layout(cp=4, cp_comm_type="a2a+p2p", cp_levels=(2, 2)),
    Layout(dp=2, sharding="optim"),
    Layout(dp=2, sharding="optim_grads", overlap=True),
    Layout(dp=2, sharding="optim_grads_params"),
    Layout(tp=2, sequence_parallel=True, dp=2, sharding="optim_grads_params", recompute=("full", "uniform", "1")),
    Layout(tp=2, sequence_parallel=True, recompute=MODULES),
    Layout(cp=2, recompute=("selective",)),
    Layout(pp=2, recompute=("full", "uniform", "1")),
)
_SPREAD = (
    ExpertLayout(tp=2, pp=2, sequence_parallel=True),
    ExpertLayout(dp=2, ep=2),
    ExpertLayout(tp=2, ep=2, etp=1, sequence_parallel=True),
    ExpertLayout(tp=2, etp=2),
    ExpertLayout(pp=2, dp=2, ep=2),
    ExpertLayout(cp=2, ep=2, cp_comm_type="all_gather"),
)


def attention_matrix() -> list[Cell]:
    """Return the layouts of such models that every release must pass."""
    return list(_cells())


def _cells() -> Iterator[Cell]:
    for shape in ("sinks", "off-by-one", "no-rope"):
        for layout in _LAYOUTS:
            yield make_attention_cell(shape, layout)
    for layout in _FURTHER:
        yield make_attention_cell("sinks", layout)
    for expert_layout in _SPREAD:
        yield make_attention_cell("gpt-oss", expert_layout)
    for layout in (Layout(cp=2), Layout(cp=2, cp_comm_type="a2a"), Layout(tp=2, pp=2, sequence_parallel=True)):
        yield make_attention_cell("sinks", layout, "packed")
        yield make_attention_cell("sinks", layout, extra=DROPOUT)
    yield make_attention_cell("no-rope", Layout(cp=2), "packed")
    yield make_attention_cell("no-rope", Layout(pp=2), extra=("--mtp-num-layers", "1"))
    latent = Layout(tp=2, sequence_parallel=True, cp=2)
    yield make_latent_cell("latent", latent, extra=("--softmax-type", "learnable"))
