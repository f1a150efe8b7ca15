"""Read conversations from files: packed ones with their loss masks, and jsonl, which is packed once."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from megatron.core.datasets.conversations.conversation_encoder import ConversationEncoder
from megatron.core.datasets.conversations.template_choice import choose_template
from megatron.core.datasets.indexed.indexed_dataset import IndexedDataset, idx_path, optimal_dtype
from megatron.core.datasets.indexed.indexed_dataset_builder import IndexedDatasetBuilder
from megatron.core.errors import DataError, InputError
from megatron.core.object_store import as_path
from megatron.core.tokenizers.tokenizer import Tokenizer

MASK_DTYPE: Final = np.dtype("<u1")
_HASH_BYTES: Final = 1 << 20


def mask_prefix(prefix: str | Path) -> str:
    """Return the prefix of the loss masks of a data set: token files of its own lengths that hold 0 and 1."""
    return f"{prefix}_loss_mask"


def is_raw(prefix: str | Path) -> bool:
    """Tell whether a path is a file of jsonl in place of the prefix of a data set."""
    return as_path(prefix).is_file() and not idx_path(prefix).is_file()


class ConversationFile(IndexedDataset):
    """Give random access to conversations, a sequence each, and to their loss masks.

    Raises:
        DataError: as `IndexedDataset`, or there are no masks, or not of these conversations.
    """

    def _open(self) -> None:
        raw = None if idx_path(self.prefix).is_file() else self._find_raw_text()
        if raw is not None:
            raise DataError(f"{self.prefix} is no data set; to learn the conversations of {raw}, give that name")
        super()._open()
        masks = mask_prefix(self.prefix)
        if not idx_path(masks).is_file():
            raise DataError(
                f"{self.prefix} has no loss masks: there is no {idx_path(masks)}; fine-tuning reads conversations that "
                "were written by: python tools/preprocess_data.py --sft --input FILE.jsonl --output-prefix PREFIX with "
                "the tokenizer's flags, or FILE.jsonl itself"
            )
        self._masks = IndexedDataset(masks, self.mmap_bin_files)
        if self._masks.dtype != MASK_DTYPE or not np.array_equal(self._masks.sequence_lengths, self.sequence_lengths):
            raise DataError(f"{masks} does not hold the loss masks of {self.prefix}; write both again")

    def get_mask(self, index: int, offset: int = 0, length: int | None = None) -> NDArray[Any]:
        """Return which tokens of a conversation belong to answers, as `get` does the tokens."""
        return self._masks.get(index, offset, length)


@dataclass(frozen=True)
class ConversationOptions:
    """Hold how conversations become samples.

    Attributes:
        tokenizer: encodes those that come as jsonl.
        chat_template: a file or a name; None is the tokenizer's own.
        longest: positions that a conversation may take, beyond which it is cut; None: as many as a sample has.
        packs: whether a sample holds as many conversations as fit, or one.
    """

    tokenizer: Tokenizer
    chat_template: str | None = None
    longest: int | None = None
    packs: bool = True

    @property
    def variant(self) -> str:
        """Return what tells samples from those of the defaults, for a record of what was read; "" for the defaults."""
        cut = [] if self.longest is None else [f"cut at {self.longest}"]
        words = cut if self.packs else [*cut, "not packed"]
        return f" ({', '.join(words)})" if words else ""

    def encoder(self) -> ConversationEncoder:
        """Return what encodes jsonl.

        Raises:
            DataError: the chat template cannot be used.
        """
        return ConversationEncoder(self.tokenizer, choose_template(self.tokenizer, self.chat_template))

    def open(self, prefix: str, cache: Path, mmap_bin_files: bool, report: Callable[[str], None]) -> ConversationFile:
        """Open a data set, or what a file of jsonl was packed to, in ``cache``, now or by another process before.

        Raises:
            DataError: it cannot be opened, or the jsonl not be packed.
        """
        if is_raw(prefix):
            prefix = _pack_once(Path(prefix), self.encoder(), cache, report)
        return ConversationFile(prefix, mmap_bin_files)


def _pack_once(source: Path, encoder: ConversationEncoder, folder: Path, report: Callable[[str], None]) -> str:
    """Return the prefix of the packed conversations of a file; the first process writes, others wait for it."""
    name = hashlib.blake2b(repr((_digest(source), encoder.describe())).encode(), digest_size=8).hexdigest()
    prefix = folder / f"{source.stem}-{name}"
    if idx_path(prefix).is_file():
        return str(prefix)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / f"{prefix.name}.lock"):
            if not idx_path(prefix).is_file():
                report(f" > tokenizing {source} with {encoder.template.name}, once: it is kept in {folder}")
                num_conversations, num_tokens = pack(source, encoder, prefix)
                report(f" > tokenized {num_conversations} conversations, {num_tokens} tokens")
    except OSError as error:
        raise DataError(
            f"the tokens of {source} cannot be kept in {folder} ({error}); give --data-cache-path a folder that can be "
            "written, or pack them with tools/preprocess_data.py --sft"
        ) from error
    return str(prefix)


def pack(source: Path, encoder: ConversationEncoder, prefix: Path) -> tuple[int, int]:
    """Write the conversations of a file of jsonl and their masks; return how many there are, and their tokens.

    Raises:
        DataError: a line cannot be read or rendered, which is named, or there is none.
    """
    num_tokens = 0
    dtype = optimal_dtype(encoder.tokenizer.vocab_size)
    with (
        open(source, "rb") as lines,
        IndexedDatasetBuilder(prefix, dtype) as tokens,
        IndexedDatasetBuilder(mask_prefix(prefix), MASK_DTYPE) as masks,
    ):
        for number, line in enumerate(lines, start=1):
            if line.isspace():
                continue
            try:
                encoded = encoder.encode_line(line)
            except InputError as error:
                raise DataError(f"{source}:{number}: {error}") from error
            for conversation in encoded:
                tokens.add_document(conversation.tokens)
                masks.add_document(conversation.loss_mask)
                num_tokens += len(conversation.tokens)
        if not tokens.num_documents:
            raise DataError(f"{source} holds no conversation: there is no line in it")
        # The masks first: what has an index of tokens is whole.
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
    """Let one process of this machine at a time in; where the file system has no locks, each does the work."""
    with open(path, "w") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
