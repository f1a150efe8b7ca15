"""Record in checkpoints which samples a run has read, so that no change of the data repeats or drops a sample.

A run reads its samples in phases. Each phase has one blend. A run that resumes with another blend starts a new phase,
which continues each data set at the position that the earlier phases reached. The samples of one data set are a chain
of segments. Each segment is shuffled separately, and its order never changes. If a run is extended, or a data set gets
a larger weight, a segment is appended. The history also records the samples that a run skipped.
Importing this module does not import torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.core.errors import DataError

LEFT_OUT, NUM_REWOUND = "left_out", "num_rewound"
"""Keys of `SkippedSamples` in the checkpoint, next to the keys of the data history."""


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """Consumed samples ``[start, end)`` of one skipped step, and the reason.

    ``samples`` are the ids of the bad samples, if any were identified.
    """

    start: int
    end: int
    iteration: int
    reason: str
    samples: tuple[int, ...] = ()


@dataclass(frozen=True)
class SkippedSamples:
    """All steps that a run has skipped, in order.

    ``num_rewound`` counts how often the run rewound without skipping a step.
    """

    steps: tuple[LeftOut, ...] = ()
    num_rewound: int = 0

    def with_step(self, step: LeftOut) -> SkippedSamples:
        """Return the record with one more step, which replaces a step of the same samples."""
        others = tuple(known for known in self.steps if (known.start, known.end) != (step.start, step.end))
        return SkippedSamples((*others, step), self.num_rewound)

    def with_rewind(self) -> SkippedSamples:
        return SkippedSamples(self.steps, self.num_rewound + 1)

    def meeting(self, start: int, end: int) -> LeftOut | None:
        """Return the first skipped step that overlaps the consumed samples ``[start, end)``."""
        return next((step for step in self.steps if step.start < end and start < step.end), None)

    def to_dict(self) -> dict[str, Any]:
        """Return the record as JSON-serializable values to merge with a data history's. Empty values are omitted."""
        steps = {LEFT_OUT: [dataclasses.asdict(step) for step in self.steps]} if self.steps else {}
        return steps | ({NUM_REWOUND: self.num_rewound} if self.num_rewound else {})

    @classmethod
    def from_dict(cls, values: Mapping[str, Any] | None) -> SkippedSamples:
        """Read the output of `to_dict` from a dictionary that may have other keys.

        Raises:
            DataError: the values are damaged.
        """
        try:
            steps = tuple(
                LeftOut(
                    start=int(step["start"]),
                    end=int(step["end"]),
                    iteration=int(step["iteration"]),
                    reason=str(step["reason"]),
                    samples=tuple(map(int, step["samples"])),
                )
                for step in (values or {}).get(LEFT_OUT, ())
            )
            num_rewound = int((values or {}).get(NUM_REWOUND, 0))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(f"the checkpoint's record of the skipped samples is damaged ({error!r})") from error
        return cls(steps, num_rewound)


_SAME_WEIGHT = 1e-12


@dataclass(frozen=True, kw_only=True)
class DataSetKey:
    """Identity of a part of a text, independent of the location of its files.

    ``occurrence`` counts how often the same part occurs earlier in the blend.
    """

    name: str
    lengths_fingerprint: str
    first_sequence: int
    end_sequence: int
    sequence_length: int
    occurrence: int = 0


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Epochs of a data set that are shuffled together: as many whole epochs as ``num_samples`` needs, and the seed."""

    num_samples: int | None
    """Samples that determine the number of epochs; None for one epoch."""
    seed: int


@dataclass(frozen=True, kw_only=True)
class DataSetRecord:
    """Record of one data set."""

    key: DataSetKey
    prefix: str
    """Path prefix of the files when they were last read."""
    segments: tuple[Segment, ...]
    consumed_samples: int = 0
    """Samples that the run has trained on."""


@dataclass(frozen=True, kw_only=True)
class Phase:
    """One blend of a run: its data sets by number, their weights, and the samples read from each before the phase.

    A phase without data sets read other data than files.
    """

    start: int
    """Consumed samples of the run at the start of the phase."""
    data_sets: tuple[int, ...]
    weights: tuple[float, ...]
    """Weights of any scale; 0 for a data set without remaining samples."""
    has_given_weights: bool
    """Whether the user passed the weights; otherwise they are the sizes of the data sets."""
    offsets: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class DataHistory:
    """Data sets and phases of a run. ``num_samples`` and ``seed`` determine the permutations of ``cyclic``."""

    dataloader_type: str
    num_samples: int | None
    seed: int | None
    consumed_samples: int
    """Consumed samples of the run when the samples per data set were counted."""
    data_sets: tuple[DataSetRecord, ...]
    phases: tuple[Phase, ...]

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> DataHistory:
        """Read the output of `to_dict`.

        Raises:
            DataError: the values are damaged.
        """
        try:
            history = cls(
                dataloader_type=str(values["dataloader_type"]),
                num_samples=None if values["num_samples"] is None else int(values["num_samples"]),
                seed=None if values["seed"] is None else int(values["seed"]),
                consumed_samples=int(values["consumed_samples"]),
                data_sets=tuple(_read_data_set(record) for record in values["data_sets"]),
                phases=tuple(_read_phase(phase) for phase in values["phases"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(f"the checkpoint's record of the data read is damaged ({error!r})") from error
        for phase in history.phases:
            if not all(0 <= number < len(history.data_sets) for number in phase.data_sets):
                raise DataError("the checkpoint's record of the data read refers to a data set that it does not list")
        return history

    def until(self, consumed_samples: int) -> DataHistory:
        """Return the history up to the phase of the first sample after ``consumed_samples``."""
        phases = tuple(phase for phase in self.phases if phase.start <= consumed_samples)
        return dataclasses.replace(self, phases=phases)

    def counted_as(self, earlier: DataHistory) -> DataHistory:
        """Return the history with the sample counts of an earlier point of the same run."""
        counts = [record.consumed_samples for record in earlier.data_sets]
        return self.with_consumed(earlier.consumed_samples, counts + [0] * (len(self.data_sets) - len(counts)))

    def after_other_data(self, consumed_samples: int) -> DataHistory:
        """Return the history after the run has read other data than files up to ``consumed_samples``."""
        if consumed_samples == self.consumed_samples:
            return self
        phases = self.phases
        if phases[-1].data_sets:
            start = self.consumed_samples
            phases = (*phases, Phase(start=start, data_sets=(), weights=(), has_given_weights=False, offsets=()))
        return dataclasses.replace(self, consumed_samples=consumed_samples, phases=phases)

    def with_consumed(self, consumed_samples: int, of_data_sets: Sequence[int]) -> DataHistory:
        """Return the history with new sample counts, one per data set."""
        records = [
            dataclasses.replace(record, consumed_samples=int(count))
            for record, count in zip(self.data_sets, of_data_sets, strict=True)
        ]
        return dataclasses.replace(self, consumed_samples=consumed_samples, data_sets=tuple(records))


def recorded_history(train_data: Mapping[str, Any] | None) -> DataHistory | None:
    """Return the history in a checkpoint; None if it has none, for example for samples from the caller.

    Raises:
        DataError: the history is damaged.
    """
    if train_data is None or (train_data and set(train_data) <= {LEFT_OUT, NUM_REWOUND}):
        return None
    return DataHistory.from_dict(train_data)


@dataclass(frozen=True, kw_only=True)
class RunPosition:
    """Position of a run in its training data, and the history up to it (None if there is no record)."""

    dataloader_type: str = "single"
    consumed_samples: int = 0
    history: DataHistory | None = None


@dataclass(frozen=True, kw_only=True)
class BlendPart:
    """One data set of a run's current blend, and the number of samples in one epoch of it."""

    key: DataSetKey
    prefix: str
    samples_per_epoch: int


def _read_data_set(values: Mapping[str, Any]) -> DataSetRecord:
    return DataSetRecord(
        key=DataSetKey(**values["key"]),
        prefix=str(values["prefix"]),
        segments=tuple(Segment(**segment) for segment in values["segments"]),
        consumed_samples=int(values["consumed_samples"]),
    )


def _read_phase(values: Mapping[str, Any]) -> Phase:
    return Phase(
        start=int(values["start"]),
        data_sets=tuple(map(int, values["data_sets"])),
        weights=tuple(map(float, values["weights"])),
        has_given_weights=bool(values["has_given_weights"]),
        offsets=tuple(map(int, values["offsets"])),
    )


def number_occurrences(keys: Sequence[DataSetKey]) -> list[DataSetKey]:
    """Make equal keys distinct by numbering them, because a blend may contain the same data set twice."""
    seen: dict[DataSetKey, int] = {}
    numbered = []
    for key in keys:
        numbered.append(dataclasses.replace(key, occurrence=seen.get(key, 0)))
        seen[key] = seen.get(key, 0) + 1
    return numbered


def begin_history(
    dataloader_type: str,
    parts: Sequence[BlendPart],
    segments: Sequence[Segment],
    weights: Sequence[float] | None,
    num_samples: int,
    seed: int,
) -> DataHistory:
    """Return the history of a new run with a blend of ``num_samples`` samples."""
    is_cyclic = dataloader_type == "cyclic"
    return DataHistory(
        dataloader_type=dataloader_type,
        num_samples=num_samples if is_cyclic else None,
        seed=seed if is_cyclic else None,
        consumed_samples=0,
        data_sets=tuple(
            DataSetRecord(key=part.key, prefix=part.prefix, segments=(segment,))
            for part, segment in zip(parts, segments, strict=True)
        ),
        phases=(
            Phase(
                start=0,
                data_sets=tuple(range(len(parts))),
                weights=tuple(float(part.samples_per_epoch) for part in parts) if weights is None else tuple(weights),
                has_given_weights=weights is not None,
                offsets=(0,) * len(parts),
            ),
        ),
    )


def continue_history(
    history: DataHistory,
    parts: Sequence[BlendPart],
    weights: Sequence[float] | None,
    consumed_samples: int,
    num_samples: int,
    dataloader_type: str,
    seed: int,
) -> tuple[DataHistory, str | None]:
    """Return the history of a run that resumes up to ``num_samples``, and a log line if the blend has changed.

    Raises:
        DataError: the sample order cannot resume: it has changed, or the blend has changed under ``cyclic``.
    """
    if dataloader_type != history.dataloader_type:
        raise DataError(
            f"the checkpoint's run used --dataloader-type {history.dataloader_type}: with {dataloader_type} this run "
            f"would repeat samples; use --dataloader-type {history.dataloader_type}, or --finetune to start a new run"
        )
    if history.seed is not None and history.seed != seed:
        raise DataError(
            f"the checkpoint's run used --seed {history.seed}, which determines the order of --dataloader-type cyclic: "
            f"with {seed} this run would repeat samples; use --seed {history.seed}, or --finetune to start a new run"
        )
    if history.consumed_samples != consumed_samples:
        raise DataError(
            f"the checkpoint's record of the data read covers {history.consumed_samples} consumed samples, but the run "
            f"is at {consumed_samples}; use a different checkpoint (--ckpt-step), or --finetune for a new run"
        )
    history, numbers = _with_parts(history, parts)
    last = history.phases[-1]
    if _is_same_blend(last, numbers, weights):
        return history, None
    if dataloader_type == "cyclic" and not last.data_sets:
        raise DataError(
            f"the run read other data than files after {last.start} samples, after which --dataloader-type cyclic "
            "cannot continue; use --finetune to start a new run"
        )
    if dataloader_type == "cyclic":
        raise DataError(
            "the data differs from the checkpoint's, but --dataloader-type cyclic shuffled all samples of the old data "
            "together; use the data of the checkpoint's run, or --finetune to start a new run"
        )
    phase = _next_phase(history, parts, numbers, weights, consumed_samples, num_samples)
    kept = history.phases if last.start < consumed_samples else history.phases[:-1]
    return dataclasses.replace(history, phases=(*kept, phase)), _describe_change(history, last, phase)


def _with_parts(history: DataHistory, parts: Sequence[BlendPart]) -> tuple[DataHistory, list[int]]:
    """Add new data sets to the history, and return the number of each part."""
    records = list(history.data_sets)
    known = {record.key: number for number, record in enumerate(records)}
    numbers = []
    for part in parts:
        number = known.get(part.key)
        if number is None:
            number = len(records)
            records.append(DataSetRecord(key=part.key, prefix=part.prefix, segments=()))
        elif records[number].prefix != part.prefix:
            records[number] = dataclasses.replace(records[number], prefix=part.prefix)
        numbers.append(number)
    return dataclasses.replace(history, data_sets=tuple(records)), numbers


def _is_same_blend(phase: Phase, numbers: Sequence[int], weights: Sequence[float] | None) -> bool:
    if tuple(numbers) != phase.data_sets or phase.has_given_weights != (weights is not None):
        return False
    if weights is None:
        return True
    before, now = sum(phase.weights), sum(weights)
    return all(abs(old / before - new / now) < _SAME_WEIGHT for old, new in zip(phase.weights, weights, strict=True))


def _next_phase(
    history: DataHistory,
    parts: Sequence[BlendPart],
    numbers: Sequence[int],
    weights: Sequence[float] | None,
    consumed_samples: int,
    num_samples: int,
) -> Phase:
    """Return the phase that starts here. Without weights, each data set is weighted by the rest of its epoch."""
    offsets = [history.data_sets[number].consumed_samples for number in numbers]
    if weights is None:
        sizes = [part.samples_per_epoch for part in parts]
        left = [max(size - offset, 0) for offset, size in zip(offsets, sizes)]
        weights_now = left if sum(left) >= num_samples - consumed_samples else sizes
    return Phase(
        start=consumed_samples,
        data_sets=tuple(numbers),
        weights=tuple(float(weight) for weight in (weights_now if weights is None else weights)),
        has_given_weights=weights is not None,
        offsets=tuple(offsets),
    )


def _describe_change(history: DataHistory, old: Phase, new: Phase) -> str:
    def shares(phase: Phase) -> dict[int, float]:
        return {number: weight / sum(phase.weights) for number, weight in zip(phase.data_sets, phase.weights)}

    before, now = shares(old), shares(new)
    parts = []
    changed = {
        number: _changed_record(history, number, [other for other in before if other not in now])
        for number in now
        if number not in before and not history.data_sets[number].consumed_samples
    }
    for number in dict.fromkeys((*new.data_sets, *old.data_sets)):
        record = history.data_sets[number]
        if number in changed.values():
            continue
        former = changed.get(number)
        if former is not None:
            reason = _reason_of_change(history.data_sets[former].key, record.key)
            change = f"is read from its beginning, because {reason} has changed"
            if len(now) > 1:
                change = f"{before[former]:.6g} -> {now[number]:.6g}, and {change}"
        elif number not in now:
            change = f"{before[number]:.6g} -> removed"
        elif record.consumed_samples or number in before:
            share = "left out" if number not in before else f"{before[number]:.6g}"
            change = f"{share} -> {now[number]:.6g}, continuing after {record.consumed_samples} samples"
        else:
            change = f"new, {now[number]:.6g}"
        parts.append(f"{record.prefix} {change}")
    return f" > the training data changes after {new.start} samples: {'; '.join(parts)}"


def _changed_record(history: DataHistory, number: int, removed: Sequence[int]) -> int | None:
    """Return the removed data set of which a new one is another part, or None."""
    name = history.data_sets[number].key.name
    return next((other for other in removed if history.data_sets[other].key.name == name), None)


def _reason_of_change(old: DataSetKey, new: DataSetKey) -> str:
    if old.sequence_length != new.sequence_length:
        return "--seq-length"
    return "--split" if old.lengths_fingerprint == new.lengths_fingerprint else "its text"
