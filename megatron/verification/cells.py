"""Parity test cases: the layouts that are verified, as command lines."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

SHAPES: dict[str, tuple[str, ...]] = {
    "gpt2": (),
    "gpt2-untied": ("--untie-embeddings-and-output-weights",),
    "llama": (
        *("--swiglu", "--normalization", "RMSNorm", "--position-embedding-type", "rope", "--disable-bias-linear"),
        *("--untie-embeddings-and-output-weights", "--group-query-attention", "--num-query-groups", "2"),
    ),
    "qwen": (
        *("--swiglu", "--normalization", "RMSNorm", "--position-embedding-type", "rope", "--disable-bias-linear"),
        *("--add-qkv-bias", "--group-query-attention", "--num-query-groups", "2", "--qk-layernorm"),
    ),
    "llama-one-group": (
        *("--swiglu", "--normalization", "RMSNorm", "--position-embedding-type", "rope", "--disable-bias-linear"),
        *("--untie-embeddings-and-output-weights", "--group-query-attention", "--num-query-groups", "1"),
    ),
    "mistral": (
        *("--swiglu", "--normalization", "RMSNorm", "--position-embedding-type", "rope", "--disable-bias-linear"),
        *("--group-query-attention", "--num-query-groups", "2", "--window-size", "4,0"),
        *("--window-attn-skip-freq", "2", "--rope-type", "yarn", "--rotary-scaling-factor", "4"),
        *("--original-max-position-embeddings", "4", "--attention-temperature-beta", "0.3"),
    ),
    "olmo2": (
        *("--swiglu", "--normalization", "RMSNorm", "--position-embedding-type", "rope", "--disable-bias-linear"),
        *("--norm-placement", "post", "--qk-layernorm", "--qk-layernorm-across-heads"),
        *("--group-query-attention", "--num-query-groups", "2", "--untie-embeddings-and-output-weights"),
    ),
    "gemma2": (
        *("--geglu", "--normalization", "RMSNorm", "--position-embedding-type", "rope", "--disable-bias-linear"),
        *("--norm-placement", "sandwich", "--apply-layernorm-1p", "--scale-embeddings", "--query-pre-attn-scalar", "9"),
        *("--attn-logit-softcapping", "2", "--final-logit-softcapping", "3"),
        *("--group-query-attention", "--num-query-groups", "2", "--window-size", "4,0", "--window-attn-skip-freq", "2"),
    ),
    "gemma3": (
        *("--geglu", "--normalization", "RMSNorm", "--position-embedding-type", "rope", "--disable-bias-linear"),
        *("--norm-placement", "sandwich", "--apply-layernorm-1p", "--scale-embeddings", "--qk-layernorm"),
        *("--group-query-attention", "--num-query-groups", "2", "--window-size", "4,0"),
        *("--window-attn-skip-freq", "3", "--rotary-base-local", "500"),
    ),
    "gemma4": (
        *("--geglu", "--normalization", "RMSNorm", "--position-embedding-type", "rope", "--disable-bias-linear"),
        *("--norm-placement", "sandwich", "--scale-embeddings", "--qk-layernorm", "--v-layernorm", "--layer-scalar"),
        *("--group-query-attention", "--num-query-groups", "2", "--window-size", "4,0", "--window-attn-skip-freq", "2"),
        *("--global-kv-channels", "8", "--global-num-query-groups", "1", "--attention-k-eq-v", "--softmax-scale", "1"),
        *("--rotary-base-local", "500", "--rope-type", "proportional", "--rotary-percent", "0.5"),
    ),
    "neox": (
        *("--position-embedding-type", "rope", "--rotary-percent", "0.67", "--use-parallel-residual"),
        "--untie-embeddings-and-output-weights",
    ),
    "cohere": (
        *("--swiglu", "--position-embedding-type", "rope", "--rotary-interleaved", "--disable-bias-linear"),
        *("--use-parallel-residual", "--shared-parallel-norm", "--norm-parameters", "weight"),
        *("--group-query-attention", "--num-query-groups", "2", "--clip-qkv", "0.6", "--softmax-scale", "0.7"),
        *("--embedding-multiplier", "3", "--residual-multiplier", "0.6", "--logit-scale", "0.4"),
    ),
    "apertus": (
        *("--xielu", "--normalization", "RMSNorm", "--position-embedding-type", "rope", "--disable-bias-linear"),
        *("--group-query-attention", "--num-query-groups", "2", "--qk-layernorm", "--qk-layernorm-after-rope"),
        *("--rotary-ntk-alpha", "3", "--untie-embeddings-and-output-weights"),
    ),
    "bloom": (
        *("--position-embedding-type", "alibi", "--add-embedding-norm", "--apply-residual-connection-post-layernorm"),
        *("--group-query-attention", "--num-query-groups", "2"),
    ),
}
"""Model shapes by name: the flags that each adds to the base command line."""
END_PARTS = (
    *("--untie-embeddings-and-output-weights", "--add-output-bias", "--add-embedding-norm"),
    *("--disable-proj-bias", "--normalization", "RMSNorm", "--norm-parameters", "none"),
)
"""A norm of the embeddings, a bias of the output layer, none of attention's output, and norms without parameters."""
POSITION_PARTS = (
    *("--position-embedding-type", "sinusoidal", "--position-embedding-offset", "2", "--scale-embeddings"),
    *("--activation-func", "relu"),
)
"""Sinusoidal positions from row 2 on, and ReLU, as in XGLM and OPT."""
FAMILY_SHAPES = ("mistral", "neox", "olmo2", "gemma2", "gemma3", "gemma4", "cohere", "bloom", "apertus")
"""Shapes of further model families, each with the features of its family."""

DATA: dict[str, tuple[str, ...]] = {
    "plain": (),
    "packed": ("--reset-position-ids", "--reset-attention-mask", "--eod-mask-loss"),
    "uneven": ("--calculate-per-token-loss",),
}
"""Kinds of samples: whole ones, packed documents, and very different numbers of tokens that count in the loss."""

BASE_FLAGS: tuple[str, ...] = (
    *("--num-layers", "4", "--hidden-size", "24", "--num-attention-heads", "4", "--ffn-hidden-size", "40"),
    *("--seq-length", "16", "--max-position-embeddings", "16", "--init-method-std", "0.2"),
    *("--make-vocab-size-divisible-by", "4", "--tokenizer-type", "NullTokenizer", "--vocab-size", "52"),
    *("--micro-batch-size", "1", "--global-batch-size", "8", "--train-iters", "3", "--mock-data"),
    *("--lr", "1e-2", "--lr-decay-style", "constant", "--weight-decay", "0.1", "--clip-grad", "1.0"),
    # The gradient of a key bias is only rounding error. It is small relative to this epsilon, so the bias does not
    # move.
    *("--adam-eps", "1e-5"),
    *("--hidden-dropout", "0", "--attention-dropout", "0", "--eval-iters", "0"),
    *("--distributed-backend", "gloo", "--seed", "1234"),
)
"""The tiny model of every test case; later flags override earlier ones."""


@dataclass(frozen=True)
class Cell:
    """Test case: the flags of the reference run on one process, and the flags that the layout adds."""

    name: str
    world_size: int
    model_flags: tuple[str, ...]
    layout_flags: tuple[str, ...]
    data: str = "plain"

    @property
    def reference_flags(self) -> tuple[str, ...]:
        """Return the command line of the reference run on one process."""
        return (*BASE_FLAGS, *self.model_flags, *DATA[self.data])

    @property
    def flags(self) -> tuple[str, ...]:
        return (*self.reference_flags, *self.layout_flags)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Parallel layout of a model over processes."""

    tp: int = 1
    sequence_parallel: bool = False
    pp: int = 1
    virtual_stages: int = 1
    schedule: str | None = None
    pipeline_layout: str | None = None
    first_stage_layers: int | None = None
    cp: int = 1
    cp_comm_type: str = "p2p"
    cp_levels: tuple[int, int] | None = None
    passes_states: bool = False
    dp: int = 1
    sharding: str = "no_shard"
    overlap: bool = False
    tp_overlap: tuple[str, ...] = ()
    pp_overlap: tuple[str, ...] = ()
    recompute: tuple[str, ...] = ()
    offloaded_layers: int = 0
    offloads_weights: bool = False

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.cp * self.dp

    @property
    def name(self) -> str:
        parts = [f"tp{self.tp}" + ("sp" if self.sequence_parallel else "")]
        parts.append(f"pp{self.pp}" + (f"v{self.virtual_stages}" if self.virtual_stages > 1 else ""))
        parts += [self.schedule] if self.schedule else []
        parts += [f"[{self.pipeline_layout}]"] if self.pipeline_layout else []
        parts += [f"first{self.first_stage_layers}"] if self.first_stage_layers else []
        levels = "" if self.cp_levels is None else "x".join(map(str, self.cp_levels))
        parts.append(f"cp{self.cp}" + (f"-{self.cp_comm_type}{levels}" if self.cp > 1 else ""))
        parts += ["states"] if self.passes_states else []
        parts.append(f"dp{self.dp}" + (f"-{self.sharding}" if self.sharding != "no_shard" else ""))
        parts += ["overlap"] if self.overlap else []
        parts += [flag.removeprefix("--") for flag in (*self.tp_overlap, *self.pp_overlap)]
        parts += ["recompute-" + "-".join(self.recompute)] if self.recompute else []
        parts += [f"offload-{self.offloaded_layers}"] if self.offloaded_layers else []
        parts += ["weights"] if self.offloads_weights else []
        return " ".join(parts)

    def to_flags(self, num_layers: int = 4) -> tuple[str, ...]:
        """Convert the layout to flags of the training command."""
        flags = ["--tensor-model-parallel-size", str(self.tp), "--pipeline-model-parallel-size", str(self.pp)]
        flags += ["--context-parallel-size", str(self.cp)]
        flags += ["--sequence-parallel"] if self.sequence_parallel else []
        if self.virtual_stages > 1 and self.pipeline_layout is None:
            per_stage = num_layers // (self.pp * self.virtual_stages)
            flags += ["--num-layers-per-virtual-pipeline-stage", str(per_stage)]
        flags += ["--pipeline-schedule", self.schedule] if self.schedule else []
        flags += ["--pipeline-model-parallel-layout", self.pipeline_layout] if self.pipeline_layout else []
        if self.first_stage_layers is not None:
            flags += ["--decoder-first-pipeline-num-layers", str(self.first_stage_layers)]
        flags += ["--cp-comm-type", self.cp_comm_type] if self.cp > 1 else []
        if self.cp_levels is not None:
            flags += ["--hierarchical-context-parallel-sizes", *map(str, self.cp_levels)]
        flags += ["--recurrent-cp-comm-type", "all_gather"] if self.passes_states else []
        if self.sharding != "no_shard":
            flags += ["--use-distributed-optimizer", "--data-parallel-sharding-strategy", self.sharding]
        if self.overlap:
            flags += ["--overlap-grad-reduce", "--ddp-bucket-size", "700"]
            flags += ["--overlap-param-gather"] if self.sharding != "no_shard" else []
        flags += [*self.tp_overlap, *self.pp_overlap]
        if self.recompute:
            granularity, *rest = self.recompute
            flags += ["--recompute-granularity", granularity]
            if granularity == "full":
                method, num_layers_text, *distributed = rest
                flags += ["--recompute-method", method, "--recompute-num-layers", num_layers_text]
                flags += ["--distribute-saved-activations"] if distributed else []
            elif rest:
                flags += ["--recompute-modules", *rest]
        if self.offloaded_layers:
            flags += ["--cpu-offloading", "--cpu-offloading-num-layers", str(self.offloaded_layers)]
            flags += ["--cpu-offloading-weights"] if self.offloads_weights else []
        return tuple(flags)


DROPOUT: tuple[str, ...] = ("--hidden-dropout", "0.2", "--attention-dropout", "0.15")
"""Flags for dropout of hidden states and attention weights; every layout must drop the same elements."""
RECOMPUTE: tuple[tuple[str, ...], ...] = ((), ("selective",), ("full", "uniform", "1"), ("full", "block", "1"))
MODULES: tuple[str, ...] = ("selective", "core_attn", "layernorm", "mlp")
"""Recomputation of every selectable part of a layer."""
IN_PARTS: tuple[str, ...] = ("full", "uniform", "1", "distributed")
SHARDING: tuple[str, ...] = ("no_shard", "optim", "optim_grads")
EXCHANGES: tuple[str, ...] = ("p2p", "all_gather", "a2a")
TP_OVERLAP: tuple[tuple[str, ...], ...] = (
    ("--tp-comm-overlap",),
    ("--tp-comm-overlap", "--tp-comm-overlap-rs-dgrad"),
    ("--tp-comm-overlap", "--disable-tp-comm-overlap-ag"),
    (
        "--tp-comm-overlap",
        "--disable-tp-comm-overlap-rs",
        "--disable-tp-comm-bulk-dgrad",
        "--disable-tp-comm-bulk-wgrad",
    ),
)
"""Variants of the tensor-parallel overlap of communication with GEMMs; --tp-comm-overlap alone is the usual one."""
PP_OVERLAP: tuple[tuple[str, ...], ...] = (
    ("--no-overlap-p2p-communication",),
    ("--delay-wgrad-compute",),
    ("--defer-embedding-wgrad-compute",),
    ("--defer-embedding-wgrad-compute", "--wgrad-deferral-limit", "2"),
)
"""Variants of the overlap of pipeline messages and weight gradients with computation."""
MAX_WORLD_SIZE = 8


def make_cell(shape: str, layout: Layout, data: str = "plain", extra: Sequence[str] = (), num_layers: int = 4) -> Cell:
    """Create the test case of a shape at a layout; ``extra`` flags also apply to the reference."""
    if num_layers != 4:
        extra = ("--num-layers", str(num_layers), *extra)
    name = f"{shape} {data} {layout.name}" + (f" {' '.join(extra)}" if extra else "")
    return Cell(name, layout.world_size, (*SHAPES[shape], *extra), layout.to_flags(num_layers), data)


def with_micro_batch_size(cell: Cell, size: int) -> Cell:
    """Change the micro-batch size of a test case, but not that of its reference, which uses the same samples."""
    flags = ("--micro-batch-size", str(size))
    return replace(cell, name=f"{cell.name} {' '.join(flags)}", layout_flags=(*cell.layout_flags, *flags))


def matrix() -> list[Cell]:
    """Return the test cases that every release must pass, without duplicates."""
    cells = [
        cell
        for family in (
            _tensor,
            _tp_overlap,
            _pipeline,
            _pp_overlap,
            _context,
            _levels,
            _data,
            _mixed,
            _families,
            _dropout,
            _kept,
        )
        for cell in family()
    ]
    return list({cell.name: cell for cell in cells}.values())


def _tensor() -> Iterator[Cell]:
    for shape, tp, recompute in itertools.product(SHAPES, (1, 2, 4), RECOMPUTE):
        for sequence_parallel in (False, True) if tp > 1 else (False,):
            if shape in ("gpt2", "qwen") or recompute in ((), ("selective",)):
                yield make_cell(shape, Layout(tp=tp, sequence_parallel=sequence_parallel, recompute=recompute))


def _tp_overlap() -> Iterator[Cell]:
    for shape, tp in itertools.product(("gpt2", "llama"), (2, 4)):
        for flags in TP_OVERLAP:
            yield make_cell(shape, Layout(tp=tp, sequence_parallel=True, tp_overlap=flags))
    layout = Layout(tp=2, sequence_parallel=True, tp_overlap=TP_OVERLAP[0])
    both = replace(layout, tp_overlap=TP_OVERLAP[1])
    for recompute in RECOMPUTE[1:]:
        yield make_cell("gpt2", replace(layout, recompute=recompute))
    yield make_cell("llama-one-group", replace(layout, tp=4))
    yield make_cell("gpt2-untied", replace(both, pp=2, virtual_stages=2))
    yield make_cell("gpt2", replace(both, pp=2, schedule="zero-bubble", recompute=RECOMPUTE[3]))
    yield make_cell("qwen", replace(layout, pp=2, dp=2, sharding="optim_grads", overlap=True))
    for exchange in EXCHANGES:
        yield make_cell("llama", replace(layout, cp=2, cp_comm_type=exchange, recompute=RECOMPUTE[2]), "packed")
    yield make_cell("gemma2", replace(both, pp=2))
    yield make_cell("gpt2", layout, extra=DROPOUT)


def _pipeline() -> Iterator[Cell]:
    for shape in ("gpt2", "gpt2-untied", "llama"):
        for pp in (2, 4):
            yield make_cell(shape, Layout(pp=pp))
            yield make_cell(shape, Layout(pp=pp, schedule="zero-bubble"))
        yield make_cell(shape, Layout(pp=2, virtual_stages=2))
        yield make_cell(shape, Layout(pp=2, first_stage_layers=1))
        yield make_cell(shape, Layout(pp=2, pipeline_layout="E|tt|tt|L", virtual_stages=2))
        yield make_cell(shape, Layout(pp=4, pipeline_layout="Et|t|t|tL"))
        for recompute in RECOMPUTE[1:]:
            yield make_cell(shape, Layout(pp=2, recompute=recompute))
            yield make_cell(shape, Layout(pp=2, virtual_stages=2, recompute=recompute))
    yield make_cell("gpt2", Layout(pp=4), extra=("--micro-batch-size", "2"))
    yield make_cell("gpt2", Layout(pp=2, virtual_stages=2), extra=("--global-batch-size", "6"))
    yield make_cell("gpt2", Layout(pp=4, virtual_stages=2), num_layers=8)


def _pp_overlap() -> Iterator[Cell]:
    for flags in PP_OVERLAP:
        yield make_cell("gpt2-untied", Layout(pp=4, pp_overlap=flags))
        yield make_cell("gpt2", Layout(pp=2, virtual_stages=2, pp_overlap=flags))
        yield make_cell("gpt2", Layout(pp=2, dp=2, sharding="optim", overlap=True, pp_overlap=flags), "uneven")
    yield make_cell("gpt2", Layout(pp=4, schedule="zero-bubble", pp_overlap=PP_OVERLAP[0]))
    for flags in PP_OVERLAP[:2]:
        yield make_cell("gpt2", Layout(pp=2, dp=2, sharding="optim_grads", overlap=True, pp_overlap=flags))
    layout = Layout(tp=2, sequence_parallel=True, pp=2, recompute=RECOMPUTE[2], pp_overlap=PP_OVERLAP[1])
    yield make_cell("gemma2", replace(layout, tp_overlap=TP_OVERLAP[0]))


def _context() -> Iterator[Cell]:
    for shape, cp, exchange in itertools.product(("gpt2", "llama", "qwen"), (2, 4), EXCHANGES):
        if exchange == "a2a" and cp == 4 and shape != "gpt2":
            continue
        for data in DATA:
            yield make_cell(shape, Layout(cp=cp, cp_comm_type=exchange), data)


def _levels() -> Iterator[Cell]:
    whole = Layout(cp=4, cp_comm_type="a2a+p2p", cp_levels=(2, 2))
    for shape, data in itertools.product(("gpt2", "llama", "mistral", "gemma2"), DATA):
        yield make_cell(shape, whole, data)
    for recompute in RECOMPUTE[1:3]:
        yield make_cell("llama", replace(whole, recompute=recompute), "packed")
    yield make_cell("gpt2", whole, "packed", extra=DROPOUT)
    for levels in ((4, 1), (1, 4)):
        yield make_cell("gpt2", replace(whole, cp_levels=levels), extra=DROPOUT)
    yield make_cell("qwen", replace(whole, tp=2, sequence_parallel=True), "uneven")
    yield make_cell("llama", replace(whole, pp=2), "packed")
    yield make_cell("llama-one-group", replace(whole, dp=2, sharding="optim_grads"))
    eight = replace(whole, cp=8, cp_levels=(2, 4))
    yield make_cell("gpt2", eight, "packed")
    yield make_cell("gpt2", replace(eight, cp_levels=(4, 2)), "packed")


def _data() -> Iterator[Cell]:
    for dp, sharding, overlap in itertools.product((2, 4), SHARDING, (False, True)):
        for data in ("plain", "uneven"):
            yield make_cell("gpt2", Layout(dp=dp, sharding=sharding, overlap=overlap), data)
        yield make_cell("qwen", Layout(dp=dp, sharding=sharding, overlap=overlap), "packed")


def _mixed() -> Iterator[Cell]:
    for sharding in SHARDING:
        yield make_cell("gpt2", Layout(tp=2, sequence_parallel=True, pp=2, dp=2, sharding=sharding))
        yield make_cell("gpt2", Layout(pp=2, dp=4, sharding=sharding))
        yield make_cell("llama", Layout(tp=2, pp=2, virtual_stages=2, dp=2, sharding=sharding, overlap=True))
        yield make_cell("qwen", Layout(pp=2, cp=2, dp=2, sharding=sharding), "packed")
        yield make_cell("qwen", Layout(tp=2, sequence_parallel=True, cp=2, dp=2, sharding=sharding), "uneven")
    for exchange in EXCHANGES:
        layout = Layout(tp=2, sequence_parallel=True, pp=2, cp=2, cp_comm_type=exchange)
        yield make_cell("llama", layout, "packed")
        yield make_cell("gpt2", Layout(pp=2, cp=2, dp=2, cp_comm_type=exchange, recompute=RECOMPUTE[2]), "uneven")
    for sharding, overlap in itertools.product(SHARDING, (False, True)):
        yield make_cell("gpt2", Layout(pp=2, schedule="zero-bubble", dp=2, sharding=sharding, overlap=overlap))
    yield make_cell("llama-one-group", Layout(tp=4, sequence_parallel=True, pp=2))
    yield make_cell("gpt2", Layout(tp=8), extra=("--num-attention-heads", "8"))


def _families() -> Iterator[Cell]:
    for shape in FAMILY_SHAPES:
        for sequence_parallel, recompute in ((False, RECOMPUTE[2]), (True, RECOMPUTE[1]), (True, RECOMPUTE[3])):
            yield make_cell(shape, Layout(tp=2, sequence_parallel=sequence_parallel, pp=2, recompute=recompute))
        for exchange in EXCHANGES:
            yield make_cell(shape, Layout(cp=2, cp_comm_type=exchange), "packed")
            yield make_cell(shape, Layout(tp=2, sequence_parallel=True, pp=2, cp=2, cp_comm_type=exchange))
    yield make_cell("gemma4", Layout(tp=2, sequence_parallel=True, dp=2, sharding="optim_grads_params", overlap=True))
    for extra in (END_PARTS, END_PARTS[:3]):
        yield make_cell("gpt2", Layout(tp=2, sequence_parallel=True, pp=2), extra=extra)
        yield make_cell("gpt2", Layout(dp=2, sharding="optim_grads_params"), extra=extra)
    for parts in (POSITION_PARTS, POSITION_PARTS[2:4]):
        yield make_cell("gpt2", Layout(tp=2, sequence_parallel=True, pp=2), extra=parts)
        yield make_cell("gpt2", Layout(tp=2, sequence_parallel=True, cp=2), "packed", extra=parts)


def _dropout() -> Iterator[Cell]:
    for shape in ("gpt2", "llama"):
        for sequence_parallel, recompute in itertools.product((False, True), RECOMPUTE):
            layout = Layout(tp=2, sequence_parallel=sequence_parallel, recompute=recompute)
            yield make_cell(shape, layout, extra=DROPOUT)
        for layout in (Layout(pp=2), Layout(pp=2, virtual_stages=2), Layout(pp=2, schedule="zero-bubble")):
            yield make_cell(shape, layout, extra=DROPOUT)
        for cp, exchange in itertools.product((2, 4), EXCHANGES if shape == "gpt2" else EXCHANGES[:2]):
            yield make_cell(shape, Layout(cp=cp, cp_comm_type=exchange), "packed", extra=DROPOUT)
        yield make_cell(shape, Layout(cp=2, cp_comm_type="a2a"), extra=DROPOUT)
        yield make_cell(shape, Layout(tp=2, pp=2, cp=2), extra=DROPOUT)
        yield make_cell(shape, Layout(tp=2, sequence_parallel=True, pp=2, cp=2, recompute=RECOMPUTE[2]), extra=DROPOUT)
    for sharding in SHARDING:
        yield make_cell("gpt2", Layout(dp=2, sharding=sharding), extra=DROPOUT)
    # The reference processes one sample at a time. Dropout must depend only on a sample's index in the global batch.
    yield with_micro_batch_size(make_cell("gpt2", Layout(dp=2), extra=DROPOUT), 2)
    yield with_micro_batch_size(make_cell("llama", Layout(tp=2, pp=2), extra=DROPOUT), 4)
    for shape in ("llama-one-group", "mistral", "gemma2"):
        yield make_cell(shape, Layout(tp=2, cp=2), "packed", extra=DROPOUT)


def _kept() -> Iterator[Cell]:
    """Yield recomputation and activation offloading at all kinds of layouts."""
    full, block = RECOMPUTE[2:]
    for shape, extra in itertools.product(("gpt2", "llama"), ((), DROPOUT)):
        for layout in (
            Layout(tp=2, recompute=MODULES),
            Layout(tp=2, sequence_parallel=True, recompute=("selective", "layernorm")),
            Layout(tp=2, sequence_parallel=True, recompute=("selective", "mlp"), offloaded_layers=3),
            Layout(tp=2, recompute=IN_PARTS),
            Layout(tp=2, pp=2, virtual_stages=2, recompute=IN_PARTS, offloaded_layers=1),
            Layout(tp=2, pp=2, schedule="zero-bubble", recompute=IN_PARTS, offloaded_layers=2),
            Layout(pp=2, virtual_stages=2, recompute=MODULES, offloaded_layers=1),
            Layout(pp=2, virtual_stages=2, offloaded_layers=1, offloads_weights=True),
            Layout(tp=2, pp=2, schedule="zero-bubble", recompute=full, offloaded_layers=2, offloads_weights=True),
            *(Layout(pp=4, schedule="zero-bubble", recompute=recompute) for recompute in (MODULES, full, block)),
            Layout(pp=2, schedule="zero-bubble", recompute=MODULES, offloaded_layers=2),
            *(Layout(cp=2, cp_comm_type=e, recompute=MODULES, offloaded_layers=2) for e in EXCHANGES),
            Layout(tp=2, sequence_parallel=True, pp=2, cp=2, recompute=MODULES, offloaded_layers=1),
            Layout(dp=2, sharding="optim_grads", overlap=True, recompute=MODULES, offloaded_layers=2),
        ):
            yield make_cell(shape, layout, extra=extra)
