"""A run that goes on reads each data set's samples in one order, and remembers those that it has passed over."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from megatron.core.datasets.blended_dataset import LaterPhase, SegmentChain
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedDatasetBuilder, DatasetSplits
from megatron.core.datasets.data_history import (
    DataHistory,
    DataSetKey,
    DataSetRecord,
    LeftOut,
    Phase,
    RunPosition,
    SkippedSamples,
    number_occurrences,
    recorded_history,
)
from megatron.core.datasets.data_samplers import DataloaderType, SampleOrder
from megatron.core.datasets.gpt_dataset_config import Blend, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.core.datasets.sample_keys import ReadCounter, SamplePlace, blend_names, locate_sample, sample_keys
from megatron.core.errors import DataError

LENGTH = 8


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Write four texts of 51, 34, 76 and 19 samples; no token occurs twice."""
    folder = tmp_path_factory.mktemp("texts")
    token = 0
    prefixes = []
    for name, num_documents, length in (("a", 10, 41), ("b", 7, 39), ("c", 9, 68), ("d", 31, 5)):
        with IndexedDatasetBuilder(folder / name, np.uint16) as builder:
            for _ in range(num_documents):
                builder.add_document(np.arange(token, token + length))
                token += length
            builder.finalize()
        prefixes.append(str(folder / name))
    return tuple(prefixes)


@dataclass
class Run:
    """Train step after step on nothing, with a checkpoint wherever it is stopped."""

    cache: Path | None
    dataloader_type: DataloaderType = "single"
    seed: int = 5
    sequence_length: int = LENGTH
    split: str = "1"
    consumed: int = 0
    history: DataHistory | None = None
    lines: list[str] = field(default_factory=list)
    places: list[SamplePlace] = field(default_factory=list)
    keys: list[list[int]] = field(default_factory=list)

    def build(self, blend: Blend, num_samples: int) -> DatasetSplits:
        config = GPTDatasetConfig(
            sequence_length=self.sequence_length,
            random_seed=self.seed,
            blend=blend,
            split=self.split,
            path_to_cache=None if self.cache is None else str(self.cache),
        )
        position = RunPosition(
            dataloader_type=self.dataloader_type, consumed_samples=self.consumed, history=self.history
        )
        builder = BlendedDatasetBuilder(config, (num_samples, 0, 0), self.lines.append, position=position)
        return builder.build()

    def train(self, blend: Blend, num_samples: int, stop: int | None = None) -> Run:
        """Read to ``stop`` of ``num_samples`` samples, and save."""
        splits = self.build(blend, num_samples)
        assert splits.train is not None
        assert splits.history is not None
        order = SampleOrder(self.dataloader_type, len(splits.train), self.seed)
        counter = ReadCounter(splits.history, splits.train, order)
        end = num_samples if stop is None else stop
        ids = order.sample_ids(self.consumed, end - self.consumed)
        assert len(ids) == end - self.consumed
        self.places += [locate_sample(splits.train, sample) for sample in ids.tolist()]
        self.keys += sample_keys(splits.train, ids).tolist()
        middle = (self.consumed + end) // 2
        counter.history_at(middle)
        self.consumed = end
        self.history = DataHistory.from_dict(json.loads(json.dumps(counter.history_at(end).to_dict())))
        return self

    def read_of(self) -> dict[str, list[SamplePlace]]:
        """Return what was read of each data set, in order."""
        read: dict[str, list[SamplePlace]] = defaultdict(list)
        for place in self.places:
            read[place.prefix[-1]].append(place)
        return dict(read)

    def counts(self) -> dict[str, int]:
        assert self.history is not None
        return {record.prefix[-1]: record.consumed_samples for record in self.history.data_sets}


def assert_read_in_order(run: Run) -> None:
    """Assert that each data set was read from its beginning without a gap, and no row twice."""
    for name, places in run.read_of().items():
        assert [place.sample for place in places] == list(range(len(places))), name
        rows = [place.row for place in places]
        assert len(set(rows)) == len(rows), name
    assert run.counts() == {name: len(run.read_of().get(name, ())) for name in run.counts()}


BLENDS: dict[str, Callable[[Sequence[str]], Blend]] = {
    "one": lambda texts: Blend((texts[0],)),
    "one-weighted": lambda texts: Blend((texts[0],), (3.0,)),
    "weighted": lambda texts: Blend(tuple(texts[:3]), (0.2, 0.5, 0.3)),
    "by-size": lambda texts: Blend(tuple(texts)),
    "twice-the-same": lambda texts: Blend((texts[0], texts[1], texts[0]), (1.0, 1.0, 2.0)),
}


@pytest.mark.parametrize("dataloader_type", ["single", "cyclic"])
@pytest.mark.parametrize("num_samples", [40, 150, 700])
@pytest.mark.parametrize("blend", BLENDS)
def test_a_run_that_goes_on_unchanged_reads_as_if_it_had_not_stopped(
    blend: str, num_samples: int, dataloader_type: DataloaderType, texts: tuple[str, ...], tmp_path: Path
) -> None:
    chosen = BLENDS[blend](texts)
    whole = Run(tmp_path, dataloader_type).train(chosen, num_samples)
    parts = Run(tmp_path, dataloader_type)
    for stop in (0, 1, num_samples // 3, num_samples - 1, num_samples):
        parts.train(chosen, num_samples, stop)
    assert parts.places == whole.places
    assert parts.keys == whole.keys
    assert parts.history == whole.history
    assert not [line for line in parts.lines if "changes" in line]


def test_the_first_session_reads_what_a_run_without_a_record_reads(texts: tuple[str, ...], tmp_path: Path) -> None:
    blend = BLENDS["weighted"](texts)
    run = Run(tmp_path).train(blend, 200)
    from_another_format = Run(tmp_path, consumed=120)
    from_another_format.train(blend, 200)
    assert from_another_format.places == run.places[120:]
    assert from_another_format.history == run.history


def test_new_weights_go_on_where_each_data_set_was_left(texts: tuple[str, ...], tmp_path: Path) -> None:
    a, b, c, d = texts
    run = Run(tmp_path).train(Blend((a, b), (0.7, 0.3)), 60, 24)
    assert run.counts() == {"a": 17, "b": 7}
    run.train(Blend((c, b, a), (0.5, 0.3, 0.2)), 60, 44)
    assert run.counts() == {"a": 17 + 4, "b": 7 + 6, "c": 10}
    assert run.lines[-1].startswith(f" > the training data changes after 24 samples: {c} new, 0.5; {b} 0.3 -> 0.3")
    assert f"{a} 0.7 -> 0.2, continuing after 17 samples" in run.lines[-1]
    run.train(Blend((d, a), (1.0, 1.0)), 60, 50)
    assert f"{b} 0.3 -> removed" in run.lines[-1]
    run.train(Blend((a, b), (0.7, 0.3)), 60)
    assert_read_in_order(run)
    assert run.history is not None
    assert [phase.start for phase in run.history.phases] == [0, 24, 44, 50]
    assert all(len(record.segments) == 1 for record in run.history.data_sets)


def test_weights_of_another_scale_are_no_change(texts: tuple[str, ...], tmp_path: Path) -> None:
    run = Run(tmp_path).train(Blend(texts[:3], (0.2, 0.5, 0.3)), 90, 40)
    run.train(Blend(texts[:3], (2e9, 5e9, 3e9)), 90)
    whole = Run(tmp_path).train(Blend(texts[:3], (0.2, 0.5, 0.3)), 90)
    assert run.places == whole.places
    assert run.history == whole.history


def test_new_weights_have_the_samples_of_a_run_that_begins_with_them(texts: tuple[str, ...], tmp_path: Path) -> None:
    """Each data set's share of the rest is rounded up, as in a run that is new."""
    run = Run(tmp_path).train(Blend(texts[:3], (0.2, 0.5, 0.3)), 90, 40)
    blend = Blend(texts[:3], (0.37, 0.37, 0.26))
    rest = Run(tmp_path).build(blend, 50).train
    whole = run.build(blend, 90).train
    assert rest is not None
    assert whole is not None
    assert len(whole) == 40 + len(rest) == 40 + 19 + 19 + 13


def test_a_longer_run_appends_to_the_order_that_was_begun(texts: tuple[str, ...], tmp_path: Path) -> None:
    blend = Blend((texts[0],))
    run = Run(tmp_path).train(blend, 40)
    other_plan = Run(tmp_path).train(blend, 130)
    run.train(blend, 130)
    assert_read_in_order(run)
    # One epoch of 51 samples, then whole epochs for the other 79; a run of 130 from the start mixes its documents.
    assert {place.row for place in run.places[:51]} == set(range(51))
    assert other_plan.places != run.places
    assert run.history is not None
    (record,) = run.history.data_sets
    assert [(segment.num_samples, segment.seed) for segment in record.segments] == [(None, 5), (79, 6)]
    # What is read more than once is reported, and what is read once is not.
    (usage,) = [line for line in run.lines if "epochs" in line]
    assert usage == f" > train data {texts[0]}: need 130 samples, have 51 in one epoch, reading 3 epochs"
    again = Run(tmp_path).train(blend, 40).train(blend, 130, 60).train(blend, 130)
    assert again.places == run.places
    assert again.history == run.history
    assert len(run.history.phases) == 1


def test_without_weights_what_is_left_of_each_data_set_counts(texts: tuple[str, ...], tmp_path: Path) -> None:
    a, b, c, _ = texts
    run = Run(tmp_path).train(Blend((a, b)), 80, 80)
    assert run.counts() == {"a": 48, "b": 32}
    for more in (40, 81):
        rest = run.build(Blend((a, b, c)), 80 + more).train
        assert rest is not None
        assert len(rest) == 80 + more
    run.train(Blend((a, b, c)), 80 + 81)
    assert run.counts() == {"a": 51, "b": 34, "c": 76}
    assert_read_in_order(run)
    run.train(Blend((a, b, c)), 80 + 81 + 40)
    assert run.consumed == 201
    assert_read_in_order(run)


def test_text_that_is_another_now_is_read_from_its_beginning(texts: tuple[str, ...], tmp_path: Path) -> None:
    run = Run(tmp_path).train(Blend(texts[:2], (1.0, 1.0)), 60, 20)
    run.sequence_length = LENGTH // 2
    run.places.clear()
    run.train(Blend(texts[:2], (1.0, 1.0)), 60)
    a, b = texts[:2]
    because = "and is read from its beginning, because --seq-length has changed"
    assert run.lines[-1] == (
        f" > the training data changes after 20 samples: {a} 0.5 -> 0.5, {because}; {b} 0.5 -> 0.5, {because}"
    )
    assert [place.sample for place in run.read_of()["a"]] == list(range(20))


def test_another_split_of_the_same_text_is_named(texts: tuple[str, ...], tmp_path: Path) -> None:
    run = Run(tmp_path).train(Blend(texts[:1]), 60, 20)
    run.split = "9,1,0"
    run.train(Blend(texts[:1]), 60)
    assert run.lines[-1] == (
        f" > the training data changes after 20 samples: {texts[0]} is read from its beginning, because --split has "
        "changed"
    )


def test_nothing_read_yet_leaves_no_phase_behind(texts: tuple[str, ...], tmp_path: Path) -> None:
    run = Run(tmp_path).train(Blend(texts[:2], (1.0, 1.0)), 60, 0)
    run.train(Blend(texts[:2], (1.0, 3.0)), 60)
    whole = Run(tmp_path).train(Blend(texts[:2], (1.0, 3.0)), 60)
    assert run.keys == whole.keys
    assert run.history is not None
    assert len(run.history.phases) == 1


def test_a_blend_of_which_nothing_was_read_is_replaced_and_earlier_ones_stay(
    texts: tuple[str, ...], tmp_path: Path
) -> None:
    a, b, c, d = texts
    run = Run(tmp_path).train(Blend((a, b), (0.7, 0.3)), 60, 24).train(Blend((b, c), (0.5, 0.5)), 60, 34)
    run.train(Blend((c, d), (0.5, 0.5)), 60, 34)
    run.train(Blend((a, d), (0.5, 0.5)), 60)
    assert run.history is not None
    assert [phase.start for phase in run.history.phases] == [0, 24, 34]
    assert_read_in_order(run)


def test_any_changes_keep_every_order(texts: tuple[str, ...], tmp_path: Path) -> None:
    random = np.random.RandomState(3)
    for attempt in range(15):
        run = Run(tmp_path, seed=attempt)
        target = 0
        for _ in range(random.randint(2, 7)):
            count = random.randint(1, 5)
            chosen = tuple(texts[i] for i in random.permutation(4)[:count])
            weights = tuple((10.0 ** random.uniform(-2, 2, count)).tolist()) if random.rand() < 0.7 else None
            target = max(target, run.consumed) + int(random.randint(1, 60))
            run.train(Blend(chosen, weights), target, int(random.randint(run.consumed, target + 1)))
        assert_read_in_order(run)
        assert sum(run.counts().values()) == run.consumed == len(run.places)


def test_cyclic_permutes_what_it_permuted_before(texts: tuple[str, ...], tmp_path: Path) -> None:
    blend = Blend(texts[:2], (0.6, 0.4))
    run = Run(tmp_path, "cyclic").train(blend, 50, 30)
    run.train(blend, 120)
    assert len({tuple(key) for key in run.keys[:50]}) == 50
    assert sorted(run.keys[:50]) == sorted(run.keys[50:100])
    assert run.keys[:50] != run.keys[50:100]


def test_files_continue_after_other_data_with_their_next_sample(texts: tuple[str, ...], tmp_path: Path) -> None:
    blend = Blend(texts[:2], (0.6, 0.4))
    run = Run(tmp_path).train(blend, 60, 20)
    for end in (24, 33):
        assert run.history is not None
        assert run.history.after_other_data(run.consumed) == run.history
        run.consumed = end
        run.history = DataHistory.from_dict(run.history.after_other_data(end).to_dict())
    run.train(blend, 60)
    assert_read_in_order(run)
    assert sum(run.counts().values()) == len(run.places) == 20 + 27
    assert run.history is not None
    assert [(phase.start, phase.data_sets) for phase in run.history.phases] == [(0, (0, 1)), (20, ()), (33, (0, 1))]
    (line,) = [line for line in run.lines if "changes after 33 samples" in line]
    assert line.count("left out -> ") == 2


def test_cyclic_does_not_continue_after_other_data(texts: tuple[str, ...], tmp_path: Path) -> None:
    run = Run(tmp_path, "cyclic").train(Blend(texts[:1]), 50, 30)
    assert run.history is not None
    run.history, run.consumed = run.history.after_other_data(40), 40
    with pytest.raises(DataError, match="other data than files after 30 samples, after which --dataloader-type cyclic"):
        run.build(Blend(texts[:1]), 50)


def test_what_cannot_go_on_is_refused(texts: tuple[str, ...], tmp_path: Path) -> None:
    blend = Blend(texts[:2], (0.6, 0.4))
    single = Run(tmp_path).train(blend, 50, 30)
    single.dataloader_type = "cyclic"
    with pytest.raises(DataError, match="used --dataloader-type single: with cyclic this run would repeat samples"):
        single.build(blend, 50)
    cyclic = Run(tmp_path, "cyclic").train(blend, 50, 30)
    with pytest.raises(DataError, match="cyclic shuffled all samples of the old data together; use the data of"):
        cyclic.build(Blend(texts[:2], (0.5, 0.5)), 50)
    cyclic.seed = 6
    with pytest.raises(DataError, match=r"used --seed 5, .* use --seed 5, or --finetune"):
        cyclic.build(blend, 50)
    single = Run(tmp_path).train(blend, 50, 30)
    single.consumed = 29
    with pytest.raises(DataError, match="covers 30 consumed samples, but the run is at 29"):
        single.build(Blend(texts[:2], (0.5, 0.5)), 50)


def test_a_damaged_record_is_named(texts: tuple[str, ...], tmp_path: Path) -> None:
    history = Run(tmp_path).train(Blend(texts[:2]), 50, 30).history
    assert history is not None
    whole = history.to_dict()
    for damage in (
        {"phases": 3},
        {"data_sets": [{}]},
        {"data_sets": []},
        {"phases": [{**whole["phases"][0], "data_sets": [0, 2]}]},
        {"phases": [{**whole["phases"][0], "data_sets": [-1, 0]}]},
        {"phases": [{**whole["phases"][0], "weights": ["x"]}]},
    ):
        with pytest.raises(DataError, match="the checkpoint's record of the data read"):
            DataHistory.from_dict({**whole, **damage})
    with pytest.raises(DataError, match="record of the data"):
        DataHistory.from_dict({})


def test_samples_of_a_chain_are_those_of_its_segments(texts: tuple[str, ...], tmp_path: Path) -> None:
    blend = Blend((texts[0],))
    run = Run(tmp_path).train(blend, 40)
    train = run.build(blend, 130).train
    assert isinstance(train, SegmentChain)
    assert [len(segment) for segment in train.segments] == [51, 102]
    assert np.array_equal(train[51]["tokens"], train.segments[1][0]["tokens"])
    assert train.source_of(51) == texts[0]
    with pytest.raises(IndexError):
        train[len(train)]
    changed = run.build(Blend(texts[:2], (1.0, 1.0)), 60).train
    assert isinstance(changed, LaterPhase)
    assert len(changed) == 60
    assert len(changed[40]["tokens"]) == LENGTH
    assert changed.source_of(41) in texts[:2]
    with pytest.raises(DataError, match="was read before the data changed after 40 samples"):
        changed[39]
    with pytest.raises(IndexError):
        changed[60]


def test_a_place_is_where_the_tokens_are(texts: tuple[str, ...], tmp_path: Path) -> None:
    run = Run(tmp_path).train(Blend(texts[:2], (0.5, 0.5)), 60, 20)
    train = run.build(Blend(texts, (0.4, 0.3, 0.2, 0.1)), 200).train
    assert train is not None
    for index in range(20, 200):
        sample = train[index]  # type: ignore[index]
        tokens = [int(sample["tokens"][0]), *sample["labels"].tolist()]
        read: list[int] = []
        for piece in locate_sample(train, index).pieces:  # type: ignore[arg-type]
            raw = np.fromfile(
                f"{locate_sample(train, index).prefix}.bin",  # type: ignore[arg-type]
                np.uint16,
                piece.end - piece.begin,
                offset=piece.byte_offset,
            )
            read += raw.tolist()
            assert piece.document == piece.sequence  # each document of these texts is one sequence
        assert read == tokens


def two_phases(*counts: int) -> DataHistory:
    """Return the history of a run with as many data sets as there are counts, whose second phase begins at 40."""
    records = tuple(
        DataSetRecord(
            key=DataSetKey(name=f"d{n}", lengths_fingerprint="", first_sequence=0, end_sequence=9, sequence_length=4),
            prefix=f"d{n}",
            segments=(),
            consumed_samples=count,
        )
        for n, count in enumerate(counts)
    )
    phases = tuple(
        Phase(start=start, data_sets=(0,), weights=(1.0,), has_given_weights=False, offsets=(0,)) for start in (0, 40)
    )
    return DataHistory(
        dataloader_type="single", num_samples=None, seed=None, consumed_samples=50, data_sets=records, phases=phases
    )


@pytest.mark.parametrize(("consumed", "starts"), [(0, [0]), (39, [0]), (40, [0, 40]), (90, [0, 40])])
def test_a_history_ends_with_the_phase_of_the_next_sample(consumed: int, starts: list[int]) -> None:
    assert [phase.start for phase in two_phases(50).until(consumed).phases] == starts


def test_counts_of_an_earlier_point_lack_the_data_sets_of_later_phases() -> None:
    counted = two_phases(30, 20, 7).counted_as(two_phases(12, 5))
    assert counted.consumed_samples == 50
    assert [record.consumed_samples for record in counted.data_sets] == [12, 5, 0]


def test_a_blend_is_kept_with_its_first_data_set(texts: tuple[str, ...], tmp_path: Path) -> None:
    prefixes = [copied(text, tmp_path / text[-1]) for text in texts[:2]]
    first, second = (Blend(tuple(prefixes), weights) for weights in ((0.5, 0.5), (0.7, 0.3)))
    run = Run(None)
    run.train(first, 60, 20).train(second, 60)
    blends = [path.parent.parent.parent for path in tmp_path.rglob("*-BlendedDataset-train-description.txt")]
    assert blends == [tmp_path / "a"] * 2


def test_a_session_without_training_data_records_nothing() -> None:
    assert recorded_history(None) is None
    with pytest.raises(DataError, match="record of the data read is damaged"):
        recorded_history({})


def test_names_are_of_blends_of_several_data_sets(texts: tuple[str, ...], tmp_path: Path) -> None:
    run = Run(tmp_path)
    for blend, names in (
        (Blend(texts[:1]), ()),
        (Blend(texts[:1], (1.0,)), ()),
        (Blend(texts[:2]), ("a", "b")),
        (Blend((texts[0], texts[1], texts[0])), ("a", "b", "a (2)")),
    ):
        assert blend_names(run.build(blend, 20).train) == names


def test_what_becomes_of_each_data_set_is_described(texts: tuple[str, ...], tmp_path: Path) -> None:
    a, b, c, _ = texts
    run = Run(tmp_path).train(Blend((a, b), (0.9, 0.1)), 60, 1)
    assert run.counts() == {"a": 1, "b": 0}
    run.train(Blend((b, c), (0.5, 0.5)), 60, 7)
    assert f"{b} 0.1 -> 0.5, continuing after 0 samples; {c} new, 0.5; {a} 0.9 -> removed" in run.lines[-1]
    run.train(Blend((a, c), (0.5, 0.5)), 60)
    changes = [line for line in run.lines if "the training data changes" in line]
    assert f"{a} left out -> 0.5, continuing after 1 samples" in changes[-1]


def test_the_largest_seed_is_followed_by_0(texts: tuple[str, ...], tmp_path: Path) -> None:
    blend = Blend((texts[0],))
    run = Run(tmp_path, seed=2**32 - 1).train(blend, 40).train(blend, 130)
    assert run.history is not None
    assert [segment.seed for segment in run.history.data_sets[0].segments] == [2**32 - 1, 0]


def test_samples_before_and_after_a_phase_are_rejected(texts: tuple[str, ...], tmp_path: Path) -> None:
    run = Run(tmp_path).train(Blend(texts[:1]), 40)
    changed = run.build(Blend(texts[:2], (1.0, 1.0)), 60).train
    assert isinstance(changed, LaterPhase)
    with pytest.raises(DataError, match="sample 39 was read before the data changed after 40 samples"):
        sample_keys(changed, np.array([40, 39]))
    assert len(sample_keys(changed, np.array([40, 59]))) == 2
    assert len(sample_keys(changed, np.array([], np.int64))) == 0
    shorter = LaterPhase(changed.dataset, 40, 50)
    assert shorter.source_of(49) in texts[:2]
    for index in (-1, 50):
        with pytest.raises(IndexError, match=f"^sample {index} of 50$"):
            shorter[index]


@pytest.mark.parametrize(("offset", "length"), [(0, 51), (50, 1), (51, 0), (60, 0)])
def test_a_chain_that_was_read_to_its_end_is_empty(
    offset: int, length: int, texts: tuple[str, ...], tmp_path: Path
) -> None:
    segment = Run(tmp_path).build(Blend((texts[0],)), 40).train
    chain = SegmentChain([segment], offset)  # type: ignore[list-item]
    assert len(chain) == length
    for index in (-1, length):
        with pytest.raises(IndexError, match=f"^sample {index} of {length}$"):
            chain[index]


def copied(text: str, folder: Path) -> str:
    """Copy a text to a folder and return its prefix there."""
    folder.mkdir(parents=True)
    for suffix in (".bin", ".idx"):
        shutil.copy(text + suffix, folder)
    return str(folder / Path(text).name)


def test_a_data_set_of_which_nothing_is_left_is_read_no_more(texts: tuple[str, ...], tmp_path: Path) -> None:
    a, b, c, _ = texts
    run = Run(tmp_path).train(Blend((a, b)), 85, 85).train(Blend((a, b, c)), 85 + 70)
    assert run.counts() == {"a": 51, "b": 34, "c": 70}
    assert_read_in_order(run)


def test_the_rest_of_two_data_sets_is_rounded_up_for_each(texts: tuple[str, ...], tmp_path: Path) -> None:
    run = Run(tmp_path).train(Blend(texts[:1]), 40)
    weighted, by_size = (run.build(Blend(texts[:2], weights), 55).train for weights in ((0.3, 0.7), None))
    assert [len(data) for data in (weighted, by_size) if data is not None] == [40 + 5 + 11, 55]
    done = run.build(Blend(texts[1:3]), 40).train
    assert done is not None
    assert len(done) == 41


def test_new_weights_are_no_change_the_next_time(texts: tuple[str, ...], tmp_path: Path) -> None:
    for weights in ((0.3, 0.7), None):
        run = Run(tmp_path).train(Blend(texts[:1]), 40, 10)
        for stop in (20, 30, 40):
            run.train(Blend(texts[:2], weights), 40, stop)
        assert run.history is not None
        assert [phase.start for phase in run.history.phases] == [0, 10]


def test_a_data_set_that_was_moved_goes_on_and_is_recorded_there(texts: tuple[str, ...], tmp_path: Path) -> None:
    run = Run(tmp_path / "cache").train(Blend(texts[:1]), 40, 10)
    moved = copied(texts[0], tmp_path / "moved")
    run.train(Blend((moved,)), 40)
    assert run.history is not None
    assert [record.prefix for record in run.history.data_sets] == [moved]
    assert_read_in_order(run)


def test_text_that_a_continued_run_reads_twice_is_reported(texts: tuple[str, ...], tmp_path: Path) -> None:
    run = Run(tmp_path).train(Blend(texts[:1]), 80, 40)
    run.lines.clear()
    run.train(Blend(texts[:1]), 80)
    assert run.lines == [f" > train data {texts[0]}: need 80 samples, have 51 in one epoch, reading 2 epochs"]


def test_the_same_data_set_is_counted_apart_each_time() -> None:
    key = DataSetKey(name="d", lengths_fingerprint="", first_sequence=0, end_sequence=9, sequence_length=4)
    other = dataclasses.replace(key, name="e")
    assert [each.occurrence for each in number_occurrences([key, other, key, key, other])] == [0, 0, 1, 2, 1]


def test_data_sets_of_one_name_are_named_by_more_of_their_paths(texts: tuple[str, ...], tmp_path: Path) -> None:
    prefixes = tuple(copied(texts[0], tmp_path / folder) for folder in ("x/one", "y/one", "z"))
    train = Run(tmp_path / "cache").build(Blend((*prefixes, texts[1], prefixes[0], prefixes[0])), 20).train
    assert blend_names(train) == ("x/one/a", "y/one/a", "z/a", "b", "x/one/a (2)", "x/one/a (3)")


def test_a_sample_that_is_not_there_has_no_key(texts: tuple[str, ...], tmp_path: Path) -> None:
    for blend in (Blend(texts[:1]), Blend(texts[:2])):
        train = Run(tmp_path).build(blend, 20).train
        assert train is not None
        for index in (-1, len(train)):
            with pytest.raises(IndexError, match=f"^samples {min(0, index)} to {max(0, index)} of {len(train)}$"):
                sample_keys(train, np.array([0, index]))


def test_a_place_names_the_document_of_a_sequence(tmp_path: Path) -> None:
    with IndexedDatasetBuilder(tmp_path / "pairs", np.uint16) as builder:
        for _ in range(6):
            builder.add_document(np.arange(20), [9, 11])
        builder.finalize()
    train = Run(tmp_path).build(Blend((str(tmp_path / "pairs"),)), 10).train
    assert train is not None
    pieces = [piece for index in range(len(train)) for piece in locate_sample(train, index).pieces]
    assert {piece.sequence for piece in pieces} == set(range(12))
    assert all(piece.document == piece.sequence // 2 for piece in pieces)


def test_the_key_of_a_sample_is_its_place_in_the_unshuffled_data(texts: tuple[str, ...], tmp_path: Path) -> None:
    run = Run(tmp_path).train(Blend(texts[:1]), 40).train(Blend(texts[:2], (0.4, 0.6)), 120)
    assert run.keys == [[place.data_set, place.row] for place in run.places]
    assert run.keys != [[place.data_set, place.sample] for place in run.places]


FIRST = LeftOut(start=40, end=48, iteration=6, reason="sample 43", samples=(43,))
SECOND = LeftOut(start=8, end=12, iteration=3, reason="--iterations-to-skip")


def test_a_step_meets_what_overlaps_it() -> None:
    record = SkippedSamples().with_step(FIRST).with_step(SECOND)
    assert record.meeting(47, 50) is FIRST
    assert record.meeting(0, 9) is SECOND
    assert record.meeting(12, 40) is None
    assert record.meeting(48, 56) is None


def test_the_same_samples_are_recorded_once() -> None:
    again = LeftOut(start=40, end=48, iteration=6, reason="again")
    assert SkippedSamples((FIRST, SECOND)).with_step(again).steps == (SECOND, again)


def test_a_record_is_read_back_from_beside_a_history() -> None:
    record = SkippedSamples((FIRST,)).with_rewind().with_step(SECOND)
    assert record.num_rewound == 1
    assert SkippedSamples.from_dict({"phases": [], **record.to_dict()}) == record
    assert SkippedSamples.from_dict(None) == SkippedSamples.from_dict({"phases": []}) == SkippedSamples()
    assert SkippedSamples().to_dict() == {}
    assert recorded_history(record.to_dict()) is None
    assert recorded_history(SkippedSamples().with_rewind().to_dict()) is None


@pytest.mark.parametrize(
    "damage", [{"left_out": [{"start": 1}]}, {"left_out": 3}, {"left_out": ["x"]}, {"num_rewound": "x"}]
)
def test_a_damaged_record_is_refused(damage: dict[str, object]) -> None:
    with pytest.raises(DataError, match="record of the skipped samples is damaged"):
        SkippedSamples.from_dict(damage)
