"""The output of commands that only make text: what a command substitution can be replaced by without a run."""

from __future__ import annotations

import os

from megatron.adoption.shell.state import ShellState, has_unknown


class NotText(Exception):
    """Report a command substitution whose output only a run can tell."""


def output_of(words: list[str], state: ShellState) -> str:
    """Return the output of a command; ``cd`` moves the state's folder.

    Raises:
        NotText: only a run can tell it.
    """
    name, rest = words[0], words[1:]
    if name == "echo":
        return " ".join(rest[1:] if rest[:1] == ["-n"] else rest) + "\n"
    if name in (":", "true"):
        return ""
    if name == "pwd" and state.folder is not None and not has_unknown(state.folder):
        return state.folder + "\n"
    if not rest or has_unknown(rest[0]):
        raise NotText
    path = rest[0].rstrip("/") or "/"
    if name == "cd":
        state.folder = os.path.normpath(os.path.join(state.folder or os.getcwd(), rest[0]))
        return ""
    if name == "dirname":
        return (os.path.dirname(path) or ".") + "\n"
    if name == "basename":
        base, suffix = os.path.basename(path), "".join(rest[1:2])
        return (base.removesuffix(suffix) if base != suffix else base) + "\n"
    raise NotText
