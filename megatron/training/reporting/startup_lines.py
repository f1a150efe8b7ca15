"""Start-up lines: what Megatron prints from its first line to its first iteration, in its words and order.

Lines that say something are always printed; those of work that is not done here, such as compiling kernels, and the
long ones only with ``--log-megatron-lines``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.parallel_state import ParallelState
from megatron.core.sharding import spec_of
from megatron.training.config.argument_block import format_arguments, summarize
from megatron.training.config.run_config import RunConfig
from megatron.training.reporting.live_line import is_terminal
from megatron.training.reporting.log_lines import format_datetime

_FEW_BUCKETS = 8
_COMPILED = (
    "> compiling dataset index builder ...",
    ">>> done with dataset index builder. Compilation time: 0.000 seconds",
    "> compiling and loading fused kernels ...",
    ">>> done with compiling and loading fused kernels. Compilation time: 0.000 seconds",
)


def describe_precision(config: RunConfig) -> str:
    """Return the line on the dtype of the parameters."""
    return f"using torch.{config.model.params_dtype} for parameters ..."


def describe_batch_and_tokenizer(config: RunConfig) -> str:
    """Return the lines between the arguments and the size of the vocabulary.

    Sizes of a batch that change in given steps have no line.
    """
    training = config.training
    lines = []
    if len(training.rampup_batch_size) == 3:
        first, increment, samples = training.rampup_batch_size
        lines.append(
            f"will use batch size rampup starting from global batch size {first} to global batch size "
            f"{training.global_batch_size} with batch size increments {increment} over {samples} samples."
        )
    elif not training.batch_sizes.steps:
        count = training.global_batch_size // (training.micro_batch_size * config.data_parallel_size)
        lines.append(f"setting number of micro-batches to constant {count}")
    return "\n".join([*lines, f"> building {config.tokenizer.tokenizer_type} tokenizer ..."])


def describe_initialized(config: RunConfig, start_time: float) -> str:
    """Return the lines that follow the seeds; ``start_time`` is when the run began, as `time.time` says it."""
    compiled = _COMPILED if config.logging.log_megatron_lines else ()
    elapsed_s = time.time() - start_time
    moment = format_datetime("after megatron is initialized")
    return "\n".join([*compiled, f"time to initialize megatron (seconds): {elapsed_s:.3f}", moment])


def describe_buckets(
    ddp_chunks: Sequence[DistributedDataParallel], state: ParallelState, everything: bool
) -> str | None:
    """Return the lines on a pipeline stage's gradient buckets; None on ranks that leave them to another.

    Many buckets, and the names of the parameters in each, are listed where ``everything`` is asked for.
    """
    if not (state.tp.is_first and state.dp_cp.is_first):
        return None
    return "\n".join(line for chunk in ddp_chunks for line in _describe_chunk(chunk, everything))


def _describe_chunk(chunk: DistributedDataParallel, everything: bool) -> Iterator[str]:
    for buffer in chunk.grad_buffers:
        yield f"Number of buckets for gradient all-reduce / reduce-scatter: {len(buffer.buckets)}"
        if len(buffer.buckets) > _FEW_BUCKETS and not everything:
            continue
        for number, bucket in enumerate(buffer.buckets, start=1):
            parameters = buffer.parameters_of(bucket)
            count = sum(parameter.numel() for parameter in parameters)
            yield f"Params for bucket {number} ({count} elements, {bucket.layout.num_elements} padded size):"
            if everything:
                yield from (f"\tmodule.{spec_of(parameter).name}" for parameter in parameters)


def log_arguments(config: RunConfig, log: Callable[[str], None]) -> None:
    """Print the arguments: all of them, or on a terminal a few."""
    asks = config.logging.log_arguments
    log(format_arguments(config) if asks or not is_terminal() else summarize(config))
    if asks and not is_terminal():
        log("--log-arguments has no effect: all arguments are printed wherever standard output is no terminal")
    if config.checkpoint.save is None and not config.training.skip_train:
        log("WARNING: --save is not given: nothing will be left of this run but its log")
