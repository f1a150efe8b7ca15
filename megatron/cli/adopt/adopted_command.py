"""A launch of another trainer, and the equivalent command of this project with its problems."""

from __future__ import annotations

import dataclasses
import math
import os
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence

from megatron.cli.adopt.shell_values import has_unknown, readable, unknown_names
from megatron.cli.adopt.translation import Finding, FlagGroup, Translation, flag_groups, translate

_PYTHON = re.compile(r"python[\d.]*")
_TORCHRUN_MODULES = ("torch.distributed.launch", "torch.distributed.run")
_SWITCHES = frozenset(
    ("--standalone", "--no_python", "--no-python", "--run_path", "--run-path", "--use_env", "--use-env")
).union(("--no_local_rank", "--autotuning", "--no_ssh", "--force_multi", "--enable_elastic_training"))
_OF_LAUNCH = ("--use_env", "--use-env")  # torchrun's only behavior; torchrun rejects the flag
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
    """Parts of a launch command.

    ``wrapper`` precedes the launcher (``srun …``). ``options`` are the launcher's options. ``ranks_of_node`` and
    ``nodes`` are None if they are unknown. ``is_distributed`` is false if plain python starts the script.
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
        return self.launcher != "python"

    @property
    def world_size(self) -> int | None:
        """Return the number of ranks; None if it is unknown."""
        if self.ranks_of_node is None or self.nodes is None:
            return None
        return self.ranks_of_node * self.nodes

    @property
    def target(self) -> str | None:
        """Return this project's equivalent of the launched script; None if there is none."""
        name = os.path.basename(self.script)
        if name in _TOOLS:
            return _TOOLS[name]
        if self.script.endswith(("tools/checkpoint/util.py", "tools/checkpoint/convert.py")):
            return CONVERT
        return PRETRAIN if is_training(name) else None


def is_training(script: str) -> bool:
    """Return whether a script's name is that of a training script for a model that this project supports."""
    name = os.path.basename(script)
    is_named_so = re.fullmatch(r"(pretrain|finetune|train)\w*\.py", name) is not None
    return is_named_so and not any(model in name for model in _OTHER_MODELS)


def launch_of(words: Sequence[str]) -> Launch | None:
    """Parse a launch command; None if it does not launch a Python program."""
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
    """Convert options of the DeepSpeed launcher to torchrun's."""
    names = {"num_gpus": "--nproc_per_node", "num_nodes": "--nnodes", "master_addr": "--master_addr"}
    names |= {"master_port": "--master_port", "node_rank": "--node_rank"}
    return tuple(word for name, option in names.items() if name in values for word in (option, values[name]))


def _number(text: str) -> int | None:
    return int(text) if text.isdigit() and not has_unknown(text) and int(text) > 0 else None


Check = Callable[[Sequence[str], int], Sequence[str]]
"""Function that parses the words of a command at a world size and returns the problems."""

_ABSENT = re.compile("does not exist|there is no such file|No such file or directory")
_RANK_STARTERS = ("mpirun", "mpiexec", "mpirun.openmpi", "jsrun", "aprun", "horovodrun")
_LAYOUT = ("--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size")


@dataclasses.dataclass(frozen=True)
class AdoptedCommand:
    """Translated command, with the outcome of each original flag and the open decisions.

    ``placeholders`` are the unknown values by name, with the reason. ``refused`` are the problems that this project's
    parser finds in the command at ``world_size`` ranks. ``absent`` are problems with files that do not exist on this
    host, which need not be the host of the run.
    """

    origin: str
    head: tuple[str, ...]
    groups: tuple[FlagGroup, ...]
    findings: tuple[Finding, ...]
    placeholders: Mapping[str, str]
    refused: tuple[str, ...]
    absent: tuple[str, ...]
    world_size: int
    is_world_size_known: bool

    @property
    def would_run(self) -> bool:
        """Return whether the command can be pasted and run without a decision by the user."""
        return not self.refused and not self.placeholders and not any(item.needs_decision for item in self.findings)

    @property
    def text(self) -> str:
        """Return the shell command, with one flag per line."""
        lines = [_quoted(self.head), *(f"    {_quoted(group.words)}" for group in self.groups)]
        return " \\\n".join(lines)


def _quoted(words: Iterable[str]) -> str:
    return " ".join(shlex.quote(readable(word)) for word in words)


def adopt_launch(
    launch: Launch, origin: str, unknowns: Mapping[str, str], checks: Mapping[str, Check]
) -> AdoptedCommand:
    """Translate a launch to a command of this project; ``launch.target`` must not be None."""
    target = launch.target
    assert target is not None
    if target == PRETRAIN:
        translation = translate(launch.arguments)
    else:
        translation = Translation(tuple(flag_groups(launch.arguments)), (), {})
    findings = list(translation.findings)
    name = os.path.basename(launch.script)
    if name.startswith("finetune"):
        text = f"{target}; changes: the loss covers every token, and samples are not prompts with answers"
        findings.insert(0, Finding(launch.script, "renamed", text, needs_decision=True))
    elif name != os.path.basename(target):
        findings.insert(0, Finding(launch.script, "renamed", f"{target}; changes: nothing, the flags define the model"))
    if launch.launcher == "deepspeed":
        findings.insert(0, Finding("deepspeed", "renamed", "torchrun; changes: nothing (DeepSpeed)"))
    head = [*(launch.wrapper if launch.wrapper and os.path.basename(launch.wrapper[0]) == "srun" else ())]
    if launch.is_distributed:
        head += ["torchrun", *launch.options]
    else:
        head.append("python")
        if head[0] == "srun":
            text = "ranks are started by torchrun: srun starts torchrun --nproc_per_node N once on each node"
            findings.append(Finding("srun python", "not supported", text, needs_decision=True))
        starter = next((word for word in map(os.path.basename, launch.wrapper) if word in _RANK_STARTERS), None)
        if starter is not None:
            text = f"ranks are started by torchrun: replace {starter} with torchrun --nproc_per_node N"
            findings.append(Finding(f"{starter} python", "not supported", text, needs_decision=True))
    return _checked([*head, target], translation.groups, findings, launch, origin, unknowns, translation, checks)


def _checked(
    head: Sequence[str],
    groups: Sequence[FlagGroup],
    findings: Sequence[Finding],
    launch: Launch,
    origin: str,
    unknowns: Mapping[str, str],
    translation: Translation,
    checks: Mapping[str, Check],
) -> AdoptedCommand:
    words = [word for group in groups for word in group.words]
    names = dict.fromkeys(name for word in (*head, *words) for name in unknown_names(word))
    reasons = {**unknowns, **translation.placeholders}
    world_size = launch.world_size or smallest_world_size(groups)
    problems = checks[head[-1]]([readable(word) for word in words], world_size)
    # Problems that mention a placeholder are caused by the placeholder and are not reported.
    refused = [problem for problem in problems if not any(f"<{name}>" in problem for name in names)]
    return AdoptedCommand(
        origin=origin,
        head=tuple(head),
        groups=tuple(groups),
        findings=tuple(findings),
        placeholders={name: reasons.get(name, "is not known") for name in names},
        refused=tuple(problem for problem in refused if not _ABSENT.search(problem)),
        absent=tuple(problem for problem in refused if _ABSENT.search(problem)),
        world_size=world_size,
        is_world_size_known=launch.world_size is not None,
    )


def smallest_world_size(groups: Iterable[FlagGroup]) -> int:
    """Return the number of ranks of one model replica."""
    sizes = {group.name: group.values[0] for group in groups if group.name in _LAYOUT and group.values}
    return math.prod(int(size) for size in sizes.values() if size.isdigit() and int(size) > 0)
