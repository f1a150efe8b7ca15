"""Weights & Biases: the figures of a run over its iterations, its configuration, and its texts."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.core.errors import ConfigurationError
from megatron.core.object_store import as_path
from megatron.training.config.run_config import RunConfig
from megatron.training.reporting.loggers.wandb_identity import identify_run

_WITHOUT_LOGIN = ("offline", "disabled", "dryrun")
"""Modes of WANDB_MODE, or of the package's settings files, in which nothing is sent."""


def check_login(config: RunConfig) -> None:
    """Check that W&B finds credentials, wherever it looks for them: environment, settings files, netrc.

    Nothing is sent, so that a wrong key is found when the run begins.

    Raises:
        ConfigurationError: it finds none, and would send the run's figures to a server.
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


class WandbLogger:
    """Log to the project of ``--wandb-project``; ``WANDB_MODE=offline`` keeps everything on this machine.

    A run that starts again in its save folder goes on with its run there; without a folder each start is a new one.

    Raises:
        ConfigurationError: the package is not installed, or the run cannot be begun.
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
            # The flags of a later start may be others.
            again = {"id": number, "resume": "allow", "allow_val_change": True}
        # Capturing the console would put a pipe behind the log.
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
        # Steps of its own may not go back, which a run that goes back to an older checkpoint does.
        self._run.define_metric("iteration")
        self._run.define_metric("*", step_metric="iteration")

    def scalars(self, values: Mapping[str, float], iteration: int, samples: int | None = None) -> None:
        """Log the figures of an iteration, with its consumed samples."""
        self._log({**values, **({} if samples is None else {"consumed samples": samples})}, iteration)

    def text(self, tag: str, text: str, iteration: int) -> None:
        """Log a text, which W&B keeps as a page."""
        from html import escape

        self._log({tag: self._table(f"<pre>{escape(text)}</pre>")}, iteration)

    def close(self) -> None:
        """Send what is left and end the run."""
        self._run.finish()

    def _log(self, values: Mapping[str, Any], iteration: int) -> None:
        try:
            self._run.log({**values, "iteration": iteration})
        except self._failure as error:
            raise OSError(str(error)) from error
