"""Tokenize the documents of one chunk into the arrays of the output files."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.core.datasets import MASK_DTYPE, ConversationEncoder, EncodedConversation
from megatron.core.errors import DataError, InputError, TokenizerError
from megatron.core.tokenizers import TextEncoder
from megatron.data.json_lines import ExtractTexts, JsonLines, Problem, list_lines, read_json_lines

SplitSentences = Callable[[str], list[str]]


@dataclass(frozen=True)
class Recipe:
    """Everything that the output depends on, except the input.

    Attributes:
        encoder: encodes text to ids.
        keys: JSON keys. Each key gives a data set.
        eod_id: end-of-document token, or None.
        dtype: dtype of a token on disk.
        num_partitions: document n goes to partition n modulo this. The data set is the concatenation of the partitions.
        split_sentences: splits a text into the sequences of a document, or None.
        extract_texts: the compiled JSONL reader, or None.
        conversations: encodes conversations instead of texts, to a stream of tokens and one of loss masks; or None.
    """

    encoder: TextEncoder
    keys: tuple[str, ...]
    eod_id: int | None
    dtype: np.dtype[Any]
    num_partitions: int
    split_sentences: SplitSentences | None
    extract_texts: ExtractTexts | None
    conversations: ConversationEncoder | None = None


@dataclass(frozen=True)
class Stream:
    """Data that a chunk adds to one data set or partition.

    Attributes:
        tokens: tokens of all sequences, contiguous.
        begin: start index of the tokens in the buffer that was passed in. None if they did not fit.
        lengths: int32, length of each sequence.
        counts: int32, number of sequences of each document.
    """

    tokens: NDArray[Any]
    begin: int | None
    lengths: NDArray[np.int32]
    counts: NDArray[np.int32]


@dataclass(frozen=True)
class TokenizedChunk:
    """Streams of a chunk, ordered by key and partition, with its counts and problems."""

    streams: list[Stream]
    num_lines: int
    num_documents: int
    problems: list[Problem]


def tokenize_block(block: bytes, recipe: Recipe, room: NDArray[Any]) -> TokenizedChunk:
    """Parse and encode a block of lines. Invalid lines become problems, in order.

    Tokens are written to the buffer ``room``, which has their dtype, as far as they fit.
    """
    if recipe.conversations is not None:
        return _encode_conversations(block, recipe.conversations, recipe.dtype)
    documents = read_json_lines(block, recipe.keys, recipe.extract_texts)
    if recipe.split_sentences is not None:
        documents = _split(documents, recipe.split_sentences)
    try:
        streams = _streams(documents, recipe, room)
    except TokenizerError:
        documents = _without_refused(documents, recipe.encoder)
        streams = _streams(documents, recipe, room)
    return TokenizedChunk(streams, documents.num_lines, len(documents.lines), documents.problems)


def _encode_conversations(block: bytes, encoder: ConversationEncoder, dtype: np.dtype[Any]) -> TokenizedChunk:
    _, places, num_lines = list_lines(block, ())
    encoded: list[EncodedConversation] = []
    problems = []
    for line, begin, end in places.tolist():
        try:
            encoded += encoder.encode_line(block[begin:end])
        except InputError as error:
            problems.append(Problem(line, str(error)))
    lengths = np.array([len(conversation.tokens) for conversation in encoded], np.int32)
    contents = (
        np.concatenate([np.empty(0, dtype), *(conversation.tokens.astype(dtype) for conversation in encoded)]),
        np.concatenate([np.empty(0, MASK_DTYPE), *(conversation.loss_mask for conversation in encoded)]),
    )
    streams = [Stream(content, None, lengths, np.ones_like(lengths)) for content in contents]
    return TokenizedChunk(streams, num_lines, len(encoded), problems)


def _streams(documents: JsonLines, recipe: Recipe, room: NDArray[Any]) -> list[Stream]:
    streams: list[Stream] = []
    used = 0
    for texts, num_texts in zip(documents.texts, documents.num_texts):
        ids = recipe.encoder.encode(texts)
        parts: list[tuple[Iterable[NDArray[Any]], NDArray[np.int64]]] = [(ids, num_texts)]
        if recipe.num_partitions > 1:
            encoded = list(ids)
            chosen = [documents.lines % recipe.num_partitions == number for number in range(recipe.num_partitions)]
            parts = [(itertools.compress(encoded, np.repeat(of, num_texts).tolist()), num_texts[of]) for of in chosen]
        for part_ids, part_num_texts in parts:
            streams.append(pack(part_ids, part_num_texts, recipe.eod_id, room, used))
            used += 0 if streams[-1].begin is None else len(streams[-1].tokens)
    return streams


def pack(
    ids: Iterable[NDArray[Any]], num_texts: NDArray[np.int64], eod_id: int | None, room: NDArray[Any], begin: int
) -> Stream:
    """Concatenate the ids of texts as they become available, and append ``eod_id`` to each document.

    The ids go to ``room``, starting at ``begin``, or to a new array if they do not fit. A text without tokens is not a
    sequence. A document without tokens is kept, without ``eod_id``.
    """
    tokens, fits = room[begin:], True
    end = 0
    lengths: list[int] = []
    counts: list[int] = []
    texts = iter(ids)
    for number in num_texts.tolist():
        count = 0
        for values in itertools.islice(texts, number):
            size = len(values)
            if size:
                start, end = end, end + size
                if end >= len(tokens):  # leave space for the end-of-document token
                    tokens, fits = np.concatenate([tokens, np.empty(end + 1, room.dtype)]), False
                tokens[start:end] = values
                lengths.append(size)
                count += 1
        if count and eod_id is not None:
            tokens[end] = eod_id
            end += 1
            lengths[-1] += 1
        counts.append(count)
    return Stream(tokens[:end], begin if fits else None, np.array(lengths, np.int32), np.array(counts, np.int32))


def _split(documents: JsonLines, split_sentences: SplitSentences) -> JsonLines:
    """Split each text into sentences, which become the texts of its document."""
    texts, num_texts = [], []
    for key_texts, counts in zip(documents.texts, documents.num_texts):
        sentences = [split_sentences(str(text, "utf-8")) for text in key_texts]
        owner = np.repeat(np.arange(len(counts)), counts)
        sizes = np.array([len(parts) for parts in sentences], np.int64)
        texts.append([sentence.encode("utf-8") for parts in sentences for sentence in parts])
        num_texts.append(np.bincount(owner, sizes, len(counts)).astype(np.int64))
    return JsonLines(tuple(texts), tuple(num_texts), documents.lines, documents.num_lines, documents.problems)


def _without_refused(documents: JsonLines, encoder: TextEncoder) -> JsonLines:
    """Encode the documents one by one, and turn those that the tokenizer cannot encode into problems."""
    starts = [np.concatenate([[0], np.cumsum(counts)]).tolist() for counts in documents.num_texts]
    problems = list(documents.problems)
    kept = []
    for index, line in enumerate(documents.lines.tolist()):
        try:
            for texts, start in zip(documents.texts, starts):
                list(encoder.encode(texts[start[index] : start[index + 1]]))
        except TokenizerError as error:
            problems.append(Problem(line, str(error)))
        else:
            kept.append(index)
    return JsonLines(
        tuple(
            [text for index in kept for text in texts[start[index] : start[index + 1]]]
            for texts, start in zip(documents.texts, starts)
        ),
        tuple(counts[kept] for counts in documents.num_texts),
        documents.lines[kept],
        documents.num_lines,
        sorted(problems, key=lambda problem: problem.line),
    )


def load_splitter(language: str, keep_newlines: bool) -> SplitSentences:
    """Return nltk's sentence splitter for a language.

    With ``keep_newlines``, the white space after a sentence is kept with it, as in Megatron-LM.

    Raises:
        DataError: nltk or its data for the language is not installed.
    """
    try:
        punkt = importlib.import_module("nltk.tokenize.punkt")
    except (ImportError, OSError) as error:
        raise DataError(
            f"--split-sentences needs the package nltk, which cannot be imported ({error}); "
            "install it with: pip install nltk"
        ) from error
    try:
        splitter = punkt.PunktTokenizer(language)
    except (LookupError, ValueError) as error:
        raise DataError(
            f"--split-sentences --lang {language}: nltk's data for this language is not on this node; download it "
            "with: python -m nltk.downloader punkt_tab (or change --lang)"
        ) from error
    if keep_newlines:
        parameters = splitter._params
        splitter = punkt.PunktSentenceTokenizer(lang_vars=_keep_white_space(punkt))
        splitter._params = parameters
    split: SplitSentences = splitter.tokenize
    return split


def _keep_white_space(punkt: Any) -> Any:
    """Return Punkt language variables that keep the white space after a sentence, which Punkt drops by default."""
    plain = punkt.PunktLanguageVars._period_context_fmt
    before, following = r"(?=(?P<after_tok>", r"\s+(?P<next_tok>\S+)"
    assert plain.count(before) == plain.count(following) == 1, "nltk changed how it finds the ends of sentences"
    changed = plain.replace(before, r"\s*" + before).replace(following, r"(?P<next_tok>\S+)")
    return type("WhiteSpaceKept", (punkt.PunktLanguageVars,), {"_period_context_fmt": changed})()
