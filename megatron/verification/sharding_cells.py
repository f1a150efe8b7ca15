"""The layouts with weights sharded over the data-parallel ranks that are verified."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import TypeVar

from megatron.verification.cells import DROPOUT, IN_PARTS, MODULES, RECOMPUTE, SHARDING, Cell, Layout, make_cell
from megatron.verification.expert_cells import ExpertLayout, make_expert_cell
from megatron.verification.latent_cells import make_latent_cell

WEIGHTS = "optim_grads_params"
AnyLayout = TypeVar("AnyLayout", bound=Layout)


def fully_sharded(layout: AnyLayout, *, overlap: bool = False) -> AnyLayout:
    """Return a layout with weights, gradients and state sharded over its data-parallel ranks."""
    return replace(layout, sharding=WEIGHTS, overlap=overlap)


_LAYOUTS = (
    Layout(dp=2),
    Layout(dp=4),
    Layout(tp=2, dp=2),
    Layout(tp=2, sequence_parallel=True, dp=2),
    Layout(pp=2, dp=2),
    Layout(pp=2, virtual_stages=2, dp=2),
    Layout(pp=2, schedule="zero-bubble", dp=2),
    Layout(pp=2, dp=2, pp_overlap=("--delay-wgrad-compute",)),
    Layout(cp=2, dp=2),
    Layout(cp=4, cp_comm_type="a2a"),
    Layout(tp=2, sequence_parallel=True, pp=2, cp=2),
    Layout(tp=2, sequence_parallel=True, pp=2, dp=2),
    Layout(pp=4, dp=2),
)
_EXPERT_LAYOUTS = (
    ExpertLayout(dp=4, ep=2),
    ExpertLayout(dp=4, ep=4),
    ExpertLayout(tp=2, dp=2, ep=2, etp=1, sequence_parallel=True),
    ExpertLayout(pp=2, virtual_stages=2, dp=4, ep=2),
    ExpertLayout(cp=2, dp=2, ep=2),
)


def hybrid(cell: Cell, instances: int = 2) -> Cell:
    """Return the cell with so many copies of what is sharded."""
    flags = ("--num-distributed-optimizer-instances", str(instances))
    return replace(cell, name=f"{cell.name} in {instances} copies", layout_flags=(*cell.layout_flags, *flags))


def sharding_matrix() -> list[Cell]:
    """Return the layouts with sharded weights that every release must pass."""
    return list(_cells())


def _cells() -> Iterator[Cell]:
    for shape, layout in itertools.product(("gpt2", "llama"), _LAYOUTS):
        yield make_cell(shape, fully_sharded(layout))
        yield make_cell(shape, fully_sharded(layout, overlap=True), "uneven")
    for recompute in (*RECOMPUTE[1:], MODULES, ("full", "uniform", "2")):
        for layout in (Layout(dp=2), Layout(tp=2, sequence_parallel=True, pp=2, dp=2)):
            yield make_cell("qwen", fully_sharded(replace(layout, recompute=recompute), overlap=True), extra=DROPOUT)
    yield make_cell("llama", fully_sharded(Layout(tp=2, dp=2, recompute=IN_PARTS)))
    for shape in ("gemma2", "olmo2", "neox"):
        yield make_cell(shape, fully_sharded(Layout(tp=2, pp=2, dp=2), overlap=True), "packed")
    for expert_shape, expert_layout in itertools.product(("mixtral", "deepseek-experts"), _EXPERT_LAYOUTS):
        yield make_expert_cell(expert_shape, fully_sharded(expert_layout, overlap=True))
    for layout in (Layout(dp=4), Layout(tp=2, cp=2, dp=2), Layout(pp=2, dp=4)):
        for sharding in (*SHARDING[1:], WEIGHTS):
            yield hybrid(make_cell("gpt2", replace(layout, sharding=sharding)))
            yield hybrid(make_cell("llama", replace(layout, sharding=sharding, overlap=True), "uneven"))
    yield hybrid(make_cell("gpt2", fully_sharded(Layout(dp=8), overlap=True)), 4)
    yield hybrid(make_expert_cell("mixtral", fully_sharded(ExpertLayout(dp=8, ep=2), overlap=True)))
    yield hybrid(make_expert_cell("deepseek-experts", replace(ExpertLayout(dp=4, ep=2), sharding="optim")))
    yield make_latent_cell("latent", fully_sharded(Layout(tp=2, pp=2, dp=2)))
    yield make_latent_cell("latent-yarn", fully_sharded(Layout(pp=2, dp=2), overlap=True))
