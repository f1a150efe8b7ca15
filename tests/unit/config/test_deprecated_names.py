"""Flags, values and fields of the release before: accepted on the command line, in files and in checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.checkpoint.config_changes import compare_configs
from megatron.config import RunConfig, all_flags, rename_words, resolve_arguments, with_current_fields
from megatron.config.arguments import build_parser
from megatron.config.checkpoint_arguments import read_checkpoint_arguments
from megatron.config.deprecated_names import deprecated_flags
from megatron.core.errors import ConfigurationError
from tests.unit.config.command_lines import MINIMAL
from tests.unit.config.test_checkpoint_arguments import write_checkpoint

FLAGS = [
    ("--cpu-matmul mkl", "--cpu-gemm-backend mkl"),
    ("--exit-warning-seconds=60 --save a", "--preemption-grace-seconds=60 --save a"),
    ("--hang-report-seconds 5", "--hang-timeout-seconds 5"),
    ("--known-to-train-after 3 --save a", "--checkpoint-validation-steps 3 --save a"),
    (
        "--sample-interval 2 --sample-prompts 1 2 --sample-tokens 3",
        "--generate-interval 2 --generate-prompts 1 2 --sample-tokens 3",
    ),
    ("--spike-policy skip --spike-budget 3", "--spike-policy skip --max-spikes 3"),
]
PLACEMENTS = [("before", "pre"), ("after", "post"), ("both", "sandwich")]
OLD_RECORD = {
    "model": {"cpu_matmul": "mkl", "norm_placement": "both"},
    "faults": {"spike_policy": "skip", "spike_budget": 3, "known_to_train_after": 4},
    "initialization": {"hang_report_seconds": 5},
    "logging": {"sample_interval": 2, "sample_prompts": ["a", "b"]},
    "checkpoint": {"save": "runs/a", "exit_warning_seconds": 60},
}
"""Fields as the release before recorded them in the index of a checkpoint."""
SAME_RUN = (
    "--cpu-gemm-backend mkl --norm-placement sandwich --spike-policy skip --max-spikes 3 --hang-timeout-seconds 5 "
    "--checkpoint-validation-steps 4 --generate-interval 2 --generate-prompts a b --save runs/a "
    "--preemption-grace-seconds 60"
)


def parse(text: str) -> RunConfig:
    return resolve_arguments([*MINIMAL, *text.split()], 1).config


def old_record() -> dict[str, Any]:
    """Return the whole configuration of a run as the release before recorded it."""
    new: dict[str, Any] = json.loads(json.dumps(parse(SAME_RUN).to_dict()))
    renamed = {flag[2:].replace("-", "_"): name[2:].replace("-", "_") for flag, name in deprecated_flags().items()}
    for part, fields in OLD_RECORD.items():
        for name, value in fields.items():
            del new[part][renamed.get(name, name)]
            new[part][name] = value
    return new


@pytest.mark.parametrize(("old", "new"), FLAGS)
def test_a_deprecated_flag_works_with_one_warning(old: str, new: str) -> None:
    parsed = resolve_arguments([*MINIMAL, *old.split(), *old.split()], 1)
    assert parsed.config == parse(new)
    warnings = [note for note in parsed.notes if note.startswith("WARNING: ")]
    names = [[word.partition("=")[0] for word in text.split()] for text in (old, new)]
    assert warnings == [
        f"WARNING: {left} is now {right}; the next release removes the old name"
        for left, right in zip(*names, strict=True)
        if left != right
    ]


def test_every_deprecated_flag_is_tried_above() -> None:
    tried = {word.partition("=")[0] for old, _ in FLAGS for word in old.split()}
    assert deprecated_flags().keys() <= tried


@pytest.mark.parametrize(("old", "new"), PLACEMENTS)
def test_a_deprecated_value_works_with_one_warning(old: str, new: str) -> None:
    for words in (["--norm-placement", old], [f"--norm-placement={old}"]):
        parsed = resolve_arguments([*MINIMAL, *words], 1)
        assert parsed.config.model.norm_placement == new
        assert parsed.notes == (
            f"WARNING: --norm-placement {old} is now --norm-placement {new}; the next release removes the old name",
        )


def test_deprecated_names_are_hidden() -> None:
    text = build_parser().format_help()
    for flag, current in deprecated_flags().items():
        assert flag not in text
        assert current in text
        assert all_flags()[flag] == "deprecated"
    assert "{pre,post,sandwich}" in text
    with pytest.raises(ConfigurationError, match=r"unknown flag --spike-budge; see --help"):
        parse("--spike-budge 3")


def test_a_config_file_may_hold_deprecated_names(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('cpu_matmul = "mkl"\n[model]\nnorm-placement = "after"\n')
    parsed = resolve_arguments([*MINIMAL, "--config", str(file)], 1)
    assert (parsed.config.model.cpu_gemm_backend, parsed.config.model.norm_placement) == ("mkl", "post")
    end = f"; the next release removes the old name (--config {file})"
    assert parsed.notes == (
        f"WARNING: cpu_matmul is now cpu_gemm_backend{end}",
        f"WARNING: norm_placement = after is now norm_placement = post{end}",
    )
    typed = resolve_arguments([*MINIMAL, "--config", str(file), "--cpu-matmul", "onednn"], 1)
    assert typed.config.model.cpu_gemm_backend == "onednn"


def test_a_configuration_that_the_release_before_stored_reads_back() -> None:
    assert RunConfig.from_dict(old_record()) == parse(SAME_RUN)


def test_a_checkpoint_of_the_release_before_gives_its_shape_silently(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 20, old_record())
    assert read_checkpoint_arguments(str(tmp_path), None).values["norm_placement"] == "sandwich"
    words = [*MINIMAL, "--use-checkpoint-args", "--load", str(tmp_path)]
    parsed = resolve_arguments(words, 1)
    assert parsed.config.model.norm_placement == "sandwich"
    assert not any(note.startswith("WARNING: ") for note in parsed.notes)


def test_a_renamed_field_is_no_change_of_the_configuration() -> None:
    old, new = old_record(), json.loads(json.dumps(parse(SAME_RUN).to_dict()))
    changes = compare_configs(with_current_fields(old), new)
    assert (changes.shape, changes.other) == ((), ())


def test_words_of_another_command_stay_as_they_are() -> None:
    words, warnings = rename_words(["--old", "1", "--", "--old"], {"--old": "--new"}, {})
    assert words == ["--new", "1", "--", "--old"]
    assert len(warnings) == 1
