"""Flags that this machine, or what started the process, leaves without effect: one line for each."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.training.config.run_config import RunConfig


def machine_notes(config: RunConfig, is_cuda: bool, has_launcher_rank: bool) -> Iterator[str]:
    """Yield a line for each given flag that changes nothing in this process.

    ``has_launcher_rank`` tells that the environment says which device is this process's.
    """
    local_rank = config.initialization.local_rank
    if local_rank is not None and has_launcher_rank:
        yield f"--local-rank {local_rank} has no effect: the environment's LOCAL_RANK is used"
    elif local_rank is not None and not is_cuda:
        yield f"--local-rank {local_rank} has no effect on a CPU: it is the number of a CUDA device"
    if is_cuda:
        return
    level = config.training.empty_unused_memory_level
    if level:
        yield f"--empty-unused-memory-level {level} has no effect on a CPU: only CUDA memory is kept after use"
    if config.initialization.disable_bf16_reduced_precision_matmul:
        yield "--disable-bf16-reduced-precision-matmul has no effect on a CPU, whose sums are float32"
    if not config.ddp.gradient_accumulation_fusion:
        yield (
            "--no-gradient-accumulation-fusion has no effect on a CPU: gradients of 16-bit weights are always rounded "
            "before they are added to their float32 sums there"
        )
    yield from _offload_notes(config.optimizer)


def _offload_notes(optimizer: OptimizerConfig) -> Iterator[str]:
    if not optimizer.optimizer_cpu_offload:
        return
    if optimizer.use_torch_optimizer_for_cpu_offload:
        yield "--use-torch-optimizer-for-cpu-offload has no effect on a CPU: apex has no optimizer there"
    for flag, is_pinned in (
        ("--no-pin-cpu-grads", optimizer.pin_cpu_grads),
        ("--no-pin-cpu-params", optimizer.pin_cpu_params),
    ):
        if not is_pinned:
            yield f"{flag} has no effect on a CPU: memory is pinned for copies to and from a device of its own"
    margin = optimizer.optimizer_offload_auto_threshold
    if optimizer.optimizer_offload_policy == "auto" and margin != OptimizerConfig.optimizer_offload_auto_threshold:
        yield f"--optimizer-offload-auto-threshold {margin} has no effect on a CPU: it has no memory of its own to fill"
