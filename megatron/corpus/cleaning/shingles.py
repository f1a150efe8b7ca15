"""Turn texts into sets of shingles (runs of words), and these into MinHash keys."""

from __future__ import annotations

import re
import zlib
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from megatron.core.errors import ConfigurationError
from megatron.core.tokenizers.tokenizer import load_package

# Scripts that put no space between words count each character as one: Thai, Lao, Burmese, Khmer; kana and CJK, of
# which the punctuation is left out.
_UNSPACED: Final = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff"
    "\u2e80-\u2fff\u3005-\u3007\u3021-\u3029\u3031-\u3035\u3041-\u30fa\u30fc-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
)
_WORD: Final = re.compile(rf"[{_UNSPACED}]|[^\W{_UNSPACED}]+")
_MULTIPLIER: Final = np.uint64(0x9E3779B97F4A7C15)
_BATCH: Final = 1024


def shingles(text: str, num_words: int) -> NDArray[np.uint64]:
    """Hash each run of ``num_words`` words, without repetitions and in rising order.

    Case, punctuation and spaces do not count. A shorter text is one run of all its words; one without any words has
    none.
    """
    # A CRC per word and not Python's hash, which differs from run to run.
    words = np.fromiter(
        (zlib.crc32(word.group().encode("utf-8", "surrogatepass")) for word in _WORD.finditer(text.lower())), np.uint64
    )
    if not len(words):
        return words
    width = min(num_words, len(words))
    hashes = np.zeros(len(words) - width + 1, np.uint64)
    for first in range(width):
        hashes = _mix(hashes + words[first : first + len(hashes)])
    return np.unique(hashes)


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Spread values over all 64 bits, reversibly; the sum of what is mixed and a word depends on the words' order."""
    values = (values ^ (values >> np.uint64(32))) * _MULTIPLIER
    return values ^ (values >> np.uint64(29))


def similarity(a: NDArray[np.uint64], b: NDArray[np.uint64]) -> float:
    """Return the Jaccard similarity of two sets of shingles: the share of what either has that both have."""
    common = len(np.intersect1d(a, b, assume_unique=True))
    return common / max(len(a) + len(b) - common, 1)


class SignatureMaker:
    """Turn sets of shingles into keys that similar sets are likely to share, by MinHash and banding.

    Two sets of similarity s share one key or more with probability ``1 - (1 - s**rows)**bands``. The candidates so
    found are compared exactly, so that a needless candidate costs time alone; bands and rows are chosen accordingly.

    Paper: Broder, "On the resemblance and containment of documents", 1997.

    Raises:
        ConfigurationError: datasketch cannot be imported.
    """

    def __init__(self, threshold: float, num_permutations: int) -> None:
        datasketch = load_package("datasketch", "--deduplicate near", ConfigurationError)
        index = datasketch.MinHashLSH(threshold, num_permutations, weights=(0.0625, 0.9375))
        self.bands, self.rows = int(index.b), int(index.r)
        self._empty: Any = datasketch.MinHash(num_permutations, seed=1, hashfunc=int, scheme="affine32")

    def keys(self, hashes: NDArray[np.uint64]) -> list[int]:
        """Return one 64-bit key for each band; a set without shingles has none."""
        if not len(hashes):
            return []
        signature = self._empty.copy()
        halves = (hashes >> np.uint64(32)).astype(np.uint32)
        for first in range(0, len(halves), _BATCH):
            signature.update_batch(halves[first : first + _BATCH])
        values = signature.digest()[: self.bands * self.rows].astype(np.uint64).reshape(self.bands, self.rows)
        keys = np.arange(1, self.bands + 1, dtype=np.uint64)
        for row in range(self.rows):
            keys = _mix(keys + values[:, row])
        result: list[int] = keys.astype(np.int64).tolist()
        return result
