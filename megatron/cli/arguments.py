"""Arguments that commands share: parsers that correct misspelled flags, exit status, folders, tokenizer."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from megatron.checkpoint.formats import told_specs
from megatron.config import rename_words
from megatron.core.broken_pipe import STATUS, has_lost_reader
from megatron.core.config_base import FieldSpec, field_docs
from megatron.core.errors import ConfigurationError, InputError, MegatronError, StorageError
from megatron.core.models.gpt import GPTConfig
from megatron.core.object_store import as_path, is_url
from megatron.core.tokenizers import DEFAULT_NUM_SPECIAL_TOKENS, TOKENIZER_TYPES, Tokenizer, unused_tokenizer_flags
from megatron.core.tokenizers.build_tokenizer import build_tokenizer

_CLOSE = 0.8
"""Lowest similarity at which a flag is suggested; ``--laod`` and ``--load`` have 0.83."""


def dispatcher() -> str | None:
    """Return the name under which the ``megatron`` program was called; None if another program runs."""
    called = Path(sys.argv[0])
    if called.name == "__main__.py" and called.parts[-2] in ("megatron", "cli", "commands"):
        return "python -m megatron"
    return "megatron" if called.name == "megatron" else None


class SpellingParser(argparse.ArgumentParser):
    """Argument parser that suggests the nearest flag for a misspelled one."""

    typed: Sequence[str] = ()
    """The words of the command line; empty if some of them are for another parser."""
    hint_for_extra_words = "see --help"
    """Advice for a word that belongs to no flag."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._current_flags: dict[str, str] = {}
        self._current_values: dict[str, dict[str, str]] = {}

    def add_deprecated_flag(self, earlier: str, current: str) -> None:
        """Accept the earlier name of a flag, with a warning; the help does not show it."""
        self._current_flags[earlier] = current

    def add_deprecated_value(self, flag: str, earlier: str, current: str) -> None:
        """Accept the earlier name of a flag's value, with a warning; the help does not show it."""
        self._current_values.setdefault(flag, {})[earlier] = current

    def format_help(self) -> str:
        """Return the help; its usage line names the command as it was called."""
        if (program := dispatcher()) is not None and len(sys.argv) > 1:
            self.prog = f"{program} {sys.argv[1]}"
        return super().format_help()

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        """Parse a command line that is entirely for this parser, as argparse does."""
        self.typed = sys.argv[1:] if args is None else args
        return super().parse_args(args, namespace)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse known arguments as argparse does, with a warning for each deprecated name."""
        typed = sys.argv[1:] if args is None else args
        words, warnings = rename_words(typed, self._current_flags, self._current_values)
        self.typed = words if self.typed else ()
        for line in warnings:
            self.warn(line)
        return super().parse_known_args(words, namespace)

    def warn(self, line: str) -> None:
        """Print a warning to standard error."""
        print(line, file=sys.stderr)

    def explained(self, message: str) -> str:
        """Return argparse's message with the flag that was probably meant, or with a pointer to --help.

        argparse checks required flags before it reports unknown flags: for ``--laod DIR`` it reports only that
        ``--load`` is missing.
        """
        is_extra_word = re.match("unrecognized arguments: [^-]", message)
        hint = self.hint_for_extra_words if is_extra_word else "see --help"
        return f"{message}; {self._likely_typing_error(message) or hint}"

    def _likely_typing_error(self, message: str) -> str | None:
        known = [flag for flag in self._option_string_actions if flag.startswith("--")]
        others = []
        for word in self.typed:
            name = word.partition("=")[0]
            if not name.startswith("--") or name == "--" or name in known:
                continue
            longer = [flag for flag in known if flag.startswith(name)]
            longer.sort(key=lambda flag: flag not in message)
            if longer and self.allow_abbrev:
                continue
            nearest = longer or difflib.get_close_matches(name, known, n=1, cutoff=_CLOSE)
            if nearest:
                return f"there is no {name}; did you mean {nearest[0]}?"
            others.append(name)
        # The value of an unknown flag is taken for a positional argument, and its error would hide the flag.
        return next((f"there is no {name}; see --help" for name in others if name not in message), None)


class Parser(SpellingParser):
    """Argument parser that reports wrong usage in one line."""

    def error(self, message: str) -> NoReturn:
        """Print the message and exit with status 2."""
        self.exit(2, f"error: {self.explained(message)}\n")


class _ImportScript(argparse.Action):
    """Import a script when the command line is parsed, before anything that needs what it registers."""

    def __init__(self, *args: Any, before: Callable[[], object], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._before = before

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        """Import the script; the namespace does not change."""
        from megatron.training import import_script, launch_environment_or_exit, refuse

        try:
            self._before()
            import_script(values)
        except ConfigurationError as error:
            parser.exit(refuse(error.problems, launch_environment_or_exit().rank))


def declare_script(container: argparse._ActionsContainer, before: Callable[[], object] = lambda: None) -> None:
    """Declare ``--script``, which imports a training script for the parts that it registers, after ``before()``."""
    container.add_argument(
        "--script",
        action=_ImportScript,
        before=before,
        dest=argparse.SUPPRESS,
        default=argparse.SUPPRESS,
        metavar="FILE",
        help="your training script, imported for the parts of the model that it registers",
    )


def stored_folder(text: str) -> Path:
    """Convert an argument to the path of a folder, in a file system or, if it is a URL, in an object store."""
    try:
        return as_path(text)
    except StorageError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


class _StoreGiven(argparse.Action):
    """Store a value, but keep the value of another argument if none is given, unlike argparse's ``store``."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        """Store the value."""
        if values is not None:
            setattr(namespace, self.dest, values)


def declare_checkpoint_folder(
    container: argparse._ActionsContainer,
    *flags: str,
    help: str,
    type: Callable[[str], Any] = str,
    is_required: bool = True,
) -> argparse._MutuallyExclusiveGroup:
    """Declare a checkpoint folder, which is a positional argument or the value of one of the flags.

    Return the group of these arguments, of which only one may be given. The first flag names the attribute.
    """
    group = container.add_mutually_exclusive_group(required=is_required)
    name = flags[0].removeprefix("--").replace("-", "_")
    group.add_argument(name, nargs="?", type=type, action=_StoreGiven, metavar="DIR", help=help)
    group.add_argument(*flags, type=type, dest=name, metavar="DIR", help="the same as DIR")
    return group


def local_folder(text: str) -> Path:
    """Convert an argument to the path of a folder in a file system; reject a URL."""
    if is_url(text):
        raise argparse.ArgumentTypeError("no URL can be used here; pass a folder of a file system")
    return Path(text)


def exit_status_of(work: Callable[[], None]) -> int:
    """Do a command's work and return its exit status: 2 for invalid input, 1 if the work failed.

    The error is printed in one line. If the reader of standard output has closed it, as ``head`` does, nothing is
    printed, and the status is that of a program that SIGPIPE killed.
    """
    try:
        work()
        sys.stdout.flush()
    except (MegatronError, OSError) as error:
        if isinstance(error, BrokenPipeError) and has_lost_reader():
            return STATUS
        lines = (line.strip() for line in str(error).splitlines())
        print(f"error: {'; '.join(lines).replace(':;', ':')}", file=sys.stderr)
        return 2 if isinstance(error, InputError) else 1
    return 0


def report_unused(
    parser: argparse.ArgumentParser, arguments: argparse.Namespace, needed: str, names: Iterable[str]
) -> None:
    """Print a line to standard error for each flag in ``names`` that is set but has no effect without ``needed``."""
    for name in names:
        if getattr(arguments, name) != parser.get_default(name):
            print(f"--{name.replace('_', '-')} has no effect without {needed}", file=sys.stderr)


def add_told_settings(parser: argparse.ArgumentParser) -> None:
    """Declare the flags for the model settings that a torchtitan folder does not contain."""
    docs = field_docs(GPTConfig)
    group = parser.add_argument_group("model settings that a torchtitan folder does not contain")
    for spec in told_specs():
        if spec.is_bool:
            group.add_argument(spec.flags[0], action="store_const", const=True, help=docs.get(spec.name))
        else:
            group.add_argument(spec.flags[0], type=_argument_type(spec), metavar=spec.metavar, help=docs.get(spec.name))


def _argument_type(spec: FieldSpec) -> Callable[[str], Any]:
    def convert(text: str) -> Any:
        return spec.converted(text)

    convert.__name__ = spec.item_type.__name__  # argparse names the type in its message.
    return convert


def told_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """Remove the flags of `add_told_settings` from the arguments and return the values that were given."""
    values = {spec.name: vars(arguments).pop(spec.name) for spec in told_specs()}
    return {name: value for name, value in values.items() if value is not None}


TOKENIZER_KEYWORDS = (
    "tokenizer_type",
    "vocab_file",
    "merge_file",
    "tokenizer_model",
    "vocab_size",
    "vocab_extra_ids",
    "tiktoken_pattern",
    "tiktoken_num_special_tokens",
    "tiktoken_special_tokens",
)


def add_tokenizer_source(
    parser: argparse.ArgumentParser, default_type: str | None, title: str
) -> argparse._ArgumentGroup:
    """Declare the flags for a tokenizer and its files, and return their group."""
    group = parser.add_argument_group(title)
    group.add_argument(
        "--tokenizer-type", default=default_type, metavar="TYPE", help=f"one of {', '.join(TOKENIZER_TYPES)}"
    )
    # Older versions of Megatron-LM have --vocab in their README. As an abbreviation it would be ambiguous.
    group.add_argument("--vocab-file", "--vocab", metavar="FILE", help="vocabulary (GPT2BPETokenizer)")
    group.add_argument("--merge-file", metavar="FILE", help="byte-pair merges (GPT2BPETokenizer)")
    group.add_argument("--tokenizer-model", metavar="PATH", help="model file, or folder with tokenizer.json")
    group.add_argument("--vocab-size", type=int, metavar="N", help="vocabulary size (NullTokenizer, TikTokenizer)")
    return group


def add_tokenizer_arguments(parser: argparse.ArgumentParser, default_type: str | None) -> argparse._ArgumentGroup:
    """Declare all flags of a tokenizer and return their group."""
    group = add_tokenizer_source(parser, default_type, "tokenizer")
    group.add_argument(
        "--vocab-extra-ids", type=int, default=0, metavar="N", help="number of <extra_id_N> (SentencePieceTokenizer)"
    )
    group.add_argument("--tiktoken-pattern", choices=["v1", "v2"], help="pre-tokenization pattern (TikTokenizer)")
    group.add_argument("--tiktoken-num-special-tokens", type=int, default=1000, metavar="N")
    group.add_argument("--tiktoken-special-tokens", nargs="+", default=[], metavar="TOKEN")
    return group


def tokenizer_keywords(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the keyword arguments for `build_tokenizer`."""
    return {name: getattr(arguments, name) for name in TOKENIZER_KEYWORDS}


def tokenizer_of(arguments: argparse.Namespace) -> Tokenizer:
    """Build the tokenizer that the flags name.

    Raises:
        TokenizerError: the tokenizer cannot be built.
    """
    keywords = tokenizer_keywords(arguments)
    given = [name for name, value in keywords.items() if value not in (None, [], DEFAULT_NUM_SPECIAL_TOKENS)]
    for line in unused_tokenizer_flags(arguments.tokenizer_type, given):
        print(line, file=sys.stderr)
    return build_tokenizer(**keywords)
