"""The size of a run's vocabulary, without its tokenizer where the flags say enough."""

from __future__ import annotations

import dataclasses

from megatron.config.run_config import RunConfig
from megatron.core.errors import ConfigurationError, InputError
from megatron.core.tokenizers.build_tokenizer import build_tokenizer

_GPT2_SIZE = 50257


def with_known_vocabulary(config: RunConfig) -> RunConfig:
    """Return the configuration with its vocabulary's size: the tokenizer's own, or what the flags say of it.

    Raises:
        ConfigurationError: the tokenizer's files are not there and no flag says its size.
    """
    model = dataclasses.replace(config.model, vocab_size=_vocabulary_size(config))
    return dataclasses.replace(config, model=model)


def _vocabulary_size(config: RunConfig) -> int:
    tokenizer = config.tokenizer
    try:
        return build_tokenizer(**dataclasses.asdict(tokenizer)).vocab_size
    except InputError as error:
        size = tokenizer.padded_vocab_size or tokenizer.vocab_size
        if size is None and tokenizer.tokenizer_type == "GPT2BPETokenizer":
            size = _GPT2_SIZE + tokenizer.extra_vocab_size
        if size is None:
            raise ConfigurationError(
                f"the size of the vocabulary is not known ({error}); add --vocab-size N or --padded-vocab-size N"
            ) from error
        return size
