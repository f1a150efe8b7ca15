"""Encode conversations into tokens with a loss mask of their answers, and read them from files.

A file is a tokenized data set with its loss masks, or JSON (JSONL or an array), which is tokenized once and cached.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from megatron.core.datasets.chat_template import (
    END_OF_DOCUMENT,
    SFT_TEMPLATE,
    ChatTemplate,
    RenderedConversation,
    choose_template,
)
from megatron.core.datasets.conversation import Message, json_lines, read_conversations
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder, idx_path, optimal_dtype
from megatron.core.errors import DataError, InputError
from megatron.core.object_store import as_path
from megatron.core.tokenizers import PATH_ARGUMENTS, Tokenizer


@dataclass(frozen=True)
class EncodedConversation:
    """Tokens of a conversation, int64 ``[n]``, and its loss mask, uint8 ``[n]``: 1 for tokens of answers."""

    tokens: NDArray[np.int64]
    loss_mask: NDArray[np.uint8]


class ConversationEncoder:
    """Encoder of JSONL lines into tokens and loss masks, with a tokenizer and a chat template.

    Special tokens come from the template only: a token that the tokenizer prepends to every text is removed.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self._num_leading = len(tokenizer.tokenize(""))

    def encode_line(self, line: bytes) -> list[EncodedConversation]:
        """Encode the conversations of a line.

        Raises:
            DataError: the line cannot be read, or the template fails.
            TokenizerError: a text cannot be encoded.
        """
        return [self._encode(self.template.render(conversation)) for conversation in read_conversations(line)]

    def encode_prompt(self, messages: Sequence[Message]) -> list[int]:
        """Return the tokens of a prompt that ends where the assistant's answer starts.

        Raises:
            DataError: the template fails.
            TokenizerError: a text cannot be encoded.
        """
        return next(self._tokenize([self.template.render_prompt(messages)]))

    def describe(self) -> dict[str, str]:
        """Return digests of the tokenizer and of the template, on which the tokens of a line depend."""
        tokenizer = hashlib.blake2b(digest_size=16)
        for path in self.tokenizer.files:
            tokenizer.update(path.read_bytes())
        arguments = {key: value for key, value in self.tokenizer.arguments.items() if key not in PATH_ARGUMENTS}
        tokenizer.update(repr((self.tokenizer.name, self.tokenizer.vocab_size, arguments)).encode())
        template = repr((self.template.source, sorted(self.template.special_tokens.items()))).encode()
        return {
            "tokenizer": tokenizer.hexdigest(),
            "chat_template": hashlib.blake2b(template, digest_size=16).hexdigest(),
        }

    def _encode(self, rendered: RenderedConversation) -> EncodedConversation:
        """Encode the whole text. An answer starts at the first token that differs from the encoded text before it."""
        offsets = [offset for answer in rendered.answers for offset in answer]
        ids, *beginnings = self._tokenize([rendered.text, *(rendered.text[:offset] for offset in offsets)])
        places = [_common_length(beginning, ids) for beginning in beginnings]
        loss_mask = np.zeros(len(ids), np.uint8)
        for begin, end in zip(places[::2], places[1::2]):
            loss_mask[begin:end] = 1
        loss_mask[:1] = 0  # no position predicts the first token
        if not loss_mask.any():
            raise DataError(f"{self.template.name} leaves no answer token to train on")
        return EncodedConversation(np.array(ids, np.int64), loss_mask)

    def _tokenize(self, texts: Sequence[str]) -> Iterator[list[int]]:
        parts = [text.split(END_OF_DOCUMENT) for text in texts]
        encoded = iter(self.tokenizer.tokenize_batch([part for of_text in parts for part in of_text]))
        for of_text in parts:
            ids = next(encoded)[self._num_leading :]
            for _ in of_text[1:]:
                assert self.tokenizer.eod_id is not None, "only then is there a sign for it"
                ids += [self.tokenizer.eod_id, *next(encoded)[self._num_leading :]]
            yield ids


def _common_length(left: Sequence[int], right: Sequence[int]) -> int:
    if left == right[: len(left)]:
        return len(left)
    return next((i for i, (a, b) in enumerate(zip(left, right)) if a != b), min(len(left), len(right)))


MASK_DTYPE: Final = np.dtype("<u1")
_HASH_BYTES: Final = 1 << 20


def mask_prefix(prefix: str | Path) -> str:
    """Return the prefix of a data set's loss masks: token files with the same lengths that hold 0 and 1."""
    return f"{prefix}_loss_mask"


def is_raw(prefix: str | Path) -> bool:
    return as_path(prefix).is_file() and not idx_path(prefix).is_file()


class ConversationFile(IndexedDataset):
    """Random access to conversations, one sequence each, and to their loss masks.

    Raises:
        DataError: as `IndexedDataset`, or the masks are missing or do not match the conversations.
    """

    def _open(self) -> None:
        raw = None if idx_path(self.prefix).is_file() else self._find_raw_text()
        if raw is not None:
            raise DataError(f"{self.prefix} is not a data set; to train on the conversations of {raw}, pass {raw}")
        super()._open()
        masks = mask_prefix(self.prefix)
        if not idx_path(masks).is_file():
            raise DataError(
                f"{self.prefix} has no loss masks: {idx_path(masks)} is missing; fine-tuning reads conversations that "
                "were written with: python tools/preprocess_data.py --sft --input FILE.jsonl --output-prefix PREFIX "
                "with the tokenizer's flags, or FILE.jsonl itself"
            )
        self._masks = IndexedDataset(masks, self.mmap_bin_files)
        if self._masks.dtype != MASK_DTYPE or not np.array_equal(self._masks.sequence_lengths, self.sequence_lengths):
            raise DataError(f"{masks} does not match the data set {self.prefix}; write both again")

    def get_mask(self, index: int, offset: int = 0, length: int | None = None) -> NDArray[Any]:
        """Return the loss mask of a conversation, with the same arguments as `get`."""
        return self._masks.get(index, offset, length)


@dataclass(frozen=True)
class ConversationOptions:
    """Options for turning conversations into samples.

    Attributes:
        tokenizer: encodes conversations from JSONL.
        chat_template: a file or a template name. None uses the tokenizer's template, or `SFT_TEMPLATE` if it has none.
        longest: positions after which a conversation is truncated. None: the sequence length.
        packs: whether to pack several conversations into a sample, instead of one.
    """

    tokenizer: Tokenizer
    chat_template: str | None = None
    longest: int | None = None
    packs: bool = True

    @property
    def variant(self) -> str:
        """Return the non-default options as text for the data history; "" for the defaults."""
        cut = [] if self.longest is None else [f"cut at {self.longest}"]
        words = cut if self.packs else [*cut, "not packed"]
        return f" ({', '.join(words)})" if words else ""

    def encoder(self) -> ConversationEncoder:
        """Return the encoder for JSON.

        Raises:
            DataError: the chat template cannot be used.
        """
        template = choose_template(self.tokenizer, self.chat_template, SFT_TEMPLATE)
        assert template is not None, "there is a fallback"
        return ConversationEncoder(self.tokenizer, template)

    def open(self, prefix: str, cache: Path, mmap_bin_files: bool, report: Callable[[str], None]) -> ConversationFile:
        """Open a data set. A JSON file is tokenized into ``cache`` first, unless the cache already has it.

        Raises:
            DataError: the data set cannot be opened, or the JSON file cannot be tokenized.
        """
        if is_raw(prefix):
            prefix = _pack_once(Path(prefix), self.encoder(), cache, report)
        return ConversationFile(prefix, mmap_bin_files)


def _pack_once(source: Path, encoder: ConversationEncoder, folder: Path, report: Callable[[str], None]) -> str:
    """Return the prefix of a file's tokenized conversations. The first process writes them, others wait for it."""
    name = hashlib.blake2b(repr((_digest(source), encoder.describe())).encode(), digest_size=8).hexdigest()
    prefix = folder / f"{source.stem}-{name}"
    if idx_path(prefix).is_file():
        return str(prefix)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / f"{prefix.name}.lock"):
            if not idx_path(prefix).is_file():
                report(f" > tokenizing {source} with {encoder.template.name}, once: the result is cached in {folder}")
                num_conversations, num_tokens = pack(source, encoder, prefix)
                report(f" > tokenized {num_conversations} conversations, {num_tokens} tokens")
    except OSError as error:
        raise DataError(
            f"the tokens of {source} cannot be cached in {folder} ({error}); set --data-cache-path to a writable "
            "folder, or pack them with tools/preprocess_data.py --sft"
        ) from error
    return str(prefix)


def pack(source: Path, encoder: ConversationEncoder, prefix: Path) -> tuple[int, int]:
    """Write the conversations of a JSON file and their masks; return the numbers of conversations and tokens.

    Raises:
        DataError: a line, named in the message, cannot be read or rendered, or the file has no lines.
    """
    num_tokens = 0
    dtype = optimal_dtype(encoder.tokenizer.vocab_size)
    with (
        open(source, "rb") as file,
        IndexedDatasetBuilder(prefix, dtype) as tokens,
        IndexedDatasetBuilder(mask_prefix(prefix), MASK_DTYPE) as masks,
    ):
        for place, line in json_lines(file, str(source)):
            if line.isspace():
                continue
            try:
                encoded = encoder.encode_line(line)
            except InputError as error:
                raise DataError(f"{place}: {error}") from error
            for conversation in encoded:
                tokens.add_document(conversation.tokens)
                masks.add_document(conversation.loss_mask)
                num_tokens += len(conversation.tokens)
        if not tokens.num_documents:
            raise DataError(f"{source} contains no conversation: the file is empty")
        # Publish the masks first, so that a data set with a token index is complete.
        masks.finalize()
        tokens.finalize()
        return tokens.num_documents, num_tokens


def _digest(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with open(path, "rb", buffering=0) as file:
        while data := file.read(_HASH_BYTES):
            digest.update(data)
    return digest.hexdigest()


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Serialize the processes of this node. Without file locks in the file system, every process does the work."""
    with open(path, "w") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
