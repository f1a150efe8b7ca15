"""TensorBoard's groups, W&B and MLflow behind one interface, and what happens where they fail or are missing."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import socket
import sys
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron.config.arguments import resolve_arguments
from megatron.config.run_config import RunConfig
from megatron.core import registry
from megatron.core.device import Device
from megatron.core.errors import ConfigurationError
from megatron.core.object_store import as_path
from megatron.training import register_logger
from megatron.training.loggers.experiment_loggers import RunLogger, check_packages, check_services, open_loggers
from megatron.training.loggers.metrics import MetricsWriter
from tests.harness.object_faults import empty_memory_store
from tests.unit.training.loggers.test_profiling import FLAGS


class WandbError(Exception):
    """Stand for the package's own error."""


class WandbRun:
    """Keep what a run is told, as the package's run takes it."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.is_broken = False

    def define_metric(self, name: str, **options: str) -> None:
        self.told.append((name, options))

    def log(self, values: dict[str, Any]) -> None:
        if self.is_broken:
            raise WandbError("the service is gone")
        self.told.append(values)

    def finish(self) -> None:
        self.told.append("finished")


def put_module(monkeypatch: pytest.MonkeyPatch, name: str, **names: Any) -> None:
    """Put a module of these names where an import finds it."""
    module = ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    vars(module).update(names)
    monkeypatch.setitem(sys.modules, name, module)


def config_of(*flags: str) -> RunConfig:
    return resolve_arguments((*FLAGS, *flags), 1).config


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Put a stand-in for wandb into place, and return its run and what it was begun with."""
    seen = SimpleNamespace(run=WandbRun(), begun=[])

    def init(**options: Any) -> WandbRun:
        seen.begun.append(options)
        return seen.run

    put_module(monkeypatch, "wandb", init=init, Settings=dict, Error=WandbError, Html=str)
    return seen


def test_wandb_is_told_figures_by_iteration_and_texts(wandb: SimpleNamespace, tmp_path: Path) -> None:
    flags = ("--wandb-project", "p", "--wandb-exp-name", "e", "--wandb-save-dir", str(tmp_path), "--wandb-entity", "t")
    config = config_of(*flags)
    with MetricsWriter(config, Device("cpu"), 0) as metrics:
        metrics.scalars({"lm loss": 2.5, "grad-norm": None}, 3, 12)
        metrics.text("samples", "a < b", 3)
    begun = wandb.begun[0]
    assert [begun[name] for name in ("project", "entity", "name", "dir")] == ["p", "t", "e", str(tmp_path)]
    assert begun["config"] == config.to_dict()
    assert wandb.run.told[2:] == [
        {"lm loss": 2.5, "consumed samples": 12, "iteration": 3},
        {"samples": "<pre>a &lt; b</pre>", "iteration": 3},
        "finished",
    ]


def test_a_run_that_starts_again_in_its_folder_goes_on_in_wandb(wandb: SimpleNamespace, tmp_path: Path) -> None:
    def begin(*flags: str, iteration: int = 0) -> dict[str, Any]:
        with MetricsWriter(config_of(*flags), Device("cpu"), iteration):
            pass
        begun: dict[str, Any] = wandb.begun[-1]
        return begun

    one, two = ("--save", str(tmp_path / "one")), ("--save", str(tmp_path / "two"))
    first = begin("--wandb-project", "p", *one)
    again = begin("--wandb-project", "p", *one, "--lr", "0.5", iteration=3)
    assert (again["id"], again["resume"], again["allow_val_change"]) == (first["id"], "allow", True)
    others = [begin("--wandb-project", "p", *two), begin("--wandb-project", "p", "--wandb-entity", "t", *one)]
    assert len({first["id"], *(each["id"] for each in others)}) == 3
    assert "id" not in begin("--wandb-project", "p", "--wandb-save-dir", str(tmp_path / "w"))
    file = tmp_path / "one" / "wandb_run.json"
    for text in ("{", '["p"]', '{"p": 3}'):
        file.write_text(text)
        with pytest.raises(ConfigurationError, match="remove it to start a new W&B run"):
            begin("--wandb-project", "p", *one)


@pytest.mark.long
def test_wandb_itself_goes_on_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="the package wandb is not installed (the extra loggers)")
    monkeypatch.setenv("WANDB_MODE", "offline")
    for iteration in (0, 2):
        flags = ("--wandb-project", "p", "--save", str(tmp_path / "run"), "--lr", f"{iteration + 1}e-3")
        with MetricsWriter(config_of(*flags), Device("cpu"), iteration) as metrics:
            metrics.scalars({"lm loss": 2.5}, iteration + 1, 12)
    (number,) = json.loads((tmp_path / "run" / "wandb_run.json").read_text()).values()
    folders = [path.name for path in (tmp_path / "run" / "wandb").rglob("offline-run-*") if path.is_dir()]
    assert folders
    assert all(name.endswith(f"-{number}") for name in folders)


def test_wandb_of_a_run_that_saves_into_a_store_goes_on_and_keeps_its_files_here(
    wandb: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with empty_memory_store():
        for iteration in (0, 3):
            config = config_of("--wandb-project", "p", "--save", "memory://bucket/run")
            with MetricsWriter(config, Device("cpu"), iteration):
                pass
        kept = json.loads(as_path("memory://bucket/run/wandb_run.json").read_text())
    first, again = wandb.begun
    assert (first["name"], first["dir"]) == ("run", "wandb")
    assert kept == {"p": first["id"]}
    assert (again["id"], again["resume"]) == (first["id"], "allow")
    assert [path.name for path in tmp_path.iterdir()] == ["wandb"]


def test_figures_that_a_logger_gets_without_tensorboard_are_not_said_to_have_no_effect() -> None:
    flags = ("--log-timers-to-tensorboard", "--tensorboard-queue-size", "5")
    queue = "--tensorboard-queue-size 5 has no effect without --tensorboard-dir DIR"
    timers = (
        "--log-timers-to-tensorboard has no effect without --tensorboard-dir DIR, --wandb-project NAME, "
        "--mlflow-experiment NAME or --loggers NAME"
    )
    for more, said in (
        ((), {queue, timers}),
        (("--wandb-project", "p"), {queue}),
        (("--mlflow-experiment", "e"), {queue}),
        (("--tensorboard-dir", "t"), set()),
    ):
        notes = resolve_arguments((*FLAGS, *flags, *more), 1).notes
        assert {note for note in notes if "tensorboard" in note} == said


def test_a_logger_that_fails_is_left_and_the_others_go_on(
    wandb: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--wandb-project", "p", "--wandb-save-dir", str(tmp_path / "w"), "--tensorboard-dir", str(tmp_path))
    with MetricsWriter(config_of(*flags), Device("cpu"), 0) as metrics:
        wandb.run.is_broken = True
        metrics.scalars({"lm loss": 2.5}, 1)
        metrics.scalars({"lm loss": 1.5}, 2)
    printed = capsys.readouterr().out
    assert printed.count("WARNING: cannot write to W&B: the service is gone; it gets no more metrics") == 1
    assert [point.value for point in events_in(tmp_path).Scalars("lm loss")] == [2.5, 1.5]


def test_wandb_that_cannot_begin_is_one_line(
    wandb: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**options: Any) -> None:
        raise WandbError("no API key\nconfigured")

    monkeypatch.setattr(sys.modules["wandb"], "init", refuse)
    config = config_of("--wandb-project", "p", "--wandb-save-dir", str(tmp_path))
    with pytest.raises(ConfigurationError, match=r"^--wandb-project p: no API key configured; run `wandb login`"):
        MetricsWriter(config, Device("cpu"), 0)


def test_mlflow_has_parameters_figures_and_texts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    told: list[Any] = []

    class Client:
        def __init__(self, uri: str | None) -> None:
            told.append(uri)

        def get_experiment_by_name(self, name: str) -> None:
            told.append(name)

        def create_experiment(self, name: str) -> str:
            return "7"

        def create_run(self, experiment: str, run_name: str | None) -> Any:
            told.append((experiment, run_name))
            return SimpleNamespace(info=SimpleNamespace(run_id="r"))

        def log_batch(self, run: str, metrics: Any = (), params: Any = ()) -> None:
            told.extend(metrics)
            told.append(("parameters", len(params)))

        def log_text(self, run: str, text: str, file: str) -> None:
            told.append((text, file))

        def set_terminated(self, run: str) -> None:
            told.append("ended")

    def metric(name: str, value: float, time: int, step: int) -> tuple[str, float, int]:
        return name, value, step

    put_module(monkeypatch, "mlflow", MlflowClient=Client)
    put_module(monkeypatch, "mlflow.entities", Metric=metric, Param=lambda name, value: (name, value))
    put_module(monkeypatch, "mlflow.exceptions", MlflowException=ValueError)
    flags = ("--mlflow-experiment", "e", "--mlflow-run-name", "n", "--mlflow-tracking-uri", "file:///m")
    with MetricsWriter(config_of(*flags), Device("cpu"), 0) as metrics:
        metrics.scalars({"lm loss": 2.5, "a+b": 1.0}, 3, 12)
        metrics.text("samples", "text", 3)
    assert told[:3] == ["file:///m", "e", ("7", "n")]
    assert ("parameters", 100) in told
    assert [each for each in told if isinstance(each, tuple) and len(each) == 3] == [
        *(("lm loss", 2.5, 3), ("a_b", 1.0, 3), ("consumed samples", 12.0, 3))
    ]
    assert ("text", "samples/iteration_3.md") in told
    assert told[-1] == "ended"


@pytest.mark.parametrize(
    ("flag", "package"), [("--wandb-project", "wandb"), ("--mlflow-experiment", "mlflow")], ids=["wandb", "mlflow"]
)
def test_a_missing_package_is_refused_with_the_flags(flag: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError) as caught:
        check_packages(config_of(flag, "p"))
    needed = f"{flag} p needs the package {package}, which is not installed; run pip install {package}"
    assert caught.value.problems == (needed,)


def test_tensorboard_has_groups_texts_and_hyperparameters(tmp_path: Path) -> None:
    with MetricsWriter(config_of("--tensorboard-dir", str(tmp_path)), Device("cpu"), 0) as metrics:
        metrics.scalars({"lm loss": 2.5}, 1, 4)
    events = events_in(tmp_path)
    assert {"lm loss", "lm loss vs samples"} == set(events.Tags()["scalars"])
    assert "configuration/text_summary" in events.Tags()["tensors"]
    assert b"| num_layers | 2 |" in events.Tensors("configuration/text_summary")[0].tensor_proto.string_val[0]
    plugins = {events.SummaryMetadata(tag).plugin_data.plugin_name for tag in events.summary_metadata}
    assert {"custom_scalars", "hparams", "text"} <= plugins
    layout = events.Tensors("custom_scalars__config__")[0].tensor_proto.string_val[0]
    assert b"^lm loss validation$" in layout


def events_in(folder: Path) -> EventAccumulator:
    return EventAccumulator(str(folder)).Reload()


@pytest.mark.parametrize("takes_prompt", [True, False])
@pytest.mark.parametrize(
    ("mode", "key", "is_rejected"),
    [("online", "", True), ("run", "", True), ("online", "k", False), ("offline", "", False), ("disabled", "", False)],
)
def test_wandb_without_an_api_key_is_rejected_before_the_run_is_set_up(
    mode: str, key: str, is_rejected: bool, takes_prompt: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def login(prompt: bool, verify: bool) -> bool:
        assert (prompt, verify) == (False, False)
        return bool(key)

    put_module(
        monkeypatch,
        "wandb",
        setup=lambda settings: SimpleNamespace(settings=SimpleNamespace(mode=mode)),
        Settings=dict,
        Error=WandbError,
        login=login if takes_prompt else lambda key=None: pytest.fail("this login would ask"),
        api=SimpleNamespace(api_key=key),
    )
    config = config_of("--wandb-project", "p")
    if not is_rejected:
        check_services(config)
        return
    with pytest.raises(ConfigurationError) as caught:
        check_services(config)
    assert str(caught.value) == (
        "--wandb-project p: no API key is configured; run `wandb login`, or set WANDB_API_KEY or WANDB_MODE=offline"
    )


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Put a stand-in for mlflow into place, and return the servers that its clients are of."""
    asked: list[str] = []

    class Client:
        def __init__(self, uri: str) -> None:
            asked.append(uri)

        def get_experiment_by_name(self, name: str) -> None:
            if asked[-1] == "sqlite:///none/there.db":
                raise ValueError("unable to open\ndatabase file")

    put_module(monkeypatch, "mlflow", MlflowClient=Client, get_tracking_uri=lambda: "sqlite:///none/there.db")
    put_module(monkeypatch, "mlflow.exceptions", MlflowException=ValueError)
    return asked


def test_an_mlflow_server_that_does_not_answer_is_rejected(mlflow: list[str]) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        uri = f"http://127.0.0.1:{closed.getsockname()[1]}"
        with pytest.raises(ConfigurationError, match=f"^--mlflow-experiment e: {uri} does not answer .*refused"):
            check_services(config_of("--mlflow-experiment", "e", "--mlflow-tracking-uri", uri))
    assert mlflow == []
    with pytest.raises(ConfigurationError, match=r"^--mlflow-experiment e: unable to open database file; start"):
        check_services(config_of("--mlflow-experiment", "e"))
    check_services(config_of("--mlflow-experiment", "e", "--mlflow-tracking-uri", "sqlite:///m.db"))


def test_an_mlflow_server_that_accepts_the_connection_and_is_slow_is_reachable(
    mlflow: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron.training.loggers.experiment_loggers._REACH_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as slow:
        uri = f"http://127.0.0.1:{slow.getsockname()[1]}"
        check_services(config_of("--mlflow-experiment", "e", "--mlflow-tracking-uri", uri))
    assert mlflow == [uri]


def test_an_mlflow_server_that_speaks_another_protocol_is_rejected(mlflow: list[str]) -> None:
    def answer() -> None:
        connection, _ = other.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(b"SSH-2.0-server\r\n")

    with socket.create_server(("127.0.0.1", 0)) as other:
        uri = f"http://127.0.0.1:{other.getsockname()[1]}"
        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(ConfigurationError, match=r"does not answer as an HTTP server .*SSH-2.0-server"):
            check_services(config_of("--mlflow-experiment", "e", "--mlflow-tracking-uri", uri))
        thread.join()
    with pytest.raises(ConfigurationError, match=r"does not answer as an HTTP server .*nonnumeric port"):
        check_services(config_of("--mlflow-experiment", "e", "--mlflow-tracking-uri", "http://localhost:port"))
    assert mlflow == []


def test_registered_loggers_are_made_with_the_configuration_in_the_order_of_the_flag(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registry, "_REGISTERED", {})

    class Keeping(RunLogger):
        def __init__(self, config: RunConfig) -> None:
            self.config = config

    register_logger("keeping", Keeping)
    register_logger("wrong", lambda config: [])  # type: ignore[arg-type, return-value]
    config = resolve_arguments([*FLAGS, "--loggers", "keeping", "keeping"], 1).config
    first, second = open_loggers(config, 0)
    assert isinstance(first, Keeping)
    assert (first.config, first.name, second.name) == (config, "keeping", "keeping")
    first.scalars({"lm loss": 1.0}, 1)
    config = resolve_arguments([*FLAGS, "--loggers", "wrong"], 1).config
    with pytest.raises(ConfigurationError, match="logger wrong is list, not a subclass of"):
        open_loggers(config, 0)
    monkeypatch.setattr(registry, "_REGISTERED", {})
    with pytest.raises(ConfigurationError, match="--loggers keeping: possible values are none; a script that registe"):
        resolve_arguments([*FLAGS, "--loggers", "keeping"], 1)
