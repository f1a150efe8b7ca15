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
    """Cut the optimizer's state over the data-parallel ranks."""
    overlap_grad_reduce: bool = False
    """Reduce gradients while the backward pass still runs."""
    overlap_param_gather: bool = False
    """Gather the distributed optimizer's parameters while the forward pass runs."""
    overlap_param_gather_with_optimizer_step: bool = flag(
        False, role="run", in_args=False, where=("overlap_param_gather", True)
    )
    """Begin to gather each bucket of parameters as soon as it is updated, while the next one is."""
    data_parallel_sharding_strategy: str = flag(
        "no_shard", choices=("no_shard", "optim", "optim_grads", "optim_grads_params"), in_args=False
    )
    """What the data-parallel ranks share among them in place of holding copies: nothing, the optimizer's state
    (the same as --use-distributed-optimizer), that and the gradients, or these and the weights, which are gathered
    layer by layer as passes need them."""
    use_torch_fsdp2: bool = flag(False, in_args=False)
    """The same as --data-parallel-sharding-strategy optim_grads_params, in the spelling of Megatron-LM."""
    use_megatron_fsdp: bool = flag(False, aliases=("--use-custom-fsdp",), in_args=False)
    """Shard as --data-parallel-sharding-strategy says, in the spelling of Megatron-LM, or optim_grads_params where that
    is not given."""
    num_distributed_optimizer_instances: int = flag(1, bounds=POSITIVE, in_args=False)
    """Number of copies of what the data-parallel ranks share among them: neighbors shard it, and the ranks in the same
    place of other neighborhoods hold copies, whose gradients are summed when a step's passes have ended."""
    ddp_bucket_size: int | None = flag(None, bounds=POSITIVE)
    """Number of parameters in one gradient bucket; by default max(40,000,000, 1,000,000 x data-parallel
    size)."""
    ddp_average_in_collective: bool = flag(False, excludes=("calculate_per_token_loss",))
    """Average gradients in the collective instead of dividing the loss by the number of replicas, or the gradients
    before the sum. NCCL cannot use NVLS for it."""
    grad_reduce_in_bf16: bool = flag(False, role="run", needs="bf16")
    """Accumulate and reduce the gradients of a bfloat16 model in bfloat16."""
    gradient_accumulation_fusion: bool = flag(
        True, negative="--no-gradient-accumulation-fusion", role="run", in_args=False
    )
    """Add the gradients of 16-bit weights to their float32 sums within the matrix product, on CUDA. Off: round the
    gradients of 16-bit weights to 16 bits before they are added to their float32 sums, as a CPU does."""
    check_for_nan_in_loss_and_grad: bool = flag(
        True, negative="--no-check-for-nan-in-loss-and-grad", role="run", in_args=False
    )
    """Stop when a loss or a gradient is not finite. Off: do not stop when a loss or a gradient is not finite."""

    @property
    def shards_optimizer(self) -> bool:
        """Return whether each data-parallel rank keeps only its own shard of the optimizer state."""
        return self.use_distributed_optimizer or self.data_parallel_sharding_strategy != "no_shard"

    def shards_over(self, num_replicas: int) -> bool:
        """Return whether ``num_replicas`` ranks with the same weights share the optimizer state."""
        return self.shards_optimizer and self.num_shards(num_replicas) > 1

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
    def shards_weights(self) -> bool:
        """Return whether each data-parallel rank keeps only its own shard of the weights."""
        return self.data_parallel_sharding_strategy == "optim_grads_params"
