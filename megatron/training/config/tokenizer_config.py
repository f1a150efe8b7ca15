"""Which tokenizer a run uses."""

from __future__ import annotations

import dataclasses

from megatron.core.config_base import flag
from megatron.core.tokenizers.build_tokenizer import TOKENIZER_TYPES


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """Hold the tokenizer's kind and its files."""

    tokenizer_type: str = flag("GPT2BPETokenizer", choices=TOKENIZER_TYPES)
    """Kind of tokenizer."""
    vocab_file: str | None = flag(None, metavar="FILE")
    """Vocabulary file."""
    merge_file: str | None = flag(None, metavar="FILE")
    """File of the byte-pair merges."""
    tokenizer_model: str | None = flag(None, metavar="PATH")
    """Model file, or folder with tokenizer.json."""
    vocab_size: int | None = None
    """Size of the vocabulary, for NullTokenizer; with any other tokenizer it must be the tokenizer's
    own."""
    vocab_extra_ids: int = 0
    """Number of extra ids that are added to the vocabulary."""
    extra_vocab_size: int = 0
    """Number of rows beyond the tokenizer's own vocabulary."""
    tiktoken_pattern: str | None = flag(None, choices=("v1", "v2"))
    """Pattern that splits the text before tiktoken merges it."""
    tiktoken_num_special_tokens: int = 1000
    """Number of special tokens that tiktoken's vocabulary leaves room for."""
    tiktoken_special_tokens: tuple[str, ...] = flag((), nargs="+", metavar="TOKEN")
    """Special tokens of tiktoken's vocabulary."""
