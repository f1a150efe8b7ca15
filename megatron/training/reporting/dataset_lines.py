"""Lines on a run's data sets in Megatron's words: which documents each split has, and how many samples and epochs.

A document is what Megatron's lines call so: one sequence of the token file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron.core.datasets.blended_dataset import BlendedDataset, LaterPhase, SegmentChain
from megatron.core.datasets.blended_megatron_dataset_builder import DatasetSplits
from megatron.core.datasets.fill_in_the_middle import FillInTheMiddle
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.core.datasets.index_builder import SEPARATE_FINAL_EPOCH_BELOW, plan_epochs

_TITLES = {"train": "train", "valid": "validation", "test": "test"}


def describe_datasets(datasets: DatasetSplits, everything: bool) -> str:
    """Return the lines on the data sets of all splits, without an end of line.

    A blend's data sets, and which index files were read, are described where ``everything`` is asked for.
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


def _describe_tasks(task: FillInTheMiddle) -> str:
    return (
        f" > filling in the middle of {task.rate:.0%} of documents, {task.spm_rate:.0%} of these "
        f"with the suffix first; tokens: prefix {task.prefix_id}, suffix {task.suffix_id}, middle {task.middle_id}, "
        f"pad {task.pad_id}"
    )


def _token_datasets(dataset: object) -> list[GPTDataset]:
    """Return the data sets of token files that a split is made of."""
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
    """Yield the lines on one token file and the splits that are cut from it."""
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


def _describe_index(dataset: GPTDataset) -> Iterator[str]:
    """Yield the lines on how the last epoch is shuffled, and on the files of the index."""
    wanted, length, per_epoch = (
        dataset.usage.num_samples,
        dataset.config.sequence_length,
        dataset.usage.samples_per_epoch,
    )
    tokens = dataset.indexed_dataset.count_tokens(dataset.sequences)
    plan = plan_epochs(tokens, length, wanted)
    if wanted is None or plan.num_epochs == 1:
        yield " > only one epoch required, setting separate_last_epoch to False"
    else:
        last = wanted - ((plan.num_epochs - 1) * tokens - 1) // length
        is_apart = plan.separate_final_epoch
        yield (
            f" > last epoch number of samples ({last}) is {'smaller' if is_apart else 'larger'} than "
            f"{SEPARATE_FINAL_EPOCH_BELOW:.0%} of number of samples per epoch ({per_epoch}), setting "
            f"separate_last_epoch to {is_apart}"
        )
    for name, kind in (("document_index", "doc-idx"), ("sample_index", "sample-idx"), ("shuffle_index", "shuffle-idx")):
        if name in dataset.index_files:
            yield f" > loading {kind} mapping from {dataset.index_files[name]}"
