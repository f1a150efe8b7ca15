"""Print documents, lengths, tokens and samples of a data set, or verify it.

--verify reads all files. It checks that the index is consistent with itself and with .bin and, if
PREFIX.checksums.json exists, that every block of both files matches its checksum. It reports each damaged block.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron.cli.arguments import (
    TOKENIZER_KEYWORDS,
    Parser,
    add_tokenizer_arguments,
    exit_status_of,
    report_unused,
    tokenizer_of,
)
from megatron.core.console import CountedBar
from megatron.core.datasets import IndexedDataset, checksums_path, write_checksums
from megatron.core.errors import ConfigurationError, DataError
from megatron.data import (
    LengthStatistics,
    TokenStatistics,
    count_tokens,
    describe_ends,
    describe_lengths,
    document_lengths,
    faults_in_vocabulary,
    intact_dataset,
    verify_dataset,
    without_suffix,
)

if TYPE_CHECKING:
    from megatron.core.tokenizers import Tokenizer

BAR_WIDTH = 40


def build_parser() -> Parser:
    """Declare the flags."""
    parser = Parser(
        prog="inspect_dataset.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("prefixes", nargs="+", metavar="PREFIX", help="path of a data set, without .bin or .idx")
    parser.add_argument("--verify", action="store_true", help="only verify the files")
    parser.add_argument(
        "--write-checksums", action="store_true", help="write PREFIX.checksums.json for the current content"
    )
    parser.add_argument("--index-only", action="store_true", help="do not read .bin: no token statistics")
    parser.add_argument(
        "--top-tokens", type=int, default=10, metavar="N", help="number of most frequent tokens to list (10)"
    )
    parser.add_argument("--samples", type=int, default=0, metavar="N", help="print N random documents (0)")
    parser.add_argument("--seed", type=int, default=1234, metavar="N", help="seed of --samples (1234)")
    parser.add_argument("--documents", type=int, nargs="+", default=[], metavar="I", help="print these documents")
    parser.add_argument("--max-tokens", type=int, default=128, metavar="N", help="tokens to print per document (128)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the statistics to this JSON file")
    add_tokenizer_arguments(parser, None)
    return parser


def check_arguments(arguments: argparse.Namespace) -> None:
    """Check the values of the flags and report every problem at once.

    Raises:
        ConfigurationError: a value is invalid.
    """
    problems = [
        f"--{name.replace('_', '-')} {value} is negative"
        for name in ("top_tokens", "samples", "seed", "max_tokens")
        if (value := vars(arguments)[name]) < 0
    ]
    if arguments.verify and arguments.write_checksums:
        problems.append("--verify and --write-checksums exclude each other; omit one of them")
    if arguments.seed >= 1 << 32:
        problems.append(f"--seed {arguments.seed} is not below {1 << 32}")
    if problems:
        raise ConfigurationError(problems)


def verify(prefixes: list[str], tokenizer: Tokenizer | None) -> None:
    """Print every fault in every data set.

    Raises:
        DataError: a fault was found, or a data set cannot be read.
    """
    damaged = []
    for prefix in prefixes:
        with _bar("verifying", prefix, (".bin", ".idx")) as bar:
            result = verify_dataset(prefix, bar.add)
        faults = list(result.faults)
        if tokenizer is not None and not faults and (dataset := IndexedDataset(prefix)).dtype.kind != "f":
            with _bar("reading", prefix, (".bin",)) as bar:
                outside = count_tokens(dataset, bar.add).num_from(tokenizer.vocab_size)
            faults += faults_in_vocabulary(outside, prefix, tokenizer.vocab_size)
        for fault in faults:
            print(f"damaged: {fault}")
        if not result.has_checksums:
            print(f"{checksums_path(prefix)} does not exist: only the structure was verified, not the tokens")
        if faults:
            damaged.append(f"{prefix} ({len(faults)} faults)")
        else:
            print(f"{prefix} is intact")
    if damaged:
        raise DataError(f"damaged: {', '.join(damaged)}; copy or write these data sets again")


def _bar(verb: str, prefix: str, suffixes: tuple[str, ...]) -> CountedBar:
    """Return a progress bar over the bytes of a data set's files; a missing file counts as empty."""
    paths = [Path(f"{prefix}{suffix}") for suffix in suffixes]
    return CountedBar(f"{verb} {Path(prefix).name}", sum(path.stat().st_size for path in paths if path.is_file()))


def print_lengths(dataset: IndexedDataset, statistics: LengthStatistics) -> None:
    """Print counts, lengths and the histogram of documents."""
    size = dataset.num_tokens * dataset.dtype.itemsize / 1e6
    print(dataset.prefix)
    print(f"  tokens     {dataset.num_tokens:,} ({dataset.dtype.name}, {size:,.2f} MB)")
    print(f"  documents  {statistics.documents:,} ({statistics.empty:,} of them empty)")
    modes = "" if dataset.sequence_modes is None else ", with modes"
    print(f"  sequences  {len(dataset):,} ({len(dataset) / max(statistics.documents, 1):.2f} per document{modes})")
    checksums = checksums_path(dataset.prefix)
    print(f"  checksums  {checksums.name if checksums.exists() else 'none'}")
    if not statistics.documents:
        return
    percentiles = ", ".join(f"{percent} %: {value:,}" for percent, value in statistics.percentiles.items())
    print("  tokens of a document")
    print(f"    mean {statistics.mean:,.1f}, smallest {statistics.minimum:,}, largest {statistics.maximum:,}")
    print(f"    {percentiles}")
    most = max(entry.documents for entry in statistics.histogram)
    for entry in statistics.histogram:
        bar = "#" * -(-entry.documents * BAR_WIDTH // most)
        print(
            f"    {entry.low:>13,} to {entry.high:>13,} {entry.documents:>13,} documents "
            f"{100 * entry.tokens / max(dataset.num_tokens, 1):6.2f} % of tokens {bar}".rstrip()
        )


def print_tokens(
    dataset: IndexedDataset, statistics: TokenStatistics, top_tokens: int, tokenizer: Tokenizer | None
) -> None:
    """Print the number of distinct ids, the most frequent ids, and the token at the end of documents."""
    used = np.flatnonzero(statistics.counts)
    if len(used):
        print(f"  token ids  {len(used):,} different, {used[0]:,} to {used[-1]:,}", end="")
        print(f"; {statistics.entropy_bits:.3f} bits of entropy per token")
    if statistics.outside:
        print(
            f"  {statistics.outside:,} tokens are negative or above 16,777,216, so they are not ids of any vocabulary"
        )
    if tokenizer is not None:
        outside = statistics.num_from(tokenizer.vocab_size)
        print(
            f"  vocabulary {tokenizer.vocab_size:,} ids ({tokenizer.name}); {outside:,} tokens are outside this "
            "vocabulary"
        )
    ends = describe_ends(dataset)
    if ends is not None:
        share = f"{ends.documents:,} of {ends.filled:,} documents that are not empty end"
        print(f"  ends       {share} with {ends.token}{spelled(ends.token, tokenizer)}")
    for token, count in statistics.top(top_tokens):
        print(f"    {token:>8} {count:>15,} {100 * count / statistics.tokens:6.2f} %{spelled(token, tokenizer)}")


def spelled(token: int, tokenizer: Tokenizer | None) -> str:
    """Return a space and the quoted text of a token, or an empty string if the tokenizer does not have the token."""
    if tokenizer is None or not 0 <= token < tokenizer.vocab_size:
        return ""
    return f" {json.dumps(tokenizer.detokenize([token]), ensure_ascii=False)}"


def choose_documents(dataset: IndexedDataset, documents: list[int], samples: int, seed: int) -> list[int]:
    """List the documents to print: ``documents``, then the randomly drawn ones in ascending order.

    Raises:
        DataError: one of ``documents`` does not exist.
    """
    for number in documents:
        if not 0 <= number < dataset.num_documents:
            raise DataError(
                f"--documents {number} is out of range: {dataset.prefix} has documents 0 to {dataset.num_documents - 1}"
            )
    drawn = np.random.RandomState(seed).permutation(dataset.num_documents)[:samples]
    return [*documents, *sorted(drawn.tolist())]


def print_document(dataset: IndexedDataset, number: int, max_tokens: int, tokenizer: Tokenizer | None) -> None:
    """Print the beginning of a document as text, or as ids if there is no tokenizer."""
    first, last = (int(index) for index in dataset.document_indices[number : number + 2])
    ids: list[int] = []
    for sequence in range(first, last):
        if len(ids) < max_tokens:
            length = min(dataset.sequence_lengths.item(sequence), max_tokens - len(ids))
            ids += dataset.get(sequence, 0, length).tolist()
    num_tokens = int(dataset.sequence_lengths[first:last].sum(dtype=np.int64))
    print(f"  document {number}: {num_tokens:,} tokens in {last - first} sequences", end="")
    print("" if len(ids) == num_tokens else f", the first {len(ids)} shown")
    if tokenizer is None or dataset.dtype.kind == "f":
        print(f"    {' '.join(map(str, ids))}")
    else:
        text = tokenizer.detokenize([token for token in ids if 0 <= token < tokenizer.vocab_size])
        print(f"    {json.dumps(text, ensure_ascii=False)}")


def inspect(prefix: str, arguments: argparse.Namespace, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Print one data set and return its statistics as JSON values.

    Raises:
        DataError: the data set is damaged or missing.
    """
    dataset = intact_dataset(prefix)
    lengths = describe_lengths(document_lengths(dataset))
    print_lengths(dataset, lengths)
    content: dict[str, Any] = {
        "prefix": prefix,
        "dtype": dataset.dtype.name,
        "tokens": dataset.num_tokens,
        "sequences": len(dataset),
        "documents": asdict(lengths),
    }
    if not arguments.index_only and dataset.dtype.kind != "f":
        with _bar("reading", prefix, (".bin",)) as bar:
            tokens = count_tokens(dataset, bar.add)
        print_tokens(dataset, tokens, arguments.top_tokens, tokenizer)
        content["token_ids"] = {
            "different": int(np.count_nonzero(tokens.counts)),
            "outside": tokens.outside,
            "entropy_bits": tokens.entropy_bits,
            "top": tokens.top(arguments.top_tokens),
        }
    for number in choose_documents(dataset, arguments.documents, arguments.samples, arguments.seed):
        print_document(dataset, number, arguments.max_tokens, tokenizer)
    return content


def run(arguments: argparse.Namespace) -> None:
    """Inspect the data sets, verify them or write their checksums, depending on the flags.

    Raises:
        InputError: the flags, the tokenizer or a data set is invalid, or a data set is damaged.
    """
    check_arguments(arguments)
    prefixes = [without_suffix(prefix) for prefix in arguments.prefixes]
    tokenizer = None if arguments.tokenizer_type is None else tokenizer_of(arguments)
    if arguments.verify:
        verify(prefixes, tokenizer)
        return
    if arguments.write_checksums:
        for prefix in prefixes:
            intact_dataset(prefix)
            with _bar("reading", prefix, (".bin", ".idx")) as bar:
                write_checksums(prefix, read=bar.add)
            print(f"Wrote {checksums_path(prefix)}")
        return
    contents = [inspect(prefix, arguments, tokenizer) for prefix in prefixes]
    if arguments.json is not None:
        try:
            arguments.json.write_text(json.dumps(contents, indent=2) + "\n", encoding="ascii")
        except OSError as error:
            raise DataError(f"{arguments.json} cannot be written: {error}; change --json") from error


def main(argv: list[str] | None = None) -> int:
    """Run the command with ``argv`` (default: the command line) and return its exit status."""
    parser = build_parser()
    arguments = parser.parse_args(argv)
    if arguments.tokenizer_type is None:
        report_unused(parser, arguments, "--tokenizer-type", TOKENIZER_KEYWORDS)
    return exit_status_of(lambda: run(arguments))
