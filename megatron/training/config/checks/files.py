"""Checks that the tokenizer's files are there, and that folders are folders, or URLs where these can be used."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from megatron.core.object_store import PACKAGES, is_url, url_problem
from megatron.training.config.checkpoint_config import NATIVE_FORMAT
from megatron.training.config.checks.check import Check
from megatron.training.config.run_config import RunConfig

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


CHECKS = (
    Check(("tokenizer_type",), _check_byte_pair_files),
    Check(("tokenizer_type",), _check_model_file),
    Check(("tokenizer_type", "vocab_size"), _check_null_tokenizer),
    Check((), _check_folders),
    Check((), _check_urls),
    Check(("save", "ckpt_format"), _check_saving),
)
