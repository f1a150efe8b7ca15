"""Wrapper of the compiled engine of the Hugging Face `tokenizers` package."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from megatron.core.errors import TokenizerError
from megatron.core.tokenizers.tokenizer import load_package, require_unicode

_BATCH_CHARACTERS: Final = 1 << 16
_PANIC: Final = "PanicException"


class TokenizersEngine:
    """Wrapper of a tokenizer of the package, without added special tokens, truncation or padding."""

    def __init__(self, engine: Any) -> None:
        # A tokenizer.json may define truncation and padding for the batches of an encoder model.
        engine.no_truncation()
        engine.no_padding()
        self._engine = engine

    @classmethod
    def byte_level_bpe(
        cls, vocabulary: Mapping[str, int], merges: Sequence[tuple[str, str]], tokenizer_type: str
    ) -> TokenizersEngine:
        """Build GPT-2's byte-level BPE. Every entry is ordinary text, and special tokens are not recognized.

        Raises:
            TokenizerError: the package is missing, or a merge has a token that the vocabulary lacks.
        """
        package = load_package("tokenizers", tokenizer_type)
        try:
            engine = package.Tokenizer(package.models.BPE(vocab=dict(vocabulary), merges=list(merges)))
        except Exception as error:  # the package raises bare Exception
            raise TokenizerError(f"{tokenizer_type}: vocabulary and merges do not match: {error}") from error
        engine.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False)
        engine.decoder = package.decoders.ByteLevel()
        return cls(engine)

    @classmethod
    def from_file(cls, path: Path, tokenizer_type: str) -> TokenizersEngine:
        """Read a tokenizer.json.

        Raises:
            TokenizerError: the package is missing or cannot read the file.
        """
        package = load_package("tokenizers", tokenizer_type)
        try:
            return cls(package.Tokenizer.from_file(str(path)))
        except BaseException as error:  # the package raises bare Exception, and panics that are not Exceptions
            if not isinstance(error, Exception) and type(error).__name__ != _PANIC:
                raise
            raise TokenizerError(f"{tokenizer_type}: cannot read {path}: {error}") from error

    @property
    def vocab_size(self) -> int:
        """Highest id plus one, so that a vocabulary with gaps fits its embedding."""
        return max(self.vocabulary().values(), default=-1) + 1

    def vocabulary(self) -> dict[str, int]:
        """Return the id of each entry, including added tokens."""
        vocabulary: dict[str, int] = self._engine.get_vocab(with_added_tokens=True)
        return vocabulary

    @property
    def base_vocab_size(self) -> int:
        """Number of entries without added tokens."""
        vocabulary: dict[str, int] = self._engine.get_vocab(with_added_tokens=False)
        return len(vocabulary)

    def token_to_id(self, token: str) -> int | None:
        """Look up one entry by its spelling."""
        if any("\ud800" <= character <= "\udfff" for character in token):
            return None  # no vocabulary contains lone surrogates
        token_id: int | None = self._engine.token_to_id(token)
        return token_id

    def encode(self, text: str) -> list[int]:
        """Encode one text.

        Raises:
            TokenizerError: the text holds a lone surrogate.
        """
        require_unicode([text])
        ids: list[int] = self._engine.encode(text, add_special_tokens=False).ids
        return ids

    def leading_ids(self) -> tuple[int, ...]:
        """Return the special tokens that tokenizer.json prepends to a text when they are enabled."""
        bare, whole = (self._engine.encode("a", add_special_tokens=special).ids for special in (False, True))
        for start in range(len(whole) - len(bare) + 1):
            if whole[start : start + len(bare)] == bare:
                return tuple(whole[:start])
        return ()

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode several texts, without computing offsets.

        TOKENIZERS_PARALLELISM and RAYON_NUM_THREADS set the number of threads.

        Raises:
            TokenizerError: a text holds a lone surrogate.
        """
        require_unicode(texts)
        ids: list[list[int]] = []
        for batch in _batches(texts):
            ids += [found.ids for found in self._engine.encode_batch_fast(batch, add_special_tokens=False)]
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Decode ids, by default including special tokens. Ids without an entry are skipped."""
        text: str = self._engine.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def to_json(self) -> str:
        """Serialize the tokenizer in the format of a tokenizer.json."""
        description: str = self._engine.to_str()
        return description


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    """Split texts into batches, because the package takes about a hundred bytes for each token of a batch."""
    batch: list[str] = []
    num_characters = 0
    for text in texts:
        batch.append(text)
        num_characters += len(text)
        if num_characters >= _BATCH_CHARACTERS:
            yield batch
            batch, num_characters = [], 0
    yield batch


class EngineTokenizer:
    """Base class of tokenizers that encode and decode with a `TokenizersEngine`."""

    def __init__(self, engine: TokenizersEngine) -> None:
        self._engine = engine

    def tokenize(self, text: str) -> list[int]:
        """Encode one text."""
        return self._engine.encode(text)

    def tokenize_batch(self, texts: Sequence[str], num_threads: int = 1) -> list[list[int]]:
        """Encode several texts. The environment of the package sets the number of threads."""
        return self._engine.encode_batch(texts)

    def detokenize(self, ids: Sequence[int]) -> str:
        """Decode ids with special tokens spelled out. Invalid UTF-8 becomes U+FFFD."""
        return self._engine.decode(ids)

    def vocabulary(self) -> dict[str, int]:
        return self._engine.vocabulary()

    def tokenizer_json(self) -> str:
        """Serialize the tokenizer in the format of a tokenizer.json, for other engines."""
        return self._engine.to_json()
