"""Column-parallel and row-parallel linear layers and the embedding, sharded over the tensor-parallel group.

The backward pass overlaps its communication with the weight gradient, which is accumulated in the parameter's main
gradient if it has one. Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053; Korthikanti et al. 2022,
https://arxiv.org/abs/2205.05198.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from megatron.core.collectives import (
    all_gather_first_dim,
    all_gather_into,
    all_reduce,
    reduce_scatter_first_dim,
    reduce_scatter_into,
)
from megatron.core.errors import ConfigurationError
from megatron.core.host_memory import ReusedMemory
from megatron.core.main_grad import MainGrad, Receiver, bias_gradient, leave_parts, main_grad_of
from megatron.core.ops import (
    Fp8Quantizers,
    FusedActivation,
    activation_input_gradient,
    add_rows,
    linear,
    linear_with_activation,
    product,
)
from megatron.core.parallel_config import ParallelConfig
from megatron.core.precision import dtype_from_name
from megatron.core.process_group import Group
from megatron.core.sharding import (
    ParamSpec,
    Shard,
    attach_spec,
    even_shards,
    full_shards,
    quantized_of,
    stacked_shards,
)
from megatron.core.tensor_parallel.comm_overlap_config import WHOLE, LinearName, LinearOverlap, linear_overlap
from megatron.core.tensor_parallel.float8_linear import QuantizedActivation, float8_linear
from megatron.core.tensor_parallel.mappings import (
    InputRegion,
    gather_from_tensor_model_parallel_region,
    gather_gradient,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_tensor_model_parallel_region,
)
from megatron.core.tensor_parallel.overlapped_linear import gathered_linear, scattered_linear

_INNER = 10
"""Place of ``inner`` among the arguments of `_Linear`."""


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        region: InputRegion,
        tp: Group,
        adds_bias: bool,
        library: str,
        overlap: LinearOverlap,
        scatters: bool,
        memory: ReusedMemory | None,
        inner: torch.Tensor | None,
        activation: FusedActivation | None,
        keeps_inner: bool,
        delays_weight_grad: bool,
    ) -> torch.Tensor | tuple[torch.Tensor | None, torch.Tensor]:
        # A quantized weight is dequantized again in the backward pass.
        ctx.quantized = quantized_of(weight)
        # The input is needed only for the weight's gradient, which a frozen weight does not have.
        ctx.save_for_backward(
            x if ctx.needs_input_grad[1] else None,
            weight if ctx.quantized is None else None,
            inner if ctx.needs_input_grad[_INNER] else None,
        )
        ctx.activation = activation
        ctx.x_shape = x.shape
        ctx.region, ctx.tp, ctx.product_library = region, tp, library
        ctx.overlap, ctx.scatters, ctx.delays = overlap, scatters, delays_weight_grad
        # Looked up here: under recomputation the backward pass sees a copy of the weight without a main gradient.
        ctx.main_grad = main_grad_of(weight)
        ctx.bias_receiver = None if bias is None else Receiver.of(bias)
        bias = bias if adds_bias else None
        weight = weight if ctx.quantized is None else ctx.quantized.dense()
        if overlap.forward and (scatters or region is InputRegion.SEQUENCE):
            if scatters:
                return scattered_linear(x, weight, bias, tp, overlap, library)
            return gathered_linear(x, weight, bias, tp, overlap, library)[0]
        full_x = all_gather_first_dim(x, tp) if region is InputRegion.SEQUENCE else x
        if activation is not None and inner is None:
            results = linear_with_activation(full_x, weight, bias, activation, keeps_input=keeps_inner, library=library)
            # The layer that reads the activation returns the gradient of the activation's input.
            ctx.mark_non_differentiable(results[1])
            ctx.set_materialize_grads(False)
            return results
        output = linear(full_x, weight, bias, library, memory)
        return reduce_scatter_first_dim(output, tp) if scatters else output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, *_: None) -> tuple[torch.Tensor | None, ...]:
        x, weight, inner = ctx.saved_tensors
        region: InputRegion = ctx.region
        tp: Group = ctx.tp
        library: str = ctx.product_library
        overlap: LinearOverlap = ctx.overlap
        needs_x_grad, needs_weight_grad, needs_bias_grad = ctx.needs_input_grad[:3]
        if ctx.quantized is not None and needs_x_grad:
            weight = ctx.quantized.dense()
        own_grad, full_x, gathering = grad, x, None
        if region is InputRegion.SEQUENCE and tp.size > 1 and needs_weight_grad:
            full_x = x.new_empty((x.shape[0] * tp.size, *x.shape[1:]))
            gathering = all_gather_into(full_x, x.contiguous(), tp, async_op=overlap.bulk_gather)

        x_grad, inner_grad, reducing = None, None, None
        if inner is not None:
            inner_grad, parts = activation_input_gradient(grad, weight, inner, ctx.activation, library)
            if parts is not None:
                leave_parts(inner_grad, parts)
        elif ctx.scatters and overlap.backward and needs_x_grad:
            x_grad, gathered = gathered_linear(grad, weight.t(), None, tp, overlap, library, keeps=True)
            assert gathered is not None
            grad = gathered
        elif region is InputRegion.SEQUENCE and overlap.backward and needs_x_grad:
            x_grad = scattered_linear(grad, weight.t(), None, tp, overlap, library)
        else:
            grad = gather_gradient(grad, tp) if ctx.scatters else grad
            if needs_x_grad:
                x_grad = linear(grad, weight.t(), library=library)
                if region is InputRegion.REPLICATED:
                    reducing = all_reduce(x_grad, tp, async_op=True)
                elif region is InputRegion.SEQUENCE and tp.size > 1:
                    full_x_grad = x_grad
                    x_grad = full_x_grad.new_empty(ctx.x_shape)
                    is_async = overlap.bulk_scatter
                    reducing = reduce_scatter_into(x_grad, full_x_grad.contiguous(), tp, async_op=is_async)

        if gathering is not None:
            gathering.wait()
        weight_grad = None
        if needs_weight_grad:
            rows = grad.reshape(-1, grad.shape[-1])
            full_rows = full_x.reshape(-1, full_x.shape[-1])
            weight_grad = _accumulate_weight_grad(ctx.main_grad, rows, full_rows, library, ctx.delays)
        bias_grad = bias_gradient(own_grad, ctx.bias_receiver) if needs_bias_grad else None
        if reducing is not None:
            reducing.wait()
        return x_grad, weight_grad, bias_grad, *(None,) * 7, inner_grad, *(None,) * 3


def _accumulate_weight_grad(
    main_grad: MainGrad | None, grad: torch.Tensor, x: torch.Tensor, library: str, delays: bool
) -> torch.Tensor | None:
    if main_grad is None:
        return product(grad.t(), x, library)
    main_grad.add_matmul(grad.t(), x, library, delays=delays)
    return None


def tensor_parallel_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    region: InputRegion,
    tp: Group,
    *,
    adds_bias: bool = True,
    library: str = "auto",
    overlap: LinearOverlap = WHOLE,
    scatters: bool = False,
    memory: ReusedMemory | None = None,
    quantizers: Fp8Quantizers | None = None,
    inner: torch.Tensor | None = None,
    activation: FusedActivation | QuantizedActivation | None = None,
    delays_weight_grad: bool = False,
) -> torch.Tensor:
    """Compute ``x @ weight.T + bias`` with this rank's shard of the weight.

    If the ranks' results are to be summed, only one of the ranks ``adds_bias``. The bias has its gradient on all.
    ``library`` computes the GEMMs on CPU (see `linear`). ``scatters`` reduce-scatters the result of a SPLIT input along
    s. ``overlap`` determines which communication overlaps which GEMM. ``memory`` provides the output buffer on a CPU
    without chunked overlap. With ``quantizers`` the GEMMs run in FP8 (see `float8_linear` for their overlap).

    If ``x`` is the ``activation`` of ``inner`` (see `tensor_parallel_linear_with_activation`), ``inner`` has the
    gradient instead of ``x``. Such a layer overlaps no chunks and is not quantized. With a `QuantizedActivation` the
    layer multiplies the activation of ``x``.

    With ``delays_weight_grad`` the matmul of the weight's gradient waits for the next all-gather of an output gradient
    in the backward pass, and overlaps with it, if the weight has a main gradient.

    Shapes: ``x: [s, b, in]`` (``[s/tp, b, in]`` for region SEQUENCE) ``-> [s, b, out]`` with the shard's own ``in`` and
    ``out``, ``[s/tp, b, out]`` if it ``scatters``. Backward: the input's gradient is all-reduced (REPLICATED) or
    reduce-scattered along s (SEQUENCE) while the weight's gradient is computed; the output's gradient is all-gathered
    along s if the output was scattered.
    """
    if quantizers is not None:
        return float8_linear(
            *(x, weight, bias, region, tp, quantizers),
            adds_bias=adds_bias,
            library=library,
            scatters=scatters,
            overlap=overlap,
            activation=activation if isinstance(activation, QuantizedActivation) else None,
            delays_weight_grad=delays_weight_grad,
        )
    assert not isinstance(activation, QuantizedActivation)
    arguments = (x, weight, bias, region, tp, adds_bias, library, overlap, scatters, memory)
    more = (inner, None if inner is None else activation, False, delays_weight_grad)
    result: torch.Tensor = _Linear.apply(*arguments, *more)  # type: ignore[no-untyped-call]
    return result


def tensor_parallel_linear_with_activation(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    region: InputRegion,
    tp: Group,
    activation: FusedActivation,
    *,
    library: str = "auto",
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Compute ``x @ weight.T + bias`` with this rank's shard of the weight, and its activation, in one GEMM.

    The first result is None if autograd is off. The second one has no gradient: the layer that reads it takes both
    results and computes the gradient of the first one. ``tensor_parallel_linear`` describes the other arguments.

    Shapes: ``x: [s, b, in]`` (``[s/tp, b, in]`` for region SEQUENCE) ``-> [s, b, out]`` twice.
    """
    more = (True, library, WHOLE, False, None, None, activation, torch.is_grad_enabled(), False)
    result: tuple[torch.Tensor | None, torch.Tensor]
    result = _Linear.apply(x, weight, bias, region, tp, *more)  # type: ignore[no-untyped-call]
    return result


DEFAULT_INIT_STD = 0.02
"""Default standard deviation of a weight's initial values."""
_DEFAULTS = ParallelConfig()


def make_parameter(
    local_shape: tuple[int, ...], spec: ParamSpec, dtype: torch.dtype, device: torch.device | str
) -> nn.Parameter:
    """Return an uninitialized parameter with its `ParamSpec`."""
    parameter = nn.Parameter(torch.empty(local_shape, dtype=dtype, device=device))
    attach_spec(parameter, spec)
    return parameter


class ColumnShardedLinear(nn.Module):
    """Linear layer whose output features are sharded over the tensor-parallel group.

    The arguments are those of Megatron-LM. ``config`` gives the dtype, sequence parallelism and the GEMM library on
    CPU. ``tp_comm_buffer_name`` is the layer's name for ``--tp-comm-overlap``. A layer without a name does not overlap.
    ``init_std`` replaces ``init_method``: initial values are derived from the parameter's `ParamSpec`. ``stride`` is
    the number of equal tensors fused in the output features (2 for ``[gate; up]``), each sharded separately.
    ``padded_output_size`` pads the output features before sharding (a vocabulary). ``gather_output`` gives every rank
    all output features, without padding. ``skip_bias_add`` leaves the bias to the caller: forward then returns
    ``(output, bias)`` with a bias of the same width as the output, or None for a layer without bias.

    The parameters are uninitialized until `initialize_module` or a checkpoint fills them.

    Shapes: ``[s, b, in] -> [s, b, out/tp]``; with sequence parallelism ``[s/tp, b, in] -> [s, b, out/tp]``; with
    ``gather_output`` ``[s, b, in] -> [s, b, out]``.

    Raises:
        ConfigurationError: the output features cannot be sharded evenly, or ``gather_output`` is combined with sequence
            parallelism or fused tensors.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        tp_group: Group,
        *,
        config: ParallelConfig = _DEFAULTS,
        init_std: float = DEFAULT_INIT_STD,
        bias: bool = True,
        gather_output: bool = False,
        stride: int = 1,
        skip_bias_add: bool = False,
        tp_comm_buffer_name: LinearName | None = None,
        padded_output_size: int | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        padded_size = padded_output_size or output_size
        _check_even_shards("output features", padded_size, tp_group, stride)
        if gather_output and (config.sequence_parallel or stride > 1):
            raise ConfigurationError(
                "gather_output gives every rank the whole output: it cannot be combined with sequence_parallel=True "
                f"or stride above 1, but they are {config.sequence_parallel} and {stride}; omit one of them"
            )
        self.tp = tp_group
        self.output_size = output_size
        self.gather_output = gather_output
        self.skip_bias_add = skip_bias_add
        self.product_library = config.cpu_gemm_backend
        self.overlap = linear_overlap(config, tp_comm_buffer_name)
        self.quantizers: Fp8Quantizers | None = None
        self.region = InputRegion.SEQUENCE if config.sequence_parallel else InputRegion.REPLICATED
        dtype, own_size = dtype_from_name(config.params_dtype), padded_size // tp_group.size

        def shards(shape: tuple[int, ...]) -> tuple[Shard, ...]:
            if stride > 1:
                return stacked_shards(shape, 0, tp_group.rank, tp_group.size, stride)
            return even_shards(shape, 0, tp_group.rank, tp_group.size, padded_output_size)

        shape = (output_size, input_size)
        fused_rows = (output_size // stride,) * stride if stride > 1 else ()
        spec = ParamSpec("weight", shape, shards(shape), init_std=init_std, fused_rows=fused_rows)
        self.weight = make_parameter((own_size, input_size), spec, dtype, device)
        self.bias: nn.Parameter | None = None
        if bias:
            bias_spec = ParamSpec("bias", (output_size,), shards((output_size,)))
            self.bias = make_parameter((own_size,), bias_spec, dtype, device)

    def forward(
        self,
        x: torch.Tensor,
        *,
        gives_bias_gradient: bool = True,
        memory: ReusedMemory | None = None,
        fused: Callable[[torch.Tensor, torch.Tensor], Any] | None = None,
        activation: FusedActivation | None = None,
    ) -> Any:
        """Return this rank's output features, or all of them; with ``skip_bias_add`` also the bias.

        Without ``gives_bias_gradient`` a later operation computes the bias's gradient. ``memory`` is for this rank's
        features (see `tensor_parallel_linear`). ``fused`` computes a result from the input and the weight instead.
        With ``activation`` this rank's features and their activation are returned.
        """
        if fused is not None:
            return fused(x, self.weight)
        if activation is not None:
            return tensor_parallel_linear_with_activation(
                *(x, self.weight, self.bias, self.region, self.tp, activation), library=self.product_library
            )
        in_product: torch.Tensor | None = None if self.skip_bias_add else self.bias
        if in_product is not None and not gives_bias_gradient:
            in_product = in_product.detach()
        output = tensor_parallel_linear(
            *(x, self.weight, in_product, self.region, self.tp),
            memory=memory,
            library=self.product_library,
            overlap=self.overlap,
            quantizers=self.quantizers,
        )
        if not self.skip_bias_add:
            return self._gathered(output)
        return self._gathered(output), None if self.bias is None else self._gathered(self.bias)

    def _gathered(self, tensor: torch.Tensor) -> torch.Tensor:
        if not self.gather_output:
            return tensor
        return gather_from_tensor_model_parallel_region(tensor, self.tp)[..., : self.output_size]


class RowShardedLinear(nn.Module):
    """Linear layer whose input features are sharded over the tensor-parallel group, with a sum of the partial outputs.

    The input is this rank's part of the features. Without ``input_is_parallel`` it is all of them, on every rank.
    ``skip_bias_add`` leaves the bias to the caller: forward then returns ``(output, bias)`` with a bias of the same
    width as the output, or None for a layer without bias. `ColumnShardedLinear` describes the other arguments.

    The parameters are uninitialized until `initialize_module` or a checkpoint fills them.

    Shapes: ``[s, b, in/tp] -> [s, b, out]``; with sequence parallelism ``-> [s/tp, b, out]``; without
    ``input_is_parallel`` ``[s, b, in] -> [s, b, out]``.

    Raises:
        ConfigurationError: the input features cannot be sharded evenly, or ``input_is_parallel`` is False with sequence
            parallelism.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        tp_group: Group,
        *,
        config: ParallelConfig = _DEFAULTS,
        init_std: float = DEFAULT_INIT_STD,
        bias: bool = True,
        input_is_parallel: bool = True,
        skip_bias_add: bool = False,
        tp_comm_buffer_name: LinearName | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        _check_even_shards("input features", input_size, tp_group)
        if config.sequence_parallel and not input_is_parallel:
            raise ConfigurationError(
                "input_is_parallel=False needs the whole input, which sequence_parallel=True does not provide; omit "
                "one of them"
            )
        self.tp = tp_group
        self.input_is_parallel = input_is_parallel
        self.skip_bias_add = skip_bias_add
        self.product_library = config.cpu_gemm_backend
        self.overlap = linear_overlap(config, tp_comm_buffer_name)
        self.quantizers: Fp8Quantizers | None = None
        self.sequence_parallel = config.sequence_parallel
        # On a CPU the bias is added after the reduce-scatter, so that results of existing runs stay bitwise equal.
        self.brings_bias_into_sum = torch.device(device).type == "cuda"
        dtype, shape = dtype_from_name(config.params_dtype), (output_size, input_size)
        spec = ParamSpec("weight", shape, even_shards(shape, 1, tp_group.rank, tp_group.size), init_std=init_std)
        self.weight = make_parameter((output_size, input_size // tp_group.size), spec, dtype, device)
        self.bias: nn.Parameter | None = None
        if bias:
            bias_spec = replicated_spec("bias", (output_size,), tp_group, config.sequence_parallel)
            self.bias = make_parameter((output_size,), bias_spec, dtype, device)

    def forward(
        self,
        x: torch.Tensor,
        *,
        inner: torch.Tensor | None = None,
        activation: FusedActivation | QuantizedActivation | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor | None]:
        """Return the summed output: this rank's part of the sequence under sequence parallelism.

        With ``skip_bias_add`` the bias is returned too. If ``x`` is the ``activation`` of ``inner``, ``inner`` has the
        gradient instead of ``x``. A `QuantizedActivation` is applied to ``x`` (see `tensor_parallel_linear`).
        """
        if not self.input_is_parallel:
            x = scatter_to_tensor_model_parallel_region(x, self.tp)
        if self.skip_bias_add:
            return self._summed_product(x, None), self.bias
        return self._summed_product(x, self.bias, inner, activation)

    def _summed_product(
        self,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        inner: torch.Tensor | None = None,
        activation: FusedActivation | QuantizedActivation | None = None,
    ) -> torch.Tensor:
        scatters = self.sequence_parallel and self.tp.size > 1
        # One rank adds the bias in its GEMM, which is free; a separate addition would cost memory traffic.
        in_product = bias
        in_sum: torch.Tensor | None = None
        product_scatters = scatters and (
            (self.overlap.forward or self.overlap.backward)
            if self.quantizers is None
            else self.quantizers.gathers_gradients
        )
        if product_scatters:
            brings_bias = self.brings_bias_into_sum and not self.overlap.uses_symmetric_memory
            in_product = in_sum = bias if brings_bias else None
        elif bias is not None and scatters:
            # The bias's gradient covers this rank's part of the sequence, like that of other replicated parameters.
            in_product, in_sum = (bias.detach(), bias) if self.brings_bias_into_sum else (None, None)
        # A gather in chunks already overlaps with a GEMM. Quantized chunks need symmetric memory.
        gathers_chunks = product_scatters and self.overlap.backward
        if self.quantizers is not None:
            gathers_chunks = gathers_chunks and self.overlap.uses_symmetric_memory
        partial = tensor_parallel_linear(
            x,
            self.weight,
            in_product,
            InputRegion.SPLIT,
            self.tp,
            adds_bias=self.tp.rank == 0,
            library=self.product_library,
            overlap=self.overlap,
            scatters=product_scatters,
            quantizers=self.quantizers,
            inner=inner,
            activation=activation,
            delays_weight_grad=scatters and not gathers_chunks,
        )
        if not scatters:
            return reduce_from_tensor_model_parallel_region(partial, self.tp)
        output = partial
        if not product_scatters:
            output = reduce_scatter_to_sequence_parallel_region(output, self.tp, bias_in_sum=in_sum)
        return output if bias is None or in_sum is not None else output + bias


def _check_even_shards(side: str, features: int, tp: Group, stride: int = 1) -> None:
    if features % (tp.size * stride):
        stacked = f" x {stride} stacked tensors" if stride > 1 else ""
        raise ConfigurationError(
            f"{features} {side} are not divisible by tensor-parallel size {tp.size}{stacked}; pad them or "
            "change the number of processes"
        )


class _EmbeddingLookup(torch.autograd.Function):
    """Forward: rows of the weight. Backward: rows added to the weight's main gradient, or a dense gradient."""

    @staticmethod
    def forward(ctx: Any, indices: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(indices, weight)
        # Looked up here: under recomputation the backward pass sees a copy of the weight without a main gradient.
        ctx.main_grad = main_grad_of(weight)
        return F.embedding(indices, weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor | None]:
        indices, weight = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])
        main_grad: MainGrad | None = ctx.main_grad
        if main_grad is not None:
            main_grad.add_rows(indices.reshape(-1), rows)
            return None, None
        dense = torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
        add_rows(dense, indices.reshape(-1), rows)
        return None, dense.to(weight.dtype)


def embedding_lookup(indices: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return ``weight[indices]``.

    Shapes: ``indices: [...]``, ``weight: [n, h] -> [..., h]``.
    """
    result: torch.Tensor = _EmbeddingLookup.apply(indices, weight)  # type: ignore[no-untyped-call]
    return result


class VocabShardedEmbedding(nn.Module):
    """Embedding table whose rows are sharded over the tensor-parallel group.

    The table is padded to ``padded_vocab_size`` rows. Padding is never looked up and stays zero.

    Shapes: ``[b, s] -> [s, b, h]``; with sequence parallelism ``-> [s/tp, b, h]``.

    Raises:
        ConfigurationError: the padded rows cannot be sharded evenly.
    """

    def __init__(
        self,
        vocab_size: int,
        padded_vocab_size: int,
        hidden_size: int,
        tp: Group,
        *,
        sequence_parallel: bool = False,
        init_std: float = DEFAULT_INIT_STD,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        _check_even_shards("vocabulary rows", padded_vocab_size, tp)
        self.tp = tp
        self.sequence_parallel = sequence_parallel
        self.rows_per_rank = padded_vocab_size // tp.size
        shape = (vocab_size, hidden_size)
        shards = even_shards(shape, 0, tp.rank, tp.size, padded_vocab_size)
        spec = ParamSpec("weight", shape, shards, init_std=init_std)
        self.weight = make_parameter((self.rows_per_rank, hidden_size), spec, dtype, device)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the embeddings of ``tokens``, sequence first."""
        partial = self.partial_rows(tokens.t())
        if self.sequence_parallel:
            return reduce_scatter_to_sequence_parallel_region(partial, self.tp)
        return reduce_from_tensor_model_parallel_region(partial, self.tp)

    def partial_rows(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the embeddings of the tokens that this rank has, and zeros for tokens of other ranks.

        Shapes: ``[...] -> [..., h]``.
        """
        if self.tp.size == 1:
            return embedding_lookup(tokens, self.weight)
        elsewhere = tokens.div(self.rows_per_rank, rounding_mode="floor") != self.tp.rank
        # Tokens of other ranks look up some row, which is then masked. A single row for all of them would receive most
        # of the gradient's rows, all zero, and serialize their additions.
        rows = embedding_lookup(tokens.remainder(self.rows_per_rank), self.weight)
        return rows.masked_fill(elsewhere.unsqueeze(-1), 0)


def replicated_spec(
    name: str,
    shape: tuple[int, ...],
    tp: Group,
    partial_gradient: bool,
    *,
    mean: float = 0.0,
    std: float = 0.0,
) -> ParamSpec:
    """Return the `ParamSpec` of a parameter that is replicated on all tensor-parallel ranks.

    ``partial_gradient`` means that each rank's gradient covers only its own part of the sequence or of the heads, so
    that the gradients must be summed.
    """
    return ParamSpec(
        name,
        shape,
        full_shards(shape),
        replicated_axes=("tp",) if tp.size > 1 else (),
        gradient_sum_axes=("tp",) if partial_gradient and tp.size > 1 else (),
        replica_index=tp.rank,
        num_replicas=tp.size,
        init_mean=mean,
        init_std=std,
    )
