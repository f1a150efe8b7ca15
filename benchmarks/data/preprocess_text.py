"""The text that preprocessing is measured on, from one jsonl file of real articles."""

from __future__ import annotations

import json
import random
import string
from pathlib import Path

KINDS = ("repeated", "varied")


def write_text(source: Path, kind: str, min_bytes: int, target: Path) -> None:
    """Write copies of the source's articles until the file has ``min_bytes``.

    "repeated" copies them as they are: every word is met again and again. "varied" exchanges the letters of the
    alphabet for each other, anew for each copy: words keep their lengths and frequencies, but hardly any word of one
    copy is in another, which no real text does to a tokenizer that remembers words.
    """
    texts = [json.loads(line)["text"] for line in source.read_text(encoding="utf-8").splitlines()]
    draw = random.Random(0)
    size = 0
    with open(target, "w", encoding="utf-8") as file:
        while size < min_bytes:
            table: dict[int, int] = {}
            if kind == "varied" and size:
                for letters in (string.ascii_lowercase, string.ascii_uppercase):
                    shuffled = draw.sample(letters, len(letters))
                    table |= str.maketrans(letters, "".join(shuffled))
            for text in texts:
                size += file.write(json.dumps({"text": text.translate(table)}) + "\n")


def read_texts(path: Path) -> list[bytes]:
    """Return the texts as a tokenizer takes them."""
    with open(path, encoding="utf-8") as lines:
        return [json.loads(line)["text"].encode() for line in lines]
