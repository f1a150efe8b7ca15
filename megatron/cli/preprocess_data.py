"""Tokenize text files into the .bin and .idx files that training reads.

The output is in the order of the input and is bitwise the same for any number of workers. A document without tokens has
no sequence (and gets no end-of-document token), but is counted as a document, as in Megatron-LM. If the value of a key
is a list of texts, the document has one sequence per text. With --sft each line is a conversation, which the chat
template turns into text. In this case PREFIX_sft_document_loss_mask is also written: it contains 1 for each token of an
answer and 0 for all others.

Unfinished work is kept in the folder PREFIX.preprocessing. The same command, run again, resumes from there and writes
bitwise the same output.
"""

from __future__ import annotations

import argparse
import itertools
import os
import time
from dataclasses import replace
from typing import Any

# NumPy's threads are not needed and interfere with forking the workers.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from megatron.cli.arguments import Parser, add_tokenizer_arguments, exit_status_of, report_unused, tokenizer_of
from megatron.core.datasets import (
    MASK_DTYPE,
    ConversationEncoder,
    ConversationOptions,
    bin_path,
    idx_path,
    mask_prefix,
    optimal_dtype,
)
from megatron.core.errors import ConfigurationError, DataError, TokenizerError
from megatron.core.tokenizers import ENGINES, ReferenceEncoder, Tokenizer, choose_encoder, missing_engine
from megatron.data import (
    CHUNK_BYTES,
    FORMAT,
    KINDS,
    STDIN,
    InputFile,
    Leader,
    Progress,
    Recipe,
    WorkerPool,
    WorkFolder,
    cut_input,
    differences,
    find_compiled_reader,
    find_input,
    first_keys,
    load_splitter,
    num_slots,
    record_path,
    take_sample,
    unfinished_path,
    work,
)

# Memory of all workers together with their slots, base memory of one worker including a margin for one large chunk, and
# the smallest allowed growth of one worker.
WORKERS_MEMORY_BYTES = 640 << 20
WORKER_BASE_BYTES = 100 << 20
MIN_WORKER_GROWTH_BYTES = 16 << 20


def build_parser() -> Parser:
    """Declare Megatron-LM's flags and additional flags."""
    parser = Parser(
        prog="preprocess_data.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    data = parser.add_argument_group("input and output")
    data.add_argument(
        "--input",
        required=True,
        nargs="+",
        metavar="PATH",
        help="files (may be .gz .zst .xz .bz2), folders, patterns such as 'data/*.jsonl', or - for jsonl on stdin",
    )
    data.add_argument(
        "--input-format",
        choices=KINDS,
        help="format of the files; json: an array; text: a document per file, but a single file is cut into 100 "
        "documents; tar: WebDataset (detected per file)",
    )
    data.add_argument("--output-prefix", required=True, metavar="PREFIX", help="path of the output, without suffix")
    data.add_argument("--overwrite", action="store_true", help="replace existing data sets with this prefix")
    data.add_argument(
        "--json-keys",
        "--text-key",
        nargs="+",
        default=["text"],
        metavar="KEY",
        help="keys, columns or tar members to tokenize (text)",
    )
    data.add_argument("--append-eod", action="store_true", help="end each document with the end-of-document token")
    data.add_argument(
        "--sft",
        action="store_true",
        help="read conversations and write their tokens and loss masks, for training with --sft",
    )
    data.add_argument(
        "--chat-template", metavar="FILE|NAME", help="Jinja file, chatml, plain or identity (the tokenizer's own)"
    )
    data.add_argument("--split-sentences", action="store_true", help="write each sentence as a sequence (needs nltk)")
    data.add_argument("--keep-newlines", action="store_true", help="keep the whitespace at the end of each sentence")
    data.add_argument("--lang", default="english", metavar="LANGUAGE", help="language of the sentences (english)")
    data.add_argument("--dataset-impl", default="mmap", choices=["mmap"], help="only mmap is supported")
    data.add_argument(
        "--on-error",
        default="stop",
        choices=["stop", "skip"],
        help="for an invalid line: stop, or report and skip it (stop)",
    )
    data.add_argument("--no-checksums", action="store_true", help="do not write PREFIX_KEY_document.checksums.json")
    tokenizer = add_tokenizer_arguments(parser, "GPT2BPETokenizer")
    tokenizer.add_argument(
        "--tokenizer-engine",
        default="auto",
        choices=ENGINES,
        help="encoding engine; auto: the fastest that reproduces the tokenizer's ids on a sample of the input (auto)",
    )
    runtime = parser.add_argument_group("execution")
    runtime.add_argument(
        "--workers", type=int, default=os.cpu_count() or 1, metavar="N", help="processes (one per CPU core)"
    )
    runtime.add_argument("--log-interval", type=int, default=1000, metavar="N", help="documents per log line (1000)")
    runtime.add_argument("--restart", action="store_true", help="discard unfinished work and start again")
    runtime.add_argument(
        "--partitions", type=int, default=1, metavar="N", help="order documents as Megatron-LM does with N partitions"
    )
    runtime.add_argument(
        "--keep-sequential-samples", action="store_true", help="with --partitions, keep the order of the input"
    )
    return parser


def check_arguments(arguments: argparse.Namespace) -> None:
    """Check the values of the flags and report every problem at once.

    Raises:
        ConfigurationError: a value is invalid.
    """
    problems = [
        f"--{name.replace('_', '-')} {getattr(arguments, name)} is not positive"
        for name in ("workers", "log_interval", "partitions")
        if getattr(arguments, name) < 1
    ]
    repeated = {key for key in arguments.json_keys if arguments.json_keys.count(key) > 1}
    if repeated:
        problems.append(f"--json-keys names {' '.join(sorted(repeated))} more than once")
    if arguments.sft:
        idle = {"append_eod": False, "split_sentences": False, "partitions": 1, "json_keys": ["text"]}
        problems += [
            f"--{name.replace('_', '-')} is not supported with --sft, whose chat template creates the text; omit it"
            for name, default in idle.items()
            if getattr(arguments, name) != default
        ]
    if problems:
        raise ConfigurationError(problems)


def load_conversations(
    arguments: argparse.Namespace, files: list[InputFile], tokenizer: Tokenizer
) -> ConversationEncoder | None:
    """Build the encoder of the conversations for ``--sft``; None without ``--sft``.

    Raises:
        DataError: the input is not JSON, or the chat template cannot be used.
    """
    if not arguments.sft:
        report_unused(build_parser(), arguments, "--sft", ("chat_template",))
        return None
    for file in files:
        if file.kind not in ("jsonl", "json"):
            raise DataError(f"{file.name} is {file.kind}, but --sft reads jsonl or a JSON array; write one of them")
    return ConversationOptions(tokenizer, arguments.chat_template).encoder()


def load_tokenizer(arguments: argparse.Namespace) -> Tokenizer:
    """Build the tokenizer.

    Raises:
        TokenizerError: the tokenizer cannot be built, or has no end-of-document token for --append-eod.
    """
    tokenizer = tokenizer_of(arguments)
    if arguments.append_eod and tokenizer.eod_id is None:
        raise TokenizerError(f"--append-eod: this {tokenizer.name} has no end-of-document token; omit --append-eod")
    return tokenizer


def describe_work(
    arguments: argparse.Namespace,
    files: list[InputFile],
    tokenizer: Tokenizer,
    conversations: ConversationEncoder | None,
) -> dict[str, Any]:
    """Return all settings that affect the output: unfinished work is resumed only if they are unchanged."""
    return {
        **({} if conversations is None else {"sft": conversations.describe()}),
        "format": FORMAT,
        "input": [file.identity() for file in files],
        "json_keys": list(arguments.json_keys),
        "tokenizer": {
            **tokenizer.arguments,
            "files": [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in tokenizer.files],
        },
        "append_eod": arguments.append_eod,
        "on_error": arguments.on_error,
        "split_sentences": [arguments.keep_newlines, arguments.lang] if arguments.split_sentences else None,
        "partitions": 1 if arguments.keep_sequential_samples else arguments.partitions,
        "chunk_bytes": CHUNK_BYTES,
    }


def is_done(arguments: argparse.Namespace, description: dict[str, Any], prefixes: list[str]) -> bool:
    """Return whether the same command has already written the data sets.

    Unfinished work is always resumed: whether it may replace data sets was checked at its start. Input from a pipe is
    never considered the same.

    Raises:
        DataError: without --overwrite, a data set exists that another command wrote or whose origin is unknown.
    """
    if arguments.overwrite or unfinished_path(arguments.output_prefix).exists():
        return False
    existing = [path for prefix in prefixes for path in (bin_path(prefix), idx_path(prefix)) if path.exists()]
    if not existing:
        return False
    different = differences(record_path(arguments.output_prefix), description, prefixes)
    if different == [] and STDIN not in arguments.input and not arguments.restart:
        return True
    why = f" (it was written by a different command: {', '.join(different)} differ)" if different else ""
    raise DataError(f"{existing[0]} exists already; replace it with --overwrite, or change --output-prefix{why}")


def tokenize(
    arguments: argparse.Namespace,
    files: list[InputFile],
    recipe: Recipe,
    tokenizer: Tokenizer,
    folder: WorkFolder,
    started: float,
) -> tuple[Progress, Recipe]:
    """Tokenize the remaining chunks: choose an engine, start the workers, wait until all chunks are written.

    ``started`` is the start of the command, as returned by `time.monotonic`. The returned recipe keeps the engine alive
    until the end of the process, because freeing it is slow.

    Raises:
        InputError: the input or an engine is invalid.
        WorkerError: a worker died.
    """
    chunks = cut_input(files, folder.num_chunks, folder.last)
    first = next(chunks, None)
    total_bytes = None if any(file.path == STDIN for file in files) else sum(file.num_bytes for file in files)
    progress = Progress(None if total_bytes is None else total_bytes - folder.source_bytes, arguments.log_interval)
    if first is not None and recipe.conversations is not None:
        print(f"Encoding with {recipe.conversations.template.name} in {arguments.workers} process(es)", flush=True)
    elif first is not None:
        sample = take_sample(files, recipe.keys, first)
        encoder = choose_encoder(tokenizer, arguments.tokenizer_engine, sample, print)
        missing = missing_engine(tokenizer, encoder) if arguments.tokenizer_engine == "auto" else None
        faster = "" if missing is None else f"; {missing} is faster but not installed: pip install {missing}"
        print(f"Encoding with {encoder.name} in {arguments.workers} process(es){faster}", flush=True)
        recipe = replace(recipe, encoder=encoder)
    if first is not None:
        progress.start()
        slot_bytes = CHUNK_BYTES * recipe.dtype.itemsize  # at most one token per byte of text
        needed = WORKER_BASE_BYTES + num_slots(arguments.workers) * slot_bytes
        growth = max(WORKERS_MEMORY_BYTES // arguments.workers - needed, MIN_WORKER_GROWTH_BYTES)
        skip_errors = arguments.on_error == "skip"
        with WorkerPool(arguments.workers, slot_bytes, work, (files, recipe, growth)) as pool:
            print(f"Time to startup: {time.monotonic() - started:.3f}", flush=True)
            leader = Leader(pool, folder, files, recipe.num_partitions, skip_errors, progress)
            leader.run(itertools.chain([first], chunks))
    if folder.token_bytes == 0:
        folder.forget()
        names = ", ".join(file.name for file in files)
        found = first_keys(files)
        if not folder.num_documents and not folder.num_skipped:
            raise DataError(f"{names} contains no line or row; change --input")
        skipped = f" and {folder.num_skipped} lines skipped" if folder.num_skipped else ""
        raise DataError(
            f"{names} contains no text: {folder.num_documents} documents without a token{skipped}; the keys "
            f"{', '.join(recipe.keys)} were read, but the keys in the file are {', '.join(found) or 'none'}; change "
            "--json-keys"
        )
    return progress, recipe


def preprocess(arguments: argparse.Namespace) -> None:
    """Tokenize the input and publish the data sets.

    Raises:
        InputError: the arguments, the tokenizer or the data are invalid; finished work is kept.
        WorkerError: a worker died; finished work is kept.
    """
    started = time.monotonic()
    # Each worker encodes in one thread; the threads of the tokenizers package would not survive the fork.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    check_arguments(arguments)
    files = find_input(arguments.input, arguments.json_keys, arguments.input_format)
    if not arguments.split_sentences:
        report_unused(build_parser(), arguments, "--split-sentences", ("keep_newlines", "lang"))
    tokenizer = load_tokenizer(arguments)
    splitter = load_splitter(arguments.lang, arguments.keep_newlines) if arguments.split_sentences else None
    keys = tuple(arguments.json_keys)
    num_partitions = 1 if arguments.keep_sequential_samples else arguments.partitions
    dtype = optimal_dtype(tokenizer.vocab_size)
    conversations = load_conversations(arguments, files, tokenizer)
    recipe = Recipe(
        encoder=ReferenceEncoder(tokenizer),
        keys=keys,
        eod_id=tokenizer.eod_id if arguments.append_eod else None,
        dtype=dtype,
        num_partitions=num_partitions,
        split_sentences=splitter,
        extract_texts=find_compiled_reader(),
        conversations=conversations,
    )
    level = "sentence" if arguments.split_sentences else "document"
    prefixes = [f"{arguments.output_prefix}_{key}_{level}" for key in keys]
    groups, dtypes = (
        [range(i * num_partitions, (i + 1) * num_partitions) for i in range(len(keys))],
        [dtype] * len(keys),
    )
    if conversations is not None:
        # The masks are published first, so that published conversations always have their masks.
        prefix = f"{arguments.output_prefix}_sft_document"
        prefixes, groups, dtypes = [mask_prefix(prefix), prefix], [range(1, 2), range(1)], [MASK_DTYPE, dtype]
    description = describe_work(arguments, files, tokenizer, conversations)
    if is_done(arguments, description, prefixes):
        print(f"Done already: this command wrote {', '.join(prefixes)}; --overwrite writes them again")
        return
    print(
        f"Tokenizing {len(files)} file(s) with {tokenizer.name} ({tokenizer.vocab_size} ids) into {dtype.name}",
        flush=True,
    )
    folder = WorkFolder(arguments.output_prefix, description, sum(map(len, groups)), arguments.restart)
    try:
        if folder.num_chunks:
            print(f"Resuming in {folder.path} after {folder.num_documents} documents", flush=True)
        progress = None
        if not folder.is_complete:
            progress, recipe = tokenize(arguments, files, recipe, tokenizer, folder, started)
            folder.complete(groups, dtypes)
        # Conversations have two streams with the same number of tokens but different item sizes.
        num_tokens = folder.token_bytes // sum({item.itemsize for item in dtypes})
        folder.publish(groups, prefixes, not arguments.no_checksums)
    finally:
        folder.close()
    if progress is not None:
        progress.finish()
        print(f"Done in {progress.elapsed_s:.2f} s.")
    skipped = f", {folder.num_skipped} lines skipped" if folder.num_skipped else ""
    if files[0].is_cut and folder.num_documents > 1:
        print(f"{files[0].name}: 1 text, cut into {folder.num_documents} documents, at blank lines if it has enough")
    print(f"{folder.num_documents} documents, {num_tokens} tokens{skipped}")
    for prefix in prefixes:
        print(f"Wrote {prefix}.bin and .idx")


def main(argv: list[str] | None = None) -> int:
    """Run the command with ``argv`` (default: the command line) and return its exit status."""
    arguments = build_parser().parse_args(argv)
    return exit_status_of(lambda: preprocess(arguments))
