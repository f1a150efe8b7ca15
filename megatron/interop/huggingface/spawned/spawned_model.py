"""A Hugging Face model over processes of its own, for a program that was started as one."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any, Literal

import torch

from megatron.core.errors import CheckpointError, ConfigurationError, MegatronError
from megatron.interop.huggingface.loaded_model import LoadedModel, LoadedModelSource
from megatron.interop.huggingface.model_export import write_hugging_face
from megatron.interop.huggingface.settings import CONFIG_FILE, GENERATION_FILE, parse_settings, read_model_text

_PROJECT = Path(__file__).resolve().parents[4]
_RANK = f"{__package__}.rank"
_LOOK_EVERY_S = 0.5
_TIME_TO_END_S = 10.0
_DEFAULT_LENGTH = 20
"""Tokens of a text with its prompt, where neither is said: what transformers takes."""


class SpawnedModel:
    """Generate with a model that is tensor-parallel over ``num_processes`` processes, which this one starts.

    ``model`` is a folder, or a loaded model, whose weights are written to a temporary folder until all have read them.
    The processes end with `close`, or with this object.

    Raises:
        ConfigurationError: a process cannot load its part.
        CheckpointError: the settings of the folder cannot be read, or their end tokens are none.
        MegatronError: a process has died.
    """

    def __init__(self, model: str | Path | LoadedModel, num_processes: int, params_dtype: str | None = None) -> None:
        with ExitStack() as stack:
            place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="parallelize-")))
            folder = place / "model"
            if isinstance(model, str | Path):
                folder = Path(model)
            else:
                write_hugging_face(LoadedModelSource(model), folder)
            self._end_tokens = _end_tokens(model)
            self._ranks = [
                _start(rank, [str(folder), str(place / "meeting"), str(rank), str(num_processes), params_dtype or ""])
                for rank in range(num_processes)
            ]
            stack.callback(_end, self._ranks)
            self._unread = b""
            self._answer()
            shutil.rmtree(place / "model", ignore_errors=True)
            self._finalizer = weakref.finalize(self, stack.pop_all().close)

    def generate(
        self,
        input_ids: torch.Tensor | Sequence[Sequence[int]],
        attention_mask: torch.Tensor | Sequence[Sequence[int]] | None = None,
        *,
        max_new_tokens: int | None = None,
        max_length: int | None = None,
        do_sample: bool = False,
        temperature: float = 1.0,
        top_k: int = 50,
        top_p: float = 1.0,
        num_beams: int = 1,
        early_stopping: bool | Literal["never"] = False,
        length_penalty: float = 1.0,
        no_repeat_ngram_size: int = 0,
        eos_token_id: int | Sequence[int] | None = None,
        pad_token_id: int | None = None,
    ) -> torch.Tensor:
        """Return the prompts and what follows each, as ``generate`` of transformers does with these arguments.

        Shapes: ``input_ids`` and ``attention_mask`` are ``[b, s]``, the result ``[b, s + new]``. Texts that end before
        the longest are filled up with ``pad_token_id``, by default the first of the end tokens. The end token that a
        text ended with is a part of it.

        Raises:
            ConfigurationError: the arguments cannot be, or a prompt is not the model's.
            MegatronError: a process has died.
        """
        if do_sample and num_beams > 1:
            raise ConfigurationError("do_sample=True and num_beams are two ways to choose tokens; leave one out")
        ids = torch.as_tensor(input_ids).cpu()
        kept = torch.ones_like(ids) if attention_mask is None else torch.as_tensor(attention_mask).cpu()
        if ids.dim() != 2 or kept.shape != ids.shape:
            raise ConfigurationError(
                f"input_ids of shape {list(ids.shape)} and attention_mask of {list(kept.shape)}; both must be [b, s]"
            )
        if max_new_tokens is None:
            max_new_tokens = (_DEFAULT_LENGTH if max_length is None else max_length) - ids.shape[1]
        ends = self._end_tokens if eos_token_id is None else _as_tokens(eos_token_id)
        drawn = {"temperature": temperature, "top_k": top_k, "top_p": 0.0 if top_p == 1.0 else top_p}
        beams = {"num_beams": num_beams, "length_penalty": length_penalty, "early_stopping": early_stopping}
        how = {**drawn, "seed": int(torch.randint(2**31, ()))} if do_sample else {"greedy": num_beams == 1}
        request = {
            "prompts": [row[mask.bool()].tolist() for row, mask in zip(ids, kept, strict=True)],
            "max_new_tokens": max_new_tokens,
            "sampling": {**how, "no_repeat_ngram_size": no_repeat_ngram_size},
            "beams": beams if num_beams > 1 else None,
            "end_tokens": list(ends),
        }
        texts = self._ask(request)
        longest = max(map(len, texts), default=0)
        padding = pad_token_id if pad_token_id is not None else ends[0] if ends else 0
        new = torch.tensor([[*text, *[padding] * (longest - len(text))] for text in texts], dtype=ids.dtype)
        return torch.cat([ids, new.view(len(texts), longest)], dim=1)

    def close(self) -> None:
        """End the processes; nothing can be generated afterwards."""
        self._finalizer()

    def _ask(self, request: Mapping[str, Any]) -> list[list[int]]:
        if not self._finalizer.alive:
            raise ConfigurationError("the model's processes have ended; call parallelize again")
        line = json.dumps(request).encode() + b"\n"
        for rank in self._ranks:
            with contextlib.suppress(BrokenPipeError):  # its end is found where answers are waited for
                _pipe(rank.stdin).write(line)
                _pipe(rank.stdin).flush()
        tokens: list[list[int]] = self._answer()["tokens"]
        return tokens

    def _answer(self) -> dict[str, Any]:
        """Wait for a line of any rank that says how it went, or for the death of one."""
        outputs = {_pipe(rank.stdout).fileno(): number for number, rank in enumerate(self._ranks)}
        while b"\n" not in self._unread:
            ready, _, _ = select.select(list(outputs), [], [], _LOOK_EVERY_S)
            for output in ready:
                read = os.read(output, 1 << 16)
                self._unread += read
                if not read:
                    number = outputs[output]
                    status = self._ranks[number].wait()
                    for rank in self._ranks:
                        rank.kill()  # they would wait for it
                    raise MegatronError(f"process {number} of {len(self._ranks)} ended with status {status}; see above")
        line, _, self._unread = self._unread.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise ConfigurationError(answer["error"])
        return answer


def _start(rank: int, words: Sequence[str]) -> subprocess.Popen[bytes]:
    program = (
        f"import sys; sys.path.insert(0, {str(_PROJECT)!r}); from {_RANK} import main; sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", program, *words]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def _end(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    """Let processes end as their input does, and end those that have not by then."""
    for rank in ranks:
        with contextlib.suppress(BrokenPipeError):
            _pipe(rank.stdin).close()
    for rank in ranks:
        try:
            rank.wait(_TIME_TO_END_S)
        except subprocess.TimeoutExpired:
            rank.kill()
            rank.wait()
        _pipe(rank.stdout).close()


def _pipe(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None
    return stream


def _end_tokens(model: str | Path | LoadedModel) -> tuple[int, ...]:
    """Return the tokens that end a text, as the model's own settings have them.

    Raises:
        CheckpointError: the folder's settings cannot be read, or have something else there.
    """
    if not isinstance(model, str | Path):
        return _as_tokens(json.loads(model.config.to_json_string()).get("eos_token_id"))
    folder = Path(model)
    for name in (GENERATION_FILE, CONFIG_FILE):
        if not (folder / name).exists():
            continue
        settings = parse_settings(read_model_text(folder, name), str(folder / name))
        value = settings.values.get("eos_token_id")
        if value is not None:
            listed = value if isinstance(value, list) else [value]
            if not all(type(token) is int for token in listed):
                raise CheckpointError(
                    f"{folder / name}: eos_token_id is {value!r:.40}; a token's number or a list of such is expected"
                )
            return tuple(listed)
    return ()


def _as_tokens(value: int | Sequence[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)
