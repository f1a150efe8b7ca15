"""Experiment loggers: TensorBoard, Weights & Biases and MLflow."""

from __future__ import annotations

import http.client
import importlib.util
import inspect
import json
import os
import re
import secrets
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from megatron.config import RunConfig, extra_validation_sets
from megatron.core.errors import ConfigurationError
from megatron.core.object_store import ObjectPath, as_path
from megatron.core.registry import find_registered

OF_DATA_SET: Final = "lm loss of data set"
"""Prefix, followed by a slash, of the tag of a data set's training loss."""


class RunLogger:
    """Base class of loggers, which get one run's scalars and texts on the reporting rank.

    Each method does nothing unless a subclass overrides it. Every method may raise an OSError: a warning is printed,
    and the logger gets no more data.
    """

    name: str = ""
    """Name of the logger in messages."""

    def scalars(self, values: Mapping[str, float], iteration: int, samples: int | None = None) -> None:
        """Log scalars of an iteration; loggers may also plot them over the consumed ``samples``."""

    def text(self, tag: str, text: str, iteration: int) -> None:
        """Log a text in Markdown."""

    def close(self) -> None:
        """Write the remaining data and close the logger."""


def hyperparameters(config: RunConfig) -> dict[str, bool | int | float | str]:
    """Return every flag of a run by field name as a plain value; lists are joined by spaces, and None is ``none``."""
    values: dict[str, bool | int | float | str] = {}
    for spec, value in config.flags():
        plain = " ".join(map(str, value)) if isinstance(value, tuple) else value
        values[spec.name] = "none" if plain is None else plain
    return values


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
        "seconds per iteration": ["iteration-time"],
        "TFLOP/s of each device": ["throughput"],
        "bytes of memory": ["mem-allocated-bytes", "mem-max-allocated-bytes", "mem-reserved-bytes"],
        "global batch size": ["batch-size"],
    },
}
"""Charts of TensorBoard's "custom scalars" page by group: the tags that share a chart."""


class TensorBoardLogger(RunLogger):
    """TensorBoard logger, which writes to the folder of ``--tensorboard-dir``.

    ``sets`` are the names of further validation sets, whose losses share a chart. ``data_sets`` are the names of the
    blend's data sets, which share a chart too.
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
        """Add a point to each tag; with ``samples``, also to ``TAG vs samples`` at that number of samples."""
        for tag, value in values.items():
            self._writer.add_scalar(tag, value, iteration)
            if samples is not None:
                self._writer.add_scalar(f"{tag} vs samples", value, samples)

    def text(self, tag: str, text: str, iteration: int) -> None:
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


FILE = "wandb_run.json"


def identify_run(folder: Path, project: str, entity: str) -> str:
    """Return the id of a save folder's run in a W&B project; a new id is stored in the folder.

    ``folder`` is in a file system or an object store.

    Raises:
        ConfigurationError: the folder's file contains no ids.
        OSError: it cannot be read or written.
    """
    path = folder / FILE
    known = _read(path) if path.exists() else {}
    place = f"{entity}/{project}" if entity else project
    if place not in known:
        known[place] = secrets.token_hex(4)
        _write(path, (json.dumps(known, indent=2) + "\n").encode())
    return known[place]


def _write(path: Path, data: bytes) -> None:
    """Write a file atomically, as object stores always do."""
    if isinstance(path, ObjectPath):
        path.write_bytes(data)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_name(f"{FILE}.new")
    written.write_bytes(data)
    os.replace(written, path)


def _read(path: Path) -> dict[str, str]:
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"{path} is damaged ({error}); remove it to start a new W&B run") from error
    if not isinstance(known, dict) or not all(isinstance(value, str) and value for value in known.values()):
        raise ConfigurationError(f"{path} contains no run ids; remove it to start a new W&B run")
    return known


_WITHOUT_LOGIN = ("offline", "disabled", "dryrun")
"""Modes of WANDB_MODE, or of the package's settings files, in which nothing is sent."""


def check_login(config: RunConfig) -> None:
    """Check that W&B finds credentials in the environment, its settings files or netrc.

    Nothing is sent, so a wrong key is found only when the run starts.

    Raises:
        ConfigurationError: there are none, and the run's metrics would be sent to a server.
    """
    import wandb

    settings = wandb.setup(wandb.Settings(silent=True)).settings
    if settings.mode in _WITHOUT_LOGIN:
        return
    try:
        takes_prompt = "prompt" in inspect.signature(wandb.login).parameters
        found = wandb.login(prompt=False, verify=False) if takes_prompt else bool(wandb.api.api_key)
        reason = "no API key is configured"
    except wandb.Error as error:
        found, reason = False, " ".join(str(error).split())
    if not found:
        raise ConfigurationError(_describe_failure(config, reason))


def _describe_failure(config: RunConfig, reason: str) -> str:
    return (
        f"--wandb-project {config.logging.wandb_project}: {reason}; run `wandb login`, or set WANDB_API_KEY or "
        "WANDB_MODE=offline"
    )


class WandbLogger(RunLogger):
    """Logger to the project of ``--wandb-project``; ``WANDB_MODE=offline`` keeps all data on this host.

    A run that restarts in its save folder resumes its W&B run; without a folder, each start is a new run.

    Raises:
        ConfigurationError: the package is not installed, or the run cannot be started.
    """

    name = "W&B"

    def __init__(self, config: RunConfig) -> None:
        options, save = config.logging, config.checkpoint.save
        try:
            import wandb
        except ImportError as error:
            raise ConfigurationError(f"--wandb-project {options.wandb_project}: {error}; pip install wandb") from error
        beside = config.checkpoint.local_save
        folder = Path(options.wandb_save_dir or (f"{beside}/wandb" if beside else "wandb"))
        folder.mkdir(parents=True, exist_ok=True)
        again: dict[str, Any] = {}
        if save:
            number = identify_run(as_path(save), options.wandb_project, options.wandb_entity)
            # The flags of a restart may differ.
            again = {"id": number, "resume": "allow", "allow_val_change": True}
        # Console capture would pipe the log through W&B.
        settings = wandb.Settings(console="off", silent=True)
        try:
            self._run: Any = wandb.init(
                project=options.wandb_project,
                entity=options.wandb_entity or None,
                name=options.wandb_exp_name or (Path(save).name if save else None),
                dir=str(folder),
                config=config.to_dict(),
                settings=settings,
                **again,
            )
        except wandb.Error as error:
            raise ConfigurationError(_describe_failure(config, " ".join(str(error).split()))) from error
        self._failure, self._table = wandb.Error, wandb.Html
        # W&B's own steps must not decrease, but the iteration does after a rollback to an older checkpoint.
        self._run.define_metric("iteration")
        self._run.define_metric("*", step_metric="iteration")

    def scalars(self, values: Mapping[str, float], iteration: int, samples: int | None = None) -> None:
        """Log the scalars of an iteration, with its consumed samples."""
        self._log({**values, **({} if samples is None else {"consumed samples": samples})}, iteration)

    def text(self, tag: str, text: str, iteration: int) -> None:
        """Log a text as an HTML panel."""
        from html import escape

        self._log({tag: self._table(f"<pre>{escape(text)}</pre>")}, iteration)

    def close(self) -> None:
        """Send the remaining data and finish the run."""
        self._run.finish()

    def _log(self, values: Mapping[str, Any], iteration: int) -> None:
        try:
            self._run.log({**values, "iteration": iteration})
        except self._failure as error:
            raise OSError(str(error)) from error


_REACH_SECONDS = 10.0
_FLUSH_SECONDS = 5.0
_PARAMETERS_AT_ONCE, _FIGURES_AT_ONCE, _MOST_CHARACTERS = 100, 1000, 500


def check_server(config: RunConfig) -> None:
    """Check that MLflow's tracking server, database or folder is reachable.

    Raises:
        ConfigurationError: it is not.
    """
    import mlflow
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    options = config.logging
    uri = options.mlflow_tracking_uri or mlflow.get_tracking_uri()
    try:
        if uri.startswith(("http://", "https://")):
            # MLflow itself retries for minutes.
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
        # A timeout while the response is read is a TimeoutError; a timeout while connecting is a URLError.
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


class MlflowLogger(RunLogger):
    """Logger to the experiment of ``--mlflow-experiment``, in batches of a few seconds.

    Raises:
        ConfigurationError: the package is not installed, or the server is not reachable.
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
        """Buffer the scalars of an iteration, and send the buffer every few seconds."""
        now = int(1000 * time.time())
        given = {**values, **({} if samples is None else {"consumed samples": samples})}
        # MLflow allows no other characters in names.
        self._waiting += [
            self._metric(re.sub(r"[^\w./ :-]", "_", tag), float(value), now, iteration) for tag, value in given.items()
        ]
        if time.monotonic() - self._flushed_at > _FLUSH_SECONDS:
            self._flush()

    def text(self, tag: str, text: str, iteration: int) -> None:
        """Log a text as an artifact of its iteration."""
        try:
            self._client.log_text(self._run_id, text, f"{tag}/iteration_{iteration}.md")
        except self._failures as error:
            raise OSError(str(error)) from error

    def close(self) -> None:
        """Send the remaining data and end the run."""
        self._flush()
        self._client.set_terminated(self._run_id)

    def _flush(self) -> None:
        sent, self._waiting, self._flushed_at = self._waiting, [], time.monotonic()
        try:
            for start in range(0, len(sent), _FIGURES_AT_ONCE):
                self._client.log_batch(self._run_id, metrics=sent[start : start + _FIGURES_AT_ONCE])
        except self._failures as error:
            raise OSError(str(error)) from error


def open_loggers(config: RunConfig, start_iteration: int, data_sets: Sequence[str] = ()) -> list[RunLogger]:
    """Create the loggers that the flags request; their packages are imported only here.

    ``data_sets`` are the names of the blend's data sets.

    Raises:
        ConfigurationError: a logger cannot be started.
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
    for name in options.loggers:
        logger = find_registered("logger", name).value(config)
        if not isinstance(logger, RunLogger):
            raise ConfigurationError(
                f"logger {name} is {type(logger).__name__}, not a subclass of megatron.training.loggers.RunLogger"
            )
        logger.name = logger.name or name
        loggers.append(logger)
    return loggers


def check_packages(config: RunConfig) -> None:
    """Check that the packages of the loggers and of evaluations are installed, without importing them.

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
    """Check that the services of the loggers are usable; only the reporting rank calls this.

    Raises:
        ConfigurationError: there are no credentials for W&B, or MLflow's server is not reachable.
    """
    if config.logging.wandb_project:
        check_login(config)
    if config.logging.mlflow_experiment:
        check_server(config)
