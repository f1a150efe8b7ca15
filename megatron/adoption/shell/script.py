"""Follow a shell script without running it, and collect the programs that it would start.

Of commands, only those have a meaning here that change variables or that do nothing but make text.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Sequence
from pathlib import Path

from megatron.adoption.placeholders import without_placeholders
from megatron.adoption.shell.arithmetic import UnknownNumber
from megatron.adoption.shell.flow import Ended, ShellFlow
from megatron.adoption.shell.output import output_of
from megatron.adoption.shell.state import ShellState, has_unknown, readable
from megatron.core.errors import ConfigurationError

# These are taken to work, so that `mkdir -p out && torchrun …` is followed.
_WORKS = frozenset(
    (":", "chmod", "conda", "cp", "echo", "ln", "mkdir", "module", "mv", "pip", "pip3", "printf", "rm", "set", "shopt")
).union(("sleep", "touch", "trap", "ulimit", "wait"))
_SHELLS = frozenset(("bash", "sh", "zsh", "dash"))


@dataclasses.dataclass(frozen=True)
class StartedProgram:
    """Hold the words of a command that a script would run, and the line where it stands."""

    words: tuple[str, ...]
    line: int


class ShellScript(ShellFlow):
    """Follow one script; ``programs`` and ``notes`` hold what was found."""

    def __init__(self, path: Path, parameters: Sequence[str], variables: dict[str, str]) -> None:
        super().__init__(ShellState(script=str(path), parameters=list(parameters), variables=dict(variables)))
        self.state.variables["BASH_SOURCE"] = str(path)
        self.programs: list[StartedProgram] = []

    def follow(self, text: str) -> None:
        """Follow a whole script to its end.

        Raises:
            ConfigurationError: it has none.
        """
        try:
            self._run_text(without_placeholders(text, self.state.unknown))
        except Ended:
            return
        except RecursionError:
            raise ConfigurationError(f"{self.state.script} does not end: it calls itself over and over") from None

    def _words(self, words: list[str], line: int) -> bool | None:
        """Do what a command does to the state, or note the program that it starts."""
        if not words:
            return True
        name, rest = words[0], words[1:]
        if name in self.state.functions:
            return self._call(name, rest)
        if name in ("exit", "return", "break", "continue"):
            raise Ended(name)
        if name in ("test", "["):
            return self._conditions().of_words(rest[:-1] if name == "[" else rest)
        if self._output is not None:
            is_here = self._input is not None and words == ["cat"]
            self._output.append((self._input or "") if is_here else output_of(words, self.state))
            return True
        if name == "shift":
            del self.state.parameters[: int(rest[0]) if rest and rest[0].isdigit() else 1]
        elif name == "set" and "--" in rest:
            self.state.parameters = rest[rest.index("--") + 1 :]
        elif name == "eval":
            return self._reread(" ".join(rest), line)
        elif name in (".", "source") and rest:
            return self._source_file(rest[0], rest[1:], line)
        elif name == "cd":
            self.state.folder = os.path.join(self.state.folder or os.getcwd(), rest[0]) if rest else None
        elif name == "let":
            return self._let(rest)
        elif name == "read" and self._input is not None and "-d" in rest and not rest[-1].startswith("-"):
            self.state.variables[rest[-1]] = self._input.strip()
        elif name in ("read", "mapfile", "readarray", "getopts"):
            for target in rest:
                if re.fullmatch(r"[A-Za-z_]\w*", target):
                    self.state.variables[target] = self.state.unknown(target, f"is read in a run (line {line})")
            return None
        elif name in ("true", "false"):
            return name == "true"
        elif name not in _WORKS:
            return self._start(words, line)
        return True

    def _start(self, words: list[str], line: int) -> bool | None:
        """Look into a shell that a command starts, or note the command."""
        if words[0] == "sbatch":
            text = next((word.removeprefix("--wrap=") for word in words if word.startswith("--wrap=")), None)
            text = words[words.index("--wrap") + 1] if "--wrap" in words[:-1] else text
            if text is not None or self._input is not None:
                return self._inside(text or self._input or "", [], line)
        for place, word in enumerate(words):
            if os.path.basename(word) not in _SHELLS:
                continue
            rest = words[place + 1 :]
            flags = [item for item in rest if item.startswith("-")]
            if any(re.fullmatch(r"-\w*c", flag) for flag in flags):
                text = next((item for item in rest if not item.startswith("-")), "")
                return self._inside(text, words[:place], line)
            script = next((item for item in rest if not item.startswith("-")), None)
            if self._input is not None and (script is None or "-s" in flags):
                return self._inside(self._input, words[:place], line)
            if script is not None and Path(script).is_file():
                before = self.state
                self.state = before.copy()
                try:
                    return self._source_file(script, rest[rest.index(script) + 1 :], line)
                finally:
                    self.state = before
        self.programs.append(StartedProgram(tuple(words), line))
        return None

    def _inside(self, text: str, wrapper: list[str], line: int) -> bool | None:
        """Follow the text of ``srun … bash -c TEXT``; what it starts is started by the wrapper."""
        before, self._input = len(self.programs), None
        status = self._reread(text, line)
        if wrapper and os.path.basename(wrapper[0]) == "srun":
            self.programs[before:] = [
                dataclasses.replace(program, words=(*wrapper, *program.words)) for program in self.programs[before:]
            ]
        return status

    def _reread(self, text: str, line: int) -> bool | None:
        before, self._line_offset = self._line_offset, line - 1
        try:
            return self._run_text(without_placeholders(text, self.state.unknown))
        finally:
            self._line_offset = before

    def _call(self, name: str, parameters: list[str]) -> bool | None:
        before = self.state.parameters
        self.state.parameters = parameters
        self._statements += 1
        try:
            return self._statement(self.state.functions[name])
        except Ended as end:
            if end.what != "return":
                raise
            return None
        finally:
            self.state.parameters = before

    def _source_file(self, name: str, parameters: list[str], line: int) -> bool | None:
        folder = self.state.folder or os.getcwd()
        places = [Path(folder, name), Path(self.state.script).parent / name]
        path = next((place for place in places if not has_unknown(name) and place.is_file()), None)
        if path is None:
            self.notes.append(f"line {line} reads {readable(name)}, which is not here: what it sets is not known")
            return None
        before = self.state.parameters
        script, offset = self.state.variables["BASH_SOURCE"], self._line_offset
        self.state.parameters = parameters or before
        self.state.variables["BASH_SOURCE"] = str(path)
        self._line_offset = 0
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
            return self._run_text(without_placeholders(text, self.state.unknown))
        finally:
            self.state.variables["BASH_SOURCE"], self._line_offset = script, offset
            self.state.parameters = before

    def _let(self, expressions: list[str]) -> bool | None:
        try:
            return [self._expander().number(expression) for expression in expressions][-1:] != [0]
        except UnknownNumber:
            return None
