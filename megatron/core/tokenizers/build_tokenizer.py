"""Build a tokenizer from --tokenizer-type and its flags."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence
from pathlib import Path

from megatron.core.errors import TokenizerError
from megatron.core.tokenizers.byte_tokenizer import ByteTokenizer
from megatron.core.tokenizers.gpt2_bpe_tokenizer import GPT2BPETokenizer
from megatron.core.tokenizers.huggingface_tokenizer import HuggingFaceTokenizer
from megatron.core.tokenizers.sentencepiece_tokenizer import SENTENCE_PIECE_TYPES, SentencePieceTokenizer
from megatron.core.tokenizers.tiktoken_tokenizer import DEFAULT_NUM_SPECIAL_TOKENS, TikTokenizer
from megatron.core.tokenizers.tokenizer import NullTokenizer, Tokenizer

TOKENIZER_TYPES = (
    "GPT2BPETokenizer",
    "HuggingFaceTokenizer",
    *SENTENCE_PIECE_TYPES,
    "TikTokenizer",
    "ByteTokenizer",
    "NullTokenizer",
)
_TextTokenizer = GPT2BPETokenizer | HuggingFaceTokenizer | SentencePieceTokenizer | TikTokenizer | ByteTokenizer

_FLAGS_OF_TOKENIZERS = {
    "vocab_file": ("GPT2BPETokenizer",),
    "merge_file": ("GPT2BPETokenizer",),
    "tokenizer_model": ("HuggingFaceTokenizer", *SENTENCE_PIECE_TYPES, "TikTokenizer"),
    "tiktoken_pattern": ("TikTokenizer",),
    "tiktoken_num_special_tokens": ("TikTokenizer",),
    "tiktoken_special_tokens": ("TikTokenizer",),
}


def unused_tokenizer_flags(tokenizer_type: str, given: Collection[str]) -> list[str]:
    """Return a note for each given flag that this tokenizer type does not use; ``given`` has field names."""
    return [
        f"--{name.replace('_', '-')} has no effect: the tokenizer is {tokenizer_type}"
        for name, kinds in _FLAGS_OF_TOKENIZERS.items()
        if name in given and tokenizer_type not in kinds
    ]


def reject_unused_flags(tokenizer_type: str, given: Collection[str]) -> None:
    """Reject a flag that this tokenizer type does not use; ``given`` has field names.

    Raises:
        TokenizerError: there is such a flag.
    """
    for note in unused_tokenizer_flags(tokenizer_type, given):
        raise TokenizerError(f"{note}; omit it, or select another tokenizer with --tokenizer-type")


def build_tokenizer(
    *,
    tokenizer_type: str = "GPT2BPETokenizer",
    vocab_file: str | Path | None = None,
    merge_file: str | Path | None = None,
    tokenizer_model: str | Path | None = None,
    vocab_size: int | None = None,
    vocab_extra_ids: int = 0,
    extra_vocab_size: int = 0,
    padded_vocab_size: int | None = None,
    patch_tokenizer_type: str | None = None,
    tiktoken_pattern: str | None = None,
    tiktoken_num_special_tokens: int = DEFAULT_NUM_SPECIAL_TOKENS,
    tiktoken_special_tokens: Sequence[str] = (),
) -> Tokenizer:
    """Build a tokenizer from local files, or one that needs none.

    The keyword arguments are Megatron-LM's flags. Arguments of other tokenizer types are ignored, and
    `unused_tokenizer_flags` reports them.

    Args:
        vocab_size: NullTokenizer has one id more. TikTokenizer uses this many ids. For the other types, the
            value must equal the tokenizer's size.
        vocab_extra_ids: number of <extra_id_N> tokens, for SentencePieceTokenizer only.
        extra_vocab_size: ids without text after the tokenizer's ids, not for NullTokenizer.
        padded_vocab_size: total size instead of ``extra_vocab_size``, not for NullTokenizer.
        patch_tokenizer_type: Pai-Megatron-Patch's name of a HuggingFaceTokenizer, which determines the
            vocabulary size.

    Raises:
        TokenizerError: the type is unknown, sizes are inconsistent, or a file, flag or package that the type
            needs is missing.
    """
    for flag, value in (("--extra-vocab-size", extra_vocab_size), ("--vocab-extra-ids", vocab_extra_ids)):
        if value < 0:
            raise TokenizerError(f"{flag} {value} is negative")
    if vocab_extra_ids and tokenizer_type != "SentencePieceTokenizer":
        raise TokenizerError(
            f"--vocab-extra-ids {vocab_extra_ids} is supported only with --tokenizer-type SentencePieceTokenizer; "
            "omit it"
        )
    if tokenizer_type == NullTokenizer.name:
        if extra_vocab_size:
            raise TokenizerError(
                f"--extra-vocab-size {extra_vocab_size} is not supported with NullTokenizer; increase --vocab-size "
                "instead"
            )
        if padded_vocab_size:
            raise TokenizerError(
                f"--padded-vocab-size {padded_vocab_size} is not supported with NullTokenizer; use --vocab-size "
                f"{padded_vocab_size - 1} instead"
            )
        return NullTokenizer(vocab_size)
    is_padded = padded_vocab_size is not None
    tokenizer = _build_for_text(
        tokenizer_type=tokenizer_type,
        vocab_file=vocab_file,
        merge_file=merge_file,
        tokenizer_model=tokenizer_model,
        vocab_size=vocab_size,
        vocab_extra_ids=vocab_extra_ids,
        extra_vocab_size=0 if is_padded else extra_vocab_size,
        patch_tokenizer_type=None if is_padded else patch_tokenizer_type,
        tiktoken_pattern=tiktoken_pattern,
        tiktoken_num_special_tokens=tiktoken_num_special_tokens,
        tiktoken_special_tokens=tiktoken_special_tokens,
    )
    if padded_vocab_size is None:
        return tokenizer
    extra_rows = padded_vocab_size - tokenizer.vocab_size
    if extra_rows < 0:
        raise TokenizerError(
            f"--padded-vocab-size {padded_vocab_size} is less than the {tokenizer.vocab_size} ids of the tokenizer; "
            f"use {tokenizer.vocab_size} or more"
        )
    tokenizer.vocab_size = padded_vocab_size
    tokenizer.arguments = {**tokenizer.arguments, "extra_vocab_size": extra_rows}
    return tokenizer


def _build_for_text(
    *,
    tokenizer_type: str,
    vocab_file: str | Path | None,
    merge_file: str | Path | None,
    tokenizer_model: str | Path | None,
    vocab_size: int | None,
    vocab_extra_ids: int,
    extra_vocab_size: int,
    patch_tokenizer_type: str | None,
    tiktoken_pattern: str | None,
    tiktoken_num_special_tokens: int,
    tiktoken_special_tokens: Sequence[str],
) -> _TextTokenizer:
    if tokenizer_type == TikTokenizer.name:
        return TikTokenizer(
            tokenizer_model,
            pattern=tiktoken_pattern,
            vocab_size=vocab_size,
            num_special_tokens=tiktoken_num_special_tokens,
            special_tokens=tiktoken_special_tokens,
            extra_vocab_size=extra_vocab_size,
        )
    tokenizer: _TextTokenizer
    if tokenizer_type == GPT2BPETokenizer.name:
        tokenizer = GPT2BPETokenizer(vocab_file, merge_file, extra_vocab_size)
    elif tokenizer_type == HuggingFaceTokenizer.name:
        tokenizer = HuggingFaceTokenizer(tokenizer_model, extra_vocab_size, patch_tokenizer_type)
    elif tokenizer_type in SENTENCE_PIECE_TYPES:
        tokenizer = SentencePieceTokenizer(
            tokenizer_model,
            tokenizer_type,
            vocab_extra_ids=vocab_extra_ids,
            extra_vocab_size=extra_vocab_size,
        )
    elif tokenizer_type == ByteTokenizer.name:
        tokenizer = ByteTokenizer(extra_vocab_size)
    else:
        raise TokenizerError(f"--tokenizer-type {tokenizer_type} is not supported; {_hint(tokenizer_type)}")
    own_size = tokenizer.vocab_size - int(str(tokenizer.arguments["extra_vocab_size"]))
    if vocab_size is not None and vocab_size != own_size:
        raise TokenizerError(
            f"--vocab-size {vocab_size} does not match the {own_size} ids of {tokenizer_type}; omit --vocab-size"
        )
    return tokenizer


def _hint(tokenizer_type: str) -> str:
    nearest = difflib.get_close_matches(tokenizer_type, TOKENIZER_TYPES, n=1, cutoff=0.5)
    return f"did you mean {nearest[0]}?" if nearest else f"use one of {', '.join(TOKENIZER_TYPES)}"
