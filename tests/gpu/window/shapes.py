"""Models and shapes of the GPU window, at the sizes of a GPU and at sizes that a CPU computes in seconds. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

Flags = tuple[str, ...]

COMMON: Flags = (
    *("--mock-data", "--tokenizer-type", "NullTokenizer", "--lr", "1e-4", "--lr-decay-style", "constant"),
    *("--eval-iters", "0", "--train-iters", "100"),
)
NO_DROPOUT: Flags = ("--hidden-dropout", "0", "--attention-dropout", "0")


@dataclass(frozen=True)
class ModelShape:
    """Hold the sizes of a model that decide its GEMMs; ``experts`` is 0 for a dense model."""

    name: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    groups: int
    head_size: int
    vocab: int
    length: int
    batch: int
    is_gated: bool = True
    experts: int = 0
    topk: int = 0

    @property
    def tokens(self) -> int:
        """Return the tokens of a micro-batch."""
        return self.length * self.batch

    def flags(self) -> Flags:
        """Return the training flags of the model, without its number format and without dropout's."""
        flags = [
            *("--num-layers", str(self.layers), "--hidden-size", str(self.hidden)),
            *("--num-attention-heads", str(self.heads), "--seq-length", str(self.length)),
            *("--max-position-embeddings", str(self.length), "--vocab-size", str(self.vocab)),
            *("--micro-batch-size", str(self.batch), *COMMON),
        ]
        if self.is_gated:
            flags += ["--swiglu", "--normalization", "RMSNorm", "--position-embedding-type", "rope"]
            flags += ["--rotary-base", "500000", "--disable-bias-linear", "--untie-embeddings-and-output-weights"]
            flags += ["--group-query-attention", "--num-query-groups", str(self.groups)]
            flags += ["--kv-channels", str(self.head_size)]
        if self.experts:
            flags += ["--num-experts", str(self.experts), "--moe-router-topk", str(self.topk)]
            flags += ["--moe-ffn-hidden-size", str(self.ffn), "--ffn-hidden-size", str(self.ffn)]
        else:
            flags += ["--ffn-hidden-size", str(self.ffn)]
        return tuple(flags)


GPT2_345M = ModelShape("345M", 24, 1024, 4096, 16, 16, 64, 50256, 1024, 8, is_gated=False)
LLAMA_8B = ModelShape("8B", 32, 4096, 14336, 32, 8, 128, 128255, 8192, 1)
QWEN3_30B = ModelShape("Qwen3 30B-A3B", 48, 2048, 768, 32, 4, 128, 151935, 4096, 1, experts=128, topk=8)

SMALL_GPT2 = ModelShape("345M", 2, 32, 64, 4, 4, 8, 60, 16, 2, is_gated=False)
SMALL_LLAMA = ModelShape("8B", 2, 32, 64, 4, 2, 8, 60, 32, 1)
SMALL_QWEN3 = ModelShape("Qwen3 30B-A3B", 2, 32, 16, 4, 2, 8, 60, 32, 1, experts=4, topk=2)


@dataclass(frozen=True)
class Shapes:
    """Hold the models of a window."""

    gpt2: ModelShape
    llama: ModelShape
    qwen: ModelShape


def shapes_of(*, small: bool) -> Shapes:
    """Return the models at the sizes of a GPU, or at small ones."""
    if small:
        return Shapes(SMALL_GPT2, SMALL_LLAMA, SMALL_QWEN3)
    return Shapes(GPT2_345M, LLAMA_8B, QWEN3_30B)


@dataclass(frozen=True)
class GemmShape:
    """Name a linear layer ``[tokens, inner] @ [inner, outer]``; ``groups`` matrices share the tokens."""

    name: str
    tokens: int
    inner: int
    outer: int
    groups: int = 0


def _dense(shape: ModelShape, tp: int = 1) -> Iterator[GemmShape]:
    of_heads = (shape.heads + 2 * shape.groups) * shape.head_size
    name = shape.name if tp == 1 else f"{shape.name} TP {tp}"
    yield GemmShape(f"{name} qkv", shape.tokens, shape.hidden, of_heads // tp)
    yield GemmShape(f"{name} proj", shape.tokens, shape.heads * shape.head_size // tp, shape.hidden)
    if not shape.experts:
        wide = shape.ffn * (2 if shape.is_gated else 1)
        yield GemmShape(f"{name} fc1", shape.tokens, shape.hidden, wide // tp)
        yield GemmShape(f"{name} fc2", shape.tokens, shape.ffn // tp, shape.hidden)
    padded = -(-(shape.vocab + 1) // (128 * tp)) * 128 * tp
    yield GemmShape(f"{name} output", shape.tokens, shape.hidden, padded // tp)


def linear_layers(shapes: Shapes) -> tuple[GemmShape, ...]:
    """Return each distinct linear layer of the models once."""
    found: dict[tuple[int, int, int], GemmShape] = {}
    for each in (*_dense(shapes.gpt2), *_dense(shapes.llama), *_dense(shapes.llama, 2), *_dense(shapes.qwen)):
        found.setdefault((each.tokens, each.inner, each.outer), each)
    return tuple(found.values())


def grouped_layers(shapes: Shapes, groups: Sequence[int] = (8, 16, 128)) -> tuple[GemmShape, ...]:
    """Return the first linear layer of experts, for several numbers of experts that share the same tokens."""
    qwen = shapes.qwen
    rows = qwen.tokens * qwen.topk
    return tuple(GemmShape(f"{count} experts fc1", rows, qwen.hidden, 2 * qwen.ffn, count) for count in groups)


_FP8: Flags = ("--fp8-format", "hybrid", "--fp8-amax-history-len", "16", "--fp8-amax-compute-algo", "max")
_LARGE_MEMORY = 120 * 2**30
_MICROBATCHES = 2


@dataclass(frozen=True)
class TimedRun:
    """Name a training that is timed: its flags, steps, and the name of its prediction."""

    name: str
    flags: Flags
    steps: int
    key: str
    needs_float8: bool = False


def gpt2_runs(shapes: Shapes, *, small: bool) -> tuple[TimedRun, ...]:
    """Return the trainings of part 5: plain, with CUDA graphs, and with dropout. Graphs start after three steps."""
    shape, steps = shapes.gpt2, 6 if small else 20
    flags = (*shape.flags(), "--bf16")
    two = ("--global-batch-size", str(2 * shape.batch))
    one = ("--global-batch-size", str(shape.batch))
    graphs = ("--cuda-graph-impl", "local")
    dropout = ("--hidden-dropout", "0.1", "--attention-dropout", "0.1")
    return (
        TimedRun("2 micro-batches", (*flags, *two, *NO_DROPOUT), steps, "train/345M/2"),
        TimedRun("2 micro-batches, CUDA graphs", (*flags, *two, *NO_DROPOUT, *graphs), steps, "train/345M/2"),
        TimedRun("1 micro-batch", (*flags, *one, *NO_DROPOUT), steps, "train/345M/1"),
        TimedRun("1 micro-batch, CUDA graphs", (*flags, *one, *NO_DROPOUT, *graphs), steps, "train/345M/1"),
        TimedRun("2 micro-batches, dropout 0.1", (*flags, *two, *dropout), steps, "train/345M/2 dropout"),
    )


def num_llama_layers(memory_bytes: int) -> int:
    """Return how many layers of the 8B shape a GPU holds with its optimizer state, by the dry run."""
    return 12 if memory_bytes >= _LARGE_MEMORY else 5


def headline_runs(shapes: Shapes, memory_bytes: int, *, small: bool) -> tuple[TimedRun, ...]:
    """Return the trainings of part 7."""
    layers = shapes.llama.layers if small else num_llama_layers(memory_bytes)
    steps = 3 if small else 8
    batch = ("--bf16", *NO_DROPOUT, "--global-batch-size", str(_MICROBATCHES))
    llama = (*shapes.llama.flags(), *batch, "--num-layers", str(layers), "--recompute-granularity", "selective")
    qwen_layers = 2 if small else 4
    qwen = (*shapes.qwen.flags(), *batch, "--num-layers", str(qwen_layers))
    name, key = f"8B shape, {layers} layers", f"train/8B/{layers}"

    def in_float8(recipe: str) -> TimedRun:
        return TimedRun(
            f"{name}, FP8 {recipe}", (*llama, *_FP8, "--fp8-recipe", recipe), steps, f"{key}/{recipe}", True
        )

    return (
        TimedRun(f"{name}, bf16", llama, steps, f"{key}/bf16"),
        in_float8("delayed"),
        in_float8("tensorwise"),
        TimedRun(f"Qwen3 30B-A3B shape, {qwen_layers} layers, bf16", qwen, steps, f"train/qwen/{qwen_layers}"),
    )


@dataclass(frozen=True)
class AttentionShape:
    """Hold the sizes of an attention call."""

    length: int
    batch: int
    heads: int
    groups: int
    head_size: int

    @property
    def name(self) -> str:
        """Return the sizes in short."""
        return f"s {self.length} b {self.batch} heads {self.heads}/{self.groups} d {self.head_size}"


def attention_shapes(*, small: bool) -> tuple[AttentionShape, ...]:
    """Return the calls of part 4: 1k, 4k and 8k positions."""
    if small:
        return (AttentionShape(32, 1, 4, 2, 16),)
    return (
        AttentionShape(1024, 8, 16, 16, 64),
        AttentionShape(4096, 1, 32, 8, 128),
        AttentionShape(8192, 1, 32, 8, 128),
    )
