"""No command line, however extreme, ends in anything but a run or one line a problem, soon and in little memory."""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.config.arguments import all_flags, resolve_arguments
from megatron.core.errors import ConfigurationError
from megatron.training.exit_reason import one_line
from tests.harness.bounded import bad_cases
from tests.unit.config.command_lines import MINIMAL

_NUMBERS = (
    *("0", "1", "2", "3", "4", "7", "8", "16", "64", "128", "1000", "65536", "1000000", "16777216", "-1", "-2"),
    *(str(2**power + offset) for power in (31, 32, 40, 53, 62, 63, 64, 128) for offset in (-1, 0, 1)),
    *("-9223372036854775808", "9" * 18, "1" + "0" * 18, "9" * 400, "9" * 5000, "1_000", "٣", "+5", " 5", "0x10"),
    *(
        "0.5",
        "0.0",
        "-0.0",
        "1.0",
        "0.1",
        "1e-320",
        "5e-324",
        "1e308",
        "1.8e308",
        "1e400",
        "nan",
        "inf",
        "-inf",
        "1e18",
    ),
    *("1e5", "1e1000000000", "500k", "1,000"),
)
_WORDS = (
    *("", " ", "a", "-", "--", "=", "x" * 500, "/" + "x" * 500, "d/" * 3000, "\udcff", "é\u202e", "\n", "%s%d{0}", "~"),
    *("/", ".", "..", "/dev/null", "/dev/zero", "/proc/self/mem", "/dev/full", "/etc/passwd", "/root/x", "a\tb"),
    *("1 2 3", "1,2,3", "[1]*100000000", "[[1]*100000]*100000", "(" * 5000, "t*1000000000", "Et*4L", "E(t|)*99999L"),
    *("(((t*99)*99)*99)*99", "0:16 2.4B:320", "0:" + "9" * 18, "99999T:1", "1:1", "64,64", "(0,0)", "128,0", "-1,-1"),
    *("1" * 300 + ":" + "1" * 300, "969,30,1", "1e400,1", "nan,nan", "0,0,0", "1" * 400 + ",1", "*", "model.layers"),
)


def random_command_line(number: int, num_flags: int = 12) -> tuple[list[str], int]:
    """Return the words of a command line and the number of its processes, both drawn by its number."""
    draw = random.Random(f"command line {number}")
    flags = sorted(all_flags())
    words = list(MINIMAL) if draw.random() < 0.8 else []
    for _ in range(draw.randint(1, num_flags)):
        words.append(draw.choice(flags))
        kind = draw.random()
        if kind < 0.6:
            words.append(draw.choice(_NUMBERS))
        elif kind < 0.85:
            words += draw.choices(_WORDS if draw.random() < 0.7 else _NUMBERS, k=draw.randint(1, 3))
        elif kind < 0.9:
            words[-1] += "=" + draw.choice(_NUMBERS)
    if draw.random() < 0.1:
        draw.shuffle(words)
    return words, draw.choice((1, 2, 3, 8, 1000, 2**16))


ROOT = Path(__file__).parents[3]
TOO_LONG = "x" * 500
# Each of these once took gigabytes, a minute or a traceback.
EXHAUSTING = {
    "--num-layers 2147483647": "--num-layers 2147483647: a number of at most 100000 is expected",
    "--num-layers 100000000000000000000000": "--num-layers 1e+23: a number of at most 100000 is expected",
    "--group-query-attention --num-query-groups 9223372036854775807": "--num-query-groups 9223372036854775807: a",
    "--num-attention-heads 1000000007": "--num-attention-heads 1000000007: a number of at most 16777216 is expected",
    "--tensor-model-parallel-size 9223372036854775807": "--tensor-model-parallel-size 9223372036854775807: a number",
    "--pipeline-model-parallel-size 1000000000": "--pipeline-model-parallel-size 1000000000: a number",
    "--num-layers 100000 --hidden-size 16777216 --num-attention-heads 16777216 --ffn-hidden-size 16777216 "
    "--kv-channels 1": "1.7e+20 on each of tensor(1) x pipeline(1) ranks; at most 1e+13 are supported",
    "--seq-length 2147483647 --micro-batch-size 16777216": "at most 1e+13 are supported; lower one of them",
    "--train-iters 9223372036854775807 --global-batch-size 8": "are more samples than 9223372036854775807",
    "--global-batch-size 2147483646": "makes 1073741823 micro-batches of --micro-batch-size 2",
    "--rampup-batch-size 2 2 100 --micro-batch-size 1 --global-batch-size 1000000": "has 499999 sizes",
    "--rampup-batch-size 1 2000000000 9 --global-batch-size 2147483646": "not a multiple of the increment 2000000000",
    "--data-args-path /dev/zero": "--data-args-path /dev/zero: it has more than 268435456 bytes",
    f"--metrics-jsonl {TOO_LONG}": "…: a file name of 500 bytes; file systems allow at most 255",
    f"--save a/{TOO_LONG}": "…: a file name of 500 bytes; file systems allow at most 255",
    f"--load {TOO_LONG}": "…: a file name of 500 bytes; file systems allow at most 255",
    f"--data-cache-path {'d/' * 3000}": "a path of 3000 bytes; use a path of at most 3800 bytes",
}


def answer(number: int) -> None:
    """Resolve a random command line; refusals are fine that fit on a line each."""
    words, world_size = random_command_line(number)
    problems: tuple[str, ...] = ("none",)
    with contextlib.suppress(SystemExit):  # of --help
        try:
            resolve_arguments(words, world_size)
        except ConfigurationError as error:
            problems = error.problems
    assert problems
    assert all(problem and "\n" not in one_line(problem) for problem in problems)


def test_values_that_would_exhaust_memory_or_time_are_refused_before() -> None:
    def refuse(number: int) -> None:
        text, expected = list(EXHAUSTING.items())[number]
        with pytest.raises(ConfigurationError) as caught:
            resolve_arguments([*MINIMAL, *text.split()], world_size=1)
        assert any(expected in problem for problem in caught.value.problems), caught.value.problems

    assert bad_cases(refuse, len(EXHAUSTING)) == []


def test_the_largest_models_and_clusters_are_taken() -> None:
    def resolve(number: int) -> None:
        # 1.1e14 parameters over 2^15 ranks, 100,000 layers, and "never" as an interval.
        flags = "--num-layers 512 --hidden-size 131072 --num-attention-heads 1024 --seq-length 16777216 "
        flags += "--tensor-model-parallel-size 64 --pipeline-model-parallel-size 512 --context-parallel-size 4 "
        flags += "--global-batch-size 1048576 --save-interval 9223372036854775807 --train-iters 1000000000"
        deep = "--num-layers 100000 --hidden-size 64 --num-attention-heads 8 --rampup-batch-size 2 2 9 "
        deep += "--global-batch-size 65536"
        resolve_arguments([*MINIMAL, *(flags, deep)[number].split()], world_size=(2**18, 1)[number])

    assert bad_cases(resolve, 2) == []


@pytest.mark.full
def test_random_command_lines_are_answered() -> None:
    assert bad_cases(answer, 200) == []


@pytest.mark.long
def test_ten_thousand_random_command_lines_are_answered() -> None:
    assert bad_cases(answer, 10_000) == []


@pytest.mark.long
def test_random_commands_end_with_a_status(tmp_path: Path) -> None:
    for number in range(200):
        words, _ = random_command_line(number)
        command = [sys.executable, str(ROOT / "pretrain_gpt.py"), *words, "--print-config"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=60)
        assert done.returncode in (0, 2), (number, words, done.stderr[-2000:])
        assert b"Traceback" not in done.stderr, (number, words, done.stderr[-2000:])
        if done.returncode == 2:
            assert all(line.startswith(b"error: ") for line in done.stderr.splitlines()), (number, words, done.stderr)
