"""Clean and deduplicate text files and jsonl into one jsonl file.

Each text file becomes one document ({"text": …, "source": …}). Each line of jsonl is one document and keeps its other
keys. The steps are, in this order and each only if its flag is given: drop documents with blacklisted URLs, repair the
encoding, drop documents without text (always), short documents, documents in other languages, and duplicates of
earlier documents. The output does not depend on --workers. Memory does not grow with the input.
"""

from __future__ import annotations

import argparse
import codecs
import os
from pathlib import Path

from megatron.cli.arguments import (
    TOKENIZER_KEYWORDS,
    Parser,
    add_tokenizer_arguments,
    exit_status_of,
    report_unused,
    tokenizer_keywords,
)
from megatron.core.errors import ConfigurationError
from megatron.data import Cleaner, CleaningPlan, TextRules, UrlBlacklist, find_inputs, is_read


def build_parser() -> Parser:
    """Declare the flags."""
    parser = Parser(prog="clean_dataset.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    data = parser.add_argument_group("input and output")
    data.add_argument(
        "--input",
        required=True,
        nargs="+",
        metavar="PATH",
        help="folders (searched recursively), files, patterns such as 'data/*.jsonl.gz', or - for standard input",
    )
    data.add_argument("--output", required=True, type=Path, metavar="FILE", help="jsonl file to write")
    data.add_argument(
        "--dropped-output",
        type=Path,
        metavar="FILE",
        help="jsonl file for the dropped documents, each with its reason",
    )
    data.add_argument("--report", type=Path, metavar="FILE", help="JSON file for the counts")
    data.add_argument(
        "--input-format",
        choices=["auto", "jsonl", "text"],
        default="auto",
        help="auto: by the file's name; standard input is jsonl (auto)",
    )
    data.add_argument("--text-key", default="text", metavar="KEY", help="key of the text (text)")
    data.add_argument("--url-key", default="url", metavar="KEY", help="key of the URL (url)")
    data.add_argument(
        "--input-encoding",
        default="utf-8",
        metavar="NAME",
        help="encoding of text files without a byte order mark (utf-8)",
    )
    data.add_argument(
        "--on-error",
        choices=["stop", "skip"],
        default="stop",
        help="for an unreadable document: stop, or skip it (stop)",
    )
    data.add_argument(
        "--max-document-bytes",
        type=int,
        default=32 << 20,
        metavar="N",
        help="longer documents count as unreadable (32 MiB)",
    )
    filters = parser.add_argument_group("filters")
    filters.add_argument("--fix-encoding", action="store_true", help="repair mojibake (package ftfy)")
    filters.add_argument("--min-tokens", type=int, default=0, metavar="N", help="drop documents with fewer tokens (0)")
    filters.add_argument("--min-words", type=int, default=0, metavar="N", help="drop documents with fewer words (0)")
    filters.add_argument(
        "--language", nargs="+", default=[], metavar="CODE", help="languages to keep, such as en (package py3langid)"
    )
    filters.add_argument(
        "--min-language-probability",
        type=float,
        default=0.0,
        metavar="P",
        help="drop documents whose language is detected with a lower probability (0)",
    )
    filters.add_argument(
        "--url-blacklist", nargs="+", default=[], metavar="FILE", help="files of hosts and URLs to drop, one per line"
    )
    filters.add_argument(
        "--deduplicate",
        choices=["off", "exact", "near"],
        default="off",
        help="drop exact duplicates of earlier documents, or also near duplicates (package datasketch)",
    )
    filters.add_argument(
        "--similarity",
        type=float,
        default=0.8,
        metavar="S",
        help="Jaccard similarity from which documents are near duplicates (0.8)",
    )
    filters.add_argument("--shingle-words", type=int, default=5, metavar="N", help="words per shingle (5)")
    filters.add_argument(
        "--num-permutations",
        type=int,
        default=128,
        metavar="N",
        help="number of MinHash permutations (128)",
    )
    add_tokenizer_arguments(parser, "GPT2BPETokenizer")
    running = parser.add_argument_group("execution")
    running.add_argument(
        "--workers", type=int, default=os.cpu_count() or 1, metavar="N", help="processes (one per CPU core)"
    )
    running.add_argument("--log-interval", type=int, default=10000, metavar="N", help="documents per log line (10000)")
    return parser


def check_arguments(arguments: argparse.Namespace) -> None:
    """Check the values of the flags and report every problem at once.

    Raises:
        ConfigurationError: a value is invalid.
    """
    problems = [
        f"--{name.replace('_', '-')} {value} is not positive"
        for name in ("max_document_bytes", "shingle_words", "workers", "log_interval")
        if (value := vars(arguments)[name]) < 1
    ]
    problems += [
        f"--{name.replace('_', '-')} {value} is negative"
        for name in ("min_tokens", "min_words")
        if (value := vars(arguments)[name]) < 0
    ]
    if not 0 < arguments.similarity <= 1:
        problems.append(f"--similarity {arguments.similarity} is not above 0 and at most 1")
    if not 0 <= arguments.min_language_probability <= 1:
        problems.append(f"--min-language-probability {arguments.min_language_probability} is not within 0 and 1")
    if not 16 <= arguments.num_permutations <= 4096:
        problems.append(f"--num-permutations {arguments.num_permutations} is not within 16 and 4096")
    try:
        codecs.lookup(arguments.input_encoding)
    except LookupError:
        problems.append(f"--input-encoding {arguments.input_encoding} is not known; use for example cp1252")
    outputs = [str(path) for path in (arguments.output, arguments.dropped_output, arguments.report) if path is not None]
    problems += [f"{path} is a folder; pass a file" for path in outputs if os.path.isdir(path)]
    if len({os.path.realpath(path) for path in outputs}) < len(outputs):
        problems.append(f"the output files {', '.join(outputs)} must be different")
    if problems:
        raise ConfigurationError(problems)


def check_outputs(arguments: argparse.Namespace, inputs: list[str]) -> None:
    """Reject an output file that is also an input file.

    Raises:
        ConfigurationError: an output is an input; an earlier output in an input folder counts as an input.
    """
    for flag, path in (
        ("--output", arguments.output),
        ("--dropped-output", arguments.dropped_output),
        ("--report", arguments.report),
    ):
        if path is not None and is_read(str(path), inputs):
            raise ConfigurationError(f"{flag} {path} is one of the input files; use a different file or folder")


def report_flags_without_effect(arguments: argparse.Namespace) -> None:
    """Print the flags that have no effect because their filter is off."""
    parser = build_parser()
    for is_given, needed, names in (
        (arguments.min_tokens, "--min-tokens", TOKENIZER_KEYWORDS),
        (arguments.language, "--language", ("min_language_probability",)),
        (arguments.url_blacklist, "--url-blacklist", ("url_key",)),
        (arguments.deduplicate == "near", "--deduplicate near", ("similarity", "shingle_words", "num_permutations")),
    ):
        if not is_given:
            report_unused(parser, arguments, needed, names)


def clean(arguments: argparse.Namespace) -> None:
    """Clean the input and print the counts.

    Raises:
        InputError: the arguments or the data are invalid; no output remains.
    """
    check_arguments(arguments)
    inputs = find_inputs(arguments.input)
    check_outputs(arguments, inputs)
    report_flags_without_effect(arguments)
    blacklist = UrlBlacklist(arguments.url_blacklist) if arguments.url_blacklist else None
    rules = TextRules(
        fix_encoding=arguments.fix_encoding,
        min_tokens=arguments.min_tokens,
        tokenizer=tokenizer_keywords(arguments),
        languages=arguments.language,
        min_language_probability=arguments.min_language_probability,
        exact_duplicates=arguments.deduplicate != "off",
        similarity=arguments.similarity if arguments.deduplicate == "near" else None,
        num_permutations=arguments.num_permutations,
        shingle_words=arguments.shingle_words,
        min_words=arguments.min_words,
    )
    plan = CleaningPlan(
        inputs=inputs,
        input_format=arguments.input_format,
        output=arguments.output,
        dropped_output=arguments.dropped_output,
        text_key=arguments.text_key,
        url_key=arguments.url_key,
        encoding=arguments.input_encoding,
        max_document_bytes=arguments.max_document_bytes,
        blacklist=blacklist,
        rules=rules,
        stop_on_error=arguments.on_error == "stop",
        workers=arguments.workers,
        log_interval=arguments.log_interval,
    )
    tally = Cleaner(plan, lambda line: print(line, flush=True)).run()
    for line in tally.lines():
        print(line)
    if arguments.report is not None:
        tally.write(arguments.report)
    print(f"Wrote {arguments.output}")


def main(argv: list[str] | None = None) -> int:
    """Run the command with ``argv`` (default: the command line) and return its exit status."""
    arguments = build_parser().parse_args(argv)
    return exit_status_of(lambda: clean(arguments))
