"""Count the documents read, kept, repaired and dropped."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from megatron.core.errors import DataError

BLACKLISTED_URL: Final = "url on the blacklist"
EXACT_DUPLICATE: Final = "exact duplicate"
NEAR_DUPLICATE: Final = "near duplicate"


@dataclass
class Tally:
    """Count documents and bytes (of texts in UTF-8, of lines in the output)."""

    files: int = 0
    unknown_files: int = 0
    documents: int = 0
    text_bytes: int = 0
    bad: int = 0
    repaired: int = 0
    without_url: int = 0
    kept: int = 0
    output_bytes: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    dropped_bytes: Counter[str] = field(default_factory=Counter)

    def lines(self) -> list[str]:
        """Return the counts as lines; dropped documents by reason, in the order of the filters."""
        total = max(self.documents, 1)
        lines = [f"Read {self.documents} documents ({self.text_bytes / 1e6:.2f} MB of text) of {self.files} files"]
        lines += [
            f"  dropped {count} ({100 * count / total:.2f} %, {self.dropped_bytes[reason] / 1e6:.2f} MB): {reason}"
            for reason, count in self.dropped.items()
            if count
        ]
        if self.bad:
            lines.append(f"  skipped {self.bad} that could not be read")
        if self.repaired:
            lines.append(f"  repaired the encoding of {self.repaired}")
        if self.without_url:
            lines.append(f"  {self.without_url} had no URL, and no blacklist applied to them")
        if self.unknown_files:
            lines.append(f"  left out {self.unknown_files} files of other kinds; a pattern such as 'DIR/*' names them")
        lines.append(f"Kept {self.kept} documents ({100 * self.kept / total:.2f} %, {self.output_bytes / 1e6:.2f} MB)")
        return lines

    def write(self, path: Path) -> None:
        """Write the counts as JSON.

        Raises:
            DataError: the file cannot be written.
        """
        content = {
            "files": self.files,
            "unknown_files": self.unknown_files,
            "documents": self.documents,
            "text_bytes": self.text_bytes,
            "unreadable": self.bad,
            "repaired": self.repaired,
            "without_url": self.without_url,
            "dropped": dict(self.dropped),
            "dropped_bytes": dict(self.dropped_bytes),
            "kept": self.kept,
            "output_bytes": self.output_bytes,
        }
        try:
            path.write_text(json.dumps(content, indent=2) + "\n", encoding="ascii")
        except OSError as error:
            raise DataError(f"{path} cannot be written: {error}") from error
