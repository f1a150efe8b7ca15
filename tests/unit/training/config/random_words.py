"""Command lines of random flags with random, mostly extreme values."""

from __future__ import annotations

import random

from megatron.config.arguments import all_flags
from tests.unit.training.config.command_lines import MINIMAL

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
