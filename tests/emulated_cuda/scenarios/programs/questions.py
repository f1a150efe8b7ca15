"""Train, and ask the model questions on the way, as those of lm-evaluation-harness are asked, without this package."""

from __future__ import annotations

import importlib.machinery
import sys
from types import ModuleType
from typing import Any

import pretrain_gpt
from megatron.core.inference.prompt_batch import ScoredRow
from megatron.training.callbacks import periodic_evals
from megatron.training.exit_reason import run_program

ROWS = (ScoredRow((3, 1, 4, 15), 2), ScoredRow((42, 6, 53, 58), 3))


class NoTasks:
    """Take the place of the tasks of the package."""

    def __init__(self, *choice: Any, **options: Any) -> None:
        pass


def scores(self: Any) -> dict[str, dict[str, float]]:
    """Return the log-probabilities of the rows."""
    return {"rows": {str(number): each.log_probability for number, each in enumerate(self._ranks.score(ROWS))}}


if __name__ == "__main__":
    package = ModuleType("lm_eval")
    package.__spec__ = importlib.machinery.ModuleSpec("lm_eval", None)
    sys.modules["lm_eval"] = package
    periodic_evals.HarnessTasks = NoTasks  # type: ignore[attr-defined, assignment]
    periodic_evals.TaskScores._scores = scores  # type: ignore[method-assign]
    run_program(lambda: pretrain_gpt.main(sys.argv[1:]))
