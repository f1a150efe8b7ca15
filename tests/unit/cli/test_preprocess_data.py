"""tools/preprocess_data.py: texts and conversations become token files, or are refused in one line."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from megatron.cli.preprocess_data import build_parser
from megatron.core.datasets.conversation_file import ConversationFile, mask_prefix
from megatron.core.datasets.indexed_dataset import IndexedDataset, verify_checksums
from megatron.core.tokenizers.gpt2_bpe_tokenizer import GPT2BPETokenizer

ROOT = Path(__file__).parents[3]
TOOL = ROOT / "tools" / "preprocess_data.py"
SHARED = ROOT.parent / "shared"
NULL = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "127"]


def run(tool: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(tool), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def preprocess(input_file: Path, prefix: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    return run(TOOL, "--input", input_file, "--output-prefix", prefix, *arguments)


def write_lines(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def assert_refused(done: subprocess.CompletedProcess[str], message: str) -> None:
    """Check for one line, exit status 2, and no traceback."""
    assert message in done.stderr
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1


def sequences(prefix: Path) -> list[list[int]]:
    dataset = IndexedDataset(prefix)
    return [dataset[i].tolist() for i in range(len(dataset))]


@pytest.fixture(scope="module")
def gpt2_files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Train a small byte-level BPE on this file."""
    folder = tmp_path_factory.mktemp("gpt2")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=["<|endoftext|>"], show_progress=False
    )
    tokenizer.train_from_iterator(Path(__file__).read_text(encoding="utf-8").splitlines(), trainer)
    tokenizer.model.save(str(folder))
    return folder / "vocab.json", folder / "merges.txt"


@pytest.fixture
def articles(tmp_path: Path) -> Path:
    """Write documents of all sizes, more than one batch of text, an empty one among them."""
    words = ["naïve", "parser", "你好", "tokens", "🙂", "the", "arguments\n", "1234"]
    draw = np.random.default_rng(7)
    texts = [" ".join(draw.choice(words, draw.integers(1, 4000))) for _ in range(150)]
    texts[17] = ""
    return write_lines(tmp_path / "articles.jsonl", *({"text": text} for text in texts))


@pytest.mark.full
def test_output_is_what_the_tokenizer_says_whatever_the_workers(
    articles: Path, gpt2_files: tuple[Path, Path], tmp_path: Path
) -> None:
    flags = ["--vocab-file", gpt2_files[0], "--merge-file", gpt2_files[1], "--append-eod", "--log-interval", "20"]
    outputs = []
    for workers in (1, 3):
        prefix = tmp_path / f"out{workers}"
        done = preprocess(articles, prefix, "--workers", workers, *flags)
        assert (done.returncode, done.stderr) == (0, "")
        assert "docs/s" in done.stdout
        assert "MB/s" in done.stdout
        outputs.append([Path(f"{prefix}_text_document{suffix}").read_bytes() for suffix in (".bin", ".idx")])
    assert outputs[0] == outputs[1]
    tokenizer = GPT2BPETokenizer(*gpt2_files)
    texts = [json.loads(line)["text"] for line in articles.read_text(encoding="utf-8").splitlines()]
    expected = [[*tokenizer.tokenize(text), tokenizer.eod_id] for text in texts if text]
    assert sequences(tmp_path / "out1_text_document") == expected
    dataset = IndexedDataset(tmp_path / "out1_text_document")
    assert dataset.dtype == np.dtype("<u2")
    # The empty document has a place among the documents, without a sequence.
    assert dataset.document_indices.tolist() == [*range(18), *range(17, 150)]
    suffixes = sorted(path.name.removeprefix("out1_text_document") for path in tmp_path.glob("out1*"))
    assert suffixes == [".bin", ".checksums.json", ".idx", "out1.preprocessing.json"]
    assert list(verify_checksums(tmp_path / "out1_text_document")) == []


def test_without_end_of_document_and_with_a_large_vocabulary(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "ids.jsonl", {"text": "1 2"}, {"text": "65499"})
    done = preprocess(source, tmp_path / "out", "--tokenizer-type", "NullTokenizer", "--vocab-size", 65499)
    assert done.returncode == 0
    assert sequences(tmp_path / "out_text_document") == [[1, 2], [65499]]
    assert IndexedDataset(tmp_path / "out_text_document").dtype == np.dtype("<i4")


def test_several_keys_and_lists_of_texts(tmp_path: Path) -> None:
    source = write_lines(
        tmp_path / "ids.jsonl",
        {"a": ["1 2", "", "3"], "b": "4", "c": None},
        {"a": [], "b": ""},
        {"a": "5", "b": "6"},
    )
    done = preprocess(source, tmp_path / "out", *NULL, "--json-keys", "a", "b", "--append-eod")
    assert done.returncode == 0
    assert sequences(tmp_path / "out_a_document") == [[1, 2], [3, 127], [5, 127]]
    assert IndexedDataset(tmp_path / "out_a_document").document_indices.tolist() == [0, 2, 2, 3]
    assert sequences(tmp_path / "out_b_document") == [[4, 127], [6, 127]]
    assert IndexedDataset(tmp_path / "out_b_document").document_indices.tolist() == [0, 1, 1, 2]


def test_patterns_are_read_in_the_order_of_their_names(tmp_path: Path) -> None:
    write_lines(tmp_path / "part-b.jsonl", {"text": "3"})
    (tmp_path / "part-a.jsonl").write_text('{"text": "1"}\r\n\n  \n{"text": "2"}', encoding="utf-8")
    flags = ["--partitions", 2, "--keep-sequential-samples", "--keep-newlines", "--lang", "english"]
    done = preprocess(tmp_path / "part-*.jsonl", tmp_path / "out", *NULL, *flags, "--dataset-impl", "mmap")
    assert done.returncode == 0
    assert sequences(tmp_path / "out_text_document") == [[1], [2], [3]]


@pytest.mark.default(2)
@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "1"', ":3: not a JSON line"),
        (b'{"text": "\xff"}', ":3: not UTF-8 text"),
        (b'"1"', ":3: a JSON object is expected, but the line contains str"),
        (b'{"body": "1", "id": 4}', ":3: no key 'text' (found: body, id)"),
        (b'{"text": 5}', ":3: 'text' contains int"),
        (b'{"text": ["1", null]}', ":3: 'text' contains NoneType"),
        (b'{"text": "1 \\ud83d 2"}', ":3: the text is not valid Unicode: character 2 is the lone surrogate U+D83D"),
        (b'{"text": "1 two"}', ":3: NullTokenizer reads token ids"),
        (b'{"text": "128"}', ":3: NullTokenizer: id 128 is not in 0..127"),
    ],
)
def test_bad_lines_are_named_and_leave_nothing(tmp_path: Path, line: bytes, message: str) -> None:
    source = tmp_path / "bad.jsonl"
    source.write_bytes(b'{"text": "1"}\n\n' + line + b'\n{"text": "2"}\n')
    done = preprocess(source, tmp_path / "out", *NULL)
    assert_refused(done, f"{source}{message}")
    assert list(tmp_path.glob("out*")) == []


def test_half_a_character_is_named(gpt2_files: tuple[Path, Path], tmp_path: Path) -> None:
    source = write_lines(tmp_path / "bad.jsonl", {"text": "one 🙂"}, {"text": "two \ud83d three"})
    done = preprocess(source, tmp_path / "out", "--vocab-file", gpt2_files[0], "--merge-file", gpt2_files[1])
    assert_refused(done, f"{source}:2: the text is not valid Unicode: character 4 is the lone surrogate U+D83D")


def test_earlier_output_survives_a_failure(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "ids.jsonl", {"text": "1"})
    assert preprocess(source, tmp_path / "out", *NULL).returncode == 0
    write_lines(source, {"text": "2"}, {"texts": "3"})
    assert preprocess(source, tmp_path / "out", *NULL, "--overwrite").returncode == 2
    assert sequences(tmp_path / "out_text_document") == [[1]]


@pytest.mark.default(2)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: --input, --output-prefix"),
        (["--input", "x", "--output-prefix", "y", "--tokeniser", "z"], "unrecognized arguments: --tokeniser z"),
        (["--input", "x", "--output-prefix", "y", "--workers", "0"], "--workers 0 is not positive"),
        (["--input", "x", "--output-prefix", "y", "--json-keys", "a", "a"], "--json-keys names a more than once"),
        (["--input", "-", "-", "--output-prefix", "y", *NULL], "names standard input (-) more than once"),
        (
            ["--input", str(TOOL), "--output-prefix", "y", *NULL, "--tokenizer-engine", "gigatoken"],
            "with NullTokenizer",
        ),
        (["--input", "absent*.jsonl", "--output-prefix", "y", *NULL], "no file matches absent*.jsonl"),
        (
            ["--input", str(TOOL.parent), "--output-prefix", "y", *NULL],
            ("contains no file of a known format"),
        ),
        (["--input", str(TOOL), "--output-prefix", "y"], "GPT2BPETokenizer needs --vocab-file"),
        (
            ["--input", str(TOOL), "--output-prefix", "/absent/folder/y", *NULL],
            "y.preprocessing cannot be written: the folder /absent/folder does not exist; create it: mkdir -p "
            "/absent/folder",
        ),
    ],
)
def test_wrong_usage(arguments: list[str], message: str) -> None:
    assert_refused(run(TOOL, *arguments), message)


def test_append_eod_without_such_a_token_is_refused_before_reading(
    gpt2_files: tuple[Path, Path], tmp_path: Path
) -> None:
    vocabulary = json.loads(gpt2_files[0].read_text(encoding="utf-8"))
    del vocabulary["<|endoftext|>"]
    vocab_file = tmp_path / "vocab.json"
    vocab_file.write_text(json.dumps(vocabulary), encoding="utf-8")
    unreadable = tmp_path / "bad.jsonl"
    unreadable.write_text("not json\n")
    flags = ["--vocab-file", vocab_file, "--merge-file", gpt2_files[1], "--append-eod"]
    done = preprocess(unreadable, tmp_path / "out", *flags)
    assert_refused(done, "--append-eod: this GPT2BPETokenizer has no end-of-document token")


def test_input_without_text_is_refused(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "ids.jsonl", {"text": "", "id": 3}, {"text": " "})
    done = preprocess(source, tmp_path / "out", *NULL, "--append-eod")
    message = (
        "contains no text: 2 documents without a token; the keys text were read, but the keys in the file are text, id"
    )
    assert_refused(done, message)
    assert list(tmp_path.glob("out*")) == []


@pytest.mark.full
def test_existing_output_is_replaced_where_that_is_asked_for(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "ids.jsonl", {"text": "1"})
    assert preprocess(source, tmp_path / "out", *NULL).returncode == 0
    write_lines(source, {"text": "2"})
    refused = preprocess(source, tmp_path / "out", *NULL)
    assert_refused(refused, f"{tmp_path}/out_text_document.bin exists already; replace it with --overwrite")
    assert sequences(tmp_path / "out_text_document") == [[1]]
    assert preprocess(source, tmp_path / "out", *NULL, "--overwrite").returncode == 0
    assert sequences(tmp_path / "out_text_document") == [[2]]


@pytest.mark.full
def test_the_same_command_again_finds_its_work_done(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "ids.jsonl", {"text": "1"}, {"text": "2"})
    assert preprocess(source, tmp_path / "out", *NULL).returncode == 0
    before = [(path, path.stat().st_mtime_ns) for path in sorted(tmp_path.iterdir())]
    again = preprocess(source, tmp_path / "out", *NULL, "--workers", "3")
    assert (again.returncode, again.stderr) == (0, "")
    assert f"Done already: this command wrote {tmp_path}/out_text_document" in again.stdout
    other = preprocess(source, tmp_path / "out", *NULL, "--on-error", "skip")
    assert_refused(other, "(it was written by a different command: on_error differ)")
    assert_refused(preprocess(source, tmp_path / "out", *NULL, "--restart"), "exists already; replace it")
    assert before == [(path, path.stat().st_mtime_ns) for path in sorted(tmp_path.iterdir())]
    # What was changed since is not known to be this command's.
    (tmp_path / "out_text_document.bin").write_bytes(b"")
    assert_refused(preprocess(source, tmp_path / "out", *NULL), "exists already; replace it")


def test_megatrons_lines_are_printed(tmp_path: Path) -> None:
    sources = [write_lines(tmp_path / f"{name}.jsonl", {"text": "1"}, {"text": "2"}) for name in "ab"]
    done = run(TOOL, "--input", *sources, "--output-prefix", tmp_path / "out", *NULL)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line for line in lines if line.startswith("Opening")] == [f"Opening {source}" for source in sources]
    assert sum(re.fullmatch(r"Time to startup: \d+\.\d+", line) is not None for line in lines) == 1
    form = r"Processed 4 documents \(\d+\.\d docs/s, \d+\.\d+ MB/s\)\."
    assert sum(re.fullmatch(form, line) is not None for line in lines) == 1


def test_the_command_of_an_older_readme_is_accepted() -> None:
    words = "--input a.json --output-prefix a --vocab vocab.json --merge-file merges.txt --dataset-impl mmap"
    arguments = build_parser().parse_args(words.split())
    assert (arguments.vocab_file, arguments.merge_file) == ("vocab.json", "merges.txt")


def test_a_pipe_may_hold_another_text_each_time(tmp_path: Path) -> None:
    command = [sys.executable, str(TOOL), "--input", "-", "--output-prefix", str(tmp_path / "out"), *NULL]
    for text, status in ((b"1", 0), (b"2", 2)):
        line = b'{"text": "' + text + b'"}\n'
        done = subprocess.run(command, input=line, capture_output=True, check=False, timeout=60)
        assert done.returncode == status
    assert b"exists already; replace it" in done.stderr
    assert sequences(tmp_path / "out_text_document") == [[1]]


def test_flags_without_effect_are_named(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "ids.jsonl", {"text": "1"})
    done = preprocess(source, tmp_path / "out", *NULL, "--keep-newlines", "--lang", "german", "--merge-file", "m")
    assert done.returncode == 0
    assert done.stderr.splitlines() == [
        "--keep-newlines has no effect without --split-sentences",
        "--lang has no effect without --split-sentences",
        "--merge-file has no effect: the tokenizer is NullTokenizer",
    ]


def test_torch_is_not_imported(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "ids.jsonl", {"text": "1"})
    code = (
        f"import runpy, sys; sys.argv = ['x', '--input', {str(source)!r}, '--output-prefix', {str(tmp_path / 'o')!r}]"
        f" + {NULL!r}\n"
        "try: runpy.run_path(" + repr(str(TOOL)) + ", run_name='__main__')\n"
        "except SystemExit as end: print(end.code, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 False"


@pytest.mark.full
def test_merge_of_a_folder(tmp_path: Path) -> None:
    parts = tmp_path / "parts"
    parts.mkdir()
    for name, texts in (("b", ["3 4", ""]), ("a", ["1", "2"])):
        source = write_lines(tmp_path / f"{name}.jsonl", *({"text": text} for text in texts))
        assert preprocess(source, parts / name, *NULL).returncode == 0
    whole = write_lines(tmp_path / "whole.jsonl", *({"text": text} for text in ("1", "2", "3 4", "")))
    assert preprocess(whole, tmp_path / "whole", *NULL).returncode == 0
    merge_tool = TOOL.with_name("merge_datasets.py")
    # The output may lie in the folder; a second run does not merge it into itself.
    for _ in range(2):
        done = run(merge_tool, "--input", parts, "--output-prefix", parts / "all", "--overwrite")
        assert (done.returncode, done.stderr) == (0, "")
        for suffix in (".bin", ".idx"):
            merged = (parts / f"all{suffix}").read_bytes()
            assert merged == (tmp_path / f"whole_text_document{suffix}").read_bytes()
    (parts / "a_text_document.idx").unlink()
    assert_refused(run(merge_tool, "--input", parts, "--output-prefix", parts / "all"), "all.bin exists already")
    assert_refused(run(merge_tool, "--input", parts, "--output-prefix", parts / "new"), "has only .bin")
    assert_refused(run(merge_tool, "--input", tmp_path / "none", "--output-prefix", "x"), "is not a folder")
    assert_refused(run(merge_tool), "the following arguments are required")


@pytest.mark.full
def test_the_users_script_runs_as_it_stands(tmp_path: Path) -> None:
    script, data = SHARED / "user_scripts" / "preprocess.sh", SHARED / "data"
    if not (script.is_file() and (data / "wikitext2.jsonl").is_file()):
        pytest.skip("the users' scripts and data are not beside the repository (../shared)")
    environment = {
        "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
        "INPUT": str(data / "wikitext2.jsonl"),
        "PREFIX": str(tmp_path / "my-gpt2"),
        "VOCAB_FILE": str(data / "gpt2-vocab.json"),
        "MERGE_FILE": str(data / "gpt2-merges.txt"),
    }
    done = subprocess.run(["bash", str(script)], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    dataset = IndexedDataset(tmp_path / "my-gpt2_text_document")
    assert (len(dataset), len(dataset.document_indices)) == (121, 122)
    assert int(dataset.sequence_lengths.sum()) == 553861
    tokenizer = GPT2BPETokenizer(data / "gpt2-vocab.json", data / "gpt2-merges.txt")
    with open(data / "wikitext2.jsonl", encoding="utf-8") as lines:
        for index, line in enumerate(lines):
            *ids, end = dataset[index].tolist()
            assert (end, tokenizer.detokenize(ids)) == (50256, json.loads(line)["text"])


@pytest.mark.full
@pytest.mark.parametrize("names", [("once",), pytest.param(("first", "second"), marks=pytest.mark.long)], ids=len)
def test_quickstart_text_is_large_and_always_the_same(names: tuple[str, ...], tmp_path: Path) -> None:
    outputs = []
    for name in names:
        done = run(ROOT / "examples" / "prepare_quickstart_text.py", "--output-dir", tmp_path / name)
        assert (done.returncode, done.stderr) == (0, "")
        files = [tmp_path / name / file for file in ("quickstart.jsonl", "vocab.json", "merges.txt")]
        outputs.append([file.read_bytes() for file in files])
    assert outputs[0] == outputs[-1]
    texts = [json.loads(line)["text"] for line in outputs[0][0].splitlines()]
    assert sum(len(text.encode()) for text in texts) >= 2_000_000
    assert len(texts) == len(set(texts)) > 300
    tokenizer = GPT2BPETokenizer(files[1], files[2])
    assert (tokenizer.vocab_size, tokenizer.eod_id) == (4096, 0)
    assert tokenizer.detokenize(tokenizer.tokenize(texts[0])) == texts[0]


PLAIN = [*NULL, "--sft", "--chat-template", "plain", "--workers", "2"]
SUM = {"prompt": "1 2 ", "completion": "3"}


def test_tokens_and_masks_are_written(tmp_path: Path) -> None:
    turns = [{"role": role, "content": text} for role, text in (("user", "5 "), ("assistant", "6"), ("user", " 7 "))]
    lines = [SUM, {"text": "1"}, {"messages": [*turns, {"role": "assistant", "content": "8 9"}]}]
    file = write_lines(tmp_path / "talk.jsonl", *lines)
    done = preprocess(file, tmp_path / "out", *PLAIN, "--on-error", "skip")
    assert done.returncode == 0, done.stderr
    assert "2 documents, 11 tokens, 1 lines skipped" in done.stdout
    data = ConversationFile(tmp_path / "out_sft_document")
    assert [data[i].tolist() for i in range(2)] == [[1, 2, 3, 127], [5, 6, 127, 7, 8, 9, 127]]
    assert [data.get_mask(i).tolist() for i in range(2)] == [[0, 0, 1, 1], [0, 1, 1, 0, 1, 1, 1]]
    for prefix in (data.prefix, mask_prefix(data.prefix)):
        assert list(verify_checksums(prefix)) == []
    (tmp_path / "talk.json").write_text(json.dumps(lines))
    done = preprocess(tmp_path / "talk.json", tmp_path / "array", *PLAIN, "--on-error", "skip")
    assert done.returncode == 0, done.stderr
    array = ConversationFile(tmp_path / "array_sft_document")
    assert [array[i].tolist() for i in range(2)] == [data[i].tolist() for i in range(2)]


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (
            [],
            (
                "talk.jsonl:2: no message has the role assistant (roles: user), so there is nothing to train on; fix "
                "the line"
            ),
        ),
        (["--append-eod"], "--append-eod is not supported with --sft, whose chat template creates the text; omit it"),
        (["--json-keys", "messages"], "--json-keys is not supported with --sft"),
        (
            ["--chat-template", "llama"],
            "--chat-template llama is neither a file nor a known template; known templates are chatml",
        ),
        (["--input-format", "text"], "talk.jsonl is text, but --sft reads jsonl or a JSON array; write one of them"),
    ],
)
def test_what_cannot_be_read_is_refused(tmp_path: Path, flags: list[str], problem: str) -> None:
    file = write_lines(tmp_path / "talk.jsonl", SUM, {"messages": [{"role": "user", "content": "1"}]})
    assert_refused(preprocess(file, tmp_path / "out", *PLAIN, *flags), problem)
