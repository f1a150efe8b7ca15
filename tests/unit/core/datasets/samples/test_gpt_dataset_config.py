"""Which descriptions of data can be, and where their indices lie."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron.core.datasets.gpt_dataset_config import Blend, GPTDatasetConfig
from megatron.core.errors import ConfigurationError

BLEND = Blend(("a", "b"), (0.5, 2.0))


@pytest.mark.parametrize(
    "fields",
    [
        {"mock": True, "sequence_length": 1},
        {"mock": True, "random_seed": 0},
        {"mock": True, "random_seed": 2**32 - 1},
        {"blend": BLEND, "split": "1"},
        {"blend_per_split": (BLEND, None, None)},
    ],
)
def test_a_description_without_a_problem(fields: dict[str, Any]) -> None:
    GPTDatasetConfig(**({"sequence_length": 4} | fields))


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"mock": True, "random_seed": -1}, "the seed is -1; give --seed a value from 0 to 4294967295"),
        ({"mock": True, "random_seed": 2**32}, "the seed is 4294967296"),
        ({}, "0 sources of data are given"),
        ({"blend": Blend((), None), "split": "1"}, "a blend without data sets is given"),
        ({"blend": Blend(("a", "b"), (1.0,)), "split": "1"}, "a blend has 2 data sets and 1 weights"),
        ({"blend_per_split": (Blend(("a",), (float("inf"),)), None, None)}, "the weight of a is inf"),
    ],
)
def test_a_problem_names_the_flag(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        GPTDatasetConfig(**({"sequence_length": 4} | fields))
    assert len(caught.value.problems) == 1
    assert problem in caught.value.problems[0]


def test_indices_lie_beside_the_data_or_in_the_cache() -> None:
    config = GPTDatasetConfig(sequence_length=4, blend=BLEND, split="1")
    assert config.index_folder("data/a") == Path("data/cache/GPTDataset_indices")
    assert config.index_folder("data/GPTDataset_indices/a") == Path("data/GPTDataset_indices")
    cached = GPTDatasetConfig(sequence_length=4, blend=BLEND, split="1", path_to_cache="elsewhere")
    assert cached.index_folder("data/a") == Path("elsewhere")
