"""Shell completion: a script for bash or zsh that knows the commands and their flags."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from megatron.cli.arguments import SpellingParser
from megatron.config import all_flags

_SHELLS = ("bash", "zsh")
_FOLDER = Path(__file__).resolve().parent
_TRAINING = "train"

# bashcompinit lets zsh use bash's completions.
_SCRIPT = """{prelude}_megatron() {{
    local words
    case "${{COMP_WORDS[1]}}" in
{cases}
    esac
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W "{commands}" -- "${{COMP_WORDS[COMP_CWORD]}}"))
    elif [[ "${{COMP_WORDS[COMP_CWORD]}}" == -* ]]; then
        COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
    else
        COMPREPLY=($(compgen -f -- "${{COMP_WORDS[COMP_CWORD]}}"))
    fi
}}
complete -o filenames -F _megatron megatron"""


def print_completion(words: Sequence[str], commands: Mapping[str, str]) -> int:
    """Print the script for the given shell and return the exit status: 2 for an unknown shell."""
    if len(words) != 1 or words[0] not in _SHELLS:
        print(f"usage: megatron --print-completion {'|'.join(_SHELLS)}", file=sys.stderr)
        return 2
    cases = [f'        {name}) words="{" ".join(_flags(place))}" ;;' for name, place in commands.items()]
    prelude = "" if words[0] == "bash" else "autoload -Uz compinit bashcompinit && compinit && bashcompinit\n"
    print(_SCRIPT.format(prelude=prelude, cases="\n".join(cases), commands=" ".join(commands)))
    return 0


def _flags(place: str) -> list[str]:
    """Return the flags of a command: those in its file, and those that shared functions add.

    The command's file is parsed, not imported. ``train`` has all flags of a run.
    """
    tree = ast.parse((_FOLDER / (place.replace(".", "/") + ".py")).read_text(encoding="utf-8"))
    texts = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str))
    found = {"--help", *(text for text in texts if re.fullmatch(r"--[a-z][a-z0-9-]+", text))} - set(_deprecated(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{__package__}."):
            for name in (alias.name for alias in node.names if alias.name.startswith("add_")):
                found |= _shared_flags(str(node.module), name)
    if place == _TRAINING:
        found |= {name for name, effect in all_flags().items() if effect == "effective"}
    return sorted(found)


def _deprecated(tree: ast.Module) -> Iterator[str]:
    """Yield the deprecated flags that a command's file declares."""
    for node in ast.walk(tree):
        function = node.func if isinstance(node, ast.Call) else None
        if isinstance(function, ast.Attribute) and function.attr == SpellingParser.add_deprecated_flag.__name__:
            assert isinstance(node, ast.Call)
            yield ast.literal_eval(node.args[0])


@functools.cache
def _shared_flags(module: str, name: str) -> frozenset[str]:
    """Return the flags that a shared ``add_…`` function adds to a parser."""
    add: Callable[..., object] = getattr(importlib.import_module(module), name)
    parser = SpellingParser(add_help=False)
    _, *others = inspect.signature(add).parameters.values()
    add(parser, **{each.name: None for each in others if each.default is each.empty})
    return frozenset(flag for action in parser._actions for flag in action.option_strings if flag.startswith("--"))
