"""The choices that users make by name in `llama3_1.sh` and `qwen2_5.sh`, and the command line that they come to."""

from __future__ import annotations

import dataclasses
import itertools
import os
import subprocess
from pathlib import Path

SCRIPTS = Path(__file__).with_name("user_scripts")
SMALL = """
    --num-layers 4 --hidden-size 64 --num-attention-heads 8 --ffn-hidden-size 96 --seq-length 64
    --max-position-embeddings 64 --train-iters 2 --lr-decay-iters 2 --lr-warmup-iters 0 --global-batch-size 4 --lr 1e-3
    --eval-iters 0 --num-workers 0 --initial-loss-scale 4096 --split 100,0,0 --cpu-matmul mkl
"""
"""Given at the end of every script: two iterations of a small model."""
_VALUES = {
    "script": ("llama3_1", "qwen2_5"),
    "PR": ("fp16", "bf16", "fp8"),
    "AC": ("none", "sel", "full", "offload"),
    "TP": ("1", "2"),
    "PP": ("1", "2"),
    "CP": ("1", "2"),
    "VP": ("", "1"),
    "OPTIMIZER_OFFLOAD": ("false", "static", "auto"),
    "PACKING": ("false", "true"),
}
_OF_PRECISION = ("--fp16", "--apply-query-key-layer-scaling", "--bf16")


@dataclasses.dataclass(frozen=True)
class Choices:
    """Hold one script and one value of each of its choices."""

    script: str
    PR: str
    AC: str
    TP: str
    PP: str
    CP: str
    VP: str
    OPTIMIZER_OFFLOAD: str
    PACKING: str

    def __str__(self) -> str:
        """Return the values that are not empty, for the name of a test."""
        return "-".join(f"{name}{value}" for name, value in dataclasses.asdict(self).items() if value)

    @property
    def world_size(self) -> int:
        """Return the number of processes of one copy of the model."""
        return int(self.TP) * int(self.PP) * int(self.CP)

    @property
    def on_one_process(self) -> Choices:
        """Return the choices that compute the same on one process, without what saves memory."""
        return dataclasses.replace(self, TP="1", PP="1", CP="1", VP="", AC="none", OPTIMIZER_OFFLOAD="false")

    def expanded(self, folder: Path, data: Path, load: Path) -> list[str]:
        """Return the arguments of ``pretrain_gpt.py`` that the script comes to, with a small model at the end."""
        choices = {name: value for name, value in dataclasses.asdict(self).items() if name != "script"}
        environment = choices | {
            "LAUNCHER": "printf %s\\n",  # one word a line
            "OUTPUT": str(folder),
            "DATA_PATH": str(data),
            "LOAD": str(load),
            "MODEL_SIZE": {"llama3_1": "8B", "qwen2_5": "14B"}[self.script],
        }
        command = ["bash", str(SCRIPTS / f"{self.script}.sh"), *SMALL.split()]
        done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=True)
        entry, *words = done.stdout.splitlines()
        assert entry == "pretrain_gpt.py"
        return words


def all_choices() -> list[Choices]:
    """Return every combination."""
    return [Choices(*values) for values in itertools.product(*_VALUES.values())]


def in_float32(words: list[str]) -> list[str]:
    """Return a command line without the flags of its precision."""
    return [word for word in words if word not in _OF_PRECISION]
