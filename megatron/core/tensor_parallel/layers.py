"""Tensor-parallel layers with megatron-core's signatures, initial values and return values.

Each class is one of this framework's layers (`sharded_layers`) with megatron-core's constructor: ``init_method`` fills
the parameters at once, and forward returns ``(output, bias)``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from megatron.core.device import current_device
from megatron.core.errors import ConfigurationError
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.parallel_config import ParallelConfig
from megatron.core.precision import name_of_dtype
from megatron.core.process_group import Group
from megatron.core.process_state import resolve_group
from megatron.core.tensor_parallel.mappings import (
    InputRegion,
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_tensor_model_parallel_region,
)
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, get_expert_parallel_rng_tracker_name
from megatron.core.tensor_parallel.sharded_layers import (
    ColumnShardedLinear,
    RowShardedLinear,
    VocabShardedEmbedding,
    tensor_parallel_linear,
)
from megatron.core.tensor_parallel.utils import VocabUtility
from megatron.core.utils import divide

if TYPE_CHECKING:
    from megatron.core.process_state import AnyGroup

InitMethod = Callable[[torch.Tensor], Any]
"""Fills a tensor in place with initial values."""

_ATTRIBUTE_DEFAULTS = {
    "expert_tp": False,
    "is_qkv": False,
    "tensor_model_parallel": False,
    "partition_dim": -1,
    "partition_stride": 1,
}
"""Attributes of a parameter that describe its shards, and their values for a replicated parameter."""


def param_is_not_tensor_parallel_duplicate(param: torch.Tensor, tp_group: AnyGroup = None) -> bool:
    """Return whether this rank is the one that counts a parameter in norms: it is sharded, or the rank is the first."""
    return bool(getattr(param, "tensor_model_parallel", False)) or resolve_group(tp_group).is_first


def set_tensor_model_parallel_attributes(tensor: torch.Tensor, is_parallel: bool, dim: int, stride: int) -> None:
    """Set ``tensor_model_parallel``, ``partition_dim`` and ``partition_stride``.

    Raises:
        AssertionError: the tensor has such attributes already.
    """
    present = [name for name in _ATTRIBUTE_DEFAULTS if hasattr(tensor, name)]
    assert not present, f"the tensor already has the attributes {', '.join(present)}"
    values = {"tensor_model_parallel": is_parallel, "partition_dim": dim, "partition_stride": stride}
    for name, value in values.items():
        setattr(tensor, name, value)


def set_defaults_if_not_set_tensor_model_parallel_attributes(tensor: torch.Tensor) -> None:
    """Set the attributes that are missing to those of a replicated parameter."""
    for name, value in _ATTRIBUTE_DEFAULTS.items():
        if not hasattr(tensor, name):
            setattr(tensor, name, value)


def copy_tensor_model_parallel_attributes(destination_tensor: torch.Tensor, source_tensor: torch.Tensor) -> None:
    """Copy the attributes that the source has."""
    for name in _ATTRIBUTE_DEFAULTS:
        if hasattr(source_tensor, name):
            setattr(destination_tensor, name, getattr(source_tensor, name))


def linear_with_grad_accumulation_and_async_allreduce(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    gradient_accumulation_fusion: bool,
    allreduce_dgrad: bool,
    sequence_parallel: bool,
    grad_output_buffer: list[torch.Tensor] | None = None,
    wgrad_deferral_limit: int | None = 0,
    async_grad_allreduce: bool | None = None,
    tp_group: AnyGroup = None,
) -> torch.Tensor:
    """Compute ``input @ weight.T + bias`` with this rank's shard of the weight.

    The input's gradient is all-reduced with ``allreduce_dgrad``, or reduce-scattered with ``sequence_parallel``, while
    the weight's gradient is computed. A frozen weight has no gradient, and its input is not saved.
    ``wgrad_deferral_limit`` and ``async_grad_allreduce`` have no effect.

    Shapes: ``input: [s, ..., in]`` (``[s/tp, ..., in]`` with ``sequence_parallel``) ``-> [s, ..., out]``.

    Raises:
        ConfigurationError: ``gradient_accumulation_fusion`` or ``grad_output_buffer`` is used.
    """
    _check_gradients(gradient_accumulation_fusion, grad_output_buffer)
    region = (
        InputRegion.SEQUENCE if sequence_parallel else InputRegion.REPLICATED if allreduce_dgrad else InputRegion.SPLIT
    )
    return tensor_parallel_linear(input, weight, bias, region, resolve_group(tp_group))


def linear_with_frozen_weight(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    gradient_accumulation_fusion: bool,
    allreduce_dgrad: bool,
    sequence_parallel: bool,
    tp_group: AnyGroup,
    grad_output_buffer: None = None,
    wgrad_deferral_limit: None = None,
    async_grad_allreduce: bool | None = None,
) -> torch.Tensor:
    """Compute `linear_with_grad_accumulation_and_async_allreduce` without a gradient of the weight.

    ``gradient_accumulation_fusion`` and ``async_grad_allreduce`` have no effect.

    Raises:
        AssertionError: ``grad_output_buffer`` or ``wgrad_deferral_limit`` is passed.
    """
    assert grad_output_buffer is None, "grad_output_buffer is unsupported for a frozen weight"
    assert wgrad_deferral_limit is None, "wgrad_deferral_limit is unsupported for a frozen weight"
    bias = None if bias is None else bias.detach()
    return linear_with_grad_accumulation_and_async_allreduce(
        input, weight.detach(), bias, False, allreduce_dgrad, sequence_parallel, tp_group=tp_group
    )


def _check_gradients(fuses: bool, grad_output_buffer: list[torch.Tensor] | None) -> None:
    if fuses:
        raise ConfigurationError(
            "gradient_accumulation_fusion=True is unsupported in layers with megatron-core's names; set it to False "
            "(megatron.core.distributed accumulates gradients in main gradients without it)"
        )
    if grad_output_buffer is not None:
        raise ConfigurationError(
            "grad_output_buffer is unsupported in layers with megatron-core's names; leave out the buffers of "
            "defer_embedding_wgrad_compute"
        )


def _initialize_affine_weight_cpu(
    weight: torch.Tensor,
    output_size: int,
    input_size: int,
    per_partition_size: int,
    partition_dim: int,
    init_method: InitMethod,
    stride: int = 1,
    return_master_weight: bool = False,
    *,
    params_dtype: torch.dtype = torch.float32,
    rank: int | None = None,
    world_size: int | None = None,
    skip_set_tensor_parallel_attributes: bool = False,
) -> torch.Tensor | None:
    """Fill the whole float32 weight on the CPU of every rank and keep this rank's shard.

    The shard has ``stride`` equal parts of a weight in which the parts of all ranks alternate.
    """
    if not skip_set_tensor_parallel_attributes:
        set_tensor_model_parallel_attributes(weight, True, partition_dim, stride)
    if rank is None or world_size is None:
        group = resolve_group(None)
        rank, world_size = group.rank, group.size
    master = torch.empty(output_size, input_size, dtype=torch.float32, device="cpu", requires_grad=False)
    init_method(master)
    master = master.to(params_dtype)
    parts = torch.split(master, divide(per_partition_size, stride), dim=partition_dim)
    with torch.no_grad():
        weight.copy_(torch.cat(parts[rank::world_size], dim=partition_dim))
    return master if return_master_weight else None


def _initialize_affine_weight_gpu(
    weight: torch.Tensor, init_method: InitMethod, partition_dim: int, stride: int = 1, is_expert: bool = False
) -> None:
    """Fill this rank's shard with the RNG state of its tensor-parallel or expert-parallel rank."""
    set_tensor_model_parallel_attributes(weight, True, partition_dim, stride)
    tracker = get_cuda_rng_tracker()
    with tracker.fork(get_expert_parallel_rng_tracker_name()) if is_expert else tracker.fork():
        init_method(weight)


def _initialize_weight(
    weight: torch.Tensor,
    config: ModelParallelConfig,
    tp: Group,
    dim: int,
    init_method: InitMethod,
    *,
    master_dtype: torch.dtype,
    stride: int = 1,
    keeps_master: bool = False,
    is_expert: bool = False,
) -> torch.Tensor | None:
    """Fill this rank's shard along ``dim`` as ``config`` says and set its attributes; return the kept whole weight."""
    if not config.perform_initialization:
        set_tensor_model_parallel_attributes(weight, True, dim, stride)
        return None
    if not config.use_cpu_initialization:
        _initialize_affine_weight_gpu(weight, init_method, dim, stride, is_expert)
        return None
    sizes = list(weight.shape)
    sizes[dim] *= tp.size
    return _initialize_affine_weight_cpu(
        weight,
        sizes[0],
        sizes[1],
        weight.shape[dim],
        dim,
        init_method,
        stride,
        keeps_master,
        params_dtype=master_dtype,
        rank=tp.rank,
        world_size=tp.size,
    )


class _MegatronLinear(nn.Module):
    """Attributes, initial values and the extra state of state dicts, for both linear layers."""

    config: ModelParallelConfig
    tp: Group
    is_expert: bool
    weight: Any
    bias: Any

    def _set_attributes(
        self, config: ModelParallelConfig, tp: Group, input_size: int, output_size: int, is_expert: bool
    ) -> None:
        self.config = config
        self.tp_group = tp.handle
        self.input_size, self.output_size = input_size, output_size
        self.is_expert = is_expert
        self.expert_parallel = config.expert_model_parallel_size > 1
        self.explicit_expert_comm = is_expert and (tp.size > 1 or self.expert_parallel)
        self.gradient_accumulation_fusion = config.gradient_accumulation_fusion
        self.master_weight: torch.Tensor | None = None
        _check_gradients(config.gradient_accumulation_fusion, None)

    def _initialize(self, init_method: InitMethod, dim: int, stride: int, keeps_master: bool) -> None:
        """Fill the weight and set the attributes of the parameters."""
        is_reduced = not (self.is_expert and self.expert_parallel)
        if self.weight is not None:
            self.master_weight = _initialize_weight(
                self.weight,
                self.config,
                self.tp,
                dim,
                init_method,
                # As in megatron-core, the master weight of a column-parallel layer stays in float32.
                master_dtype=self.config.params_dtype if dim == 1 else torch.float32,
                stride=stride,
                keeps_master=keeps_master,
                is_expert=self.is_expert,
            )
            self.weight.allreduce = is_reduced
        if self.bias is not None:
            if self.config.perform_initialization:
                nn.init.zeros_(self.bias)
            self.bias.allreduce = is_reduced

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        # A state dict without the extra state, which Transformer Engine's layers have, is complete too.
        state_dict.setdefault(f"{prefix}_extra_state", None)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def set_extra_state(self, state: Any) -> None:
        """Ignore the extra state."""

    def get_extra_state(self) -> None:
        """Return no extra state, under the key that Transformer Engine's layers have."""

    def backward_dw(self) -> None:
        """Do nothing: the weight gradient is computed in the backward pass."""

    def extra_repr(self) -> str:
        """Describe the sizes."""
        return (
            f"in_features={self.input_size}, out_features={self.output_size}, bias={self.bias is not None}, "
            f"TP={self.tp.size}"
        )


def _own_config(config: ModelParallelConfig) -> ParallelConfig:
    """Return the settings of one of this framework's layers."""
    return ParallelConfig(
        params_dtype=name_of_dtype(config.params_dtype),
        sequence_parallel=config.sequence_parallel,
        cpu_gemm_backend="mkl",
    )


def _device(config: ModelParallelConfig) -> torch.device:
    return torch.device("cpu") if config.use_cpu_initialization else current_device().torch_device


class ColumnParallelLinear(_MegatronLinear, ColumnShardedLinear):
    """Linear layer whose output features are sharded over the tensor-parallel group.

    The arguments are those of megatron-core. The group is ``tp_group``, or the process-wide group (of experts with
    ``is_expert``). ``keep_master_weight_for_test`` keeps the whole weight as ``master_weight``.
    ``skip_weight_param_allocation`` leaves the weight to the caller of forward. ``disable_grad_reduce`` leaves the sum
    of the input's gradient to the caller. ``tp_comm_buffer_name`` has no effect.

    Shapes: as `ColumnShardedLinear`.

    Raises:
        AssertionError: the output features cannot be sharded evenly.
        ConfigurationError: ``config.gradient_accumulation_fusion`` or a buffer of deferred gradients is used.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: ModelParallelConfig,
        init_method: InitMethod,
        bias: bool = True,
        gather_output: bool = False,
        stride: int = 1,
        keep_master_weight_for_test: bool = False,
        skip_bias_add: bool = False,
        skip_weight_param_allocation: bool = False,
        embedding_activation_buffer: list[torch.Tensor] | None = None,
        grad_output_buffer: list[torch.Tensor] | None = None,
        is_expert: bool = False,
        tp_comm_buffer_name: str | None = None,
        disable_grad_reduce: bool = False,
        tp_group: AnyGroup = None,
    ) -> None:
        tp = resolve_group(tp_group, "expt_tp" if is_expert else "tp")
        divide(divide(output_size, tp.size), stride)
        super().__init__(
            input_size,
            output_size,
            tp,
            config=_own_config(config),
            bias=bias,
            stride=stride,
            skip_bias_add=skip_bias_add,
            device=_device(config),
        )
        self._set_attributes(config, tp, input_size, output_size, is_expert)
        _check_gradients(False, grad_output_buffer if config.defer_embedding_wgrad_compute else None)
        self.embedding_activation_buffer, self.grad_output_buffer = embedding_activation_buffer, grad_output_buffer
        self.gather_output = gather_output
        self.output_size_per_partition = output_size // tp.size
        self.disable_grad_reduce = disable_grad_reduce
        self.sequence_parallel = config.sequence_parallel and tp.size > 1
        if config.sequence_parallel and tp.size == 1:
            warnings.warn(
                "`sequence_parallel` is set to `True`, but tensor model parallel size is 1. Disabling sequence "
                "parallel.",
                stacklevel=2,
            )
        self.allreduce_dgrad = tp.size > 1 and not self.sequence_parallel and not disable_grad_reduce
        self.region = (
            InputRegion.SPLIT
            if self.explicit_expert_comm
            else InputRegion.SEQUENCE
            if self.sequence_parallel
            else InputRegion.REPLICATED
            if self.allreduce_dgrad
            else InputRegion.SPLIT
        )
        if skip_weight_param_allocation:
            del self.weight
            self.register_parameter("weight", None)
        if self.bias is not None:
            set_tensor_model_parallel_attributes(self.bias, True, 0, stride)
        self._initialize(init_method, 0, stride, keep_master_weight_for_test)

    def forward(  # type: ignore[override]
        self,
        input_: torch.Tensor,
        weight: torch.Tensor | None = None,
        runtime_gather_output: bool | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return this rank's output features, or all of them, and with ``skip_bias_add`` the bias.

        ``weight`` replaces the layer's weight, ``runtime_gather_output`` the layer's ``gather_output``.

        Raises:
            RuntimeError: the layer has no weight and none is passed, or the weight has another shape.
        """
        expected = (self.output_size_per_partition, self.input_size)
        weight = self.weight if weight is None else weight
        if weight is None:
            raise RuntimeError(
                "weight was not supplied to ColumnParallelLinear forward pass and skip_weight_param_allocation is True."
            )
        if tuple(weight.shape) != expected:
            raise RuntimeError(f"supplied weight's shape is {tuple(weight.shape)}, not {expected} as expected")
        bias = None if self.skip_bias_add else self.bias
        output = tensor_parallel_linear(input_, weight, bias, self.region, self.tp, library=self.product_library)
        if self.gather_output if runtime_gather_output is None else runtime_gather_output:
            output = gather_from_tensor_model_parallel_region(output, self.tp)
        return output, self.bias if self.skip_bias_add else None


class RowParallelLinear(_MegatronLinear, RowShardedLinear):
    """Linear layer whose input features are sharded over the tensor-parallel group, with a sum of the partial outputs.

    The arguments are those of megatron-core; `ColumnParallelLinear` describes them. The output of an expert layer
    (``is_expert``) is not summed if experts are sharded or distributed: the token dispatcher sums it.

    Shapes: as `RowShardedLinear`.

    Raises:
        AssertionError: the input features cannot be sharded evenly.
        RuntimeError: ``input_is_parallel`` is False with sequence parallelism.
        ConfigurationError: ``config.gradient_accumulation_fusion`` is used.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: ModelParallelConfig,
        init_method: InitMethod,
        bias: bool,
        input_is_parallel: bool,
        skip_bias_add: bool,
        stride: int = 1,
        keep_master_weight_for_test: bool = False,
        is_expert: bool = False,
        tp_comm_buffer_name: str | None = None,
        tp_group: AnyGroup = None,
    ) -> None:
        if config.sequence_parallel and not input_is_parallel:
            raise RuntimeError("To enable `sequence_parallel`, `input_is_parallel` must be `True`")
        tp = resolve_group(tp_group, "expt_tp" if is_expert else "tp")
        divide(divide(input_size, tp.size), stride)
        super().__init__(
            input_size,
            output_size,
            tp,
            config=_own_config(config),
            bias=bias,
            input_is_parallel=input_is_parallel,
            skip_bias_add=skip_bias_add,
            device=_device(config),
        )
        self._set_attributes(config, tp, input_size, output_size, is_expert)
        self.input_size_per_partition = input_size // tp.size
        self._initialize(init_method, 1, stride, keep_master_weight_for_test)
        if self.bias is not None:
            self.bias.sequence_parallel = config.sequence_parallel

    def forward(  # type: ignore[override]
        self, input_: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the summed output, and with ``skip_bias_add`` the bias.

        With sequence parallelism the output is this rank's part of the sequence.
        """
        if not self.input_is_parallel:
            input_ = scatter_to_tensor_model_parallel_region(input_, self.tp)
        output = tensor_parallel_linear(
            input_, self.weight, None, InputRegion.SPLIT, self.tp, library=self.product_library
        )
        if self.explicit_expert_comm:
            assert self.skip_bias_add, "an expert layer whose output is summed elsewhere needs skip_bias_add=True"
        elif self.sequence_parallel:
            output = reduce_scatter_to_sequence_parallel_region(output, self.tp)
        else:
            output = reduce_from_tensor_model_parallel_region(output, self.tp)
        if self.skip_bias_add:
            return output, self.bias
        return output if self.bias is None else output + self.bias, None


class VocabParallelEmbedding(VocabShardedEmbedding):
    """Embedding table whose rows are sharded over the tensor-parallel group.

    The arguments are those of megatron-core. With ``reduce_scatter_embeddings`` the output is sequence first, and
    sharded by sequence.

    Shapes: ``[...] -> [..., h]``; with ``reduce_scatter_embeddings`` ``[b, s] -> [s/tp, b, h]``.

    Raises:
        AssertionError: the rows cannot be sharded evenly.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        init_method: InitMethod,
        reduce_scatter_embeddings: bool = False,
        config: ModelParallelConfig,
        tp_group: AnyGroup = None,
    ) -> None:
        tp = resolve_group(tp_group)
        first, end = VocabUtility.vocab_range_from_global_vocab_size(num_embeddings, tp.rank, tp.size)
        super().__init__(
            num_embeddings,
            num_embeddings,
            embedding_dim,
            tp,
            sequence_parallel=reduce_scatter_embeddings,
            dtype=config.params_dtype,
            device=_device(config),
        )
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.reduce_scatter_embeddings = reduce_scatter_embeddings
        self.tp_group = tp.handle
        self.vocab_start_index, self.vocab_end_index = first, end
        self.num_embeddings_per_partition = end - first
        self.deterministic_mode = config.deterministic_mode
        _initialize_weight(self.weight, config, tp, 0, init_method, master_dtype=config.params_dtype)

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        """Return the embeddings of the tokens, in the order of the tokens or with a reduce-scatter sequence first."""
        partial = self.partial_rows(input_)
        if self.reduce_scatter_embeddings:
            return reduce_scatter_to_sequence_parallel_region(partial.transpose(0, 1).contiguous(), self.tp)
        return reduce_from_tensor_model_parallel_region(partial, self.tp)
