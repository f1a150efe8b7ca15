"""MLflow: the figures of a run over its iterations, its flags as parameters, and its texts as artifacts."""

from __future__ import annotations

import http.client
import re
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.core.errors import ConfigurationError
from megatron.training.config.run_config import RunConfig
from megatron.training.reporting.loggers.run_logger import hyperparameters

_REACH_SECONDS = 10.0
_FLUSH_SECONDS = 5.0
_PARAMETERS_AT_ONCE, _FIGURES_AT_ONCE, _MOST_CHARACTERS = 100, 1000, 500


def check_server(config: RunConfig) -> None:
    """Check that the tracking server, data base or folder of MLflow answers.

    Raises:
        ConfigurationError: it does not.
    """
    import mlflow
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    options = config.logging
    uri = options.mlflow_tracking_uri or mlflow.get_tracking_uri()
    try:
        if uri.startswith(("http://", "https://")):
            # MLflow itself asks again and again, for minutes.
            _reach(uri)
        MlflowClient(uri).get_experiment_by_name(options.mlflow_experiment)
    except (MlflowException, OSError, ValueError) as error:
        raise _failure(config, error) from error


def _reach(uri: str) -> None:
    """Check that the server accepts connections. HTTP and TLS errors count as reachable."""
    try:
        with urllib.request.urlopen(uri, timeout=_REACH_SECONDS):
            return
    except (urllib.error.HTTPError, TimeoutError):
        # A timeout while the answer is read is a TimeoutError, one while connecting a URLError.
        return
    except http.client.HTTPException as error:
        raise OSError(f"{uri} does not answer as an HTTP server ({error!r})") from error
    except urllib.error.URLError as error:
        if not isinstance(error.reason, ssl.SSLError):
            raise OSError(f"{uri} does not answer ({error.reason})") from error


def _failure(config: RunConfig, error: Exception) -> ConfigurationError:
    reason = " ".join(str(error).split())
    given = f"--mlflow-experiment {config.logging.mlflow_experiment}"
    return ConfigurationError(f"{given}: {reason}; start the server, or change --mlflow-tracking-uri")


class MlflowLogger:
    """Log to the experiment of ``--mlflow-experiment``, a few seconds' figures at a time.

    Raises:
        ConfigurationError: the package is not installed, or the server does not answer.
    """

    name = "MLflow"

    def __init__(self, config: RunConfig) -> None:
        options, save = config.logging, config.checkpoint.save
        given = f"--mlflow-experiment {options.mlflow_experiment}"
        try:
            from mlflow import MlflowClient
            from mlflow.entities import Metric, Param
            from mlflow.exceptions import MlflowException
        except ImportError as error:
            raise ConfigurationError(f"{given}: {error}; pip install mlflow") from error
        self._failures: tuple[type[Exception], ...] = (MlflowException, OSError)
        self._metric: Any = Metric
        self._waiting: list[Any] = []
        self._flushed_at = time.monotonic()
        try:
            self._client: Any = MlflowClient(options.mlflow_tracking_uri or None)
            found = self._client.get_experiment_by_name(options.mlflow_experiment)
            experiment = (
                self._client.create_experiment(options.mlflow_experiment) if found is None else found.experiment_id
            )
            name = options.mlflow_run_name or (Path(save).name if save else None)
            self._run_id: str = self._client.create_run(experiment, run_name=name).info.run_id
            values = hyperparameters(config).items()
            parameters = [Param(name, str(value)[:_MOST_CHARACTERS]) for name, value in values]
            for start in range(0, len(parameters), _PARAMETERS_AT_ONCE):
                self._client.log_batch(self._run_id, params=parameters[start : start + _PARAMETERS_AT_ONCE])
        except self._failures as error:
            raise _failure(config, error) from error

    def scalars(self, values: Mapping[str, float], iteration: int, samples: int | None = None) -> None:
        """Keep the figures of an iteration, and send those of the last seconds where it is time."""
        now = int(1000 * time.time())
        given = {**values, **({} if samples is None else {"consumed samples": samples})}
        # Its names have no other signs.
        self._waiting += [
            self._metric(re.sub(r"[^\w./ :-]", "_", tag), float(value), now, iteration) for tag, value in given.items()
        ]
        if time.monotonic() - self._flushed_at > _FLUSH_SECONDS:
            self._flush()

    def text(self, tag: str, text: str, iteration: int) -> None:
        """Write a text as an artifact of its iteration."""
        try:
            self._client.log_text(self._run_id, text, f"{tag}/iteration_{iteration}.md")
        except self._failures as error:
            raise OSError(str(error)) from error

    def close(self) -> None:
        """Send what is left and end the run."""
        self._flush()
        self._client.set_terminated(self._run_id)

    def _flush(self) -> None:
        sent, self._waiting, self._flushed_at = self._waiting, [], time.monotonic()
        try:
            for start in range(0, len(sent), _FIGURES_AT_ONCE):
                self._client.log_batch(self._run_id, metrics=sent[start : start + _FIGURES_AT_ONCE])
        except self._failures as error:
            raise OSError(str(error)) from error
