"""Every flag of 54 published launch scripts works here, or is refused by name with what to do.

`published_flags.json` has one record a script: ``origin`` (repository and path) and each flag with its value, which is
null where it comes from the environment or the command line. All branches of a script are in one record.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from megatron.config.arguments import resolve_arguments
from megatron.core.errors import ConfigurationError
from tests.unit.training.config.command_lines import MINIMAL

SCRIPTS = json.loads(Path(__file__).with_name("published_flags.json").read_text(encoding="utf-8"))
OF_OTHER_PROGRAMS = {
    *("--sample", "--cpuctxsw", "--trace", "--capture-range", "--capture-range-end", "--cuda-graph-trace"),  # nsys
    *("--cuda-memory-usage", "--mpi", "--container-image", "--container-mounts", "--container-workdir"),  # nsys, srun
    "--do-",  # cut off: the rest of the name comes from a variable
    "--keep-last",  # a switch of one script's own program; here it takes a number
}
QUOTED = ("--step-batch-size-schedule", "--pipeline-model-parallel-layout")


def command_line(script: dict[str, Any], null: str, without: Collection[str] = ()) -> list[str]:
    """Return the words of a record, with ``null`` for the values that it does not know, without comments."""
    words = []
    for name, *value in script["flags"]:
        if name not in OF_OTHER_PROGRAMS and name not in without:
            texts = [(null if text is None else text).partition("#")[0].strip() for text in value]
            several = [] if name in QUOTED else [word for text in texts for word in text.split()]
            words += [name, *(several or [text for text in texts if text])]
    return words


def script_of(ending: str) -> dict[str, Any]:
    (script,) = (script for script in SCRIPTS if script["origin"].endswith(ending))
    return dict(script)


def problems_of(argv: list[str], world_size: int = 1) -> tuple[str, ...]:
    try:
        resolve_arguments(argv, world_size)
    except ConfigurationError as error:
        return error.problems
    return ()


def test_the_flags_are_those_of_54_scripts() -> None:
    assert len({script["origin"] for script in SCRIPTS}) == len(SCRIPTS) == 54
    assert all(script["origin"].startswith(("NVIDIA/Megatron-LM: ", "alibaba/Pai-")) for script in SCRIPTS)


@pytest.mark.parametrize("script", SCRIPTS, ids=[script["origin"] for script in SCRIPTS])
def test_each_flag_works_or_is_answered(script: dict[str, Any]) -> None:
    for problem in problems_of([*MINIMAL, *command_line(script, null="1")]):
        assert "see --help" not in problem
        assert "did you mean" not in problem
        assert "possible values are" not in problem
        assert "a value is missing" not in problem
        if problem.startswith("unknown "):
            assert "; give --" in problem or "; leave it out: " in problem


def test_the_script_of_175_billion_parameters_is_accepted_as_it_stands(tmp_path: Path) -> None:
    for name in ("vocab.json", "merges.txt"):
        (tmp_path / name).write_text("{}")
    files = ["--vocab-file", str(tmp_path / "vocab.json"), "--merge-file", str(tmp_path / "merges.txt")]
    words = command_line(script_of("train_gpt3_175b_distributed.sh"), str(tmp_path), without=["--data-path"])
    config = resolve_arguments([*words, *files, "--mock-data"], 1024).config
    assert config.data_parallel_size == 8
    assert config.training.batch_sizes.global_batch_size_at(0) == 16
    assert config.training.batch_sizes.global_batch_size_at(2_400_000_000 // 2048) == 320


def nvidia_problems(name: str, folder: Path) -> tuple[str, ...]:
    (folder / "tokenizer.json").write_text("{}")
    words = command_line(script_of(name), str(folder), without=["--data-path", "--tokenizer-type"])
    return problems_of([*words, "--mock-data", "--tokenizer-type", "HuggingFaceTokenizer"], 128)


def test_the_script_of_llama3_in_fp8_is_accepted_as_it_stands(tmp_path: Path) -> None:
    assert nvidia_problems("train_llama3_8b_h100_fp8.sh", tmp_path) == ()


def test_the_script_of_mixtral_is_accepted_as_it_stands(tmp_path: Path) -> None:
    assert nvidia_problems("train_mixtral_8x7b_distributed.sh", tmp_path) == ()
