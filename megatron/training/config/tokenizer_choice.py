"""The tokenizer of a command line that names none: the one in the folder of --load."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from megatron.training.config.data_config import TokenizerConfig
from megatron.training.config.run_config import RunConfig

_HUGGING_FACE = "tokenizer.json"
_SENTENCE_PIECE = "tokenizer.model"


def choose_tokenizer(config: RunConfig, is_type_given: bool, notes: list[str], problems: list[str]) -> RunConfig:
    """Take the tokenizer from --tokenizer-model or --load where its folder has one and no kind or vocabulary is given.

    With --patch-tokenizer-type it must be there.
    """
    tokenizer = config.tokenizer
    patch = tokenizer.patch_tokenizer_type
    if is_type_given or tokenizer.vocab_file is not None or tokenizer.merge_file is not None:
        if patch is not None and tokenizer.tokenizer_type != "HuggingFaceTokenizer":
            notes.append(
                f"--patch-tokenizer-type {patch} has no effect: the tokenizer is {tokenizer.tokenizer_type}, as the "
                "other flags say"
            )
        return config
    source, folder = "--load", config.checkpoint.load
    if tokenizer.tokenizer_model is not None:
        source, folder = "--tokenizer-model", tokenizer.tokenizer_model
    found = None if folder is None else _tokenizer_in(Path(folder), tokenizer)
    if found is not None:
        notes.append(f"the tokenizer is that of {source} {folder}: {found.tokenizer_type}")
        return dataclasses.replace(config, tokenizer=found)
    if patch is None:
        if tokenizer.tokenizer_model is None or tokenizer.tokenizer_type != "GPT2BPETokenizer":
            return config
        problems.append(
            f"--tokenizer-model {folder} is no folder with {_HUGGING_FACE} or {_SENTENCE_PIECE}, and nothing says what "
            "it is; add --tokenizer-type"
        )
    elif folder is None:
        problems.append(f"--patch-tokenizer-type {patch} takes the tokenizer from --load DIR; add --load DIR")
    elif not os.path.exists(folder):
        problems.append(f"--patch-tokenizer-type {patch}: {source} {folder} does not exist; name its folder")
    else:
        problems.append(
            f"--patch-tokenizer-type {patch}: {source} {folder} has no {_HUGGING_FACE}; save the fast tokenizer there, "
            "or name its folder with --tokenizer-model (a tokenizer that is Python code is never run)"
        )
    # What is missing has been said: no check asks for GPT-2's files too.
    chosen = dataclasses.replace(tokenizer, tokenizer_type="NullTokenizer", vocab_size=tokenizer.vocab_size or 1)
    return dataclasses.replace(config, tokenizer=chosen)


def _tokenizer_in(folder: Path, tokenizer: TokenizerConfig) -> TokenizerConfig | None:
    if (folder / _HUGGING_FACE).is_file():
        return dataclasses.replace(tokenizer, tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(folder))
    if (folder / _SENTENCE_PIECE).is_file():
        model = str(folder / _SENTENCE_PIECE)
        return dataclasses.replace(tokenizer, tokenizer_type="Llama2Tokenizer", tokenizer_model=model)
    return None
