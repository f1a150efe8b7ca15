"""ModelParallelConfig: megatron-core's settings of parallel layers, with its field names and defaults."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch

from megatron.core.errors import ConfigurationError


@dataclass
class ModelParallelConfig:
    """Settings that megatron-core's tensor-parallel layers and schedules take.

    Fields that choose between implementations of the same result, such as fusions and NCCL options, have no effect.

    Raises:
        ValueError: fields contradict each other, such as sequence parallelism without tensor parallelism.
        ConfigurationError: ``hybrid_context_parallel`` is set.
    """

    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_comm_backend: str | None = None
    pipeline_model_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int | None = None
    sequence_parallel: bool = False
    context_parallel_size: int = 1
    hierarchical_context_parallel_sizes: list[int] | None = None
    max_seqlen_per_dp_cp_rank: int | None = None
    hybrid_context_parallel: bool = False
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int | None = None
    moe_extended_tp: bool = False
    perform_initialization: bool = True
    use_cpu_initialization: bool = False
    fp16: bool = False
    bf16: bool = False
    params_dtype: torch.dtype = torch.float32
    timers: Callable[..., Any] | None = None
    finalize_model_grads_func: Callable[..., Any] | None = None
    grad_scale_func: Callable[..., Any] | None = None
    no_sync_func: Callable[..., Any] | None = None
    grad_sync_func: Callable[..., Any] | None = None
    param_sync_func: Callable[..., Any] | None = None
    deterministic_mode: bool = False
    enable_autocast: bool = False
    autocast_dtype: torch.dtype | None = None
    num_microbatches_with_partial_activation_checkpoints: int | None = None
    gradient_accumulation_fusion: bool = False
    async_tensor_model_parallel_allreduce: bool = True
    use_te_rng_tracker: bool = False
    tp_comm_overlap: bool = False
    tp_comm_bulk_wgrad: bool = True
    tp_comm_bulk_dgrad: bool = True
    tp_comm_overlap_ag: bool = True
    tp_comm_overlap_rs: bool = True
    tp_comm_overlap_rs_dgrad: bool = False
    tp_comm_split_ag: bool = True
    tp_comm_atomic_ag: bool = False
    tp_comm_split_rs: bool = True
    tp_comm_atomic_rs: bool = False
    cross_entropy_loss_fusion: bool = False
    cross_entropy_fusion_impl: str = "native"
    tp_comm_overlap_disable_qkv: bool = False
    tp_comm_overlap_disable_fc1: bool = False
    tp_comm_bootstrap_backend: str = "nccl"
    overlap_moe_expert_parallel_comm: bool = False
    delay_wgrad_compute: bool = False
    ep_overlap_early_attn_memory_release: bool = False
    pipeline_dtype: torch.dtype | None = None
    variable_seq_lengths: bool = False
    overlap_p2p_comm: bool = False
    batch_p2p_comm: bool = True
    batch_p2p_sync: bool = True
    use_ring_exchange_p2p: bool = False
    deallocate_pipeline_outputs: bool = False
    defer_embedding_wgrad_compute: bool = False
    wgrad_deferral_limit: int = 0
    overlap_p2p_comm_warmup_flush: bool = False
    microbatch_group_size_per_vp_stage: int | None = None
    mtp_standalone: bool = False
    cpu_offloading: bool = False
    cpu_offloading_num_layers: int = 0
    _cpu_offloading_context: Any = None
    cpu_offloading_activations: bool = True
    cpu_offloading_weights: bool = False
    cpu_offloading_double_buffering: bool = False
    barrier_with_L1_time: bool = True

    def __post_init__(self) -> None:
        """Set the fields that follow from others, and check combinations."""
        reject_unsupported(self, "hybrid_context_parallel")
        if self.sequence_parallel and self.tensor_model_parallel_size <= 1:
            raise ValueError("Cannot use sequence parallelism without tensor parallelism")
        if self.expert_tensor_parallel_size is None:
            self.expert_tensor_parallel_size = self.tensor_model_parallel_size
        if self.pipeline_model_parallel_size > 1 and self.pipeline_dtype is None:
            raise ValueError("When using pipeline parallelism, pipeline_dtype must be specified")
        if self.autocast_dtype is None:
            self.autocast_dtype = self.params_dtype
        if self.defer_embedding_wgrad_compute:
            if self.pipeline_model_parallel_size == 1:
                raise ValueError("Cannot defer embedding wgrad compute when pipeline model parallel is not used")
            if not self.gradient_accumulation_fusion:
                raise ValueError("Cannot defer embedding wgrad compute when gradient accumulation fusion is not used")
            if self.wgrad_deferral_limit < 0:
                raise ValueError(f"wgrad_deferral_limit is {self.wgrad_deferral_limit}; it must not be negative")
        if self.expert_model_parallel_size > 1 and self.tensor_model_parallel_size > 1 and not self.sequence_parallel:
            warnings.warn(
                "When using expert parallelism and tensor parallelism for training, sequence parallelism must be used",
                stacklevel=2,
            )
        if self.microbatch_group_size_per_vp_stage is None:
            self.microbatch_group_size_per_vp_stage = self.pipeline_model_parallel_size
        if self.overlap_p2p_comm_warmup_flush and (not self.overlap_p2p_comm or self.batch_p2p_comm):
            raise ValueError("overlap_p2p_comm_warmup_flush needs overlap_p2p_comm=True and batch_p2p_comm=False")


def reject_unsupported(config: ModelParallelConfig, *names: str) -> None:
    """Raise ConfigurationError, one line per field, if these fields are not at their defaults."""
    defaults = {each.name: each.default for each in fields(config)}
    changed = [f"{name}={getattr(config, name)!r}" for name in names if getattr(config, name) != defaults[name]]
    if changed:
        raise ConfigurationError([f"{each} is unsupported; leave it at its default" for each in changed])
