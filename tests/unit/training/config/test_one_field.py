"""One field of a configuration class is a whole flag: nothing else has to know of it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from megatron.checkpoint.config_changes import compare_configs
from megatron.checkpoint.formats.huggingface.family import model_features
from megatron.checkpoint.formats.megatron.arguments import arguments_of_config, config_of_arguments
from megatron.config.arguments import build_parser, resolve_arguments
from megatron.config.run_config import RunConfig
from megatron.core.config_base import NOT_NEGATIVE, flag
from megatron.core.errors import CheckpointError, ConfigurationError
from megatron.core.models.gpt.gpt_config import GPTConfig
from tests.unit.training.checkpointing.toy_checkpoint import CONFIG, load, save
from tests.unit.training.config.command_lines import MINIMAL


@dataclasses.dataclass(frozen=True, kw_only=True)
class WiderConfig(GPTConfig, in_args=True):
    """Hold a model with three fields more."""

    num_memory_tokens: int = flag(0, role="shape", bounds=NOT_NEGATIVE)
    """Number of tokens that every layer sees."""
    memory_scale: float = flag(1.0, role="meaning", needs="num_memory_tokens")
    """Factor of the memory tokens."""
    memory_layers: int = flag(0, role="weights", excludes=("qk_layernorm",))
    """Number of layers with memory tokens."""


@pytest.fixture
def wider(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the model of a run be the wider one."""
    monkeypatch.setitem(RunConfig.__annotations__, "model", WiderConfig)


def test_a_model_field_is_refused_until_it_has_a_role() -> None:
    with pytest.raises(TypeError, match=r"Unfinished\.num_memory_tokens has the role None; declare it as flag\("):

        class Unfinished(GPTConfig):
            num_memory_tokens: int = 0


@pytest.mark.usefixtures("wider")
def test_it_is_on_the_command_line_with_its_bounds_exclusions_and_needs() -> None:
    assert "--num-memory-tokens N" in build_parser().format_help()
    assert "Number of tokens that every layer sees." in build_parser().format_help()
    config = resolve_arguments([*MINIMAL, "--num-memory-tokens", "3", "--memory-scale", "2"], 1).config
    assert isinstance(config.model, WiderConfig)
    assert (config.model.num_memory_tokens, config.model.memory_scale) == (3, 2.0)
    words = "--num-memory-tokens -1 --memory-layers 2 --qk-layernorm"
    with pytest.raises(ConfigurationError) as caught:
        resolve_arguments([*MINIMAL, *words.split()], 1)
    assert caught.value.problems == (
        "--num-memory-tokens -1: a value of 0 or more is expected",
        "--memory-layers 2 and --qk-layernorm exclude each other; keep one",
    )
    with pytest.raises(
        ConfigurationError, match=r"^--memory-scale 2\.0 has no effect without --num-memory-tokens N; add it$"
    ):
        resolve_arguments([*MINIMAL, "--memory-scale", "2"], 1)


@pytest.mark.usefixtures("wider")
def test_it_is_part_of_what_a_checkpoint_is_of() -> None:
    old, new = (
        resolve_arguments([*MINIMAL, *words.split()], 1).config
        for words in (
            "--num-memory-tokens 3 --memory-layers 1",
            "--num-memory-tokens 4 --memory-scale 2 --memory-layers 2",
        )
    )
    changes = compare_configs(old.to_dict(), new.to_dict())
    assert [str(change) for change in changes.shape] == ["model.num_memory_tokens: 3 -> 4"]
    assert [str(change) for change in changes.weights] == ["model.memory_layers: 1 -> 2"]
    assert [str(change) for change in changes.other] == ["model.memory_scale: 1.0 -> 2.0"]
    assert model_features(new.model)["num_memory_tokens"] == 4
    assert model_features(new.model)["memory_scale"] == 2.0
    arguments = arguments_of_config(new.to_dict())
    assert arguments["num_memory_tokens"] == 4
    assert config_of_arguments(arguments)["model"]["memory_scale"] == 2.0


@pytest.mark.usefixtures("wider")
def test_a_run_that_goes_on_with_another_value_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setitem(CONFIG, "model", {**CONFIG["model"], "num_memory_tokens": 3})
    save(tmp_path, 10, lines)
    load(tmp_path, lines)
    with pytest.raises(CheckpointError, match=r"of another model .*: model\.num_memory_tokens: 3 -> 4$"):
        load(tmp_path, lines, config=CONFIG | {"model": {**CONFIG["model"], "num_memory_tokens": 4}})
