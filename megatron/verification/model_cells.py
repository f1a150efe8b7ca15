"""Parity test cases of MoE, multi-head latent attention (MLA), multi-token prediction (MTP) and attention sinks.

Routing is discrete: if two experts have equal scores, rounding decides, and layouts may differ. In float64 with random
weights, no two scores of these test cases are that close.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from megatron.verification.cells import DROPOUT, EXCHANGES, MODULES, SHAPES, Cell, Layout, make_cell

_EXPERTS = (
    *("--num-experts", "8", "--moe-ffn-hidden-size", "12", "--moe-router-topk", "2"),
    *("--moe-aux-loss-coeff", "0.1", "--moe-z-loss-coeff", "0.01"),
)
EXPERT_SHAPES: dict[str, tuple[str, ...]] = {
    "mixtral": (*SHAPES["llama"], *_EXPERTS),
    "gpt2-experts": (*_EXPERTS, "--moe-layer-freq", "2"),
    "qwen3-moe": (
        *SHAPES["qwen"],
        *_EXPERTS,
        *("--moe-router-pre-softmax", "--moe-router-topk", "3", "--moe-router-load-balancing-type", "seq_aux_loss"),
    ),
    "deepseek-experts": (
        *SHAPES["llama"],
        *_EXPERTS,
        *("--moe-router-score-function", "sigmoid", "--moe-router-num-groups", "4", "--moe-router-group-topk", "2"),
        *("--moe-router-group-score-topk", "2"),
        *("--moe-router-enable-expert-bias", "--moe-router-bias-update-rate", "0.02"),
        *("--moe-router-topk-scaling-factor", "1.5", "--moe-layer-freq", "([0]+[1]*3)"),
        *("--moe-shared-expert-intermediate-size", "16"),
    ),
    "dropping": (
        # Positions are learned: with rotary positions, two equal tokens at the start of a sequence have the same
        # weight.
        *("--swiglu", "--disable-bias-linear"),
        *_EXPERTS,
        *("--moe-expert-capacity-factor", "0.75", "--moe-shared-expert-intermediate-size", "16"),
        *("--moe-shared-expert-gate", "--moe-router-load-balancing-type", "none", "--moe-token-dispatcher-type"),
        "alltoall",
    ),
}
"""MoE model shapes by name: the flags that each adds to the base command line."""
SPARSEMIXER = (
    *("--moe-router-score-function", "sparsemixer", "--moe-router-sparsemixer-eps", "0.4"),
    *("--add-qkv-bias", "--add-proj-bias"),
)
"""SparseMixer routing in which several experts are within reach, and attention biases, as in Phi-MoE."""
SINKHORN = ("--moe-router-load-balancing-type", "sinkhorn", "--moe-aux-loss-coeff", "0")

EXPERT_NORMS = ("--moe-expert-norms", "--moe-router-norm", "--moe-router-expert-scale", "--norm-placement", "sandwich")
"""Norms of experts and of the shared expert, and the router's, as in Gemma 4."""
SQRTSOFTPLUS = ("--moe-router-score-function", "sqrtsoftplus")


@dataclass(frozen=True, kw_only=True)
class ExpertLayout(Layout):
    """Parallel layout of a MoE model over processes."""

    ep: int = 1
    etp: int | None = None
    dispatcher: str = "alltoall"
    expert_flags: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        cut = "" if self.etp is None else f" etp{self.etp}"
        further = "".join(" " + flag.removeprefix("--") for flag in self.expert_flags)
        return f"{super().name} ep{self.ep}{cut} {self.dispatcher}{further}"

    def to_flags(self, num_layers: int = 4) -> tuple[str, ...]:
        """Convert the layout to flags of the training command."""
        flags = ["--expert-model-parallel-size", str(self.ep), "--moe-token-dispatcher-type", self.dispatcher]
        flags += [] if self.etp is None else ["--expert-tensor-parallel-size", str(self.etp)]
        return (*super().to_flags(num_layers), *flags, *self.expert_flags)


def make_expert_cell(shape: str, layout: ExpertLayout, data: str = "plain", extra: Sequence[str] = ()) -> Cell:
    """Create the test case of a MoE shape at a layout; ``extra`` flags also apply to the reference."""
    cell = make_cell("gpt2", layout, data, (*EXPERT_SHAPES[shape], *extra))
    further = "".join(f" {flag}" for flag in extra)
    return replace(cell, name=f"{shape} {data} {layout.name}{further}")


DISPATCHERS = ("alltoall", "allgather")


def expert_matrix() -> list[Cell]:
    """Return the test cases of MoE models that every release must pass, without duplicates."""
    cells = [
        cell
        for family in (_spread, _mixed, _kept, _dropped, _global, _sparsemixer, _sinkhorn, _normalized, _at_random)
        for cell in family()
    ]
    return list({cell.name: cell for cell in cells}.values())


_EXPERT_LAYOUTS = (
    ExpertLayout(),
    ExpertLayout(dp=2, ep=2),
    ExpertLayout(dp=4, ep=2),
    ExpertLayout(dp=4, ep=4),
    ExpertLayout(tp=2, ep=2),
    ExpertLayout(tp=2, etp=1),
    ExpertLayout(tp=2, ep=2, etp=1, sequence_parallel=True),
    ExpertLayout(tp=2, dp=2, ep=2, sequence_parallel=True),
    ExpertLayout(tp=2, dp=2, ep=4, etp=1, sequence_parallel=True),
    ExpertLayout(pp=2, dp=2, ep=2),
    ExpertLayout(cp=2, ep=2),
    ExpertLayout(cp=2, dp=2, ep=4),
    ExpertLayout(cp=2, dp=2, etp=2),
)


def _spread() -> Iterator[Cell]:
    """Yield every shape at every expert-parallel layout, with both dispatchers."""
    for shape, layout, dispatcher in itertools.product(EXPERT_SHAPES, _EXPERT_LAYOUTS, DISPATCHERS):
        if layout.tp > 1 and not layout.sequence_parallel and layout.ep * (layout.etp or layout.tp) > layout.world_size:
            continue
        if shape != "dropping" or dispatcher == "alltoall":
            yield make_expert_cell(shape, replace(layout, dispatcher=dispatcher))


def _mixed() -> Iterator[Cell]:
    """Yield several kinds of parallelism together, with sharded optimizer state."""
    for sharding, shape in itertools.product(("optim", "optim_grads"), ("mixtral", "deepseek-experts")):
        for layout in (
            ExpertLayout(dp=4, ep=2),
            ExpertLayout(dp=4, ep=4),
            ExpertLayout(tp=2, dp=2, ep=2, etp=1, sequence_parallel=True),
            ExpertLayout(tp=2, pp=2, dp=2, ep=2, sequence_parallel=True),
            ExpertLayout(pp=2, virtual_stages=2, dp=4, ep=2),
            ExpertLayout(pp=2, schedule="zero-bubble", dp=2, ep=2),
            ExpertLayout(cp=2, dp=4, ep=4),
            ExpertLayout(tp=2, cp=2, dp=2, ep=4, etp=1, sequence_parallel=True),
        ):
            yield make_expert_cell(shape, replace(layout, sharding=sharding, overlap=True))
    for data in ("packed", "uneven"):
        yield make_expert_cell("mixtral", ExpertLayout(tp=2, dp=2, ep=2, sequence_parallel=True), data)
        yield make_expert_cell("gpt2-experts", ExpertLayout(cp=2, dp=2, ep=4), data)


def _kept() -> Iterator[Cell]:
    """Yield the variants of recomputation."""
    of_parts = ("selective", "core_attn", "layernorm", "moe_act", "shared_experts")
    for recompute in (("selective", "core_attn", "layernorm", "mlp", "moe"), of_parts, ("full", "uniform", "1")):
        for layout in (
            ExpertLayout(dp=2, ep=2),
            ExpertLayout(tp=2, dp=2, ep=2, etp=1, sequence_parallel=True),
            ExpertLayout(pp=2, schedule="zero-bubble", dp=2, ep=2),
            ExpertLayout(pp=2, virtual_stages=2, dp=2, ep=2),
        ):
            yield make_expert_cell("deepseek-experts", replace(layout, recompute=recompute))
    shared = ("--moe-shared-expert-overlap",)
    for layout in (ExpertLayout(dp=2, ep=2), ExpertLayout(tp=2, dp=2, ep=4, etp=1, sequence_parallel=True)):
        yield make_expert_cell("deepseek-experts", replace(layout, expert_flags=shared), extra=SQRTSOFTPLUS)


def _dropped() -> Iterator[Cell]:
    """Yield experts with a capacity factor, with and without padding, with both drop policies."""
    by_position = ("--moe-token-drop-policy", "position")
    padded = ("--moe-pad-expert-input-to-capacity",)
    for extra, flags in itertools.product(((), by_position), ((), padded)):
        for layout in (
            ExpertLayout(dp=2, ep=2),
            ExpertLayout(tp=2, ep=2, etp=1, sequence_parallel=True),
            ExpertLayout(cp=2, dp=2, ep=4),
        ):
            yield make_expert_cell("dropping", replace(layout, expert_flags=flags), extra=extra)


def _global() -> Iterator[Cell]:
    """Yield the global-batch auxiliary loss: the reference, like all ranks, takes the batch as one micro-batch."""
    extra = ("--moe-router-load-balancing-type", "global_aux_loss", "--micro-batch-size", "8")
    for layout in (ExpertLayout(dp=2, ep=2), ExpertLayout(dp=4, ep=2), ExpertLayout(tp=2, cp=2, dp=2, ep=2)):
        flags = ("--micro-batch-size", str(8 // layout.dp))
        yield make_expert_cell("mixtral", replace(layout, expert_flags=flags), extra=extra)


def _normalized() -> Iterator[Cell]:
    """Yield experts whose inputs and outputs are normalized apart from the shared expert's."""
    whole = ExpertLayout(tp=2, cp=2, ep=4, etp=1, sequence_parallel=True)
    for layout in (
        ExpertLayout(tp=2, etp=1, dispatcher="allgather"),
        ExpertLayout(tp=2, pp=2, dp=2, ep=2, sharding="optim_grads", overlap=True),
        replace(whole, recompute=("selective", "core_attn", "layernorm", "moe")),
        replace(whole, recompute=("full", "uniform", "1"), expert_flags=("--moe-shared-expert-overlap",)),
    ):
        yield make_expert_cell("deepseek-experts", layout, extra=EXPERT_NORMS)


def _sparsemixer() -> Iterator[Cell]:
    """Yield SparseMixer routing at several kinds of layouts."""
    for layout in (
        ExpertLayout(tp=2, pp=2, dp=2, ep=2, sequence_parallel=True),
        ExpertLayout(tp=2, cp=2, dp=2, ep=4, etp=1, sequence_parallel=True),
        ExpertLayout(dp=2, ep=2, recompute=("selective", "core_attn", "moe"), dispatcher="allgather"),
    ):
        yield make_expert_cell("mixtral", layout, extra=SPARSEMIXER)


def _sinkhorn() -> Iterator[Cell]:
    """Yield Sinkhorn routing, which balances the tokens of all tensor- and context-parallel ranks together."""
    for layout, topk in (
        (ExpertLayout(tp=2, pp=2, dp=2, ep=2, sequence_parallel=True), "2"),
        (ExpertLayout(tp=2, cp=2, dp=2, ep=4, etp=1, sequence_parallel=True), "2"),
        (ExpertLayout(tp=2, cp=2), "1"),
        (ExpertLayout(dp=2, ep=2, recompute=("selective", "core_attn", "moe"), dispatcher="allgather"), "2"),
    ):
        yield make_expert_cell("mixtral", layout, extra=(*SINKHORN, "--moe-router-topk", topk))


def _at_random() -> Iterator[Cell]:
    """Yield random routing, which must be the same in every layout."""
    for shape in ("mixtral", "deepseek-experts"):
        for layout in (
            ExpertLayout(tp=2, dp=2, ep=2, sequence_parallel=True),
            ExpertLayout(tp=2, etp=1, dispatcher="allgather", recompute=("full", "uniform", "1")),
            ExpertLayout(pp=2, virtual_stages=2, dp=2, ep=2),
            ExpertLayout(cp=2, dp=2, ep=4, recompute=("selective", "core_attn", "moe")),
        ):
            yield make_expert_cell(shape, layout, extra=("--moe-router-force-load-balancing",))


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
        *("--mscale", "0.8", "--mscale-all-dim", "0.5", "--latent-norm-epsilon", "0.1"),
        *("--mtp-num-layers", "1", "--untie-embeddings-and-output-weights"),
    ),
}
"""MLA model shapes by name: the flags that each adds to the base command line."""


_SPARSE = (
    *("--experimental-attention-variant", "dsa", "--dsa-indexer-n-heads", "5", "--dsa-indexer-head-dim", "7"),
    *("--dsa-indexer-topk", "6", "--dsa-indexer-loss-coeff", "0.3"),
)
SPARSE_SHAPES: dict[str, tuple[str, ...]] = {
    "sparse": (*LATENT_SHAPES["latent"], *_SPARSE, "--mtp-num-layers", "1"),
    "sparse-shared": (
        *(*LATENT_SHAPES["latent-wide-values"], *_SPARSE, "--dsa-indexer-layer-freq", "2"),
        "--dsa-indexer-use-sparse-loss",
    ),
}
"""Shapes of DeepSeek sparse attention (DSA): every layer has an indexer, or every second one; with both losses."""


def make_latent_cell(shape: str, layout: Layout, data: str = "plain", extra: Sequence[str] = ()) -> Cell:
    """Create the test case of an MLA shape at a layout; ``extra`` flags also apply to the reference."""
    cell = make_cell("gpt2", layout, data, (*(LATENT_SHAPES | SPARSE_SHAPES)[shape], *extra))
    further = "".join(f" {flag}" for flag in extra)
    return replace(cell, name=f"{shape} {data} {layout.name}{further}")


_LATENT_LAYOUTS = (
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


_SPARSE_LAYOUTS = (
    *(layout for layout in _LATENT_LAYOUTS if layout.cp == 1),
    Layout(tp=2, sequence_parallel=True, dp=2, sharding="optim_grads_params", overlap=True),
    Layout(dp=2, sharding="optim_grads", overlap=True),
    Layout(tp=2, sequence_parallel=True, recompute=("selective", "core_attn", "mla_up_proj")),
    Layout(pp=2, recompute=("full", "block", "1")),
)


_SPARSE_CONTEXT_LAYOUTS = tuple(
    replace(layout, cp_comm_type="all_gather")
    for layout in (
        Layout(cp=2),
        Layout(tp=2, sequence_parallel=True, cp=2, dp=2, sharding="optim_grads", overlap=True),
        Layout(cp=4, recompute=("selective", "core_attn", "mla_up_proj")),
        Layout(tp=2, pp=2, cp=2, recompute=("full", "uniform", "1")),
        Layout(cp=2, dp=2, sharding="optim_grads_params", overlap=True),
    )
)


def latent_matrix() -> list[Cell]:
    """Return the test cases of MLA models, with DSA too, that every release must pass."""
    return [*_latent_cells(), *_sparse_cells()]


def _sparse_cells() -> Iterator[Cell]:
    for shape in SPARSE_SHAPES:
        for layout in _SPARSE_LAYOUTS:
            yield make_latent_cell(shape, layout)
        for layout in (Layout(dp=2), Layout(tp=2, pp=2, sequence_parallel=True)):
            yield make_latent_cell(shape, layout, "packed")
        for layout in _SPARSE_CONTEXT_LAYOUTS:
            yield make_latent_cell(shape, layout)
        for layout in _SPARSE_CONTEXT_LAYOUTS[:2]:
            yield make_latent_cell(shape, layout, "packed", extra=DROPOUT)
        yield make_latent_cell(shape, _SPARSE_CONTEXT_LAYOUTS[0], extra=("--dsa-indexer-topk", "64"))
    yield make_latent_cell("sparse", Layout(pp=2, virtual_stages=2), extra=DROPOUT)
    yield make_latent_cell("sparse", Layout(tp=2, dp=2, overlap=True), extra=("--dsa-indexer-loss-coeff", "0"))
    for layout in (ExpertLayout(pp=2, dp=2, ep=2), ExpertLayout(tp=2, ep=2, etp=1, sequence_parallel=True)):
        yield make_expert_cell("deepseek-experts", layout, extra=SPARSE_SHAPES["sparse"])


def _latent_cells() -> Iterator[Cell]:
    for shape in LATENT_SHAPES:
        for layout in _LATENT_LAYOUTS:
            yield make_latent_cell(shape, layout)
    for layout in (Layout(cp=2), Layout(tp=2, pp=2, sequence_parallel=True)):
        yield make_latent_cell("latent", layout, "packed")
        yield make_latent_cell("latent-yarn", layout, extra=DROPOUT)
    sharded = Layout(tp=2, sequence_parallel=True, cp=2)
    yield make_latent_cell("latent", sharded, extra=("--position-embedding-type", "none"))
    for expert_layout in (ExpertLayout(pp=2, dp=2, ep=2), ExpertLayout(tp=2, ep=2, etp=1, sequence_parallel=True)):
        yield make_expert_cell(
            "deepseek-experts", expert_layout, extra=(*LATENT_SHAPES["latent"], "--mtp-num-layers", "1")
        )


_ONE_MTP_LAYER = ("--mtp-num-layers", "1", "--mtp-loss-scaling-factor", "0.5")
_TWO_MTP_LAYERS = ("--mtp-num-layers", "2", "--mtp-loss-scaling-factor", "0.5")
PREDICTION_SHAPES: dict[str, tuple[str, ...]] = {
    "llama-mtp": (*SHAPES["llama"], *_ONE_MTP_LAYER),
    "qwen-mtp": (*SHAPES["qwen"], *_TWO_MTP_LAYERS),
    "gemma3-mtp": (*SHAPES["gemma3"], *_ONE_MTP_LAYER),
}
"""MTP model shapes by name: the flags that each adds to the base command line. The second shape has tied embeddings."""


def make_prediction_cell(shape: str, layout: Layout, data: str = "plain", extra: Sequence[str] = ()) -> Cell:
    """Create the test case of an MTP shape at a layout; ``extra`` flags also apply to the reference."""
    cell = make_cell("gpt2", layout, data, (*PREDICTION_SHAPES[shape], *extra))
    further = "".join(f" {flag}" for flag in extra)
    return replace(cell, name=f"{shape} {data} {layout.name}{further}")


_PREDICTION_LAYOUTS = (
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
    return list(_prediction_cells())


def _prediction_cells() -> Iterator[Cell]:
    for shape in PREDICTION_SHAPES:
        for layout in _PREDICTION_LAYOUTS:
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
            yield make_expert_cell(shape, layout, extra=_ONE_MTP_LAYER)


_GROUPED_QUERIES = (
    *("--normalization", "RMSNorm", "--position-embedding-type", "rope", "--untie-embeddings-and-output-weights"),
    *("--group-query-attention", "--num-query-groups", "2"),
)
_WINDOWS = ("--window-size", "4,0", "--window-attn-skip-freq", "2")
ATTENTION_SHAPES: dict[str, tuple[str, ...]] = {
    "sinks": (*_GROUPED_QUERIES, *_WINDOWS, "--swiglu", "--softmax-type", "learnable"),
    "off-by-one": (*_GROUPED_QUERIES, "--swiglu", "--softmax-type", "off-by-one"),
    "no-rope": (*_GROUPED_QUERIES, "--swiglu", "--disable-bias-linear", "--no-rope-freq", "2"),
    "gpt-oss": (
        *(*_GROUPED_QUERIES, *_WINDOWS, "--softmax-type", "learnable"),
        *("--quick-geglu", "--glu-linear-offset", "1", "--activation-func-clamp-value", "0.3"),
        *("--rope-type", "yarn", "--rotary-scaling-factor", "4", "--original-max-position-embeddings", "8"),
        *("--no-yarn-correction-range-round-to-int", "--beta-fast", "4"),
        *("--num-experts", "8", "--moe-ffn-hidden-size", "12", "--moe-router-topk", "3"),
        *("--moe-aux-loss-coeff", "0.1"),
    ),
}
"""Attention shapes by name: the flags that each adds to the base command line."""


def make_attention_cell(shape: str, layout: Layout, data: str = "plain", extra: Sequence[str] = ()) -> Cell:
    """Create the test case of one of these shapes at a layout; ``extra`` flags also apply to the reference."""
    cell = make_cell("gpt2", layout, data, (*ATTENTION_SHAPES[shape], *extra))
    further = "".join(f" {flag}" for flag in extra)
    return replace(cell, name=f"{shape} {data} {layout.name}{further}")


_ATTENTION_LAYOUTS = (
    Layout(tp=2),
    Layout(tp=2, sequence_parallel=True),
    Layout(pp=2),
    Layout(cp=2),
    Layout(cp=2, cp_comm_type="all_gather"),
    Layout(cp=2, cp_comm_type="a2a"),
    Layout(tp=2, pp=2, cp=2, sequence_parallel=True),
)
_MORE_ATTENTION_LAYOUTS = (
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
_ATTENTION_EXPERT_LAYOUTS = (
    ExpertLayout(tp=2, pp=2, sequence_parallel=True),
    ExpertLayout(dp=2, ep=2),
    ExpertLayout(tp=2, ep=2, etp=1, sequence_parallel=True),
    ExpertLayout(tp=2, etp=2),
    ExpertLayout(pp=2, dp=2, ep=2),
    ExpertLayout(cp=2, ep=2, cp_comm_type="all_gather"),
)


def attention_matrix() -> list[Cell]:
    return list(_attention_cells())


def _attention_cells() -> Iterator[Cell]:
    for shape in ("sinks", "off-by-one", "no-rope"):
        for layout in _ATTENTION_LAYOUTS:
            yield make_attention_cell(shape, layout)
    for layout in _MORE_ATTENTION_LAYOUTS:
        yield make_attention_cell("sinks", layout)
    for expert_layout in _ATTENTION_EXPERT_LAYOUTS:
        yield make_attention_cell("gpt-oss", expert_layout)
    for layout in (Layout(cp=2), Layout(cp=2, cp_comm_type="a2a"), Layout(tp=2, pp=2, sequence_parallel=True)):
        yield make_attention_cell("sinks", layout, "packed")
        yield make_attention_cell("sinks", layout, extra=DROPOUT)
    yield make_attention_cell("no-rope", Layout(cp=2), "packed")
    yield make_attention_cell("no-rope", Layout(pp=2), extra=("--mtp-num-layers", "1"))
    latent = Layout(tp=2, sequence_parallel=True, cp=2)
    yield make_latent_cell("latent", latent, extra=("--softmax-type", "learnable"))
