"""The command that is attacked: a user's, or a small one, with folders of its own for what it writes."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.core.errors import ConfigurationError
from megatron.training.gpt import training_script
from megatron.verification.faults import spoiled_script

MOST_DATA_BYTES = 2**30
_SMALL_RUN = """
    --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64
    --tokenizer-type NullTokenizer --vocab-size 255 --init-method-std 0.06 --seed 1234 --distributed-backend gloo
    --micro-batch-size 2 --global-batch-size 4 --lr 3e-3 --split 1,0,0 --eval-iters 0
    --log-interval 1 --save-interval 5 --keep-last 3 --hang-report-seconds 5
"""
_SMALL_DOCUMENTS, _SMALL_DOCUMENT_TOKENS = 400, 100


@dataclass(frozen=True)
class AttackedCommand:
    """Hold the words of a training command that takes more of its flags at its end."""

    words: tuple[str, ...]

    def in_folder(self, folder: Path) -> list[str]:
        """Return the command with ``--save``, ``--load`` and the metrics file in a folder; the last value counts."""
        save = str(folder / "checkpoints")
        return [*self.words, "--save", save, "--load", save, "--metrics-jsonl", str(folder / "metrics.jsonl")]

    def spoilable(self) -> AttackedCommand:
        """Return the command with its script run by `spoiled_script`.

        Raises:
            ConfigurationError: no word of it is a script.
        """
        for place, word in enumerate(self.words):
            if word.endswith(".py") and Path(word).is_file():
                words = (*self.words[:place], spoiled_script.__file__, *self.words[place:])
                return AttackedCommand(words)
        raise ConfigurationError(
            "--corrupt weight and --corrupt gradient need a command with a Python script in it (pretrain_gpt.py, "
            f"say), and none of these words is one: {' '.join(self.words)}"
        )

    def with_own_data(self, folder: Path) -> tuple[AttackedCommand, tuple[Path, ...]]:
        """Return the command on copies of its data in a folder, and the copies' files of tokens.

        Raises:
            ConfigurationError: it has no ``--data-path``, or too much data to copy.
        """
        start = self.words.index("--data-path") + 1 if "--data-path" in self.words else len(self.words)
        words = list(self.words)
        copies: list[Path] = []
        for place in range(start, len(words)):
            if words[place].startswith("--"):
                break
            source = Path(f"{words[place]}.bin")
            if not source.is_file():  # the weight of a blend
                continue
            if source.stat().st_size > MOST_DATA_BYTES:
                raise ConfigurationError(
                    f"--corrupt sample works on a copy, and {source} has {source.stat().st_size} bytes, more than "
                    f"{MOST_DATA_BYTES}; give the command less data"
                )
            folder.mkdir(parents=True, exist_ok=True)
            words[place] = str(folder / f"{len(copies)}")
            shutil.copyfile(source, f"{words[place]}.bin")
            shutil.copyfile(source.with_suffix(".idx"), f"{words[place]}.idx")
            copies.append(Path(f"{words[place]}.bin"))
        if not copies:
            raise ConfigurationError(
                "--corrupt sample needs a command with --data-path PREFIX, whose PREFIX.bin it copies"
            )
        return AttackedCommand(tuple(words)), tuple(copies)


def small_command(folder: Path, num_processes: int, iterations: int, flags: Sequence[str]) -> AttackedCommand:
    """Return a training of a small model on made-up data, which is written to a folder.

    Raises:
        OSError: the data cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    prefix = folder / "made_up"
    generator = np.random.default_rng(1)
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        for _ in range(_SMALL_DOCUMENTS):
            builder.add_document(generator.integers(0, 255, _SMALL_DOCUMENT_TOKENS))
        builder.finalize()
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(num_processes)]
    words = [sys.executable, *(launcher if num_processes > 1 else ()), str(training_script()), *_SMALL_RUN.split()]
    words += ["--train-iters", str(iterations), "--lr-decay-iters", str(iterations), "--data-path", str(prefix)]
    return AttackedCommand((*words, "--data-cache-path", str(folder / "cache"), *flags))
