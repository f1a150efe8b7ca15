"""From a file of another trainer to commands of this project."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron.adoption.adopted_command import AdoptedCommand, Check, adopt_launch
from megatron.adoption.launch import is_training, launch_of
from megatron.adoption.shell.state import readable
from megatron.adoption.shell.syntax import require_parser
from megatron.adoption.trainers.settings_file import read_settings
from megatron.core.errors import ConfigurationError

_SETTINGS = (".toml", ".yaml", ".yml", ".json")


@dataclasses.dataclass(frozen=True)
class Adoption:
    """Hold the commands made from one file, and remarks about the file."""

    commands: tuple[AdoptedCommand, ...]
    notes: tuple[str, ...]


def adopt_file(
    path: Path, parameters: Sequence[str], variables: Mapping[str, str], checks: Mapping[str, Check]
) -> Adoption:
    """Make commands from a launch script or a settings file, by its suffix.

    ``parameters`` are a script's positional parameters, ``variables`` values for its variables. ``checks`` parse
    the commands, by script.

    Raises:
        ConfigurationError: the file cannot be read or launches nothing that is known.
    """
    text = _text_of(path)
    if path.suffix in _SETTINGS:
        if parameters:
            raise ConfigurationError(f"{path} has no positional parameters: leave out -- {' '.join(parameters)}")
        settings = read_settings(path, text, variables)
        command = adopt_launch(settings.launch, f"{path} ({settings.trainer})", settings.placeholders, checks)
        command = dataclasses.replace(command, findings=(*settings.findings, *command.findings))
        return Adoption((command,), ())
    return _adopt_script(path, text, parameters, variables, checks)


def _text_of(path: Path) -> str:
    try:
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigurationError(f"{path} is not text: give a launch script or a settings file") from None
    if "\0" in text:
        raise ConfigurationError(f"{path} is not text: give a launch script or a settings file")
    return text.replace("\r\n", "\n")


def _adopt_script(
    path: Path, text: str, parameters: Sequence[str], variables: Mapping[str, str], checks: Mapping[str, Check]
) -> Adoption:
    require_parser()
    # Needs the parser.
    from megatron.adoption.shell.script import ShellScript

    script = ShellScript(path, parameters, dict(variables))
    script.follow(text)
    commands: dict[str, AdoptedCommand] = {}
    notes, others = list(script.notes), []
    notes += [
        f"--set {name}={value} has no effect: what is followed of the script never reads {name}"
        for name, value in variables.items()
        if name not in script.state.asked_for
    ]
    for program in script.programs:
        launch = launch_of(program.words)
        if launch is None:
            others.append(readable(program.words[0]))
            trainer = next((word for word in program.words[1:] if is_training(word)), None)
            if trainer is not None:
                starter = readable(program.words[0])
                notes.append(
                    f"line {program.line} starts {readable(trainer)} with {starter}, whose flags are not read: write "
                    "torchrun --nproc_per_node N in its place"
                )
        elif launch.target is None:
            others.append(readable(launch.script))
            notes.append(f"line {program.line} launches {readable(launch.script)}: nothing here does that")
        else:
            origin = f"{path}, line {program.line}"
            command = adopt_launch(launch, origin, script.state.unknowns, checks)
            commands.setdefault(command.text, command)
    if not commands:
        found = f"it starts {', '.join(dict.fromkeys(others))}" if others else "it starts nothing"
        hint = "" if parameters else "; if it needs positional parameters, give them after --"
        raise ConfigurationError(
            f"{path} launches no script that is known (pretrain_*.py, preprocess_data.py, …): {found}{hint}"
        )
    return Adoption(tuple(commands.values()), tuple(notes))
