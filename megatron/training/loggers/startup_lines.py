"""Start-up lines: precision, batches, data sets and schedule, with Megatron-LM's wording and order."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from typing import Any

from megatron.config import RunConfig, format_arguments, summarize
from megatron.core.config_base import config_from_dict
from megatron.core.datasets import (
    SEPARATE_FINAL_EPOCH_BELOW,
    BlendedDataset,
    DatasetSplits,
    FillInTheMiddle,
    GPTDataset,
    LaterPhase,
    SegmentChain,
    plan_epochs,
)
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import ScheduleConfig, reconcile_schedules
from megatron.core.parallel_state import ParallelState
from megatron.core.sharding import spec_of
from megatron.training import SampleTargets, schedule_of
from megatron.training.loggers.log_lines import format_datetime
from megatron.training.loggers.run_record import ARGUMENTS_FILE, RECORD_FOLDER

_FEW_BUCKETS = 8
_COMPILED = (
    "> compiling dataset index builder ...",
    ">>> done with dataset index builder. Compilation time: 0.000 seconds",
    "> compiling and loading fused kernels ...",
    ">>> done with compiling and loading fused kernels. Compilation time: 0.000 seconds",
)


def describe_precision(config: RunConfig) -> str:
    return f"using torch.{config.model.params_dtype} for parameters ..."


def describe_batch_and_tokenizer(config: RunConfig) -> str:
    """Format the lines between the arguments and the size of the vocabulary.

    A batch size schedule in steps has no line.
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
    """Format the lines after the seeds; ``start_time`` is the run's start in seconds, as returned by `time.time`."""
    compiled = _COMPILED if config.logging.log_megatron_lines else ()
    elapsed_s = time.time() - start_time
    moment = format_datetime("after megatron is initialized")
    return "\n".join([*compiled, f"time to initialize megatron (seconds): {elapsed_s:.3f}", moment])


def describe_buckets(
    ddp_chunks: Sequence[DistributedDataParallel], state: ParallelState, everything: bool
) -> str | None:
    """Format the lines on a pipeline stage's gradient buckets; None on ranks that print nothing.

    ``everything`` also lists the buckets if there are many, and the names of the parameters in each.
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
    """Print all arguments, or in a brief log a summary and the arguments that differ from their defaults."""
    options, save = config.logging, config.checkpoint.save
    if options.brief_log:
        record = None if save is None else f"{save}/{RECORD_FOLDER}/{ARGUMENTS_FILE}"
        log(summarize(config, record))
    if options.log_arguments or not options.brief_log:
        log(format_arguments(config))
    if options.log_arguments and not options.brief_log:
        log("--log-arguments has no effect here: only megatron train prints a summary of the arguments")
    if config.checkpoint.save is None and not config.training.skip_train:
        log("WARNING: --save is not set: this run will not save checkpoints")


_TITLES = {"train": "train", "valid": "validation", "test": "test"}


def describe_datasets(datasets: DatasetSplits, everything: bool) -> str:
    """Format the lines on the data sets of all splits, without a final newline.

    ``everything`` also describes a blend's data sets and the index files that were read.
    """
    lines = ["> building train, validation, and test datasets for GPT ..."] if everything else []
    splits = [_token_datasets(dataset) for dataset in (datasets.train, datasets.valid, datasets.test)]
    tasks = {dataset.config.fill_in_the_middle for split in splits for dataset in split}
    lines += [_describe_tasks(task) for task in tasks if task is not None]
    if everything or all(len(split) <= 1 for split in splits):
        for prefix in dict.fromkeys(dataset.indexed_dataset.prefix for split in splits for dataset in split):
            of_file = [[one for one in split if one.indexed_dataset.prefix == prefix] for split in splits]
            lines += _describe_file([one for split in of_file for one in split], everything)
    return "\n".join([*lines, "> finished creating GPT datasets ..."])


def describe_samples(datasets: DatasetSplits, targets: SampleTargets) -> str:
    """Format the line of a brief log on the samples that the run reads, and on the epochs if there are several."""
    counts = {"training": targets.train, "validation": targets.valid, "testing": targets.test}
    parts = []
    for (name, count), dataset in zip(counts.items(), (datasets.train, datasets.valid, datasets.test)):
        if dataset is None or count == 0:
            continue
        files = _token_datasets(dataset)
        epochs = files[0].usage.num_epochs if len(files) == 1 else 1
        many = f" ({epochs:,} epochs)" if epochs > 1 else ""
        if name != "training" and isinstance(dataset, Sized) and len(dataset) < targets.one_epoch_below:
            count = len(dataset)  # every evaluation reads these samples
        parts.append(f"{'all' if count is None else f'{count:,}'} for {name}{many}")
    return f" > samples: {', '.join(parts)}" if parts else " > samples: none"


def _describe_tasks(task: FillInTheMiddle) -> str:
    return (
        f" > filling in the middle of {task.rate:.0%} of documents, {task.spm_rate:.0%} of these "
        f"with the suffix first; tokens: prefix {task.prefix_id}, suffix {task.suffix_id}, middle {task.middle_id}, "
        f"pad {task.pad_id}"
    )


def _token_datasets(dataset: object) -> list[GPTDataset]:
    """Return the token file data sets that a split consists of."""
    if isinstance(dataset, GPTDataset):
        return [dataset]
    if isinstance(dataset, LaterPhase):
        return _token_datasets(dataset.dataset)
    parts: Sequence[object] = ()
    if isinstance(dataset, BlendedDataset):
        parts = dataset.datasets
    elif isinstance(dataset, SegmentChain):
        parts = dataset.segments
    return [found for part in parts for found in _token_datasets(part)]


def _describe_file(datasets: Sequence[GPTDataset], everything: bool) -> Iterator[str]:
    """Yield the lines on one token file and its splits."""
    if everything:
        yield f"data_prefix: {[datasets[0].indexed_dataset.prefix]}"
        yield " > building dataset index ..."
        yield "    reading sizes..."
        yield "    reading pointers..."
        yield "    reading document index..."
    yield f"    number of documents: {len(datasets[0].indexed_dataset)}"
    yield " > dataset split:"
    for name, dataset in {dataset.split_name: dataset for dataset in datasets}.items():
        first, end = dataset.sequences.start, dataset.sequences.stop
        yield f"    {_TITLES[name]}:"
        yield f"     document indices in [{first}, {end}) total of {end - first} documents"
    for dataset in datasets:
        if everything:
            yield from _describe_index(dataset)
        yield f"    total number of samples: {len(dataset)}"
        yield f"    total number of epochs: {dataset.usage.num_epochs}"


_INDICES = {"document_index": "doc-idx", "sample_index": "sample-idx", "shuffle_index": "shuffle-idx"}


def _describe_index(dataset: GPTDataset) -> Iterator[str]:
    """Yield the lines on building and loading the index of a data set."""
    built_s = dataset.built_s
    if built_s:
        yield " > WARNING: could not find index map files, building the indices on rank 0 ..."
    yield _describe_last_epoch(dataset)
    num_epochs, length, size = dataset.usage.num_epochs, dataset.config.sequence_length, len(dataset)
    before = {
        "sample_index": (
            "    using:",
            f"     number of documents:       {len(dataset.document_index) // num_epochs}",
            f"     number of epochs:          {num_epochs}",
            f"     sequence length:           {length}",
            f"     total number of samples:   {size}",
        ),
        "shuffle_index": (
            f" > building shuffle index with split [0, {dataset.num_shuffled_together}) and "
            f"[{dataset.num_shuffled_together}, {size}) ...",
        ),
    }
    for name, elapsed_s in built_s.items():
        yield from before.get(name, ())
        # Megatron's spelling, which scripts search for.
        yield f" > elasped time to build and save {_INDICES[name]} mapping (seconds): {elapsed_s:4f}"
    for name, path in dataset.index_files.items():
        yield f" > loading {_INDICES[name]} mapping from {path}"
    yield f"    loaded indexed file in {dataset.opened_s:3.3f} seconds"


def _describe_last_epoch(dataset: GPTDataset) -> str:
    wanted, length, per_epoch = (
        dataset.usage.num_samples,
        dataset.config.sequence_length,
        dataset.usage.samples_per_epoch,
    )
    tokens = dataset.indexed_dataset.count_tokens(dataset.sequences)
    plan = plan_epochs(tokens, length, wanted)
    if wanted is None or plan.num_epochs == 1:
        return " > only one epoch required, setting separate_last_epoch to False"
    last = wanted - ((plan.num_epochs - 1) * tokens - 1) // length
    is_apart = plan.separate_final_epoch
    return (
        f" > last epoch number of samples ({last}) is {'smaller' if is_apart else 'larger'} than "
        f"{SEPARATE_FINAL_EPOCH_BELOW:.0%} of number of samples per epoch ({per_epoch}), setting "
        f"separate_last_epoch to {is_apart}"
    )


_NAMES: Mapping[str, str] = {
    "max_lr": "learning rate",
    "min_lr": "minimum learning rate",
    "lr_warmup_steps": "warmup iterations",
    "lr_decay_steps": "total number of iterations",
    "lr_decay_style": "learning rate decay style",
    "start_wd": "start weight decay",
    "end_wd": "end weight decay",
    "wd_incr_steps": "total number of weight decay iterations",
    "wd_incr_style": "weight decay incr style",
}
"""Megatron's names of a schedule's values, in its order; its "iterations" are samples."""


def describe_schedule_values(state: Mapping[str, Any], config: RunConfig, is_extended: bool = False) -> str:
    """Format a line for each value of the resumed schedule: the checkpoint's value, or the run's override.

    ``state`` is the checkpoint's scheduler state. A run that ``is_extended`` uses its own schedule.

    Raises:
        CheckpointError: the schedules differ and no flag selects one of them.
    """
    flags = config.scheduler
    stored, is_override = config_from_dict(ScheduleConfig, state["schedule"]), flags.override_opt_param_scheduler
    chosen, _ = reconcile_schedules(
        stored,
        schedule_of(config),
        int(state["num_samples"]),
        override=is_override or is_extended,
        use_checkpoint=flags.use_checkpoint_opt_param_scheduler,
    )
    lines = []
    for field, name in _NAMES.items():
        value = getattr(chosen, field)
        if is_override or value != getattr(stored, field):
            lines.append(f" > overriding {name} value to {value}")
        else:
            lines.append(f" > using checkpoint value {value} for {name}")
    return "\n".join(lines)
