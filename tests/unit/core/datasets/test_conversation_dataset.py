"""Samples of conversations: packing, masks, documents, epochs, and data sets that cannot be used."""

from __future__ import annotations

import fcntl
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.core.datasets import conversation_file
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedDatasetBuilder, count_held, make_samples
from megatron.core.datasets.conversation_dataset import ConversationDataset, count_epochs, pack_conversations
from megatron.core.datasets.conversation_file import ConversationFile, ConversationOptions, mask_prefix
from megatron.core.datasets.data_history import DataHistory, RunPosition
from megatron.core.datasets.gpt_dataset import GPTSample
from megatron.core.datasets.gpt_dataset_config import Blend, GPTDatasetConfig
from megatron.core.datasets.index_builder import NumpyIndexBuilder
from megatron.core.datasets.index_cache import IndexCache
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.core.datasets.sample_keys import locate_sample, sample_keys
from megatron.core.errors import DataError
from megatron.core.tokenizers.tokenizer import NullTokenizer
from tests.unit.core.datasets.small_chat import write_chat_folder

EOD = 99
LENGTH = 11


def write(prefix: Path, conversations: Sequence[tuple[Sequence[int], Sequence[int]]]) -> str:
    """Write (tokens, mask) of each conversation."""
    for path, kind, place in ((prefix, np.uint16, 0), (Path(mask_prefix(prefix)), np.uint8, 1)):
        with IndexedDatasetBuilder(path, kind) as builder:
            for conversation in conversations:
                builder.add_document(np.array(conversation[place], kind))
            builder.finalize()
    return str(prefix)


def of_lengths(lengths: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Make conversations whose first token is their number, and whose last two tokens are the answer."""
    return [([number, *range(40, 38 + n), EOD], [0] * (n - 2) + [1] * 2) for number, n in enumerate(lengths)]


def config_of(blend: Blend, tmp_path: Path, **options: object) -> GPTDatasetConfig:
    own = {name: options.pop(name) for name in ("longest", "packs") if name in options}
    values: dict[str, object] = {
        "sequence_length": LENGTH,
        "blend": blend,
        "split": "1",
        "path_to_cache": str(tmp_path / "cache"),
        "eod_token_id": EOD,
        "reset_position_ids": True,
        "reset_attention_mask": True,
        "conversations": ConversationOptions(NullTokenizer(EOD), "plain", **own),  # type: ignore[arg-type]
    }
    return GPTDatasetConfig(**(values | options))  # type: ignore[arg-type]


def build(config: GPTDatasetConfig, num_samples: int, position: RunPosition | None = None, report=lambda line: None):
    return BlendedDatasetBuilder(config, (num_samples, 0, 0), report, position=position).build()


def one_epoch(tmp_path: Path, lengths: Sequence[int], **options: object) -> ConversationDataset:
    prefix = write(tmp_path / "talk", of_lengths(lengths))
    dataset = build(config_of(Blend((prefix,)), tmp_path, **options), 1).train
    assert isinstance(dataset, ConversationDataset)
    return dataset


def test_a_packed_sample_keeps_conversations_apart(tmp_path: Path) -> None:
    (sample,) = one_epoch(tmp_path, [6, 4])
    assert sample["tokens"].tolist() == [0, 40, 41, 42, 43, EOD, 1, 40, 41, EOD, EOD]
    assert sample["labels"].tolist() == [40, 41, 42, 43, EOD, 1, 40, 41, EOD, EOD, EOD]
    assert sample["loss_mask"].tolist() == [0, 0, 0, 1, 1, 0, 0, 1, 1, 0, 0]
    assert sample["document_ids"].tolist() == [0] * 6 + [1] * 4 + [2]
    assert sample["position_ids"].tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 0]


def test_the_first_token_of_a_conversation_is_never_a_label(tmp_path: Path) -> None:
    prefix = write(tmp_path / "talk", [([5, 6], [1, 1]), ([7, 8], [1, 1])])
    (sample,) = build(config_of(Blend((prefix,)), tmp_path), 1).train
    assert sample["loss_mask"].tolist() == [1, 0, 1, *[0] * 8]


def test_each_conversation_is_a_sample_without_packing(tmp_path: Path) -> None:
    dataset = one_epoch(tmp_path, [6, 4, 3], packs=False, reset_position_ids=False, reset_attention_mask=False)
    samples = sorted(dataset, key=lambda sample: int(sample["tokens"][0]))
    assert [int(sample["tokens"][0]) for sample in samples] == [0, 1, 2]
    for sample, length in zip(samples, (6, 4, 3)):
        assert np.flatnonzero(sample["loss_mask"]).tolist() == [length - 3, length - 2]
        assert sample["position_ids"].tolist() == list(range(LENGTH))
        assert "document_ids" not in sample
        # What a user said has no loss, and is no padding.
        assert np.flatnonzero(~sample["padding_mask"]).tolist() == list(range(length))


@pytest.mark.parametrize(("longest", "kept"), [(None, LENGTH + 1), (7, 8)])
def test_a_long_conversation_is_cut_at_its_end(tmp_path: Path, longest: int | None, kept: int) -> None:
    dataset = one_epoch(tmp_path, [20], longest=longest)
    (sample,) = dataset
    text = [*range(40, 40 + LENGTH)]
    assert sample["labels"].tolist()[: kept - 1] == text[: kept - 1]
    assert sample["loss_mask"].sum() == 0  # its answer was behind the cut
    assert dataset.packed.describe().endswith(f"; 1 conversations are longer than {kept} tokens and are truncated")


def test_the_loss_of_a_document_end_can_be_left_out(tmp_path: Path) -> None:
    prefix = write(tmp_path / "talk", [([5, EOD, 7], [0, 1, 1])])
    for masks, expected in ((False, [1, 1]), (True, [1, 0])):
        (sample,) = build(config_of(Blend((prefix,)), tmp_path, eod_mask_loss=masks), 1).train
        assert sample["loss_mask"].tolist()[:2] == expected


def test_packing_fills_samples_and_splits_nothing() -> None:
    lengths = np.random.RandomState(3).randint(0, 51, 2000).astype(np.int32)
    order, starts = pack_conversations(lengths, 64, np.random.RandomState(1), together=True)
    assert sorted(order.tolist()) == np.flatnonzero(lengths).tolist()
    sizes = [int(lengths[order[begin:end]].sum()) for begin, end in itertools.pairwise(starts.tolist())]
    assert max(sizes) <= 64
    assert len(sizes) <= 1.02 * lengths.sum() / 64
    again = pack_conversations(lengths, 64, np.random.RandomState(1), together=True)
    assert np.array_equal(order, again[0])
    other = pack_conversations(lengths, 64, np.random.RandomState(2), together=True)
    assert not np.array_equal(order, other[0])


def test_a_damaged_index_is_reported_and_built_again_and_a_whole_one_is_read(tmp_path: Path) -> None:
    config = config_of(Blend((write(tmp_path / "talk", of_lengths([6, 5, 4, 4, 3, 7])),)), tmp_path)

    def tokens() -> tuple[list[list[int]], list[str]]:
        lines: list[str] = []
        dataset = build(config, 1, report=lines.append).train
        return [sample["tokens"].tolist() for sample in dataset], [line for line in lines if "WARNING" in line]

    first = tokens()
    assert tokens() == first
    assert first[1] == []
    for name, damage in (
        ("sample_index", lambda starts: starts + (starts == 0)),
        ("sample_index", lambda starts: starts[:-1]),
        ("sample_index", lambda starts: starts[:0]),
        ("sample_index", lambda starts: starts.astype(np.int32)),
        ("sample_index", lambda starts: starts[None]),
        ("conversation_index", lambda order: order[:-1]),
        ("conversation_index", lambda order: order.astype(np.int32)),
        ("conversation_index", lambda order: order[None]),
    ):
        (path,) = (tmp_path / "cache").glob(f"*-ConversationDataset-{name}.npy")
        np.save(path, damage(np.load(path)))
        again, (warning,) = tokens()
        assert again == first[0]
        assert "it does not contain these conversations" in warning


def firsts(sample: GPTSample) -> tuple[int, ...]:
    starts = np.flatnonzero(sample["position_ids"] == 0)
    return tuple(int(sample["tokens"][start]) for start in starts if sample["tokens"][start] != EOD)


def test_each_epoch_has_every_conversation_once_in_another_order(tmp_path: Path) -> None:
    prefix = write(tmp_path / "talk", of_lengths([6, 5, 4, 4, 3, 7, 9, 12, 3, 6]))
    lines: list[str] = []
    dataset = build(config_of(Blend((prefix,)), tmp_path), 15, report=lines.append).train
    per_epoch = len(dataset.packed)
    assert len(dataset) == per_epoch * -(-15 // per_epoch)
    numbers = [firsts(sample) for sample in dataset]
    orders = [numbers[start : start + per_epoch] for start in range(0, len(dataset), per_epoch)]
    for order in orders:
        assert sorted(number for of_sample in order for number in of_sample) == list(range(10))
    assert orders[0] != orders[1]
    assert lines[0] == f" > train data {prefix}: need 15 samples, have {per_epoch} in one epoch, reading 3 epochs"
    assert lines[1] == f" > train data {prefix}: 10 conversations in {per_epoch} samples, 98.3% full"


def test_a_blend_resumes_where_it_was(tmp_path: Path) -> None:
    blend = Blend(
        (write(tmp_path / "one", of_lengths([6, 5, 4, 4])), write(tmp_path / "two", of_lengths([7, 3, 9]))), (0.7, 0.3)
    )
    config = config_of(blend, tmp_path)
    whole = build(config, 12)
    history = whole.history
    assert history is not None
    history = DataHistory.from_dict(history.with_consumed(5, (4, 1)).to_dict())
    resumed = build(config, 12, RunPosition(consumed_samples=5, history=history))
    longer = build(config, 40, RunPosition(consumed_samples=5, history=history))
    for index in range(12):
        assert whole.train[index]["labels"].tolist() == resumed.train[index]["labels"].tolist()
        assert whole.train[index]["labels"].tolist() == longer.train[index]["labels"].tolist()
    ids = np.arange(40)
    keys = sample_keys(longer.train, ids)
    assert len({tuple(key) for key in keys.tolist()}) == 40
    place = locate_sample(longer.train, 0)
    labels = longer.train[0]["labels"].tolist()
    assert labels[: place.pieces[0].end - 1] == [*range(40, 38 + place.pieces[0].end), EOD]


def test_a_run_that_packs_otherwise_begins_the_data_anew(tmp_path: Path) -> None:
    prefix = write(tmp_path / "talk", of_lengths([6, 5, 4, 4, 7, 3, 9]))
    blend, lines = Blend((prefix,)), list[str]()
    history = build(config_of(blend, tmp_path), 8).history
    assert history is not None
    position = RunPosition(consumed_samples=3, history=history.with_consumed(3, (3,)))
    for options in ({}, {"packs": False}, {"longest": 4}):
        build(config_of(blend, tmp_path, **options), 8, position, lines.append)
    changes = [line for line in lines if "the training data changes" in line]
    assert len(changes) == 2
    assert all("after 3 samples" in line and f"{prefix} 1 -> removed" in line for line in changes)


def test_token_files_without_masks_are_refused(tmp_path: Path) -> None:
    prefix = write(tmp_path / "talk", of_lengths([6, 4]))
    other = write(tmp_path / "other", of_lengths([4, 6]))
    ConversationFile(prefix)
    for suffix in (".bin", ".idx"):
        Path(mask_prefix(other) + suffix).replace(mask_prefix(prefix) + suffix)
    with pytest.raises(DataError, match="does not match the data set"):
        ConversationFile(prefix)
    with pytest.raises(DataError, match=r"other has no loss masks: .* python tools/preprocess_data\.py --sft"):
        build(config_of(Blend((other,)), tmp_path), 1)
    (tmp_path / "raw.jsonl").touch()
    with pytest.raises(DataError, match=r"raw is not a data set; .*raw\.jsonl, pass"):
        build(config_of(Blend((str(tmp_path / "raw"),)), tmp_path), 1)


def test_jsonl_is_packed_once_and_a_bad_line_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "talk.jsonl"
    file.write_text('{"prompt": "1 2 ", "completion": "7"}\n\n{"prompt": "3 ", "completion": "8 9"}\n')
    lines: list[str] = []
    config = config_of(Blend((str(file),)), tmp_path)
    (sample,) = build(config, 1, report=lines.append).train
    assert sample["loss_mask"].sum() == 5
    kept = f"cached in {tmp_path / 'cache'}"
    assert lines[0] == f" > tokenizing {file} with the template plain, once: the result is {kept}"
    assert lines[1] == " > tokenized 2 conversations, 8 tokens"
    monkeypatch.setattr(IndexedDatasetBuilder, "finalize", None)  # nothing is written again
    (again,) = build(config, 1).train
    assert again["tokens"].tolist() == sample["tokens"].tolist()
    monkeypatch.undo()
    file.write_text('{"prompt": "1 2 ", "completion": "7"}\n\n{"prompt": "3 "}\n')
    with pytest.raises(DataError, match=r"talk\.jsonl:3: not a conversation: the keys are prompt; use messages"):
        build(config, 1)
    file.write_text("\n")
    with pytest.raises(DataError, match=r"talk\.jsonl contains no conversation"):
        build(config, 1)
    assert not list((tmp_path / "cache").glob("*tmp*"))


def test_a_json_array_is_packed_like_jsonl_and_its_items_are_named(tmp_path: Path) -> None:
    items = [{"prompt": "1 2 ", "completion": "7"}, {"prompt": "3 ", "completion": "8 9"}]
    (tmp_path / "talk.jsonl").write_text("".join(f"{json.dumps(item)}\n" for item in items))
    (tmp_path / "talk.json").write_text(json.dumps(items, indent=1))
    found = [
        build(config_of(Blend((str(tmp_path / name),)), tmp_path), 1).train[0] for name in ("talk.jsonl", "talk.json")
    ]
    assert found[0]["tokens"].tolist() == found[1]["tokens"].tolist()
    assert found[0]["loss_mask"].tolist() == found[1]["loss_mask"].tolist()
    (tmp_path / "talk.json").write_text(json.dumps([items[0], {"prompt": "3 "}]))
    with pytest.raises(DataError, match=r"talk\.json, item 2: not a conversation: the keys are prompt; use messages"):
        build(config_of(Blend((str(tmp_path / "talk.json"),)), tmp_path), 1)


def test_without_a_template_one_built_in_format_is_used_and_named(tmp_path: Path) -> None:
    tokenizer = write_chat_folder(tmp_path / "model", None)
    encoder = ConversationOptions(tokenizer).encoder()
    (encoded,) = encoder.encode_line(b'{"prompt": "a", "completion": "b"}')
    text = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
    assert tokenizer.detokenize(encoded.tokens.tolist()) == text
    answer = [token for token, counts in zip(encoded.tokens.tolist(), encoded.loss_mask.tolist()) if counts]
    assert tokenizer.detokenize(answer) == "b<|im_end|>\n"
    assert encoder.template.name == "the built-in template chatml, because the tokenizer has none"


@pytest.mark.parametrize(("num_samples", "epochs"), [(None, 1), (0, 1), (10, 1), (11, 2), (20, 2)])
def test_epochs_are_counted_from_the_samples_that_are_needed(num_samples: int | None, epochs: int) -> None:
    assert count_epochs(10, num_samples) == epochs


@pytest.mark.parametrize("index", [-1, 2])
def test_a_sample_that_is_not_there_is_named(tmp_path: Path, index: int) -> None:
    dataset = one_epoch(tmp_path, [6, 4], packs=False)
    with pytest.raises(IndexError, match=rf"^sample {index} of 2$"):
        dataset[index]


def test_an_epoch_is_packed_of_intact_conversations_alone(tmp_path: Path) -> None:
    prefix = write(tmp_path / "talk", of_lengths([6, 4]))
    path = Path(f"{prefix}.idx")
    index = bytearray(path.read_bytes())
    index[42:50] = (9).to_bytes(8, "little")
    path.write_bytes(index)
    with pytest.raises(DataError, match=r"talk\.idx is damaged at sequence 0"):
        build(config_of(Blend((prefix,)), tmp_path), 1)


def test_a_conversation_of_one_token_is_a_sample(tmp_path: Path) -> None:
    prefix = write(tmp_path / "talk", [([5], [0])])
    (sample,) = build(config_of(Blend((prefix,)), tmp_path), 1).train
    assert sample["tokens"].tolist() == [5] + [EOD] * (LENGTH - 1)


def test_what_is_left_of_a_sample_is_filled_without_an_end_token_too(tmp_path: Path) -> None:
    prefix = write(tmp_path / "talk", of_lengths([4]))
    config = config_of(
        Blend((prefix,)), tmp_path, eod_token_id=None, reset_position_ids=False, reset_attention_mask=False
    )
    (sample,) = build(config, 1).train
    assert sample["tokens"][4:].tolist() == [0] * (LENGTH - 4)


@pytest.mark.parametrize(
    ("options", "variant"),
    [
        ({}, ""),
        ({"longest": 7}, " (cut at 7)"),
        ({"packs": False}, " (not packed)"),
        ({"longest": 7, "packs": False}, " (cut at 7, not packed)"),
    ],
)
def test_samples_of_other_options_are_told_apart(options: dict[str, Any], variant: str) -> None:
    assert ConversationOptions(NullTokenizer(EOD), "plain", **options).variant == variant


def test_as_many_samples_are_counted_as_are_made(tmp_path: Path) -> None:
    prefix = write(tmp_path / "talk", of_lengths([6, 4, 6]))
    config = config_of(Blend((prefix,)), tmp_path, packs=False)
    dataset, cache = ConversationFile(prefix), IndexCache(tmp_path / "cache", print)
    for num_samples, held in ((None, 3), (3, 3), (4, 6), (7, 9)):
        assert count_held(dataset, range(3), num_samples, config, cache) == held
        made = make_samples(dataset, range(3), num_samples, "train", config, NumpyIndexBuilder(), cache)
        assert len(made) == held


def test_one_process_packs_jsonl_while_others_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "talk.jsonl"
    file.write_text('{"prompt": "1 2 ", "completion": "7"}\n')
    tried = []
    real = conversation_file.pack

    def pack(*arguments: Any) -> tuple[int, int]:
        (lock,) = (tmp_path / "cache/of/runs").glob("*.lock")
        with open(lock) as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        tried.append(lock)
        return real(*arguments)

    monkeypatch.setattr(conversation_file, "pack", pack)
    build(config_of(Blend((str(file),)), tmp_path, path_to_cache=str(tmp_path / "cache/of/runs")), 1)
    assert len(tried) == 1
