"""A program that plain python runs spreads a loaded model over processes, and generates as transformers does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint.formats.huggingface.parallelize import SpawnedModel, parallelize
from megatron.core.errors import CheckpointError, ConfigurationError, MegatronError
from tests.unit.interop.huggingface.tiny_models import make_model, tokens_of

BEAMS = {"num_beams": 5, "no_repeat_ngram_size": 4}


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Any, SpawnedModel]]:
    """Return a model of transformers, and the same over two processes."""
    theirs = make_model("neo").eval()
    ours = parallelize(theirs, num_gpus=2)
    assert isinstance(ours, SpawnedModel)
    yield theirs, ours
    ours.close()


@pytest.mark.full
@pytest.mark.parametrize("how", [{}, BEAMS], ids=["greedy", "beams"])
def test_texts_are_those_of_transformers(pair: tuple[Any, SpawnedModel], how: dict[str, Any]) -> None:
    theirs, ours = pair
    inputs = {"input_ids": tokens_of("neo", 2, 9)}
    expected = theirs.generate(**inputs, attention_mask=torch.ones(2, 9).long(), max_length=21, pad_token_id=0, **how)
    assert torch.equal(ours.generate(**inputs, max_length=21, pad_token_id=0, **how), expected)
    assert expected.shape == (2, 21)


@pytest.mark.full
def test_an_end_token_is_a_part_of_its_text_and_padding_follows(pair: tuple[Any, SpawnedModel]) -> None:
    _, ours = pair
    ids = tokens_of("neo", 2, 9)
    whole = ours.generate(ids, max_new_tokens=6)
    end = int(whole[0, 10])
    assert end not in whole[1, 9:].tolist()
    cut = ours.generate(ids, max_new_tokens=6, eos_token_id=end, pad_token_id=3)
    assert torch.equal(cut[1], whole[1])
    assert cut[0, 9:].tolist() == [*whole[0, 9:11].tolist(), 3, 3, 3, 3]
    # A prompt that is filled up on the left is continued as it is alone.
    padded = torch.cat([torch.zeros(1, 2, dtype=ids.dtype), ids[1:]], dim=1)
    mask = (torch.arange(11) >= 2).long()[None]
    assert torch.equal(ours.generate(padded, mask, max_new_tokens=6)[:, 2:], whole[1:])


@pytest.mark.parametrize("how", [{}, {"num_beams": 3, "early_stopping": True}], ids=["greedy", "beams"])
def test_of_several_end_tokens_a_text_has_the_one_that_ended_it(
    pair: tuple[Any, SpawnedModel], how: dict[str, Any]
) -> None:
    theirs, ours = pair
    ids = tokens_of("neo", 2, 9)
    mask = torch.ones(2, 9).long()
    whole = theirs.generate(ids, attention_mask=mask, max_new_tokens=6, pad_token_id=3, eos_token_id=[], **how)
    end = int(whole[0, 10])
    absent = next(token for token in range(64) if token not in whole)
    given = {"max_new_tokens": 6, "pad_token_id": 3, "eos_token_id": [absent, end], **how}
    expected = theirs.generate(ids, attention_mask=mask, **given)
    assert end in expected[0, 9:]
    assert torch.equal(ours.generate(ids, **given), expected)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"eos_token_id": 7', "is not valid JSON"),
        ("[7]", "holds a JSON list, not an object"),
        ('{"eos_token_id": "7"}', "eos_token_id is '7'; a token's number or a list of such is expected"),
    ],
)
def test_settings_without_end_tokens_are_refused_by_name(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(CheckpointError, match=rf"generation_config\.json:? {said}"):
        SpawnedModel(tmp_path, 2)


def test_draws_follow_the_generator_of_the_program(pair: tuple[Any, SpawnedModel]) -> None:
    _, ours = pair
    drawn = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        drawn.append(ours.generate(tokens_of("neo", 1, 9), max_new_tokens=12, do_sample=True, top_p=0.9))
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


def test_wrong_requests_are_refused_and_others_go_on(pair: tuple[Any, SpawnedModel]) -> None:
    _, ours = pair
    ids = tokens_of("neo", 1, 9)
    with pytest.raises(ConfigurationError, match=r"prompt 1 of 1"):
        ours.generate(ids + 10**6, max_new_tokens=2)
    with pytest.raises(ConfigurationError, match=r"^-1 tokens to generate is not positive"):
        ours.generate(ids, max_length=8)
    with pytest.raises(ConfigurationError, match=r"^do_sample=True and num_beams are two ways"):
        ours.generate(ids, do_sample=True, num_beams=2)
    with pytest.raises(ConfigurationError, match=r"input_ids of shape \[9\] and attention_mask of \[9\]; both must be"):
        ours.generate(ids[0])
    assert ours.generate(ids, max_new_tokens=2).shape == (1, 11)


def test_the_death_of_a_process_is_reported_and_ends_all(pair: tuple[Any, SpawnedModel]) -> None:
    """The last test: its model is gone."""
    _, ours = pair
    ids = tokens_of("neo", 1, 9)
    ours._ranks[1].kill()
    with pytest.raises(MegatronError, match=r"^process 1 of 2 ended with status -9; see above$"):
        ours.generate(ids, max_new_tokens=2)
    ours.close()
    assert all(rank.poll() is not None for rank in ours._ranks)
    with pytest.raises(ConfigurationError, match=r"^the model's processes have ended; call parallelize again$"):
        ours.generate(ids, max_new_tokens=2)
