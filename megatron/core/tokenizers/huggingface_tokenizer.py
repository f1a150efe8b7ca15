"""Hugging Face tokenizers (``tokenizer.json``), and their names and sizes in Pai-Megatron-Patch.

Each value of Pai-Megatron-Patch's ``--patch-tokenizer-type`` denotes the Hugging Face tokenizer in the folder of
``--load``. The sizes match Pai-Megatron-Patch 0.8 to 0.12.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.core.errors import TokenizerError
from megatron.core.tokenizers.gpt2_bpe_tokenizer import GPT2BPETokenizer, byte_characters, check_merges
from megatron.core.tokenizers.tokenizer import read_added_tokens, read_json_object, require_path, with_companions
from megatron.core.tokenizers.tokenizers_engine import EngineTokenizer, TokenizersEngine

_FIXED_ROWS = {
    "BloomTokenizerFromHF": 250880,
    "BloomTokenizerFromCustom": 134298,
    "StarcoderTokenizerFromHF": 49152,
    "VicunaTokenizerFromHF": 32000,
}
_ALL_BUT_TWO = ("DeepSeekV2Tokenizer",)
_WITH_ADDED_TOKENS = ("QwenTokenizer", "QwenVLTokenizer")
PATCH_TOKENIZER_TYPES = (
    "LLamaTokenizer",
    "LLama2Tokenizer",
    "LLama3Tokenizer",
    "MistralTokenizer",
    "MixtralTokenizer",
    "Qwen2Tokenizer",
    "Qwen3Tokenizer",
    "Qwen2VLTokenizer",
    "YiTokenizer",
    "FalconTokenizer",
    "OPTTokenizer",
    *_ALL_BUT_TWO,
    *_WITH_ADDED_TOKENS,
    *_FIXED_ROWS,
    GPT2BPETokenizer.name,
)
"""Types whose tokenizer is loaded from the files of a folder. GPT2BPETokenizer is Megatron-LM's own."""
CODE_TOKENIZER_TYPES = (
    "BaichuanTokenizer",
    "ChatGLMTokenizerFromHF",
    "GLM10BZHTokenizerFromHF",
    "IcetkGLM130BTokenizer",
    "JiebaBPETokenizer",
)
"""Unsupported types, whose tokenizers consist of custom Python code, which is never executed."""


def patched_vocab_size(patch_tokenizer_type: str, base_size: int, own_size: int, extra_vocab_size: int) -> int:
    """Return the vocabulary size that Pai-Megatron-Patch uses for a model.

    For most types it is the base vocabulary without added tokens, plus ``--extra-vocab-size`` for the added tokens.

    Raises:
        TokenizerError: added tokens have ids outside the vocabulary.
    """
    if patch_tokenizer_type in _FIXED_ROWS:
        size = _FIXED_ROWS[patch_tokenizer_type]
    elif patch_tokenizer_type in _ALL_BUT_TWO:
        size = own_size - 2 + extra_vocab_size
    elif patch_tokenizer_type in _WITH_ADDED_TOKENS:
        size = own_size + extra_vocab_size
    else:
        size = base_size + extra_vocab_size
    if size < own_size:
        raise TokenizerError(
            f"--extra-vocab-size {extra_vocab_size}: --patch-tokenizer-type {patch_tokenizer_type} makes a vocabulary "
            f"of {size} ids, but the tokenizer has ids up to {own_size - 1}; use --extra-vocab-size "
            f"{extra_vocab_size + own_size - size} or more, or --padded-vocab-size"
        )
    return size


_TOKENIZER_FILE = "tokenizer.json"
_TOKEN_FILES = ("tokenizer_config.json", "special_tokens_map.json")
_GENERATION_FILE = "generation_config.json"


class HuggingFaceTokenizer(EngineTokenizer):
    """Tokenizer from the tokenizer.json of a local model folder, without any download.

    The end-of-document token is the model's end-of-sequence token, looked up in tokenizer_config.json,
    special_tokens_map.json and generation_config.json, in that order. No special tokens are added to a text.
    Special tokens spelled out in a text are recognized as tokenizer.json defines.

    With a ``patch_tokenizer_type``, the vocabulary has the size that Pai-Megatron-Patch uses.

    Raises:
        TokenizerError: a file of the folder is missing or damaged, or ``extra_vocab_size`` is too small.
    """

    name = "HuggingFaceTokenizer"

    def __init__(
        self,
        tokenizer_model: str | Path | None,
        extra_vocab_size: int = 0,
        patch_tokenizer_type: str | None = None,
    ) -> None:
        path = require_path(tokenizer_model, "--tokenizer-model", self.name)
        tokenizer_path = path / _TOKENIZER_FILE if path.is_dir() else path
        if not tokenizer_path.is_file():
            raise TokenizerError(f"{self.name}: {path} has no {_TOKENIZER_FILE}; {_way_on(path)}")
        content = read_json_object(tokenizer_path)
        _check_continuing_prefix(content, tokenizer_path)
        super().__init__(TokenizersEngine.from_file(tokenizer_path, self.name))
        _check_byte_level(content, tokenizer_path)
        own_size = self._engine.vocab_size
        if patch_tokenizer_type is not None:
            size = patched_vocab_size(patch_tokenizer_type, self._engine.base_vocab_size, own_size, extra_vocab_size)
            extra_vocab_size = size - own_size
        self.vocab_size = own_size + extra_vocab_size
        beside = [tokenizer_path.parent / file for file in (*_TOKEN_FILES, _GENERATION_FILE)]
        found = tuple(file for file in beside if file.is_file())
        # Next to a tokenizer file with another name, keep only the files that may define the end of a document.
        self.files = (tokenizer_path, *dict.fromkeys([*found, *with_companions(tokenizer_path)[1:]]))
        self.eod_id = _find_end_id(self._engine, found)
        self._settings = [file for file in found if file.name != _GENERATION_FILE]
        self.arguments: Mapping[str, object] = {
            "tokenizer_type": self.name,
            "tokenizer_model": str(path),
            "extra_vocab_size": extra_vocab_size,
        }

    @property
    def leading_ids(self) -> tuple[int, ...]:
        """Ids that the model's files prepend to a text, but `tokenize` does not."""
        return self._engine.leading_ids()

    @property
    def begin_id(self) -> int | None:
        """Id of the bos_token in the files, None if they define none."""
        for path in self._settings:
            token = _token_text(read_json_object(path).get("bos_token"))
            if token is not None:
                return self._engine.token_to_id(token)
        return None

    def plain_text(self, ids: Sequence[int]) -> str:
        """Decode ids without special tokens."""
        return self._engine.decode(ids, skip_special_tokens=True)


def _way_on(folder: Path) -> str:
    """Return advice for a folder without a tokenizer file, including tokenizers that consist of Python code."""
    settings = folder / _TOKEN_FILES[0]
    if settings.is_file() and "AutoTokenizer" in (read_json_object(settings).get("auto_map") or {}):
        return "its tokenizer is custom Python code, which is never run; save a fast tokenizer there"
    return "change --tokenizer-model, or save the fast tokenizer there"


def _check_continuing_prefix(content: Mapping[str, Any], path: Path) -> None:
    """Check that merges have the continuing-subword prefix, which the package strips without a check.

    Raises:
        TokenizerError: the second part of a merge lacks the prefix.
    """
    model = content.get("model")
    if not isinstance(model, dict):
        return
    prefix, merges = model.get("continuing_subword_prefix"), model.get("merges")
    if not prefix or not isinstance(merges, list):
        return
    for number, merge in enumerate(merges):
        parts = merge.split(" ") if isinstance(merge, str) else merge
        if not (isinstance(parts, list) and parts and str(parts[-1]).startswith(str(prefix))):
            raise TokenizerError(
                f"{path}: merge {number}, {merge!r}, has no part with the continuing_subword_prefix {prefix!r}; "
                "download or copy the file again"
            )


def _check_byte_level(content: Mapping[str, Any], path: Path) -> None:
    """Check the merges of a byte-level BPE. Other models have tokens that no merge produces."""
    model = content["model"]
    is_byte_level = '"ByteLevel"' in json.dumps([content.get("pre_tokenizer"), content.get("decoder")])
    if model.get("type", "BPE") != "BPE" or not is_byte_level or model.get("ignore_merges"):
        return
    merges = [tuple(merge.split(" ") if isinstance(merge, str) else merge) for merge in model["merges"]]
    added = (token["content"] for token in content.get("added_tokens", ()))
    known = {*byte_characters(), *added, *read_added_tokens(path.parent)}
    check_merges(model["vocab"], merges, known, (str(path), str(path)), lambda i: f"{path}: merge {i}")


def _find_end_id(engine: TokenizersEngine, files: Sequence[Path]) -> int | None:
    for path in files:
        settings = read_json_object(path)
        if path.name == _GENERATION_FILE:
            end_id = settings.get("eos_token_id")
            if isinstance(end_id, list) and end_id:
                end_id = end_id[0]
            if isinstance(end_id, int):
                return end_id
            continue
        token = _token_text(settings.get("eos_token"))
        if token is None:
            continue
        end_id = engine.token_to_id(token)
        if end_id is None:
            raise TokenizerError(
                f"{path} sets eos_token to {token!r}, but {_TOKENIZER_FILE} next to it does not contain this token"
            )
        return end_id
    return None


def _token_text(entry: Any) -> str | None:
    """Return the text of a special token that is a string or an object with the key "content"."""
    if isinstance(entry, dict):
        entry = entry.get("content")
    return entry if isinstance(entry, str) else None
