"""Copy tokenizer files from a model folder into a checkpoint and back."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.core.tokenizers.build_tokenizer import build_tokenizer
from megatron.core.tokenizers.tokenizer_file import read_json_object
from megatron.core.tokenizers.tokenizer_record import RECORD_FILE, TOKENIZER_FOLDER, record_tokenizer

_ENGINE_FILE = "tokenizer.json"
_VOCABULARY_FILE, _MERGES_FILE = "vocab.json", "merges.txt"
_FILES = (
    _ENGINE_FILE,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    _VOCABULARY_FILE,
    _MERGES_FILE,
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
)


def tokenizer_settings(folder: Path, vocab_size: int) -> dict[str, Any]:
    """Return the flags that build a model folder's tokenizer; bare ids where it has none that can be built."""
    if (folder / _ENGINE_FILE).is_file():
        return {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(folder.absolute())}
    vocabulary, merges = folder / _VOCABULARY_FILE, folder / _MERGES_FILE
    if vocabulary.is_file() and merges.is_file():
        return {
            "tokenizer_type": "GPT2BPETokenizer",
            "vocab_file": str(vocabulary.absolute()),
            "merge_file": str(merges.absolute()),
        }
    # Its vocabulary is one larger: the end of a document.
    return {"tokenizer_type": "NullTokenizer", "vocab_size": vocab_size - 1}


def copy_into_checkpoint(folder: Path, settings: Mapping[str, Any], checkpoint: Path) -> bool:
    """Leave the record of a model folder's tokenizer, and all of its files, in ``checkpoint/tokenizer``.

    Returns whether the folder has a tokenizer.

    Raises:
        TokenizerError: it cannot be built.
    """
    if settings["tokenizer_type"] == "NullTokenizer":
        return False
    record_tokenizer(build_tokenizer(**settings), checkpoint)
    _copy({name: folder / name for name in _FILES}, checkpoint / TOKENIZER_FOLDER)
    return True


def copy_into_model_folder(tokenizer: Path, target: Path) -> None:
    """Copy a tokenizer's files from a model folder, or from a checkpoint's tokenizer folder, under the usual names.

    Raises:
        TokenizerError: the checkpoint's record of the tokenizer is damaged.
    """
    files = {name: tokenizer / name for name in _FILES}
    if (tokenizer / RECORD_FILE).is_file():
        record = read_json_object(tokenizer / RECORD_FILE)
        if record.get("tokenizer_type") == "GPT2BPETokenizer":
            names = [tokenizer / str(entry["name"]) for entry in record["files"]]
            files |= dict(zip((_VOCABULARY_FILE, _MERGES_FILE), names))
        elif record.get("tokenizer_type") == "SentencePieceTokenizer":
            files["tokenizer.model"] = tokenizer / str(record["files"][0]["name"])
    _copy(files, target)


def end_of_text(tokenizer: Path | None) -> int | None:
    """Return the id that ends a document, as a checkpoint's tokenizer folder records it."""
    if tokenizer is None or not (tokenizer / RECORD_FILE).is_file():
        return None
    eod_id = read_json_object(tokenizer / RECORD_FILE).get("eod_id")
    return eod_id if isinstance(eod_id, int) else None


def _copy(files: Mapping[str, Path], target: Path) -> None:
    for name, path in files.items():
        if path.is_file() and not (target / name).exists():
            shutil.copyfile(path, target / name)
