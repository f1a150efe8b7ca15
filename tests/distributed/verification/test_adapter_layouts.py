"""Low-rank adapters in float64: the same losses, gradients and adapters at any layout."""

from __future__ import annotations

import pytest

from megatron.verification.cells import MODULES, Cell, Layout, make_cell
from megatron.verification.expert_cells import ExpertLayout, make_expert_cell
from megatron.verification.verifier import Verifier

LORA = ("--lora-rank", "3", "--lora-alpha", "6")
FUSED = (*LORA, "--lora-dropout", "0.2")
APART = (
    *(*LORA, "--lora-dropout", "0.2", "--lora-target-modules"),
    *("q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
)
CELLS = (
    make_cell("gpt2", Layout(pp=2, virtual_stages=2, offloaded_layers=1, offloads_weights=True), extra=FUSED),
    make_cell("gpt2", Layout(dp=2, sharding="optim_grads", overlap=True), extra=FUSED),
    make_cell("llama", Layout(tp=2, sequence_parallel=True, pp=2, recompute=MODULES), extra=APART),
    make_cell("llama", Layout(cp=2), "packed", extra=APART),
)
OF_ATTENTION = (*LORA, "--lora-target-modules", "q_proj", "v_proj", "linear_proj")
WITH_EXPERTS = (
    make_expert_cell("mixtral", ExpertLayout(tp=2, dp=2, ep=2, sequence_parallel=True), extra=OF_ATTENTION),
    make_expert_cell("qwen3-moe", ExpertLayout(pp=2, dp=2, ep=2, sharding="optim", overlap=True), extra=OF_ATTENTION),
    make_expert_cell("mixtral", ExpertLayout(cp=2, dp=2, ep=4, recompute=MODULES), "packed", extra=OF_ATTENTION),
)
OF_GATES = (*LORA, "--lora-target-modules", "linear_qkv", "gate_proj", "linear_fc2")
OF_EXPERTS = (*LORA, "--lora-target-modules", "linear_fc1", "linear_fc2")
OF_SECOND_PRODUCT = (*LORA, "--lora-target-modules", "linear_fc2")
STILL = ("--moe-router-bias-update-rate", "0")
FULL = ("full", "uniform", "1")
ON_EXPERTS = (
    make_expert_cell("mixtral", ExpertLayout(tp=2, dp=2, ep=2), extra=LORA),
    make_expert_cell("mixtral", ExpertLayout(dp=2, ep=2, sharding="optim", overlap=True), extra=OF_GATES),
    make_expert_cell("qwen3-moe", ExpertLayout(pp=2, dp=2, ep=2), extra=OF_GATES),
    make_expert_cell("mixtral", ExpertLayout(tp=2, sequence_parallel=True, ep=2, etp=1), extra=OF_GATES),
    make_expert_cell(
        "mixtral", ExpertLayout(tp=2, dp=2, ep=2, dispatcher="allgather", sharding="optim_grads"), extra=OF_EXPERTS
    ),
    make_expert_cell("deepseek-experts", ExpertLayout(tp=2, dp=2, ep=2, sequence_parallel=True), extra=(*LORA, *STILL)),
    make_expert_cell(
        "deepseek-experts", ExpertLayout(tp=2, pp=2, ep=2, etp=1, recompute=FULL), extra=(*OF_GATES, *STILL)
    ),
    make_expert_cell("dropping", ExpertLayout(tp=2, dp=2, ep=2), extra=OF_EXPERTS),
    make_expert_cell("dropping", ExpertLayout(tp=2, sequence_parallel=True, ep=2, etp=1), extra=OF_SECOND_PRODUCT),
    make_expert_cell("gpt2-experts", ExpertLayout(tp=2, dp=2, ep=4, etp=1), extra=OF_SECOND_PRODUCT),
    make_expert_cell("gpt2-experts", ExpertLayout(tp=2, recompute=FULL), extra=LORA),
    make_expert_cell(
        "mixtral", ExpertLayout(cp=2, dp=2, ep=4, recompute=("selective", "moe", "moe_act")), "packed", extra=OF_GATES
    ),
    make_expert_cell("deepseek-experts", ExpertLayout(tp=2, dp=2, ep=2, recompute=MODULES), extra=(*LORA, *STILL)),
    make_expert_cell("qwen3-moe", ExpertLayout(pp=2, ep=2, dp=2, schedule="zero-bubble"), extra=OF_GATES),
)
FURTHER = (
    *ON_EXPERTS[1:],
    make_cell("gpt2", Layout(tp=2), extra=FUSED),
    make_cell("gpt2", Layout(dp=2, sharding="optim"), extra=FUSED),
    *WITH_EXPERTS[1:],
    make_cell("llama", Layout(tp=2, pp=2, schedule="zero-bubble", recompute=("full", "uniform", "1")), extra=APART),
    # Ranks that share a key-value group, with one adapter for all rows and with one for each part.
    make_cell("llama-one-group", Layout(tp=4), extra=FUSED),
    make_cell("llama-one-group", Layout(tp=4, sequence_parallel=True), extra=APART),
)


@pytest.mark.parametrize(
    "cell",
    [*CELLS, WITH_EXPERTS[0], ON_EXPERTS[0], *(pytest.param(cell, marks=pytest.mark.long) for cell in FURTHER)],
    ids=lambda cell: cell.name,
)
def test_adapters_are_the_same_at_any_layout(cell: Cell, verifier: Verifier) -> None:
    report = verifier.check(cell)
    assert report.outcome == "passed", report.describe()
    reference = verifier._references[cell.reference_flags]
    assert {name.rpartition(".")[2] for name in reference.gradients} == {"lora_A", "lora_B"}
    learnt = [name for name in reference.parameters if name.endswith("lora_B") and reference.parameters[name].any()]
    assert len(learnt) == len(reference.gradients) // 2
