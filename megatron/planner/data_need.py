"""How often a run reads its data: samples that it trains on beside samples that its token files hold."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.resolution import DEFAULT_SPLIT
from megatron.config.run_config import RunConfig
from megatron.core.datasets.gpt_dataset_config import parse_blend, parse_split, split_boundaries
from megatron.core.datasets.index_builder import count_samples, plan_epochs
from megatron.core.datasets.indexed_dataset import IndexedDataset, idx_path
from megatron.core.errors import InputError


@dataclass(frozen=True)
class DataSetNeed:
    """Hold the training part of one data set: its tokens, its samples, what the run takes of it, and how often."""

    prefix: str
    tokens: int
    samples: int
    samples_wanted: int
    epochs: int


@dataclass(frozen=True)
class DataNeed:
    """Hold the samples and tokens that a run trains on, its data sets, and why there are none where none are known."""

    samples: int
    tokens: int
    iterations: int
    data_sets: tuple[DataSetNeed, ...]
    reason: str | None


def data_need(config: RunConfig) -> DataNeed:
    """Return what a run reads of its training data; files that are not here are left out with the reason."""
    length, samples = config.data.seq_length, config.train_samples
    iterations = config.train_iters if samples else 0
    sets, reason = _data_sets(config)
    return DataNeed(samples, samples * length, iterations, sets, reason)


def _data_sets(config: RunConfig) -> tuple[tuple[DataSetNeed, ...], str | None]:
    data = config.data
    paths = data.train_data_path or data.data_path
    if data.mock_data or not paths:
        return (), "no data path is given" if not data.mock_data else "the data are made up"
    if data.sft:
        return (), "conversations are counted when they are read"
    try:
        blend = parse_blend(paths)
        missing = [prefix for prefix in blend.prefixes if not idx_path(prefix).is_file()]
        if missing:
            return (), f"{idx_path(missing[0])} is not here"
        weights = blend.weights
        sets = [IndexedDataset(prefix) for prefix in blend.prefixes]
        trained = [_training_tokens(config, each) for each in sets]
    except InputError as error:
        return (), "; ".join(str(error).splitlines())
    # Data sets without weights are taken in the proportion of their sizes.
    shares = weights or [max(tokens, 1) for tokens in trained]
    needs = []
    for each, tokens, share in zip(sets, trained, shares):
        wanted = -(-config.train_samples * share // sum(shares))
        epochs = plan_epochs(tokens, data.seq_length, int(wanted)).num_epochs if tokens else 0
        needs.append(DataSetNeed(str(each.prefix), tokens, count_samples(tokens, data.seq_length), int(wanted), epochs))
    return tuple(needs), None


def _training_tokens(config: RunConfig, data_set: IndexedDataset) -> int:
    if config.data.train_data_path:
        return data_set.num_tokens
    part = split_boundaries(parse_split(config.data.split or DEFAULT_SPLIT), len(data_set))[0]
    return 0 if part is None else data_set.count_tokens(part)
