"""GPT-2's files for a tokenizer whose tokens are single bytes."""

from __future__ import annotations

import json
from pathlib import Path


def write_vocabulary(folder: Path) -> tuple[Path, Path]:
    """Write vocab.json and merges.txt, and return their paths."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = [chr(byte) for byte in printable] + [chr(256 + place) for place in range(len(others))]
    vocabulary = {text: place for place, text in enumerate([*characters, "<|endoftext|>"])}
    (folder / "vocab.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    (folder / "merges.txt").write_text("#version: 0.2\n", encoding="utf-8")
    return folder / "vocab.json", folder / "merges.txt"
