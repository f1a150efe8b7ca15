"""Copy the tokenizer and the generation settings from a model folder into a checkpoint, and back."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.checkpoint.formats.huggingface.settings import GENERATION_FILE
from megatron.core.tokenizers import (
    END_OF_TEXT,
    MODEL_FOLDER_FILES,
    RECORD_FILE,
    SENTENCE_PIECE_TYPES,
    TOKENIZER_FOLDER,
    EngineTokenizer,
    NullTokenizer,
    Tokenizer,
    read_json_object,
    rebuild_tokenizer,
    record_tokenizer,
)
from megatron.core.tokenizers.build_tokenizer import build_tokenizer

_ENGINE_FILE = "tokenizer.json"
_CONFIG_FILE, _SPECIAL_FILE = "tokenizer_config.json", "special_tokens_map.json"
_VOCABULARY_FILE, _MERGES_FILE = "vocab.json", "merges.txt"
_PIECES_FILE = "tokenizer.model"
_USUAL_NAMES = {
    "GPT2BPETokenizer": (_VOCABULARY_FILE, _MERGES_FILE),
    "HuggingFaceTokenizer": (_ENGINE_FILE,),
    **dict.fromkeys(SENTENCE_PIECE_TYPES, (_PIECES_FILE,)),
}
"""What a model folder calls the files that a kind of tokenizer is built from."""


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
    return {"tokenizer_type": NullTokenizer.name, "vocab_size": vocab_size - 1}


def copy_into_checkpoint(folder: Path, settings: Mapping[str, Any], checkpoint: Path) -> bool:
    """Leave the record of a model folder's tokenizer, and all of its files, in ``checkpoint/tokenizer``.

    Returns whether the folder has any of them; bare ids are recorded where none makes a tokenizer.

    Raises:
        TokenizerError: it cannot be built.
    """
    files = {name: folder / name for name in MODEL_FOLDER_FILES}
    if not any(path.is_file() for path in files.values()):
        return False
    record_tokenizer(build_tokenizer(**settings), checkpoint)
    _copy(files, checkpoint / TOKENIZER_FOLDER)
    return True


def copy_into_model_folder(tokenizer: Path, target: Path) -> None:
    """Copy a tokenizer's files from a model folder, or from a checkpoint's tokenizer folder, under the usual names.

    Raises:
        TokenizerError: the checkpoint's record of the tokenizer is damaged.
    """
    files = {name: tokenizer / name for name in MODEL_FOLDER_FILES}
    if (tokenizer / RECORD_FILE).is_file():
        record = read_json_object(tokenizer / RECORD_FILE)
        usual = _USUAL_NAMES.get(str(record.get("tokenizer_type")), ())
        files |= {name: tokenizer / str(entry["name"]) for name, entry in zip(usual, record["files"])}
    _copy(files, target)


def complete_model_folder(tokenizer: Path, target: Path) -> None:
    """Write what transformers needs beside a tokenizer's files to encode as it does, where nothing says it yet.

    Without ``tokenizer_config.json`` transformers takes the tokenizer of the model's family, whose ids are others.

    Raises:
        TokenizerError: the recorded tokenizer cannot be built.
    """
    if (target / _CONFIG_FILE).exists() or not (tokenizer / RECORD_FILE).is_file():
        return
    record = read_json_object(tokenizer / RECORD_FILE)
    kind = record.get("tokenizer_type")
    if kind in SENTENCE_PIECE_TYPES:
        pieces = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": kind == "Llama2Tokenizer"}
        _write(target / _CONFIG_FILE, pieces | {"add_eos_token": False, "legacy": True})
    elif kind in _USUAL_NAMES:
        _describe_engine(rebuild_tokenizer(record, tokenizer), target)


def _describe_engine(built: Tokenizer, target: Path) -> None:
    assert isinstance(built, EngineTokenizer)
    description = json.loads(built.tokenizer_json())
    end = next((text for text, number in built.vocabulary().items() if number == built.eod_id), None)
    if not (target / _ENGINE_FILE).exists():
        special = {"id": built.eod_id, "content": end, "single_word": False, "lstrip": False, "rstrip": False}
        description["added_tokens"] += [special | {"normalized": False, "special": True}] if end == END_OF_TEXT else []
        _write(target / _ENGINE_FILE, description)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    special_tokens = {} if end is None else {"eos_token": end}
    _write(target / _CONFIG_FILE, settings | special_tokens)
    if special_tokens and not (target / _SPECIAL_FILE).exists():
        _write(target / _SPECIAL_FILE, special_tokens)


def end_of_text(tokenizer: Path | None) -> Any:
    """Return the id that ends a text: what the generation settings say, or else what the tokenizer's record says."""
    if tokenizer is None:
        return None
    for name, key in ((GENERATION_FILE, "eos_token_id"), (RECORD_FILE, "eod_id")):
        found = read_json_object(tokenizer / name).get(key) if (tokenizer / name).is_file() else None
        if found is not None:
            return found
    return None


def _copy(files: Mapping[str, Path], target: Path) -> None:
    for name, path in files.items():
        if path.is_file() and not (target / name).exists():
            shutil.copyfile(path, target / name)


def _write(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
