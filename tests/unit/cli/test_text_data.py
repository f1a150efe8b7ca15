"""The text of --train-data is tokenized on first use, and later runs read the same data set."""

from __future__ import annotations

import gzip
import json
import multiprocessing
from pathlib import Path

import pytest

from megatron.cli.text_data import with_tokenized_text
from megatron.config.arguments import resolve_arguments
from megatron.config.printed_config import given_arguments
from megatron.config.run_config import RunConfig
from megatron.core.datasets.gpt_dataset_config import parse_split, split_boundaries
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.errors import ConfigurationError, DataError
from tests.unit.config.command_lines import SHAPE, TRAINING
from tests.unit.core.datasets.small_chat import write_chat_folder

TEXTS = ["ab", "c", "", "ddd"]
END = 128


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_chat_folder(tmp_path / "model")
    write_texts(tmp_path / "data.json", TEXTS)
    return tmp_path


def write_texts(path: Path, texts: list[str], key: str = "text") -> Path:
    path.write_text("".join(json.dumps({key: text}) + "\n" for text in texts))
    return path


def parse(folder: Path, words: str) -> RunConfig:
    """Parse a small command line with the tokenizer of the folder; {} is the folder."""
    tokenizer = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(folder / "model")]
    return resolve_arguments([*SHAPE, *TRAINING, *tokenizer, *words.format(folder).split()], 1).config


def documents(prefix: str) -> list[list[int]]:
    dataset = IndexedDataset(prefix)
    return [dataset[number].tolist() for number in range(len(dataset))]


def tokens(*texts: str) -> list[list[int]]:
    return [[*map(ord, text), END] for text in texts]


def test_text_is_tokenized_once_and_found_by_its_content(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = parse(folder, "--train-data {}/data.json --split 8,1,1")
    assert config.data.train_data == (f"{folder}/data.json",)
    tokenized = with_tokenized_text(config, is_reporter=True)
    first = tokenized.data
    (prefix,) = first.data_path
    assert Path(prefix).parent == folder
    assert f"--data-path {prefix[:80]}" in " ".join(given_arguments(tokenized))
    assert documents(prefix) == tokens("ab", "c", "ddd")
    assert (first.train_data, first.split) == ((), "8,1,1")
    assert capsys.readouterr().out.endswith(f"data.json is read from {prefix}.bin, tokenized now\n")
    # A copy elsewhere has the same content, and is tokenized where its name is.
    written = Path(f"{prefix}.bin").stat().st_mtime_ns
    (folder / "data.json").touch()
    assert with_tokenized_text(config, is_reporter=True).data.data_path == (prefix,)
    assert Path(f"{prefix}.bin").stat().st_mtime_ns == written
    assert capsys.readouterr().out == f"{folder}/data.json is read from {prefix}.bin, tokenized before\n"
    write_texts(folder / "data.json", ["e"])
    (changed,) = with_tokenized_text(config, is_reporter=False).data.data_path
    assert changed != prefix
    assert documents(changed) == tokens("e")


def test_each_split_can_have_text_of_its_own_under_another_key(folder: Path) -> None:
    for name, texts in {"a": ["a"], "b": ["b", "bb"], "v": ["v"]}.items():
        write_texts(folder / f"{name}.jsonl", texts, key="body")
    words = (
        "--train-data {0}/a.jsonl {0}/b.jsonl --valid-data {0}/v.jsonl --text-key body --data-cache-path {0}/new/cache"
    )
    data = with_tokenized_text(parse(folder, words), is_reporter=False).data
    (train,), (valid,) = data.train_data_path, data.valid_data_path
    assert documents(train) == tokens("a", "b", "bb")
    assert documents(valid) == tokens("v")
    assert Path(train).parent == Path(valid).parent == folder / "new" / "cache"
    assert (data.test_data_path, data.data_path, data.text_key) == ((), (), "text")


def test_text_and_json_are_told_by_their_content(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "".join(f"Line {number} of a story.\n\n" for number in range(1000))
    (folder / "story.txt").write_text(text)
    (folder / "array.txt").write_text(json.dumps([{"text": "ab"}, {"text": "c"}]))
    (folder / "lines.json.gz").write_bytes(gzip.compress(b'{"text": "d"}\n'))
    data = with_tokenized_text(parse(folder, "--train-data {}/story.txt"), is_reporter=True).data
    (prefix,) = data.data_path
    assert f"{folder}/story.txt: 1 text, cut into 100 documents" in capsys.readouterr().out
    assert "".join(chr(token) for document in documents(prefix) for token in document if token != END) == text
    # The default split divides the documents of one text.
    assert [len(part) for part in split_boundaries(parse_split(data.split), 100)[:2]] == [97, 3]
    words = "--train-data {0}/array.txt --valid-data {0}/lines.json.gz"
    data = with_tokenized_text(parse(folder, words), is_reporter=False).data
    assert documents(*data.train_data_path) == tokens("ab", "c")
    assert documents(*data.valid_data_path) == tokens("d")


def tokenize(folder: Path, results: multiprocessing.Queue[tuple[str, ...]]) -> None:
    config = parse(folder, "--train-data {}/data.json")
    results.put(with_tokenized_text(config, is_reporter=False).data.data_path)


def test_processes_that_start_together_read_one_data_set(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    context = multiprocessing.get_context("fork")
    results: multiprocessing.Queue[tuple[str, ...]] = context.Queue()
    processes = [context.Process(target=tokenize, args=(folder, results)) for _ in range(3)]
    for process in processes:
        process.start()
    found = {results.get(timeout=60) for _ in processes}
    for process in processes:
        process.join(60)
    assert len(found) == 1
    assert capfd.readouterr().out.count("Tokenizing 1 file(s)") == 1


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (
            "--train-data {}/none.json",
            "--train-data {}/none.json: there is no such file; pass a text file, or a file with a JSON",
        ),
        ("--train-data wikipedia", "--train-data wikipedia: there is no such file"),
        ("--train-data {}/model", "--train-data {}/model is not a file"),
        (
            "--train-data {}/data.json --data-path x",
            "--data-path and --train-data exclude each other; omit one of them",
        ),
        ("--train-data {}/data.json --sft", "for --sft pass --train-data-path FILE.jsonl"),
        ("--mock-data --text-key body", "--train-data"),
        ("--mock-data --valid-data {}/data.json", "--train-data"),
        (
            "--train-data {}/data.json --tokenizer-type NullTokenizer --vocab-size 99",
            "--train-data is text, which NullTokenizer cannot encode; give another --tokenizer-type",
        ),
        (
            "--train-data {}/data.json --tokenizer-type GPT2BPETokenizer",
            "needs --vocab-file and --merge-file (HuggingFaceTokenizer needs only --tokenizer-model FOLDER, ",
        ),
    ],
)
def test_a_wrong_command_line_gets_a_line(folder: Path, words: str, problem: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse(folder, words)
    assert [line for line in caught.value.problems if problem.format(folder) in line], caught.value.problems


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            '{"text": "a"}\nno json\n',
            r"data\.json:2: .* \(a flag of tools/preprocess_data.py: .* pass --data-path PREFIX",
        ),
        ('[{"text": "a"}, 3]\n', r"data\.json:2: "),
        ('{"body": "a"}\n', r"data\.json:1: no key 'text' \(found: body\); change --text-key"),
    ],
)
def test_a_wrong_line_is_reported_with_its_place(folder: Path, content: str, message: str) -> None:
    (folder / "data.json").write_text(content)
    with pytest.raises(DataError, match=message):
        with_tokenized_text(parse(folder, "--train-data {}/data.json"), is_reporter=False)
    assert not list(folder.glob("*.lock"))


def test_a_folder_that_cannot_be_written_is_reported(folder: Path) -> None:
    config = parse(folder, "--train-data {0}/data.json --data-cache-path {0}/file/cache")
    (folder / "file").write_text("")
    with pytest.raises(
        DataError, match=r"its tokens cannot be written to .*/file/cache: Not a directory; pass a folder"
    ):
        with_tokenized_text(config, is_reporter=False)
