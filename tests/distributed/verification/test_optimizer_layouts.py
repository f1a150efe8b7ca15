"""Muon and Lion in float64: the same weights after three steps at any layout."""

from __future__ import annotations

import pytest

from megatron.verification.cells import Cell, Layout, make_cell
from megatron.verification.expert_cells import ExpertLayout, make_expert_cell
from megatron.verification.verifier import Verifier

MUON = ("--optimizer", "muon", "--muon-nesterov", "--muon-extra-scale-factor", "0.2")
FUSED = (*MUON, "--muon-no-split-qkv", "--muon-coefficient-type", "simple", "--muon-scale-mode", "shape_scaling")
ADAPTERS = ("--lora-rank", "3")
LION = ("--optimizer", "muon", "--muon-scalar-optimizer", "lion")
SHARDED = Layout(tp=2, sequence_parallel=True, dp=2, sharding="optim_grads", overlap=True)
CELLS = (
    make_cell("llama", SHARDED, extra=MUON),
    make_expert_cell("mixtral", ExpertLayout(tp=2, dp=2, ep=2, sequence_parallel=True, sharding="optim"), extra=MUON),
    # Of a sign: a gradient that is rounding alone, that of a key's bias in other shapes, would go either way.
    make_cell("llama", Layout(pp=2, dp=2), extra=LION),
)
FURTHER = (
    # Ranks that share a key-value group.
    make_cell("llama-one-group", Layout(tp=4), extra=MUON),
    *(make_cell(shape, Layout(tp=2), extra=MUON) for shape in ("gpt2", "llama", "qwen")),
    make_cell("llama", Layout(tp=4), extra=FUSED),
    make_cell("llama", SHARDED, extra=FUSED),
    make_cell("llama", Layout(dp=4, sharding="optim"), extra=MUON),
    make_cell("llama", Layout(dp=4), extra=MUON),
    make_cell("llama", Layout(cp=2, dp=2, sharding="optim", overlap=True), extra=MUON),
    make_cell("gpt2", Layout(tp=2, pp=2, virtual_stages=2), extra=MUON),
    make_cell("gpt2", Layout(pp=2, schedule="zero-bubble", dp=2, sharding="optim"), extra=MUON),
    make_cell("gpt2-untied", Layout(pp=2, dp=2, sharding="optim"), extra=MUON),
    make_cell("llama", Layout(tp=2), extra=(*MUON, *ADAPTERS)),
    make_cell("llama", Layout(dp=2, sharding="optim"), extra=("--optimizer", "lion")),
    # Ranks that cut an expert have copies of one of its adapter's matrices.
    make_expert_cell("mixtral", ExpertLayout(tp=2, dp=2, ep=2, sequence_parallel=True), extra=(*MUON, *ADAPTERS)),
    *(
        make_expert_cell(shape, layout, extra=MUON)
        for shape, layout in (
            ("mixtral", ExpertLayout(dp=2, ep=2)),
            ("mixtral", ExpertLayout(dp=4, ep=2, sharding="optim_grads", overlap=True)),
            ("mixtral", ExpertLayout(tp=2, ep=2, etp=1, sequence_parallel=True)),
            ("mixtral", ExpertLayout(cp=2, dp=2, etp=2, sharding="optim")),
            ("qwen3-moe", ExpertLayout(pp=2, dp=2, ep=2)),
            ("deepseek-experts", ExpertLayout(tp=2, dp=2, ep=4, etp=1, sequence_parallel=True, sharding="optim")),
            ("gpt2-experts", ExpertLayout(dp=4, ep=2, sharding="optim_grads_params")),
        )
    ),
)


@pytest.mark.parametrize(
    "cell",
    [*CELLS, *(pytest.param(cell, marks=pytest.mark.long) for cell in FURTHER)],
    ids=lambda cell: cell.name,
)
def test_an_optimizer_makes_the_same_weights_at_any_layout(cell: Cell, verifier: Verifier) -> None:
    report = verifier.check(cell)
    assert report.outcome == "passed", report.describe()


def test_muon_makes_other_weights_than_adam(verifier: Verifier) -> None:
    layout = Layout(tp=2)
    verifier.check(make_cell("llama", layout, extra=MUON))
    muon = verifier._references[make_cell("llama", layout, extra=MUON).reference_flags].parameters
    verifier.check(make_cell("llama", layout))
    adam = verifier._references[make_cell("llama", layout).reference_flags].parameters
    others = {name for name in muon if not (muon[name] - adam[name]).any()}
    # Adam updates those of the first step from the same gradients; then the losses differ, and so do all weights.
    assert others == set()
