"""GPT-2's byte-level BPE from a vocabulary and a merge file, with validation of the merges."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Final

from megatron.core.errors import TokenizerError
from megatron.core.tokenizers.tokenizer import (
    ADDED_TOKENS_FILE,
    read_added_tokens,
    read_json_object,
    read_text,
    require_file,
    with_companions,
)
from megatron.core.tokenizers.tokenizers_engine import EngineTokenizer, TokenizersEngine

_SPECIAL: Final = re.compile(r"[<\[({|].*[>\])}|]", re.DOTALL)


def check_merges(
    vocabulary: Collection[str],
    merges: Sequence[tuple[str, str]],
    bytes_and_added: Collection[str],
    names: tuple[str, str],
    place: Callable[[int], str],
) -> None:
    """Check that the merges are complete and match the vocabulary.

    Each merge joins two tokens into a third. Each token is a byte, the result of a merge, or an added token. An added
    token is in ``bytes_and_added``, is spelled in brackets like ``<|endoftext|>``, has characters that encode no byte,
    or is not the concatenation of two tokens of the vocabulary (OPT's ``madeupword0000``). GPT-2's 50257 tokens, for
    example, are 256 bytes, 50000 merges and one added token.

    Args:
        names: names of the vocabulary and the merges in messages.
        place: returns the name of the merge with a number, counted from 0.

    Raises:
        TokenizerError: the vocabulary and the merges do not match.
    """
    vocabulary_name, merges_name = names
    known, made = set(vocabulary), {left + right for left, right in merges}
    if not (known.issuperset(made) and known.issuperset(itertools.chain.from_iterable(merges))):
        number, token = next(
            (number, token)
            for number, (left, right) in enumerate(merges)
            for token in (left, right, left + right)
            if token not in known
        )
        left, right = merges[number]
        raise TokenizerError(
            f"{place(number)}: vocabulary and merges do not match: the merge {left!r} {right!r} needs the token "
            f"{token!r}, which {vocabulary_name} lacks; one file is truncated, or they are from different models; copy "
            "both again"
        )
    others = known.difference(made, bytes_and_added)
    characters = set(bytes_and_added)
    plain = (token for token in others if not _SPECIAL.fullmatch(token) and characters.issuperset(token))
    unmade = {token for token in plain if any(token[:i] in known and token[i:] in known for i in range(1, len(token)))}
    if unmade:
        first = next(token for token in vocabulary if token in unmade)
        raise TokenizerError(
            f"{merges_name} has {len(merges)} merges, but the {len(known)} tokens of {vocabulary_name} need "
            f"{len(made) + len(unmade)}: no merge produces {first!r}; it is truncated or from a different model; copy "
            f"both again, or list tokens that were added to the vocabulary in {ADDED_TOKENS_FILE} next to it"
        )


END_OF_TEXT = "<|endoftext|>"


class GPT2BPETokenizer(EngineTokenizer):
    """GPT-2's tokenizer, from ``vocab.json`` and ``merges.txt``.

    "<|endoftext|>" is the end-of-document token. Spelled out in a text, it is encoded as ordinary characters.
    Paper: Radford et al., "Language Models are Unsupervised Multitask Learners" (2019).

    Raises:
        TokenizerError: a file is missing or damaged, or the two files do not match.
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
    """Return the printable character of each byte in a byte-level vocabulary, by byte value.

    Printable Latin-1 bytes represent themselves. The 68 other bytes are numbered from U+0100 in order.
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
                f"{path} contains merges, not a vocabulary; exchange --vocab-file and --merge-file"
            ) from None
        raise
    for token, token_id in vocabulary.items():
        if type(token_id) is not int or token_id < 0:
            raise TokenizerError(f"{path}: token {token!r} has the id {token_id!r}; change --vocab-file")
    missing = [byte for byte, character in enumerate(byte_characters()) if character not in vocabulary]
    if missing:
        # The engine would drop such bytes silently.
        raise TokenizerError(
            f"{path} is not a byte-level vocabulary: {len(missing)} of the 256 byte tokens are missing, "
            f"the first for byte {missing[0]}; change --vocab-file"
        )
    return vocabulary


def _read_merges(path: Path) -> list[tuple[int, tuple[str, str]]]:
    """Return each merge with its line number."""
    merges = []
    content = read_text(path)
    if content.startswith("{"):
        raise TokenizerError(
            f"{path} contains JSON, not merges; pass the vocabulary as --vocab-file, and merges.txt as --merge-file"
        )
    for number, line in enumerate(content.split("\n"), start=1):
        line = line.removesuffix("\r")
        # Only the first line can be the header: a merge may begin with "#" itself.
        if not line or (number == 1 and line.startswith("#version")):
            continue
        left, separator, right = line.partition(" ")
        if not (left and separator and right) or " " in right:
            raise TokenizerError(
                f"{path}:{number}: two tokens are expected, but the line is {line[:80]!r}; change --merge-file"
            )
        merges.append((number, (left, right)))
    return merges
