"""Settings files of other trainers become this project's command."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.cli.adopt import trainer_settings
from megatron.cli.adopt.adopt import CHECKS, main
from megatron.cli.adopt.adopted_command import AdoptedCommand
from megatron.cli.adopt.adoption import adopt_file
from megatron.config.arguments import all_flags
from tests.unit.cli.adopt.example_scripts import NANOTRON, OLMO_CORE, TORCHTITAN


def adopted(folder: Path, name: str, text: str, **variables: str) -> tuple[AdoptedCommand, dict[str, tuple[str, ...]]]:
    path = folder / name
    path.write_text(text)
    (command,) = adopt_file(path, [], variables, CHECKS).commands
    return command, {group.name: group.values for group in command.groups}


def test_torchtitan(tmp_path: Path) -> None:
    command, values = adopted(tmp_path, "train.toml", TORCHTITAN)
    assert command.world_size == 8
    assert values["--num-layers"] == ("32",)
    assert values["--ffn-hidden-size"] == ("14336",)
    assert values["--global-batch-size"] == ("8",)
    assert values["--lr-decay-style"] == ("WSD",)
    assert values["--lr-wsd-decay-iters"] == ("200",)
    assert values["--min-lr"] == ("3e-05",)
    # The trainer's default, which is not this project's.
    assert values["--adam-beta2"] == ("0.95",)
    assert values["--recompute-granularity"] == ("full",)
    assert "--sequence-parallel" in values
    assert set(command.placeholders) == {"DATA_PREFIX"}
    assert command.refused == ()
    assert [finding.flag for finding in command.findings if finding.needs_decision] == ["something.else = 3"]


def test_torchtitan_says_nothing_of_the_number_of_ranks(tmp_path: Path) -> None:
    text = TORCHTITAN.replace("data_parallel_shard_degree = 4", "data_parallel_shard_degree = -1")
    command, values = adopted(tmp_path, "train.toml", text)
    assert {"RANKS_OF_NODE", "GLOBAL_BATCH_SIZE"} <= set(command.placeholders)
    command, values = adopted(tmp_path, "train.toml", text, NGPU="16")
    assert command.world_size == 16
    assert values["--global-batch-size"] == ("16",)


def test_experts_of_torchtitan_are_left_to_the_user(tmp_path: Path) -> None:
    text = TORCHTITAN.replace("tensor_parallel_degree = 2", "tensor_parallel_degree = 2\nexpert_parallel_degree = 4")
    command, _ = adopted(tmp_path, "train.toml", text)
    (finding,) = (each for each in command.findings if each.flag == "parallelism.expert_parallel_degree = 4")
    assert finding.needs_decision
    assert "pass --num-experts, --expert-model-parallel-size" in str(finding)


def test_nanotron(tmp_path: Path) -> None:
    pytest.importorskip("yaml", reason="PyYAML is not installed")
    command, values = adopted(tmp_path, "train.yaml", NANOTRON)
    assert command.world_size == 4
    assert values["--global-batch-size"] == ("12",)
    assert values["--lr-decay-iters"] == ("15",)
    assert values["--num-query-groups"] == ("2",)
    assert values["--rotary-base"] == ("10000",)
    assert "--untie-embeddings-and-output-weights" not in values
    assert {"--bf16", "--sequence-parallel", "--use-distributed-optimizer", "--swiglu"} <= set(values)
    assert set(command.placeholders) == {"DATA_PREFIX"}
    assert command.refused == ()
    assert not any(finding.needs_decision for finding in command.findings)


@pytest.mark.parametrize(
    ("activation", "flag", "is_decided"),
    [("gelu_pytorch_tanh", "--geglu", True), ("relu", "--swiglu", False)],
)
def test_gated_activations_of_nanotron(tmp_path: Path, activation: str, flag: str, is_decided: bool) -> None:
    pytest.importorskip("yaml", reason="PyYAML is not installed")
    text = NANOTRON.replace("hidden_act: silu", f"hidden_act: {activation}")
    command, values = adopted(tmp_path, "train.yaml", text)
    assert {"--geglu", "--swiglu"} & set(values) == {flag}
    assert any(finding.needs_decision for finding in command.findings) != is_decided


@pytest.mark.parametrize(
    ("name", "text", "known"),
    [("a.toml", TORCHTITAN, "only NGPU can be set"), ("config.json", OLMO_CORE, "only WORLD_SIZE can be set")],
)
def test_a_variable_that_is_not_read_is_refused(tmp_path: Path, capsys, name: str, text: str, known: str) -> None:
    (tmp_path / name).write_text(text)
    assert main([str(tmp_path / name), "--set", "GPUS=8"]) == 2
    trainer = "torchtitan" if name == "a.toml" else "OLMo-core"
    assert f"--set GPUS=8 has no effect: {known} for a settings file of {trainer}" in capsys.readouterr().err


def test_olmo_core(tmp_path: Path) -> None:
    command, values = adopted(tmp_path, "config.json", OLMO_CORE, WORLD_SIZE="8")
    assert command.world_size == 8
    assert values["--micro-batch-size"] == ("4",)
    assert values["--global-batch-size"] == ("64",)
    assert values["--train-iters"] == ("10000",)
    assert values["--lr-warmup-iters"] == ("100",)
    assert values["--min-lr"] == ("0.0001",)
    assert values["--adam-beta2"] == ("0.95",)
    assert set(command.placeholders) == {"DATA_PREFIX", "TOKENIZER_FOLDER"}
    assert command.refused == ()
    # The norms of OLMo 2.
    assert values["--norm-placement"] == ("post",)
    assert {"--qk-layernorm", "--qk-layernorm-across-heads"} <= set(values)
    assert not any(finding.needs_decision for finding in command.findings)
    assert "tools/merge_datasets.py --eod-id" in command.placeholders["DATA_PREFIX"]


@pytest.mark.parametrize("trainer", ["torchtitan", "nanotron", "OLMo-core"])
def test_the_table_names_flags_that_exist(trainer: str) -> None:
    rows = trainer_settings._table(trainer).values()
    assert rows
    words = {word for row in rows for word in row.becomes.split() if word.startswith("--")}
    assert words <= set(all_flags())
    assert all(row.becomes or row.change for row in rows)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.toml", "[model\n", "cannot be parsed"),
        ("a.toml", "[tool]\na = 1\n", "is not a settings file of torchtitan: it has no section model and no training"),
        ("a.json", "[1, 2]", "is not a settings file of OLMo-core"),
        ("a.json", '{"train_batch_size": 8, "zero_optimization": {"stage": 1}}', "is a configuration of DeepSpeed"),
        ("a.json", "{", "cannot be parsed"),
        ("a.toml", '[model]\na = 1\n[training]\nsteps = "many"\n[lr_scheduler]\ndecay_ratio = 0.5\n', "many"),
        ("a.yaml", "a: [", "cannot be parsed"),
        ("a.yml", "a: 1", "is not a settings file of nanotron"),
    ],
)
def test_bad_files_get_one_line(tmp_path: Path, capsys, name: str, text: str, message: str) -> None:
    if name.endswith("ml") and not name.endswith("toml"):
        pytest.importorskip("yaml", reason="PyYAML is not installed")
    path = tmp_path / name
    path.write_text(text)
    assert main([str(path)]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert len(said.splitlines()) == 1
