"""Tasks of lm-evaluation-harness: loaded by their names or from files of the user's, and run on a model."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import random
import sys
from collections.abc import Iterator, Mapping
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np

from megatron.core.errors import InputError, MegatronError

PACKAGE = "lm_eval"
_SEED = 1234
# What the package fails with where a task's file does not fit its data.
_OF_FILES = (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError)
_MOST_SHOWN = 400


@dataclasses.dataclass(frozen=True)
class TaskChoice:
    """Hold which tasks, by name or file; a folder with further ones; and how many examples precede and are asked."""

    names: tuple[str, ...]
    include_path: str | None = None
    num_fewshot: int | None = None
    limit: int | None = None


def check_package(flag: str) -> None:
    """See whether the package is there, without importing it.

    Raises:
        InputError: it is not.
    """
    if importlib.util.find_spec(PACKAGE) is None:
        raise InputError(
            f"{flag} needs the package lm-eval, which is not installed; install it with: pip install lm-eval "
            "(or, in the checkout: pip install -e '.[eval]')"
        )


class HarnessTasks:
    """Hold loaded tasks; ``names`` are those of what was found, groups taken apart.

    Within a run (``in_run``) the package's own progress bars are drawn nowhere.

    Raises:
        InputError: the package is missing, or a task cannot be found or loaded; its data set may not be here.
    """

    def __init__(self, choice: TaskChoice, in_run: bool = False) -> None:
        flag, path_flag = ("--eval-tasks", "--eval-tasks-include-path") if in_run else ("--tasks", "--include-path")
        check_package(flag)
        if choice.include_path is not None and not Path(choice.include_path).is_dir():
            raise InputError(f"{path_flag} {choice.include_path} is not a folder; name one with task files")
        self._choice = choice
        self._in_run = in_run
        with _quiet(in_run), _kept_random():
            manager = _manager(choice)
            for name in choice.names:
                if name not in manager.all_tasks and not Path(name).is_file():
                    raise InputError(
                        f"{flag} {name} is no task that is known, and no file; {_nearest(name, manager, path_flag)}"
                    )
            try:
                self._loaded: Any = manager.load(list(choice.names))
            except Exception as error:
                raise InputError(f"{flag} {' '.join(choice.names)}: {_reason(error)}") from error
            for task in self._loaded["tasks"].values():
                _set_examples(task, choice.num_fewshot)
        self.names = tuple(self._loaded["tasks"])

    def run(self, model: Any, with_samples: bool = False, with_errors: bool = True) -> dict[str, Any]:
        """Return the harness's results of a `HarnessModel`; standard errors of some metrics take a while.

        Raises:
            InputError: a task's files do not fit its data, or its requests the model.
        """
        from lm_eval.evaluator import evaluate

        with _quiet(self._in_run), _kept_random():
            for task in self._loaded["tasks"].values():
                task.set_fewshot_seed(seed=_SEED)
            try:
                found = evaluate(
                    model,
                    self._loaded,
                    limit=self._choice.limit,
                    bootstrap_iters=1000 if with_errors else 0,
                    log_samples=with_samples,
                    apply_chat_template=bool(model.chat_template()),
                    fewshot_as_multiturn=bool(model.chat_template()),
                )
            except MegatronError:
                raise
            except Exception as error:
                if not isinstance(error, _OF_FILES) and not type(error).__module__.startswith("jinja2"):
                    raise
                raise InputError(f"the tasks {' '.join(self._choice.names)} cannot be run: {_reason(error)}") from error
        return dict(found or {})


def table_of(results: Mapping[str, Any]) -> str:
    """Return the results as the harness's own table."""
    from lm_eval.utils import make_table

    tables = [make_table(results)]
    if results.get("groups"):
        tables.append(make_table(results, "groups"))
    return "\n".join(str(table).rstrip("\n") for table in tables)


def figures_of(results: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Return the figures of each task by the name of the metric; ``acc,none`` is ``acc``."""
    figures: dict[str, dict[str, float]] = {}
    for task, values in results["results"].items():
        own = figures.setdefault(task, {})
        for key, value in values.items():
            metric, _, kind = key.partition(",")
            if kind and isinstance(value, (int, float)) and not metric.endswith("_stderr"):
                own[metric if kind == "none" else f"{metric} {kind}"] = float(value)
    return figures


def _manager(choice: TaskChoice) -> Any:
    """Return what knows the tasks; the package's own, which are thousands of files, only where one is asked for."""
    from lm_eval.tasks import TaskManager

    if choice.include_path is not None or all(Path(name).is_file() for name in choice.names):
        own = TaskManager(include_path=choice.include_path, include_defaults=False)
        if all(name in own.all_tasks or Path(name).is_file() for name in choice.names):
            return own
    return TaskManager(include_path=choice.include_path)


def _set_examples(task: Any, num_fewshot: int | None) -> None:
    """Set how many solved examples precede a question; a task that allows none stays with none."""
    own = task.get_config("num_fewshot")
    if own is None or (num_fewshot is not None and own != 0):
        task.set_config(key="num_fewshot", value=num_fewshot or 0)


def _nearest(name: str, manager: Any, path_flag: str) -> str:
    import difflib

    close = difflib.get_close_matches(name, manager.all_tasks, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    return f"{hint}`lm-eval ls tasks` lists the package's own, and {path_flag} DIR adds the files of a folder"


def _reason(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:_MOST_SHOWN]}"


@contextlib.contextmanager
def _kept_random() -> Iterator[None]:
    """Leave the random states of Python and of NumPy as they are found."""
    own, arrays = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(own)
        np.random.set_state(arrays)


@contextlib.contextmanager
def _quiet(in_run: bool) -> Iterator[None]:
    """Keep the packages' progress bars out of files, pipes and runs; what else they say comes at the end."""
    if sys.stderr is None or (sys.stderr.isatty() and not in_run):
        yield
        return
    said = StringIO()
    try:
        with contextlib.redirect_stderr(said):
            yield
    finally:
        lines = [line for line in said.getvalue().split("\n") if line.strip() and "\r" not in line]
        for line in lines:
            print(line, file=sys.stderr)
