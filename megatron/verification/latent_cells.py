"""The layouts of models with latent attention that are verified."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from megatron.verification.cells import DROPOUT, MODULES, Cell, Layout, make_cell
from megatron.verification.expert_cells import ExpertLayout, make_expert_cell

_LATENT = (
    *("--position-embedding-type", "rope", "--multi-latent-attention", "--kv-lora-rank", "10"),
    *("--qk-head-dim", "6", "--qk-pos-emb-head-dim", "4", "--num-query-groups", "4"),
)
_GATED = ("--swiglu", "--normalization", "RMSNorm", "--disable-bias-linear")
LATENT_SHAPES: dict[str, tuple[str, ...]] = {
    "latent": (*_GATED, *_LATENT, "--q-lora-rank", "12", "--v-head-dim", "8", "--qk-layernorm"),
    "latent-wide-values": (*_LATENT, "--v-head-dim", "14", "--untie-embeddings-and-output-weights"),
    "latent-yarn": (
        *(*_GATED, *_LATENT, "--q-lora-rank", "12", "--v-head-dim", "8", "--qk-layernorm"),
        *("--rotary-scaling-factor", "4", "--original-max-position-embeddings", "8"),
        *("--mscale", "0.8", "--mscale-all-dim", "0.5"),
        *("--mtp-num-layers", "1", "--untie-embeddings-and-output-weights"),
    ),
}
"""Model shapes with latent attention by name: what each adds to the base command line."""


def make_latent_cell(shape: str, layout: Layout, data: str = "plain", extra: Sequence[str] = ()) -> Cell:
    """Return the cell of a shape with latent attention at a layout; ``extra`` flags go to the reference too."""
    cell = make_cell("gpt2", layout, data, (*LATENT_SHAPES[shape], *extra))
    further = "".join(f" {flag}" for flag in extra)
    return replace(cell, name=f"{shape} {data} {layout.name}{further}")


_LAYOUTS = (
    Layout(),
    Layout(dp=2, sharding="optim"),
    Layout(tp=2),
    Layout(tp=2, sequence_parallel=True),
    Layout(tp=4, sequence_parallel=True),
    Layout(pp=2, schedule="zero-bubble"),
    Layout(cp=2),
    Layout(cp=2, cp_comm_type="all_gather"),
    Layout(cp=2, cp_comm_type="a2a"),
    Layout(cp=4, cp_comm_type="a2a+p2p", cp_levels=(2, 2)),
    Layout(tp=2, pp=2, cp=2, sequence_parallel=True),
    Layout(tp=2, pp=2, dp=2, sequence_parallel=True, sharding="optim_grads", overlap=True),
    Layout(tp=2, sequence_parallel=True, recompute=MODULES),
    Layout(tp=2, cp=2, sequence_parallel=True, recompute=("selective", "core_attn", "mla_up_proj")),
    Layout(pp=2, recompute=("full", "uniform", "1")),
)


def latent_matrix() -> list[Cell]:
    """Return the layouts of models with latent attention that every release must pass."""
    return list(_cells())


def _cells() -> Iterator[Cell]:
    for shape in LATENT_SHAPES:
        for layout in _LAYOUTS:
            yield make_latent_cell(shape, layout)
    for layout in (Layout(cp=2), Layout(tp=2, pp=2, sequence_parallel=True)):
        yield make_latent_cell("latent", layout, "packed")
        yield make_latent_cell("latent-yarn", layout, extra=DROPOUT)
    for expert_layout in (ExpertLayout(pp=2, dp=2, ep=2), ExpertLayout(tp=2, ep=2, etp=1, sequence_parallel=True)):
        yield make_expert_cell(
            "deepseek-experts", expert_layout, extra=(*LATENT_SHAPES["latent"], "--mtp-num-layers", "1")
        )
