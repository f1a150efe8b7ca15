"""Periodic evaluations of the model during training: generated texts and scores on tasks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from megatron.config import RunConfig
from megatron.core.collectives import raise_on_all_ranks
from megatron.core.console import print_line
from megatron.core.errors import ConfigurationError, InputError
from megatron.core.inference import (
    GenerationRequest,
    InferenceEngine,
    SamplingConfig,
    StopRule,
    check_request,
    share_model,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import create_pipeline_links
from megatron.core.process_group import Group, single_rank_group
from megatron.core.tokenizers import Tokenizer
from megatron.evaluation import HarnessTasks, ModelRanks, Show, TaskChoice, TextEncoding, figures_of
from megatron.training import ModelAndOptimizer, Runtime
from megatron.training.callbacks.callback import Callback, TrainingRun, is_due
from megatron.training.callbacks.live_line import LiveLine
from megatron.training.loggers import MetricsWriter

_LARGEST_FILE = 1 << 20


class SampleTexts(Callback):
    """Greedy continuations of the prompts of ``--generate-prompts``.

    Every data-parallel replica generates the same texts, and those of the first one are written. All ranks construct it
    together.

    Raises:
        ConfigurationError: the prompts cannot be read.
        InputError: a prompt is empty or too long.
    """

    def __init__(
        self,
        config: RunConfig,
        runtime: Runtime,
        parts: ModelAndOptimizer,
        tokenizer: Tokenizer,
        engine: InferenceEngine,
    ) -> None:
        options = config.logging
        self._runtime = runtime
        self._parts = parts
        self._tokenizer = tokenizer
        self._prompts = read_prompts(options.generate_prompts)
        end = tokenizer.eod_id
        self._request = GenerationRequest(
            prompts=tuple(tuple(tokenizer.tokenize(prompt)) for prompt in self._prompts),
            max_new_tokens=options.sample_tokens,
            sampling=SamplingConfig(greedy=True),
            stop=StopRule(end_tokens=frozenset() if end is None else frozenset((end,))),
        )
        check_request(engine.model.config, self._request)
        self._engine = engine

    def evaluate(self, run: TrainingRun) -> None:
        iteration = run.train_state.iteration
        if is_due(run.config.logging.generate_interval, iteration):
            self.write(iteration, run.metrics)

    def write(self, iteration: int, metrics: MetricsWriter | None) -> None:
        """Generate the texts, and write them to the log, the metrics file and the loggers; every rank must call this.

        Raises:
            GivenUpError: communication was aborted meanwhile; nothing is written.
        """
        for chunk in self._parts.ddp_chunks:
            chunk.finish_param_gather()
        try:
            found = self._engine.generate(self._request, on_token=lambda prompt, token: self._runtime.flight.tick())
        except InputError as error:
            self._runtime.flight.ensure_not_given_up()
            # Every rank gets the error for logits that are not finite; other code decides how to handle them.
            if self._runtime.is_reporter:
                print_line(f"WARNING: no sample at iteration {iteration}: {error}")
            return
        self._runtime.flight.ensure_not_given_up()
        if metrics is None:
            return
        texts = [self._tokenizer.detokenize(each.tokens) for each in found]
        samples = [{"prompt": prompt, "text": text} for prompt, text in zip(self._prompts, texts)]
        for sample in samples:
            print_line(f" sample at iteration {iteration} | prompt: {sample['prompt']!r} | text: {sample['text']!r} |")
        metrics.write({"iteration": iteration, "split": "samples", "samples": samples})
        shown = "\n\n".join(f"**{sample['prompt']}**{sample['text']}" for sample in samples)
        metrics.text("samples", shown, iteration)


def read_prompts(given: tuple[str, ...]) -> tuple[str, ...]:
    """Return the given prompts, or the lines of the file if a single file is named.

    Raises:
        ConfigurationError: the file cannot be read, is too large, or has no line.
    """
    if len(given) != 1 or not Path(given[0]).is_file():
        return given
    path = Path(given[0])
    try:
        if path.stat().st_size > _LARGEST_FILE:
            raise ConfigurationError(
                f"--generate-prompts {path} is larger than {_LARGEST_FILE} bytes; use a smaller file"
            )
        lines = tuple(line for line in path.read_text(encoding="utf-8").splitlines() if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"--generate-prompts {path} cannot be read as text: {error}") from error
    if not lines:
        raise ConfigurationError(f"--generate-prompts {path} is empty; write one prompt per line")
    return lines


class TaskScores(Callback):
    """Evaluation on the tasks of ``--eval-tasks``; only the reporting rank loads the tasks.

    All ranks construct it together. The ranks of ``copies`` split the questions.

    Raises:
        InputError: the package is missing, or a task cannot be loaded.
    """

    def __init__(
        self,
        config: RunConfig,
        runtime: Runtime,
        parts: ModelAndOptimizer,
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

    def evaluate(self, run: TrainingRun) -> None:
        iteration, options = run.train_state.iteration, run.config.validation
        if is_due(options.eval_tasks_interval or options.eval_interval, iteration):
            self.write(iteration, run.metrics)

    def write(self, iteration: int, metrics: MetricsWriter | None) -> None:
        """Run the tasks, and write the scores to the log, the metrics file and the loggers; every rank must call this.

        Raises:
            GivenUpError: communication was aborted meanwhile; nothing is written.
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
        from megatron.evaluation import HarnessModel

        assert self._tasks is not None, "the first rank reports"
        model = HarnessModel(self._ranks, self._encoding, self._max_length)
        return figures_of(self._tasks.run(model, with_errors=False))


def open_engine(
    config: RunConfig, runtime: Runtime, parts: ModelAndOptimizer, user: str
) -> tuple[InferenceEngine, Group]:
    """Return an engine that generates with the parameters of a training, and the group of its replicas; collective.

    The replicas may run different requests. The caller gathers the parameters before each call, with
    `finish_param_gather`. ``user`` is named in messages.

    Raises:
        ConfigurationError: the model cannot generate text.
    """
    state = runtime.state
    models = [chunk for chunk in parts.chunks if isinstance(chunk, GPTModel)]
    if len(models) < len(parts.chunks):
        raise ConfigurationError(f"{user}: this model cannot generate text; omit it")
    shared = [share_model(model, wrapped, state) for model, wrapped in zip(models, parts.ddp_chunks, strict=True)]
    # Each data-parallel replica runs independently, and so does each context-parallel rank.
    no_dp, no_cp = (single_rank_group((axis,), state.rank) for axis in ("dp", "cp"))
    links = None
    if state.pp.size > 1:
        device = runtime.device.torch_device
        links = create_pipeline_links(state.pp, wraps_around=len(shared) > 1, device=device)
    # Replicas in ``copies`` split the questions. The ranks of ``twins`` get the same question, and the first one's
    # result counts. Replicas that share experts or sharded weights must run every pass together, so they are twins.
    runs_together = config.parallel_sizes.has_expert_grid or config.ddp.shards_weights
    copies, twins = (no_dp, state.dp_cp) if runs_together else (state.dp, state.cp)
    alone = replace(state, dp=no_dp, cp=no_cp)
    engine = InferenceEngine(shared[0], alone, links, further_chunks=shared[1:], twins=twins)
    return engine, copies


def open_periodic_evaluations(
    config: RunConfig, runtime: Runtime, parts: ModelAndOptimizer, tokenizer: Tokenizer, live: LiveLine
) -> list[Callback]:
    """Create the evaluations that the flags request; their dependencies are imported only here.

    Raises:
        InputError: a prompt or a task cannot be used.
    """
    sampling, tasks = config.logging.generate_interval, config.validation.eval_tasks
    if sampling is None and not tasks:
        return []
    flag = "--eval-tasks" if sampling is None else "--generate-interval"
    engine, copies = open_engine(config, runtime, parts, flag)
    evaluations: list[Callback] = []
    if sampling is not None:
        evaluations.append(SampleTexts(config, runtime, parts, tokenizer, engine))
    if tasks:

        def show(what: str, done: int, total: int) -> None:
            live.show(done, total)

        evaluations.append(TaskScores(config, runtime, parts, tokenizer, engine, copies, show))
    return evaluations
