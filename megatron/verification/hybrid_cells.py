"""Parity test cases of hybrid models: gated delta-net, KDA and Mamba-2 layers among attention, MLP and experts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from megatron.core.transformer import GATED_DELTA_NET, LINEAR_ATTENTION
from megatron.verification.cells import DROPOUT, MODULES, SHAPES, Cell, Layout, make_cell
from megatron.verification.model_cells import ExpertLayout
from megatron.verification.training_cells import FUSED_LORA, LORA, MUON, fully_sharded

_DELTA = (
    *("--experimental-attention-variant", "gated_delta_net", "--linear-key-head-dim", "4"),
    *("--linear-value-head-dim", "6", "--linear-num-key-heads", "4", "--linear-num-value-heads", "8"),
)
_MAMBA = ("--mamba-state-dim", "5", "--mamba-head-dim", "6", "--mamba-num-groups", "4")
_BAMBA = (
    *("--mamba-state-dim", "6", "--mamba-conv-kernel-dim", "3", "--disable-mamba-conv-bias", "--mamba-proj-bias"),
    *("--mamba-dt-lower-limit", "0.01", "--mamba-dt-upper-limit", "0.05"),
)
_BEFORE_GATE = ("--mamba-norm", "before-gate", "--mamba-multipliers", "0.7", "1.2", "0.8", "1.1", "0.9")
_FALCON_H1 = (
    *("--hybrid-override-pattern", "PMP-", "--mamba-state-dim", "6", "--swiglu", *_BEFORE_GATE),
    *("--parallel-attention-multiplier", "0.6", "--parallel-mamba-multiplier", "1.3"),
    *("--mlp-gate-multiplier", "0.7", "--mlp-output-multiplier", "1.4"),
)
_BOTH = ("--hybrid-override-pattern", "PKP-", *_DELTA[2:])
_FEW_GROUPS = (
    ("1", Layout(tp=2, sequence_parallel=True, pp=2)),
    ("2", Layout(tp=4, sequence_parallel=True)),
    ("1", Layout(tp=2, dp=2, recompute=MODULES)),
    ("1", fully_sharded(Layout(tp=2, sequence_parallel=True, dp=2), overlap=True)),
)
"""Layouts with fewer groups of Mamba-2 heads than tensor-parallel ranks, with the number of groups."""
_EXPERTS = (
    *("--num-experts", "8", "--moe-ffn-hidden-size", "12", "--moe-router-topk", "2", "--moe-aux-loss-coeff", "0.1"),
    *("--moe-shared-expert-intermediate-size", "16", "--moe-shared-expert-gate"),
)
HYBRID_SHAPES: dict[str, tuple[str, ...]] = {
    "delta-net": (*SHAPES["qwen"], *_DELTA, "--linear-attention-freq", "2"),
    "qwen3-next": (
        *(*SHAPES["llama"], *_DELTA, "--linear-attention-freq", "4", *_EXPERTS),
        *("--apply-layernorm-1p", "--qk-layernorm", "--rotary-percent", "0.67", "--attention-output-gate"),
    ),
    "gated-attention": (*SHAPES["qwen"], "--attention-output-gate"),
    "mamba": ("--no-position-embedding", *_MAMBA, "--hybrid-override-pattern", "M*M-"),
    "nemotron": (
        *("--normalization", "RMSNorm", "--no-position-embedding", "--disable-bias-linear", "--squared-relu"),
        *(*_MAMBA, "--hybrid-override-pattern", "[mamba,moe,gated_delta_net,attention]"),
        *(*_DELTA[2:], *_EXPERTS, "--untie-embeddings-and-output-weights"),
    ),
    "kimi-linear": (
        *("--swiglu", "--normalization", "RMSNorm", "--disable-bias-linear", "--untie-embeddings-and-output-weights"),
        *("--experimental-attention-variant", "kimi_delta_attention", "--linear-attention-freq", "4", *_DELTA[2:]),
        *("--multi-latent-attention", "--no-position-embedding", "--num-query-groups", "4", "--kv-lora-rank", "10"),
        *("--qk-head-dim", "6", "--qk-pos-emb-head-dim", "3", "--v-head-dim", "8"),
        *("--qk-layernorm", "--latent-norm-epsilon", "1e-3", *_EXPERTS, "--moe-layer-freq", "[0,1,1,1]"),
        *("--moe-router-score-function", "sigmoid", "--moe-router-enable-expert-bias"),
    ),
}
"""Hybrid model shapes by name: the flags that each adds to the base command line."""


def make_hybrid_cell(shape: str, layout: Layout, data: str = "plain", extra: Sequence[str] = ()) -> Cell:
    """Create the test case of a hybrid shape at a layout; ``extra`` flags also apply to the reference."""
    cell = make_cell("gpt2", layout, data, (*HYBRID_SHAPES[shape], *extra))
    further = "".join(f" {flag}" for flag in extra)
    return replace(cell, name=f"{shape} {data} {layout.name}{further}")


_TARGETS = ("q_proj", "in_proj", "out_proj", "down_proj")
_FULL = ("full", "uniform", "1")
_LAYOUTS = (
    Layout(tp=2),
    Layout(tp=2, sequence_parallel=True),
    Layout(tp=4, sequence_parallel=True),
    Layout(pp=2),
    Layout(pp=2, first_stage_layers=1),
    Layout(pp=2, virtual_stages=2),
    Layout(pp=4, schedule="zero-bubble"),
    Layout(pp=4, pipeline_layout="Et|t|t|tL"),
    Layout(dp=2, sharding="optim"),
    Layout(dp=2, sharding="optim_grads", overlap=True),
    fully_sharded(Layout(dp=2)),
    fully_sharded(Layout(tp=2, sequence_parallel=True, dp=2), overlap=True),
    Layout(tp=2, pp=2, dp=2, sequence_parallel=True, sharding="optim_grads", overlap=True),
    Layout(tp=2, sequence_parallel=True, recompute=MODULES),
    Layout(tp=2, recompute=("full", "uniform", "1", "distributed")),
    Layout(tp=2, sequence_parallel=True, pp=2, recompute=_FULL),
    Layout(pp=2, virtual_stages=2, dp=2, recompute=("full", "block", "1")),
)
_CONTEXT_LAYOUTS = (
    Layout(cp=2),
    Layout(cp=4, cp_comm_type="a2a"),
    # Two ranks share a key head, or a group.
    Layout(tp=2, sequence_parallel=True, cp=4, cp_comm_type="all_gather"),
    Layout(cp=4, cp_comm_type="a2a+p2p", cp_levels=(2, 2)),
    Layout(tp=2, sequence_parallel=True, pp=2, cp=2, recompute=MODULES),
    Layout(pp=2, cp=2, recompute=_FULL),
    Layout(cp=2, dp=2, sharding="optim_grads", overlap=True),
    fully_sharded(Layout(tp=2, sequence_parallel=True, cp=2), overlap=True),
)
_STATE_LAYOUTS = tuple(
    replace(layout, passes_states=True)
    for layout in (
        *_CONTEXT_LAYOUTS,
        Layout(cp=8),
        Layout(pp=2, cp=2, dp=2, sharding="optim"),
    )
)
_DENSE_LAYOUTS = (
    Layout(tp=2, sequence_parallel=True, tp_overlap=("--tp-comm-overlap",)),
    Layout(pp=2, offloaded_layers=2),
    Layout(pp=2, virtual_stages=2, offloaded_layers=1, offloads_weights=True),
    Layout(pp=2, pp_overlap=("--delay-wgrad-compute",)),
)
_EXPERT_LAYOUTS = (
    ExpertLayout(dp=2, ep=2),
    ExpertLayout(dp=4, ep=4, sharding="optim", overlap=True),
    ExpertLayout(tp=2, ep=2, etp=1, sequence_parallel=True),
    ExpertLayout(tp=2, dp=2, ep=2, sequence_parallel=True, recompute=("selective", "core_attn", "layernorm", "moe")),
    ExpertLayout(pp=2, dp=2, ep=2, dispatcher="allgather"),
    ExpertLayout(tp=2, pp=2, dp=2, ep=2, sequence_parallel=True, sharding="optim_grads"),
    fully_sharded(ExpertLayout(dp=4, ep=2), overlap=True),
    ExpertLayout(cp=2, ep=2),
    ExpertLayout(tp=2, cp=2, dp=2, ep=4, etp=1, sequence_parallel=True),
)


_LATENT_LAYOUTS = (
    Layout(tp=2),
    Layout(tp=4, sequence_parallel=True),
    Layout(tp=2, sequence_parallel=True, pp=2, recompute=_FULL),
    Layout(tp=2, sequence_parallel=True, recompute=MODULES),
    fully_sharded(Layout(tp=2, sequence_parallel=True, dp=2), overlap=True),
    Layout(tp=2, sequence_parallel=True, cp=2, dp=2, sharding="optim_grads", overlap=True),
    *_EXPERT_LAYOUTS,
)
_LATENT = ("--moe-latent-size", "14")


def hybrid_matrix() -> list[Cell]:
    """Return the test cases of hybrid models that every release must pass."""
    return list(_cells())


def _cells() -> Iterator[Cell]:
    for shape in HYBRID_SHAPES:
        has_experts, is_recurrent = "--num-experts" in HYBRID_SHAPES[shape], shape != "gated-attention"
        for layout in (
            *_LAYOUTS,
            *_CONTEXT_LAYOUTS,
            *(_STATE_LAYOUTS if is_recurrent else ()),
            *(_EXPERT_LAYOUTS if has_experts else _DENSE_LAYOUTS),
        ):
            yield make_hybrid_cell(shape, layout)
        for layout in (Layout(dp=2), Layout(tp=2, sequence_parallel=True, pp=2), Layout(pp=2, recompute=_FULL)):
            yield make_hybrid_cell(shape, layout, "packed")
        for layout in (Layout(cp=2), Layout(tp=2, sequence_parallel=True, pp=2, cp=2, cp_comm_type="a2a")):
            yield make_hybrid_cell(shape, layout, "packed")
            if is_recurrent:
                yield make_hybrid_cell(shape, replace(layout, passes_states=True), "packed")
        if is_recurrent:
            yield make_hybrid_cell(shape, Layout(cp=4, passes_states=True), "packed", DROPOUT)
        yield make_hybrid_cell(shape, Layout(tp=2, cp=2), "uneven", DROPOUT)
        yield make_hybrid_cell(shape, Layout(tp=2, sequence_parallel=True, dp=2), "uneven")
        yield make_hybrid_cell(shape, Layout(tp=2, sequence_parallel=True, pp=2), extra=DROPOUT)
        yield make_hybrid_cell(
            shape, Layout(tp=2, sequence_parallel=True, dp=2, sharding="optim_grads", overlap=True), extra=MUON
        )
    for name in LINEAR_ATTENTION:
        for layout in (*_DENSE_LAYOUTS, Layout(tp=2, sequence_parallel=True, recompute=MODULES)):
            if name != GATED_DELTA_NET:
                yield make_hybrid_cell("delta-net", layout, extra=("--experimental-attention-variant", name))
    for layout in (Layout(tp=2, pp=2, sequence_parallel=True), Layout(cp=2)):
        yield make_hybrid_cell("delta-net", layout, extra=("--mtp-num-layers", "1"))
    for layout in (
        Layout(tp=2, sequence_parallel=True, pp=2),
        Layout(tp=2, cp=2, sharding="optim"),
        Layout(tp=2, sequence_parallel=True, recompute=MODULES),
    ):
        yield make_hybrid_cell("mamba", layout, extra=FUSED_LORA)
        yield make_hybrid_cell("delta-net", layout, "packed", extra=(*LORA, "--lora-target-modules", *_TARGETS))
        yield make_hybrid_cell("mamba", layout, "packed", extra=(*_BOTH, *FUSED_LORA))
    for layout in (*_CONTEXT_LAYOUTS, *_STATE_LAYOUTS):
        yield make_hybrid_cell("mamba", layout, "packed", extra=_BOTH)
    clipped = (*_BOTH, "--qk-clip", "--qk-clip-threshold", "0.05")
    yield make_hybrid_cell("mamba", Layout(tp=2, sequence_parallel=True, cp=2), "packed", extra=clipped)
    yield make_hybrid_cell("nemotron", ExpertLayout(tp=2, ep=2, etp=1, sequence_parallel=True), extra=LORA)
    yield make_hybrid_cell("nemotron", Layout(tp=2, sequence_parallel=True, cp=2, dp=2, sharding="optim"), extra=MUON)
    for layout in _LATENT_LAYOUTS:
        yield make_hybrid_cell("nemotron", layout, extra=_LATENT)
    predicted = (*_LATENT, "--mtp-num-layers", "1")
    for layout in (
        Layout(tp=2, sequence_parallel=True, pp=2),
        Layout(pp=2, cp=2, recompute=_FULL),
        ExpertLayout(tp=2, cp=2, dp=2, ep=4, etp=1, sequence_parallel=True, recompute=MODULES),
        fully_sharded(ExpertLayout(dp=4, ep=2), overlap=True),
    ):
        yield make_hybrid_cell("nemotron", layout, "packed", extra=predicted)
    yield make_hybrid_cell("mamba", Layout(tp=2, pp=2), extra=("--mtp-num-layers", "2", *DROPOUT))
    of_groups = ExpertLayout(tp=2, ep=2, etp=1, sequence_parallel=True)
    yield make_hybrid_cell("nemotron", of_groups, "packed", extra=(*_LATENT, *LORA))
    yield make_hybrid_cell("nemotron", of_groups, "uneven", extra=(*_LATENT, *MUON))
    yield make_hybrid_cell("mamba", Layout(tp=2), extra=("--normalization", "RMSNorm", "--swiglu"))
    for flags in (_BAMBA, _FALCON_H1):
        for groups, layout in _FEW_GROUPS:
            yield make_hybrid_cell("mamba", layout, "packed", extra=("--mamba-num-groups", groups, *flags))
        few = Layout(tp=2, sequence_parallel=True, cp=4, passes_states=True)
        yield make_hybrid_cell("mamba", few, "packed", extra=("--mamba-num-groups", "1", *flags))
    for extra in (_BEFORE_GATE, ("--mamba-norm", "none", *LORA)):
        yield make_hybrid_cell("mamba", Layout(tp=2, sequence_parallel=True, cp=2), "packed", extra=(*_BAMBA, *extra))
