"""Every script that users launch parses as it stands, or is refused only for what is not supported."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
from pathlib import Path

import pytest

from megatron.config.arguments import resolve_arguments
from megatron.core.errors import ConfigurationError
from tests.unit.config.command_lines import write_data_set

SCRIPTS = Path(__file__).parents[3].parent / "shared" / "user_scripts"

pytestmark = pytest.mark.skipif(
    not SCRIPTS.is_dir(), reason="the users' scripts are not beside the repository (../shared/user_scripts)"
)

FAKE_TORCHRUN = """#!/usr/bin/env python3
import json, sys
words = sys.argv[1:]
script = words.index("pretrain_gpt.py")
print(json.dumps([words[:script], words[script + 1:]]))
"""

GPT2_SCRIPTS = {
    "gpt2_345m.sh": (1, 1),
    "gpt2_345m_dp4.sh": (1, 1),
    "gpt2_345m_tp4.sh": (4, 1),
    "gpt2_345m_tp4_sp.sh": (4, 1),
    "gpt2_345m_tp2_dp2.sh": (2, 1),
    "gpt2_345m_tp2_pp2.sh": (2, 2),
    "gpt2_345m_pp4.sh": (1, 4),
    "gpt2_345m_tp2_pp3_zero1.sh": (2, 3),
}
NULL_TOKENIZER = ("--tokenizer-type", "NullTokenizer", "--vocab-size", "128")


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with a torchrun that only shows its arguments, and the files that the scripts name."""
    folder = tmp_path_factory.mktemp("user_scripts")
    torchrun = folder / "bin" / "torchrun"
    torchrun.parent.mkdir()
    torchrun.write_text(FAKE_TORCHRUN)
    torchrun.chmod(0o755)
    for prefix in ("my-gpt2_text_document", "wudao_content_document", "my-qwen_text_document"):
        write_data_set(folder / prefix, lengths=(5,) * 700)
    for name in ("gpt2-vocab.json", "gpt2-merges.txt", "tokenizers/qwen2/tokenizer.json"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")
    return folder


def expand(workplace: Path, script: str, *extra: str, **choices: str) -> tuple[list[str], int]:
    """Return the arguments of pretrain_gpt.py and the world size that a script asks for."""
    environment = {**os.environ, **choices, "PATH": f"{workplace / 'bin'}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", str(SCRIPTS / script), *extra],
        cwd=workplace,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    launcher, arguments = json.loads(done.stdout)
    world_size = 1
    for flag, value in itertools.pairwise(launcher):
        if flag in ("--nproc_per_node", "--nnodes"):
            world_size *= int(value)
    return arguments, world_size


@pytest.mark.default(7)
@pytest.mark.parametrize(("script", "layout"), GPT2_SCRIPTS.items())
def test_script_is_accepted(
    script: str, layout: tuple[int, int], workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(workplace)
    arguments, world_size = expand(workplace, script)
    parsed = resolve_arguments(arguments, world_size)
    assert (parsed.config.model.num_layers, parsed.config.model.hidden_size) == (24, 1024)
    model = parsed.config.model
    assert (model.tensor_model_parallel_size, model.pipeline_model_parallel_size) == layout
    assert model.params_dtype == "float16"
    assert parsed.config.checkpoint.save == parsed.config.checkpoint.load == "checkpoints/gpt2_345m"
    small = [
        "--num-layers",
        "12",
        "--hidden-size",
        "64",
        "--num-attention-heads",
        "4",
        "--seq-length",
        "64",
        "--train-iters",
        "20",
    ]
    arguments, _ = expand(workplace, script, *small)
    config = resolve_arguments(arguments, world_size).config
    assert (config.model.num_layers, config.data.seq_length, config.training.train_iters) == (12, 64, 20)


def refusals(arguments: list[str], world_size: int) -> tuple[str, ...]:
    try:
        resolve_arguments(arguments, world_size)
    except ConfigurationError as error:
        return error.problems
    return ()


@pytest.mark.full
def test_domains_script_is_accepted(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workplace)
    names = ("c4_en", "dolma_books", "wikitext_103")
    for name in names:
        (workplace / f"valid-datalist-{name}").write_text("31415926 my-qwen_text_document\n")
    validation = resolve_arguments(*expand(workplace, "llama_7b_domains.sh")).config.validation
    assert (validation.extra_valid_data_names, validation.extra_valid_data_samples) == (names, (242, 118, 60))
    for choices in ({"TP": "4", "PP": "2"}, {"TP": "1", "CP": "2", "PP": "4"}):
        for extra in ({}, {"EXTRA_VALID_ARGS": " "}):
            assert refusals(*expand(workplace, "llama_7b_domains.sh", **choices, **extra)) == ()


@pytest.mark.full
@pytest.mark.parametrize("script", ["llama3_1.sh", "qwen2_5.sh"])
def test_scripts_with_choices(script: str, workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workplace)
    base = {"TP": "1", "PP": "1", "DO": "false", "PR": "bf16", "AC": "none"}
    variants = [
        ({}, True),
        ({"TP": "2"}, True),
        ({"PP": "4"}, True),
        ({"PP": "2", "TP": "2", "VP": "4", "DO": "true"}, True),
        ({"CP": "2", "TP": "2", "DO": "true"}, True),
        ({"PR": "fp16"}, True),
        ({"AC": "sel"}, True),
        ({"AC": "full"}, True),
        ({"PACKING": "true"}, True),
        ({"LOAD": "somewhere"}, True),
        ({"PR": "fp8"}, True),
        ({"AC": "offload"}, True),
        ({"OPTIMIZER_OFFLOAD": "static"}, True),
        ({"OPTIMIZER_OFFLOAD": "auto"}, True),
    ]
    for changes, is_built in variants:
        problems = refusals(
            *expand(workplace, script, *NULL_TOKENIZER, **base, **changes)
            if not set(changes) & set(base)
            else expand(workplace, script, *NULL_TOKENIZER, **{**base, **changes})
        )
        assert all(" is not supported yet" in problem for problem in problems), (changes, problems)
        assert bool(problems) != is_built, (changes, problems)


def test_the_tokenizer_of_pai_scripts_is_that_of_load(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workplace)
    for script, kind in (("llama3_1.sh", "LLama3Tokenizer"), ("qwen2_5.sh", "Qwen2Tokenizer")):
        arguments, world_size = expand(workplace, script, TP="1", PP="1", PR="bf16", LOAD="tokenizers/qwen2")
        tokenizer = resolve_arguments(arguments, world_size).config.tokenizer
        assert (tokenizer.tokenizer_type, tokenizer.tokenizer_model) == ("HuggingFaceTokenizer", "tokenizers/qwen2")
        assert tokenizer.patch_tokenizer_type == kind
        assert refusals(*expand(workplace, script, TP="1", PP="1", PR="bf16")) == (
            f"--patch-tokenizer-type {kind} uses the tokenizer of --load DIR; add --load DIR",
        )
