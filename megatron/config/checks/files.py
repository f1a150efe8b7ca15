"""Checks of files and folders: tokenizer, data and checkpoints."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from megatron.config.checks.base import Check
from megatron.config.data_config import INDEXED_DATASETS, RAW_DATASETS, extra_validation_sets
from megatron.config.resolution import DEFAULT_SPLIT
from megatron.config.run_config import RunConfig
from megatron.config.training_config import NATIVE_FORMAT
from megatron.core.datasets.conversation_file import ConversationFile, is_raw
from megatron.core.datasets.gpt_dataset_config import parse_blend, parse_split, split_boundaries, suggest_split
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.errors import ConfigurationError, DataError, StorageError
from megatron.core.object_store import PACKAGES, is_url, url_problem

_FOLDERS = ("save", "load", "pretrained_checkpoint", "data_cache_path")
_OPENED = ("data_path", "train_data_path", "valid_data_path", "test_data_path", "config")
_TEXTS = ("TEXT", "TOKEN")


def _check_byte_pair_files(config: RunConfig) -> Iterator[str]:
    tokenizer = config.tokenizer
    if tokenizer.tokenizer_type != "GPT2BPETokenizer":
        return
    files = (("--vocab-file", tokenizer.vocab_file), ("--merge-file", tokenizer.merge_file))
    for name, file in files:
        if file is None:
            yield (
                f"{name} is missing; --tokenizer-type GPT2BPETokenizer needs --vocab-file and --merge-file "
                "(NullTokenizer needs only --vocab-size)"
            )
        elif not os.path.isfile(file):
            yield f"{name} {file}: there is no such file; give the path of an existing one"


def _check_model_file(config: RunConfig) -> Iterator[str]:
    tokenizer = config.tokenizer
    if tokenizer.tokenizer_type in ("GPT2BPETokenizer", "NullTokenizer"):
        return
    if tokenizer.tokenizer_model is None:
        yield f"--tokenizer-model is missing; --tokenizer-type {tokenizer.tokenizer_type} needs it"
        return
    path = Path(tokenizer.tokenizer_model)
    if not path.exists():
        yield f"--tokenizer-model {path}: there is no such file or folder; give a local path"
    elif tokenizer.tokenizer_type == "HuggingFaceTokenizer":
        if path.is_dir() and not (path / "tokenizer.json").is_file():
            yield f"--tokenizer-model {path}: the folder has no tokenizer.json; save the fast tokenizer there"
    elif path.is_dir():
        yield f"--tokenizer-model {path} is a folder; {tokenizer.tokenizer_type} needs a file"


def _check_null_tokenizer(config: RunConfig) -> Iterator[str]:
    if config.tokenizer.tokenizer_type == "NullTokenizer" and config.tokenizer.vocab_size is None:
        yield "--vocab-size is missing; --tokenizer-type NullTokenizer needs it"


def _check_folders(config: RunConfig) -> Iterator[str]:
    for name, folder in (
        ("--save", config.checkpoint.save),
        ("--load", config.checkpoint.load),
        ("--tensorboard-dir", config.logging.tensorboard_dir),
        ("--data-cache-path", config.data.data_cache_path),
    ):
        if folder is not None and os.path.isfile(folder):
            yield f"{name} {folder} is a file; give a folder"
    if config.logging.record_schedule is not None and os.path.isdir(config.logging.record_schedule):
        yield f"--record-schedule {config.logging.record_schedule} is a folder; give a file"
    if config.logging.metrics_jsonl is not None and os.path.isdir(config.logging.metrics_jsonl):
        yield f"--metrics-jsonl {config.logging.metrics_jsonl} is a folder; give a file"


def _check_urls(config: RunConfig) -> Iterator[str]:
    for spec, value in config.flags():
        if spec.options.metavar in _TEXTS or spec.name in _OPENED:  # opening says what is wrong
            continue
        for text in value if isinstance(value, tuple) else (value,):
            if not isinstance(text, str):
                continue
            if spec.name in _FOLDERS:
                problem = url_problem(text)
                if problem is not None:
                    yield f"{spec.flags[0]}: {problem}"
            elif spec.name != "mlflow_tracking_uri" and is_url(text) and text.partition("://")[0] in PACKAGES:
                scheme = text.partition("://")[0]
                yield f"{spec.flags[0]} {scheme}://...: no object store can be used here; give a local path"


def _check_saving(config: RunConfig) -> Iterator[str]:
    checkpoint = config.checkpoint
    if checkpoint.save is None or checkpoint.local_save is not None or url_problem(checkpoint.save) is not None:
        return
    given = f"--save {checkpoint.save}"
    if checkpoint.ckpt_format != NATIVE_FORMAT:
        yield (
            f"--ckpt-format {checkpoint.ckpt_format} is written to a file system only, and {given} is in an object "
            f"store; give --ckpt-format {NATIVE_FORMAT}, or a folder"
        )
    if config.logging.log_progress:
        yield f"--log-progress appends to a file beside checkpoints, and {given} is in an object store; leave it out"


FILE_CHECKS = (
    Check(("tokenizer_type",), _check_byte_pair_files),
    Check(("tokenizer_type",), _check_model_file),
    Check(("tokenizer_type", "vocab_size"), _check_null_tokenizer),
    Check((), _check_folders),
    Check((), _check_urls),
    Check(("save", "ckpt_format"), _check_saving),
)


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


DATA_FILE_CHECKS = (
    Check(("sft", "dataset", "dataloader_type", "fim_rate"), _check_fine_tuning),
    Check(("data_path", "dataloader_type"), _check_sources),
    Check(("split",), _check_split),
    Check(("data_path", "split", "eval_iters", "eval_interval"), _check_blends),
    Check(("extra_valid_datalist", "extra_valid_data_samples", "extra_valid_data_names"), _check_extra_valid),
    Check(("eval_iters", "extra_valid_datalist", "full_validation", "dataloader_type"), _check_full_validation),
)
