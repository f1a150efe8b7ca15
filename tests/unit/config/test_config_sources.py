"""Configuration files, presets and lists of data: what they give, what wins, and what is refused."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.config.arguments import ParsedArguments, resolve_arguments
from megatron.config.config_sources import preset_names, read_config_file
from megatron.config.printed_config import format_config
from megatron.config.run_config import (
    RunConfig,
    ValidationConfig,
    extra_validation_sets,
    read_data_list,
    read_per_split_lists,
)
from megatron.core.datasets.gpt_dataset_config import Blend, ValidationSet
from megatron.core.errors import ConfigurationError
from tests.harness.training_run import REPOSITORY
from tests.unit.config.command_lines import MINIMAL, write_data_set

FLAG_VALUES = REPOSITORY / "tests/e2e/flags/flag_values.tsv"
REST = "--mock-data --seq-length 24 --train-iters 4 --tokenizer-type NullTokenizer --vocab-size 127"
RUN = "--mock-data --train-iters 4 --lr 1e-4 --global-batch-size 96"


def resolve(words: str, *files: Path, world_size: int = 1) -> ParsedArguments:
    named = [word for path in files for word in ("--config", str(path))]
    return resolve_arguments([*named, *words.split()], world_size, needs_files=False)


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def same(left: RunConfig, right: RunConfig) -> bool:
    ours, theirs = left.to_dict(), right.to_dict()
    return all(ours[part] == theirs[part] for part in ours if part != "sources")


TOML = """
[model]
num-layers = 6
hidden_size = 96
num_attention_heads = 4
swiglu = true
[anything]
bf16 = true
lr = 3e-4
verify_checkpoint = false
extra_valid_datalist = ["a", "b"]
use_mcore_models = true
"""
YAML = "num_layers: 8\nswiglu: false\nlr: 1e-3\nadam_beta2: null\nno_verify_checkpoint: false\n"


def test_sections_dashes_switches_and_lists_are_what_would_be_typed(tmp_path: Path) -> None:
    path = write(tmp_path / "a.toml", TOML)
    parsed = resolve(REST, path)
    typed = "--num-layers 6 --hidden-size 96 --num-attention-heads 4 --swiglu --bf16 --lr 3e-4 --no-verify-checkpoint "
    typed += "--extra-valid-datalist a --extra-valid-datalist b --use-mcore-models "
    expected = resolve(typed + REST)
    assert same(parsed.config, expected.config)
    assert parsed.notes == expected.notes


def test_later_files_win_over_earlier_ones_and_the_command_line_over_all(tmp_path: Path) -> None:
    files = write(tmp_path / "a.toml", TOML), write(tmp_path / "b.yaml", YAML)
    words = REST
    config = resolve(words, *files).config
    assert (config.model.num_layers, config.model.swiglu, config.optimizer.lr) == (8, False, 1e-3)
    assert config.checkpoint.verify_checkpoint
    assert config.model.hidden_size == 96
    config = resolve(f"{words} --num-layers 2 --fp16 --extra-valid-datalist c", *files).config
    assert (config.model.num_layers, config.model.bf16, config.model.fp16) == (2, False, True)
    assert config.validation.extra_valid_datalist == ("c",)


def test_a_typed_switch_is_off_whatever_a_file_or_an_earlier_word_says(tmp_path: Path) -> None:
    file = write(tmp_path / "a.toml", TOML)

    def seen(words: str) -> tuple[str, bool, bool]:
        config = resolve(f"{REST} {words}", file).config
        return config.model.params_dtype, config.model.swiglu, config.checkpoint.verify_checkpoint

    assert seen("") == ("bfloat16", True, False)
    assert seen("--swiglu --swiglu=false --bf16=false --no-verify-checkpoint=false") == ("float32", False, True)
    assert seen("--swiglu=false --swiglu --fp16 --bf16=false") == ("float16", True, False)
    assert seen("--bf16=false --bf16=true --swiglu=TRUE") == ("bfloat16", True, False)
    for word in ("--swiglu=yes", "--swiglu=", "--hidden-size=false", "--no-such=false"):
        with pytest.raises(ConfigurationError, match=word.partition("=")[0]):
            seen(word)


def test_what_the_command_line_excludes_is_taken_from_no_file(tmp_path: Path) -> None:
    path = write(tmp_path / "a.toml", "train_iters = 40\nrampup_batch_size = [1, 1, 8]\nvocab_size = 3\n")
    words = "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 8 --mock-data --lr 1 --train-samples 8"
    config = resolve(f"{words} --tokenizer-type NullTokenizer --vocab-size 127 --global-batch-size 4", path).config
    assert (config.training.train_iters, config.training.train_samples) == (0, 8)


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_is_a_model_that_flags_and_files_change(name: str, tmp_path: Path) -> None:
    config = resolve(f"{RUN} --model-preset {name}").config
    assert config.model.num_layers >= 16
    assert not any("no effect" in note for note in resolve(f"{RUN} --model-preset {name}").notes)
    dense = 'moe_layer_freq = "[0]*3+[1]*5"' if config.model.moe.moe_layer_freq != "1" else ""
    if config.model.hybrid.hybrid_override_pattern is not None:
        symbols = "".join(sorted(set(config.model.hybrid.hybrid_override_pattern)))
        dense = f'hybrid_override_pattern = "{(symbols * 8)[:8]}"'
    elif config.model.hybrid.is_hybrid:
        dense += "\nlinear_attention_freq = 4"
    if config.model.num_kv_shared_layers:
        dense += "\nnum_kv_shared_layers = 2"
    path = write(tmp_path / "a.toml", f'num_layers = 8\nmodel_preset = "{name}"\nlr = 1e-2\n{dense}')
    changed = resolve("--mock-data --train-iters 4 --vocab-size 99", path).config
    assert (changed.model.num_layers, changed.model.hidden_size) == (8, config.model.hidden_size)
    assert (changed.tokenizer.vocab_size, changed.optimizer.lr) == (99, 1e-2)


def test_a_preset_gives_its_tokenizer_only_where_none_is_given() -> None:
    config = resolve(f"{RUN} --model-preset gpt2-345m --tokenizer-type HuggingFaceTokenizer --tokenizer-model x").config
    assert config.tokenizer.vocab_size is None
    config = resolve(f"{RUN} --model-preset gpt2-345m --vocab-size 99").config
    assert (config.tokenizer.tokenizer_type, config.tokenizer.vocab_size) == ("NullTokenizer", 99)
    of_preset = resolve(f"{RUN} --model-preset gpt2-345m").config.tokenizer
    for repeated in ("--tokenizer-type NullTokenizer", "--tokenizer-type=NullTokenizer"):
        assert resolve(f"{RUN} --model-preset gpt2-345m {repeated}").config.tokenizer == of_preset


def test_sequences_are_as_long_as_the_positions_and_micro_batches_hold_one_sample() -> None:
    config = resolve(f"{RUN} --model-preset gpt2-345m").config
    assert (config.data.seq_length, config.training.micro_batch_size) == (1024, 1)


@pytest.mark.full
def test_what_is_printed_reads_back_as_the_same_configuration(tmp_path: Path) -> None:
    read = 0
    for row in FLAG_VALUES.read_text().splitlines()[1::2]:
        flag, value, companions, without, processes = row.split("\t")
        if "{" in row or without or flag == "--explain":
            continue
        words, world_size = [*MINIMAL, *companions.split(), flag, *value.split()], int(processes)
        with contextlib.suppress(ConfigurationError):
            parsed = resolve_arguments(words, world_size)
            path = write(tmp_path / "printed.toml", format_config(parsed.config, with_help=read % 2 == 0))
            again = resolve_arguments(["--config", str(path)], world_size)
            assert same(again.config, parsed.config), words
            read += 1
    assert read > 50


@pytest.mark.full
def test_print_config_writes_a_file_with_the_help_of_every_flag(tmp_path: Path) -> None:
    command = [sys.executable, str(REPOSITORY / "pretrain_gpt.py"), *MINIMAL, "--print-config"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    path = write(tmp_path / "run.toml", printed)
    again = subprocess.run(
        [*command[:2], "--config", str(path), "--print-config"], capture_output=True, text=True, check=True
    ).stdout
    assert again == printed
    assert "\n# Samples per forward pass on one data-parallel rank.\nmicro_batch_size = 2\n" in printed


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("a.toml", "hiden_size = 3", "unknown key hiden_size; did you mean hidden_size?"),
        ("a.toml", "[model]\nzzz = 3", "unknown key zzz; --print-config lists all keys"),
        ("a.toml", "num_layers = 2\n[model]\nnum-layers = 3", "num_layers is set twice; remove one of them"),
        ("a.toml", "num_layers = [1, 2]", "num_layers = [1, 2]: one value is expected, not a list"),
        ("a.toml", "num_layers = true", "num_layers = True: --num-layers needs N"),
        ("a.toml", "swiglu = 1", "swiglu = 1: true or false is expected"),
        ("a.toml", "lr = 2020-01-01", "lr has a value of type date; use a number, string, true, false or a list"),
        ("a.toml", "[a.b.c]\nlr = 1", "b has a value of type dict; use"),
        ("a.toml", "lr = ", "is not valid TOML: Invalid value (at end of document)"),
        ("a.toml", 'config = "b.toml"', "config belongs on the command line; omit it"),
        ("a.yaml", "lr: [1", "is not valid YAML: while parsing a flow sequence"),
        ("a.yaml", "- lr", "contains no keys; write lines such as num_layers = 24"),
        ("a.yaml", "lr: {a: {b: 1}}", "a has a value of type dict; use"),
        ("a.json", "{}", "is neither .toml nor .yaml; pass a file of one of these kinds"),
        ("a.toml", None, "cannot be read: No such file or directory; pass a readable file"),
    ],
)
def test_a_file_that_cannot_be_used_is_named_with_the_reason(
    name: str, text: str | None, reason: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    if text is not None:
        write(path, text)
    with pytest.raises(ConfigurationError) as caught:
        resolve("--mock-data", path)
    assert any(problem.startswith(f"--config {path}") and reason in problem for problem in caught.value.problems), (
        caught.value.problems
    )
    assert all("\n" not in problem for problem in caught.value.problems)


@pytest.mark.parametrize("url", ["s3://id:hunter2@bucket/run", "s3://id:hunter2@b/a.toml", "s3://b/a.yaml?t=hunter2"])
def test_a_credential_in_a_url_is_not_repeated(url: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        resolve("--mock-data", url)
    assert "hunter2" not in str(caught.value)


def test_an_unknown_preset_is_refused_with_the_nearest_or_those_that_there_are() -> None:
    with pytest.raises(ConfigurationError, match=r"--model-preset GPT2-345 is not known; use gpt2-345m$"):
        resolve("--model-preset GPT2-345")
    with pytest.raises(
        ConfigurationError,
        match=r"--model-preset bert is not known; use llama3.1-8b or another of the \d+ files in .*presets$",
    ):
        resolve("--model-preset bert")


def test_a_missing_package_is_named_as_the_index_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hint names PyYAML's own package: this project is not on the package index."""
    monkeypatch.setitem(sys.modules, "yaml", None)
    path = tmp_path / "run.yaml"
    path.write_text("lr: 1\n")
    with pytest.raises(ConfigurationError, match=r"YAML needs PyYAML; install it with: pip install pyyaml"):
        read_config_file(str(path))


@pytest.fixture
def lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Go to a folder with two lists and a data set."""
    monkeypatch.chdir(tmp_path)
    Path("web").write_text("0.25 c4_a\n 7e5 c4_b\n")
    Path("lists").mkdir()
    Path("lists/books").write_text("one two")
    write_data_set(tmp_path / "plain_text_document")
    return tmp_path


def extra(*paths: str, samples: tuple[int, ...] = (), names: tuple[str, ...] = (), full: bool = False) -> object:
    return extra_validation_sets(
        ValidationConfig(
            extra_valid_datalist=paths,
            extra_valid_data_samples=samples,
            extra_valid_data_names=names,
            full_validation=full,
        )
    )


def problems(*paths: str, samples: tuple[int, ...] = (), names: tuple[str, ...] = ()) -> tuple[str, ...]:
    with pytest.raises(ConfigurationError) as caught:
        extra(*paths, samples=samples, names=names)
    return caught.value.problems


def test_validation_sets_have_names_and_numbers(lists: Path) -> None:
    web = Blend(("c4_a", "c4_b"), (0.25, 7e5))
    assert extra() == ()
    assert extra("web", "lists/books", samples=(3, 4), names=("c4", "old books")) == (
        ValidationSet("c4", web, 3),
        ValidationSet("old books", Blend(("one", "two")), 4),
    )
    assert extra("lists/books", "plain_text_document") == (
        ValidationSet("books", Blend(("one", "two"))),
        ValidationSet("plain_text_document", Blend(("plain_text_document",))),
    )
    assert extra("web", samples=(3,), full=True) == (ValidationSet("web", web),)


def test_what_does_not_fit_together_is_refused(lists: Path) -> None:
    for values, words in (
        (problems("web", "lists/books", samples=(3,)), "--extra-valid-data-samples is passed 1 times, but"),
        (problems(names=("c4",)), "--extra-valid-data-names is passed 1 times, but --extra-valid-datalist 0 times"),
        (problems("web", samples=(0,)), "--extra-valid-data-samples 0: use 1 or more"),
        (problems("web", names=("validation",)), "'validation' is already in use"),
        (problems("web", "web"), "two validation sets have the name web"),
    ):
        assert len(values) == 1
        assert words in values[0]


def test_every_list_that_cannot_be_read_is_named(lists: Path) -> None:
    Path("empty").write_text(" \n")
    Path("mixed").write_text("0.5 a b c")
    found = problems("nowhere", "empty", "web", "mixed")
    assert [problem.split(":")[0] for problem in found] == [
        "--extra-valid-datalist nowhere",
        "--extra-valid-datalist empty",
        "--extra-valid-datalist mixed",
    ]


def test_lists_of_the_training_data(lists: Path) -> None:
    assert read_data_list("web", "--data-args-path") == ("0.25", "c4_a", "7e5", "c4_b")
    Path("splits.json").write_text(json.dumps({"train": [0.5, "a", "0.5", "b"], "valid": ["c"], "test": None}))
    assert read_per_split_lists("splits.json", "--per-split-data-args-path") == {
        "train": ("0.5", "a", "0.5", "b"),
        "valid": ("c",),
        "test": (),
    }
    for text in ("[1]", '{"training": []}', '{"train": 3}', "{"):
        Path("splits.json").write_text(text)
        with pytest.raises(ConfigurationError, match=r"--per-split-data-args-path splits\.json"):
            read_per_split_lists("splits.json", "--per-split-data-args-path")
