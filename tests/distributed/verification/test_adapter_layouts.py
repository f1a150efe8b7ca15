"""Low-rank adapters in float64: the same losses, gradients and adapters at any layout."""

from __future__ import annotations

import pytest

from megatron.verification.cells import MODULES, Cell, Layout, make_cell
from megatron.verification.model_cells import ExpertLayout, make_expert_cell
from megatron.verification.training_cells import ATTENTION_LORA, FUSED_LORA, LORA, SPLIT_LORA, adapter_matrix
from megatron.verification.verifier import Verifier

SPREAD = ExpertLayout(tp=2, dp=2, ep=2, sequence_parallel=True)
CELLS = (
    make_cell("gpt2", Layout(pp=2, virtual_stages=2, offloaded_layers=1, offloads_weights=True), extra=FUSED_LORA),
    make_cell("gpt2", Layout(dp=2, sharding="optim_grads", overlap=True), extra=FUSED_LORA),
    make_cell("llama", Layout(tp=2, sequence_parallel=True, pp=2, recompute=MODULES), extra=SPLIT_LORA),
    make_cell("llama", Layout(cp=2), "packed", extra=SPLIT_LORA),
    make_expert_cell("mixtral", SPREAD, extra=ATTENTION_LORA),
    make_expert_cell("mixtral", ExpertLayout(tp=2, dp=2, ep=2), extra=LORA),
)
FURTHER = [cell for cell in adapter_matrix() if cell not in CELLS]


@pytest.mark.full
@pytest.mark.parametrize(
    "cell",
    [*CELLS, *(pytest.param(cell, marks=pytest.mark.long) for cell in FURTHER)],
    ids=lambda cell: cell.name,
)
def test_adapters_are_the_same_at_any_layout(cell: Cell, verifier: Verifier) -> None:
    report = verifier.check(cell)
    assert report.outcome == "passed", report.describe()
    reference = verifier.reference(cell)
    assert {name.rpartition(".")[2] for name in reference.gradients} == {"lora_A", "lora_B"}
    learned = [name for name in reference.parameters if name.endswith("lora_B") and reference.parameters[name].any()]
    assert len(learned) == len(reference.gradients) // 2
