"""Checks of the data paths, the files behind them, and the split."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.datasets.conversation_file import ConversationFile, is_raw
from megatron.core.datasets.gpt_dataset_config import parse_blend, parse_split, split_boundaries, suggest_split
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.errors import ConfigurationError, DataError, StorageError
from megatron.training.config.checks.check import Check
from megatron.training.config.data_config import INDEXED_DATASETS, RAW_DATASETS
from megatron.training.config.data_lists import extra_validation_sets
from megatron.training.config.resolution import DEFAULT_SPLIT
from megatron.training.config.run_config import RunConfig

_SET_NAMES = ("training", "validation", "test")


def _check_sources(config: RunConfig) -> Iterator[str]:
    """Let the data come from exactly one place."""
    data = config.data
    sources = {
        "--data-path": bool(data.data_path) and data.data_args_path is None,
        "--data-args-path": data.data_args_path is not None,
        "--train-data-path (or --valid-data-path, --test-data-path)": (
            data.has_data_per_split and data.per_split_data_args_path is None
        ),
        "--per-split-data-args-path": data.per_split_data_args_path is not None,
        "--mock-data": data.mock_data,
    }
    given = [name for name, is_given in sources.items() if is_given]
    if not given and data.dataloader_type != "external":
        yield "no data: give --data-path PREFIX, --train-data-path PREFIX or --mock-data"
    elif len(given) > 1:
        yield f"{' and '.join(given)} exclude each other; keep one"
    if data.split is not None and data.has_data_per_split:
        yield f"--split {data.split} has no effect where each set has data of its own; leave it out"
    if data.has_data_per_split and not data.train_data_path and not config.training.skip_train:
        yield "--train-data-path is missing; --valid-data-path and --test-data-path alone train nothing"


def _check_split(config: RunConfig) -> Iterator[str]:
    split = config.data.split
    if split is None or config.data.has_data_per_split:
        return
    try:
        shares = parse_split(split)
    except ConfigurationError as error:
        yield from error.problems
        return
    if shares[0] == 0 and not config.training.skip_train:
        yield f"--split {split}: the training set is empty; give its share first, such as {DEFAULT_SPLIT}"


def _check_blends(config: RunConfig) -> Iterator[str]:
    for name, values in _lists(config):
        try:
            blend = parse_blend(values)
        except ConfigurationError as error:
            yield from (f"{name}: {problem}" for problem in error.problems)
            continue
        for prefix, weight in zip(blend.prefixes, blend.weights or (1.0,) * len(blend.prefixes)):
            if not 0 < weight < float("inf"):
                yield f"{name}: the weight of {prefix} is {weight:g}; give a positive weight, or leave the data set out"
        for prefix in dict.fromkeys(blend.prefixes):
            yield from _check_kind(config, name, prefix)
            yield from _check_data_set(config, name, prefix)


def _check_extra_valid(config: RunConfig) -> Iterator[str]:
    try:
        sets = extra_validation_sets(config.validation)
    except ConfigurationError as error:
        yield from error.problems
        return
    for extra in sets:
        for prefix, weight in zip(extra.blend.prefixes, extra.blend.weights or (1.0,) * len(extra.blend.prefixes)):
            if not 0 < weight < float("inf"):
                yield f"validation set {extra.name}: the weight of {prefix} is {weight:g}; give a positive weight"
            try:
                _open(config, prefix)
            except (DataError, StorageError) as error:
                yield f"validation set {extra.name}: {error}"


def _check_full_validation(config: RunConfig) -> Iterator[str]:
    validation = config.validation
    if validation.eval_iters == 0 and (validation.full_validation or validation.extra_valid_datalist):
        flag = "--full-validation" if validation.full_validation else "--extra-valid-datalist"
        yield f"{flag} has nothing to do with --eval-iters 0, which turns evaluation off; give --eval-iters 1 or more"
    if validation.full_validation and config.data.dataloader_type == "external":
        yield "--full-validation needs data sets; with --dataloader-type external give --eval-iters"


def _check_data_set(config: RunConfig, name: str, prefix: str) -> Iterator[str]:
    """Report a data set whose files cannot be used, or that leaves a wanted set empty.

    An empty test set is no problem, and building the data reports it: small data sets have one with everyday splits.
    """
    try:
        data_set = _open(config, prefix)
    except (DataError, StorageError) as error:
        yield f"{name} {prefix}: {error}"
        return
    if data_set is None:
        return
    num_sequences = len(data_set)
    if num_sequences == 0:
        yield f"{name} {prefix}: the data set holds no documents"
        return
    for set_name, size in _wanted_sets(config, num_sequences):
        if size == 0 and set_name != "test":
            yield (
                f"--split {config.data.split} of the {num_sequences} documents of {prefix} leaves the "
                f"{set_name} set empty; {_split_that_works(config, num_sequences)}"
            )


def _open(config: RunConfig, prefix: str) -> IndexedDataset | None:
    """Open a data set; return None for jsonl of conversations, which the tokenizer has yet to read."""
    if not config.data.sft:
        return IndexedDataset(prefix)
    return None if is_raw(prefix) else ConversationFile(prefix)


def _check_fine_tuning(config: RunConfig) -> Iterator[str]:
    data = config.data
    for flag, is_given in (("--mock-data", data.mock_data), ("--dataloader-type external", _is_external(config))):
        if is_given and (data.sft or data.fim_rate):
            what = "--sft needs conversations" if data.sft else "--fim-rate needs text"
            yield f"{what}, and {flag} has none; give --data-path in its place"
    if data.sft and data.fim_rate:
        yield "--sft and --fim-rate exclude each other; keep one"
    if data.dataset is not None and "SFT" in data.dataset and not data.sft:
        yield f"--dataset {data.dataset} is of conversations; add --train-mode finetune or --sft"


def _check_kind(config: RunConfig, name: str, prefix: str) -> Iterator[str]:
    """Compare a path with what --dataset says that it is."""
    dataset = config.data.dataset
    if config.data.sft and dataset is not None and is_raw(prefix) != (dataset in RAW_DATASETS):
        kind, others = ("a file", RAW_DATASETS) if is_raw(prefix) else ("no file", INDEXED_DATASETS)
        yield f"{name} {prefix} is {kind}, which --dataset {dataset} does not mean; give {' or '.join(others)}"


def _is_external(config: RunConfig) -> bool:
    return config.data.dataloader_type == "external"


def _wanted_sets(config: RunConfig, num_sequences: int) -> list[tuple[str, int | None]]:
    """Return (name, number of sequences) of each set that the run would read; None where its share is 0."""
    shares = _shares(config)
    if shares is None:
        return []
    evaluates = config.validation.eval_iters > 0
    wanted = (not config.training.skip_train, evaluates and config.validation.eval_interval > 0, evaluates)
    return [
        (name, None if sequences is None else len(sequences))
        for name, sequences, is_wanted in zip(_SET_NAMES, split_boundaries(shares, num_sequences), wanted)
        if is_wanted
    ]


def _shares(config: RunConfig) -> tuple[float, float, float] | None:
    """Return the shares of the three sets, or None where no readable split makes them."""
    if config.data.has_data_per_split or config.data.split is None:
        return None
    try:
        return parse_split(config.data.split)
    except ConfigurationError:
        return None  # _check_split reports it


def _split_that_works(config: RunConfig, num_sequences: int) -> str:
    split = suggest_split(_shares(config) or (), num_sequences)
    return "give a data set with more documents, or --split 1,0,0" if split is None else f"give --split {split}"


def _lists(config: RunConfig) -> list[tuple[str, tuple[str, ...]]]:
    data = config.data
    whole = "--data-path" if data.data_args_path is None else "--data-args-path"
    lists = [
        (whole, data.data_path),
        ("--train-data-path", data.train_data_path),
        ("--valid-data-path", data.valid_data_path),
        ("--test-data-path", data.test_data_path),
    ]
    return [(name, values) for name, values in lists if values and not data.mock_data]


CHECKS = (
    Check(("sft", "dataset", "dataloader_type", "fim_rate"), _check_fine_tuning),
    Check(("data_path", "dataloader_type"), _check_sources),
    Check(("split",), _check_split),
    Check(("data_path", "split", "eval_iters", "eval_interval"), _check_blends),
    Check(("extra_valid_datalist", "extra_valid_data_samples", "extra_valid_data_names"), _check_extra_valid),
    Check(("eval_iters", "extra_valid_datalist", "full_validation", "dataloader_type"), _check_full_validation),
)
