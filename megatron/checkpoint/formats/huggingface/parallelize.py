"""Make a Hugging Face model tensor-parallel for inference, on existing ranks or on newly started processes."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from megatron.checkpoint import load_model_from
from megatron.checkpoint.formats.huggingface.hub import HubModel, fetch_model, fetch_on_every_node, find_hub_model
from megatron.checkpoint.formats.huggingface.parallel_model import ParallelModel, is_parallel
from megatron.checkpoint.formats.huggingface.settings import (
    CONFIG_FILE,
    GENERATION_FILE,
    parse_settings,
    read_model_text,
)
from megatron.checkpoint.formats.huggingface.source import HuggingFaceSource, LoadedModel, LoadedModelSource
from megatron.checkpoint.formats.huggingface.worker_pool import WorkerPool, memory_of, memory_report
from megatron.core.console import print_line
from megatron.core.device import Device, num_cuda_devices, select_device
from megatron.core.errors import CheckpointError, ConfigurationError
from megatron.core.models.gpt import GPTConfig, GPTModel
from megatron.core.parallel_config import ParallelSizes
from megatron.core.parallel_state import ParallelState, create_parallel_state
from megatron.core.transformer import LINEAR_ATTENTION, MAMBA

_DEFAULT_LENGTH = 20
"""Default total length of a sequence in tokens, including the prompt, as in transformers."""


class SpawnedModel:
    """Model of a folder that is tensor-parallel over ``num_processes`` newly started processes.

    The processes end at `close`, when this object is garbage collected, and when the program ends.

    Raises:
        ConfigurationError: a process cannot load its shard.
        CheckpointError: the settings of the folder cannot be read, or its end tokens are invalid.
        MegatronError: a process failed.
    """

    def __init__(
        self,
        folder: str | Path,
        num_processes: int,
        params_dtype: str | None = None,
        master: tuple[str, int] | None = None,
    ) -> None:
        self._end_tokens = _end_tokens(Path(folder))
        self.pool = WorkerPool(folder, num_processes, params_dtype, master)

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
            MegatronError: a process failed.
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
            "kind": "generate",
            "prompts": [row[mask.bool()].tolist() for row, mask in zip(ids, kept, strict=True)],
            "max_new_tokens": max_new_tokens,
            "sampling": {**how, "no_repeat_ngram_size": no_repeat_ngram_size},
            "beams": beams if num_beams > 1 else None,
            "end_tokens": list(ends),
        }
        texts: list[list[int]] = self.pool.ask(request)[0].values["tokens"]
        longest = max(map(len, texts), default=0)
        padding = pad_token_id if pad_token_id is not None else ends[0] if ends else 0
        new = torch.tensor([[*text, *[padding] * (longest - len(text))] for text in texts], dtype=ids.dtype)
        return torch.cat([ids, new.view(len(texts), longest)], dim=1)

    def close(self) -> None:
        """End the processes; nothing can be generated afterwards."""
        self.pool.close()


def _end_tokens(folder: Path) -> tuple[int, ...]:
    """Return the end-of-sequence tokens in the settings of a model folder.

    Raises:
        CheckpointError: the settings cannot be read, or the tokens are invalid.
    """
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


def parallelize(
    model: str | Path | LoadedModel,
    state: ParallelState | None = None,
    *,
    num_gpus: int | None = None,
    fp16: bool = False,
    params_dtype: str | None = None,
    verbose: bool | str | None = None,
    master_addr: str = "127.0.0.1",
    master_port: int | None = None,
) -> Any:
    """Make a Hugging Face model tensor-parallel for inference.

    A model loaded with transformers in a program run with plain ``python`` is changed in place and returned. One
    process per GPU is started (``num_gpus``, by default all visible GPUs), and computes ``forward`` and thereby
    ``generate``. ``model.deparallelize()`` ends the processes and restores the model, as ``to``, ``cuda`` and ``cpu``
    do. ``verbose`` prints the memory of each process: "simple" or True in one line, "detail" with torch's summary. The
    processes meet in a file, or at ``master_addr`` and ``master_port`` if a port is given.

    ``model`` may also be a folder, or a model of the Hugging Face Hub (``org/name`` or ``org/name@revision``), which is
    downloaded unless it is in the Hub's cache. With ``num_gpus`` of 2 or more, the result is then a `SpawnedModel`,
    otherwise the native model in this process.

    Under torchrun, or with ``state``, each process loads its shard of either kind of model, and the result is the
    native model. torchrun's process group is initialized if necessary, and with ``state`` the model is sharded over its
    groups. ``model.tp`` is the tensor-parallel group, over which the logits are sharded. ``num_gpus`` is then the
    expected number of processes.

    ``fp16`` is short for ``params_dtype="float16"``. Without either the model keeps its own precision.

    Raises:
        CheckpointError: the folder is not a model folder, a file is damaged, or the Hub does not provide the model.
        ConfigurationError: the model is not supported, cannot be sharded over this number of processes, or is parallel
            already; the number differs from ``num_gpus``; or arguments contradict each other.
        MegatronError: a started process failed.
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
    if verbose not in (None, False, True, "simple", "detail"):
        raise ConfigurationError(f'verbose={verbose!r} is not "simple", "detail", True or None')
    dtype = "float16" if fp16 else params_dtype
    hub_model = find_hub_model(str(model)) if isinstance(model, str | Path) else None
    if state is None and not dist.is_initialized() and not dist.is_torchelastic_launched():
        master = None if master_port is None else (master_addr, master_port)
        if isinstance(model, LoadedModel):
            num_gpus = num_gpus or num_cuda_devices() or 1
        if num_gpus is not None and (num_gpus > 1 or isinstance(model, LoadedModel)):
            if hub_model is not None:
                model = fetch_model(hub_model, _say)
            parallel = _start_processes(model, num_gpus, dtype, master)
            if verbose:
                replies = parallel.pool.ask({"kind": "memory", "detailed": verbose == "detail"})
                print(memory_report([reply.values for reply in replies]), flush=True)
            return model if isinstance(parallel, ParallelModel) else parallel
    device = _occupy_device()
    if state is None:
        if not dist.is_initialized() and dist.is_torchelastic_launched():
            dist.init_process_group(device.default_backend, device_id=device.torch_device if device.is_cuda else None)
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        _check_world_size(num_gpus, world_size)
        state = create_parallel_state(ParallelSizes(tp=world_size))
    _check_world_size(num_gpus, state.world_size)
    if hub_model is not None:
        model = _fetch_on_every_node(hub_model)
    native = load_hugging_face_model(model, state, device, dtype)
    if verbose:
        print(memory_report([memory_of(device, state.rank, verbose == "detail")]), flush=True)
    return native


def _start_processes(
    model: str | Path | LoadedModel, num_gpus: int, params_dtype: str | None, master: tuple[str, int] | None
) -> ParallelModel | SpawnedModel:
    if isinstance(model, LoadedModel) and is_parallel(model):
        raise ConfigurationError("the model is parallel already; call model.deparallelize() first")
    if 0 < (num_devices := num_cuda_devices()) < num_gpus:
        raise ConfigurationError(
            f"num_gpus={num_gpus}, but this program sees {num_devices} CUDA devices; use at most {num_devices}, or set "
            "MEGATRON_DEVICE=cpu to run the processes on the CPU"
        )
    with contextlib.closing(_source_of(model)) as source:
        check_tensor_parallel_size(source.config, num_gpus)
    if isinstance(model, str | Path):
        return SpawnedModel(model, num_gpus, params_dtype, master)
    return ParallelModel(model, WorkerPool(model, num_gpus, params_dtype, master))


def _fetch_on_every_node(model: HubModel) -> Path:
    """Return the folder of a model from the Hub, which one rank of each node downloads."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return fetch_model(model, _say)
    # Every call has its own keys.
    default = dist.distributed_c10d._get_default_store()
    store = dist.PrefixStore(f"parallelize/{next(_calls)}", default)  # type: ignore[attr-defined]
    return fetch_on_every_node(
        model,
        lambda chosen: fetch_model(chosen, _say if dist.get_rank() == 0 else lambda line: None),
        store,
        rank=dist.get_rank(),
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        world_size=dist.get_world_size(),
    )


_calls = itertools.count()


def _say(line: str) -> None:
    print_line(line, sys.stderr)


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
    heads = config.num_attention_heads
    problems = []
    if heads % size:
        problems.append(f"{heads} attention heads are not divisible by tensor-parallel size {size}")
    problems += [
        f"{own.num_query_groups} key-value heads and tensor-parallel size {size}: one must be a multiple of the other"
        for own in config.attention_shapes
        if own.num_query_groups % size and size % own.num_query_groups
    ]
    if any(parts.mixer in LINEAR_ATTENTION for parts in config.layer_parts):
        keys = config.hybrid.linear_num_key_heads
        if keys % size:
            problems.append(f"{keys} key heads of linear attention are not divisible by tensor-parallel size {size}")
    if any(parts.mixer == MAMBA for parts in config.layer_parts):
        heads, of_heads = config.hybrid.mamba_heads(config.hidden_size), config.hybrid.mamba_num_groups
        states = of_heads * config.hybrid.mamba_state_dim
        if heads % size or (of_heads % size and (size % of_heads or states % size)):
            problems.append(
                f"{heads} Mamba-2 heads in {of_heads} groups with {states} state dimensions together cannot be sharded "
                f"over tensor-parallel size {size}"
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
