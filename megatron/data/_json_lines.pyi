from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

def extract_texts(block: bytes, keys: Sequence[bytes]) -> tuple[list[bytes | None], NDArray[np.int64], int]: ...
