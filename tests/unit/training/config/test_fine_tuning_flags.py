"""What --sft, Pai-Megatron-Patch's and Megatron's names for it, and --fim-rate come to; wrong ones are refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatron.config.arguments import ParsedArguments, resolve_arguments
from megatron.core.datasets.gpt_dataset_config import GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.core.errors import ConfigurationError
from megatron.core.tokenizers.tokenizer import NullTokenizer
from megatron.training.data_plan import dataset_config
from tests.unit.training.config.command_lines import MINIMAL

SHAPE = [word for word in MINIMAL if word != "--mock-data"]
PACKED = (
    "--sft packs conversations: --reset-position-ids and --reset-attention-mask are on; --no-sft-packing makes each "
    "a sample"
)
PER_TOKEN = "--sft: each token of an answer counts alike, as with --calculate-per-token-loss"


@pytest.fixture
def talk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand in a folder with talk.jsonl, the packed conversations ``packed`` and the text ``text``."""
    monkeypatch.chdir(tmp_path)
    Path("talk.jsonl").write_text('{"prompt": "1 ", "completion": "2"}\n')
    for prefix in ("packed", "packed_loss_mask", "text"):
        with IndexedDatasetBuilder(prefix, np.uint8 if "mask" in prefix else np.uint16) as builder:
            builder.add_document([1, 1, 1])
            builder.finalize()


def parse(flags: str) -> ParsedArguments:
    return resolve_arguments([*SHAPE, *flags.split()], 1)


def data_of(parsed: ParsedArguments) -> GPTDatasetConfig:
    return dataset_config(parsed.config, NullTokenizer(99))


@pytest.mark.usefixtures("talk")
def test_conversations_are_packed_and_each_token_counts_alike() -> None:
    for flags in ("--sft", "--train-mode finetune", "--train-mode finetune --dataset LLama-SFT-Idxmap"):
        parsed = parse(f"{flags} --train-data-path packed")
        assert parsed.notes == (PACKED, PER_TOKEN)
        data = data_of(parsed)
        assert data.conversations is not None
        assert (data.conversations.packs, data.conversations.longest) == (True, None)
        assert (data.reset_position_ids, data.reset_attention_mask) == (True, True)
        assert parsed.config.training.calculate_per_token_loss
    assert data_of(parse("--train-data-path text --train-mode pretrain --dataset MMAP")).conversations is None
    averaged = parse("--sft --train-data-path packed --ddp-average-in-collective")
    assert averaged.notes[2:] == (
        "--ddp-average-in-collective has no effect with --sft: sums are divided by a number of tokens",
    )
    assert not averaged.config.ddp.ddp_average_in_collective
    graphs = parse("--sft --no-sft-packing --train-data-path packed --cuda-graph-impl local --attention-dropout 0")
    assert graphs.config.training.cuda_graph_impl == "local"


@pytest.mark.usefixtures("talk")
def test_one_conversation_a_sample() -> None:
    raw = "--train-data-path talk.jsonl --calculate-per-token-loss --train-mode finetune --dataset JSON-SFT"
    for flags in (f"{raw} --max-padding-length 3", "--sft --no-sft-packing --train-data-path talk.jsonl"):
        data = data_of(parse(flags))
        assert data.conversations is not None
        assert not data.conversations.packs
        assert (data.reset_position_ids, data.reset_attention_mask) == (False, False)
    assert parse(raw).notes == ("--dataset JSON-SFT: each conversation is a sample; --reset-position-ids packs them",)
    assert parse(f"{raw} --reset-position-ids").notes == (PACKED,)
    assert parse(f"{raw} --max-padding-length 999").notes[1:] == (
        "--max-padding-length 999 has no effect: --seq-length 40 cuts conversations before",
    )
    shorter = data_of(parse(f"{raw} --max-padding-length 3")).conversations
    assert shorter is not None
    assert shorter.longest == 3


@pytest.mark.usefixtures("talk")
def test_which_template() -> None:
    template = {
        "": None,
        "--chat-template plain": "plain",
        "--sft-tokenizer-prompt-format identity": "identity",
        "--sft-tokenizer-prompt-format default": None,
    }
    for flags, chosen in template.items():
        data = data_of(parse(f"--sft --train-data-path talk.jsonl {flags}"))
        assert data.conversations is not None
        assert data.conversations.chat_template == chosen
    assert parse("--train-data-path text --chat-template plain --max-padding-length 8").notes == (
        "--chat-template plain has no effect without --sft",
        "--max-padding-length 8 has no effect without --sft",
    )


@pytest.mark.usefixtures("talk")
@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("--sft --train-data-path text", "--train-data-path text: text has no loss masks"),
        ("--sft --mock-data", "--sft needs conversations, and --mock-data has none; give --data-path in its place"),
        ("--fim-rate 0.1 --mock-data", "--fim-rate needs text, and --mock-data has none; give --data-path"),
        ("--sft --fim-rate 0.1 --data-path packed --split 1", "--sft and --fim-rate exclude each other; keep one"),
        ("--fim-rate 1.5 --data-path text --split 1", "--fim-rate 1.5: a value from 0 to 1 is expected"),
        (
            "--sft --dataset LLama-SFT-Raw --train-data-path packed",
            "--train-data-path packed is no file, which --dataset LLama-SFT-Raw does not mean; give MMAP or",
        ),
        (
            "--sft --dataset MMAP --train-data-path talk.jsonl",
            "--train-data-path talk.jsonl is a file, which --dataset MMAP does not mean; give LLama-SFT-Raw or",
        ),
        (
            "--sft --train-data-path packed --cuda-graph-impl local --attention-dropout 0",
            "--cuda-graph-impl local: --sft packs other conversations in each micro-batch; leave one out",
        ),
        (
            "--sft --ddp-average-in-collective --calculate-per-token-loss --train-data-path packed",
            "--ddp-average-in-collective and --calculate-per-token-loss exclude each other; keep one",
        ),
        (
            "--sft --train-data-path packed --sft-tokenizer-prompt-format nemotron-nano-v2",
            "--sft-tokenizer-prompt-format nemotron-nano-v2 is not supported yet; possible: default, identity",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(flags: str, problem: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse(flags)
    (found,) = caught.value.problems
    assert found.startswith(problem)


@pytest.mark.usefixtures("talk")
def test_the_tokens_of_fill_in_the_middle_are_looked_up() -> None:
    tokens = "--fim-prefix-token 5 --fim-middle-token 6 --fim-suffix-token 7 --fim-pad-token 8 --fim-split-sample 9"
    data = data_of(parse(f"--train-data-path text --fim-data {tokens} --fim-fragment-rate 0.2 --fim-no-prefix 1"))
    fim = data.fill_in_the_middle
    assert fim is not None
    assert (fim.rate, fim.spm_rate, fim.fragment_rate, fim.kept_beginning) == (0.5, 0.5, 0.2, "1")
    ids = (fim.prefix_id, fim.middle_id, fim.suffix_id, fim.pad_id, fim.split_id, fim.document_end_id)
    assert ids == (5, 6, 7, 8, 9, 99)
    parsed = parse("--train-data-path text --fim-rate 0.1 --fim-eod-token 3 --fim-middle-token 6")
    with pytest.raises(ConfigurationError) as caught:
        data_of(parsed)
    assert [problem.split(":")[0] for problem in caught.value.problems] == [
        "--fim-prefix-token <fim_prefix>",
        "--fim-suffix-token <fim_suffix>",
    ]
