"""Hold the merges of a byte-level BPE against its vocabulary."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Sequence
from typing import Final

from megatron.core.errors import TokenizerError
from megatron.core.tokenizers.tokenizer_file import ADDED_TOKENS_FILE

_SPECIAL: Final = re.compile(r"[<\[({|].*[>\])}|]", re.DOTALL)


def check_merges(
    vocabulary: Collection[str],
    merges: Sequence[tuple[str, str]],
    bytes_and_added: Collection[str],
    names: tuple[str, str],
    place: Callable[[int], str],
) -> None:
    """Refuse merges that are cut short, or of another vocabulary.

    Each merge joins two tokens into a third. Each token is a byte, comes from a merge, or was added: one of
    ``bytes_and_added``, spelt in brackets as ``<|endoftext|>`` is, with characters that stand for no byte, or as no two
    tokens of the vocabulary spell when joined (OPT's ``madeupword0000``). So GPT-2's 50257 tokens are 256 bytes, 50000
    merges and one token that was added.

    Args:
        names: what to call the vocabulary and the merges.
        place: names the merge of a number, counted from 0.

    Raises:
        TokenizerError: they do not fit together.
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
            f"{place(number)}: vocabulary and merges do not fit together: the merge {left!r} {right!r} needs the token "
            f"{token!r}, which {vocabulary_name} lacks; one is cut short, or they are of different models: copy both "
            "again"
        )
    others = known.difference(made, bytes_and_added)
    characters = set(bytes_and_added)
    plain = (token for token in others if not _SPECIAL.fullmatch(token) and characters.issuperset(token))
    unmade = {token for token in plain if any(token[:i] in known and token[i:] in known for i in range(1, len(token)))}
    if unmade:
        first = next(token for token in vocabulary if token in unmade)
        raise TokenizerError(
            f"{merges_name} has {len(merges)} merges, but the {len(known)} tokens of {vocabulary_name} need "
            f"{len(made) + len(unmade)}: none makes {first!r}; it is cut short, or of another model: copy both again, "
            f"or list such tokens in {ADDED_TOKENS_FILE} beside it if they were added to the vocabulary"
        )
