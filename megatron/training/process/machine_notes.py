"""Flags that this machine, or what started the process, leaves without effect: one line for each."""

from __future__ import annotations

from collections.abc import Iterator

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
