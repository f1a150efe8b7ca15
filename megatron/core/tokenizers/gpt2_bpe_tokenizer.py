"""GPT-2's byte-level BPE from a vocabulary and a merge file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from megatron.core.errors import TokenizerError
from megatron.core.tokenizers.merge_check import check_merges
from megatron.core.tokenizers.tokenizer_file import (
    read_added_tokens,
    read_json_object,
    read_text,
    require_file,
    with_companions,
)
from megatron.core.tokenizers.tokenizers_engine import EngineTokenizer, TokenizersEngine

END_OF_TEXT = "<|endoftext|>"


class GPT2BPETokenizer(EngineTokenizer):
    """Encode as GPT-2 does, from ``vocab.json`` and ``merges.txt`` alone.

    "<|endoftext|>" ends a document; spelt out in a text it is encoded as ordinary characters.
    Paper: Radford et al., "Language Models are Unsupervised Multitask Learners" (2019).

    Raises:
        TokenizerError: a file is missing or damaged, or the two do not fit together.
    """

    name = "GPT2BPETokenizer"

    def __init__(self, vocab_file: str | Path | None, merge_file: str | Path | None, extra_vocab_size: int = 0) -> None:
        vocab_path = require_file(vocab_file, "--vocab-file", self.name)
        merge_path = require_file(merge_file, "--merge-file", self.name)
        vocabulary = _read_vocabulary(vocab_path)
        numbered = _read_merges(merge_path)
        merges = [merge for _, merge in numbered]
        names = (str(vocab_path), str(merge_path))
        known = {*byte_characters(), *read_added_tokens(vocab_path.parent)}
        check_merges(vocabulary, merges, known, names, lambda i: f"{merge_path}:{numbered[i][0]}")
        super().__init__(TokenizersEngine.byte_level_bpe(vocabulary, merges, self.name))
        self.vocab_size = max(vocabulary.values()) + 1 + extra_vocab_size
        self.eod_id = vocabulary.get(END_OF_TEXT)
        self.files = with_companions(vocab_path, merge_path)
        self.arguments: Mapping[str, object] = {
            "tokenizer_type": self.name,
            "vocab_file": str(vocab_path),
            "merge_file": str(merge_path),
            "extra_vocab_size": extra_vocab_size,
        }


def byte_characters() -> list[str]:
    """Give the printable character that stands for each byte in a byte-level vocabulary, by byte value.

    Printable Latin-1 bytes stand for themselves; the 68 others are numbered from U+0100 in order.
    """
    printable = {
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    }
    characters = []
    next_substitute = 256
    for byte in range(256):
        if byte in printable:
            characters.append(chr(byte))
        else:
            characters.append(chr(next_substitute))
            next_substitute += 1
    return characters


def _read_vocabulary(path: Path) -> dict[str, int]:
    try:
        vocabulary = read_json_object(path)
    except TokenizerError:
        if read_text(path).startswith("#version"):
            raise TokenizerError(
                f"{path} holds merges, not a vocabulary; exchange --vocab-file and --merge-file"
            ) from None
        raise
    for token, token_id in vocabulary.items():
        if type(token_id) is not int or token_id < 0:
            raise TokenizerError(f"{path}: token {token!r} has the id {token_id!r}; change --vocab-file")
    missing = [byte for byte, character in enumerate(byte_characters()) if character not in vocabulary]
    if missing:
        # The engine would drop such bytes without a word.
        raise TokenizerError(
            f"{path} is not a byte-level vocabulary: {len(missing)} of the 256 byte tokens are missing, "
            f"the first for byte {missing[0]}; change --vocab-file"
        )
    return vocabulary


def _read_merges(path: Path) -> list[tuple[int, tuple[str, str]]]:
    """Return the number of its line with each merge."""
    merges = []
    content = read_text(path)
    if content.startswith("{"):
        raise TokenizerError(f"{path} holds JSON, not merges; give the vocabulary to --vocab-file, merges.txt here")
    for number, line in enumerate(content.split("\n"), start=1):
        line = line.removesuffix("\r")
        # Only the first line can be the header: a merge may begin with "#" itself.
        if not line or (number == 1 and line.startswith("#version")):
            continue
        left, separator, right = line.partition(" ")
        if not (left and separator and right) or " " in right:
            raise TokenizerError(f"{path}:{number}: expected two tokens, found {line[:80]!r}; change --merge-file")
        merges.append((number, (left, right)))
    return merges
