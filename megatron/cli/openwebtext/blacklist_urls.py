"""Remove unwanted URLs from lists of URLs: media, social networks, shops, files that are no pages, and duplicates.

blacklist_urls.py FOLDER OUTPUT

The arguments and log lines are those of Megatron-LM's script. FOLDER has .txt files with one URL per line, which are
read in the order of their names. Unlike there, the URLs are written in the order in which they are read, and sites are
recognized without a list of public suffixes: google.de and google.co.uk are both google. The lists of sites and of
suffixes are this project's own. `megatron clean-dataset --url-blacklist FILE` filters documents by URL.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from pathlib import Path

from megatron.cli.arguments import Parser, exit_status_of
from megatron.core.errors import DataError
from megatron.data import OutputFile, UrlFilter

_INTERVAL = 100_000
_TITLES = {
    UrlFilter.DOMAIN: ("DOMAIN BLACKLIST", "domain blacklisted"),
    UrlFilter.SUFFIX: ("EXTENTION BLACKLIST", "extention blacklisted"),
    UrlFilter.SHORT: ("SHORT URL", "short urls (<=8)"),
    UrlFilter.MALFORMED: ("MALFORMED URL", "malformed urls"),
    UrlFilter.DUPLICATE: ("DUPLICATE URL", "duplicate urls"),
}
"""Megatron-LM's words for a removed URL and for the number of such URLs."""


def build_parser() -> Parser:
    """Declare Megatron-LM's arguments."""
    parser = Parser(prog="blacklist_urls.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="folder of .txt files with one URL per line")
    parser.add_argument("output", type=Path, metavar="OUTPUT", help="file for the URLs that are kept")
    return parser


def remove_urls(folder: Path, output: Path) -> None:
    """Write the URLs that the filter keeps, and print the others with the reason.

    Raises:
        DataError: there are no lists, a list cannot be read, or the output cannot be written.
    """
    files = [path for path in sorted(folder.glob("*.txt")) if path.resolve() != output.resolve()]
    if not files:
        raise DataError(f"{folder} has no .txt files with URLs; use a different folder")
    print(f"remove blacklisted urls ..\n> found {len(files)} files", flush=True)
    url_filter, removed = UrlFilter(), Counter[str]()
    num_urls, start = 0, time.monotonic()
    with OutputFile(output) as kept:
        for path in files:
            try:
                with open(path, encoding="utf-8", errors="surrogateescape") as lines:
                    for line in lines:
                        url = line.strip()
                        num_urls += 1
                        reason = url_filter.reason_to_remove(url)
                        if reason is None:
                            kept.write(f"{url}\n".encode("utf-8", "surrogateescape"))
                        else:
                            removed[reason] += 1
                            print(f"[{_TITLES[reason][0]}]: {ascii(url)[1:-1]}")
                        if num_urls % _INTERVAL == 0:
                            print(_progress("PROGRESS", start, num_urls, removed), flush=True)
            except OSError as error:
                raise DataError(f"{path} cannot be read: {error}") from error
        print(_progress("FINAL", start, num_urls, removed))
        print(f"> writing cleaned up url list to {output}")
        kept.publish()
    print("done :-)")


def _progress(title: str, start: float, num_urls: int, removed: Counter[str]) -> str:
    elapsed = f"time elapsed (s): {time.monotonic() - start:.2f}"
    counts = [f"{words}: {removed[reason]}" for reason, (_, words) in _TITLES.items()]
    return " | ".join([title, elapsed, f"number of urls: {num_urls}", *counts])


def main(argv: list[str] | None = None) -> int:
    """Run the script with ``argv`` (default: the command line) and return its exit status."""
    arguments = build_parser().parse_args(argv)
    return exit_status_of(lambda: remove_urls(arguments.folder, arguments.output))
