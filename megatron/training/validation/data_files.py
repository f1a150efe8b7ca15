"""Checks of the data paths, the files behind them, and the split."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from megatron.training.config.data_lists import parse_blend
from megatron.training.config.resolution import DEFAULT_SPLIT
from megatron.training.config.run_config import RunConfig
from megatron.training.validation.check import Check
from megatron.training.validation.index_header import DamagedIndexError, read_index_header

_SPLIT_NAMES = ("training", "validation", "test")


def _check_sources(config: RunConfig) -> Iterator[str]:
    """Let the data come from exactly one place."""
    data = config.data
    sources = {
        "--data-path": bool(data.data_path) and data.data_args_path is None,
        "--data-args-path": data.data_args_path is not None,
        "--train-data-path (or --valid-data-path, --test-data-path)": (
            data.has_data_per_split and data.per_split_data_args_path is None
        ),
        "--per-split-data-args-path": data.per_split_data_args_path is not None,
        "--mock-data": data.mock_data,
    }
    given = [name for name, is_given in sources.items() if is_given]
    if not given and data.dataloader_type != "external":
        yield "no data: give --data-path PREFIX, --train-data-path PREFIX or --mock-data"
    elif len(given) > 1:
        yield f"{' and '.join(given)} exclude each other; keep one"
    if data.split is not None and data.has_data_per_split:
        yield f"--split {data.split} has no effect where each set has data of its own; leave it out"
    if data.has_data_per_split and not data.train_data_path and not config.training.skip_train:
        yield "--train-data-path is missing; --valid-data-path and --test-data-path alone train nothing"


def parse_split(split: str) -> tuple[float, float, float] | None:
    """Return the shares of the three sets, summing to one, or None for a malformed split.

    A split may be separated by commas or slashes; missing shares are 0.
    """
    try:
        shares = [float(text) for text in split.replace("/", ",").split(",")]
    except ValueError:
        return None
    total = sum(shares)
    if len(shares) > 3 or any(share < 0 for share in shares) or not 0 < total < float("inf"):
        return None
    train, valid, test = (share / total for share in (*shares, 0.0, 0.0)[:3])
    return train, valid, test


def split_sizes(shares: Sequence[float], num_sequences: int) -> tuple[int, ...]:
    """Return the number of sequences in each set: boundaries are round(cumulative share x sequences)."""
    bounds, cumulative = [0], 0.0
    for share in shares:
        cumulative += share
        bounds.append(round(cumulative * num_sequences))
    return tuple(after - before for before, after in itertools.pairwise(bounds))


def _check_split(config: RunConfig) -> Iterator[str]:
    split = config.data.split
    if split is None or config.data.has_data_per_split:
        return
    shares = parse_split(split)
    if shares is None:
        yield f"--split {split}: one to three numbers of 0 or more are expected, such as {DEFAULT_SPLIT}"
    elif shares[0] == 0 and not config.training.skip_train:
        yield f"--split {split}: the training set is empty; give its share first, such as {DEFAULT_SPLIT}"


def _check_blends(config: RunConfig) -> Iterator[str]:
    for name, values in _lists(config):
        prefixes, weights = parse_blend(values)
        if weights is not None and (min(weights) < 0 or sum(weights) <= 0):
            yield f"{name} {' '.join(values)}: weights must be 0 or more and not all 0"
        if weights is None and any(_is_number(text) for text in values) and len(values) > 1:
            yield f"{name} {' '.join(values)}: prefixes alone, or weight and prefix in turn, are expected"
            continue
        for prefix in dict.fromkeys(prefixes):
            yield from _check_data_set(config, name, prefix)


def _check_data_set(config: RunConfig, name: str, prefix: str) -> Iterator[str]:
    """Report a data set whose files cannot be used, or that leaves a wanted set empty."""
    try:
        header = read_index_header(prefix)
    except DamagedIndexError as error:
        yield f"{name} {prefix}: {error}"
        return
    if header.num_sequences == 0:
        yield f"{name} {prefix}: the data set holds no documents"
        return
    shares = parse_split(config.data.split or "")
    if shares is None or name not in ("--data-path", "--data-args-path"):
        return
    evaluates = config.validation.eval_iters > 0
    wanted = (not config.training.skip_train, evaluates and config.validation.eval_interval > 0, evaluates)
    sizes = split_sizes(shares, header.num_sequences)
    for set_name, share, size, is_wanted in zip(_SPLIT_NAMES, shares, sizes, wanted):
        if is_wanted and share > 0 and size == 0:
            yield (
                f"--split {config.data.split} of the {header.num_sequences} documents of {prefix} leaves the "
                f"{set_name} set empty; {_split_that_works(header.num_sequences)}"
            )


def _split_that_works(num_sequences: int) -> str:
    if num_sequences < 3:
        return "give --split 1,0,0, or a data set with more documents"
    part = max(1, num_sequences // 20)
    return f"give a split such as {num_sequences - 2 * part},{part},{part}"


def _lists(config: RunConfig) -> list[tuple[str, tuple[str, ...]]]:
    data = config.data
    whole = "--data-path" if data.data_args_path is None else "--data-args-path"
    lists = [
        (whole, data.data_path),
        ("--train-data-path", data.train_data_path),
        ("--valid-data-path", data.valid_data_path),
        ("--test-data-path", data.test_data_path),
    ]
    return [(name, values) for name, values in lists if values and not data.mock_data]


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


CHECKS = (
    Check(("data_path", "dataloader_type"), _check_sources),
    Check(("split",), _check_split),
    Check(("data_path", "split", "eval_iters", "eval_interval"), _check_blends),
)
