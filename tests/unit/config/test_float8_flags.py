"""fp8 on the command line: old flags, what cannot be combined, and what fp8 leaves without effect."""

from __future__ import annotations

import pytest

from megatron.config.arguments import resolve_arguments
from megatron.core.errors import ConfigurationError
from tests.unit.config.command_lines import MINIMAL

SHAPE = """--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 64
    --micro-batch-size 1 --global-batch-size 8 --bf16"""


def resolve(flags: str, world_size: int = 1):
    return resolve_arguments([*MINIMAL, *SHAPE.split(), *flags.split()], world_size)


def problems_of(flags: str, world_size: int = 1) -> tuple[str, ...]:
    with pytest.raises(ConfigurationError) as caught:
        resolve(flags, world_size)
    return caught.value.problems


@pytest.mark.parametrize(
    ("flags", "value"),
    [
        ("--fp8-format e4m3", "e4m3"),
        ("--fp8-e4m3", "e4m3"),
        ("--fp8-hybrid", "hybrid"),
        ("--fp8-hybrid --fp8-format hybrid", "hybrid"),
        ("", None),
    ],
)
def test_formats(flags: str, value: str | None) -> None:
    assert resolve(flags).config.model.fp8.fp8_format == value


def test_published_scripts_flags_are_accepted_without_a_note() -> None:
    flags = (
        "--fp8-format hybrid --fp8-amax-history-len 1024 --fp8-amax-compute-algo max --fp8-margin 0 --fp8-interval 1"
    )
    assert not [note for note in resolve(flags).notes if "fp8" in note]


@pytest.mark.parametrize(
    ("flags", "layers"),
    [
        ("", range(4)),
        ("--first-last-layers-bf16", range(1, 3)),
        ("--first-last-layers-bf16 --num-layers-at-start-in-bf16 0 --num-layers-at-end-in-bf16 3", range(1)),
    ],
)
def test_layers(flags: str, layers: range) -> None:
    assert resolve(f"--fp8-format hybrid {flags}").config.model.fp8.float8_layers(4) == layers


def test_nvfp4_has_layers_in_bfloat16_and_16_bit_weight_gradients_like_fp8() -> None:
    resolved = resolve("--fp4-format e2m1 --fp4-recipe nvfp4 --first-last-layers-bf16 --no-fp8-wgrad")
    assert resolved.config.model.fp8.float8_layers(4) == range(1, 3)
    assert not [note for note in resolved.notes if "fp4" in note or "fp8" in note]
    assert resolve("--fp4-format e2m1 --fp8-recipe tensorwise").notes == (
        "--fp8-recipe tensorwise has no effect without --fp8-format {hybrid,e4m3}",
    )


@pytest.mark.parametrize(
    ("flags", "world_size", "expected"),
    [
        ("--fp4-format e2m1 --fp8-format hybrid", 1, ("--fp4-format e2m1 and --fp8-format hybrid exclude each other",)),
        ("--fp4-format e3m0", 1, ("--fp4-format e3m0: possible values are e2m1",)),
        ("--fp4-format e2m1 --fp4-recipe custom", 1, ("--fp4-recipe custom is not supported yet",)),
        ("--fp4-format e2m1 --fp4-param-gather", 1, ("--fp4-param-gather is not supported yet",)),
        ("--fp4-format e2m1 --num-experts 4", 1, ("--fp4-format e2m1 is not supported for experts",)),
        ("--fp4-format e2m1 --cuda-graph-impl local", 1, ("use --cuda-graph-impl none",)),
        ("--fp4-format e2m1 --hidden-size 80", 1, ("--hidden-size 80, but --fp4-format e2m1 needs", "use 96")),
        (
            "--first-last-layers-bf16",
            1,
            ("has no effect without --fp8-format {hybrid,e4m3} or --fp4-format {e2m1}; add one",),
        ),
        ("--fp8-format hybrid --fp8-e4m3", 1, ("--fp8-e4m3 and --fp8-format hybrid exclude each other",)),
        ("--fp8-hybrid --fp8-e4m3", 1, ("--fp8-hybrid and --fp8-e4m3 exclude each other",)),
        ("--fp8-param-gather", 1, ("--fp8-param-gather has no effect without --fp8-format",)),
        ("--fp8-format hybrid --fp8-param-gather", 2, ("gathered only with --use-distributed-optimizer",)),
        ("--fp8-format hybrid --fp8-recipe custom", 1, ("--fp8-recipe custom",)),
        ("--fp8-format e5m2", 1, ("--fp8-format e5m2: possible values are hybrid, e4m3",)),
        ("--fp8-format hybrid --fp8-margin 18", 1, ("--fp8-margin 18: a number of at most 17 is expected",)),
        ("--fp8-amax-compute-algo mean", 1, ("--fp8-amax-compute-algo mean: possible values are most_recent, max",)),
        (
            "--fp8-format hybrid --first-last-layers-bf16 --num-layers-at-start-in-bf16 3",
            1,
            ("leaves none of the 4 layers", "their sum may be at most 3"),
        ),
        ("--fp8-format hybrid --hidden-size 72", 1, ("--hidden-size 72", "use 80", "--kv-channels 18", "channels 20")),
        (
            "--fp8-format hybrid --ffn-hidden-size 208 --tensor-model-parallel-size 2",
            2,
            ("--ffn-hidden-size 208 is 104 on each tensor-parallel rank", "use 224"),
        ),
        (
            "--fp8-format hybrid --kv-channels 12 --tensor-model-parallel-size 2",
            2,
            ("--kv-channels 12 makes 24 query channels and 72 query,", "use --kv-channels 16"),
        ),
        ("--fp8-format hybrid --seq-length 40", 1, ("makes 40 tokens per micro-batch", "use --seq-length 48")),
        (
            "--fp8-format hybrid --num-experts 4 --moe-ffn-hidden-size 32 --moe-latent-size 40",
            1,
            ("--moe-latent-size 40, but FP8 needs a multiple of 16; use 48",),
        ),
        (
            "--fp8-format hybrid --seq-length 48 --tensor-model-parallel-size 2 --num-experts 4 "
            "--moe-ffn-hidden-size 32 --moe-latent-size 48",
            2,
            ("makes 24 tokens per micro-batch", "use --seq-length 64"),
        ),
        (
            "--fp8-format hybrid --seq-length 48 --context-parallel-size 2",
            2,
            ("makes 24 tokens per micro-batch", "use --seq-length 64"),
        ),
        (
            "--fp8-format hybrid --seq-length 48 --tensor-model-parallel-size 2 --sequence-parallel",
            2,
            ("makes 24 tokens per micro-batch", "use --seq-length 64"),
        ),
    ],
)
def test_what_is_refused_says_what_would_do(flags: str, world_size: int, expected: tuple[str, ...]) -> None:
    problems = problems_of(flags, world_size)
    assert all(any(words in problem for problem in problems) for words in expected), problems
    assert all("\n" not in problem for problem in problems)


def test_a_padded_shape_is_accepted() -> None:
    assert resolve("--fp8-format hybrid --hidden-size 80 --kv-channels 20").config.model.fp8.fp8_format == "hybrid"


def test_float32_is_refused() -> None:
    words = [word for word in SHAPE.split() if word != "--bf16"]
    with pytest.raises(ConfigurationError, match="FP8 requires --bf16 or --fp16"):
        resolve_arguments([*MINIMAL, *words, "--fp8-format", "hybrid"], 1)


@pytest.mark.parametrize(
    ("flags", "note"),
    [
        ("--fp8-recipe rowwise --fp8-margin 2", "--fp8-margin 2 has no effect without --fp8-recipe delayed"),
        (
            "--num-layers-at-end-in-bf16 2",
            "--num-layers-at-end-in-bf16 2 has no effect without --first-last-layers-bf16",
        ),
        (
            "--use-distributed-optimizer --fp8-param-gather",
            "--fp8-param-gather has no effect with one data-parallel rank: nothing is gathered",
        ),
    ],
)
def test_what_has_no_effect_is_told(flags: str, note: str) -> None:
    assert note in resolve(f"--fp8-format hybrid {flags}").notes


def test_without_fp8_its_other_flags_are_told_to_have_no_effect() -> None:
    notes = resolve("--fp8-amax-history-len 8 --fp8-recipe rowwise --no-fp8-wgrad").notes
    assert [note for note in notes if note.endswith("has no effect without --fp8-format {hybrid,e4m3}")]


SIZES = "--hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 --micro-batch-size 1"
FP8 = [*MINIMAL, *SIZES.split(), "--bf16", "--fp8-format", "hybrid"]
GATHER = "--fp8-param-gather --use-distributed-optimizer --global-batch-size 2"


def test_gathered_fp8_weights_exclude_what_they_would_spoil() -> None:
    resolve_arguments([*FP8, *GATHER.split()], 2)
    flags = "--use-precision-aware-optimizer --main-params-dtype fp16"
    with pytest.raises(ConfigurationError) as caught:
        resolve_arguments([*FP8, *GATHER.split(), *flags.split()], 2)
    (problem,) = caught.value.problems
    assert problem.startswith("--main-params-dtype fp16 cannot be combined with --fp8-param-gather")


LATENT = "--multi-latent-attention --position-embedding-type rope --tensor-model-parallel-size 2"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--q-lora-rank 40", "--q-lora-rank 40, but --fp8-format hybrid needs a multiple of 16; use 48"),
        ("--kv-lora-rank 24", "--kv-lora-rank 24, but --fp8-format hybrid needs a multiple of 16; use 32"),
        ("--qk-pos-emb-head-dim 8", "--qk-pos-emb-head-dim 8, but --fp8-format hybrid needs a multiple of 16"),
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
    assert problem.startswith("--hidden-size 80 gives the projection of the MTP modules (--mtp-num-layers) 40 columns")
    assert problem.endswith("use 96")


def test_channels_that_latent_attention_has_not_are_not_asked_about() -> None:
    """Its heads have widths of their own: here 9 channels each are of no layer."""
    assert resolve_arguments([*FP8, *LATENT.split(), "--kv-channels", "9"], 2).config.model.mla.multi_latent_attention


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "rowwise", "blockwise", "mxfp8"])
def test_experts_and_latent_attention_are_in_fp8_with_every_recipe(recipe: str) -> None:
    flags = f"{LATENT} --num-experts 4 --moe-ffn-hidden-size 32 --fp8-recipe {recipe}"
    assert resolve_arguments([*FP8, *flags.split()], 2).config.model.fp8.float8_layers(2)


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
            "--tp-comm-overlap: FP8 GEMMs are not split into chunks",
        ),
        (
            "--tensor-model-parallel-size 2 --sequence-parallel --seq-length 64 --max-position-embeddings 64 "
            "--tp-comm-overlap --fp8-recipe rowwise",
            2,
            "--tp-comm-overlap: FP8 GEMMs of row-parallel layers are not split into chunks",
        ),
        ("--optimizer-cpu-offload --optimizer-offload-fraction 0", 1, "offloads nothing"),
    ],
)
def test_what_does_nothing_says_so(flags: str, world_size: int, words: str) -> None:
    parsed = resolve_arguments([*FP8, *flags.split()], world_size, needs_files=False)
    assert len([note for note in parsed.notes if words in note]) == 1
