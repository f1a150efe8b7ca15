"""Models by name: the flags of each in a file of the folder presets."""

from __future__ import annotations

from pathlib import Path

from megatron.core.errors import ConfigurationError

FOLDER = Path(__file__).parent / "presets"


def preset_names() -> list[str]:
    """Return the names that ``--model-preset`` takes."""
    return sorted(path.stem for path in FOLDER.glob("*.txt"))


def preset_words(name: str) -> tuple[str, ...]:
    """Return the training flags of a model; what follows # in its file is a comment.

    Raises:
        ConfigurationError: there is no such preset.
    """
    if name not in preset_names():
        raise ConfigurationError(f"--model-preset {name} is not known; possible: {', '.join(preset_names())}")
    lines = (FOLDER / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    return tuple(word for line in lines for word in line.partition("#")[0].split())
