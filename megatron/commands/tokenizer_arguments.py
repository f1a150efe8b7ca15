"""The flags that choose a tokenizer, for tools that count or decode tokens."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron.core.tokenizers.tokenizer import Tokenizer


def add_tokenizer_arguments(parser: argparse.ArgumentParser, default_type: str | None) -> None:
    """Declare the flags of a tokenizer, as ``tools/preprocess_data.py`` has them."""
    from megatron.core.tokenizers.build_tokenizer import TOKENIZER_TYPES

    group = parser.add_argument_group("tokenizer")
    group.add_argument(
        "--tokenizer-type", default=default_type, metavar="TYPE", help=f"one of {', '.join(TOKENIZER_TYPES)}"
    )
    group.add_argument("--vocab-file", metavar="FILE", help="vocabulary (GPT2BPETokenizer)")
    group.add_argument("--merge-file", metavar="FILE", help="byte-pair merges (GPT2BPETokenizer)")
    group.add_argument("--tokenizer-model", metavar="PATH", help="model file, or folder with tokenizer.json")
    group.add_argument("--vocab-size", type=int, metavar="N", help="size (NullTokenizer, TikTokenizer)")
    group.add_argument("--vocab-extra-ids", type=int, default=0, metavar="N", help="SentencePieceTokenizer's")
    group.add_argument("--tiktoken-pattern", choices=["v1", "v2"], help="how TikTokenizer cuts words")
    group.add_argument("--tiktoken-num-special-tokens", type=int, default=1000, metavar="N")
    group.add_argument("--tiktoken-special-tokens", nargs="+", default=[], metavar="TOKEN")


def tokenizer_keywords(arguments: argparse.Namespace) -> dict[str, object]:
    """Return what `build_tokenizer` takes."""
    return {
        "tokenizer_type": arguments.tokenizer_type,
        "vocab_file": arguments.vocab_file,
        "merge_file": arguments.merge_file,
        "tokenizer_model": arguments.tokenizer_model,
        "vocab_size": arguments.vocab_size,
        "vocab_extra_ids": arguments.vocab_extra_ids,
        "tiktoken_pattern": arguments.tiktoken_pattern,
        "tiktoken_num_special_tokens": arguments.tiktoken_num_special_tokens,
        "tiktoken_special_tokens": arguments.tiktoken_special_tokens,
    }


def tokenizer_of(arguments: argparse.Namespace) -> Tokenizer:
    """Build the tokenizer that the flags name.

    Raises:
        TokenizerError: they name none that can be built.
    """
    from megatron.core.tokenizers.build_tokenizer import build_tokenizer

    return build_tokenizer(**tokenizer_keywords(arguments))  # type: ignore[arg-type]
