from __future__ import annotations

import json
import random
import re
import sys
import unicodedata
from pathlib import Path
from typing import Any

import pytest

from megatron.core.errors import TokenizerError
from megatron.core.tokenizers import tokenizers_engine
from megatron.core.tokenizers.gpt2_bpe_tokenizer import GPT2BPETokenizer, byte_characters
from tests.unit.core.tokenizers.gpt2_oracle import GPT2Oracle

SHARED_DATA = Path(__file__).parents[4].parent / "shared" / "data"
HARD_TEXTS = [
    "",
    " ",
    "   leading and trailing   ",
    "It's we'll you're I've I'm he'd don't 'S 'LL ''s",
    "tabs\tand\nnew\r\nlines\n\n\n  x\n",
    "numbers 1234567890 ½ ² Ⅷ ٣",
    "naïve café Straße Ωμέγα Привет 你好世界 こんにちは 👩‍👩‍👧‍👦 🇩🇪",
    "\x00\x01\x1c\x1f\x7f\x85\xa0\xad\u200b\u3000\ufeff\uffff",
    "<|endoftext|> <unk> # # ## ###",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa" * 5,
    "e\u0301 \u1100\u1161",
]


def random_texts(count: int) -> list[str]:
    """Mix letters of many scripts; only characters old enough that every Unicode table agrees on them."""
    source = random.Random(20260)
    pools = [
        "abcdefgh",
        "ABC'",
        "0123",
        " \t\n",
        "!?#-_,.",
        "éßøñ",
        "абвг",
        "中文字",
        "🙂🚀",
        "\u00a0\u2028",
        "'s't're",
    ]
    return ["".join(source.choice(source.choice(pools)) for _ in range(source.randrange(80))) for _ in range(count)]


@pytest.fixture
def small(gpt2_files: tuple[Path, Path]) -> GPT2BPETokenizer:
    return GPT2BPETokenizer(*gpt2_files)


def test_small_vocabulary_equals_the_oracle(
    small: GPT2BPETokenizer, gpt2_files: tuple[Path, Path], corpus: list[str]
) -> None:
    oracle = GPT2Oracle(*gpt2_files)
    texts = HARD_TEXTS + random_texts(300) + corpus[:200]
    expected = [oracle.encode(text) for text in texts]
    assert [small.tokenize(text) for text in texts] == expected
    assert small.tokenize_batch(texts) == expected
    assert small.tokenize_batch(texts, num_threads=3) == expected
    # Some merge must have happened, or the comparison shows nothing.
    assert sum(map(len, expected)) < sum(len(text.encode()) for text in texts) * 0.9


@pytest.mark.full
def test_real_vocabulary_equals_the_oracle() -> None:
    files = (SHARED_DATA / "gpt2-vocab.json", SHARED_DATA / "gpt2-merges.txt")
    if not all(file.is_file() for file in files):
        pytest.skip("the real GPT-2 vocabulary is not beside the repository (../shared/data)")
    tokenizer, oracle = GPT2BPETokenizer(*files), GPT2Oracle(*files)
    assert (tokenizer.vocab_size, tokenizer.eod_id) == (50257, 50256)
    assert tokenizer.tokenize("Hello world") == [15496, 995]
    lines = (SHARED_DATA / "wikitext2.jsonl").read_text(encoding="utf-8").splitlines()
    texts = HARD_TEXTS + random_texts(200) + [json.loads(line)["text"][:3000] for line in lines]
    assert tokenizer.tokenize_batch(texts) == [oracle.encode(text) for text in texts]
    for text in texts:
        assert tokenizer.detokenize(tokenizer.tokenize(text)) == text


def test_characters_of_all_scripts_equal_the_oracle(small: GPT2BPETokenizer, gpt2_files: tuple[Path, Path]) -> None:
    oracle = GPT2Oracle(*gpt2_files)
    # Python's table is older than both engines', so what it knows they know; a prime step keeps it quick.
    known = [chr(i) for i in range(0, sys.maxunicode, 37) if unicodedata.category(chr(i)) not in ("Cn", "Cs")]
    texts = [f"a{character}1{character}!{character} {character}b" for character in known]
    wrong = [t for t, ids in zip(texts, small.tokenize_batch(texts), strict=True) if ids != oracle.encode(t)]
    assert len(known) > 5000
    assert wrong == []


def test_round_trip(small: GPT2BPETokenizer) -> None:
    for text in HARD_TEXTS + random_texts(200):
        assert small.detokenize(small.tokenize(text)) == text


def test_partial_characters_decode_to_replacements(small: GPT2BPETokenizer) -> None:
    assert small.detokenize(small.tokenize("é")[:1]) == "\ufffd"


def test_end_of_document_is_never_found_in_a_text(small: GPT2BPETokenizer) -> None:
    assert small.eod_id == 699
    assert small.vocab_size == 700
    assert small.eod_id not in small.tokenize("a<|endoftext|>b")
    assert small.detokenize([small.eod_id]) == "<|endoftext|>"


def test_extra_vocabulary_has_no_text(gpt2_files: tuple[Path, Path]) -> None:
    tokenizer = GPT2BPETokenizer(*gpt2_files, extra_vocab_size=13)
    assert tokenizer.vocab_size == 713
    assert tokenizer.detokenize([705, *tokenizer.tokenize("ok")]) == "ok"


def test_byte_characters_are_the_oracles(gpt2_files: tuple[Path, Path]) -> None:
    letters = GPT2Oracle(*gpt2_files).letters
    assert byte_characters() == [letters[b] for b in range(256)]


def test_vocabulary_without_end_of_text(gpt2_files: tuple[Path, Path]) -> None:
    vocab_file, merge_file = gpt2_files
    vocabulary = json.loads(vocab_file.read_text(encoding="utf-8"))
    del vocabulary["<|endoftext|>"]
    vocab_file.write_text(json.dumps(vocabulary), encoding="utf-8")
    assert GPT2BPETokenizer(vocab_file, merge_file).eod_id is None


def test_windows_line_ends_in_the_merges(small: GPT2BPETokenizer, gpt2_files: tuple[Path, Path]) -> None:
    vocab_file, merge_file = gpt2_files
    merge_file.write_bytes(merge_file.read_bytes().replace(b"\n", b"\r\n"))
    text = "the arguments of the parser"
    assert GPT2BPETokenizer(vocab_file, merge_file).tokenize(text) == small.tokenize(text)


def test_merges_without_a_header(small: GPT2BPETokenizer, gpt2_files: tuple[Path, Path]) -> None:
    header, _, merges = gpt2_files[1].read_text(encoding="utf-8").partition("\n")
    assert header.startswith("#version")
    gpt2_files[1].write_text(merges, encoding="utf-8")
    assert [GPT2BPETokenizer(*gpt2_files).tokenize(text) for text in HARD_TEXTS] == list(
        map(small.tokenize, HARD_TEXTS)
    )


def test_files_beside_those_of_a_model_folder_belong_to_the_tokenizer(
    gpt2_files: tuple[Path, Path], tmp_path: Path
) -> None:
    beside = gpt2_files[0].with_name("tokenizer_config.json")
    beside.write_text("{}")
    assert GPT2BPETokenizer(*gpt2_files).files == (*gpt2_files, beside)
    elsewhere = tmp_path / gpt2_files[1].name
    elsewhere.write_bytes(gpt2_files[1].read_bytes())
    assert GPT2BPETokenizer(gpt2_files[0], elsewhere).files == (gpt2_files[0], elsewhere)
    other_name = gpt2_files[0].with_name("bpe.json")
    gpt2_files[0].rename(other_name)
    assert GPT2BPETokenizer(other_name, gpt2_files[1]).files == (other_name, gpt2_files[1])


def test_lone_surrogate_is_refused(small: GPT2BPETokenizer) -> None:
    with pytest.raises(TokenizerError, match="surrogate"):
        small.tokenize("a\ud800b")
    with pytest.raises(TokenizerError, match="surrogate"):
        small.tokenize_batch(["good", "a\ud800b"], num_threads=2)


class CountedEngine:
    """Pass batches on to an engine of the package and note how many characters each has."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.sizes: list[int] = []

    def encode_batch_fast(self, texts: list[str], add_special_tokens: bool) -> Any:
        self.sizes.append(sum(map(len, texts)))
        return self._engine.encode_batch_fast(texts, add_special_tokens=add_special_tokens)


def test_texts_are_encoded_in_batches_of_bounded_size(
    small: GPT2BPETokenizer, corpus: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [small.tokenize(text) for text in corpus]
    counted = CountedEngine(small._engine._engine)
    monkeypatch.setattr(small._engine, "_engine", counted)
    most = sum(map(len, corpus)) // 5
    monkeypatch.setattr(tokenizers_engine, "_BATCH_CHARACTERS", most)
    assert small.tokenize_batch(corpus) == expected
    assert sum(counted.sizes) == sum(map(len, corpus))
    assert len(counted.sizes) <= 6
    assert max(counted.sizes) < most + max(map(len, corpus))


def test_missing_flags_and_files(gpt2_files: tuple[Path, Path], tmp_path: Path) -> None:
    vocab_file, merge_file = gpt2_files
    with pytest.raises(TokenizerError, match="needs --vocab-file"):
        GPT2BPETokenizer(None, merge_file)
    with pytest.raises(TokenizerError, match=r"absent\.txt does not exist; change --merge-file"):
        GPT2BPETokenizer(vocab_file, tmp_path / "absent.txt")
    with pytest.raises(TokenizerError, match="is not a file; change --vocab-file"):
        GPT2BPETokenizer(tmp_path, merge_file)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"a": 0', "not valid JSON"),
        ("[1, 2]", "JSON list"),
        ('{"a": "0"}', "token 'a' has the id '0'"),
        ('{"a": 0}', "255 of the 256 byte tokens are missing, the first for byte 0"),
    ],
)
def test_damaged_vocabulary(gpt2_files: tuple[Path, Path], content: str, message: str) -> None:
    gpt2_files[0].write_text(content, encoding="utf-8")
    with pytest.raises(TokenizerError, match=message):
        GPT2BPETokenizer(*gpt2_files)


def test_damaged_merges(gpt2_files: tuple[Path, Path]) -> None:
    vocab_file, merge_file = gpt2_files
    merge_file.write_text("#version: 0.2\nt h\nthree words here\n", encoding="utf-8")
    with pytest.raises(
        TokenizerError, match=r"merges.txt:3: two tokens are expected, but the line is 'three words here'"
    ):
        GPT2BPETokenizer(vocab_file, merge_file)
    merge_file.write_text("#version: 0.2\nq zz\n", encoding="utf-8")
    with pytest.raises(TokenizerError, match="do not match"):
        GPT2BPETokenizer(vocab_file, merge_file)


def test_merges_that_are_cut_short_are_named(gpt2_files: tuple[Path, Path]) -> None:
    """One line is missing at the end: nothing else in either file is wrong."""
    vocab_file, merge_file = gpt2_files
    lines = merge_file.read_text(encoding="utf-8").splitlines(keepends=True)
    last = "".join(lines[-1].split())
    merge_file.write_text("".join(lines[:-1]), encoding="utf-8")
    needed = (
        f"merges.txt has 442 merges, but the 700 tokens of .*vocab.json need 443: no merge produces '{re.escape(last)}'"
    )
    with pytest.raises(TokenizerError, match=needed):
        GPT2BPETokenizer(vocab_file, merge_file)


def with_tokens(vocab_file: Path, *tokens: str) -> None:
    vocabulary = json.loads(vocab_file.read_text(encoding="utf-8"))
    vocabulary |= {token: len(vocabulary) + number for number, token in enumerate(tokens)}
    vocab_file.write_text(json.dumps(vocabulary), encoding="utf-8")


def test_tokens_that_no_two_others_make_were_added(gpt2_files: tuple[Path, Path]) -> None:
    """OPT fills its vocabulary up with such words, and no file beside it says so."""
    with_tokens(gpt2_files[0], "madeupword0000", "madeupword0001", "<mask>")
    assert GPT2BPETokenizer(*gpt2_files).vocab_size == 703
    lines = gpt2_files[1].read_text(encoding="utf-8").splitlines(keepends=True)
    gpt2_files[1].write_text("".join(lines[:-1]), encoding="utf-8")
    with pytest.raises(
        TokenizerError,
        match=r"443: no merge produces .* it is truncated .* list tokens that were added to the vocabulary in "
        r"added_tokens",
    ):
        GPT2BPETokenizer(*gpt2_files)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("added_tokens.json", {"qq": 700}),
        ("special_tokens_map.json", {"additional_special_tokens": [{"content": "qq"}]}),
        ("special_tokens_map.json", {"pad_token": "qq"}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"700": {"content": "qq", "special": False}}}),
    ],
)
def test_tokens_that_a_file_beside_lists_were_added(
    gpt2_files: tuple[Path, Path], name: str, content: dict[str, Any]
) -> None:
    with_tokens(gpt2_files[0], "qq")
    with pytest.raises(TokenizerError, match="no merge produces 'qq'"):
        GPT2BPETokenizer(*gpt2_files)
    (gpt2_files[0].parent / name).write_text(json.dumps(content))
    assert GPT2BPETokenizer(*gpt2_files).vocab_size == 701


def test_vocabulary_that_is_of_another_model_is_named(gpt2_files: tuple[Path, Path]) -> None:
    vocab_file, merge_file = gpt2_files
    vocabulary = json.loads(vocab_file.read_text(encoding="utf-8"))
    first = "".join(merge_file.read_text(encoding="utf-8").splitlines()[1].split())
    del vocabulary[first]
    vocab_file.write_text(json.dumps(vocabulary), encoding="utf-8")
    message = rf"merges.txt:2: .* needs the token '{re.escape(first)}', which .*vocab.json lacks"
    with pytest.raises(TokenizerError, match=message):
        GPT2BPETokenizer(vocab_file, merge_file)


def test_exchanged_files_are_named(gpt2_files: tuple[Path, Path]) -> None:
    vocab_file, merge_file = gpt2_files
    with pytest.raises(TokenizerError, match=r"merges.txt contains merges, not a vocabulary; exchange"):
        GPT2BPETokenizer(merge_file, vocab_file)
    with pytest.raises(TokenizerError, match=r"vocab.json contains JSON, not merges"):
        GPT2BPETokenizer(vocab_file, vocab_file)
