"""Adapter that lets lm-evaluation-harness request log-likelihoods and generated text from a model of this project."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from megatron.core.errors import InputError
from megatron.core.inference import SamplingConfig, Score, ScoredRow
from megatron.evaluation.model_ranks import ModelRanks, TextEncoding, TextQuestion

MAX_NEW_TOKENS = 256
"""Default number of generated tokens if a task sets none, the same as in the harness's own models."""
_TAKEN = {"until", "max_gen_toks", "do_sample", "temperature", "top_k", "top_p"}

ChatForm = Callable[[Sequence[dict[str, str]]], str]


class HarnessModel(TemplateLM):
    """Model interface of lm-evaluation-harness; only the first rank has an instance.

    ``max_length`` is the context length of the model: longer contexts are truncated on the left. ``form`` renders chat
    conversations, and is None if the model has no chat template.
    """

    def __init__(
        self, ranks: ModelRanks, encoding: TextEncoding, max_length: int, form: ChatForm | None = None, seed: int = 1234
    ) -> None:
        super().__init__()
        self._ranks = ranks
        self._encoding = encoding
        self._max_length = max_length
        self._form = form
        self._seed = seed

    @property
    def eot_token_id(self) -> int:
        return self._encoding.end_id

    @property
    def prefix_token_id(self) -> int:
        return self._encoding.first_id

    @property
    def tokenizer_name(self) -> str:
        """Return the tokenizer's kind, which the harness uses to distinguish requests with a chat template."""
        return self._encoding.tokenizer.name

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        return self._encoding.encode(string, with_leading=add_special_tokens is not False)

    def chat_template(self, chat_template: bool | str = False) -> str:
        """Return the name of the chat template, or an empty string if there is none."""
        return "" if self._form is None else "own"

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Render a conversation as the prompt of the model's next message.

        Raises:
            InputError: there is no template, or the harness asks to continue a partial message.
        """
        if self._form is None or not add_generation_prompt:
            what = "there is no chat template" if self._form is None else "continuing a partial answer is not supported"
            raise InputError(f"--apply-chat-template: {what}; omit it")
        return self._form(chat_history)

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each continuation and whether it is the greedy continuation of its context."""
        found: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=True)
        return found

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each text, computed over rolling windows of ``max_length`` tokens."""
        windows: list[tuple[int, ScoredRow]] = []
        for number, request in enumerate(requests):
            ids = self.tok_encode(request.args[0])
            for window in get_rolling_token_windows(ids, self.prefix_token_id, self._max_length, 1):
                context, scored = make_disjoint_window(window)
                windows.append((number, ScoredRow((*context, *scored), len(scored))))
        sums = [0.0] * len(requests)
        scores = self._ranks.score([row for _, row in windows])
        for (number, _), score in zip(windows, scores, strict=True):
            sums[number] += score.log_probability
        return sums

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Generate a continuation of each context, up to the first of the task's stop strings."""
        groups: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(repr(request.args[1]), []).append(number)
        texts = [""] * len(requests)
        for numbers in groups.values():
            question = self._question([requests[n].args[0] for n in numbers], requests[numbers[0]].args[1])
            for number, text in zip(numbers, self._ranks.continue_texts(question), strict=True):
                texts[number] = text
        return texts

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        rows = [self._row(context, scored) for _, context, scored in requests]
        # Tasks often repeat the same row, such as answer choices of one letter.
        different = list(dict.fromkeys(rows))
        scores: dict[ScoredRow, Score] = dict(zip(different, self._ranks.score(different), strict=True))
        return [(scores[row].log_probability, scores[row].is_greedy) for row in rows]

    def _row(self, context: list[int], scored: list[int]) -> ScoredRow:
        if not scored or not context:
            raise InputError(
                f"a task scores {len(scored)} tokens after a context of {len(context)} tokens; both need at least one "
                "token"
            )
        if len(scored) > self._max_length:
            raise InputError(
                f"a task scores {len(scored)} tokens at once, but the model's context has {self._max_length} tokens; "
                "raise --max-length"
            )
        return ScoredRow(tuple([*context, *scored][-(self._max_length + 1) :]), len(scored))

    def _question(self, contexts: list[str], options: Mapping[str, Any]) -> TextQuestion:
        given = dict(normalize_gen_kwargs(dict(options), MAX_NEW_TOKENS))
        if unknown := sorted(given.keys() - _TAKEN):
            raise InputError(
                f"a task's generation_kwargs contain {', '.join(unknown)}; supported are {', '.join(sorted(_TAKEN))}"
            )
        count = int(given["max_gen_toks"])
        room = self._max_length - count
        if room < 1:
            raise InputError(
                f"a task generates {count} tokens (max_gen_toks), but the model's context has {self._max_length} "
                "tokens; lower the task's max_gen_toks"
            )
        until = [text for text in given["until"] if text]
        end = self._encoding.tokenizer.detokenize([self.eot_token_id])
        return TextQuestion(
            prompts=tuple(tuple((self.tok_encode(text) or [self.prefix_token_id])[-room:]) for text in contexts),
            max_new_tokens=count,
            until=tuple(dict.fromkeys([*until, *([end] if end.strip() else [])])),
            sampling=self._sampling(given),
        )

    def _sampling(self, given: Mapping[str, Any]) -> SamplingConfig:
        temperature = float(given.get("temperature") or 0.0)
        if not given["do_sample"] or temperature == 0.0:
            return SamplingConfig(greedy=True)
        return SamplingConfig(
            temperature=temperature,
            top_k=int(given.get("top_k") or 0),
            top_p=float(given.get("top_p") or 0.0),
            seed=self._seed,
        )
