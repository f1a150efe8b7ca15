"""Latent attention and multi-token prediction: what is refused, in one line that says what works."""

from __future__ import annotations

import pytest

from megatron.config.arguments import resolve_arguments
from megatron.core.errors import ConfigurationError
from tests.unit.training.config.command_lines import MINIMAL

LATENT = "--multi-latent-attention --position-embedding-type rope"
FURTHER = "--mtp-num-layers 1 --position-embedding-type rope"


def problems_of(flags: str) -> tuple[str, ...]:
    with pytest.raises(ConfigurationError) as caught:
        resolve_arguments([*MINIMAL, *flags.split()], 1)
    return caught.value.problems


def test_models_of_both_are_taken() -> None:
    model = resolve_arguments([*MINIMAL, *f"{LATENT} {FURTHER}".split()], 1).config.model
    assert model.multi_latent_attention
    assert model.mtp_depth == 1


def test_the_width_of_other_heads_is_no_matter() -> None:
    words = f"{LATENT} --hidden-size 30".split()
    assert resolve_arguments([*MINIMAL, *words], 1).config.model.kv_channels % 2 == 1


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (f"{LATENT} --group-query-attention --num-query-groups 2", "--num-query-groups 2 shares them; leave it out"),
        ("--multi-latent-attention", "use --position-embedding-type rope"),
        (f"{LATENT} --qk-pos-emb-head-dim 7", "give 8"),
        ("--recompute-granularity selective --recompute-modules mla_up_proj", "without --multi-latent-attention"),
        (f"{LATENT} --rotary-percent 0.5", "leave --rotary-percent out"),
        (f"{LATENT} --rotary-interleaved", "leave --rotary-interleaved out"),
        (f"{LATENT} --lora-rank 2", "leave --lora-rank out"),
        (f"{LATENT} --cuda-graph-impl local", "use --cuda-graph-impl none"),
        (
            f"{LATENT} --no-yarn-correction-range-round-to-int --save somewhere --ckpt-format torch",
            "--ckpt-format torch cannot hold a model with --no-yarn-correction-range-round-to-int",
        ),
        ("--rope-type yarn", "use --position-embedding-type rope, or leave --rope-type out"),
        ("--rope-type yarn --position-embedding-type rope --use-rope-scaling", "--use-rope-scaling both scale rotary"),
        ("--mtp-num-layers 1", "use --position-embedding-type rope or --no-position-embedding"),
        (f"{FURTHER} --mtp-num-layers 1000", "predicts tokens beyond the end of --seq-length"),
        (f"{FURTHER} --lora-rank 2", "leave --lora-rank out, or --mtp-num-layers"),
        (f"{FURTHER} --cuda-graph-impl local", "use --cuda-graph-impl none"),
    ],
)
def test_what_is_not_built_is_refused_in_one_line(flags: str, words: str) -> None:
    assert any(words in problem for problem in problems_of(flags)), problems_of(flags)


def test_what_rotary_positions_are_anyway_has_a_place_in_megatrons_files() -> None:
    saved = "--save somewhere --ckpt-format torch --position-embedding-type rope --rope-type"
    assert resolve_arguments([*MINIMAL, *f"{saved} rope".split()], 1).config.model.rope_type == "rope"
