"""Flags of a model in memory, as keyword arguments: resolved and checked as a command line is."""

from __future__ import annotations

import dataclasses
import difflib
import os
import shlex
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.config import (
    DEFAULT_SPLIT,
    PRECISION,
    TOKENIZER,
    CheckpointConfig,
    RunConfig,
    command_line_fields,
    keyword_words,
    preset_names,
    resolve_arguments,
)
from megatron.core.config_base import IDENTITY, field_specs, field_value
from megatron.core.errors import ConfigurationError, choices
from megatron.core.models.gpt import GPTConfig
from megatron.core.tokenizers import HuggingFaceTokenizer

_FILES = (".toml", ".yaml", ".yml")
_OF_LOAD = (
    "load",
    "use_checkpoint_args",
    "finetune",
    "ckpt_step",
    "pretrained_checkpoint",
    "no_load_optim",
    "no_load_rng",
)
_ELSEWHERE: Mapping[str, str] = {
    "load": "GPT.load(folder) loads a checkpoint",
    "pretrained_checkpoint": "GPT.load(folder, finetune=True) loads weights",
    "use_checkpoint_args": "GPT.load(folder) reads the model from the checkpoint",
    "skip_train": "evaluate(data) evaluates without training",
    "inprocess_restart": "only pretrain_gpt.py restarts its ranks",
}
"""Flags that no function takes, and what replaces each."""
_FIXED_PARTS = ("tokenizer", "initialization")
_FREE = ("num_threads", "used_threads", "hang_timeout_seconds", "distributed_timeout_minutes")
_MEASURED = ("cpu_gemm_backend", "tp_comm_overlap_impl", "transformer_impl", "vocab_size")


@dataclasses.dataclass(frozen=True)
class Settings:
    """Flags by the names of their fields, after the ``words`` of a command line, a preset or a file."""

    words: tuple[str, ...] = ()
    values: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def updated(self, values: Mapping[str, Any]) -> Settings:
        """Return the settings with other values."""
        return dataclasses.replace(self, values={**self.values, **values})

    def without(self, names: Collection[str]) -> Settings:
        """Return the settings without some values."""
        kept = {name: value for name, value in self.values.items() if name not in names}
        return dataclasses.replace(self, values=kept)

    def resolve(
        self, caller: str, world_size: int, *, has_data: bool, needs_files: bool = True
    ) -> tuple[RunConfig, tuple[str, ...]]:
        """Return the checked configuration, and notes about flags without effect.

        Without data, no flag of a training is required. Without ``needs_files``, no flag names the data.

        Raises:
            ConfigurationError: with every problem of the flags.
        """
        words, renamed = keyword_words(self.values, caller)
        if not has_data:
            words.append("--skip-train")
        parsed = resolve_arguments(
            [*self.words, *words], world_size, needs_files=has_data and needs_files, is_train_command=True
        )
        config = parsed.config
        if not has_data:
            config = dataclasses.replace(config, training=dataclasses.replace(config.training, skip_train=False))
        return config, (*renamed, *parsed.notes)


def settings_of(config: object, flags: Mapping[str, Any], tokenizer: str | os.PathLike[str] | None) -> Settings:
    """Return the settings that the arguments of `GPT.build` describe.

    Raises:
        ConfigurationError: ``config`` is none of the accepted kinds, or the tokenizer is no file or folder.
    """
    values = dict(flags)
    if tokenizer is not None:
        values |= _tokenizer_values(tokenizer)
    if config is None:
        return Settings(values=values)
    if isinstance(config, RunConfig | GPTConfig):
        return Settings(values={**config_values(config), **values})
    if isinstance(config, Mapping):
        return Settings(values={**config, **values})
    if isinstance(config, str | os.PathLike):
        return Settings(tuple(_words(os.fspath(config))), values)
    raise ConfigurationError(
        f"GPT.build: config has the type {type(config).__name__}; pass a preset name, a .toml or .yaml file, a string "
        "of flags, a dict, a GPTConfig or a RunConfig"
    )


def _words(text: str) -> Sequence[str]:
    if text in preset_names():
        return ("--model-preset", text)
    if Path(text).suffix.lower() in _FILES and not text.lstrip().startswith("-"):
        return ("--config", text)
    if text.lstrip().startswith("--"):
        try:
            return shlex.split(text)
        except ValueError as error:
            raise ConfigurationError(f"GPT.build: the flags cannot be split into words: {error}") from error
    nearest = difflib.get_close_matches(text.lower(), preset_names(), n=1, cutoff=0.6)
    hint = f"did you mean {nearest[0]}?" if nearest else f"presets: {choices(preset_names())}"
    raise ConfigurationError(f"GPT.build: {text!r} is neither a preset, a .toml or .yaml file, nor flags; {hint}")


def _tokenizer_values(tokenizer: str | os.PathLike[str]) -> dict[str, Any]:
    path = Path(tokenizer)
    if path.is_dir() or path.suffix == ".json":
        return {"tokenizer_type": HuggingFaceTokenizer.name, "tokenizer_model": str(path)}
    if path.suffix == ".model":
        return {"tokenizer_type": "SentencePieceTokenizer", "tokenizer_model": str(path)}
    raise ConfigurationError(
        f"tokenizer={str(tokenizer)!r} is neither a folder with tokenizer.json, a .json file nor a SentencePiece "
        ".model file; pass one of these, or tokenizer_type and its files"
    )


def refuse_misplaced(values: Mapping[str, Any], caller: str) -> None:
    """Reject flags, by field, that have no meaning for a function of `GPT`.

    Raises:
        ConfigurationError: some are set; the message has a line for each.
    """
    hints = dict(_ELSEWHERE)
    if caller != "GPT.load":
        hints |= {name: f"it is a flag of GPT.load(folder, {name}=...)" for name in _OF_LOAD if name not in hints}
    wrong = [name for name in hints if values.get(name) is not None and values[name] is not False]
    if wrong:
        raise ConfigurationError([f"{caller}: {name} belongs elsewhere: {hints[name]}" for name in wrong])


def config_values(config: RunConfig | GPTConfig, without: Collection[str] = ()) -> dict[str, Any]:
    """Return the values of a configuration that are not at their defaults, by field."""
    if isinstance(config, RunConfig):
        pairs = list(config.flags())
    else:
        pairs = [(spec, field_value(config, spec.name)) for spec in field_specs(GPTConfig) if spec.options.cli]
    return {
        spec.name: value
        for spec, value in pairs
        if value is not None and (value != spec.default or spec.is_required) and spec.name not in without
    }


def recorded_values(config: RunConfig) -> dict[str, Any]:
    """Return the flags of a run that say how it trains, but not its model, layout, tokenizer, sessions or output."""
    roles = (*IDENTITY, "layout", "session", "output")
    closed = (*PRECISION, *TOKENIZER)
    kept = {
        spec.name for _, spec in command_line_fields() if spec.options.role not in roles and spec.name not in closed
    }
    return {name: value for name, value in _values_without_load(config).items() if name in kept}


def loaded_settings(folder: str, recorded: Mapping[str, Any], flags: Mapping[str, Any]) -> Settings:
    """Return the settings that load a folder: those that its run recorded for training, and then the given ones."""
    return Settings((), {**recorded, **flags, "load": folder, "use_checkpoint_args": True})


def without_load(config: RunConfig) -> RunConfig:
    """Return the configuration of a model that was loaded, which no longer names the folder."""
    defaults = {spec.name: spec.default for spec in field_specs(CheckpointConfig) if spec.name in _OF_LOAD}
    return dataclasses.replace(config, checkpoint=dataclasses.replace(config.checkpoint, **defaults))


def kept_settings(config: RunConfig) -> Settings:
    """Return the settings of a model that was loaded."""
    return Settings((), _values_without_load(config))


def _values_without_load(config: RunConfig) -> dict[str, Any]:
    values = config_values(config, (*_OF_LOAD, "skip_train", "log_interval"))
    if values.get("split") == DEFAULT_SPLIT:
        del values["split"]
    return values


def with_chosen_values(config: RunConfig, built: RunConfig) -> RunConfig:
    """Return a configuration with the values that were measured or read when the model was built."""
    chosen = {name: getattr(built.model, name) for name in _MEASURED}
    threads = built.initialization.used_threads
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, **chosen),
        initialization=dataclasses.replace(config.initialization, used_threads=threads),
    )


def refuse_other_model(config: RunConfig, built: RunConfig, caller: str) -> None:
    """Reject flags that would change the model, its layout, its tokenizer or its random numbers.

    Raises:
        ConfigurationError: some would; the message has a line for each.
    """
    problems = []
    roles = (*IDENTITY, "layout")
    for part, spec in command_line_fields():
        is_fixed = part in _FIXED_PARTS or (part == "model" and spec.options.role in roles)
        if not is_fixed or spec.name in _FREE or (part == "model" and spec.name in _MEASURED):
            continue
        given, own = (field_value(getattr(each, part), spec.name) for each in (config, built))
        if given != own:
            problems.append(
                f"{caller}: {spec.name} is {own} in this model and cannot become {given}; build another GPT, or save "
                "this one and load it with the new value"
            )
    if problems:
        raise ConfigurationError(problems)
