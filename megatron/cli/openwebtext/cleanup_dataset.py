"""Repair the encoding of documents, and drop those that are not English or have fewer than 128 tokens.

cleanup_dataset.py INPUT OUTPUT [--vocab-file vocab.json --merge-file merges.txt]

The arguments are those of Megatron-LM's script. Unlike there, nothing is downloaded: GPT-2's tokens are counted with
the given files. Without them, documents of fewer than 96 words are dropped, which is about as many tokens. Languages
are detected with py3langid instead of langdetect. Both need `pip install -e '.[data-cleaning]'`. The flags of
`megatron clean-dataset` are also accepted.
"""

from __future__ import annotations

import argparse

from megatron.cli.arguments import Parser, exit_status_of
from megatron.cli.clean_dataset import build_parser as build_cleaning_parser
from megatron.cli.clean_dataset import clean

MIN_TOKENS, MIN_WORDS = 128, 96


def build_parser() -> Parser:
    """Declare Megatron-LM's arguments."""
    parser = Parser(
        prog="cleanup_dataset.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("input", metavar="INPUT", help="file with a JSON object per line, with the key text")
    parser.add_argument("output", metavar="OUTPUT", help="file to write")
    return parser


def clean_up(arguments: argparse.Namespace, flags: list[str]) -> None:
    """Clean the documents with the steps of Megatron-LM's script and the given flags of `megatron clean-dataset`.

    Raises:
        InputError: a package is missing, or the arguments or the data are invalid.
    """
    words = ["--input", arguments.input, "--output", arguments.output, "--input-format", "jsonl"]
    words += ["--on-error", "skip", "--fix-encoding", "--language", "en"]
    parser = build_cleaning_parser()
    given = parser.parse_args([*words, *flags])
    if given.vocab_file or given.tokenizer_model or given.tokenizer_type != parser.get_default("tokenizer_type"):
        words += ["--min-tokens", str(MIN_TOKENS)]
    else:
        words += ["--min-words", str(MIN_WORDS)]
        print(
            f"Documents of fewer than {MIN_WORDS} words are dropped, which is about {MIN_TOKENS} tokens; with "
            "--vocab-file and --merge-file tokens are counted",
            flush=True,
        )
    clean(parser.parse_args([*words, *flags]))


def main(argv: list[str] | None = None) -> int:
    """Run the script with ``argv`` (default: the command line) and return its exit status."""
    arguments, flags = build_parser().parse_known_args(argv)
    return exit_status_of(lambda: clean_up(arguments, flags))
