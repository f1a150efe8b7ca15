"""Models and optimizers in float64: the same losses, gradients and weights at any layout."""

from __future__ import annotations

import pytest

from megatron.verification.cells import DROPOUT, MODULES, Cell, Layout, make_cell
from megatron.verification.hybrid_cells import hybrid_matrix, make_hybrid_cell
from megatron.verification.model_cells import (
    ExpertLayout,
    attention_matrix,
    latent_matrix,
    make_attention_cell,
    make_expert_cell,
    make_latent_cell,
    make_prediction_cell,
    prediction_matrix,
)
from megatron.verification.training_cells import (
    ATTENTION_LORA,
    CLIPPING,
    FUSED_LORA,
    GROUPS,
    HEAD_MUP,
    LORA,
    MUON,
    MUON_WITH_LION,
    MUP,
    SPLIT_LORA,
    Z_LOSS,
    adapter_matrix,
    fully_sharded,
    hybrid,
    odd_matrix,
    optimizer_matrix,
    recipe_matrix,
    sharding_matrix,
    with_optimizer_on_host,
)
from megatron.verification.verifier import Verifier
from tests.distributed.verification.small_cells import small

CELLS = (
    make_attention_cell("sinks", Layout(cp=2, cp_comm_type="a2a")),
    make_attention_cell("gpt-oss", ExpertLayout(tp=2, pp=2, sequence_parallel=True)),
)


@pytest.mark.default(1)
@pytest.mark.parametrize("cell", [*map(small, CELLS)], ids=lambda cell: cell.name)
def test_such_a_model_is_the_same_at_any_layout(cell: Cell, verifier: Verifier) -> None:
    report = verifier.check(cell)
    assert report.outcome == "passed", report.describe()


@pytest.mark.long
@pytest.mark.parametrize("cell", attention_matrix(), ids=lambda cell: cell.name)
def test_every_layout_of_such_models_passes(cell: Cell, verifier: Verifier) -> None:
    report = verifier.check(cell)
    assert report.outcome == "passed", report.describe()


LATENT_CELLS = (
    make_latent_cell("latent", Layout(tp=2, pp=2, sequence_parallel=True)),
    make_latent_cell("latent-wide-values", Layout(cp=2)),
)


@pytest.mark.default(1)
@pytest.mark.parametrize("cell", [*map(small, LATENT_CELLS)], ids=lambda cell: cell.name)
def test_latent_attention_is_the_same_at_any_layout(cell: Cell, verifier: Verifier) -> None:
    report = verifier.check(cell)
    assert report.outcome == "passed", report.describe()


@pytest.mark.long
@pytest.mark.parametrize("cell", latent_matrix(), ids=lambda cell: cell.name)
def test_every_layout_of_latent_attention_passes(cell: Cell, verifier: Verifier) -> None:
    report = verifier.check(cell)
    assert report.outcome == "passed", report.describe()


HYBRID_CELLS = (
    make_hybrid_cell("delta-net", Layout(tp=2, pp=2, sequence_parallel=True), "packed"),
    make_hybrid_cell("nemotron", ExpertLayout(tp=2, ep=2, etp=1, sequence_parallel=True)),
    make_hybrid_cell("kimi-linear", Layout(tp=2, pp=2, sequence_parallel=True), "packed"),
    make_hybrid_cell("nemotron", Layout(cp=4, cp_comm_type="a2a"), "packed"),
    make_hybrid_cell("nemotron", Layout(tp=2, sequence_parallel=True, cp=2, passes_states=True), "packed"),
    make_hybrid_cell("mamba", Layout(tp=2, cp=2, sharding="optim"), extra=FUSED_LORA),
    make_hybrid_cell(
        "mamba", Layout(tp=2, sequence_parallel=True, recompute=("selective", "core_attn", "layernorm", "mlp"))
    ),
)


@pytest.mark.default(1)
@pytest.mark.parametrize("cell", [*map(small, HYBRID_CELLS)], ids=lambda cell: cell.name)
def test_hybrid_models_are_the_same_at_any_layout(cell: Cell, verifier: Verifier) -> None:
    report = verifier.check(cell)
    assert report.outcome == "passed", report.describe()


@pytest.mark.long
@pytest.mark.parametrize("cell", hybrid_matrix(), ids=lambda cell: cell.name)
def test_every_layout_of_hybrid_models_passes(cell: Cell, verifier: Verifier) -> None:
    report = verifier.check(cell)
    assert report.outcome == "passed", report.describe()


PREDICTION_CELLS = (
    make_prediction_cell("llama-mtp", Layout(tp=2, pp=2, sequence_parallel=True)),
    make_prediction_cell("qwen-mtp", Layout(cp=2), "packed"),
    make_prediction_cell("qwen-mtp", Layout(pp=2, schedule="zero-bubble")),
    make_prediction_cell("qwen-mtp", Layout(tp=2, pp=2, sequence_parallel=True), extra=DROPOUT),
)


@pytest.mark.default(1)
@pytest.mark.parametrize(
    "cell",
    [*map(small, PREDICTION_CELLS[:2]), *(pytest.param(cell, marks=pytest.mark.long) for cell in PREDICTION_CELLS[2:])],
    ids=lambda cell: cell.name,
)
def test_further_tokens_are_predicted_the_same_at_any_layout(cell: Cell, verifier: Verifier) -> None:
    report = verifier.check(cell)
    assert report.outcome == "passed", report.describe()
    gradients = verifier.reference(cell).gradients
    assert gradients["mtp.layers.0.eh_proj.weight"].any()


@pytest.mark.long
@pytest.mark.parametrize("cell", prediction_matrix(), ids=lambda cell: cell.name)
def test_every_layout_of_further_tokens_passes(cell: Cell, verifier: Verifier) -> None:
    report = verifier.check(cell)
    assert report.outcome == "passed", report.describe()


SPREAD = ExpertLayout(tp=2, dp=2, ep=2, sequence_parallel=True)
ADAPTER_CELLS = (
    make_cell("gpt2", Layout(pp=2, virtual_stages=2, offloaded_layers=1, offloads_weights=True), extra=FUSED_LORA),
    make_cell("gpt2", Layout(dp=2, sharding="optim_grads", overlap=True), extra=FUSED_LORA),
    make_cell("llama", Layout(tp=2, sequence_parallel=True, pp=2, recompute=MODULES), extra=SPLIT_LORA),
    make_cell("llama", Layout(cp=2), "packed", extra=SPLIT_LORA),
    make_expert_cell("mixtral", SPREAD, extra=ATTENTION_LORA),
    make_expert_cell("mixtral", ExpertLayout(tp=2, dp=2, ep=2), extra=LORA),
)
FURTHER = [cell for cell in adapter_matrix() if cell not in ADAPTER_CELLS]


@pytest.mark.full
@pytest.mark.parametrize(
    "cell",
    [*map(small, ADAPTER_CELLS), *(pytest.param(cell, marks=pytest.mark.long) for cell in FURTHER)],
    ids=lambda cell: cell.name,
)
def test_adapters_are_the_same_at_any_layout(cell: Cell, verifier: Verifier) -> None:
    report = verifier.check(cell)
    assert report.outcome == "passed", report.describe()
    reference = verifier.reference(cell)
    assert {name.rpartition(".")[2] for name in reference.gradients} == {"lora_A", "lora_B"}
    learned = [name for name in reference.parameters if name.endswith("lora_B") and reference.parameters[name].any()]
    assert len(learned) == len(reference.gradients) // 2


DEFAULT = ("qwen-mtp packed tp1 pp1 cp3-a2a", "mixtral plain", "gpt2 plain tp1 pp3 ")


@pytest.mark.parametrize(
    "cell",
    [pytest.param(cell, marks=() if cell.name.startswith(DEFAULT) else pytest.mark.long) for cell in odd_matrix()],
    ids=lambda cell: cell.name,
)
def test_an_odd_layout_passes(cell: Cell, verifier: Verifier) -> None:
    report = verifier.check(cell)
    assert report.outcome == "passed", report.describe()


FULL = ("full", "uniform", "1")
SHARDED_CELLS = (
    make_cell("gpt2", fully_sharded(Layout(tp=2, sequence_parallel=True, pp=2, dp=2, recompute=FULL)), extra=DROPOUT),
    make_cell("llama", fully_sharded(Layout(pp=2, virtual_stages=2, cp=2), overlap=True), "uneven"),
    hybrid(make_cell("gpt2", fully_sharded(Layout(dp=4)), "uneven")),
    make_expert_cell("deepseek-experts", fully_sharded(ExpertLayout(dp=4, ep=2), overlap=True)),
)


@pytest.mark.default(1)
@pytest.mark.parametrize("cell", [*map(small, SHARDED_CELLS)], ids=lambda cell: cell.name)
def test_sharded_weights_are_the_same_at_any_layout(cell: Cell, verifier: Verifier) -> None:
    report = verifier.check(cell)
    assert report.outcome == "passed", report.describe()


@pytest.mark.long
@pytest.mark.parametrize("cell", sharding_matrix(), ids=lambda cell: cell.name)
def test_every_layout_of_sharded_weights_passes(cell: Cell, verifier: Verifier) -> None:
    report = verifier.check(cell)
    assert report.outcome == "passed", report.describe()


SHARDED = Layout(tp=2, sequence_parallel=True, dp=2, sharding="optim_grads", overlap=True)
OPTIMIZER_CELLS = (
    make_cell("llama", SHARDED, extra=MUON),
    make_expert_cell("mixtral", ExpertLayout(tp=2, dp=2, ep=2, sequence_parallel=True, sharding="optim"), extra=MUON),
    make_cell("llama", Layout(pp=2, dp=2), extra=MUON_WITH_LION),
)
OPTIMIZER_FURTHER = [cell for cell in optimizer_matrix() if cell not in OPTIMIZER_CELLS]


@pytest.mark.default(1)
@pytest.mark.parametrize(
    "cell",
    [*map(small, OPTIMIZER_CELLS), *(pytest.param(cell, marks=pytest.mark.long) for cell in OPTIMIZER_FURTHER)],
    ids=lambda cell: cell.name,
)
def test_an_optimizer_makes_the_same_weights_at_any_layout(cell: Cell, verifier: Verifier) -> None:
    report = verifier.check(cell)
    assert report.outcome == "passed", report.describe()


@pytest.mark.full
def test_muon_makes_other_weights_than_adam(verifier: Verifier) -> None:
    layout = Layout(tp=2)
    verifier.check(make_cell("llama", layout, extra=MUON))
    muon = verifier.reference(make_cell("llama", layout, extra=MUON)).parameters
    verifier.check(make_cell("llama", layout))
    adam = verifier.reference(make_cell("llama", layout)).parameters
    others = {name for name in muon if not (muon[name] - adam[name]).any()}
    # Adam updates those of the first step from the same gradients; then the losses differ, and so do all weights.
    assert others == set()


RECIPE_CELLS = (
    make_cell("gpt2", Layout(tp=2, cp=2), "packed", extra=(*Z_LOSS, *MUP, *HEAD_MUP)),
    make_cell("gpt2", Layout(tp=2, pp=2), "uneven", extra=(*Z_LOSS, *GROUPS, *CLIPPING)),
    with_optimizer_on_host(
        make_cell("gpt2", Layout(tp=2, sequence_parallel=True, pp=2, dp=2, sharding="optim_grads", overlap=True))
    ),
)
ELSEWHERE = (*optimizer_matrix(), *adapter_matrix())
RECIPE_FURTHER = [cell for cell in recipe_matrix() if cell not in (*RECIPE_CELLS, *ELSEWHERE)]


@pytest.mark.full
@pytest.mark.parametrize(
    "cell",
    [*map(small, RECIPE_CELLS), *(pytest.param(cell, marks=pytest.mark.long) for cell in RECIPE_FURTHER)],
    ids=lambda cell: cell.name,
)
def test_a_recipe_makes_the_same_weights_at_any_layout(cell: Cell, verifier: Verifier) -> None:
    report = verifier.check(cell)
    assert report.outcome == "passed", report.describe()
