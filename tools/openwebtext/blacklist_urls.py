"""Remove unwanted URLs from lists of URLs, as Megatron-LM's script of this name does."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.cli.openwebtext.blacklist_urls import main

if __name__ == "__main__":
    sys.exit(main())
