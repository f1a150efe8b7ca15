"""SentencePiece tokenizers, with the three variants that Megatron-LM uses."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.core.errors import TokenizerError
from megatron.core.tokenizers.tokenizer import load_package, require_file, require_unicode, with_companions

SENTENCE_PIECE_TYPES = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")
END_OF_DOCUMENT = "<EOD>"


class SentencePieceTokenizer:
    """Tokenizer with a SentencePiece model.

    The type determines the special tokens:
    - SentencePieceTokenizer appends <CLS>, <SEP>, <EOD>, <MASK>, those of <PAD>, <BOS> and <EOS> that the
      model lacks, and <extra_id_0>, ... to the model's ids. A text that spells one of these gets its id.
      <EOD> is the end-of-document token.
    - GPTSentencePieceTokenizer uses the model's ids only. The end-of-sentence id ends a document.
    - Llama2Tokenizer also starts every text with the model's begin-of-sentence id.
    Paper: Kudo and Richardson, "SentencePiece" (2018).

    Raises:
        TokenizerError: the file is missing or is not a SentencePiece model.
    """

    def __init__(
        self,
        tokenizer_model: str | Path | None,
        tokenizer_type: str = "SentencePieceTokenizer",
        *,
        vocab_extra_ids: int = 0,
        extra_vocab_size: int = 0,
    ) -> None:
        assert tokenizer_type in SENTENCE_PIECE_TYPES, tokenizer_type
        self.name = tokenizer_type
        path = require_file(tokenizer_model, "--tokenizer-model", self.name)
        package = load_package("sentencepiece", self.name)
        try:
            self._model: Any = package.SentencePieceProcessor(model_file=str(path))
        except (RuntimeError, OSError, ValueError) as error:
            raise TokenizerError(
                f"{self.name}: {path} is not a SentencePiece model ({error}); change --tokenizer-model"
            ) from error
        self._num_pieces: int = self._model.get_piece_size()
        has_special = self.name == "SentencePieceTokenizer"
        self._special_ids = _assign_special_ids(self._model, vocab_extra_ids) if has_special else {}
        self._special_tokens = {token_id: token for token, token_id in self._special_ids.items()}
        self._special_pattern = re.compile("(" + "|".join(map(re.escape, self._special_ids)) + ")")
        self.vocab_size = max([self._num_pieces, *(i + 1 for i in self._special_tokens)]) + extra_vocab_size
        end_id: int = self._special_ids.get(END_OF_DOCUMENT, self._model.eos_id())
        self.eod_id = end_id if end_id >= 0 else None
        begin_id: int = self._model.bos_id()
        if self.name == "Llama2Tokenizer" and begin_id < 0:
            raise TokenizerError(f"{self.name}: {path} has no begin-of-sentence id; use GPTSentencePieceTokenizer")
        self._prefix = [begin_id] if self.name == "Llama2Tokenizer" else []
        self.files = with_companions(path)
        self.arguments: Mapping[str, object] = {
            "tokenizer_type": self.name,
            "tokenizer_model": str(path),
            "vocab_extra_ids": vocab_extra_ids,
            "extra_vocab_size": extra_vocab_size,
        }

    def tokenize(self, text: str) -> list[int]:
        """Encode one text."""
        return self.tokenize_batch([text])[0]

    def tokenize_batch(self, texts: Sequence[str], num_threads: int = 1) -> list[list[int]]:
        """Encode several texts."""
        if not self._special_ids:
            return [self._prefix + ids for ids in self._encode(texts, num_threads)]
        # With one group in the pattern, split() returns text at even indices and special tokens at odd ones.
        split_texts = [self._special_pattern.split(text) for text in texts]
        plain_ids = iter(self._encode([part for parts in split_texts for part in parts[::2]], num_threads))
        batch = []
        for parts in split_texts:
            ids = next(plain_ids)
            for special in parts[1::2]:
                ids += [self._special_ids[special], *next(plain_ids)]
            batch.append(ids)
        return batch

    def detokenize(self, ids: Sequence[int]) -> str:
        """Decode ids, with the added special tokens spelled out."""
        parts: list[str] = []
        run: list[int] = []
        for token_id in ids:
            if token_id in self._special_tokens:
                parts += [self._model.decode(run), self._special_tokens[token_id]]
                run = []
            elif 0 <= token_id < self._num_pieces:
                run.append(token_id)
        return "".join([*parts, self._model.decode(run)])

    def _encode(self, texts: Sequence[str], num_threads: int) -> list[list[int]]:
        require_unicode(texts)
        ids: list[list[int]] = self._model.encode(list(texts), out_type=int, num_threads=num_threads)
        return ids


def _assign_special_ids(model: Any, vocab_extra_ids: int) -> dict[str, int]:
    """Assign an id to each special token: the model's id if it has one, else the next free id."""
    num_pieces = model.get_piece_size()
    known = {model.id_to_piece(i): i for i in range(num_pieces)}
    names = ["<CLS>", "<SEP>", END_OF_DOCUMENT, "<MASK>"]
    for piece_id, fallback in (
        (model.pad_id(), "<PAD>"),
        (model.bos_id(), "<BOS>"),
        (model.eos_id(), "<EOS>"),
    ):
        names.append(model.id_to_piece(piece_id) if piece_id >= 0 else fallback)
    names += [f"<extra_id_{i}>" for i in range(vocab_extra_ids)]
    special_ids: dict[str, int] = {}
    for name in names:
        if name not in known:
            known[name] = len(known)
        special_ids[name] = known[name]
    return special_ids
