"""Make a Hugging Face model tensor-parallel for inference, on existing ranks or on newly started processes."""

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
from typing import IO, Any, Literal, overload

import torch
import torch.distributed as dist

from megatron.checkpoint import load_model_from
from megatron.checkpoint.formats.huggingface.model_export import write_hugging_face
from megatron.checkpoint.formats.huggingface.settings import (
    CONFIG_FILE,
    GENERATION_FILE,
    parse_settings,
    read_model_text,
)
from megatron.checkpoint.formats.huggingface.source import HuggingFaceSource, LoadedModel, LoadedModelSource
from megatron.core.device import Device, select_device
from megatron.core.errors import CheckpointError, ConfigurationError, MegatronError
from megatron.core.model_parallel_config import ParallelSizes
from megatron.core.models.gpt import GPTConfig, GPTModel
from megatron.core.parallel_state import ParallelState, create_parallel_state

_PROJECT = Path(__file__).resolve().parents[4]
_RANK = f"{__package__}.tp_worker"
_LOOK_EVERY_S = 0.5
_TIME_TO_END_S = 10.0
_DEFAULT_LENGTH = 20
"""Default total length of a sequence in tokens, including the prompt, as in transformers."""


class SpawnedModel:
    """Model that is tensor-parallel over ``num_processes`` newly started processes.

    ``model`` is a folder or a loaded model, whose weights are written to a temporary folder until all processes have
    read them. The processes end at `close`, or when this object is garbage collected.

    Raises:
        ConfigurationError: a process cannot load its shard.
        CheckpointError: the settings of the folder cannot be read, or its end tokens are invalid.
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
        """Return the prompts and their continuations, like ``generate`` of transformers with these arguments.

        Shapes: ``input_ids`` and ``attention_mask`` are ``[b, s]``, the result ``[b, s + new]``. Shorter sequences are
        padded with ``pad_token_id``, by default the first end token. A sequence includes the end token that ended it.

        Raises:
            ConfigurationError: the arguments are invalid, or a prompt has tokens outside the vocabulary.
            MegatronError: a process has died.
        """
        if do_sample and num_beams > 1:
            raise ConfigurationError("do_sample=True and num_beams exclude each other; omit one of them")
        ids = torch.as_tensor(input_ids).cpu()
        kept = torch.ones_like(ids) if attention_mask is None else torch.as_tensor(attention_mask).cpu()
        if ids.dim() != 2 or kept.shape != ids.shape:
            raise ConfigurationError(
                f"input_ids has shape {list(ids.shape)} and attention_mask has shape {list(kept.shape)}; both must be "
                "[b, s]"
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
            with contextlib.suppress(BrokenPipeError):  # the end of a process is detected while waiting for replies
                _pipe(rank.stdin).write(line)
                _pipe(rank.stdin).flush()
        tokens: list[list[int]] = self._answer()["tokens"]
        return tokens

    def _answer(self) -> dict[str, Any]:
        """Wait for a reply from any rank, or for the death of a process."""
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
                        rank.kill()  # they would wait for the dead process
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
    """Close the processes' standard input, and kill those that do not end in time."""
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
    """Return the end-of-sequence tokens in the model's settings.

    Raises:
        CheckpointError: the folder's settings cannot be read, or the tokens are invalid.
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
                    f"{folder / name}: eos_token_id is {value!r:.40}; a token id or a list of token ids is expected"
                )
            return tuple(listed)
    return ()


def _as_tokens(value: int | Sequence[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


@overload
def parallelize(
    model: str | Path | LoadedModel,
    state: ParallelState | None = None,
    *,
    num_gpus: None = None,
    fp16: bool = False,
    params_dtype: str | None = None,
) -> GPTModel: ...


@overload
def parallelize(
    model: str | Path | LoadedModel,
    state: ParallelState | None = None,
    *,
    num_gpus: int | None = None,
    fp16: bool = False,
    params_dtype: str | None = None,
) -> GPTModel | SpawnedModel: ...


def parallelize(
    model: str | Path | LoadedModel,
    state: ParallelState | None = None,
    *,
    num_gpus: int | None = None,
    fp16: bool = False,
    params_dtype: str | None = None,
) -> GPTModel | SpawnedModel:
    """Load a Hugging Face model as a native model, tensor-parallel over all processes, for inference.

    ``model`` is its folder, or a model loaded with transformers; each process copies its shard and leaves the model
    unchanged. Under torchrun the process group is initialized first, if necessary. Without torchrun the model is not
    sharded. With ``state`` the model is sharded over its groups. ``model.tp`` is the tensor-parallel group, over which
    the logits are sharded. ``fp16`` is short for ``params_dtype="float16"``. Without either the model keeps its own
    precision.

    If a program run with plain ``python`` passes ``num_gpus`` of 2 or more, one process per GPU is started, and the
    result is a `SpawnedModel` with ``generate``. If there are processes already, ``num_gpus`` is their expected number.

    Raises:
        CheckpointError: the folder is not a model folder, or a file is damaged.
        ConfigurationError: the model is not supported, or cannot be sharded over this number of processes; the number
            differs from ``num_gpus``; or ``fp16`` is combined with another ``params_dtype``.
    """
    if fp16 and params_dtype not in (None, "float16"):
        raise ConfigurationError(f'fp16=True and params_dtype="{params_dtype}" contradict each other; omit one of them')
    if not isinstance(model, str | Path | LoadedModel):
        raise ConfigurationError(
            f"a {type(model).__name__} is neither the path of a model folder nor a transformers model; pass one of "
            "these"
        )
    if num_gpus is not None and num_gpus < 1:
        raise ConfigurationError(f"num_gpus={num_gpus} is not positive; use 1 or more, or omit it")
    is_alone = state is None and not dist.is_initialized() and not dist.is_torchelastic_launched()
    if is_alone and num_gpus is not None and num_gpus > 1:
        with contextlib.closing(_source_of(model)) as source:
            check_tensor_parallel_size(source.config, num_gpus)
        return SpawnedModel(model, num_gpus, "float16" if fp16 else params_dtype)
    device = _occupy_device()
    if state is None:
        if not dist.is_initialized() and dist.is_torchelastic_launched():
            dist.init_process_group(device.default_backend, device_id=device.torch_device if device.is_cuda else None)
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        _check_world_size(num_gpus, world_size)
        state = create_parallel_state(ParallelSizes(tp=world_size))
    _check_world_size(num_gpus, state.world_size)
    return load_hugging_face_model(model, state, device, "float16" if fp16 else params_dtype)


def _check_world_size(num_gpus: int | None, world_size: int) -> None:
    if num_gpus not in (None, world_size):
        raise ConfigurationError(
            f"num_gpus={num_gpus}, but the number of processes is {world_size}; start one process per GPU: torchrun "
            f"--nproc-per-node {num_gpus} SCRIPT, or omit num_gpus"
        )


def _occupy_device() -> Device:
    device = select_device(int(os.environ.get("LOCAL_RANK", "0")))
    device.make_current()
    return device


def load_hugging_face_model(
    model: str | Path | LoadedModel, state: ParallelState, device: Device, params_dtype: str | None = None
) -> GPTModel:
    """Load this rank's shard of a Hugging Face model, in its own precision or in ``params_dtype``.

    ``model`` is its folder or a loaded model. There is no communication; each rank reads only the values that it holds.

    Raises:
        CheckpointError: the folder is not a model folder, or a file is damaged.
        ConfigurationError: the model is not supported, or cannot be sharded over this number of processes.
    """
    with contextlib.closing(_source_of(model)) as source:
        check_tensor_parallel_size(source.config, state.tp.size)
        return load_model_from(source, state, device, params_dtype)


def _source_of(model: str | Path | LoadedModel) -> HuggingFaceSource | LoadedModelSource:
    return HuggingFaceSource(model) if isinstance(model, str | Path) else LoadedModelSource(model)


def check_tensor_parallel_size(config: GPTConfig, size: int) -> None:
    """Reject a model whose layers cannot be sharded over ``size`` processes.

    Raises:
        ConfigurationError: heads or feed-forward layers are not divisible; the message lists every reason.
    """
    heads, groups = config.num_attention_heads, config.num_query_groups
    problems = []
    if heads % size:
        problems.append(f"{heads} attention heads are not divisible by tensor-parallel size {size}")
    if groups % size and size % groups:
        problems.append(
            f"{groups} key-value heads and tensor-parallel size {size}: one must be a multiple of the other"
        )
    widths = {"a feed-forward layer": config.ffn_hidden_size if not all(config.moe_layers) else 0}
    if config.moe.num_experts is not None:
        widths |= {"an expert": config.moe.moe_ffn_hidden_size}
        widths |= {"the shared expert": config.moe.moe_shared_expert_intermediate_size or 0}
    for name, width in widths.items():
        if width % size:
            problems.append(f"{name} of size {width} is not divisible by tensor-parallel size {size}")
    if problems:
        raise ConfigurationError(f"{'; '.join(problems)}; change the number of processes")
