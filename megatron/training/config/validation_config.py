"""When and how much a run evaluates."""

from __future__ import annotations

import dataclasses

from megatron.core.config_base import flag


@dataclasses.dataclass(frozen=True, kw_only=True)
class ValidationConfig:
    """Hold the evaluation's interval, its length and its further data sets."""

    eval_interval: int = 1000
    """Iterations from one evaluation on the validation set to the next; 0 for never."""
    eval_iters: int = 100
    """Number of iterations of one evaluation; 0 for none."""
    full_validation: bool = False
    """Evaluate on all of each validation set, every sample once, in place of --eval-iters iterations."""
    extra_valid_datalist: tuple[str, ...] = flag((), append=True, metavar="FILE")
    """File with a list of data prefixes, or of weights and prefixes, that makes one more validation set (or a prefix
    itself); may be repeated."""
    extra_valid_data_samples: tuple[int, ...] = flag((), append=True, metavar="N")
    """Number of samples of one more validation set, the same in every evaluation; one for each
    --extra-valid-datalist, or none: all of each set."""
    extra_valid_data_names: tuple[str, ...] = flag((), append=True, metavar="NAME")
    """Name under which one more validation set is reported; one for each --extra-valid-datalist, or none: the names
    of the files."""
