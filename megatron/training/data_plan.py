"""Data plan: the data sets that a run reads, their splits, and the number of samples that it needs of each split.

Importing this module imports no torch, so that unusable data is rejected quickly.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from megatron.checkpoint import TrainState
from megatron.config import DEFAULT_SPLIT, DataConfig, RunConfig, extra_validation_sets
from megatron.core.datasets import (
    Blend,
    ConversationOptions,
    FillInTheMiddle,
    GPTDatasetConfig,
    RunPosition,
    ValidationSet,
    parse_blend,
    recorded_history,
    special_token_id,
)
from megatron.core.errors import ConfigurationError, TokenizerError
from megatron.core.tokenizers import Tokenizer

if TYPE_CHECKING:
    from megatron.core.datasets import DatasetSplits


class DatasetSplitsBuilder(Protocol):
    """Checks and builds the data sets of the three splits."""

    def check(self) -> None:
        """Raise `DataError` for unusable data, before anything is built."""

    def build(self) -> DatasetSplits:
        """Build the data sets."""
        ...


DatasetsProvider = Callable[[RunConfig, Tokenizer, "SampleTargets", Callable[[str], None]], DatasetSplitsBuilder]
"""Create the builder of the data sets, given the number of samples per split and a function to report lines.

It is called before torch is imported, and should not import torch.
"""


@dataclass(frozen=True)
class SampleTargets:
    """Number of samples that a run reads of each split; None means one epoch of all validation data.

    Validation or test data with fewer samples per epoch than ``one_epoch_below`` is built as one epoch, of which every
    evaluation reads each sample once. ``done`` is the progress of the run so far.
    """

    train: int
    valid: int | None
    test: int
    extra_valid: tuple[ValidationSet, ...] = ()
    one_epoch_below: int = 0
    done: TrainState = dataclasses.field(default_factory=TrainState, compare=False)


def sample_targets(config: RunConfig, done: TrainState | None = None) -> SampleTargets:
    """Compute the numbers of samples that training, all evaluations together, and the final test read.

    A resumed run continues after the samples that are ``done``. These can be more than the configuration implies, if
    batches were larger or evaluations more frequent before.
    """
    done = TrainState() if done is None else done
    per_evaluation = config.validation.most_eval_iters * config.training.global_batch_size
    iterations_left = max(config.train_iters - done.iteration, 0)
    left = config.training.batch_sizes.samples_of_iterations(iterations_left, done.consumed_train_samples)
    train = max(config.train_samples, left)
    validation = config.validation
    evaluations = _num_evaluations(config, config.train_iters) + 1
    evaluations_left = max(evaluations - _num_evaluations(config, done.iteration), 1)
    valid = max(evaluations * per_evaluation, done.consumed_valid_samples + evaluations_left * per_evaluation)
    return SampleTargets(
        train=0 if config.training.skip_train else train,
        valid=None if validation.full_validation and per_evaluation > 0 else valid,
        test=per_evaluation,
        extra_valid=extra_validation_sets(validation),
        one_epoch_below=per_evaluation if validation.eval_iters is None else 0,
        done=done,
    )


def run_position(config: RunConfig, done: TrainState) -> RunPosition:
    """Return the position in the training data where a run resumes.

    Raises:
        DataError: the checkpoint's record of it is damaged.
    """
    return RunPosition(
        dataloader_type=config.data.dataloader_type,
        consumed_samples=done.consumed_train_samples,
        history=recorded_history(done.train_data),
    )


def _num_evaluations(config: RunConfig, iterations: int) -> int:
    """Count the evaluations within the first iterations, without the final one of the run."""
    interval = config.validation.eval_interval
    return iterations // interval if interval else 0


def dataset_config(config: RunConfig, tokenizer: Tokenizer) -> GPTDatasetConfig:
    """Return the configuration of the data sets.

    Raises:
        ConfigurationError: the flags contradict each other, or the text of --train-data has not been tokenized.
    """
    data = config.data
    if data.train_data:
        raise ConfigurationError(
            "--train-data: this script does not tokenize text; tokenize it with tools/preprocess_data.py and pass "
            "--data-path PREFIX, or run pretrain_gpt.py"
        )
    per_split = (data.train_data_path, data.valid_data_path, data.test_data_path)
    return GPTDatasetConfig(
        sequence_length=data.seq_length,
        random_seed=config.initialization.seed,
        blend=parse_blend(data.data_path) if data.data_path else None,
        blend_per_split=_blends(per_split) if any(per_split) else None,
        extra_valid=extra_validation_sets(config.validation),
        split=data.split or DEFAULT_SPLIT,
        mock=data.mock_data or data.is_registered,  # neither reads files
        path_to_cache=data.data_cache_path,
        mmap_bin_files=data.mmap_bin_files,
        reset_position_ids=data.reset_position_ids,
        reset_attention_mask=data.reset_attention_mask,
        eod_mask_loss=data.eod_mask_loss,
        eod_token_id=tokenizer.eod_id,
        vocab_size=tokenizer.vocab_size,
        conversations=_conversations(data, tokenizer) if data.sft else None,
        fill_in_the_middle=_fill_in_the_middle(data, tokenizer) if data.fim_rate else None,
    )


def _conversations(data: DataConfig, tokenizer: Tokenizer) -> ConversationOptions:
    return ConversationOptions(tokenizer, data.chat_template, data.max_padding_length, data.sft_packing)


def _fill_in_the_middle(data: DataConfig, tokenizer: Tokenizer) -> FillInTheMiddle:
    """Look up the special tokens of fill-in-the-middle.

    Raises:
        ConfigurationError: the tokenizer lacks some; the message names all of them.
    """
    tokens = {
        "prefix_token": data.fim_prefix_token,
        "middle_token": data.fim_middle_token,
        "suffix_token": data.fim_suffix_token,
        "pad_token": data.fim_pad_token,
        "eod_token": data.fim_eod_token,
        "split_sample": data.fim_split_sample,
    }
    ids: dict[str, int] = {}
    problems = []
    for name, token in tokens.items():
        try:
            if token is not None:
                ids[name] = special_token_id(tokenizer, token, f"--fim-{name.replace('_', '-')}")
        except TokenizerError as error:
            problems.append(str(error))
    if problems:
        raise ConfigurationError(problems)
    return FillInTheMiddle(
        tokenizer=tokenizer,
        rate=data.fim_rate,
        spm_rate=data.fim_spm_rate,
        prefix_id=ids["prefix_token"],
        middle_id=ids["middle_token"],
        suffix_id=ids["suffix_token"],
        document_end_id=ids.get("eod_token", tokenizer.eod_id),
        split_id=ids.get("split_sample"),
        fragment_rate=data.fim_fragment_rate,
        kept_beginning=data.fim_no_prefix,
        pad_id=ids.get("pad_token", 0),
    )


def _blends(paths: tuple[tuple[str, ...], ...]) -> tuple[Blend | None, Blend | None, Blend | None]:
    train, valid, test = (parse_blend(items) if items else None for items in paths)
    return train, valid, test
