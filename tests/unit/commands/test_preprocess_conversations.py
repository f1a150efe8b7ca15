"""tools/preprocess_data.py --sft: conversations become token files with loss masks."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.core.datasets.conversation_file import ConversationFile, mask_prefix
from megatron.core.datasets.indexed_dataset import verify_checksums
from tests.unit.commands.test_preprocess_data import NULL, assert_refused, preprocess, write_lines

PLAIN = [*NULL, "--sft", "--chat-template", "plain", "--workers", "2"]
SUM = {"prompt": "1 2 ", "completion": "3"}


def test_tokens_and_masks_are_written(tmp_path: Path) -> None:
    turns = [{"role": role, "content": text} for role, text in (("user", "5 "), ("assistant", "6"), ("user", " 7 "))]
    lines = [SUM, {"text": "1"}, {"messages": [*turns, {"role": "assistant", "content": "8 9"}]}]
    file = write_lines(tmp_path / "talk.jsonl", *lines)
    done = preprocess(file, tmp_path / "out", *PLAIN, "--on-error", "skip")
    assert done.returncode == 0, done.stderr
    assert "2 documents, 11 tokens, 1 lines skipped" in done.stdout
    data = ConversationFile(tmp_path / "out_sft_document")
    assert [data[i].tolist() for i in range(2)] == [[1, 2, 3, 127], [5, 6, 127, 7, 8, 9, 127]]
    assert [data.get_mask(i).tolist() for i in range(2)] == [[0, 0, 1, 1], [0, 1, 1, 0, 1, 1, 1]]
    for prefix in (data.prefix, mask_prefix(data.prefix)):
        assert list(verify_checksums(prefix)) == []


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ([], "talk.jsonl:2: no message of the assistant (roles: user): nothing to learn; correct the line"),
        (["--append-eod"], "--append-eod does not go with --sft, whose chat template makes the text; leave it out"),
        (["--json-keys", "messages"], "--json-keys does not go with --sft"),
        (
            ["--chat-template", "llama"],
            "--chat-template llama is no file and no template that is known; known are chatml",
        ),
        (["--input-format", "text"], "talk.jsonl is text, and --sft reads jsonl; write a conversation a line"),
    ],
)
def test_what_cannot_be_read_is_refused(tmp_path: Path, flags: list[str], problem: str) -> None:
    file = write_lines(tmp_path / "talk.jsonl", SUM, {"messages": [{"role": "user", "content": "1"}]})
    assert_refused(preprocess(file, tmp_path / "out", *PLAIN, *flags), problem)
