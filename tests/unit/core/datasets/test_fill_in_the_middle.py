"""Fill-in-the-middle: what is rearranged, and that it depends on the sample's number and nothing else."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.core.datasets.fill_in_the_middle import FillInTheMiddle, special_token_id
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.core.datasets.gpt_dataset_config import GPTDatasetConfig
from megatron.core.datasets.index_builder import NumpyIndexBuilder
from megatron.core.datasets.index_cache import IndexCache
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from megatron.core.errors import TokenizerError
from megatron.core.tokenizers.huggingface_tokenizer import HuggingFaceTokenizer
from tests.unit.core.datasets.small_chat import write_chat_folder

PREFIX, MIDDLE, SUFFIX, END = "<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<|end|>"


@pytest.fixture
def tokenizer(tmp_path: Path) -> HuggingFaceTokenizer:
    return write_chat_folder(tmp_path / "model")


def make(tokenizer: HuggingFaceTokenizer, **options: Any) -> FillInTheMiddle:
    ids = {
        f"{name}_id": special_token_id(tokenizer, token, "")
        for name, token in (("prefix", PREFIX), ("middle", MIDDLE), ("suffix", SUFFIX), ("document_end", END))
    }
    return FillInTheMiddle(**({"tokenizer": tokenizer, "rate": 1.0, "spm_rate": 0.5} | ids | options))


def rearranged(fim: FillInTheMiddle, text: str, number: int, length: int = 100) -> str:
    ids = fim.tokenizer.tokenize(text)
    tokens = np.array([*ids, *[0] * (length - len(ids))], np.int64)[:length]
    count = fim.apply(tokens, min(len(ids), length), 1234, number)
    return fim.tokenizer.detokenize(tokens[:count].tolist())


def put_together(text: str) -> str:
    """Return the text that was rearranged."""
    before, _, middle = text.partition(MIDDLE)
    if before.startswith(PREFIX + SUFFIX):
        # The middle follows the prefix, without a token between them.
        return middle + before.removeprefix(PREFIX + SUFFIX)
    prefix, _, suffix = before.removeprefix(PREFIX).partition(SUFFIX)
    return prefix + middle + suffix


def test_prefix_suffix_and_middle_are_all_of_a_document(tokenizer: HuggingFaceTokenizer) -> None:
    fim = make(tokenizer)
    found = [rearranged(fim, "abcdefgh", number) for number in range(200)]
    assert {put_together(text) for text in found} == {"abcdefgh"}
    assert 60 < sum(text.startswith(PREFIX + SUFFIX) for text in found) < 140
    assert len(set(found)) > 30
    assert [rearranged(fim, "abcdefgh", number) for number in range(200)] == found


def test_documents_are_rearranged_one_by_one(tokenizer: HuggingFaceTokenizer) -> None:
    text = rearranged(make(tokenizer, spm_rate=0.0), f"abc{END}{END}defg{END}hi", 3)
    documents = text.split(END)
    assert [put_together(document) if document else "" for document in documents] == ["abc", "", "defg", "hi"]
    half = [rearranged(make(tokenizer, rate=0.5), f"abc{END}defg", number).split(END) for number in range(200)]
    changed = Counter((first != "abc", second != "defg") for first, second in half)
    assert len(changed) == 4
    assert all(25 < count < 80 for count in changed.values())


def test_what_does_not_fit_is_cut_and_the_rest_is_padding(tokenizer: HuggingFaceTokenizer) -> None:
    fim = make(tokenizer, pad_id=7)
    tokens = np.array(tokenizer.tokenize("abcdefgh"), np.int64)
    assert fim.apply(tokens, 8, 1, 0) == 8
    assert tokens[0] == fim.prefix_id
    tokens = np.array([*tokenizer.tokenize("ab"), 0, 0, 0, 0, 0], np.int64)
    assert fim.apply(tokens, 2, 1, 0) == 5
    assert tokens[5:].tolist() == [7, 7]


def test_fragments_and_beginnings_that_stay(tokenizer: HuggingFaceTokenizer) -> None:
    split = special_token_id(tokenizer, "<|user|>", "--fim-split-sample")
    fim = make(tokenizer, split_id=split, fragment_rate=1.0, kept_beginning="#!")
    parts = rearranged(fim, "abc<|user|>#!def<|user|>gh", 1).split("<|user|>")
    assert [put_together(parts[0]), parts[1], put_together(parts[2])] == ["abc", "#!def", "gh"]
    assert rearranged(make(tokenizer, split_id=split, fragment_rate=0.0), "abc<|user|>de", 1) == "abc<|user|>de"
    assert rearranged(make(tokenizer, rate=0.0), "abc", 1) == "abc"


def test_a_token_that_is_not_one_is_refused(tokenizer: HuggingFaceTokenizer) -> None:
    with pytest.raises(TokenizerError, match=r"--fim-prefix-token <PRE>: the tokenizer encodes it as 5 tokens"):
        special_token_id(tokenizer, "<PRE>", "--fim-prefix-token")


def test_a_data_set_gives_the_same_tasks_whenever_it_is_read(tokenizer: HuggingFaceTokenizer, tmp_path: Path) -> None:
    with IndexedDatasetBuilder(tmp_path / "text", np.uint16) as builder:
        for number in range(40):
            builder.add_document([*tokenizer.tokenize(chr(97 + number % 26) * 13), tokenizer.eod_id])
        builder.finalize()
    samples = []
    for fim in (make(tokenizer), make(tokenizer), None):
        config = GPTDatasetConfig(sequence_length=24, mock=True, fill_in_the_middle=fim)
        indexed, cache = IndexedDataset(tmp_path / "text"), IndexCache(None, print)
        dataset = GPTDataset(indexed, range(40), None, "train", config, NumpyIndexBuilder(), cache)
        samples.append([dataset[index]["labels"].tolist() for index in reversed(range(len(dataset)))])
    assert samples[0] == samples[1]
    assert samples[0] != samples[2]


def test_empty_documents_change_nothing_of_the_others(tokenizer: HuggingFaceTokenizer) -> None:
    fim = make(tokenizer, spm_rate=0.0)
    for number in range(5):
        text = rearranged(fim, f"abcdefgh{END}ijklmnop", number)
        assert rearranged(fim, f"{END}abcdefgh{END}{END}ijklmnop", number) == END + text.replace(END, END + END)
