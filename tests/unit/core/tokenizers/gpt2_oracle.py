"""A slow GPT-2 encoder, written from the published algorithm: the oracle of the compiled one."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import regex

WORDS = regex.compile(r"'(?:s|t|re|ve|m|ll|d)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")


class GPT2Oracle:
    """Merge byte pairs one rank after the other."""

    def __init__(self, vocab_file: Path, merge_file: Path) -> None:
        self.vocabulary: dict[str, int] = json.loads(vocab_file.read_text(encoding="utf-8"))
        lines = merge_file.read_text(encoding="utf-8").split("\n")
        lines = [line for line in lines[1:] if line]
        self.ranks = {tuple(line.split(" ")): rank for rank, line in enumerate(lines)}
        kept = [b for b in range(256) if chr(b).isprintable() and not chr(b).isspace() and b != 0xAD]
        others = [b for b in range(256) if b not in kept]
        self.letters = {b: chr(b) for b in kept} | {b: chr(256 + n) for n, b in enumerate(others)}
        self.bytes = {letter: b for b, letter in self.letters.items()}

    def encode(self, text: str) -> list[int]:
        ids = []
        for word in WORDS.findall(text):
            parts = [self.letters[b] for b in word.encode("utf-8")]
            while len(parts) > 1:
                pairs = list(pairwise(parts))
                best = min(pairs, key=lambda pair: self.ranks.get(pair, len(self.ranks)))
                if best not in self.ranks:
                    break
                merged, at = [], 0
                while at < len(parts):
                    if tuple(parts[at : at + 2]) == best:
                        merged.append(parts[at] + parts[at + 1])
                        at += 2
                    else:
                        merged.append(parts[at])
                        at += 1
                parts = merged
            ids += [self.vocabulary[part] for part in parts]
        return ids

    def decode(self, ids: list[int]) -> str:
        names = {i: token for token, i in self.vocabulary.items()}
        return bytes(self.bytes[letter] for i in ids for letter in names[i]).decode("utf-8", "replace")
