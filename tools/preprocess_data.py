"""Tokenize jsonl into the data sets that training reads: PREFIX_KEY_document.bin and .idx for each key.

The output depends on the input, the tokenizer and --append-eod alone: it is the same bytes whatever the
number of workers, in the order of the input. A document without tokens has no sequence (and gets no
end-of-document token), but keeps its place among the documents, as in Megatron-LM. A key may hold a list of
texts: a document of several sequences.
"""

from __future__ import annotations

import argparse
import glob
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.core.datasets.indexed_dataset import optimal_dtype
from megatron.core.datasets.indexed_dataset_builder import IndexedDatasetBuilder
from megatron.core.errors import ConfigurationError, DataError, TokenizerError
from megatron.core.tokenizers.build_tokenizer import TOKENIZER_TYPES, build_tokenizer
from megatron.core.tokenizers.tokenizer import Tokenizer
from tools.command_line import Parser, exit_status_of

BATCH_BYTES_PER_WORKER = 1 << 20
MAX_BATCH_BYTES = 8 << 20
MAX_BATCH_DOCUMENTS = 8192


@dataclass(frozen=True)
class Document:
    """Hold the texts of one line, by key, and where the line stands."""

    texts: dict[str, list[str]]
    file: str
    line: int
    num_bytes: int


def build_parser() -> Parser:
    """Declare Megatron's flags."""
    parser = Parser(
        prog="preprocess_data.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    data = parser.add_argument_group("input and output")
    data.add_argument("--input", required=True, metavar="PATH", help="jsonl file, or a pattern such as 'data/*.jsonl'")
    data.add_argument("--output-prefix", required=True, metavar="PREFIX", help="path of the output, without suffix")
    data.add_argument("--json-keys", nargs="+", default=["text"], metavar="KEY", help="keys to tokenize (text)")
    data.add_argument("--append-eod", action="store_true", help="end each document with the end-of-document token")
    data.add_argument("--dataset-impl", default="mmap", choices=["mmap"], help="the one format that there is")
    tokenizer = parser.add_argument_group("tokenizer")
    tokenizer.add_argument(
        "--tokenizer-type",
        default="GPT2BPETokenizer",
        metavar="TYPE",
        help=f"one of {', '.join(TOKENIZER_TYPES)}",
    )
    tokenizer.add_argument("--vocab-file", metavar="FILE", help="vocabulary (GPT2BPETokenizer)")
    tokenizer.add_argument("--merge-file", metavar="FILE", help="byte-pair merges (GPT2BPETokenizer)")
    tokenizer.add_argument("--tokenizer-model", metavar="PATH", help="model file, or folder with tokenizer.json")
    tokenizer.add_argument("--vocab-size", type=int, metavar="N", help="size (NullTokenizer, TikTokenizer)")
    tokenizer.add_argument(
        "--vocab-extra-ids", type=int, default=0, metavar="N", help="SentencePieceTokenizer's <extra_id_N>"
    )
    tokenizer.add_argument("--tiktoken-pattern", choices=["v1", "v2"], help="how TikTokenizer cuts words")
    tokenizer.add_argument("--tiktoken-num-special-tokens", type=int, default=1000, metavar="N")
    tokenizer.add_argument("--tiktoken-special-tokens", nargs="+", default=[], metavar="TOKEN")
    runtime = parser.add_argument_group("running")
    runtime.add_argument("--workers", type=int, default=os.cpu_count() or 1, metavar="N", help="threads that tokenize")
    runtime.add_argument("--log-interval", type=int, default=1000, metavar="N", help="documents between two reports")
    unused = parser.add_argument_group("accepted for Megatron's scripts")
    unused.add_argument("--partitions", type=int, default=1, metavar="N", help="no effect: one pass, in input order")
    unused.add_argument("--keep-sequential-samples", action="store_true", help="no effect: order is always kept")
    unused.add_argument("--split-sentences", action="store_true", help="not supported yet")
    unused.add_argument("--keep-newlines", action="store_true", help="no effect without --split-sentences")
    unused.add_argument("--lang", default="english", metavar="LANGUAGE", help="no effect without --split-sentences")
    return parser


def find_input(pattern: str) -> list[str]:
    """List the files that --input names, in sorted order.

    Raises:
        DataError: there is none.
    """
    files = [pattern] if os.path.exists(pattern) else sorted(glob.glob(pattern))
    for file in files:
        if not os.path.isfile(file):
            raise DataError(f"{file} is not a file; change --input")
    if not files:
        raise DataError(f"no file matches {pattern}; change --input")
    return files


def check_arguments(arguments: argparse.Namespace) -> None:
    """Find what no reading is needed to refuse, all of it at once.

    Raises:
        ConfigurationError: values that cannot be, or are not supported yet.
    """
    problems = [
        f"--{name.replace('_', '-')} {getattr(arguments, name)} is not positive"
        for name in ("workers", "log_interval", "partitions")
        if getattr(arguments, name) < 1
    ]
    if arguments.split_sentences:
        problems.append("--split-sentences is not supported yet; drop it")
    repeated = {key for key in arguments.json_keys if arguments.json_keys.count(key) > 1}
    if repeated:
        problems.append(f"--json-keys names {' '.join(sorted(repeated))} more than once")
    if problems:
        raise ConfigurationError(problems)


def read_documents(files: list[str], keys: list[str]) -> Iterator[Document]:
    """Parse the lines of all files, skipping blank ones.

    Raises:
        DataError: a line is not UTF-8, not a JSON object, lacks a key or holds no text there.
    """
    for file in files:
        with open(file, "rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.isspace():
                    yield Document(parse_line(line, keys, f"{file}:{number}"), file, number, len(line))


def parse_line(line: bytes, keys: list[str], place: str) -> dict[str, list[str]]:
    """Read the texts of one line; a text becomes a list of one.

    Raises:
        DataError: as `read_documents`.
    """
    try:
        content = json.loads(line.decode("utf-8"))
    except ValueError as error:  # JSONDecodeError, UnicodeDecodeError
        raise DataError(f"{place}: not a JSON line: {error}") from error
    if not isinstance(content, dict):
        raise DataError(f"{place}: expected a JSON object, found {type(content).__name__}")
    texts = {}
    for key in keys:
        if key not in content:
            raise DataError(f"{place}: no key {key!r} (found: {', '.join(content)}); change --json-keys or the line")
        value = content[key]
        parts = value if isinstance(value, list) else [value]
        for part in parts:
            if not isinstance(part, str):
                raise DataError(f"{place}: {key!r} holds {type(part).__name__}, expected text or a list of texts")
        texts[key] = parts
    return texts


def gather_batches(documents: Iterator[Document], max_bytes: int) -> Iterator[list[Document]]:
    """Group documents so that a batch keeps all threads busy and memory small."""
    batch: list[Document] = []
    num_bytes = 0
    for document in documents:
        batch.append(document)
        num_bytes += document.num_bytes
        if num_bytes >= max_bytes or len(batch) == MAX_BATCH_DOCUMENTS:
            yield batch
            batch, num_bytes = [], 0
    if batch:
        yield batch


def tokenize_key(batch: list[Document], key: str, tokenizer: Tokenizer, workers: int) -> Iterator[list[list[int]]]:
    """Give the sequences of each document.

    Raises:
        DataError: the tokenizer refuses a text; the error names the line.
    """
    try:
        ids = iter(tokenizer.tokenize_batch([text for document in batch for text in document.texts[key]], workers))
    except TokenizerError:
        # One by one, to learn which: Megatron's users look for a line in a terabyte.
        for document in batch:
            for text in document.texts[key]:
                try:
                    tokenizer.tokenize(text)
                except TokenizerError as error:
                    raise DataError(f"{document.file}:{document.line}: {error}") from error
        raise
    return ([next(ids) for _ in document.texts[key]] for document in batch)


def add_document(builder: IndexedDatasetBuilder, sequences: list[list[int]], eod_id: int | None) -> int:
    """Append one document and return its number of tokens.

    Sequences without tokens are left out; a document without any keeps its place and gets no end.
    """
    filled = [sequence for sequence in sequences if sequence]
    if filled and eod_id is not None:
        filled[-1] = [*filled[-1], eod_id]
    tokens = filled[0] if len(filled) == 1 else [token for sequence in filled for token in sequence]
    builder.add_document(tokens, [len(sequence) for sequence in filled])
    return len(tokens)


class Progress:
    """Report how far the work is."""

    def __init__(self, total_bytes: int, log_interval: int) -> None:
        self.num_documents = self.num_bytes = self.num_tokens = 0
        self._total_bytes = total_bytes
        self._log_interval = log_interval
        self._next_report = log_interval
        self.start_time = time.monotonic()

    def add(self, num_documents: int, num_bytes: int) -> None:
        """Count a finished batch and print a line where one is due."""
        self.num_documents += num_documents
        self.num_bytes += num_bytes
        if self.num_documents >= self._next_report:
            self._next_report = (self.num_documents // self._log_interval + 1) * self._log_interval
            elapsed_s = self.elapsed_s
            left_s = max(0, self._total_bytes - self.num_bytes) / self.num_bytes * elapsed_s
            print(f"Processed {self.rates(elapsed_s)}, {left_s:.0f} s left.", flush=True)

    @property
    def elapsed_s(self) -> float:
        """Give the seconds since the start."""
        return max(time.monotonic() - self.start_time, 1e-9)

    def rates(self, elapsed_s: float) -> str:
        """Say how many documents were done, and how fast."""
        documents_s, megabytes_s = self.num_documents / elapsed_s, self.num_bytes / 1e6 / elapsed_s
        return f"{self.num_documents} documents ({documents_s:.1f} docs/s, {megabytes_s:.2f} MB/s)"


def preprocess(arguments: argparse.Namespace) -> None:
    """Tokenize the input and publish the data sets.

    Raises:
        InputError: the arguments, the tokenizer or the data cannot be used; nothing is left behind.
    """
    check_arguments(arguments)
    files = find_input(arguments.input)
    tokenizer = build_tokenizer(
        tokenizer_type=arguments.tokenizer_type,
        vocab_file=arguments.vocab_file,
        merge_file=arguments.merge_file,
        tokenizer_model=arguments.tokenizer_model,
        vocab_size=arguments.vocab_size,
        vocab_extra_ids=arguments.vocab_extra_ids,
        tiktoken_pattern=arguments.tiktoken_pattern,
        tiktoken_num_special_tokens=arguments.tiktoken_num_special_tokens,
        tiktoken_special_tokens=arguments.tiktoken_special_tokens,
    )
    if arguments.append_eod and tokenizer.eod_id is None:
        raise TokenizerError(f"--append-eod: this {tokenizer.name} has no end-of-document token; drop --append-eod")
    eod_id = tokenizer.eod_id if arguments.append_eod else None
    if arguments.partitions > 1:
        print(f"--partitions {arguments.partitions} has no effect: the output keeps the order of the input")
    dtype = optimal_dtype(tokenizer.vocab_size)
    kind = f"{tokenizer.name} ({tokenizer.vocab_size} ids)"
    print(f"Tokenizing {len(files)} file(s) with {kind} into {dtype.name}", flush=True)
    progress = Progress(sum(os.path.getsize(file) for file in files), arguments.log_interval)
    with ExitStack() as stack:
        builders = {
            key: stack.enter_context(IndexedDatasetBuilder(f"{arguments.output_prefix}_{key}_document", dtype))
            for key in arguments.json_keys
        }
        max_bytes = min(arguments.workers * BATCH_BYTES_PER_WORKER, MAX_BATCH_BYTES)
        for batch in gather_batches(read_documents(files, arguments.json_keys), max_bytes):
            for key, builder in builders.items():
                for sequences in tokenize_key(batch, key, tokenizer, arguments.workers):
                    progress.num_tokens += add_document(builder, sequences, eod_id)
            progress.add(len(batch), sum(document.num_bytes for document in batch))
        if progress.num_tokens == 0:
            raise DataError(f"{arguments.input} holds no text: {progress.num_documents} documents without a token")
        for builder in builders.values():
            builder.finalize()
    elapsed_s = progress.elapsed_s
    print(f"Done: {progress.rates(elapsed_s)}, {progress.num_tokens} tokens, {elapsed_s:.1f} s.")
    for builder in builders.values():
        print(f"Wrote {builder.prefix}.bin and .idx")


def main() -> int:
    """Run the command and return its exit status."""
    arguments = build_parser().parse_args()
    # The engine sizes its thread pool once, at its first use; the shell's settings do not overrule --workers.
    os.environ["RAYON_NUM_THREADS"] = str(max(arguments.workers, 1))
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    return exit_status_of(lambda: preprocess(arguments))


if __name__ == "__main__":
    sys.exit(main())
