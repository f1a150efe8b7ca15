"""Start the ranks of a training run on this node, and report the root cause if the run fails.

megatron train --nproc 4 --config run.toml --save DIR
megatron train --resume DIR

All flags of pretrain_gpt.py are accepted (megatron train --help). Ctrl-C finishes the step, saves a checkpoint and ends
the run with status 130. A second Ctrl-C ends the run at once.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from megatron.checkpoint import TRACKER_FILE
from megatron.cli.rank_launcher import INTERRUPTED, Place, launch
from megatron.config import HELP_FLAGS, parse_arguments, read_config_file, resolve_arguments
from megatron.core.broken_pipe import reader_may_leave
from megatron.core.console import print_line
from megatron.core.errors import ConfigurationError, InputError, StorageError
from megatron.core.object_store import as_path
from megatron.core.safe_io import parse_json, read_plain_text
from megatron.training import reasons_of, refuse, training_script
from megatron.training.loggers import CONFIG_FILE, CONTINUE_FILE, ENVIRONMENT_FILE, RECORD_FOLDER, SESSION_LIMITS


@dataclass(frozen=True)
class ContinuedRun:
    """Flags, working directory and number of processes of a recorded run that is resumed.

    ``limits`` has the flags that ended its last session early, with their values; they are not in ``words``.
    ``scripts`` are the user's own scripts that the run used.
    """

    words: tuple[str, ...]
    folder: Path
    nproc: int
    nnodes: int
    limits: Mapping[str, Any] = field(default_factory=dict)
    scripts: tuple[str, ...] = ()

    @classmethod
    def read(cls, directory: str) -> ContinuedRun:
        """Read the record in a checkpoint folder.

        A run without a checkpoint starts from the beginning.

        Raises:
            ConfigurationError: the record is missing or cannot be read.
        """
        try:
            folder = as_path(directory).resolve()
        except StorageError as error:
            raise ConfigurationError(f"--resume: {error}") from error
        record = folder / RECORD_FOLDER
        try:
            environment = parse_json(read_plain_text(record / ENVIRONMENT_FILE))
            nproc, nnodes = (_count(environment, key) for key in ("processes_per_machine", "machines"))
            scripts = tuple(str(path) for path in environment.get("scripts", ()))
            started_in = Path(str(environment["folder"]))
            is_saved = (folder / TRACKER_FILE).is_file()
        except (OSError, ValueError, KeyError, TypeError, StorageError) as error:
            raise ConfigurationError(
                f"--resume {directory}: {record / ENVIRONMENT_FILE} cannot be read ({_reason(error)}); pass the "
                "--save folder of a run of this version, or pass the run's flags with --load"
            ) from error
        config = record / (CONTINUE_FILE if is_saved else CONFIG_FILE)
        words = ["--config", str(config), "--save", str(folder), *(["--load", str(folder)] if is_saved else [])]
        recorded = read_config_file(str(record / CONFIG_FILE)) if is_saved else {}
        limits = {name: recorded[name] for name in SESSION_LIMITS if recorded.get(name) is not None}
        return cls(tuple(words), started_in, nproc, nnodes, limits, scripts)


def _count(environment: Mapping[str, Any], key: str) -> int:
    value = environment[key]
    if type(value) is not int or value < 1:
        raise ValueError(f"{key} is {json.dumps(value)}")
    return value


def _reason(error: Exception) -> str:
    return f"it lacks {error}" if isinstance(error, KeyError) else str(getattr(error, "strerror", None) or error)


_ASKING = (*HELP_FLAGS, "--print-config")
_MOST_RANKS = 4096
_DEFAULT_PORT = 29500


def main(argv: list[str] | None = None) -> int:
    """Run the command with ``argv`` (default: the command line) and return its exit status: 2 for invalid flags."""
    try:
        return _train(sys.argv[1:] if argv is None else argv)
    except InputError as error:
        return refuse(reasons_of(error), rank=0)


def build_parser() -> argparse.ArgumentParser:
    """Declare the launcher's flags; all other flags are passed to the run."""
    parser = argparse.ArgumentParser(
        prog="megatron train",
        usage="%(prog)s [--nproc N] [--nnodes N --node-rank R --master-addr HOST] FLAGS",
        add_help=False,
        allow_abbrev=False,
        exit_on_error=False,
        argument_default=argparse.SUPPRESS,
    )
    group = parser.add_argument_group("ranks")
    group.add_argument(
        "--nproc", "--nproc-per-node", metavar="N", help="processes on this node, usually one per GPU (1)"
    )
    group.add_argument("--nnodes", metavar="N", help="number of nodes (1); run this command on each node")
    group.add_argument("--node-rank", metavar="R", help="index of this node, counted from 0")
    group.add_argument("--master-addr", metavar="HOST", help="address of the node with --node-rank 0")
    group.add_argument("--master-port", metavar="PORT", help=f"free port on that node ({_DEFAULT_PORT})")
    group.add_argument(
        "--resume",
        "--continue",
        metavar="DIR",
        help="resume the run with this --save folder or URL; no other flags are needed",
    )
    group.add_argument("--script", metavar="FILE", help="your own training script instead of pretrain_gpt.py")
    return parser


def _train(argv: Sequence[str]) -> int:
    own, words = _split(argv)
    if "resume" in own:
        words = [*_go_on(own, words), *words]
    place = _place(own)
    is_asking = any(word in _ASKING for word in words)
    if any(word in HELP_FLAGS for word in words):
        with reader_may_leave():
            print(build_parser().format_help(), flush=True)
    script = training_script()
    if "script" in own:
        script = Path(own["script"])
        if not script.is_file():
            raise ConfigurationError(f"--script {script} does not exist; pass a Python training script")
    elif is_asking:
        parse_arguments(words, place.world_size, is_train_command=True)
    elif "--explain" not in words:
        # Report invalid flags before any rank is started.
        resolve_arguments(words, place.world_size, is_train_command=True)
    if place.world_size > 1 or "script" in own:
        return launch(script, words, place)
    from megatron.cli.pretrain import main as pretrain

    was_interrupted = _end_on_interrupt()
    status = pretrain(words, is_train_command=True)
    return INTERRUPTED if status == 0 and was_interrupted() else status


def _split(argv: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Split the command line into the values of the launcher's flags and the words for the run.

    Raises:
        ConfigurationError: a flag lacks its value.
    """
    try:
        namespace, words = build_parser().parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise ConfigurationError(f"{error.argument_name}: a value is missing; see megatron train --help") from error
    return vars(namespace), words


def _go_on(own: dict[str, str], typed: Sequence[str]) -> tuple[str, ...]:
    """Return the flags of the run to resume, and change to the directory where it was started.

    Relative paths are resolved from that directory, including paths in ``typed``; a message says so.

    Raises:
        ConfigurationError: the run has no record, or --script or --nnodes is missing.
    """
    run = ContinuedRun.read(own["resume"])
    if run.scripts and "script" not in own:
        raise ConfigurationError(
            f"--resume {own['resume']}: the run used the script {run.scripts[0]}; pass --script {run.scripts[0]} too"
        )
    own.setdefault("nproc", str(run.nproc))
    if run.nnodes > 1 and "nnodes" not in own:
        raise ConfigurationError(
            f"--resume {own['resume']}: the run used {run.nnodes} nodes; pass --nnodes {run.nnodes}, --node-rank R "
            "and --master-addr HOST on each node, or --nnodes 1"
        )
    for name, value in run.limits.items():
        limit = f"--{name.replace('_', '-')}"
        if not any(word.partition("=")[0] == limit for word in typed):
            print_line(f"{limit} {value} of the last session is not continued; pass it again to stop early", sys.stderr)
    if "script" in own:
        own["script"] = str(Path(own["script"]).resolve())
    if not run.folder.is_dir():
        print_line(
            f"WARNING: the run's working directory {run.folder} is missing: its relative paths are resolved from the "
            "current directory",
            sys.stderr,
        )
    elif run.folder != Path.cwd():
        os.chdir(run.folder)
        if typed:
            print_line(f"relative paths are resolved from {run.folder}, where the run was started", sys.stderr)
    return run.words


def _place(own: dict[str, str]) -> Place:
    """Return the ranks of this node.

    Raises:
        ConfigurationError: a value is not a number in its range, or the flags do not fit together.
    """
    nproc, nnodes = (_number(own, name, 1, 1, _MOST_RANKS) for name in ("nproc", "nnodes"))
    node_rank = _number(own, "node_rank", 0, 0, nnodes - 1)
    if nnodes == 1:
        given = [f"--{name.replace('_', '-')}" for name in ("master_addr", "master_port") if name in own]
        if given:
            raise ConfigurationError(f"{', '.join(given)}: not needed on a single node; add --nnodes, or omit them")
        return Place(nproc=nproc)
    missing = [f"--{name.replace('_', '-')}" for name in ("node_rank", "master_addr") if name not in own]
    if missing:
        raise ConfigurationError(f"--nnodes {nnodes} needs {' and '.join(missing)} on each node")
    port = _number(own, "master_port", _DEFAULT_PORT, 1, 65535)
    return Place(nproc, nnodes, node_rank, own["master_addr"], port)


def _number(own: dict[str, str], name: str, default: int, least: int, most: int) -> int:
    text = own.get(name, str(default))
    if not text.isascii() or not text.isdecimal() or len(text) > 9 or not least <= int(text) <= most:
        raise ConfigurationError(f"--{name.replace('_', '-')} {text}: a number from {least} to {most} is expected")
    return int(text)


def _end_on_interrupt() -> Callable[[], bool]:
    """Convert the first Ctrl-C to SIGTERM, which makes training save a checkpoint; the second one ends the run.

    Before training has installed its handler of SIGTERM, the first Ctrl-C ends the process. Return a function that
    tells whether there was a Ctrl-C.
    """
    received: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        received.append(number)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            os.kill(os.getpid(), signal.SIGINT)
        print_line("\nstopping after this step; Ctrl-C once more ends the run at once", sys.stderr)
        os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGINT, interrupt)
    return lambda: bool(received)
