"""Configuration of gradient accumulation and reduction over the data-parallel ranks."""

from __future__ import annotations

import dataclasses

from megatron.core.config_base import POSITIVE, Config, flag


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistributedDataParallelConfig(Config, role="layout", in_args=True):
    """Data-parallelism configuration.

    Gradients of half-precision parameters are accumulated in float32 unless ``grad_reduce_in_bf16`` is set.
    """

    use_distributed_optimizer: bool = False
    """Shard the optimizer state over the data-parallel ranks (ZeRO-1)."""
    overlap_grad_reduce: bool = False
    """Overlap gradient reduction with the backward pass."""
    overlap_param_gather: bool = False
    """Overlap the distributed optimizer's all-gather with the forward pass."""
    overlap_param_gather_with_optimizer_step: bool = flag(
        False, role="run", in_args=False, where=("overlap_param_gather", True)
    )
    """Start the all-gather of each bucket as soon as it is updated."""
    data_parallel_sharding_strategy: str = flag(
        "no_shard", choices=("no_shard", "optim", "optim_grads", "optim_grads_params"), in_args=False
    )
    """Shard over data-parallel ranks: nothing, the optimizer state (as --use-distributed-optimizer), also gradients
    (ZeRO-2), or also weights (FSDP, ZeRO-3), all-gathered per layer."""
    use_torch_fsdp2: bool = flag(False, in_args=False)
    """Same as --data-parallel-sharding-strategy optim_grads_params (Megatron-LM's flag)."""
    use_megatron_fsdp: bool = flag(False, aliases=("--use-custom-fsdp",), in_args=False)
    """Shard by --data-parallel-sharding-strategy, by default optim_grads_params (Megatron-LM's flag)."""
    num_distributed_optimizer_instances: int = flag(1, bounds=POSITIVE, in_args=False)
    """Replicas of the sharded state (HSDP): neighboring ranks shard it; corresponding ranks of other groups hold
    replicas and sum gradients after a step's passes."""
    ddp_bucket_size: int | None = flag(None, bounds=POSITIVE)
    """Parameters per gradient bucket; by default max(40,000,000, 1,000,000 x data-parallel size)."""
    ddp_average_in_collective: bool = flag(False, excludes=("calculate_per_token_loss",))
    """Average gradients in the collective, instead of dividing the loss or the gradients before the sum; without NCCL's
    NVLS."""
    use_nccl_ub: bool = flag(False, role="run", in_args=("nccl_ub",), excludes=("inprocess_restart",))
    """Allocate the buffers of gradients and gathered parameters by NCCL and register them with the communicators of
    data parallelism (user buffers), so that NCCL can use NVLS and fewer multiprocessors."""
    disable_symmetric_registration: bool = flag(False, role="run", needs="use_nccl_ub")
    """Register user buffers on each rank by itself, without symmetric memory, which needs NCCL 2.27."""
    grad_reduce_in_bf16: bool = flag(False, role="run", needs="bf16")
    """Accumulate and reduce the gradients of a bfloat16 model in bfloat16."""
    gradient_accumulation_fusion: bool = flag(
        True, negative="--no-gradient-accumulation-fusion", role="run", in_args=False
    )
    """Accumulate gradients of 16-bit weights in float32 within the GEMM, on CUDA. Off: round gradients of 16-bit
    weights to 16 bits before the float32 sum, as on CPU."""
    check_for_nan_in_loss_and_grad: bool = flag(
        True, negative="--no-check-for-nan-in-loss-and-grad", role="run", in_args=False
    )
    """Stop if a loss or a gradient is not finite. Off: continue if a loss or a gradient is not finite."""

    @property
    def shards_optimizer(self) -> bool:
        """Return whether each data-parallel rank keeps only its own shard of the optimizer state."""
        return self.use_distributed_optimizer or self.data_parallel_sharding_strategy != "no_shard"

    def shards_over(self, num_replicas: int) -> bool:
        """Return whether ``num_replicas`` ranks with the same weights share the optimizer state."""
        return self.shards_optimizer and self.num_shards(num_replicas) > 1

    def shards_weights_over(self, num_replicas: int) -> bool:
        """Return whether ``num_replicas`` ranks with the same weights each keep only a shard of them."""
        return self.shards_weights and self.shards_over(num_replicas)

    def num_shards(self, num_replicas: int) -> int:
        """Return over how many of the ranks with the same weights state is sharded; the other ranks hold copies."""
        return max(1, num_replicas // self.num_distributed_optimizer_instances)

    def grad_dtype(self, params_dtype: str) -> str:
        """Return the dtype in which gradients are accumulated and reduced; both dtypes are names."""
        if self.grad_reduce_in_bf16 and params_dtype == "bfloat16":
            return params_dtype
        return "float64" if params_dtype == "float64" else "float32"

    @property
    def shards_gradients(self) -> bool:
        """Return whether each data-parallel rank keeps only its own shard of the gradients."""
        return self.data_parallel_sharding_strategy in ("optim_grads", "optim_grads_params")

    @property
    def has_user_buffers(self) -> bool:
        """Return whether NCCL allocates the buffers of gradients and gathered parameters."""
        return self.use_nccl_ub and not self.shards_gradients

    @property
    def shards_weights(self) -> bool:
        """Return whether each data-parallel rank keeps only its own shard of the weights."""
        return self.data_parallel_sharding_strategy == "optim_grads_params"
