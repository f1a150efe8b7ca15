"""What a command launches: the program, on how many ranks, with which words."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Sequence

from megatron.adoption.shell.state import has_unknown

_PYTHON = re.compile(r"python[\d.]*")
_TORCHRUN_MODULES = ("torch.distributed.launch", "torch.distributed.run")
_SWITCHES = frozenset(
    ("--standalone", "--no_python", "--no-python", "--run_path", "--run-path", "--use_env", "--use-env")
).union(("--no_local_rank", "--autotuning", "--no_ssh", "--force_multi", "--enable_elastic_training"))
_OF_LAUNCH = ("--use_env", "--use-env")  # torchrun always does this, and refuses the flag
_RANKS_OF_NODE = ("nproc_per_node", "num_gpus")
_NODES = ("nnodes", "num_nodes")

_OTHER_MODELS = ("bert", "t5", "ict", "retro", "mamba", "vlm", "vision", "mimo", "biencoder", "hybrid", "vit", "clip")
_TOOLS = {
    "preprocess_data.py": "tools/preprocess_data.py",
    "preprocess_data_megatron.py": "tools/preprocess_data.py",
    "merge_datasets.py": "tools/merge_datasets.py",
    "run_text_generation_server.py": "tools/run_text_generation_server.py",
}
PRETRAIN = "pretrain_gpt.py"
CONVERT = "tools/checkpoint/convert.py"


@dataclasses.dataclass(frozen=True)
class Launch:
    """Hold a command taken apart.

    ``wrapper`` stands before the launcher (``srun …``); ``options`` are the launcher's. ``ranks_of_node`` and
    ``nodes`` are None where they are not known; ``is_distributed`` tells whether ranks are launched at all.
    """

    wrapper: tuple[str, ...]
    launcher: str
    options: tuple[str, ...]
    script: str
    arguments: tuple[str, ...]
    ranks_of_node: int | None = 1
    nodes: int | None = 1

    @property
    def is_distributed(self) -> bool:
        """Tell whether a launcher starts several ranks."""
        return self.launcher != "python"

    @property
    def world_size(self) -> int | None:
        """Return the number of ranks; None where it is not known."""
        if self.ranks_of_node is None or self.nodes is None:
            return None
        return self.ranks_of_node * self.nodes

    @property
    def target(self) -> str | None:
        """Return the script of this project that does what is launched; None if there is none."""
        name = os.path.basename(self.script)
        if name in _TOOLS:
            return _TOOLS[name]
        if self.script.endswith(("tools/checkpoint/util.py", "tools/checkpoint/convert.py")):
            return CONVERT
        return PRETRAIN if is_training(name) else None


def is_training(script: str) -> bool:
    """Tell whether a program of this name trains a model that this project has."""
    name = os.path.basename(script)
    is_named_so = re.fullmatch(r"(pretrain|finetune|train)\w*\.py", name) is not None
    return is_named_so and not any(model in name for model in _OTHER_MODELS)


def launch_of(words: Sequence[str]) -> Launch | None:
    """Take a command apart; None if it launches no Python program."""
    for place, word in enumerate(words):
        name = os.path.basename(word)
        if name in ("torchrun", "deepspeed"):
            return _launched(tuple(words[:place]), name, words[place + 1 :])
        if _PYTHON.fullmatch(name):
            rest = list(words[place + 1 :])
            while rest and rest[0] in ("-u", "-O", "-B", "-X", "-W"):
                del rest[: 2 if rest[0] in ("-X", "-W") else 1]
            if rest[:1] == ["-m"] and rest[1:2] and rest[1] in _TORCHRUN_MODULES:
                return _launched(tuple(words[:place]), "torchrun", rest[2:])
            if not rest or rest[0].startswith("-"):
                return None
            return Launch(tuple(words[:place]), "python", (), rest[0], tuple(rest[1:]))
    return None


def _launched(wrapper: tuple[str, ...], launcher: str, words: Sequence[str]) -> Launch | None:
    place = 0
    values: dict[str, str] = {}
    while place < len(words) and words[place].startswith("-"):
        name, has_value, value = words[place].partition("=")
        place += 1
        if name in _SWITCHES or name in ("-m", "--module"):
            continue
        if not has_value and place < len(words):
            value = words[place]
            place += 1
        values[name.lstrip("-").replace("-", "_")] = value
    if place == len(words):
        return None
    ranks = next((values[name] for name in _RANKS_OF_NODE if name in values), "1" if launcher == "torchrun" else "")
    nodes = next((values[name] for name in _NODES if name in values), "1")
    options = tuple(word for word in words[:place] if word not in _OF_LAUNCH)
    if launcher == "deepspeed":
        options = _torchrun_options(values)
    return Launch(wrapper, launcher, options, words[place], tuple(words[place + 1 :]), _number(ranks), _number(nodes))


def _torchrun_options(values: dict[str, str]) -> tuple[str, ...]:
    """Return torchrun's options for DeepSpeed's."""
    names = {"num_gpus": "--nproc_per_node", "num_nodes": "--nnodes", "master_addr": "--master_addr"}
    names |= {"master_port": "--master_port", "node_rank": "--node_rank"}
    return tuple(word for name, option in names.items() if name in values for word in (option, values[name]))


def _number(text: str) -> int | None:
    return int(text) if text.isdigit() and not has_unknown(text) and int(text) > 0 else None
