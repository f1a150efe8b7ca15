"""Encode conversations: their tokens, and which of them belong to answers."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron.core.datasets.conversations.chat_template import END_OF_DOCUMENT, ChatTemplate, RenderedConversation
from megatron.core.datasets.conversations.conversation import Message, read_conversations
from megatron.core.errors import DataError
from megatron.core.tokenizers.tokenizer import Tokenizer
from megatron.core.tokenizers.tokenizer_record import PATH_ARGUMENTS


@dataclass(frozen=True)
class EncodedConversation:
    """Hold the tokens of a conversation, int64 ``[n]``, and 1 for each that an answer holds, uint8 ``[n]``."""

    tokens: NDArray[np.int64]
    loss_mask: NDArray[np.uint8]


class ConversationEncoder:
    """Turn lines of jsonl into tokens and loss masks, with a tokenizer and a chat template.

    The template alone says which special tokens there are: one that a tokenizer puts before every text is left out.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self._num_leading = len(tokenizer.tokenize(""))

    def encode_line(self, line: bytes) -> list[EncodedConversation]:
        """Encode the conversations of a line.

        Raises:
            DataError: the line cannot be read, or the template fails.
            TokenizerError: a text cannot be encoded.
        """
        return [self._encode(self.template.render(conversation)) for conversation in read_conversations(line)]

    def encode_prompt(self, messages: Sequence[Message]) -> list[int]:
        """Return the tokens that the assistant goes on from.

        Raises:
            DataError: the template fails.
            TokenizerError: a text cannot be encoded.
        """
        return next(self._tokenize([self.template.render_prompt(messages)]))

    def describe(self) -> dict[str, str]:
        """Return what the tokens of a line depend on, as digests of the tokenizer and of the template."""
        tokenizer = hashlib.blake2b(digest_size=16)
        for path in self.tokenizer.files:
            tokenizer.update(path.read_bytes())
        arguments = {key: value for key, value in self.tokenizer.arguments.items() if key not in PATH_ARGUMENTS}
        tokenizer.update(repr((self.tokenizer.name, self.tokenizer.vocab_size, arguments)).encode())
        template = repr((self.template.source, sorted(self.template.special_tokens.items()))).encode()
        return {
            "tokenizer": tokenizer.hexdigest(),
            "chat_template": hashlib.blake2b(template, digest_size=16).hexdigest(),
        }

    def _encode(self, rendered: RenderedConversation) -> EncodedConversation:
        """Encode the whole text; an answer's first token is the first that the text before it does not have alike."""
        offsets = [offset for answer in rendered.answers for offset in answer]
        ids, *beginnings = self._tokenize([rendered.text, *(rendered.text[:offset] for offset in offsets)])
        places = [_common_length(beginning, ids) for beginning in beginnings]
        loss_mask = np.zeros(len(ids), np.uint8)
        for begin, end in zip(places[::2], places[1::2]):
            loss_mask[begin:end] = 1
        loss_mask[:1] = 0  # nothing comes before it that it could be predicted from
        if not loss_mask.any():
            raise DataError(f"{self.template.name} leaves no token of an answer to learn")
        return EncodedConversation(np.array(ids, np.int64), loss_mask)

    def _tokenize(self, texts: Sequence[str]) -> Iterator[list[int]]:
        parts = [text.split(END_OF_DOCUMENT) for text in texts]
        encoded = iter(self.tokenizer.tokenize_batch([part for of_text in parts for part in of_text]))
        for of_text in parts:
            ids = next(encoded)[self._num_leading :]
            for _ in of_text[1:]:
                assert self.tokenizer.eod_id is not None, "only then is there a sign for it"
                ids += [self.tokenizer.eod_id, *next(encoded)[self._num_leading :]]
            yield ids


def _common_length(left: Sequence[int], right: Sequence[int]) -> int:
    if left == right[: len(left)]:
        return len(left)
    return next((i for i, (a, b) in enumerate(zip(left, right)) if a != b), min(len(left), len(right)))
