"""Wrong command lines end with status 2 and one line a problem; a training imports no extras it is not asked for."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.toy_run import toy_args
from tests.harness.training_run import REPOSITORY, launch_prefix, run_command
from tests.unit.config.command_lines import MINIMAL, SHAPE, TRAINING, write_data_set

ROOT = Path(__file__).parents[2]
ENTRY_SCRIPT = ROOT / "pretrain_gpt.py"

WATCH_TORCH = """
import runpy, sys
sys.argv = sys.argv[1:]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    if "torch" in sys.modules:
        print("torch was imported")
"""


def run(argv: list[str], world_size: int = 1, rank: int = 0) -> subprocess.CompletedProcess[str]:
    return run_in({"WORLD_SIZE": str(world_size), "RANK": str(rank), "LOCAL_RANK": str(rank)}, argv)


def run_in(environment: dict[str, str], argv: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", WATCH_TORCH, str(ENTRY_SCRIPT), *argv],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


WRONG = [
    ("--hiden-size 48", 1, "did you mean --hidden-size?"),
    ("--num-layers two", 1, "--num-layers two: an integer is expected"),
    ("--num-layers 0", 1, "--num-layers 0"),
    ("--hidden-size 50", 1, "is not divisible by --num-attention-heads 6"),
    ("--num-attention-heads 8 --tensor-model-parallel-size 4", 6, "world size 6 is not divisible by tensor(4)"),
    ("--tensor-model-parallel-size 4", 4, "is not divisible by --tensor-model-parallel-size 4"),
    ("--tensor-model-parallel-size 2 --group-query-attention --num-query-groups 3", 2, "--num-query-groups 3"),
    ("--group-query-attention --num-query-groups 4", 1, "--num-query-groups 4"),
    ("--tensor-model-parallel-size 2 --sequence-parallel --seq-length 41", 2, "--seq-length 41"),
    ("--max-position-embeddings 39", 1, "--max-position-embeddings 39"),
    ("--global-batch-size 3", 1, "nearest sizes that work: 2 or 4"),
    ("--rampup-batch-size 1 1", 1, "three numbers"),
    ("--lr 0", 1, "--lr is missing"),
    ("--min-lr 2", 1, "--min-lr 2.0 is greater than --lr 0.001"),
    ("--train-samples 64", 1, "exclude each other"),
    ("--fp16 --bf16", 1, "--fp16 and --bf16 exclude each other"),
    ("--lr-warmup-fraction .1 --lr-warmup-iters 2", 1, "exclude each other"),
    ("--lr-decay-style cosin", 1, "possible values are constant, linear, cosine"),
    ("--recompute-granularity full", 1, "needs --recompute-method"),
    ("--keep-last 5", 1, "without --save DIR"),
    ("--split 7,x", 1, "--split"),
    ("--tokenizer-type GPT2BPETokenizer --vocab-file absent.json --merge-file absent.txt", 1, "absent.json"),
    ("--tokenizer-type HuggingFaceTokenizer", 1, "--tokenizer-model is missing"),
    ("--fp8-format hybrid --kv-channels 8 --seq-length 32", 1, "--fp8-format hybrid: FP8 requires --bf16 or --fp16"),
    ("--bf16 --fp8-format hybrid --seq-length 28", 1, "needs a multiple of 16; use --seq-length 32"),
    ("--optimizer cpu_adam", 1, "--optimizer cpu_adam is not supported yet"),
    ("--use-precision-aware-optimizer --main-params-dtype fp16", 1, "use --bf16 or --main-params-dtype fp32"),
    ("--cpu-offloading", 1, "--cpu-offloading needs --cpu-offloading-num-layers"),
    ("--hidden-dropout 1.5", 1, "--hidden-dropout 1.5"),
    ("--seed -1", 1, "--seed -1"),
    ("--train-iters", 1, "--train-iters"),
]


@pytest.mark.default(1)
@pytest.mark.parametrize(
    ("flags", "world_size", "message"),
    # Another process each: every third by default.
    [pytest.param(*case, marks=[pytest.mark.long] * (number % 3 > 0)) for number, case in enumerate(WRONG)],
    ids=[flags for flags, _, _ in WRONG],
)
def test_wrong_flags(flags: str, world_size: int, message: str) -> None:
    done = run([*MINIMAL, *flags.split()], world_size)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    expected_lines = 2 if "absent.json" in flags else 1
    assert len(done.stderr.splitlines()) == expected_lines
    assert done.stdout == ""


@pytest.mark.default
def test_wrong_data_files(tmp_path: Path) -> None:
    argv = [word for word in MINIMAL if word != "--mock-data"]
    prefix = tmp_path / "text"
    missing = run([*argv, "--data-path", str(prefix)])
    assert (missing.returncode, len(missing.stderr.splitlines())) == (2, 1)
    assert f"{prefix}.idx does not exist" in missing.stderr
    write_data_set(prefix)
    (tmp_path / "text.bin").write_bytes(b"")
    truncated = run([*argv, "--data-path", str(prefix)])
    assert (truncated.returncode, len(truncated.stderr.splitlines())) == (2, 1)
    assert f"{prefix}.bin is truncated" in truncated.stderr
    write_data_set(prefix, lengths=(50,) * 8)
    empty = run([*argv, "--data-path", str(prefix), "--split", "969,30,1"])
    assert (empty.returncode, len(empty.stderr.splitlines())) == (2, 1)
    assert "leaves the validation set empty" in empty.stderr
    assert missing.stdout == truncated.stdout == empty.stdout == ""


def assert_refused_before_torch(done: subprocess.CompletedProcess[str], message: str) -> None:
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert message in line


def test_data_that_its_headers_do_not_give_away(tmp_path: Path) -> None:
    argv = [word for word in MINIMAL if word != "--mock-data"]
    argv += ["--data-path", str(tmp_path / "text"), "--split", "80,10,10"]
    write_data_set(tmp_path / "text", lengths=(3,) * 100)
    assert_refused_before_torch(
        run([*argv, "--split", "10,80,10"]), "too little train data: need 20 samples of 40 + 1 tokens, have 30 tokens"
    )
    write_data_set(tmp_path / "text", lengths=(30,) * 100)
    tokens = tmp_path / "text.bin"
    tokens.write_bytes(b"\x88\x01" * (tokens.stat().st_size // 2))
    assert_refused_before_torch(run(argv), "contains token id 392, but the vocabulary has")


def test_tokenizers_whose_files_are_not_theirs(tmp_path: Path) -> None:
    vocab, merges = tmp_path / "vocab.json", tmp_path / "merges.txt"
    vocab.write_text("not a vocabulary")
    merges.write_text("#version: 0.2\n")
    argv = [*SHAPE, *TRAINING, "--mock-data", "--vocab-file", str(vocab), "--merge-file", str(merges)]
    assert_refused_before_torch(run(argv), str(vocab))
    vocab.write_text('{"a": 0, "<|endoftext|>": 1}')
    assert_refused_before_torch(run(argv), "is not a byte-level vocabulary")


def test_ranks_under_torchrun_refuse_data_before_they_meet(tmp_path: Path) -> None:
    write_data_set(tmp_path / "text")
    argv = [word for word in MINIMAL if word != "--mock-data"]
    argv += ["--data-path", str(tmp_path / "text"), "--split", "10,80,10"]
    done = run_command([*launch_prefix(2), ENTRY_SCRIPT, *argv], env={"MEGATRON_DEVICE": "cpu"})
    output = done.stdout + done.stderr
    speakers = [line.partition(" too little ")[0] for line in output.splitlines() if " too little train data" in line]
    assert speakers == ["error:"], "every rank refuses, and the first alone says why"
    assert "using world size" not in output
    # torchrun may end the other rank before it has come as far as refusing.
    assert "exitcode  : 2" in output


@pytest.mark.parametrize("environment", [{"RANK": "x"}, {"RANK": "4", "WORLD_SIZE": "2"}, {"WORLD_SIZE": ""}])
def test_a_launch_that_cannot_be(environment: dict[str, str]) -> None:
    (name, text), *_ = environment.items()
    done = run_in(environment, MINIMAL)
    assert_refused_before_torch(done, f"{name} is {text if text.isdecimal() else repr(text)}")


@pytest.mark.default
def test_several_problems_are_printed_together() -> None:
    done = run([*MINIMAL, *["--hiden-size", "3", "--fp16", "--bf16", "--spec", "hybrid"]])
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 3


def test_other_ranks_end_with_status_2_in_silence() -> None:
    done = run([*MINIMAL, "--tensor-model-parallel-size", "4"], world_size=4, rank=3)
    assert done.returncode == 2
    assert done.stdout == done.stderr == ""


# Packages whose modules have another name.
MODULES = {"lm-eval": "lm_eval", "pyyaml": "yaml", "scikit-learn": "sklearn", "nvidia-ml-py": "pynvml"}
NEEDED = {"torch", "numpy", "safetensors", "regex"}
# torch imports these by itself, where it finds them.
OF_TORCH = {"triton", "zstandard"}


def modules_of_extras() -> set[str]:
    lines = [line for line in importlib.metadata.requires("megatron-gpt") or () if "extra ==" in line]
    packages = {re.split(r"[^\w-]", line, maxsplit=1)[0].lower() for line in lines}
    return {MODULES.get(name, name.replace("-", "_")) for name in packages} - NEEDED - OF_TORCH


@pytest.mark.long
def test_a_training_imports_no_extra(tmp_path: Path) -> None:
    extras = sorted(modules_of_extras())
    assert {"fastapi", "wandb", "matplotlib", "lm_eval"} <= set(extras)
    words = toy_args(tmp_path, "--train-iters 4 --eval-interval 2 --save-interval 2")
    program = (
        "import sys, pretrain_gpt\n"
        f"status = pretrain_gpt.main({words!r})\n"
        f"print('imported:', [name for name in {extras!r} if name in sys.modules])\n"
        "sys.exit(status)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "imported: []"
