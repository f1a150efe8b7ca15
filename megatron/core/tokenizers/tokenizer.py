"""The tokenizer protocol, helpers that read tokenizer files, and `NullTokenizer`, which has no vocabulary."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from megatron.core.errors import InputError, TokenizerError
from megatron.core.safe_io import parse_json, read_plain_text


class Tokenizer(Protocol):
    """Interface of tokenizers, which encode text to token ids and decode ids to text.

    Text that spells a special token is encoded as ordinary text, unless the tokenizer's files (`HuggingFaceTokenizer`)
    or Megatron-LM's rules for the type (`SentencePieceTokenizer`) define otherwise.
    """

    @property
    def name(self) -> str:
        """Tokenizer type, as in ``--tokenizer-type``."""

    @property
    def vocab_size(self) -> int:
        """Number of ids, including special tokens but without padding."""

    @property
    def eod_id(self) -> int | None:
        """Id of the end-of-document token, or None if the tokenizer has none."""

    @property
    def files(self) -> tuple[Path, ...]:
        """Files that the tokenizer was read from, followed by related files of the model folder.

        The first group is sufficient to rebuild the tokenizer.
        """

    @property
    def arguments(self) -> Mapping[str, object]:
        """Keyword arguments with which `build_tokenizer` rebuilds this tokenizer, as JSON values."""

    def tokenize(self, text: str) -> list[int]:
        """Encode one text. Only Llama2Tokenizer adds a token, at the start.

        Raises:
            TokenizerError: the text cannot be encoded.
        """

    def tokenize_batch(self, texts: Sequence[str], num_threads: int = 1) -> list[list[int]]:
        """Encode several texts with the same result as ``tokenize``, for any number of threads.

        Raises:
            TokenizerError: one of the texts cannot be encoded.
        """

    def detokenize(self, ids: Sequence[int]) -> str:
        """Decode ids. Ids without a token, such as vocabulary padding, contribute nothing."""


def require_unicode(texts: Sequence[str]) -> None:
    """Reject lone surrogates, which an escape such as ``\\ud800`` puts into a str.

    Engines, and versions of one engine, handle them differently: with an error, U+FFFD, or a crash.

    Raises:
        TokenizerError: a text holds a lone surrogate.
    """
    for text in texts:
        if not text.isascii():
            try:
                text.encode("utf-8")
            except UnicodeEncodeError as error:
                raise TokenizerError(
                    f"the text is not valid Unicode: character {error.start} is the lone surrogate "
                    f"U+{ord(text[error.start]):04X}"
                ) from error


def load_package(module: str, user: str, refusal: type[InputError] = TokenizerError) -> Any:
    """Import a module of an optional package for ``user``, which is a flag, a file or a tokenizer type.

    Raises:
        InputError: the package is missing or broken (a bad shared object raises OSError). Its class is ``refusal``.
    """
    try:
        return importlib.import_module(module)
    except (ImportError, OSError) as error:
        package = module.partition(".")[0]
        raise refusal(
            f"{user} needs the package {package}, which cannot be imported ({error}); "
            f"install it with: pip install {package}"
        ) from error


ADDED_TOKENS_FILE = "added_tokens.json"
"""File with the ids of tokens that were added to a vocabulary."""
MODEL_FOLDER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    ADDED_TOKENS_FILE,
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
)
"""Names of the tokenizer and generation files in a Hugging Face model folder."""


def require_path(value: str | Path | None, flag: str, tokenizer_type: str) -> Path:
    """Return the absolute path of an existing file or folder.

    Raises:
        TokenizerError: the flag was not passed, or the path does not exist.
    """
    if value is None or str(value) == "":
        raise TokenizerError(
            f"{tokenizer_type} needs {flag}; pass the path of a local file, or --tokenizer-type ByteTokenizer, which "
            "needs no files"
        )
    path = Path(value)
    if not path.exists():
        raise TokenizerError(f"{tokenizer_type}: {path} does not exist; change {flag} (Hub names are not downloaded)")
    return path.absolute()


def with_companions(*paths: Path) -> tuple[Path, ...]:
    """Return a tokenizer's files and, if they have the names of a model folder, the related files in that folder."""
    names = [path.name for path in paths]
    if len({path.parent for path in paths}) > 1 or not set(names) <= set(MODEL_FOLDER_FILES):
        return paths
    beside = [paths[0].parent / name for name in MODEL_FOLDER_FILES if name not in names]
    return (*paths, *(path for path in beside if path.is_file()))


def read_added_tokens(folder: Path) -> set[str]:
    """Return the tokens that the files of a model folder list as added to its vocabulary.

    Raises:
        TokenizerError: one of the files is not a JSON object.
    """
    names = (ADDED_TOKENS_FILE, "tokenizer_config.json", "special_tokens_map.json")
    by_token, settings, special = (
        read_json_object(folder / name) if (folder / name).is_file() else {} for name in names
    )
    added = set(by_token)
    for entries in (settings.get("added_tokens_decoder"), special):
        for entry in entries.values() if isinstance(entries, dict) else ():
            for token in entry if isinstance(entry, list) else [entry]:
                added.add(str(token.get("content") if isinstance(token, dict) else token))
    return added


def require_file(value: str | Path | None, flag: str, tokenizer_type: str) -> Path:
    """Return the absolute path of an existing file.

    Raises:
        TokenizerError: as ``require_path``, or the path is a folder.
    """
    path = require_path(value, flag, tokenizer_type)
    if not path.is_file():
        raise TokenizerError(f"{tokenizer_type}: {path} is not a file; change {flag}")
    return path


def read_text(path: Path) -> str:
    """Read a UTF-8 file.

    Raises:
        TokenizerError: the file cannot be read or is not UTF-8.
    """
    try:
        return read_plain_text(path)
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"cannot read {path}: {error}") from error


def read_json(path: Path) -> Any:
    """Read a JSON file.

    Raises:
        TokenizerError: the file cannot be read or is not JSON.
    """
    try:
        return parse_json(read_text(path))
    except ValueError as error:
        raise TokenizerError(f"{path} is not valid JSON: {error}") from error


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds one object.

    Raises:
        TokenizerError: as ``read_json``, or the file holds something else.
    """
    value = read_json(path)
    if not isinstance(value, dict):
        raise TokenizerError(f"{path} contains a JSON {type(value).__name__}; an object is expected")
    return value


class NullTokenizer:
    """Tokenizer that reads ids as numbers separated by white space.

    ``--vocab-size N`` gives N + 1 ids, 0 to N. Id N is the end-of-document token.

    Raises:
        TokenizerError: no vocabulary size was passed, or it is not positive.
    """

    name = "NullTokenizer"

    def __init__(self, vocab_size: int | None) -> None:
        if vocab_size is None:
            raise TokenizerError(f"{self.name} needs --vocab-size")
        if vocab_size < 1:
            raise TokenizerError(f"{self.name}: vocabulary size {vocab_size} is not positive; change --vocab-size")
        self.vocab_size = vocab_size + 1
        self.eod_id = vocab_size
        self.files: tuple[Path, ...] = ()
        self.arguments: Mapping[str, object] = {"tokenizer_type": self.name, "vocab_size": vocab_size}

    def tokenize(self, text: str) -> list[int]:
        """Parse the ids in one text.

        Raises:
            TokenizerError: a word is not a number, or not an id of this vocabulary.
        """
        try:
            ids = [int(word) for word in text.split()]
        except ValueError as error:
            raise TokenizerError(f"{self.name} reads token ids separated by whitespace: {error}") from error
        for token_id in ids:
            if not 0 <= token_id < self.vocab_size:
                raise TokenizerError(
                    f"{self.name}: id {token_id} is not in 0..{self.vocab_size - 1}; change --vocab-size"
                )
        return ids

    def tokenize_batch(self, texts: Sequence[str], num_threads: int = 1) -> list[list[int]]:
        """Parse the ids in several texts in a single thread."""
        return [self.tokenize(text) for text in texts]

    def detokenize(self, ids: Sequence[int]) -> str:
        """Write the ids as numbers."""
        return " ".join(str(token_id) for token_id in ids)
