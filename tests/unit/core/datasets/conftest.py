"""The tokenizers of the tokenizers' own tests."""

from tests.unit.core.tokenizers.conftest import corpus, sentence_piece_file

__all__ = ["corpus", "sentence_piece_file"]
