"""TensorBoard: Megatron's tags, and a page of charts in groups with the run's configuration beside them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from megatron.training.config.run_config import RunConfig
from megatron.training.reporting.loggers.run_logger import OF_DATA_SET, hyperparameters

_CHARTS = {
    "1 loss": {
        "training and validation": ["lm loss", "lm loss validation", "lm loss test"],
        "training and validation, over samples": ["lm loss vs samples", "lm loss validation vs samples"],
    },
    "2 optimizer": {
        "gradient norm": ["grad-norm"],
        "learning rate": ["learning-rate", "decoupled-learning-rate"],
        "norm of the parameters": ["params-norm"],
        "loss scale": ["loss-scale"],
    },
    "3 speed and memory": {
        "seconds an iteration": ["iteration-time"],
        "TFLOP/s of each device": ["throughput"],
        "bytes of memory": ["mem-allocated-bytes", "mem-max-allocated-bytes", "mem-reserved-bytes"],
        "global batch size": ["batch-size"],
    },
}
"""The charts of the page "custom scalars" by group: which tags are lines of one chart."""


class TensorBoardLogger:
    """Write to the folder of ``--tensorboard-dir``.

    ``sets`` are the names of further validation sets, whose losses are drawn beside the training's, and ``data_sets``
    those of the data sets that the training data is blended of, which have a chart.
    """

    name = "TensorBoard"

    def __init__(
        self,
        config: RunConfig,
        start_iteration: int,
        sets: Sequence[str] = (),
        data_sets: Sequence[str] = (),
    ) -> None:
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        options = config.logging
        # torch's writer has no types.
        self._writer: Any = SummaryWriter(log_dir=options.tensorboard_dir, max_queue=options.tensorboard_queue_size)
        values = hyperparameters(config)
        files: Any = self._writer.file_writer
        for summary in hparams(values, {"lm loss": 0.0}):  # type: ignore[no-untyped-call]
            files.add_summary(summary)
        self._writer.add_custom_scalars(_layout(sets, data_sets))
        rows = "\n".join(f"| {name} | {value} |" for name, value in sorted(values.items()))
        self.text("configuration", f"| field | value |\n|---|---|\n{rows}", start_iteration)

    def scalars(self, values: Mapping[str, float], iteration: int, samples: int | None = None) -> None:
        """Add a point to each tag; with ``samples`` also to ``TAG vs samples``, at those."""
        for tag, value in values.items():
            self._writer.add_scalar(tag, value, iteration)
            if samples is not None:
                self._writer.add_scalar(f"{tag} vs samples", value, samples)

    def text(self, tag: str, text: str, iteration: int) -> None:
        """Add a text."""
        self._writer.add_text(tag, text, iteration)

    def close(self) -> None:
        """Flush and close the file."""
        self._writer.close()


def _layout(sets: Sequence[str], data_sets: Sequence[str]) -> dict[str, dict[str, list[Any]]]:
    charts = {group: dict(own) for group, own in _CHARTS.items()}
    if data_sets:
        charts["1 loss"]["each data set trained on"] = [re.escape(f"{OF_DATA_SET}/{name}") for name in data_sets]
    if sets:
        names = ("validation", *sets)
        charts["1 loss"]["each validation set"] = [re.escape(f"lm loss {name}") for name in names]
    return {
        group: {title: ["Multiline", [f"^{tag}$" for tag in tags]] for title, tags in own.items()}
        for group, own in charts.items()
    }
