"""Lists of data in files: what is read from them, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.config.run_config import ValidationConfig, extra_validation_sets, read_data_list, read_per_split_lists
from megatron.core.datasets.gpt_dataset_config import Blend, ValidationSet
from megatron.core.errors import ConfigurationError
from tests.unit.training.config.command_lines import write_data_set


@pytest.fixture
def lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Go to a folder with two lists and a data set."""
    monkeypatch.chdir(tmp_path)
    Path("web").write_text("0.25 c4_a\n 7e5 c4_b\n")
    Path("lists").mkdir()
    Path("lists/books").write_text("one two")
    write_data_set(tmp_path / "plain_text_document")
    return tmp_path


def extra(*paths: str, samples: tuple[int, ...] = (), names: tuple[str, ...] = (), full: bool = False) -> object:
    return extra_validation_sets(
        ValidationConfig(
            extra_valid_datalist=paths,
            extra_valid_data_samples=samples,
            extra_valid_data_names=names,
            full_validation=full,
        )
    )


def problems(*paths: str, samples: tuple[int, ...] = (), names: tuple[str, ...] = ()) -> tuple[str, ...]:
    with pytest.raises(ConfigurationError) as caught:
        extra(*paths, samples=samples, names=names)
    return caught.value.problems


def test_validation_sets_have_names_and_numbers(lists: Path) -> None:
    web = Blend(("c4_a", "c4_b"), (0.25, 7e5))
    assert extra() == ()
    assert extra("web", "lists/books", samples=(3, 4), names=("c4", "old books")) == (
        ValidationSet("c4", web, 3),
        ValidationSet("old books", Blend(("one", "two")), 4),
    )
    assert extra("lists/books", "plain_text_document") == (
        ValidationSet("books", Blend(("one", "two"))),
        ValidationSet("plain_text_document", Blend(("plain_text_document",))),
    )
    assert extra("web", samples=(3,), full=True) == (ValidationSet("web", web),)


def test_what_does_not_fit_together_is_refused(lists: Path) -> None:
    for values, words in (
        (problems("web", "lists/books", samples=(3,)), "--extra-valid-data-samples is given 1 times and"),
        (problems(names=("c4",)), "--extra-valid-data-names is given 1 times and --extra-valid-datalist 0 times"),
        (problems("web", samples=(0,)), "--extra-valid-data-samples 0: give 1 or more"),
        (problems("web", names=("validation",)), "'validation' is taken"),
        (problems("web", "web"), "two validation sets are called web"),
    ):
        assert len(values) == 1
        assert words in values[0]


def test_every_list_that_cannot_be_read_is_named(lists: Path) -> None:
    Path("empty").write_text(" \n")
    Path("mixed").write_text("0.5 a b c")
    found = problems("nowhere", "empty", "web", "mixed")
    assert [problem.split(":")[0] for problem in found] == [
        "--extra-valid-datalist nowhere",
        "--extra-valid-datalist empty",
        "--extra-valid-datalist mixed",
    ]


def test_lists_of_the_training_data(lists: Path) -> None:
    assert read_data_list("web", "--data-args-path") == ("0.25", "c4_a", "7e5", "c4_b")
    Path("splits.json").write_text(json.dumps({"train": [0.5, "a", "0.5", "b"], "valid": ["c"], "test": None}))
    assert read_per_split_lists("splits.json", "--per-split-data-args-path") == {
        "train": ("0.5", "a", "0.5", "b"),
        "valid": ("c",),
        "test": (),
    }
    for text in ("[1]", '{"training": []}', '{"train": 3}', "{"):
        Path("splits.json").write_text(text)
        with pytest.raises(ConfigurationError, match=r"--per-split-data-args-path splits\.json"):
            read_per_split_lists("splits.json", "--per-split-data-args-path")
