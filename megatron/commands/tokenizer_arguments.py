"""The flags that choose a tokenizer, for the commands that encode, count or decode tokens."""

from __future__ import annotations

import argparse
from typing import Any

from megatron.core.tokenizers.build_tokenizer import TOKENIZER_TYPES, build_tokenizer
from megatron.core.tokenizers.tokenizer import Tokenizer

TOKENIZER_KEYWORDS = (
    "tokenizer_type",
    "vocab_file",
    "merge_file",
    "tokenizer_model",
    "vocab_size",
    "vocab_extra_ids",
    "tiktoken_pattern",
    "tiktoken_num_special_tokens",
    "tiktoken_special_tokens",
)


def add_tokenizer_source(
    parser: argparse.ArgumentParser, default_type: str | None, title: str
) -> argparse._ArgumentGroup:
    """Declare the flags that name a tokenizer and its files, and return their group."""
    group = parser.add_argument_group(title)
    group.add_argument(
        "--tokenizer-type", default=default_type, metavar="TYPE", help=f"one of {', '.join(TOKENIZER_TYPES)}"
    )
    group.add_argument("--vocab-file", metavar="FILE", help="vocabulary (GPT2BPETokenizer)")
    group.add_argument("--merge-file", metavar="FILE", help="byte-pair merges (GPT2BPETokenizer)")
    group.add_argument("--tokenizer-model", metavar="PATH", help="model file, or folder with tokenizer.json")
    group.add_argument("--vocab-size", type=int, metavar="N", help="size (NullTokenizer, TikTokenizer)")
    return group


def add_tokenizer_arguments(parser: argparse.ArgumentParser, default_type: str | None) -> argparse._ArgumentGroup:
    """Declare all flags of a tokenizer and return their group."""
    group = add_tokenizer_source(parser, default_type, "tokenizer")
    group.add_argument(
        "--vocab-extra-ids", type=int, default=0, metavar="N", help="SentencePieceTokenizer's <extra_id_N>"
    )
    group.add_argument("--tiktoken-pattern", choices=["v1", "v2"], help="how TikTokenizer cuts words")
    group.add_argument("--tiktoken-num-special-tokens", type=int, default=1000, metavar="N")
    group.add_argument("--tiktoken-special-tokens", nargs="+", default=[], metavar="TOKEN")
    return group


def tokenizer_keywords(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return what `build_tokenizer` takes."""
    return {name: getattr(arguments, name) for name in TOKENIZER_KEYWORDS}


def tokenizer_of(arguments: argparse.Namespace) -> Tokenizer:
    """Build the tokenizer that the flags name.

    Raises:
        TokenizerError: they name none that can be built.
    """
    return build_tokenizer(**tokenizer_keywords(arguments))
