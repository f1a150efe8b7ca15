"""Copy the tokenizer and the generation settings between a model folder and a checkpoint."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.checkpoint.formats.huggingface.settings import CONFIG_FILE, GENERATION_FILE
from megatron.core.console import print_line
from megatron.core.datasets import SFT_TEMPLATE, TEMPLATE_FILE, find_template
from megatron.core.errors import DataError
from megatron.core.tokenizers import (
    END_OF_TEXT,
    MODEL_FOLDER_FILES,
    RECORD_FILE,
    SENTENCE_PIECE_TYPES,
    TOKENIZER_FOLDER,
    ByteTokenizer,
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
"""Names in a model folder of the files that each type of tokenizer is built from."""


def tokenizer_settings(folder: Path, vocab_size: int) -> dict[str, Any]:
    """Return the settings that build a model folder's tokenizer; a NullTokenizer if the folder has no supported one."""
    if (folder / _ENGINE_FILE).is_file():
        return {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(folder.absolute())}
    vocabulary, merges = folder / _VOCABULARY_FILE, folder / _MERGES_FILE
    if vocabulary.is_file() and merges.is_file():
        return {
            "tokenizer_type": "GPT2BPETokenizer",
            "vocab_file": str(vocabulary.absolute()),
            "merge_file": str(merges.absolute()),
        }
    # A NullTokenizer adds one id for the end of document.
    return {"tokenizer_type": NullTokenizer.name, "vocab_size": vocab_size - 1}


def copy_into_checkpoint(folder: Path, settings: Mapping[str, Any], checkpoint: Path) -> bool:
    """Write the record of a model folder's tokenizer, and all of its files, to ``checkpoint/tokenizer``.

    Returns whether the folder has any tokenizer files. A NullTokenizer is recorded if they do not form a tokenizer.

    Raises:
        TokenizerError: the tokenizer cannot be built.
    """
    files = {name: folder / name for name in MODEL_FOLDER_FILES}
    if not any(path.is_file() for path in files.values()):
        return False
    record_tokenizer(build_tokenizer(**settings), checkpoint)
    _copy(files, checkpoint / TOKENIZER_FOLDER)
    return True


def copy_into_model_folder(tokenizer: Path, target: Path) -> None:
    """Copy tokenizer files from a model folder or a checkpoint's tokenizer folder, under their standard names.

    Raises:
        TokenizerError: the checkpoint's record of the tokenizer is damaged.
    """
    files = {name: tokenizer / name for name in MODEL_FOLDER_FILES}
    if (tokenizer / RECORD_FILE).is_file():
        record = read_json_object(tokenizer / RECORD_FILE)
        usual = _USUAL_NAMES.get(str(record.get("tokenizer_type")), ())
        files |= {name: tokenizer / str(entry["name"]) for name, entry in zip(usual, record["files"])}
    _copy(files, target)


def complete_model_folder(tokenizer: Path, target: Path, model_type: str) -> None:
    """Write the missing files and settings with which transformers builds the same tokenizer.

    Without ``tokenizer_config.json`` transformers builds the architecture's default tokenizer, whose ids differ, except
    for the files of GPT-2's tokenizer in a ``gpt2`` folder.

    Raises:
        TokenizerError: the recorded tokenizer cannot be built.
    """
    if (target / _CONFIG_FILE).exists() or not (tokenizer / RECORD_FILE).is_file():
        return
    record = read_json_object(tokenizer / RECORD_FILE)
    kind = record.get("tokenizer_type")
    if model_type == "gpt2" and kind != ByteTokenizer.name:
        return
    if kind in SENTENCE_PIECE_TYPES:
        pieces = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": kind == "Llama2Tokenizer"}
        _write(target / _CONFIG_FILE, pieces | {"add_eos_token": False, "legacy": True})
    elif kind in _USUAL_NAMES or kind == ByteTokenizer.name:
        _describe_engine(rebuild_tokenizer(record, tokenizer), target)


def write_chat_template(tokenizer: Path, target: Path, data: Mapping[str, Any]) -> None:
    """Write the chat template of a fine-tuning to a model folder, unless it is the tokenizer's own.

    ``data`` is the data section of the run's configuration. If the file of --chat-template is gone, a line on standard
    error says that the folder has no template.
    """
    if not data.get("sft") or not (tokenizer / RECORD_FILE).is_file():
        return
    choice = data.get("chat_template")
    built = rebuild_tokenizer(read_json_object(tokenizer / RECORD_FILE), tokenizer)
    if choice is None and find_template(built, None) is not None:
        return
    try:
        found = find_template(built, choice, SFT_TEMPLATE)
    except DataError as error:
        print_line(f"WARNING: the chat template of the fine-tuning is not written to {target}: {error}", sys.stderr)
        return
    assert found is not None, "there is a fallback"
    (target / TEMPLATE_FILE).write_text(found.text, encoding="utf-8")


def _describe_engine(built: Tokenizer, target: Path) -> None:
    assert isinstance(built, EngineTokenizer | ByteTokenizer)
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
    """Return the end-of-sequence id from generation settings, else the tokenizer's record or a model's settings."""
    if tokenizer is None:
        return None
    for name, key in ((GENERATION_FILE, "eos_token_id"), (RECORD_FILE, "eod_id"), (CONFIG_FILE, "eos_token_id")):
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
