"""What looks at the model at intervals while it is trained: texts that it generates, and scores on tasks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from megatron.core.errors import ConfigurationError
from megatron.core.inference.engine import InferenceEngine
from megatron.core.inference.staged_model import share_model
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel.p2p_communication import create_pipeline_links
from megatron.core.process_group import single_rank_group
from megatron.core.tokenizers.tokenizer import Tokenizer
from megatron.training.config.run_config import RunConfig
from megatron.training.model_setup import TrainingParts
from megatron.training.process.initialize import Runtime
from megatron.training.reporting.live_line import LiveLine
from megatron.training.reporting.metrics import MetricsWriter


class _Look(Protocol):
    """Look at the model as it is."""

    def write(self, iteration: int, metrics: MetricsWriter | None) -> None:
        """Report what is seen; every rank must call."""


@dataclass(frozen=True)
class ModelLooks:
    """Hold each look with the iterations from one time to the next."""

    looks: tuple[tuple[int, _Look], ...] = ()

    def take(self, iteration: int, metrics: MetricsWriter | None) -> None:
        """Take the looks that are due at the end of an iteration; every rank must call."""
        for interval, look in self.looks:
            if iteration % interval == 0:
                look.write(iteration, metrics)


def open_looks(
    config: RunConfig, runtime: Runtime, parts: TrainingParts, tokenizer: Tokenizer, live: LiveLine
) -> ModelLooks:
    """Return the looks that the flags ask for; what they need is imported here and not before.

    Raises:
        InputError: a prompt or a task cannot be used.
    """
    looks: list[tuple[int, _Look]] = []
    sampling, tasks = config.logging.sample_interval, config.validation.eval_tasks
    if sampling is None and not tasks:
        return ModelLooks()
    state = runtime.state
    models = [chunk for chunk in parts.chunks if isinstance(chunk, GPTModel)]
    if len(models) < len(parts.chunks):
        flag = "--eval-tasks" if sampling is None else "--sample-interval"
        raise ConfigurationError(f"{flag}: this model generates no text; leave it out")
    shared = [share_model(model, wrapped, state) for model, wrapped in zip(models, parts.ddp_chunks, strict=True)]
    # Each copy of the model runs by itself, and so does each context-parallel rank.
    no_dp, no_cp = (single_rank_group((axis,), state.rank) for axis in ("dp", "cp"))
    links = None
    if state.pp.size > 1:
        device = runtime.device.torch_device
        links = create_pipeline_links(state.pp, wraps_around=len(shared) > 1, device=device)
    # Copies share the questions out. Twins are asked the same one, and the first of them decides. Where copies share
    # experts or shards of weights, all of them run every pass: they are twins.
    runs_together = config.parallel_sizes.has_expert_grid or config.ddp.shards_weights
    copies, twins = (no_dp, state.dp_cp) if runs_together else (state.dp, state.cp)
    alone = replace(state, dp=no_dp, cp=no_cp)
    engine = InferenceEngine(shared[0], alone, links, further_chunks=shared[1:], twins=twins)
    if sampling is not None:
        from megatron.training.reporting.looks.sample_texts import SampleTexts

        looks.append((sampling, SampleTexts(config, runtime, parts, tokenizer, engine)))
    if tasks:
        from megatron.training.reporting.looks.task_scores import TaskScores

        interval = config.validation.eval_tasks_interval or config.validation.eval_interval

        def show(what: str, done: int, total: int) -> None:
            live.show(done, total)

        looks.append((interval, TaskScores(config, runtime, parts, tokenizer, engine, copies, show)))
    return ModelLooks(tuple(looks))
