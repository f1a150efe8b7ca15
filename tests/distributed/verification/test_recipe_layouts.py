"""What a recipe adds to a plain training, in float64: the same gradients and weights at any layout."""

from __future__ import annotations

import pytest

from megatron.verification.cells import Cell, Layout, make_cell
from megatron.verification.prediction_cells import make_prediction_cell
from megatron.verification.verifier import Verifier

Z_LOSS = ("--z-loss-coeff", "0.05")
GROUPS = ("--param-group-overrides", "*.mlp.*:lr_mult=0.25,wd_mult=0", "*norm*:wd_mult=3", "--weight-decay", "0.1")
CLIPPING = ("--clip-grad-matrices", "0.3", "--clip-grad-embeddings", "0.1", "--clip-grad-vectors", "0.02")
MUP = ("--use-mup", "--mup-width-mult", "3", "--mup-embedding-mult", "2", "--mup-output-mult", "1.5")
HEADS = ("--mup-base-head-dim", "5", "--mup-attn-scale-power", "0.8")
SHARDED = Layout(tp=2, sequence_parallel=True, dp=2, sharding="optim_grads", overlap=True)
CELLS = (
    make_cell("gpt2", Layout(tp=2, cp=2), "packed", extra=(*Z_LOSS, *MUP, *HEADS)),
    make_cell("gpt2", Layout(tp=2, pp=2), "uneven", extra=(*Z_LOSS, *GROUPS, *CLIPPING)),
)
FURTHER = (
    make_prediction_cell("qwen-mtp", Layout(tp=2, pp=2, sequence_parallel=True), extra=Z_LOSS),
    make_cell("llama", Layout(cp=2, dp=2), "uneven", extra=Z_LOSS),
    make_cell("gpt2", Layout(pp=2, schedule="zero-bubble", dp=2, sharding="optim"), extra=Z_LOSS),
    make_cell("gemma2", SHARDED, extra=Z_LOSS),
    make_cell("llama", SHARDED, extra=(*CLIPPING, "--optimizer", "muon")),
    make_cell("gpt2", Layout(cp=2, dp=2, sharding="optim"), extra=CLIPPING),
    make_prediction_cell("qwen-mtp", Layout(tp=2, pp=2, sequence_parallel=True), extra=MUP),
    make_cell("llama", SHARDED, extra=(*MUP, "--optimizer", "muon")),
    make_cell("llama", SHARDED, extra=(*GROUPS, "--optimizer", "muon")),
    make_cell("llama", Layout(pp=2, dp=2, sharding="optim"), extra=(*GROUPS, "--decoupled-lr", "1e-3")),
)


@pytest.mark.parametrize(
    "cell",
    [*CELLS, *(pytest.param(cell, marks=pytest.mark.long) for cell in FURTHER)],
    ids=lambda cell: cell.name,
)
def test_a_recipe_makes_the_same_weights_at_any_layout(cell: Cell, verifier: Verifier) -> None:
    report = verifier.check(cell)
    assert report.outcome == "passed", report.describe()
