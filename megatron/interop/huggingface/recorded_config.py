"""What a Hugging Face folder says of its model and tokenizer, in the sections of a run's configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron.core.config_base import config_to_dict
from megatron.interop.huggingface.families import read_model
from megatron.interop.huggingface.settings import read_settings
from megatron.interop.huggingface.tokenizer_files import tokenizer_settings


def recorded_config(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the model, and the tokenizer where the folder has one.

    Raises:
        CheckpointError: config.json cannot be read.
        ConfigurationError: it describes a model that is not supported.
    """
    _, config = read_model(read_settings(folder))
    tokenizer = tokenizer_settings(folder, config.vocab_size)
    has_tokenizer = tokenizer["tokenizer_type"] != "NullTokenizer"
    return {"model": config_to_dict(config), "data": {}, "tokenizer": tokenizer if has_tokenizer else {}}
