"""Configuration of a run: fields, command line, configuration files, presets, and checks of values."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from megatron.config.arguments import (
        HELP_FLAGS,
        ParsedArguments,
        all_flags,
        parse_arguments,
        resolve_arguments,
        without_flags,
    )
    from megatron.config.checkpoint_arguments import PRECISION, TOKENIZER, recorded_config
    from megatron.config.config_sources import keyword_words, preset_names, preset_words, read_config_file
    from megatron.config.deprecated_names import (
        deprecation_warning,
        rename_words,
        with_current_fields,
        with_current_flags,
    )
    from megatron.config.extra_arguments import ExtraArgsProvider, ExtraArguments, declare_arguments
    from megatron.config.megatron_flags import NO_EFFECT, NOT_SUPPORTED, ForeignFlag, foreign_flag
    from megatron.config.nccl_options import notes_on_groups, read_nccl_options
    from megatron.config.printed_config import argument_values, format_arguments, format_config, summarize
    from megatron.config.resolution import DEFAULT_SPLIT, machine_notes
    from megatron.config.run_config import (
        INDEXED_DATASETS,
        NATIVE_FORMAT,
        RAW_DATASETS,
        CheckpointConfig,
        DataConfig,
        FaultConfig,
        RunConfig,
        TokenizerConfig,
        TrainingConfig,
        command_line_fields,
        config_parts,
        extra_validation_sets,
    )

__getattr__ = lazy_exports(
    __name__,
    {
        "arguments": "HELP_FLAGS ParsedArguments all_flags parse_arguments resolve_arguments without_flags",
        "checkpoint_arguments": "PRECISION TOKENIZER recorded_config",
        "config_sources": "keyword_words preset_names preset_words read_config_file",
        "deprecated_names": "deprecation_warning rename_words with_current_fields with_current_flags",
        "extra_arguments": "ExtraArgsProvider ExtraArguments declare_arguments",
        "megatron_flags": "ForeignFlag NOT_SUPPORTED NO_EFFECT foreign_flag",
        "nccl_options": "notes_on_groups read_nccl_options",
        "printed_config": "argument_values format_arguments format_config summarize",
        "resolution": "DEFAULT_SPLIT machine_notes",
        "run_config": (
            "CheckpointConfig DataConfig FaultConfig INDEXED_DATASETS NATIVE_FORMAT RAW_DATASETS RunConfig "
            "TokenizerConfig TrainingConfig command_line_fields config_parts extra_validation_sets"
        ),
    },
)
