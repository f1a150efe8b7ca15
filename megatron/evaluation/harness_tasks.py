"""Tasks of lm-evaluation-harness: loaded by name or from the user's files, and run on a model."""

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
# Exceptions that the package raises if a task's file does not match its data.
_OF_FILES = (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError)
_MOST_SHOWN = 400


@dataclasses.dataclass(frozen=True)
class TaskChoice:
    """Tasks to run: names or files, a folder of further tasks, and the numbers of few-shot and evaluated examples."""

    names: tuple[str, ...]
    include_path: str | None = None
    num_fewshot: int | None = None
    limit: int | None = None


def check_package(flag: str) -> None:
    """Check that the package lm-eval is installed, without importing it.

    Raises:
        InputError: it is not installed.
    """
    if importlib.util.find_spec(PACKAGE) is None:
        raise InputError(
            f"{flag} needs the package lm-eval, which is not installed; install it with: pip install lm-eval "
            "(or, in the checkout: pip install -e '.[eval]')"
        )


class HarnessTasks:
    """Loaded tasks; ``names`` lists the single tasks, with groups expanded.

    During a training run (``in_run``) the package's own progress bars are suppressed.

    Raises:
        InputError: the package is missing, or a task cannot be found or loaded, for example without its data set.
    """

    def __init__(self, choice: TaskChoice, in_run: bool = False) -> None:
        flag, path_flag = ("--eval-tasks", "--eval-tasks-include-path") if in_run else ("--tasks", "--include-path")
        check_package(flag)
        if choice.include_path is not None and not Path(choice.include_path).is_dir():
            raise InputError(f"{path_flag} {choice.include_path} is not a folder; pass a folder with task files")
        self._choice = choice
        self._in_run = in_run
        with _quiet(in_run), _kept_random():
            manager = _manager(choice)
            for name in choice.names:
                if name not in manager.all_tasks and not Path(name).is_file():
                    raise InputError(
                        f"{flag} {name} is neither a known task nor a file; {_nearest(name, manager, path_flag)}"
                    )
            try:
                self._loaded: Any = manager.load(list(choice.names))
            except Exception as error:
                raise InputError(f"{flag} {' '.join(choice.names)}: {_reason(error)}") from error
            for task in self._loaded["tasks"].values():
                _set_examples(task, choice.num_fewshot)
        self.names = tuple(self._loaded["tasks"])

    def run(self, model: Any, with_samples: bool = False, with_errors: bool = True) -> dict[str, Any]:
        """Run the tasks on a `HarnessModel` and return the harness's results.

        Standard errors (``with_errors``) are bootstrapped for some metrics, which takes a while.

        Raises:
            InputError: a task's files do not match its data, or the model cannot serve its requests.
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
    """Format the results as the harness's own table."""
    from lm_eval.utils import make_table

    tables = [make_table(results)]
    if results.get("groups"):
        tables.append(make_table(results, "groups"))
    return "\n".join(str(table).rstrip("\n") for table in tables)


def figures_of(results: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Return the metrics of each task by name; ``acc,none`` becomes ``acc``."""
    figures: dict[str, dict[str, float]] = {}
    for task, values in results["results"].items():
        own = figures.setdefault(task, {})
        for key, value in values.items():
            metric, _, kind = key.partition(",")
            if kind and isinstance(value, (int, float)) and not metric.endswith("_stderr"):
                own[metric if kind == "none" else f"{metric} {kind}"] = float(value)
    return figures


def _manager(choice: TaskChoice) -> Any:
    """Create the package's task manager.

    It indexes the thousands of task files of the package only if a requested task is not among the user's own."""
    from lm_eval.tasks import TaskManager

    if choice.include_path is not None or all(Path(name).is_file() for name in choice.names):
        own = TaskManager(include_path=choice.include_path, include_defaults=False)
        if all(name in own.all_tasks or Path(name).is_file() for name in choice.names):
            return own
    return TaskManager(include_path=choice.include_path)


def _set_examples(task: Any, num_fewshot: int | None) -> None:
    """Set the number of few-shot examples of a task; a task that allows none keeps none."""
    own = task.get_config("num_fewshot")
    if own is None or (num_fewshot is not None and own != 0):
        task.set_config(key="num_fewshot", value=num_fewshot or 0)


def _nearest(name: str, manager: Any, path_flag: str) -> str:
    import difflib

    close = difflib.get_close_matches(name, manager.all_tasks, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    return (
        f"{hint}`lm-eval ls tasks` lists the tasks of the package, and {path_flag} DIR adds the task files of a folder"
    )


def _reason(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:_MOST_SHOWN]}"


@contextlib.contextmanager
def _kept_random() -> Iterator[None]:
    """Restore the random states of Python and NumPy afterwards."""
    own, arrays = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(own)
        np.random.set_state(arrays)


@contextlib.contextmanager
def _quiet(in_run: bool) -> Iterator[None]:
    """Suppress progress bars in files, pipes and training runs, and print the packages' other output at the end."""
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
