"""Logits of whole token rows; the KV cache of the previous call is reused for rows that only became longer."""

from __future__ import annotations

import torch

from megatron.core.collectives import all_gather_last_dim
from megatron.core.errors import InputError
from megatron.core.models.gpt import GPTModel
from megatron.core.ops import CAUSAL, AttentionPattern
from megatron.core.transformer import KeyValueCache

_FIRST_ROOM = 64


class CachedForward:
    """Forward pass of a tensor-parallel model as a function of whole rows of tokens.

    With ``keeps_cache`` a call stores the keys and values of its rows. If each row of the next such call begins with a
    stored row, only the new columns are computed. Rows may then repeat, vanish or change places, as in beam search. All
    ranks must make the same calls.
    """

    def __init__(self, model: GPTModel) -> None:
        self.model = model
        self._cache: KeyValueCache | None = None
        self._stored = torch.empty(0, 0, 3, dtype=torch.long)

    @torch.inference_mode()
    def logits(
        self,
        tokens: torch.Tensor,
        attention_mask: torch.Tensor,
        position_ids: torch.Tensor,
        *,
        num_last: int = 0,
        keeps_cache: bool = False,
    ) -> torch.Tensor:
        """Return the logits of the last ``num_last`` columns (0: of all columns), on every rank.

        ``attention_mask`` is 0 at padding, which no other position attends to. The attention output of padding that
        could attend to nothing is 0, as in the fused kernels that transformers uses.

        Shapes: CPU tensors ``[b, s]`` of int64 ``-> [b, num_last or s, v]``, on the model's device.

        Raises:
            InputError: a token is outside the vocabulary, or a position beyond the learned ones, or a hybrid model has
                padding after tokens.
        """
        self._check(tokens, position_ids)
        if self.model.config.hybrid.is_hybrid and bool((attention_mask.diff(dim=1) < 0).any()):
            raise InputError("a model with recurrent layers supports padding on the left only; pad the rows there")
        rows = torch.stack([tokens, attention_mask, position_ids], dim=-1)
        start = self._resume(rows) if keeps_cache else 0
        length = tokens.shape[1]
        if num_last > length - start or num_last == 0:
            start = self._restart(rows) if keeps_cache else 0
        device = next(self.model.parameters()).device
        output = self.model(
            tokens[:, start:].to(device),
            position_ids[:, start:].to(device),
            pattern=_pattern(attention_mask.to(device), start),
            cache=self._cache if keeps_cache else None,
            last_position_only=num_last == 1,
            sequence_lengths=int(position_ids.max()) + 1,
        )
        self._stored = rows if keeps_cache else self._stored
        whole: torch.Tensor = all_gather_last_dim(output[-num_last:], self.model.tp)
        return whole[..., : self.model.config.vocab_size].transpose(0, 1)

    def _check(self, tokens: torch.Tensor, position_ids: torch.Tensor) -> None:
        config = self.model.config
        for token in (int(tokens.min()), int(tokens.max())):
            if not 0 <= token < config.vocab_size:
                raise InputError(f"token {token} is outside the vocabulary; the model knows 0..{config.vocab_size - 1}")
        last = int(position_ids.max())
        if config.position_embedding_type == "learned_absolute" and last >= config.max_position_embeddings:
            raise InputError(
                f"position {last} is beyond the model's {config.max_position_embeddings} learned positions; shorten "
                "the text"
            )

    def _resume(self, rows: torch.Tensor) -> int:
        """Arrange the cache for the rows ``[b, s, 3]``, and return the number of columns that it holds."""
        length, known = rows.shape[1], self._stored.shape[1]
        if self._cache is None or not 0 < known < length or self._is_long(rows) != self._is_long(self._stored):
            return self._restart(rows)
        equal = (rows[:, None, :known] == self._stored[None]).flatten(2).all(dim=-1)
        if not bool(equal.any(dim=1).all()):
            return self._restart(rows)
        if length > self._cache.max_length:
            self._cache.extend(2 * length)
        chosen = equal.int().argmax(dim=1)
        if not torch.equal(chosen, torch.arange(len(self._stored))):
            self._cache.select_rows(chosen.to(next(self.model.parameters()).device))
        return known

    def _is_long(self, rows: torch.Tensor) -> bool:
        """Return whether LongRoPE rotates the rows with its long factors, as in transformers all of them or none."""
        limit = self.model.config.longrope_length
        return limit is not None and int(rows[..., 2].max()) >= limit

    def _restart(self, rows: torch.Tensor) -> int:
        self._cache = KeyValueCache(rows.shape[1] + _FIRST_ROOM)
        return 0


def _pattern(attention_mask: torch.Tensor, start: int) -> AttentionPattern:
    """Return the attention pattern of the query columns from ``start`` on over all columns."""
    if bool(attention_mask.all()):
        return CAUSAL
    keys = torch.arange(attention_mask.shape[1], device=attention_mask.device)
    queries = keys[start:, None]
    visible = (keys <= queries) & attention_mask[:, None].bool()
    blind = ~visible.any(dim=-1)
    visible |= (keys == queries) & blind[..., None]
    return AttentionPattern(mask=visible.unsqueeze(1), blind=blind)
