"""A command of this project that stands for another trainer's, and whether it would run."""

from __future__ import annotations

import dataclasses
import math
import os
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence

from megatron.adoption.launch import PRETRAIN, Launch
from megatron.adoption.shell.state import readable, unknown_names
from megatron.adoption.translation import Finding, FlagGroup, Translation, flag_groups, translate

Check = Callable[[Sequence[str], int], Sequence[str]]
"""Parse the words of a command at a world size, and return what is refused."""

_ABSENT = re.compile("does not exist|there is no such file|No such file or directory")
_RANK_STARTERS = ("mpirun", "mpiexec", "mpirun.openmpi", "jsrun", "aprun", "horovodrun")
_LAYOUT = ("--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size")


@dataclasses.dataclass(frozen=True)
class AdoptedCommand:
    """Hold a command, what became of the flags it was made from, and what is left to decide.

    ``placeholders`` are the values that are not known, by name, with the reason. ``refused`` is what this
    project's own parser has against the command at ``world_size`` ranks; ``absent`` is what it says of files that
    are not on this machine, which need not be the one of the run.
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
        """Tell whether the command can be pasted and run without a decision."""
        return not self.refused and not self.placeholders and not any(item.needs_decision for item in self.findings)

    @property
    def text(self) -> str:
        """Return the command for a shell, one flag a line."""
        lines = [_quoted(self.head), *(f"    {_quoted(group.words)}" for group in self.groups)]
        return " \\\n".join(lines)


def _quoted(words: Iterable[str]) -> str:
    return " ".join(shlex.quote(readable(word)) for word in words)


def adopt_launch(
    launch: Launch, origin: str, unknowns: Mapping[str, str], checks: Mapping[str, Check]
) -> AdoptedCommand:
    """Make the command of this project from another's; its script must have a counterpart here."""
    target = launch.target
    assert target is not None
    if target == PRETRAIN:
        translation = translate(launch.arguments)
    else:
        translation = Translation(tuple(flag_groups(launch.arguments)), (), {})
    findings = list(translation.findings)
    name = os.path.basename(launch.script)
    if name.startswith("finetune"):
        text = f"{target}; changes: the loss is on every token, and samples are not prompts with answers"
        findings.insert(0, Finding(launch.script, "renamed", text, needs_decision=True))
    elif name != os.path.basename(target):
        findings.insert(0, Finding(launch.script, "renamed", f"{target}; changes: nothing, the flags shape the model"))
    if launch.launcher == "deepspeed":
        findings.insert(0, Finding("deepspeed", "renamed", "torchrun; changes: nothing (DeepSpeed)"))
    head = [*(launch.wrapper if launch.wrapper and os.path.basename(launch.wrapper[0]) == "srun" else ())]
    if launch.is_distributed:
        head += ["torchrun", *launch.options]
    else:
        head.append("python")
        if head[0] == "srun":
            text = "ranks come from torchrun here: srun starts torchrun --nproc_per_node N once on each node"
            findings.append(Finding("srun python", "not supported", text, needs_decision=True))
        starter = next((word for word in map(os.path.basename, launch.wrapper) if word in _RANK_STARTERS), None)
        if starter is not None:
            text = f"ranks come from torchrun here: write torchrun --nproc_per_node N in the place of {starter}"
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
    # What a placeholder cannot be parsed as is no news.
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
    """Return the number of ranks that one copy of the model takes."""
    sizes = {group.name: group.values[0] for group in groups if group.name in _LAYOUT and group.values}
    return math.prod(int(size) for size in sizes.values() if size.isdigit() and int(size) > 0)
