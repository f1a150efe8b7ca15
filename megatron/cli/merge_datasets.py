"""Merge the data sets (.bin and .idx files) of a folder into one.

With --eod-id, the inputs are the token files of nanoGPT or llm.c (.bin), OLMo (.npy) or litdata. Their tokens form one
stream, and a document ends after each token with that id.
"""

from __future__ import annotations

import argparse
import os
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.cli.arguments import Parser, exit_status_of
from megatron.core.console import CountedBar
from megatron.core.datasets import (
    CHECKSUM_BLOCK_BYTES,
    PIECE_LENGTH,
    Block,
    IndexedDataset,
    bin_path,
    checksum_blocks,
    cut,
    idx_path,
    replace_tokens,
    write_checksums,
    write_index,
)
from megatron.core.errors import DataError
from megatron.data import TokenShard, find_token_shards


def find_prefixes(folder: Path, output_prefix: Path) -> list[Path]:
    """List the data sets of a folder by name, without the output.

    Raises:
        DataError: the folder is missing, contains no data set, or contains a .bin or .idx file without the other.
    """
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder; change --input")
    found: dict[str, set[str]] = {}
    for path in folder.iterdir():
        if path.suffix in (".bin", ".idx"):
            found.setdefault(path.stem, set()).add(path.suffix)
    for stem, suffixes in sorted(found.items()):
        if len(suffixes) == 1:
            raise DataError(
                f"{folder / stem} has only {suffixes.pop()}; complete the .bin/.idx pair, remove it from --input, or "
                "pass --eod-id for nanoGPT or llm.c token files, which have no .idx"
            )
    prefixes = [folder / stem for stem in sorted(found) if (folder / stem).absolute() != output_prefix.absolute()]
    if not prefixes:
        raise DataError(f"{folder} contains no .bin/.idx pair; change --input")
    return prefixes


def open_all(prefixes: Sequence[Path], multimodal: bool) -> list[IndexedDataset]:
    """Open the data sets and check that they can be merged.

    Raises:
        DataError: a data set cannot be read or is damaged, or the data sets differ in dtype or in having modes.
    """
    datasets = [IndexedDataset(prefix) for prefix in prefixes]
    first = datasets[0]
    for dataset in datasets:
        if dataset.dtype != first.dtype:
            raise DataError(
                f"{dataset.prefix} contains {dataset.dtype.name} tokens, but {first.prefix} contains "
                f"{first.dtype.name}; data sets can be merged only if their dtypes are equal: tokenize both with the "
                "same vocabulary"
            )
        dataset.verify_structure()
    # Data sets without sequences fit either kind.
    filled = [dataset for dataset in datasets if len(dataset)]
    for dataset in filled:
        if (dataset.sequence_modes is None) != (filled[0].sequence_modes is None):
            raise DataError(f"{dataset.prefix} and {filled[0].prefix} cannot be merged: only one of them has modes")
        if multimodal and dataset.sequence_modes is None:
            raise DataError(f"--multimodal: {dataset.prefix} has no sequence modes; omit --multimodal")
    return datasets


def copy_tokens(datasets: Sequence[IndexedDataset], target: Path) -> list[Block]:
    """Write the tokens of all data sets, fsync the file, and return its checksums."""
    blocks = []
    num_documents = 0
    total = sum(bin_path(dataset.prefix).stat().st_size for dataset in datasets)
    with open(target, "wb") as output, CountedBar("merging", total) as bar:
        for dataset in datasets:
            with open(bin_path(dataset.prefix), "rb", buffering=0) as source:
                while data := source.read(CHECKSUM_BLOCK_BYTES):
                    blocks += checksum_blocks(data)
                    output.write(data)
                    bar.add(len(data))
            num_documents += dataset.num_documents
            bar.clear()
            print(f"Added {dataset.prefix}: {num_documents} documents so far", flush=True)
        output.flush()
        os.fsync(output.fileno())
    return blocks


def write_merged_index(datasets: Sequence[IndexedDataset], target: Path) -> None:
    """Write the index of the concatenated data sets."""

    def lengths() -> Iterator[NDArray[Any]]:
        for dataset in datasets:
            yield from cut(dataset.sequence_lengths)

    def counts() -> Iterator[NDArray[Any]]:
        for dataset in datasets:
            indices = dataset.document_indices
            yield from (
                np.diff(indices[begin : begin + len(piece) + 1])
                for begin, piece in zip(range(0, len(indices), PIECE_LENGTH), cut(indices[1:]))
            )

    def modes() -> Iterator[NDArray[Any]]:
        for dataset in datasets:
            if dataset.sequence_modes is not None:
                yield from cut(dataset.sequence_modes)

    has_modes = any(dataset.sequence_modes is not None for dataset in datasets)
    write_index(target, datasets[0].dtype, lengths, counts, modes if has_modes else None)


def merge(folder: Path, output_prefix: Path, multimodal: bool = False, with_checksums: bool = True) -> None:
    """Write one data set with the documents of all data sets in a folder.

    Raises:
        InputError: the data sets cannot be read or merged; no output remains.
    """
    datasets = open_all(find_prefixes(folder, output_prefix), multimodal)
    tokens, index = (Path(f"{output_prefix}.{suffix}.tmp-{os.getpid()}") for suffix in ("bin", "idx"))
    try:
        blocks = copy_tokens(datasets, tokens)
        write_merged_index(datasets, index)
        replace_tokens(output_prefix, tokens)
        os.replace(index, idx_path(output_prefix))
        if with_checksums:
            write_checksums(output_prefix, blocks)
    except OSError as error:
        raise DataError(f"data set {output_prefix} cannot be written: {error}") from error
    finally:
        tokens.unlink(missing_ok=True)
        index.unlink(missing_ok=True)
    print(f"Wrote {output_prefix}.bin and .idx")


def cut_documents(shards: Sequence[TokenShard], output_prefix: Path, eod_id: int, with_checksums: bool = True) -> None:
    """Write the tokens of all shards as one data set, split into documents after each end-of-document token.

    Raises:
        InputError: the shards cannot be read or merged; no output remains.
    """
    first = shards[0]
    for shard in shards:
        if shard.dtype != first.dtype:
            raise DataError(
                f"{shard.path} contains {shard.dtype.name} tokens, but {first.path} contains {first.dtype.name}; "
                "merge only files with the same dtype"
            )
    dtype = np.dtype("<u2") if first.dtype == np.dtype("<u2") else np.dtype("<i4")
    lengths = array("i")
    num_tokens = begun = 0
    tokens, index = (Path(f"{output_prefix}.{suffix}.tmp-{os.getpid()}") for suffix in ("bin", "idx"))
    try:
        total = sum(shard.num_tokens for shard in shards)
        with open(tokens, "wb") as output, CountedBar("cutting", total) as bar:
            for shard in shards:
                for piece in shard.pieces():
                    if dtype.kind == "i" and (int(piece.max()) >= 1 << 31 or int(piece.min()) < 0):
                        raise DataError(
                            f"{shard.path} contains values that are not token ids (negative, or 2^31 and above); "
                            "change --token-dtype"
                        )
                    output.write(piece.astype(dtype).tobytes())
                    ends = np.flatnonzero(piece == eod_id) + num_tokens + 1
                    lengths.extend(np.diff(ends, prepend=begun).tolist())
                    begun = int(ends[-1]) if len(ends) else begun
                    num_tokens += len(piece)
                    bar.add(len(piece))
            if not len(lengths):
                raise DataError(
                    f"none of the {num_tokens} tokens of {first.path.parent} is {eod_id}; change --eod-id or "
                    "--token-dtype"
                )
            if num_tokens > begun:
                lengths.append(num_tokens - begun)
            output.flush()
            os.fsync(output.fileno())
        sizes = np.frombuffer(lengths, np.int32)
        write_index(index, dtype, lambda: cut(sizes), lambda: cut(np.ones(len(sizes), np.int64)))
        replace_tokens(output_prefix, tokens)
        os.replace(index, idx_path(output_prefix))
        if with_checksums:
            size = sum(path(output_prefix).stat().st_size for path in (bin_path, idx_path))
            with CountedBar("computing checksums", size) as bar:
                write_checksums(output_prefix, read=bar.add)
    except OSError as error:
        raise DataError(f"data set {output_prefix} cannot be written: {error}") from error
    finally:
        tokens.unlink(missing_ok=True)
        index.unlink(missing_ok=True)
    print(f"Wrote {output_prefix}.bin and .idx: {len(lengths)} documents, {num_tokens} tokens")


def run(arguments: argparse.Namespace) -> None:
    """Merge data sets or, with --eod-id, token files.

    Raises:
        InputError: the input cannot be read, or the output exists.
    """
    prefix: Path = arguments.output_prefix
    existing = [path for path in (bin_path(prefix), idx_path(prefix)) if path.exists()]
    if existing and not arguments.overwrite:
        raise DataError(f"{existing[0]} exists already; replace it with --overwrite, or change --output-prefix")
    if not arguments.input.exists():
        raise DataError(f"{arguments.input} is not a folder; change --input")
    if arguments.eod_id is None and not (arguments.input / "index.json").exists() and arguments.input.is_dir():
        if arguments.token_dtype is not None:
            raise DataError(f"--token-dtype {arguments.token_dtype} has no effect without --eod-id; add --eod-id")
        merge(arguments.input, prefix, arguments.multimodal, not arguments.no_checksums)
        return
    if arguments.multimodal:
        raise DataError("--multimodal has no effect on token files without .idx; omit it")
    shards = find_token_shards(arguments.input, arguments.token_dtype or "uint16")
    if not shards:
        raise DataError(
            f"{arguments.input} contains no token files (.npy, or .bin without .idx); omit --eod-id, or change --input"
        )
    if arguments.eod_id is None:
        raise DataError(
            f"{arguments.input} does not mark where documents end; pass the id of the end-of-document token with "
            "--eod-id (GPT-2's is 50256)"
        )
    cut_documents(shards, prefix, arguments.eod_id, not arguments.no_checksums)


def build_parser() -> Parser:
    """Declare the flags."""
    parser = Parser(prog="merge_datasets.py", description=__doc__)
    parser.add_argument(
        "--input", required=True, type=Path, metavar="DIR", help="folder of .bin/.idx pairs or token files"
    )
    parser.add_argument(
        "--eod-id", type=int, metavar="ID", help="id of the end-of-document token, for token files without .idx"
    )
    parser.add_argument(
        "--token-dtype",
        choices=["uint16", "uint32", "int32", "int64"],
        help="dtype of the tokens in files that do not record it (uint16)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an existing data set with this prefix")
    parser.add_argument(
        "--output-prefix", required=True, type=Path, metavar="PREFIX", help="path of the output, without suffix"
    )
    parser.add_argument("--multimodal", action="store_true", help="require sequence modes in every data set")
    parser.add_argument("--no-checksums", action="store_true", help="do not write PREFIX.checksums.json")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command with ``argv`` (default: the command line) and return its exit status."""
    arguments = build_parser().parse_args(argv)
    return exit_status_of(lambda: run(arguments))
