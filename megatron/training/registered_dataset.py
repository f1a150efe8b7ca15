"""Data sets that scripts register: map-style data sets of torch, whose items become samples of the run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.config import RunConfig
from megatron.core.datasets import (
    BlendPart,
    DataHistory,
    DataSetKey,
    DatasetSplits,
    DataUsage,
    GPTDatasetConfig,
    GPTSample,
    LaterPhase,
    SampleDataset,
    Segment,
    begin_history,
    continue_history,
    make_sample,
    parse_split,
    split_boundaries,
)
from megatron.core.errors import ConfigurationError, DataError
from megatron.core.registry import find_registered
from megatron.core.tokenizers import Tokenizer
from megatron.training.data_plan import SampleTargets, dataset_config, run_position

_SPLITS = ("training", "validation", "test")
_FIELDS = ("tokens", "labels", "loss_mask")
IGNORED_LABEL = -100
"""Label that is excluded from the loss, as torch's ``cross_entropy`` does by default."""


class MapStyleDataset:
    """Samples of ``sequence_length`` tokens from the items of a map-style data set, in its order.

    An item is a sequence of tokens, of which each is predicted from those before it, or a dictionary: ``tokens``, with
    ``labels`` if these are not the tokens shifted by one, and with a ``loss_mask`` of 0 and 1 for each label, or else
    for each token. Shorter items are padded, without effect on the loss. The label -100 is excluded from the loss.

    ``rows`` are the items of the split. They are repeated to at least ``num_samples`` samples, or read once if it is
    None.

    Raises:
        DataError: an item of another kind is read; see `megatron.core.datasets.MicroBatchReader`.
    """

    def __init__(
        self, name: str, dataset: Any, rows: range, num_samples: int | None, split: str, config: GPTDatasetConfig
    ) -> None:
        self.name = name
        self.config = config
        self._dataset = dataset
        self._rows = rows
        num_epochs = 1 if num_samples is None else max(-(-num_samples // len(rows)), 1)
        self.usage = DataUsage(f"{split} data ({name})", num_samples, len(rows), num_epochs)
        self._positions = np.arange(config.sequence_length, dtype=np.int64)
        self._all_ones = np.ones(config.sequence_length, np.float32)

    def __len__(self) -> int:
        return len(self._rows) * self.usage.num_epochs

    def source_of(self, index: int) -> str:
        """Return the name of the data set and the number of the item."""
        return f"item {self._rows[index % len(self._rows)]} of data set {self.name}"

    def __getitem__(self, index: int) -> GPTSample:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        item = self._dataset[self._rows[index % len(self._rows)]]
        fields = dict(item) if isinstance(item, Mapping) else {"tokens": item}
        if unknown := [name for name in fields if name not in _FIELDS]:
            raise DataError(
                f"it has {', '.join(map(str, unknown))}, which no part of the run reads; return tokens, or a "
                "dictionary with tokens and, if needed, labels and loss_mask"
            )
        if "tokens" not in fields:
            raise DataError("it is a dictionary without tokens; return tokens, or a dictionary with them")
        tokens, labels = _integers(fields, "tokens"), _integers(fields, "labels")
        if len(tokens) == 0:
            raise DataError("it has no tokens; return one or more")
        mask = None if fields.get("loss_mask") is None else np.asarray(fields["loss_mask"], np.float32)
        for name, array in (("labels", labels), ("loss_mask", mask)):
            if array is not None and array.shape != tokens.shape:
                raise DataError(
                    f"its {name} have shape {array.shape}, but its tokens {tokens.shape}; return equal shapes"
                )
        return self._shifted(tokens, mask) if labels is None else self._labeled(tokens, labels, mask)

    def _shifted(self, tokens: NDArray[np.int64], mask: NDArray[np.float32] | None) -> GPTSample:
        """Make a sample whose labels are the tokens shifted by one."""
        text = self._padded(tokens, self.config.sequence_length + 1, "--seq-length + 1")
        sample = make_sample(text, len(tokens), self.config, self._positions, self._all_ones)
        if mask is not None:
            counted = np.zeros(self.config.sequence_length, np.float32)
            counted[: len(mask) - 1] = mask[1:]
            sample["loss_mask"] = counted * sample["loss_mask"]
        return sample

    def _labeled(
        self, tokens: NDArray[np.int64], labels: NDArray[np.int64], mask: NDArray[np.float32] | None
    ) -> GPTSample:
        length = self.config.sequence_length
        text = np.zeros(length + 1, np.int64)
        text[:length] = self._padded(tokens, length, "--seq-length")
        sample = make_sample(text, len(text), self.config, self._positions, self._all_ones)
        counted = np.zeros(length, np.float32)
        counted[: len(tokens)] = (labels != IGNORED_LABEL) * (1.0 if mask is None else mask)
        sample["labels"] = self._padded(np.where(labels == IGNORED_LABEL, 0, labels), length, "--seq-length")
        sample["loss_mask"] = counted * sample["loss_mask"]
        if len(tokens) < length:
            sample["padding_mask"] = self._positions >= len(tokens)
        return sample

    def _padded(self, tokens: NDArray[np.int64], length: int, what: str) -> NDArray[np.int64]:
        if len(tokens) > length:
            raise DataError(f"it has {len(tokens)} tokens; at most {length} are expected ({what})")
        return np.concatenate((tokens, np.zeros(length - len(tokens), np.int64)))


def _integers(fields: Mapping[str, Any], name: str) -> Any:
    if fields.get(name) is None:
        return None
    array = np.asarray(fields[name])
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise DataError(f"its {name} have shape {array.shape} and type {array.dtype}; one row of integers is expected")
    return array.astype(np.int64)


@dataclass(frozen=True)
class RegisteredDatasetBuilder:
    """Builder of the splits of the data set that ``--dataset`` names and a script registered."""

    config: RunConfig
    tokenizer: Tokenizer
    targets: SampleTargets
    report: Callable[[str], None]

    def check(self) -> None:
        """Check that the data set is registered; its items are read only by the run.

        Raises:
            ConfigurationError: it is not.
        """
        find_registered("data set", self._name)

    def build(self) -> DatasetSplits:
        """Call the registered function and make the samples of each split.

        Raises:
            ConfigurationError: it returns no map-style data set, or an empty one, or --split does not apply.
            DataError: the order of the samples of a resumed run cannot continue.
        """
        made = find_registered("data set", self._name).value(self.config, self.tokenizer)
        part, *others = self._parts(made)
        train, history = self._train_samples(part)
        counts = self.targets.valid, self.targets.test
        valid, test = (
            None if other is None or count == 0 else self._samples(split, *other, count)
            for split, other, count in zip(_SPLITS[1:], others, counts)
        )
        return DatasetSplits(train, valid, test, history=history)

    @property
    def _name(self) -> str:
        assert self.config.data.dataset is not None, "checked before"
        return self.config.data.dataset

    def _parts(self, made: Any) -> Iterator[tuple[Any, range] | None]:
        """Yield the data set of each split, with its items."""
        split = self.config.data.split
        if isinstance(made, (tuple, list)):
            if split is not None:
                raise ConfigurationError(
                    f"--split {split} has no effect: data set {self._name} has its own training, validation and test "
                    "data; omit it"
                )
            if len(made) > len(_SPLITS):
                raise ConfigurationError(
                    f"data set {self._name}: {len(made)} data sets were returned; at most training, validation and "
                    "test data are expected"
                )
            for dataset in (*made, None, None, None)[: len(_SPLITS)]:
                yield None if dataset is None else (dataset, range(self._length(dataset)))
            return
        length = self._length(made)
        for rows in split_boundaries(parse_split(split or "1,0,0"), length):
            yield (made, rows) if rows else None

    def _length(self, dataset: Any) -> int:
        kind = type(dataset)
        if not hasattr(kind, "__len__") or not hasattr(kind, "__getitem__"):
            raise ConfigurationError(
                f"data set {self._name} is {kind.__name__}; a map-style data set is expected, with __len__ and "
                "__getitem__"
            )
        if len(dataset) == 0:
            raise ConfigurationError(f"data set {self._name} is empty")
        return len(dataset)

    def _train_samples(self, part: tuple[Any, range] | None) -> tuple[SampleDataset | None, DataHistory | None]:
        """Return the training samples, which continue those of a resumed run, and their history."""
        position, wanted = run_position(self.config, self.targets.done), self.targets.train
        if part is None or wanted == 0:
            return None, position.history
        dataset, rows = part
        key = DataSetKey(
            name=self._name,
            lengths_fingerprint=f"{len(dataset)} items",
            first_sequence=rows.start,
            end_sequence=rows.stop,
            sequence_length=0,  # an item is one sample at any --seq-length
        )
        parts = [BlendPart(key=key, prefix=self._name, samples_per_epoch=len(rows))]
        order, seed = position.dataloader_type, self.config.initialization.seed
        if position.history is None or position.consumed_samples == 0:
            samples = self._samples(_SPLITS[0], dataset, rows, wanted)
            segments = [Segment(num_samples=None, seed=seed)]
            return samples, begin_history(order, parts, segments, None, len(samples), seed)
        history, line = continue_history(position.history, parts, None, position.consumed_samples, wanted, order, seed)
        if line is not None:
            self.report(line)
        phase = history.phases[-1]
        first = phase.start - phase.offsets[0]
        samples = self._samples(_SPLITS[0], dataset, rows, wanted - first)
        return (LaterPhase(samples, first) if first else samples), history

    def _samples(self, split: str, dataset: Any, rows: range, count: int | None) -> MapStyleDataset:
        is_small = split != _SPLITS[0] and len(rows) < self.targets.one_epoch_below
        if is_small or self.config.data.dataloader_type == "cyclic":
            count = None  # a cyclic order repeats the samples itself
        samples = MapStyleDataset(self._name, dataset, rows, count, split, dataset_config(self.config, self.tokenizer))
        if samples.usage.num_epochs > 1:
            self.report(samples.usage.describe())
        return samples
