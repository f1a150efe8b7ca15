"""What fp8 excludes or leaves without effect."""

from __future__ import annotations

import pytest

from megatron.config.arguments import resolve_arguments
from megatron.core.errors import ConfigurationError
from tests.unit.training.config.command_lines import MINIMAL

SIZES = "--hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 --micro-batch-size 1"
FP8 = [*MINIMAL, *SIZES.split(), "--bf16", "--fp8-format", "hybrid"]
GATHER = "--fp8-param-gather --use-distributed-optimizer --global-batch-size 2"


def test_gathered_fp8_weights_exclude_what_they_would_spoil() -> None:
    resolve_arguments([*FP8, *GATHER.split()], 2)
    flags = "--use-precision-aware-optimizer --main-params-dtype fp16"
    with pytest.raises(ConfigurationError) as caught:
        resolve_arguments([*FP8, *GATHER.split(), *flags.split()], 2)
    (problem,) = caught.value.problems
    assert problem.startswith("--main-params-dtype fp16 keeps what the weights")


LATENT = "--multi-latent-attention --position-embedding-type rope --tensor-model-parallel-size 2"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--q-lora-rank 40", "--q-lora-rank 40, which --fp8-format hybrid needs to be a multiple of 16; use 48"),
        ("--kv-lora-rank 24", "--kv-lora-rank 24, which --fp8-format hybrid needs to be a multiple of 16; use 32"),
        ("--qk-pos-emb-head-dim 8", "--qk-pos-emb-head-dim 8, which --fp8-format hybrid needs to be a multiple of 16"),
        ("--qk-head-dim 12", "--qk-head-dim 12 makes 24 channels on each tensor-parallel rank"),
        ("--v-head-dim 20", "--v-head-dim 20 makes 40 channels on each tensor-parallel rank"),
    ],
)
def test_widths_of_latent_attention_are_those_of_products(flags: str, words: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        resolve_arguments([*FP8, *LATENT.split(), *flags.split()], 2)
    (problem,) = caught.value.problems
    assert problem.startswith(words)
    assert resolve_arguments([*FP8, *LATENT.split(), flags.split()[0], problem.rpartition(" ")[2]], 2)


def test_the_product_in_front_of_further_tokens_has_columns_for_every_rank() -> None:
    flags = "--mtp-num-layers 1 --position-embedding-type rope --tensor-model-parallel-size 2 --hidden-size"
    with pytest.raises(ConfigurationError) as caught:
        resolve_arguments([*FP8, *flags.split(), "80", "--num-attention-heads", "2", "--kv-channels", "16"], 2)
    (problem,) = caught.value.problems
    assert problem.startswith("--hidden-size 80 makes 40 columns of the product in front of the layers of --mtp-num-")
    assert problem.endswith("use 96")


def test_channels_that_latent_attention_has_not_are_not_asked_about() -> None:
    """Its heads have widths of their own: here 9 channels each are of no layer."""
    assert resolve_arguments([*FP8, *LATENT.split(), "--kv-channels", "9"], 2).config.model.multi_latent_attention


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "rowwise", "blockwise", "mxfp8"])
def test_experts_and_latent_attention_are_in_fp8_with_every_recipe(recipe: str) -> None:
    flags = f"{LATENT} --num-experts 4 --moe-ffn-hidden-size 32 --fp8-recipe {recipe}"
    assert resolve_arguments([*FP8, *flags.split()], 2).config.model.float8_layers(2)


LORA = "--lora-rank 2 --load somewhere --finetune"


@pytest.mark.parametrize(
    ("flags", "world_size", "words"),
    [
        (f"{LORA} --no-fp8-wgrad", 1, "--no-fp8-wgrad has no effect with --lora-rank"),
        (f"{LORA} {GATHER}", 2, "--fp8-param-gather has no effect with --lora-rank"),
        (
            "--tensor-model-parallel-size 2 --sequence-parallel --seq-length 64 --max-position-embeddings 64 "
            "--tp-comm-overlap --tp-comm-overlap-impl ring",
            2,
            "fp8 products have no chunks",
        ),
        ("--optimizer-cpu-offload --optimizer-offload-fraction 0", 1, "offloads nothing"),
    ],
)
def test_what_does_nothing_says_so(flags: str, world_size: int, words: str) -> None:
    parsed = resolve_arguments([*FP8, *flags.split()], world_size, needs_files=False)
    assert len([note for note in parsed.notes if words in note]) == 1
