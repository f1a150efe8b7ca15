"""Count the files and functions of the project that five everyday operations enter.

python docs/scripts/measure_paths.py [--files] [--root FOLDER]

One process trains a small GPT for two steps with a distributed optimizer and saves it, under a profiler. A file counts
once per operation, as does a function. A crossing is a call from one file into another. Code that runs while a module
is imported does not count. ``--files`` lists the files in the order of their first entry, ``--root`` measures another
checkout of the project.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import inspect
import io
import os
import sys
import tempfile
import threading
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 "
    "--micro-batch-size 2 --global-batch-size 4 --train-iters 2 --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine "
    "--lr-warmup-iters 1 --weight-decay 0.1 --clip-grad 1.0 --bf16 --use-distributed-optimizer --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 63 --split 8,1,1 --log-interval 1 --eval-iters 0 --save-interval 2"
)


@dataclass
class Operation:
    """One operation: the functions that begin and end it, and what it has entered."""

    title: str
    begins: str
    """A function, or ``Class.method``; names in other versions follow a bar."""
    ends: str = ""
    """The function whose return ends it; empty if it is the function that begins it."""
    after: bool = False
    """Whether it begins with the return of ``begins`` instead of the call."""
    is_open: bool = False
    is_done: bool = False
    files: dict[str, None] = field(default_factory=dict)
    functions: set[tuple[str, str, int]] = field(default_factory=set)
    crossings: int = 0


def paths() -> list[Operation]:
    return [
        Operation("argv → configuration", "resolve_arguments"),
        Operation("configuration → model and optimizer", "build_model_and_optimizer|build_training_parts"),
        Operation("token ids → loss", "forward_step"),
        Operation("gradient → update", "run_schedule", "finish_step", after=True),
        Operation("optimizer state → disk", "CheckpointSaver.save"),
    ]


class Recorder:
    """A profile function that writes down which files and functions the open path enters."""

    def __init__(self, root: Path, measured: list[Operation]) -> None:
        self._prefixes = (f"{root}{os.sep}megatron{os.sep}", f"{root}{os.sep}pretrain_gpt.py")
        self._root = root
        self._paths = measured
        names = "|".join(name for path in measured for name in (path.begins, path.ends))
        self._names = {name.rpartition(".")[2] for name in names.split("|")}
        self._open: Operation | None = None
        self._imports = threading.local()

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event not in ("call", "return"):
            return
        code = frame.f_code
        if code.co_name == "<module>":
            change = 1 if event == "call" else -1
            self._imports.depth = getattr(self._imports, "depth", 0) + change
        elif not getattr(self._imports, "depth", 0):
            if event == "call":
                self._enter(frame)
            if code.co_name in self._names:
                self._watch(frame, event)

    def _watch(self, frame: FrameType, event: str) -> None:
        """Begin or end a path with a call or return of the functions that it names."""
        path, file = self._open, self._file(frame)
        if file is None or threading.current_thread() is not threading.main_thread():
            return
        if path is not None:
            if event == "return" and _is_named(frame, path.ends or path.begins):
                path.is_open, path.is_done, self._open = False, True, None
                threading.setprofile(None)
            return
        for path in self._paths:
            if not path.is_done and _is_named(frame, path.begins) and event == ("return" if path.after else "call"):
                path.is_open, self._open = True, path
                threading.setprofile(self)
                if event == "call":
                    self._enter(frame)
                return

    def _enter(self, frame: FrameType) -> None:
        path = self._open
        if path is None or (file := self._file(frame)) is None:
            return
        code = frame.f_code
        path.files.setdefault(file)
        if not code.co_name.startswith("<") and not code.co_filename.startswith("<"):
            path.functions.add((file, code.co_name, code.co_firstlineno))
        caller = frame.f_back
        while caller is not None and self._file(caller) is None:
            caller = caller.f_back
        path.crossings += caller is not None and self._file(caller) != file

    def _file(self, frame: FrameType) -> str | None:
        """The project's file that a frame runs; methods that ``dataclass`` writes belong to the file of the class."""
        if not frame.f_code.co_flags & inspect.CO_OPTIMIZED:
            return None  # the body of a class
        name = frame.f_code.co_filename
        return self._relative(str(frame.f_globals.get("__file__", "")) if name.startswith("<") else name)

    @functools.cache  # noqa: B019 one recorder a process
    def _relative(self, name: str) -> str | None:
        return os.path.relpath(name, self._root) if name.startswith(self._prefixes) else None


def _is_named(frame: FrameType, names: str) -> bool:
    for name in names.split("|"):
        owner, _, function = name.rpartition(".")
        if frame.f_code.co_name == function and owner in ("", type(frame.f_locals.get("self")).__name__):
            return True
    return False


def measure(root: Path) -> list[Operation]:
    """Train and save in this process and return the paths."""
    sys.path.insert(0, str(root))
    import pretrain_gpt

    measured = paths()
    recorder = Recorder(root, measured)
    output = io.StringIO()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(output):
        sys.setprofile(recorder)
        try:
            pretrain_gpt.main([*FLAGS.split(), "--save", folder])
        except SystemExit as end:
            if end.code:
                raise
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
    missing = [path.title for path in measured if not path.is_done]
    if missing:
        raise SystemExit(f"{output.getvalue()}\nnever ended: {', '.join(missing)}")
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description="Count the files and functions that everyday operations enter.")
    parser.add_argument("--files", action="store_true", help="list the files in the order of their first entry")
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout that is measured")
    arguments = parser.parse_args()
    print(f"{'path':36} {'files':>6} {'functions':>10} {'crossings':>10}")
    for path in measure(arguments.root.resolve()):
        print(f"{path.title:36} {len(path.files):6} {len(path.functions):10} {path.crossings:10}")
        if arguments.files:
            print("".join(f"    {file}\n" for file in path.files), end="")


if __name__ == "__main__":
    main()
