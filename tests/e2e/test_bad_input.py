"""Wrong command lines end with status 2 and one line a problem, without a traceback and without torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.training.command_lines import MINIMAL, write_data_set

ROOT = Path(__file__).parents[2]
ENTRY_SCRIPT = ROOT / "pretrain_gpt.py"

WITHOUT_ENTRY_SCRIPT = """
import os, sys
from megatron.training.arguments import parse_arguments_or_exit
parse_arguments_or_exit(sys.argv[1:], int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0")))
"""

WATCH_TORCH = """
import runpy, sys
sys.argv = sys.argv[1:]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    print("torch" in sys.modules)
"""


def run(argv: list[str], world_size: int = 1, rank: int = 0) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "WORLD_SIZE": str(world_size), "RANK": str(rank), "LOCAL_RANK": str(rank)}
    program = [str(ENTRY_SCRIPT)] if ENTRY_SCRIPT.is_file() else ["-c", WITHOUT_ENTRY_SCRIPT]
    return subprocess.run(
        [sys.executable, *program, *argv], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60
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
    ("--save-interval 5", 1, "without --save DIR"),
    ("--split 7,x", 1, "--split"),
    ("--tokenizer-type GPT2BPETokenizer --vocab-file absent.json --merge-file absent.txt", 1, "absent.json"),
    ("--tokenizer-type HuggingFaceTokenizer", 1, "--tokenizer-model is missing"),
    ("--fp8-format hybrid", 1, "--fp8-format hybrid is not supported yet"),
    ("--optimizer hybridadam", 1, "--optimizer hybridadam is not supported yet"),
    ("--cpu-offloading", 1, "--cpu-offloading is not supported yet"),
    ("--hidden-dropout 1.5", 1, "--hidden-dropout 1.5"),
    ("--seed -1", 1, "--seed -1"),
    ("--train-iters", 1, "--train-iters"),
]


@pytest.mark.parametrize(("flags", "world_size", "message"), WRONG, ids=[flags for flags, _, _ in WRONG])
def test_wrong_flags(flags: str, world_size: int, message: str) -> None:
    done = run([*MINIMAL, *flags.split()], world_size)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    expected_lines = 2 if "absent.json" in flags else 1
    assert len(done.stderr.splitlines()) == expected_lines
    assert done.stdout == ""


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
    assert "is cut short" in truncated.stderr
    write_data_set(prefix, lengths=(50,) * 8)
    empty = run([*argv, "--data-path", str(prefix), "--split", "969,30,1"])
    assert (empty.returncode, len(empty.stderr.splitlines())) == (2, 1)
    assert "leaves the validation set empty" in empty.stderr


def test_several_problems_are_printed_together() -> None:
    done = run([*MINIMAL, *["--hiden-size", "3", "--fp16", "--bf16", "--fp8-format", "hybrid"]])
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 3


def test_other_ranks_end_with_status_2_in_silence() -> None:
    done = run([*MINIMAL, "--tensor-model-parallel-size", "4"], world_size=4, rank=3)
    assert done.returncode == 2
    assert done.stdout == done.stderr == ""


@pytest.mark.skipif(not ENTRY_SCRIPT.is_file(), reason="the entry script does not exist yet")
def test_torch_is_not_imported_to_refuse_a_command_line() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WATCH_TORCH, str(ENTRY_SCRIPT), *MINIMAL, "--lr", "0"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert done.stdout == "False\n"
