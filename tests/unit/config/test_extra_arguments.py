"""Arguments that a script adds to the command line, and its defaults of flags."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron.config import RunConfig, all_flags, declare_arguments, format_config, parse_arguments, resolve_arguments
from megatron.core.errors import ConfigurationError
from tests.unit.config.command_lines import MINIMAL


@pytest.fixture(autouse=True)
def _without_arguments() -> Iterator[None]:
    yield
    declare_arguments(None, {}, ())


def parse(words: str) -> RunConfig:
    return resolve_arguments([*MINIMAL, *words.split()], 1, needs_files=False).config


def add_all(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    group = parser.add_argument_group("my group")
    group.add_argument("--my-rate", type=float, default=1, help="A rate in %% (default: %(default)s).")
    group.add_argument("--my_count", type=int, choices=[1, 2], metavar="COUNT")
    group.add_argument("--my-names", nargs="*", default=["a"])
    group.add_argument("--my-file", action="append", dest="my_files")
    group.add_argument("--my-switch", action="store_true")
    group.add_argument("--no-my-check", action="store_false", dest="my_check", help="Do not check.")
    return parser


def test_arguments_have_the_values_of_the_command_line_or_their_defaults() -> None:
    declare_arguments(add_all, {}, all_flags())
    extra = parse("").extra
    assert (extra.my_rate, extra.my_count, extra.my_names, extra.my_files) == (1.0, None, ("a",), ())
    assert (extra.my_switch, extra.my_check) == (False, True)
    words = "--my-rate 2 --my_count 2 --my-names b c --my-file x --my-file y --my-switch --no-my-check"
    config = parse(words)
    extra = config.extra
    assert (extra.my_rate, extra.my_count, extra.my_names, extra.my_files) == (2.0, 2, ("b", "c"), ("x", "y"))
    assert (extra.my_switch, extra.my_check) == (True, False)
    assert {"my_rate", "my_names"} <= {spec.name for spec, _ in config.flags()}


def test_a_record_of_arguments_can_be_read_with_and_without_the_script() -> None:
    declare_arguments(add_all, {}, all_flags())
    values = json.loads(json.dumps(parse("--my-names b c --my-rate 3").to_dict()))
    assert values["extra"]["my_names"] == ["b", "c"]
    assert RunConfig.from_dict(values).to_dict()["extra"] == values["extra"]
    assert "[extra]" in format_config(parse("--my-rate 3"))
    declare_arguments(None, {}, ())
    config = RunConfig.from_dict(values)
    assert config.extra.my_names == ("b", "c")
    assert json.loads(json.dumps(config.to_dict())) == values
    with pytest.raises(ConfigurationError, match="unknown flag --my-rate"):
        parse("--my-rate 3")


def test_the_help_lists_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    declare_arguments(add_all, {}, all_flags())
    for flag in ("--help", "--help-all"):
        with pytest.raises(SystemExit):
            parse_arguments([flag])
        shown = " ".join(capsys.readouterr().out.split())
        assert "--my-rate X A rate in % (default: 1). Default: 1.0." in shown
        assert "--no-my-check Do not check." in shown
    declare_arguments(None, {}, ())
    with pytest.raises(SystemExit):
        parse_arguments(["--help-all"])
    assert "my-rate" not in capsys.readouterr().out


def test_values_are_checked_like_those_of_other_flags() -> None:
    declare_arguments(add_all, {}, all_flags())
    with pytest.raises(ConfigurationError) as caught:
        parse("--my-rate fast --my_count 3")
    assert caught.value.problems == (
        "--my-rate fast: a number is expected, such as 0.0001 or 1e-4",
        "--my-count 3: possible values are 1, 2",
    )


def test_the_defaults_of_a_script_precede_presets_files_and_flags(tmp_path: Any) -> None:
    defaults = {"lr_decay_style": "cosine", "my_rate": 5.0, "swiglu": True, "clip_grad": 0.5}
    declare_arguments(add_all, defaults, all_flags())
    config = parse("")
    assert (config.scheduler.lr_decay_style, config.extra.my_rate, config.model.swiglu) == ("cosine", 5.0, True)
    file = tmp_path / "run.toml"
    file.write_text("clip_grad = 0.25\nmy_rate = 7.0\n")
    config = parse(f"--config {file} --my-rate 6 --lr-decay-style constant")
    assert (config.scheduler.lr_decay_style, config.extra.my_rate) == ("constant", 6.0)
    assert config.optimizer.clip_grad == 0.25
    own = {"normalization": "LayerNorm", "num_query_groups": 2, "my_names": ("b", Path("c"))}
    declare_arguments(add_all, {"model_preset": "llama3.1-8b", **own}, ())
    config = parse("")
    assert (config.model.swiglu, config.model.normalization, config.extra.my_names) == (True, "LayerNorm", ("b", "c"))
    assert parse("--model-preset llama3.1-8b --num-query-groups 2").model.normalization == "RMSNorm"
    declare_arguments(None, {"config": "run.toml"}, all_flags())
    with pytest.raises(ConfigurationError, match="args_defaults: config belongs on the command line; omit it"):
        parse("")
    declare_arguments(None, {"lr_decay_styl": "cosine"}, all_flags())
    with pytest.raises(
        ConfigurationError, match="args_defaults: unknown key lr_decay_styl; did you mean lr_decay_style"
    ):
        parse("")


def test_an_argument_that_must_be_given_is_missed() -> None:
    declare_arguments(lambda parser: parser.add_argument("--my-path", required=True), {}, all_flags())
    with pytest.raises(ConfigurationError, match="--my-path is missing"):
        parse("")
    assert parse("--my-path x").extra.my_path == "x"


def adding(*names: str, **options: Any) -> Callable[[argparse.ArgumentParser], Any]:
    return lambda parser: parser.add_argument(*names, **options)


@pytest.mark.parametrize(
    ("provider", "message"),
    [
        (adding("--lr", type=float), "extra_args: --lr: --lr exists already; use another name"),
        (adding("--my-lr", dest="lr"), "extra_args: --my-lr: --lr exists already; use another name"),
        (adding("-m", "--mine"), "extra_args: -m/--mine: a name that starts with -- is expected"),
        (adding("path"), "extra_args: path: a flag is expected, such as --my-flag"),
        (adding("--mine", type=bool), "extra_args: --mine: type=bool is not supported; use int, float, str or store_t"),
        (adding("--mine", type=int, default="3"), "extra_args: --mine: its default '3' is not a value of type int"),
        (adding("--mine", action="count"), "extra_args: --mine: only the actions store, store_true, store_false and a"),
        (lambda parser: parser.set_defaults(lr=1.0), "extra_args: set_defaults: lr is not a flag that the script adds"),
        (
            lambda parser: parser.add_mutually_exclusive_group().add_argument("--mine"),
            "extra_args: mutually exclusive groups are not supported",
        ),
        (adding("--mine", nargs="?"), "extra_args: --mine: nargs=? is not supported"),
        (adding("--mine", action="store_true", default=True), "extra_args: --mine: its default is True; False is exp"),
    ],
)
def test_arguments_that_cannot_be_added_are_rejected(provider: Any, message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        declare_arguments(provider, {}, all_flags())
    assert caught.value.problems[0].startswith(message)
