"""``--compile``: compile the functions between a layer's GEMMs and its core attention with torch.compile.

The GEMMs stay calls of a library, which Inductor would call too, because they accumulate into main gradients while
communication runs. On a CPU graphs that contain them were at most 3 % faster than the functions between them at 384
features (``benchmarks/results/compile_cpu_2026-11-28.md``).
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch._subclasses import FakeTensor

from megatron.config import RunConfig
from megatron.core.collectives import any_rank
from megatron.core.errors import ConfigurationError
from megatron.core.models import Model
from megatron.core.models.gpt import GPTConfig, GPTModel
from megatron.core.ops import RowKeys, runs_on_triton
from megatron.core.ops.gated_activation import gated_activation
from megatron.core.precision import dtype_from_name
from megatron.core.transformer import (
    ACTIVATIONS,
    XIELU,
    BorrowingAttention,
    FeedForward,
    GatedAttention,
    LatentAttention,
    Norm,
    ResidualNorm,
    ResidualSum,
    RotaryAngles,
    SelfAttention,
    TransformerLayer,
    add_and_normalize,
    add_branch,
    apply_rotary,
    apply_rotary_to_both,
    join_heads,
    normalize,
    split_and_rotate,
    with_scaled_gate,
)
from megatron.core.transformer.moe import GroupedExperts
from megatron.core.weight_prefetch import alloc_storage, has_memory
from megatron.training.initialize import Runtime

_FAILURES = (RuntimeError, ImportError, OSError, AttributeError, subprocess.SubprocessError)
"""Errors of torch.compile if the compiler is missing or fails; torch.compile's own errors are RuntimeErrors."""
_MOST_GRAPHS = 64
"""Limit of graphs per function: norms of different widths are calls of one function. Torch's own limit is 8."""
_NUM_ROWS = 16
"""Rows in the first call of an activation of experts, which is compiled for any number of rows."""

_FAST_ON_CPU = (ACTIVATIONS["gelu"], ACTIVATIONS["gelu_tanh"])
_ON_TRITON = "Triton kernels compute them"
_BY_TORCH = "torch's kernels are as fast"


def compile_regions(chunks: Sequence[Model], config: RunConfig, runtime: Runtime, log: Callable[[str], None]) -> None:
    """Compile residual additions, norms, activations and rotary embeddings of all layers, and log the time it took.

    Each is run once, forward and backward, with the shapes of a micro-batch, so that a failure is found here. Without
    gradients, as in evaluation and generation, the functions run as they are, for any shape. Collective.

    Raises:
        ConfigurationError: torch.compile fails, or no rank has anything to compile.
    """
    if any(isinstance(parameter.data, FakeTensor) for chunk in chunks for parameter in chunk.parameters()):
        return  # A simulated step runs without compilation, which its report says.
    start_time = time.perf_counter()
    regions = _Regions(config.model)
    for chunk in chunks:
        regions.weight = next(chunk.parameters(), None)
        for module in chunk.modules():
            regions.replace_in(module)
    if not any_rank(bool(regions.compiled), runtime.state.world):
        parts = f" ({regions.describe_left()})" if regions.left else ""
        raise ConfigurationError(f"--compile: this model has nothing to compile{parts}; omit it")
    for chunk in chunks:
        for module, function, inputs in _first_calls(chunk, config):
            try:
                _run_once(module, function, inputs)
            except _FAILURES as error:
                reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
                part = _describe(module, config)
                raise ConfigurationError(
                    f"--compile: torch.compile failed for {part} ({reason}); omit --compile"
                ) from error
    left = f"; not {regions.describe_left()}" if regions.left else ""
    elapsed_s = time.perf_counter() - start_time
    log(f" > compiled {', '.join(regions.compiled) or 'nothing on this stage'} in {elapsed_s:.1f} s (--compile){left}")


class _Regions:
    """Compiled functions, their names in the order in which they were found, and the parts that are not compiled."""

    def __init__(self, model: GPTConfig) -> None:
        self.has_dropout = model.hidden_dropout > 0.0
        self.has_rotary = model.position_embedding_type == "rope"
        self.compiled: dict[str, Callable[..., Any]] = {}
        self.left: dict[str, str] = {}
        self.weight: nn.Parameter | None = None
        """A weight of the chunk, with the dtype and device of its modules without parameters."""

    def describe_left(self) -> str:
        """List the parts that are not compiled by reason."""
        names: dict[str, list[str]] = {}
        for name, why in self.left.items():
            names.setdefault(why, []).append(name)
        return "; ".join(f"{', '.join(found)}: {why}" for why, found in names.items())

    def replace_in(self, module: nn.Module) -> None:
        """Replace the functions that a module calls by compiled ones."""
        if isinstance(module, Norm):
            self._replace_in_norm(module)
        adders = (TransformerLayer, ResidualSum, ResidualNorm)
        if isinstance(module, adders) and self.has_dropout and not self._on_triton(module):
            module.add_branch = self._compile("dropout", add_branch)
        if isinstance(module, (FeedForward, GroupedExperts)):
            self._replace_activation(module)
        if isinstance(module, LatentAttention):
            module.join_heads = self._compile("heads of MLA", join_heads)
        elif isinstance(module, SelfAttention) and self.has_rotary and module.has_rotary:
            if type(module).projected is not SelfAttention.projected:
                self.left["rotary embedding"] = f"{type(module).__name__} has its own projections"
            elif self._on_triton(module):
                self.left["rotary embedding"] = _ON_TRITON
            elif isinstance(module, BorrowingAttention):
                module.rotate_query = self._compile("rotary embedding of queries", apply_rotary)
            elif module.rotates_first and not (isinstance(module, GatedAttention) or module.shares_keys):
                module.split_and_rotate = self._compile("rotary embedding", split_and_rotate)
            else:
                module.rotate = self._compile("rotary embedding", apply_rotary_to_both)

    def _replace_in_norm(self, norm: Norm) -> None:
        if norm.module is not None:
            norm.compiled_module = _InTraining(norm.module)
            self.compiled.setdefault(f"norms of kind {norm.kind}", norm.compiled_module)
        elif norm.of_engine is not None:
            self.left["norms"] = "Transformer Engine computes them"
        else:
            weight = norm.weight
            is_on_triton = isinstance(norm, ResidualNorm) and weight is not None and runs_on_triton(weight)
            is_fast = norm.kind == "LayerNorm" and (weight is None or weight.device.type == "cpu")
            if is_on_triton:
                self.left["residual addition"] = _ON_TRITON
            elif isinstance(norm, ResidualNorm) and (self.has_dropout or not is_fast):
                norm.add_and_compute = self._compile("residual addition", add_and_normalize)
            if is_fast:
                self.left["norms"] = _BY_TORCH
            else:
                norm.compute = self._compile("norms", normalize)

    def _replace_activation(self, mlp: FeedForward | GroupedExperts) -> None:
        name = "activation" if isinstance(mlp, FeedForward) else "activation of experts"
        weight, activation = mlp.linear_fc1.weight, mlp.activation
        if isinstance(activation, partial) and activation.func is with_scaled_gate:
            activation = activation.args[0]
        if isinstance(activation, partial) and activation.func is gated_activation:
            is_on_triton = runs_on_triton(weight)
        else:
            has_kernel = isinstance(mlp, FeedForward) and (mlp.fuses_activation or mlp.linear_fc1.bias is not None)
            is_on_triton = has_kernel and cast("FeedForward", mlp).has_program(weight)
        if is_on_triton:
            self.left[name] = _ON_TRITON
        elif weight.device.type == "cpu" and mlp.activation in _FAST_ON_CPU:
            self.left[name] = _BY_TORCH
        elif isinstance(mlp.activation, XIELU):
            mlp.activation.compute = self._compile(name, mlp.activation.compute)
        else:
            # Groups of rows have another length in each step.
            mlp.activation = self._compile(name, mlp.activation, dynamic=isinstance(mlp, GroupedExperts))

    def _on_triton(self, module: nn.Module) -> bool:
        weight = next(module.parameters(), self.weight)
        return weight is not None and runs_on_triton(weight)

    def _compile(self, name: str, function: Callable[..., Any], *, dynamic: bool = False) -> Callable[..., Any]:
        """Return the compiled function of a name; all layers share the first one."""
        if name not in self.compiled:
            self.compiled[name] = _InTraining(function, dynamic=dynamic)
        return self.compiled[name]


class _InTraining:
    """A function that is compiled for passes with gradients; without gradients it runs as it is.

    Low-precision results inside a graph are rounded as they are without compilation.
    """

    def __init__(self, function: Callable[..., Any], *, dynamic: bool = False) -> None:
        import torch._dynamo.config as limits

        limits.recompile_limit = max(limits.recompile_limit, _MOST_GRAPHS)
        # A second call of `compile_regions` for a model compiles the same function again.
        self.function: Callable[..., Any] = function.function if isinstance(function, _InTraining) else function
        options: dict[str, Any] = {"emulate_precision_casts": True}
        self.compiled = torch.compile(self.function, fullgraph=True, dynamic=dynamic, options=options)

    def __call__(self, *args: Any, **named: Any) -> Any:
        return (self.compiled if torch.is_grad_enabled() else self.function)(*args, **named)


def _run_once(module: nn.Module, function: Callable[..., Any], inputs: Sequence[Any]) -> None:
    """Run a function forward and backward. Gradients of the parameters are computed too, and discarded."""
    with _allocated(module):
        outputs = function(*inputs)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        torch.autograd.grad(outputs, inputs[0], [torch.zeros_like(output) for output in outputs])


def _describe(module: nn.Module, config: RunConfig) -> str:
    """Name a module by the flag that chose it, if a script registered it, else by its class."""
    if isinstance(module, Norm) and module.module is not None:
        return f"--normalization {module.kind}"
    if isinstance(module, (FeedForward, GroupedExperts)) and config.model.activation_func is not None:
        return f"--activation-func {config.model.activation_func}"
    return type(module).__name__


@contextmanager
def _allocated(module: nn.Module) -> Iterator[None]:
    """Give parameters of FSDP memory, without values, inside this context."""
    freed = [parameter for parameter in module.parameters() if not has_memory(parameter)]
    for parameter in freed:
        alloc_storage(parameter)
    yield
    for parameter in freed:
        parameter.untyped_storage().resize_(0)


def _first_calls(chunk: Model, config: RunConfig) -> Iterator[tuple[nn.Module, Callable[..., Any], list[Any]]]:
    """Yield one call per kind of region in a chunk: the module, the function and its inputs.

    The first input has a gradient.
    """
    device = next((parameter.device for parameter in chunk.parameters()), torch.device("cpu"))
    inputs = _Inputs(config, dtype_from_name(config.model.params_dtype), device)
    if isinstance(chunk, GPTModel) and chunk.rotary is not None:
        inputs.angles = chunk.angles(inputs.position_ids(), inputs.dtype)
    seen = set[tuple[Any, ...]]()
    for module in chunk.modules():
        for key, function, arguments in inputs.of(module):
            if key not in seen:
                seen.add(key)
                yield module, function, arguments()


class _Inputs:
    """Make inputs with the shapes and strides of a micro-batch."""

    def __init__(self, config: RunConfig, dtype: torch.dtype, device: torch.device) -> None:
        model = config.model
        self.hidden_shape = model.hidden_shape(config.data.seq_length, config.training.micro_batch_size)
        self.length = config.data.seq_length // model.context_parallel_size
        self.dropout = model.hidden_dropout
        self.resets_positions = config.data.reset_position_ids
        self.dtype, self.device = dtype, device
        self.angles: RotaryAngles | None = None

    def position_ids(self) -> torch.Tensor:
        """Return positions that all samples share, unless they restart at each document. Shapes: ``[b, s/cp]``."""
        batch = self.hidden_shape[1]
        num_rows = batch if self.resets_positions else 1
        return torch.zeros(num_rows, self.length, dtype=torch.int64, device=self.device).expand(batch, -1)

    def of(self, module: nn.Module) -> Iterator[tuple[tuple[Any, ...], Callable[..., Any], Callable[[], list[Any]]]]:
        """Yield a key, a function and the function's inputs for each region of a module."""
        _, batch, hidden_size = self.hidden_shape
        if isinstance(module, ResidualNorm):
            yield (type(module), "sum"), module, self._branch
        if isinstance(module, Norm) and (module.module is not None or module.shape == (hidden_size,)):
            function = partial(Norm.forward, module)
            yield (Norm, module.module is not None), function, lambda: [self._zeros(*self.hidden_shape)]
        elif isinstance(module, TransformerLayer) and self.dropout:
            yield (TransformerLayer,), module.add_branch, self._branch
        elif isinstance(module, FeedForward):
            width = module.linear_fc1.weight.shape[0]
            yield (FeedForward, width), module.activation, lambda: [self._zeros(self.length, batch, width)]
        elif isinstance(module, GroupedExperts):
            width = module.linear_fc1.weight.shape[1]
            yield (GroupedExperts,), module.activation, lambda: [self._zeros(_NUM_ROWS, width)]
        elif isinstance(module, LatentAttention):
            yield from self._of_latent(module)
        elif isinstance(module, BorrowingAttention):
            width, angles = module.num_heads * module.head_dim, module.own_angles(self.angles)
            of_queries = (type(module), width, module.head_dim, angles is None)
            yield (
                of_queries,
                lambda query: module.split_query(query, angles),
                lambda: [self._zeros(self.length, batch, width)],
            )
        elif isinstance(module, SelfAttention):
            num_gates = module.num_heads if isinstance(module, GatedAttention) else 0
            num_parts = 1 if module.shares_keys else 2
            width = (module.num_heads + num_gates + num_parts * module.num_groups) * module.head_dim
            angles = module.own_angles(self.angles)
            key = (type(module), width, module.num_groups, module.head_dim, angles is None)
            split = module.split_gated if isinstance(module, GatedAttention) else module.split_heads
            yield key, lambda mixed: split(mixed, angles), lambda: [self._zeros(self.length, batch, width)]

    def _of_latent(
        self, attention: LatentAttention
    ) -> Iterator[tuple[tuple[Any, ...], Callable[..., Any], Callable[[], list[Any]]]]:
        rows, batch, _ = self.hidden_shape
        heads, angles = attention.num_heads, self.angles
        query_width = heads * (attention.plain_width + attention.rotary_width)
        kv_width = heads * (attention.plain_width + attention.value_width)
        whole = (self.length, batch)
        if isinstance(attention.kv_layernorm, Norm):
            narrow = attention.rank + attention.rotary_width
            latent = (attention.rank, attention.rotary_width)
            yield (
                (LatentAttention, "latent"),
                attention.kv_layernorm,
                lambda: [self._zeros(rows, batch, narrow).split_with_sizes(latent, dim=-1)[0]],
            )
        if isinstance(attention.q_layernorm, Norm):
            width = attention.q_layernorm.shape[0]
            yield (LatentAttention, "query"), attention.q_layernorm, lambda: [self._zeros(rows, batch, width)]
        yield (
            (LatentAttention, "heads"),
            partial(attention.split_latent, angles=angles),
            lambda: [
                self._zeros(*whole, query_width),
                self._zeros(*whole, kv_width),
                self._zeros(*whole, 1, attention.rotary_width),
            ],
        )

    def _branch(self) -> list[Any]:
        """Return a residual stream, a branch, and the dropout of the branch."""
        keys = None
        if self.dropout:
            words = torch.zeros(self.hidden_shape[:2], dtype=torch.int32, device=self.device)
            keys = RowKeys(words, words.clone())
        return [self._zeros(*self.hidden_shape), self._zeros(*self.hidden_shape), keys, self.dropout]

    def _zeros(self, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=self.dtype, device=self.device, requires_grad=True)
