"""What looks at the model at intervals while it is trained: texts that it generates, and scores on tasks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from megatron.core.errors import ConfigurationError
from megatron.core.inference.engine import InferenceEngine
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
    model, state = parts.chunks[0], runtime.state
    if not isinstance(model, GPTModel):
        flag = "--eval-tasks" if sampling is None else "--sample-interval"
        raise ConfigurationError(f"{flag}: this model generates no text; leave it out")
    # Copies of the model and the ranks of none other take part in nothing.
    alone = replace(state, dp=single_rank_group(("dp",), state.rank), cp=single_rank_group(("cp",), state.rank))
    device = runtime.device.torch_device
    links = create_pipeline_links(state.pp, device=device) if state.pp.size > 1 else None
    engine = InferenceEngine(model, alone, links)
    if sampling is not None:
        from megatron.training.reporting.looks.sample_texts import SampleTexts

        looks.append((sampling, SampleTexts(config, runtime, parts, tokenizer, engine)))
    if tasks:
        from megatron.training.reporting.looks.task_scores import TaskScores

        interval = config.validation.eval_tasks_interval or config.validation.eval_interval
        looks.append(
            (
                interval,
                TaskScores(config, runtime, parts, tokenizer, engine, lambda what, done, total: live.show(done, total)),
            )
        )
    return ModelLooks(tuple(looks))
