"""Configuration of a GPT data set, and the parsers of blends and splits on the command line."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.core.datasets.conversation_file import ConversationOptions
from megatron.core.datasets.fill_in_the_middle import FillInTheMiddle
from megatron.core.errors import ConfigurationError
from megatron.core.object_store import as_path, is_url, machine_cache

SPLIT_NAMES = ("train", "valid", "test")


@dataclass(frozen=True)
class Blend:
    """Data set prefixes and their weights. Without weights, each is read completely, in proportion to its size."""

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None = None


@dataclass(frozen=True)
class ValidationSet:
    """Additional validation set: its name, its data, and its number of samples (None: one epoch)."""

    name: str
    blend: Blend
    num_samples: int | None = None


@dataclass(frozen=True, kw_only=True)
class GPTDatasetConfig:
    """Configuration of the training, validation and test data of a run.

    Raises:
        ConfigurationError: values are invalid or contradict each other; the error lists every problem.
    """

    sequence_length: int
    """Tokens per sample, without the additional token that the last label needs."""

    random_seed: int = 1234
    """Seed of every shuffle. The random state of each data set and split starts from it."""

    blend: Blend | None = None
    """Data sets that ``split`` divides into training, validation and test data."""

    blend_per_split: tuple[Blend | None, Blend | None, Blend | None] | None = None
    """Separate data sets for training, validation and test, instead of ``blend`` and ``split``."""

    extra_valid: tuple[ValidationSet, ...] = ()
    """Additional validation sets, which use all sequences of their data sets."""

    split: str = "969,30,1"
    """Shares of each data set's sequences for training, validation and test."""

    mock: bool = False
    """Generate mock data instead of reading files."""

    path_to_cache: str | None = None
    """Folder of the index cache. None: ``cache/GPTDataset_indices`` in the folder of each data set."""

    mmap_bin_files: bool = True
    """Memory-map the token files instead of reading them."""

    mid_level_dataset_surplus: float = 0.005
    """Relative surplus of samples that each data set of a weighted blend is built with."""

    drop_last_partial_validation_sequence: bool = True
    """Drop the last validation sample if it is shorter than the others, instead of padding it."""

    reset_position_ids: bool = False
    """Restart position ids at 0 after each end-of-document token."""

    reset_attention_mask: bool = False
    """Mask attention between documents. Samples then have ``document_ids``."""

    eod_mask_loss: bool = False
    """Mask positions whose input is an end-of-document token out of the loss."""

    eod_token_id: int | None = None
    """The tokenizer's end-of-document token."""

    vocab_size: int | None = None
    """Vocabulary size that token ids are checked against. None disables the check."""

    conversations: ConversationOptions | None = None
    """Read conversations, with a loss on answers only, instead of text."""

    fill_in_the_middle: FillInTheMiddle | None = None
    """Fill-in-the-middle (FIM) transformation of some documents of each sample."""

    def __post_init__(self) -> None:
        problems = list(self._find_problems())
        if problems:
            raise ConfigurationError(problems)

    def index_folder(self, prefix: str) -> Path:
        """Return the folder for the sample indices of a data set."""
        if self.path_to_cache:
            return as_path(self.path_to_cache)
        if is_url(prefix):
            return machine_cache() / "GPTDataset_indices"
        parent = Path(prefix).parent
        # Tokenized JSONL is already in the index folder.
        return parent if parent.name == "GPTDataset_indices" else parent / "cache" / "GPTDataset_indices"

    def _find_problems(self) -> list[str]:
        problems = []
        if self.sequence_length < 1:
            problems.append(f"the sequence length is {self.sequence_length}; set --seq-length to 1 or more")
        if not 0 <= self.random_seed < 2**32:
            problems.append(f"the seed is {self.random_seed}; set --seed to a value from 0 to {2**32 - 1}")
        sources = [self.blend is not None, self.blend_per_split is not None, self.mock]
        if sum(sources) != 1:
            problems.append(
                f"{sum(sources)} data sources are set; pass only one of --data-path, --train-data-path (with "
                "--valid-data-path, --test-data-path) or --mock-data"
            )
        flags = {
            "--reset-position-ids": self.reset_position_ids,
            "--reset-attention-mask": self.reset_attention_mask,
            "--eod-mask-loss": self.eod_mask_loss,
        }
        if self.conversations is not None:
            # Conversations have boundaries without an end-of-document token.
            flags = {"--eod-mask-loss": self.eod_mask_loss}
        needing = [flag for flag, on in flags.items() if on]
        if needing and self.eod_token_id is None:
            problems.append(
                f"the tokenizer has no end-of-document token, which {', '.join(needing)} "
                f"{'needs' if len(needing) == 1 else 'need'}; omit {'it' if len(needing) == 1 else 'them'} or use a "
                "tokenizer that has one"
            )
        if self.blend is not None:
            try:
                parse_split(self.split)
            except ConfigurationError as error:
                problems.extend(error.problems)
        extra = [extra.blend for extra in self.extra_valid]
        for blend in (self.blend, *(self.blend_per_split or ()), *extra):
            problems.extend(_find_blend_problems(blend) if blend is not None else ())
        return problems


def parse_blend(items: Sequence[str]) -> Blend:
    """Parse ``prefix``, ``prefix prefix …`` or ``weight prefix weight prefix …``.

    Weights may be of any scale, such as token counts.

    Raises:
        ConfigurationError: there are no items, or only some prefixes have a weight.
    """
    if not items:
        raise ConfigurationError("the list of data paths is empty; pass prefixes, or alternating weights and prefixes")
    heads = items[0::2]
    numbers = [head for head in heads if _is_number(head)]
    if len(items) < 2 or not numbers:
        return Blend(tuple(items))
    if len(numbers) < len(heads) or len(items) % 2:
        stray = next((head for head in heads if not _is_number(head)), items[-1])
        raise ConfigurationError(
            f"the data paths mix entries with and without a weight: {stray!r} is not a weight; pass 'weight prefix "
            "weight prefix', or prefixes only"
        )
    return Blend(tuple(items[1::2]), tuple(float(head) for head in heads))


def parse_split(text: str) -> tuple[float, float, float]:
    """Parse ``949,50,1`` into the shares of training, validation and test, which sum to 1. Missing shares are 0.

    Raises:
        ConfigurationError: the text is not one to three non-negative numbers, or all of them are zero.
    """
    parts = [part for part in re.split(r"[,/\s]+", text.strip()) if part]
    if not 1 <= len(parts) <= len(SPLIT_NAMES) or not all(re.fullmatch(r"\d*\.?\d+|\d+\.", part) for part in parts):
        raise ConfigurationError(
            f"--split {text!r} cannot be parsed; use up to three numbers, such as --split 949,50,1"
        )
    weights = [float(part) for part in parts] + [0.0] * (len(SPLIT_NAMES) - len(parts))
    total = sum(weights)
    if total <= 0:
        raise ConfigurationError(f"--split {text!r} has a training share of 0; use numbers such as --split 949,50,1")
    train, valid, test = (weight / total for weight in weights)
    return train, valid, test


def split_boundaries(shares: Sequence[float], num_sequences: int) -> list[range | None]:
    """Divide the sequences of a data set. A share of 0 gives None, a share that rounds to zero an empty range."""
    bounds = list(itertools.accumulate(shares, initial=0.0))
    return [
        range(round(begin * num_sequences), round(end * num_sequences)) if end > begin else None
        for begin, end in itertools.pairwise(bounds)
    ]


def suggest_split(shares: Sequence[float], num_sequences: int) -> str | None:
    """Find the split closest to ``shares`` that gives every nonzero share at least one of ``num_sequences`` sequences.

    Returns the split in the format of ``--split``, or None if there are fewer sequences than nonzero shares.
    """
    counts = [max(1, round(share * num_sequences)) if share > 0 else 0 for share in shares]
    while sum(counts) > num_sequences and max(counts) > 1:
        counts[counts.index(max(counts))] -= 1
    if sum(counts) > num_sequences:
        return None
    counts[counts.index(max(counts))] += num_sequences - sum(counts)
    return ",".join(map(str, counts))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _find_blend_problems(blend: Blend) -> list[str]:
    if blend.weights is None:
        return [] if blend.prefixes else ["a blend has no data sets; pass at least one prefix"]
    if len(blend.weights) != len(blend.prefixes):
        return [
            (
                f"a blend has {len(blend.prefixes)} data sets and {len(blend.weights)} weights; pass one weight "
                "per data set"
            )
        ]
    return [
        f"the weight of {prefix} is {weight:g}; use a positive weight, or omit the data set"
        for prefix, weight in zip(blend.prefixes, blend.weights, strict=True)
        if not 0 < weight < float("inf")
    ]
