"""Which data a run reads and how."""

from __future__ import annotations

import dataclasses

from megatron.core.config_base import flag


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Hold the data paths, the split and what becomes of document boundaries."""

    seq_length: int = 0
    """Number of tokens of one sample."""
    data_path: tuple[str, ...] = flag((), nargs="+", metavar="[WEIGHT] PREFIX")
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
    split: str | None = None
    """Shares of the training, validation and test set, such as 969,30,1 (which is the default)."""
    mock_data: bool = False
    """Train on made-up data."""
    data_cache_path: str | None = flag(None, metavar="DIR")
    """Folder of the index cache; by default beside the data."""
    mmap_bin_files: bool = flag(True, negative="--no-mmap-bin-files")
    """Read the token files with ordinary reads in place of a memory map."""
    num_workers: int = 2
    """Number of threads that read micro-batches ahead, on the first rank of each tensor-parallel group; 0: none.
    More than one may read a data set of your own at the same time."""
    dataloader_type: str = flag("single", choices=("single", "cyclic", "external"))
    """Order of samples: as the data set has them (single), a fresh permutation an epoch (cyclic), or
    the caller's."""
    reset_position_ids: bool = False
    """Begin the positions anew after each end-of-document token."""
    reset_attention_mask: bool = False
    """Let no token attend across an end-of-document token."""
    eod_mask_loss: bool = False
    """Leave the end-of-document token's loss out."""

    @property
    def has_data_per_split(self) -> bool:
        """Tell whether the three sets come from lists of their own."""
        return bool(
            self.train_data_path or self.valid_data_path or self.test_data_path or self.per_split_data_args_path
        )
