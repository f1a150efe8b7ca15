"""What a run reads: its data, and the tokenizer that they were made with."""

from __future__ import annotations

import dataclasses

from megatron.core.config_base import NOT_NEGATIVE, POSITIVE, Config, flag
from megatron.core.tokenizers.build_tokenizer import TOKENIZER_TYPES
from megatron.core.tokenizers.patch_tokenizer import CODE_TOKENIZER_TYPES, PATCH_TOKENIZER_TYPES


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig(Config, role="run"):
    """Hold the data paths, the split and what becomes of document boundaries."""

    seq_length: int = flag(0, role="recipe", bounds=NOT_NEGATIVE, in_args=True)
    """Number of tokens of one sample."""
    data_path: tuple[str, ...] = flag((), nargs="+", metavar="[WEIGHT] PREFIX", in_args=True)
    """Data prefixes, or weight and prefix in turn; cut into the three sets by --split."""
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
    """Folder of the index cache; by default beside the data."""
    mmap_bin_files: bool = flag(True, negative="--no-mmap-bin-files")
    """Map the token files into memory. Off: read the token files with ordinary reads in place of a memory map."""
    num_workers: int = flag(2, bounds=NOT_NEGATIVE)
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
        choices=TOKENIZER_TYPES,
        not_built=(
            "BertWordPieceLowerCase",
            "BertWordPieceCase",
            "MultimodalTokenizer",
            "NullMultimodalTokenizer",
            "SFTTokenizer",
        ),
    )
    """Kind of tokenizer."""
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
    vocab_size: int | None = flag(None, bounds=POSITIVE)
    """Size of the vocabulary, for NullTokenizer; with any other tokenizer it must be the tokenizer's
    own."""
    vocab_extra_ids: int = flag(0, bounds=NOT_NEGATIVE)
    """Number of extra ids that are added to the vocabulary."""
    extra_vocab_size: int = flag(0, bounds=NOT_NEGATIVE, in_args=False)
    """Number of rows beyond the tokenizer's own vocabulary; with --patch-tokenizer-type, beyond the vocabulary without
    added tokens."""
    padded_vocab_size: int | None = flag(None, bounds=POSITIVE, in_args=False, excludes=("extra_vocab_size",))
    """Number of rows in all, in place of --extra-vocab-size."""
    tiktoken_pattern: str | None = flag(None, choices=("v1", "v2"))
    """Pattern that splits the text before tiktoken merges it."""
    tiktoken_num_special_tokens: int = flag(1000, bounds=NOT_NEGATIVE)
    """Number of special tokens that tiktoken's vocabulary leaves room for."""
    tiktoken_special_tokens: tuple[str, ...] = flag((), nargs="+", metavar="TOKEN", in_args=False)
    """Special tokens of tiktoken's vocabulary."""
