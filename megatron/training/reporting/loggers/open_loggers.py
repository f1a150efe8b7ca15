"""Which loggers a run has."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

from megatron.core.errors import ConfigurationError
from megatron.training.config.data_lists import extra_validation_sets
from megatron.training.config.run_config import RunConfig
from megatron.training.reporting.loggers.mlflow_logger import MlflowLogger, check_server
from megatron.training.reporting.loggers.run_logger import RunLogger
from megatron.training.reporting.loggers.tensorboard_logger import TensorBoardLogger
from megatron.training.reporting.loggers.wandb_logger import WandbLogger, check_login


def open_loggers(config: RunConfig, start_iteration: int, data_sets: Sequence[str] = ()) -> list[RunLogger]:
    """Return the loggers that the flags ask for; their packages are imported here and not before.

    ``data_sets`` are the names of the data sets that the training data is blended of.

    Raises:
        ConfigurationError: one cannot be begun.
        OSError: a folder cannot be written to.
    """
    options = config.logging
    loggers: list[RunLogger] = []
    if options.tensorboard_dir is not None:
        sets = tuple(each.name for each in extra_validation_sets(config.validation))
        loggers.append(TensorBoardLogger(config, start_iteration, sets, data_sets))
    if options.wandb_project:
        loggers.append(WandbLogger(config))
    if options.mlflow_experiment:
        loggers.append(MlflowLogger(config))
    return loggers


def check_packages(config: RunConfig) -> None:
    """See whether the packages of the loggers and of what is measured are there, without importing them.

    Raises:
        ConfigurationError: some are not.
    """
    options = config.logging
    problems = [
        f"{flag} {value} needs the package {name}, which is not installed; run pip install {name}"
        for package, name, flag, value in (
            ("wandb", "wandb", "--wandb-project", options.wandb_project),
            ("mlflow", "mlflow", "--mlflow-experiment", options.mlflow_experiment),
            ("lm_eval", "lm-eval", "--eval-tasks", " ".join(config.validation.eval_tasks)),
        )
        if value and importlib.util.find_spec(package) is None
    ]
    if problems:
        raise ConfigurationError(problems)


def check_services(config: RunConfig) -> None:
    """See whether the services that the loggers send to can be used; for the process that reports.

    Raises:
        ConfigurationError: there are no credentials for W&B, or MLflow's server does not answer.
    """
    if config.logging.wandb_project:
        check_login(config)
    if config.logging.mlflow_experiment:
        check_server(config)
