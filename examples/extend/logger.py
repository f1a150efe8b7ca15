"""Train with a logger of your own: ``megatron train --script FILE --loggers csv --save DIR``.

It writes the metrics to ``DIR/metrics.csv``.
"""

import csv
import os
from collections.abc import Mapping

from megatron.config import RunConfig
from megatron.training import pretrain, register_logger
from megatron.training.loggers import RunLogger


class CsvLogger(RunLogger):
    def __init__(self, config: RunConfig) -> None:
        folder = config.checkpoint.save or "."
        os.makedirs(folder, exist_ok=True)
        self.file = open(os.path.join(folder, "metrics.csv"), "a", newline="")  # noqa: SIM115
        self.rows = csv.writer(self.file)

    def scalars(self, values: Mapping[str, float], iteration: int, samples: int | None = None) -> None:
        self.rows.writerows([iteration, name, value] for name, value in values.items())

    def close(self) -> None:
        self.file.close()


register_logger("csv", CsvLogger)

if __name__ == "__main__":
    pretrain()
