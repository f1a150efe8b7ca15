"""Data and tokenizer configuration, and the files that list data prefixes and weights."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path

from megatron.config.training_config import ValidationConfig
from megatron.core.config_base import FRACTION, NOT_NEGATIVE, POSITIVE, Config, flag
from megatron.core.datasets.gpt_dataset_config import ValidationSet, parse_blend
from megatron.core.errors import ConfigurationError
from megatron.core.safe_io import MAX_TEXT_BYTES, parse_json
from megatron.core.tokenizers.build_tokenizer import TOKENIZER_TYPES
from megatron.core.tokenizers.huggingface_tokenizer import CODE_TOKENIZER_TYPES, PATCH_TOKENIZER_TYPES

RAW_DATASETS = ("LLama-SFT-Raw", "LLama-SFT", "JSON-SFT")
"""What Pai-Megatron-Patch calls conversations in jsonl."""
_SFT_TOKENIZER = "SFTTokenizer"
INDEXED_DATASETS = ("MMAP", "LLama-Pretrain-Idxmap", "LLama-SFT-Idxmap")


@dataclasses.dataclass(frozen=True, kw_only=True)
class FineTuningConfig(Config, role="run"):
    """Hold whether conversations are learned, and how they become samples."""

    sft: bool = flag(False, in_args=True)
    """Learn the answers of conversations: jsonl, or what tools/preprocess_data.py --sft makes of it. The loss is the
    mean over all tokens of answers in a global batch (as with --calculate-per-token-loss)."""
    train_mode: str = flag("pretrain", choices=("pretrain", "finetune"))
    """What Pai-Megatron-Patch calls --sft: finetune."""
    dataset: str | None = flag(
        None, choices=(*INDEXED_DATASETS, *RAW_DATASETS), not_built=("LLama-Pretrain-Raw", "ChatGLM-Pretrain-Raw")
    )
    """What the data paths name, as Pai-Megatron-Patch calls it: the three that hold SFT without Idxmap are jsonl, one
    conversation a sample unless --reset-position-ids is given; the others are token files."""
    chat_template: str | None = flag(None, metavar="FILE|NAME", where=("sft", True))
    """Chat template that makes text of jsonl: a Jinja file, a name among the tokenizer's templates, or chatml, plain
    (the contents, each answer ended by the end-of-document token) or identity (the contents); by default the
    tokenizer's own."""
    sft_tokenizer_prompt_format: str = flag(
        "default",
        choices=("default", "identity"),
        not_built=("nemotron-h-aligned", "nemotron-nano-v2"),
        where=("sft", True),
    )
    """What Megatron calls --chat-template: the tokenizer's own (default), or identity."""
    sft_packing: bool = flag(True, negative="--no-sft-packing", where=("sft", True))
    """Put as many conversations as fit into a sample, each with positions and attention of its own. Off: make each
    conversation a sample, padded at its end."""
    max_padding_length: int | None = flag(None, bounds=POSITIVE, most=2**31 - 1, where=("sft", True))
    """Number of tokens at which a conversation is cut; by default --seq-length."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FillInTheMiddleConfig(Config, role="run"):
    """Hold which documents become tasks of filling in their middle, and the tokens that say so."""

    fim_data: bool = False
    """Same as --fim-rate 0.5."""
    fim_rate: float = flag(0.0, bounds=FRACTION)
    """Share of the documents of a sample that are rearranged, so that their middle comes last."""
    fim_spm_rate: float = flag(0.5, bounds=FRACTION, needs="fim_rate")
    """Share of these that begin with the suffix in place of the prefix."""
    fim_split_sample: str | None = flag(None, metavar="TOKEN", needs="fim_rate")
    """Token that cuts a document into fragments, which are rearranged one by one."""
    fim_fragment_rate: float = flag(0.5, bounds=FRACTION, needs="fim_split_sample")
    """Share of the fragments of a chosen document that are rearranged."""
    fim_no_prefix: str | None = flag(None, metavar="TEXT", needs="fim_rate")
    """Leave documents as they are that begin with this text."""
    fim_prefix_token: str = flag("<fim_prefix>", metavar="TOKEN", needs="fim_rate")
    """Token that begins a prefix."""
    fim_middle_token: str = flag("<fim_middle>", metavar="TOKEN", needs="fim_rate")
    """Token that begins a middle."""
    fim_suffix_token: str = flag("<fim_suffix>", metavar="TOKEN", needs="fim_rate")
    """Token that begins a suffix."""
    fim_pad_token: str | None = flag(None, metavar="TOKEN", needs="fim_rate")
    """Token that fills a sample which became shorter, left out of the loss; by default token 0."""
    fim_eod_token: str | None = flag(None, metavar="TOKEN", needs="fim_rate")
    """Token that ends a document; by default the tokenizer's own."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig(FineTuningConfig, FillInTheMiddleConfig, role="run"):
    """Hold the data paths, the split and what becomes of document boundaries."""

    seq_length: int = flag(0, role="recipe", bounds=NOT_NEGATIVE, most=2**31 - 1, in_args=True)
    """Number of tokens of one sample; by default --max-position-embeddings, where it is given."""
    data_path: tuple[str, ...] = flag((), nargs="+", metavar="[WEIGHT] PREFIX", in_args=True)
    """Data prefixes, also s3://, gs:// or az://, or weight and prefix in turn; cut into the three sets by --split."""
    train_data_path: tuple[str, ...] = flag((), nargs="+", metavar="[WEIGHT] PREFIX")
    """Data of the training set alone; excludes --data-path and --split."""
    valid_data_path: tuple[str, ...] = flag((), nargs="+", metavar="[WEIGHT] PREFIX")
    """Data of the validation set alone; excludes --data-path and --split."""
    test_data_path: tuple[str, ...] = flag((), nargs="+", metavar="[WEIGHT] PREFIX")
    """Data of the test set alone; excludes --data-path and --split."""
    data_args_path: str | None = flag(None, metavar="FILE")
    """File that holds what --data-path would."""
    per_split_data_args_path: str | None = flag(None, metavar="FILE")
    """JSON file with the lists train, valid and test, each as in --train-data-path."""
    split: str | None = flag(None, in_args=True)
    """Shares of the training, validation and test set, such as 969,30,1 (which is the default)."""
    mock_data: bool = False
    """Train on made-up data."""
    data_cache_path: str | None = flag(None, metavar="DIR")
    """Folder of the index cache, also s3://, gs:// or az://; by default beside the data."""
    mmap_bin_files: bool = flag(True, negative="--no-mmap-bin-files")
    """Map the token files into memory. Off: read the token files with ordinary reads in place of a memory map."""
    num_workers: int = flag(2, bounds=NOT_NEGATIVE, most=2**16)
    """Number of threads that read micro-batches ahead, on the first rank of each tensor-parallel group; 0: none.
    More than one may read a data set of your own at the same time."""
    dataloader_type: str = flag("single", choices=("single", "cyclic", "external"), in_args=True)
    """Order of samples: as the data set has them (single), a fresh permutation an epoch (cyclic), or
    the caller's."""
    reset_position_ids: bool = flag(False, in_args=True)
    """Begin the positions anew after each end-of-document token."""
    reset_attention_mask: bool = flag(False, in_args=True)
    """Let no token attend across an end-of-document token."""
    eod_mask_loss: bool = flag(False, in_args=True)
    """Leave the end-of-document token's loss out."""

    def __post_init__(self) -> None:
        """Fill in the values that follow from others."""
        if self.train_mode == "finetune":
            object.__setattr__(self, "sft", True)
        if self.fim_data and not self.fim_rate:
            object.__setattr__(self, "fim_rate", 0.5)

    @property
    def has_padding(self) -> bool:
        """Return whether training samples may contain padding (SFT, external data)."""
        return self.sft or self.dataloader_type == "external"

    @property
    def has_data_per_split(self) -> bool:
        """Tell whether the three sets come from lists of their own."""
        return bool(
            self.train_data_path or self.valid_data_path or self.test_data_path or self.per_split_data_args_path
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenizerConfig(Config, role="run", in_args=True):
    """Hold the tokenizer's kind and its files."""

    tokenizer_type: str = flag(
        "GPT2BPETokenizer",
        choices=(*TOKENIZER_TYPES, _SFT_TOKENIZER),
        not_built=(
            "BertWordPieceLowerCase",
            "BertWordPieceCase",
            "MultimodalTokenizer",
            "NullMultimodalTokenizer",
        ),
    )
    """Kind of tokenizer; SFTTokenizer is what Megatron calls HuggingFaceTokenizer with --sft."""
    vocab_file: str | None = flag(None, metavar="FILE")
    """Vocabulary file."""
    merge_file: str | None = flag(None, metavar="FILE")
    """File of the byte-pair merges."""
    patch_tokenizer_type: str | None = flag(
        None, choices=PATCH_TOKENIZER_TYPES, not_built=CODE_TOKENIZER_TYPES, in_args=False
    )
    """Kind of tokenizer as Pai-Megatron-Patch names it: the one in the folder of --load, unless --tokenizer-type is
    given, with a vocabulary of the size that it has there."""
    tokenizer_model: str | None = flag(None, metavar="PATH")
    """Model file, or folder with tokenizer.json."""
    vocab_size: int | None = flag(None, bounds=POSITIVE, most=2**31 - 2)
    """Size of the vocabulary, for NullTokenizer; with any other tokenizer it must be the tokenizer's
    own."""
    vocab_extra_ids: int = flag(0, bounds=NOT_NEGATIVE, most=2**24)
    """Number of extra ids that are added to the vocabulary."""
    extra_vocab_size: int = flag(0, bounds=NOT_NEGATIVE, most=2**24, in_args=False)
    """Number of rows beyond the tokenizer's own vocabulary; with --patch-tokenizer-type, beyond the vocabulary without
    added tokens."""
    padded_vocab_size: int | None = flag(
        None, bounds=POSITIVE, most=2**31 - 1, in_args=False, excludes=("extra_vocab_size",)
    )
    """Number of rows in all, in place of --extra-vocab-size."""
    tiktoken_pattern: str | None = flag(None, choices=("v1", "v2"))
    """Pattern that splits the text before tiktoken merges it."""
    tiktoken_num_special_tokens: int = flag(1000, bounds=NOT_NEGATIVE, most=2**20)
    """Number of special tokens that tiktoken's vocabulary leaves room for."""
    tiktoken_special_tokens: tuple[str, ...] = flag((), nargs="+", metavar="TOKEN", in_args=False)
    """Special tokens of tiktoken's vocabulary."""

    def __post_init__(self) -> None:
        """Know a tokenizer by one name."""
        if self.tokenizer_type == _SFT_TOKENIZER:
            object.__setattr__(self, "tokenizer_type", "HuggingFaceTokenizer")


PER_SPLIT_KEYS = ("train", "valid", "test")
RESERVED_NAMES = ("train", "validation", "valid", "test")
"""What evaluations are called without being named."""

_DATALIST = "--extra-valid-datalist"


def read_data_list(path: str, flag: str) -> tuple[str, ...]:
    """Read the words of a list file (weights and prefixes, on any number of lines).

    Raises:
        ConfigurationError: if the file cannot be read or is empty.
    """
    words = tuple(_read_text(path, flag).split())
    if not words:
        raise ConfigurationError(f"{flag} {path}: the file is empty; write data prefixes, or weight and prefix")
    return words


def read_per_split_lists(path: str, flag: str) -> dict[str, tuple[str, ...]]:
    """Read a JSON object with the lists train, valid and test.

    Raises:
        ConfigurationError: if the file is not such an object.
    """
    try:
        lists = parse_json(_read_text(path, flag))
    except ValueError as error:
        raise ConfigurationError(f"{flag} {path}: not JSON ({error})") from error
    expected = "an object with the lists train, valid and test is expected"
    if not isinstance(lists, dict) or not set(lists) <= set(PER_SPLIT_KEYS):
        raise ConfigurationError(f"{flag} {path}: {expected}")
    if not all(isinstance(words, list) or words is None for words in lists.values()):
        raise ConfigurationError(f"{flag} {path}: {expected}")
    return {key: tuple(str(word) for word in lists.get(key) or ()) for key in PER_SPLIT_KEYS}


def extra_validation_sets(validation: ValidationConfig) -> tuple[ValidationSet, ...]:
    """Return the validation sets of ``--extra-valid-datalist``, by name; without a number, or in full, all of each.

    A value that is no file but the prefix of a data set stands for itself. A set without a name is called after its
    list.

    Raises:
        ConfigurationError: a list cannot be used, or the flags do not fit together.
    """
    lists = validation.extra_valid_datalist
    samples, names = validation.extra_valid_data_samples, validation.extra_valid_data_names
    problems = list(_find_misfits(lists, samples, names))
    if problems:
        raise ConfigurationError(problems)
    names = names or tuple(Path(path).name for path in lists)
    numbers = [None] * len(lists) if validation.full_validation or not samples else list(samples)
    sets = []
    for path, name, number in zip(lists, names, numbers):
        is_prefix = Path(path).suffix == ".jsonl" or (not os.path.exists(path) and os.path.exists(f"{path}.idx"))
        try:
            words = (path,) if is_prefix else read_data_list(path, _DATALIST)
        except ConfigurationError as error:
            problems.extend(error.problems)
            continue
        try:
            sets.append(ValidationSet(name, parse_blend(words), number))
        except ConfigurationError as error:
            problems.extend(f"{_DATALIST} {path}: {problem}" for problem in error.problems)
    if problems:
        raise ConfigurationError(problems)
    return tuple(sets)


def _find_misfits(lists: tuple[str, ...], samples: tuple[int, ...], names: tuple[str, ...]) -> Iterator[str]:
    for flag_name, values in (("--extra-valid-data-samples", samples), ("--extra-valid-data-names", names)):
        if values and len(values) != len(lists):
            yield (
                f"{flag_name} is given {len(values)} times and {_DATALIST} {len(lists)} times; give both once for each "
                f"validation set, or leave {flag_name} out"
            )
    for number in samples:
        if number < 1:
            yield f"--extra-valid-data-samples {number}: give 1 or more, or leave the validation set out"
    called = names or tuple(Path(path).name for path in lists)
    for name in dict.fromkeys(called):
        if name in RESERVED_NAMES or not name:
            yield f"--extra-valid-data-names {name!r} is taken; give the validation set another name"
        elif called.count(name) > 1:
            yield f"two validation sets are called {name}; tell them apart with --extra-valid-data-names"


def _read_text(path: str, flag: str) -> str:
    try:
        # Not only of a file: the shell's <(...) is a pipe.
        with open(path, "rb") as file:
            content = file.read(MAX_TEXT_BYTES + 1)
        if len(content) > MAX_TEXT_BYTES:
            raise ConfigurationError(
                f"{flag} {path}: it has more than {MAX_TEXT_BYTES} bytes; give a list of data sets"
            )
        return content.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{flag} {path}: the file cannot be read ({error})") from error
