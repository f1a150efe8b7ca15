"""Scores on tasks of lm-evaluation-harness, of the model while it is trained."""

from __future__ import annotations

from megatron.core.collectives import raise_on_all_ranks
from megatron.core.errors import InputError
from megatron.core.inference.engine import InferenceEngine
from megatron.core.process_group import Group
from megatron.core.tokenizers.tokenizer import Tokenizer
from megatron.evaluation.harness_tasks import HarnessTasks, TaskChoice, figures_of
from megatron.evaluation.model_ranks import ModelRanks, Show
from megatron.evaluation.text_encoding import TextEncoding
from megatron.training.config.run_config import RunConfig
from megatron.training.model_setup import TrainingParts
from megatron.training.process.console import print_line
from megatron.training.process.initialize import Runtime
from megatron.training.reporting.metrics import MetricsWriter


class TaskScores:
    """Ask the model the questions of ``--eval-tasks``; all ranks make one together, and the reporter loads the tasks.

    ``copies`` of the model share the questions out.

    Raises:
        InputError: the package is missing, or a task cannot be loaded.
    """

    def __init__(
        self,
        config: RunConfig,
        runtime: Runtime,
        parts: TrainingParts,
        tokenizer: Tokenizer,
        engine: InferenceEngine,
        copies: Group,
        show: Show,
    ) -> None:
        options, state = config.validation, runtime.state
        self._runtime = runtime
        self._parts = parts
        self._encoding = TextEncoding(tokenizer)
        self._max_length = config.model.max_position_embeddings or config.data.seq_length
        own = TaskChoice(
            options.eval_tasks,
            options.eval_tasks_include_path,
            options.eval_tasks_num_fewshot,
            options.eval_tasks_limit,
        )
        self._tasks: HarnessTasks | None = None
        error: InputError | None = None
        if runtime.is_reporter:
            try:
                self._tasks = HarnessTasks(own, in_run=True)
            except InputError as failure:
                error = failure
        raise_on_all_ranks(error, state.world)
        size = config.training.micro_batch_size
        self._ranks = ModelRanks(engine, self._encoding, state.world, copies, size, runtime.flight.tick, show)

    def write(self, iteration: int, metrics: MetricsWriter | None) -> None:
        """Ask, and give the scores to the log, the metrics file and the loggers; every rank must call.

        Raises:
            GivenUpError: communication was given up meanwhile; nothing is written.
        """
        self._runtime.flight.enter("evaluate")
        for chunk in self._parts.ddp_chunks:
            chunk.finish_param_gather()
        try:
            found = self._ranks.lead(self._scores)
        except InputError as error:
            self._runtime.flight.ensure_not_given_up()
            if self._runtime.is_reporter:
                print_line(f"WARNING: no scores at iteration {iteration}: {error}")
            return
        self._runtime.flight.ensure_not_given_up()
        if metrics is None or found is None:
            return
        for task, figures in found.items():
            words = "".join(f" {name}: {value:.6f} |" for name, value in figures.items())
            print_line(f" scores at iteration {iteration} | task: {task} |{words}")
        metrics.write({"iteration": iteration, "split": "tasks", "scores": found})
        scalars = {f"tasks/{task} {name}": value for task, own in found.items() for name, value in own.items()}
        metrics.scalars(scalars, iteration)

    def _scores(self) -> dict[str, dict[str, float]]:
        from megatron.evaluation.harness_model import HarnessModel

        assert self._tasks is not None, "the first rank reports"
        model = HarnessModel(self._ranks, self._encoding, self._max_length)
        return figures_of(self._tasks.run(model, with_errors=False))
