"""The names of the tensors in a model folder, read without torch."""

from __future__ import annotations

from pathlib import Path

from megatron.core.safe_io import parse_json, read_plain_text

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_MOST_HEADER_BYTES = 100_000_000


def stored_names(folder: Path) -> frozenset[str]:
    """Return the names; none where the files cannot be read, of which whoever reads the weights says more."""
    try:
        if (folder / _SINGLE).is_file():
            with open(folder / _SINGLE, "rb") as stream:
                length = int.from_bytes(stream.read(8), "little")
                header = parse_json(stream.read(min(length, _MOST_HEADER_BYTES)))
            return frozenset(header) - {"__metadata__"}
        return frozenset(parse_json(read_plain_text(folder / _INDEX))["weight_map"])
    except (OSError, ValueError, KeyError, TypeError):
        return frozenset()
