"""The parameters of the model that the code builds, compared with those that a plan counts in closed form.

The model is built on torch's meta device, where tensors have shapes and no memory.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import cast

from megatron.advice.explanation import first_rank
from megatron.planning.theoretical_memory import ModelSize
from megatron.training.config.run_config import RunConfig

# Torch is imported by the functions that need it: the explanation is printed before.


def warn_of_difference(config: RunConfig, size: ModelSize) -> None:
    """Print on standard error how the model that is built differs from the planned size, if it does."""
    line = difference_from_built(config, size)
    if line is not None:
        print(line, file=sys.stderr)


def difference_from_built(config: RunConfig, size: ModelSize) -> str | None:
    """Return a line that says how the model that is built differs from the planned size, or None.

    If the model cannot be built, for example because a package is missing, return a line that says so.
    """
    unlike = []
    for stage, planned in enumerate(size.shards):
        try:
            built = _built_parameters(config, stage)
        except Exception as error:  # noqa: BLE001 whatever a changed model raises: the plan itself is already printed
            raised = f"{type(error).__name__}: {' '.join(str(error).split())}"
            return f"WARNING: the planned parameters are not checked: building the model raises {raised}"
        if built != planned:
            unlike.append(f"{built} on each rank of stage {stage} (planned: {planned}, {built - planned:+})")
    if not unlike:
        return None
    return (
        f"WARNING: the model that the code builds has other parameters than planned: {'; '.join(unlike)}; memory, "
        "time, communication and FLOPs of the plan leave the difference out: add it to megatron/planning, or allow "
        "for it"
    )


def _built_parameters(config: RunConfig, stage: int) -> int:
    """Return the number of parameters that the first rank of a stage holds."""
    import torch

    import pretrain_gpt
    from megatron.core.device import Device
    from megatron.core.parallel_state import describe_parallel_state
    from megatron.core.tensor_parallel.random import RngStreams
    from megatron.training.process.initialize import Runtime

    class MetaDevice(Device):
        """Place parameters on the meta device."""

        @property
        def torch_device(self) -> torch.device:
            return torch.device("meta")

    sizes = config.parallel_sizes
    state = describe_parallel_state(first_rank(sizes, stage), sizes.world_size, sizes)
    runtime = Runtime(MetaDevice("cpu"), state, RngStreams(Device("cpu"), config.initialization.seed, state.place))
    # Initial values take minutes to draw.
    without_values = dataclasses.replace(config.initialization, seed=cast(int, None))
    seedless = dataclasses.replace(config, initialization=without_values)
    chunks = [pretrain_gpt.provide_model(seedless, runtime, contents) for contents in config.stage_layout.chunks(stage)]
    return sum(parameter.numel() for chunk in chunks for parameter in chunk.parameters())
