"""Merge all data sets (.bin/.idx pairs) of a folder into one, in the order of their names, streaming."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.indexed_dataset_builder import IndexedDatasetBuilder
from megatron.core.errors import DataError
from tools.command_line import Parser, exit_status_of


def find_prefixes(folder: Path, output_prefix: Path) -> list[Path]:
    """List the data sets of a folder by name, the output itself left out.

    Raises:
        DataError: the folder is missing or holds none, or half of a data set.
    """
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder; change --input")
    found: dict[str, set[str]] = {}
    for path in folder.iterdir():
        if path.suffix in (".bin", ".idx"):
            found.setdefault(path.stem, set()).add(path.suffix)
    for stem, suffixes in sorted(found.items()):
        if len(suffixes) == 1:
            raise DataError(f"{folder / stem} has only {suffixes.pop()}; complete the pair or remove it from --input")
    prefixes = [folder / stem for stem in sorted(found) if (folder / stem).absolute() != output_prefix.absolute()]
    if not prefixes:
        raise DataError(f"{folder} holds no .bin/.idx pair; change --input")
    return prefixes


def merge(folder: Path, output_prefix: Path) -> None:
    """Write one data set that holds the documents of all of them.

    Raises:
        InputError: they cannot be read or do not fit together; nothing is left behind.
    """
    prefixes = find_prefixes(folder, output_prefix)
    first = IndexedDataset(prefixes[0])
    with IndexedDatasetBuilder(output_prefix, first.dtype, modes=first.sequence_modes is not None) as builder:
        for prefix in prefixes:
            builder.add_dataset(prefix)
            print(f"Added {prefix}: {builder.num_documents} documents so far", flush=True)
        builder.finalize()
    print(f"Wrote {output_prefix}.bin and .idx")


def main() -> int:
    """Run the command and return its exit status."""
    parser = Parser(prog="merge_datasets.py", description=__doc__)
    parser.add_argument("--input", required=True, type=Path, metavar="DIR", help="folder of .bin/.idx pairs")
    parser.add_argument("--output-prefix", required=True, type=Path, metavar="PREFIX", help="path without suffix")
    arguments = parser.parse_args()
    return exit_status_of(lambda: merge(arguments.input, arguments.output_prefix))


if __name__ == "__main__":
    sys.exit(main())
