"""The command line: an argparse parser generated from the configuration dataclasses, and the parsed configuration.

The field ``hidden_size`` becomes the flag ``--hidden-size``, and its docstring becomes the help text. All problems of a
command line are collected and reported together.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import os
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from megatron.config.checkpoint_arguments import PRECISION, TOKENIZER, no_checkpoint, read_checkpoint_arguments
from megatron.config.checks import find_problems, flags_of_absent_layers
from megatron.config.deprecated_names import deprecated_flags, with_current_flags
from megatron.config.extra_arguments import extra_fields, script_defaults
from megatron.config.megatron_flags import (
    NO_EFFECT,
    NOT_SUPPORTED,
    TABLE_PREFIX,
    cut_at_documents,
    foreign_answer,
    foreign_flags,
    packing_notes,
    switch_with_value,
    table_flags,
    unknown_flags,
    unused_fusions,
)
from megatron.config.resolution import choose_tokenizer, resolve, resolve_checkpoint
from megatron.config.run_config import CheckpointConfig, RunConfig, command_line_fields, config_parts
from megatron.config.translated_flags import translate_flags
from megatron.core.broken_pipe import reader_may_leave
from megatron.core.config_base import FieldSpec, field_docs, field_specs, from_fields
from megatron.core.errors import ConfigurationError, InputError
from megatron.core.tokenizers import unused_tokenizer_flags
from megatron.core.transformer import SYMBOLS

_PRINTED = "Printed by --print-config for {} process(es), for --config FILE. Flags at their default are comments."
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_PATHS = ("FILE", "DIR", "PATH", "[WEIGHT] PREFIX")
_MOST_NAME_BYTES, _MOST_PATH_BYTES = 255, 3800
_TYPE_WORDS = {int: "an integer", float: "a number", bool: "a switch", str: "text"}


@dataclasses.dataclass(frozen=True)
class ParsedArguments:
    """Valid configuration, and notes about flags without effect."""

    config: RunConfig
    notes: tuple[str, ...]


def parse_arguments(
    argv: Sequence[str], world_size: int = 1, rank: int = 0, *, is_train_command: bool = False
) -> RunConfig:
    """Parse a command line into a resolved and checked configuration.

    ``is_train_command`` selects the defaults of ``megatron train``, see `resolve_arguments`. Rank 0 prints one line for
    each flag that has no effect. With ``--print-config`` (and ``--help``) rank 0 prints the requested text and the
    program exits with status 0.

    Raises:
        ConfigurationError: with every problem of the command line.
    """
    if rank != 0 and any(word in HELP_FLAGS for word in argv):
        sys.exit(0)
    parsed = resolve_arguments(argv, world_size, is_train_command=is_train_command)
    if parsed.config.logging.explain:
        raise ConfigurationError("--explain is not supported by this script; run tools/explain.py or pretrain_gpt.py")
    print_config = parsed.config.logging.print_config
    if rank == 0:
        for note in parsed.notes:
            print(note, file=sys.stderr if print_config else sys.stdout, flush=True)
        if print_config:
            from megatron.config.printed_config import format_config

            with reader_may_leave():
                print(format_config(parsed.config, (_PRINTED.format(world_size),)), end="")
    if print_config:
        sys.exit(0)
    return parsed.config


def resolve_arguments(
    argv: Sequence[str], world_size: int, *, needs_files: bool = True, is_train_command: bool = False
) -> ParsedArguments:
    """Parse a command line into a configuration, without side effects.

    Without ``needs_files``, the data and tokenizer files need not exist, and no flag for the length of the run is
    required. With ``is_train_command``, the log is brief unless --log-megatron-lines is given, the run chooses its log
    interval unless --log-interval is given, and a text without a tokenizer is read with ByteTokenizer.

    Raises:
        ConfigurationError: with every problem of the command line.
    """
    argv, renamed = with_current_flags(_with_joined_pattern(argv))
    translated = translate_flags(argv)
    argv, renamed = translated.words, [*renamed, *translated.notes]
    off: tuple[FieldSpec, ...] = ()
    if any(word.lower().endswith(("=false", "=true")) for word in argv):
        from megatron.config.config_sources import split_switched_off

        argv, off = split_switched_off(argv)
    if script_defaults() or any(word.startswith(("--config", "--model-preset")) for word in argv):
        from megatron.config.config_sources import with_sources

        argv = with_sources(argv, off, renamed)
    given, extras, problems = _parse_words(argv)
    given |= {spec.name: spec.default for spec in off}
    problems += translated.problems
    problems += unknown_flags(extras, all_flags().keys() - deprecated_flags().keys(), argv)
    notes, refused = table_flags(given)
    notes = [*renamed, *notes]
    problems += refused
    stored = _checkpoint_values(given, notes, problems)
    values, broken = _field_values(given, stored, problems)
    resolution = resolve(cut_at_documents(given, _build_config(values, broken, world_size)))
    problems += resolution.problems
    if "patch_tokenizer_type" in broken:
        broken |= {"tokenizer_type"}  # no other tokenizer is required instead
    reads_bytes = is_train_command or not needs_files
    config = choose_tokenizer(resolution.config, "tokenizer_type" in given, reads_bytes, notes, problems)
    notes += unused_tokenizer_flags(config.tokenizer.tokenizer_type, given)
    if not needs_files and not is_train_command and config.optimizer.lr == 0:
        # Memory and time do not depend on the learning rate.
        broken |= {"lr"}
    problems += find_problems(config, broken, needs_files=needs_files)
    problems += flags_of_absent_layers(config, given)
    if problems:
        raise ConfigurationError(problems)
    notes += packing_notes(given, config)
    logging = dataclasses.replace(config.logging, unused_fusions=unused_fusions(given))
    config = dataclasses.replace(config, logging=logging)
    if is_train_command:
        config = _with_brief_log(config, _listed(config, given, values, broken))
    return ParsedArguments(config, (*notes, *resolution.notes))


def _listed(
    config: RunConfig, given: Collection[str], values: Mapping[str, Any], broken: frozenset[str]
) -> Collection[str]:
    """Return the given flags without those whose value follows from the others, as many in the record of a run."""
    left = dict(values)
    for spec, value in config.flags():
        if spec.name not in given or spec.name not in left or spec.is_required or value == spec.default:
            continue
        fewer = {name: one for name, one in left.items() if name != spec.name}
        derived = resolve(_build_config(fewer, broken, config.world_size)).config
        if value in [other for one, other in derived.flags() if one.name == spec.name]:
            left = fewer
    return [name for name in given if name in left]


def _with_brief_log(config: RunConfig, given: Collection[str]) -> RunConfig:
    logging = dataclasses.replace(
        config.logging,
        brief_log=not config.logging.log_megatron_lines,
        given_arguments=tuple(spec.name for spec, _ in config.flags() if spec.name in given),
        log_interval=config.logging.log_interval if "log_interval" in given else 0,
    )
    return dataclasses.replace(config, logging=logging)


def all_flags() -> dict[str, str]:
    """Return the class of every flag by name: effective, deprecated, no effect, or not supported yet."""
    flags = dict.fromkeys(deprecated_flags(), "deprecated")
    for _, spec in command_line_fields():
        flags.update(dict.fromkeys(spec.flags, "effective"))
    flags.update(dict.fromkeys(NO_EFFECT, "no effect"))
    flags.update(dict.fromkeys(NOT_SUPPORTED, "not supported yet"))
    return dict(sorted(flags.items()))


_HELP, _HELP_ALL = ("-h", "--help"), "--help-all"
HELP_FLAGS = (*_HELP, _HELP_ALL)

ESSENTIAL: Mapping[str, tuple[str, ...]] = {
    "Model": (
        *("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "ffn_hidden_size", "seq_length"),
        *("max_position_embeddings", "position_embedding_type", "normalization", "swiglu", "num_experts"),
        "model_preset",
    ),
    "Parallelism": (
        *("tensor_model_parallel_size", "sequence_parallel", "pipeline_model_parallel_size", "context_parallel_size"),
        *("expert_model_parallel_size", "use_distributed_optimizer", "data_parallel_sharding_strategy"),
    ),
    "Training": (
        *("micro_batch_size", "global_batch_size", "train_iters", "lr", "min_lr", "lr_decay_style", "lr_warmup_iters"),
        *("weight_decay", "clip_grad", "bf16", "fp8_format", "recompute_granularity", "seed", "config"),
    ),
    "Data": ("data_path", "split", "mock_data", "tokenizer_type", "tokenizer_model", "vocab_file", "merge_file"),
    "Checkpoints": ("save", "load", "save_interval"),
    "Evaluation and logs": ("log_interval", "eval_interval", "eval_iters", "tensorboard_dir", "explain"),
}
"""Fields of the flags that ``--help`` prints, in order."""


class _Parser(argparse.ArgumentParser):
    """Raise ConfigurationError for a malformed command line instead of exiting."""

    def error(self, message: str) -> NoReturn:
        raise ConfigurationError(message.removeprefix("argument "))

    def format_essential_help(self) -> str:
        """Return the help of the flags in `ESSENTIAL`."""
        actions = {action.dest: action for action in self._actions}
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, [], [])
        formatter.add_text(self.description)
        for title, names in ESSENTIAL.items():
            formatter.start_section(title)
            formatter.add_arguments([actions[name] for name in names])
            formatter.end_section()
        if extra := extra_fields():
            formatter.start_section("Arguments of the script")
            formatter.add_arguments([actions[spec.name] for spec in extra])
            formatter.end_section()
        count = len(list(command_line_fields()))
        formatter.add_text(f"{_HELP_ALL} shows all {count} flags.")
        return formatter.format_help()


class _EssentialHelp(argparse.Action):
    """Print the help of the most used flags, and exit."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        assert isinstance(parser, _Parser)
        print(parser.format_essential_help(), end="")
        parser.exit()


def build_parser(*, has_help: bool = True) -> argparse.ArgumentParser:
    """Return the parser, which is built once per process, unless scripts register further names.

    The parser only collects strings, so that all conversion problems can be reported together. Reading the help texts
    from the sources of the configuration classes takes most of the time.
    """
    registered = tuple(spec.choices for _, spec in command_line_fields() if spec.options.registry is not None)
    return _parser_of(tuple(config_parts().items()), has_help, registered)


@functools.cache
def _parser_of(
    parts: tuple[tuple[str, type], ...], has_help: bool, registered: tuple[tuple[str, ...] | None, ...]
) -> argparse.ArgumentParser:
    parser = _Parser(
        prog="pretrain_gpt.py",
        usage="[torchrun ...] %(prog)s FLAGS",
        description="Train a GPT model.",
        add_help=False,
        allow_abbrev=False,
        exit_on_error=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=32, width=110),
    )
    parser.add_argument(*_HELP, action=_EssentialHelp, nargs=0, help="show the most used flags and exit")
    parser.add_argument(_HELP_ALL, action="help", help="show all flags and exit")
    for part, config_class in parts:
        group = parser.add_argument_group(part)
        docs = field_docs(config_class) if has_help else None
        for spec in field_specs(config_class):
            if spec.options.cli:
                _add_field(group, spec, spec.help_text(docs[spec.name]) if docs else "")
    for name, note in NO_EFFECT.items():
        _add_table_flag(parser, name, note.arity)
    for name, refused in NOT_SUPPORTED.items():
        _add_table_flag(parser, name, refused.arity)
    return parser


def _add_field(group: argparse._ArgumentGroup, spec: FieldSpec, help_text: str) -> None:
    help_text = help_text.replace("%", "%%")
    if spec.is_bool:
        constant = spec.options.negative is None
        group.add_argument(*spec.flags, dest=spec.name, action="store_const", const=constant, help=help_text)
        return
    if spec.default not in (None, (), 0, 0.0, "") and not spec.is_sequence:
        help_text += f" Default: {spec.default}.".replace("%", "%%")
    group.add_argument(
        *spec.flags,
        dest=spec.name,
        action="append",
        nargs=spec.options.nargs,
        metavar=spec.metavar,
        help=help_text,
    )


def _add_table_flag(parser: argparse.ArgumentParser, name: str, arity: int | str) -> None:
    dest = TABLE_PREFIX + name
    if arity == 0:
        parser.add_argument(name, dest=dest, action="store_const", const=[], help=argparse.SUPPRESS)
    else:
        nargs = "+" if arity == "+" else 1
        parser.add_argument(name, dest=dest, action="store", nargs=nargs, help=argparse.SUPPRESS)


_PATTERN = "--hybrid-override-pattern"


def _with_joined_pattern(argv: Sequence[str]) -> list[str]:
    """Join --hybrid-override-pattern with a value that begins with a hyphen (MLP), which is no flag."""
    joined: list[str] = []
    for word in argv:
        if joined and joined[-1] == _PATTERN and word.startswith("-") and not set(word) - SYMBOLS.keys():
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


def _parse_words(argv: Sequence[str]) -> tuple[dict[str, Any], list[str], list[str]]:
    """Return the words of each flag, the words that belong to no flag, and a problem for each malformed flag.

    The parser stops at a flag whose value is missing or not accepted. The function then removes this flag, keeps no
    words for it, and parses the rest again.
    """
    parser = build_parser(has_help=any(word in HELP_FLAGS for word in argv))
    words = list(argv)
    malformed: dict[str, Any] = {}
    problems: list[str] = []
    while True:
        try:
            namespace, extras = parser.parse_known_args(words)
        except argparse.ArgumentError as error:
            names = (error.argument_name or "").split("/")
            problems.append(_malformed(names[0], error.message))
            shorter = list(without_flags(words, names))
            assert len(shorter) < len(words)
            words = shorter
            malformed |= {spec.name: [] for _, spec in command_line_fields() if names[0] in spec.flags}
        else:
            return malformed | vars(namespace), extras, problems


def _malformed(name: str, message: str) -> str:
    """Return the error message for a flag without its value, or for a switch with a value."""
    found = (spec for _, spec in command_line_fields() if name in spec.flags)
    spec = next(found, None)
    if spec is None and "explicit argument" not in message:
        return f"{name}: {message}"
    if spec is None or spec.is_bool:
        return switch_with_value(name)
    return f"{name}: a value is missing; pass {name} {spec.metavar}"


def without_flags(words: Sequence[str], names: Collection[str]) -> Iterator[str]:
    """Yield the words except the given flags and their values."""
    is_dropped = False
    for word in words:
        if word.startswith("--"):
            is_dropped = word.split("=", 1)[0] in names
        if not is_dropped:
            yield word


def _checkpoint_values(given: Mapping[str, Any], notes: list[str], problems: list[str]) -> Mapping[str, Any]:
    """Return the fields that ``--use-checkpoint-args`` takes from the ``--load`` checkpoint: those that no flag sets.

    Raises:
        ConfigurationError: the checkpoint cannot be read, or does not exist and no flags set the model shape. Earlier
            problems come first.
    """
    # Malformed values are reported when all fields are converted.
    values, _ = _field_values(given, {}, [])
    names = {spec.name for spec in field_specs(CheckpointConfig)}
    checkpoint = CheckpointConfig(**{name: value for name, value in values.items() if name in names})
    # Its notes and problems are reported after resolution.
    checkpoint = resolve_checkpoint(checkpoint, [], [])
    if not checkpoint.use_checkpoint_args or checkpoint.load is None:
        return {}
    try:
        stored = read_checkpoint_arguments(checkpoint.load, checkpoint.ckpt_step)
    except InputError as error:
        # Do not require fields that the checkpoint would have set.
        raise ConfigurationError([*problems, str(error)]) from error
    # One flag for the precision, or for the tokenizer, replaces all of the checkpoint's.
    closed = {name for group in (PRECISION, TOKENIZER) if not given.keys().isdisjoint(group) for name in group}
    taken = {name: value for name, value in stored.values.items() if name not in given and name not in closed}
    if stored.folder is None:
        if not given.keys() >= {"num_layers", "hidden_size", "num_attention_heads"}:
            raise ConfigurationError([*problems, no_checkpoint(checkpoint.load)])
        notes.append(
            f"--use-checkpoint-args: {checkpoint.load} contains no checkpoint; the flags alone define the model"
        )
    else:
        defaults = {spec.name: spec.default for _, spec in command_line_fields()}
        shape = ", ".join(f"{name} {value}" for name, value in taken.items() if value != defaults[name])
        notes.append(f"--use-checkpoint-args: from {stored.folder}: {shape}")
        missing = [name for name in stored.missing if name not in given and name not in closed]
        if missing:
            notes.append(f"Checkpoint did not provide arguments {', '.join(missing)}")
    return taken


def _field_values(
    given: Mapping[str, Any], stored: Mapping[str, Any], problems: list[str]
) -> tuple[dict[str, Any], frozenset[str]]:
    """Convert the words of each field, or take its stored value.

    Returns the values, and the fields without a usable value.
    """
    values: dict[str, Any] = {}
    broken = set()
    reads_shape = given.get("use_checkpoint_args") or "load" not in given
    source = "" if reads_shape else "; --use-checkpoint-args takes it from the checkpoint of --load"
    for _, spec in command_line_fields():
        if spec.name not in given:
            if spec.name in stored:
                values[spec.name] = stored[spec.name]
            elif spec.is_required:
                problems.append(f"{spec.flags[0]} is missing; it has no default{source}")
                broken.add(spec.name)
            continue
        words = given[spec.name]
        if words == []:  # malformed and already reported
            broken.add(spec.name)
            continue
        if spec.is_bool:
            values[spec.name] = words
            continue
        before = len(problems)
        last = words if spec.options.append else words[-1]
        texts = last if isinstance(last, list) else [last]
        converted = tuple(_convert(spec, text, problems) for text in texts)
        if len(problems) > before:
            broken.add(spec.name)
        else:
            values[spec.name] = converted if spec.is_sequence else converted[0]
    return values, frozenset(broken)


def _convert(spec: FieldSpec, text: str, problems: list[str]) -> Any:
    """Convert one word to the field's type, or add a problem."""
    name, choices = spec.flags[0], spec.choices
    if choices is not None and text not in choices:
        foreign = foreign_flags().get(f"{name} {text}")
        if foreign is not None:
            problems.append(foreign_answer(name, [text], foreign))
        elif text in spec.options.not_built:
            problems.append(f"{name} {text} is not supported yet; possible: {', '.join(choices)}")
        elif spec.options.registry is not None:
            known = ", ".join(choices) or "none"
            problems.append(
                f"{name} {text}: possible values are {known}; a script that registers {text} adds it (--script FILE)"
            )
        else:
            problems.append(f"{name} {text}: possible values are {', '.join(choices)}")
        return None
    try:
        value = spec.converted(text)
    except ValueError:
        number = _written_out(text)
        if spec.item_type is float:
            hint = ", such as 0.0001 or 1e-4" if number is None else f"; write {number}"
        else:
            hint = "" if number is None or "." in number else f"; write {number}"
        problems.append(f"{name} {text}: {_TYPE_WORDS[spec.item_type]} is expected{hint}")
        return None
    excess = spec.excess(value) if spec.item_type is int else _too_long(spec, text)
    if excess is not None:
        problems.append(f"{name} {excess}")
    if spec.item_type is float and not math.isfinite(value):
        problems.append(f"{name} {text}: a finite number is expected")
    return value


def _too_long(spec: FieldSpec, text: str) -> str | None:
    """Return why a field's path is invalid on any file system, or None."""
    if spec.options.metavar not in _PATHS:
        return None
    lengths = [len(os.fsencode(name)) for name in text.split("/")]
    if max(lengths) > _MOST_NAME_BYTES:
        return f"{_shortened(text)}: a file name of {max(lengths)} bytes; file systems allow at most {_MOST_NAME_BYTES}"
    if sum(lengths) + len(lengths) > _MOST_PATH_BYTES:
        return f"{_shortened(text)}: a path of {sum(lengths)} bytes; use a path of at most {_MOST_PATH_BYTES} bytes"
    return None


def _shortened(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:40]}…"


def _written_out(text: str) -> str | None:
    """Return the meaning of a number with a unit or commas, such as 500k, 1e5 and 1,000."""
    match = re.fullmatch(r"([-+]?[\d.]+(?:e[-+]?\d+)?)([kmbt]?)", text.replace(",", "").lower())
    try:
        value = float(match[1]) * _UNITS[match[2]] if match else math.nan
    except ValueError:
        return None
    if not math.isfinite(value):
        return None
    return str(int(value)) if value.is_integer() else repr(value)


def _build_config(values: Mapping[str, Any], broken: frozenset[str], world_size: int) -> RunConfig:
    """Build all parts. A required field without a usable value becomes 1, and checks skip it."""
    parts: dict[str, Any] = {}
    for part, config_class in config_parts().items():
        arguments = {}
        for spec in field_specs(config_class):
            if spec.name in values and spec.options.cli:
                arguments[spec.name] = values[spec.name]
            elif spec.is_required and spec.name in broken:
                arguments[spec.name] = 1
        parts[part] = from_fields(config_class, **arguments)
    return RunConfig(world_size=world_size, **parts)
