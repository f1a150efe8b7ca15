"""Options of NCCL communicators from the YAML file of --nccl-communicator-config-path, in Megatron-LM's format."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron.core.errors import ConfigurationError, choices
from megatron.core.process_group import NcclOptions

_FLAG = "--nccl-communicator-config-path"
_GROUPS = {
    "tp": "tp",
    "cp": "cp",
    "dp": "dp",
    "dp_cp": "dp_cp",
    "pp": "pp",
    "mp": "model_parallel",
    "embd": "embedding",
    "ep": "expert_model",
    "ep_dp": "expert_dp",
}
"""The group of this project for each of Megatron-LM's names in the file."""
_COUNTS = ("min_ctas", "max_ctas", "cga_cluster_size")
_LARGEST_CLUSTER = 8


def read_nccl_options(path: str | None) -> dict[str, NcclOptions]:
    """Read the options of each group from a file; without a path return none.

    Raises:
        ConfigurationError: the file cannot be read or has an unknown group, option or value.
    """
    if path is None:
        return {}
    try:
        import yaml
    except ImportError as error:
        raise ConfigurationError(f"{_FLAG} {path}: YAML needs PyYAML; install it with: pip install pyyaml") from error
    try:
        table = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else " ".join(str(error).split())
        raise ConfigurationError(f"{_FLAG} {path} cannot be read: {reason}") from error
    if not isinstance(table, dict) or not table:
        raise ConfigurationError(f"{_FLAG} {path} names no groups; write lines such as dp_cp: {{max_ctas: 8}}")
    if problems := list(_problems(table)):
        raise ConfigurationError(tuple(f"{_FLAG} {path}: {problem}" for problem in problems))
    return {_GROUPS[name]: NcclOptions(**options) for name, options in table.items()}


def notes_on_groups(path: str | None, size_of: Callable[[str], int]) -> Iterator[str]:
    """Yield a note for each group of the file that has one rank, and so no communicator.

    ``size_of`` returns the number of ranks of a group, given its name in `ParallelState`.
    """
    named = read_nccl_options(path)
    for name, group in _GROUPS.items():
        if group in named and size_of(group) == 1:
            yield f"{_FLAG} {path}: {name} has no effect: the group has one rank"


def _problems(table: Mapping[Any, Any]) -> Iterator[str]:
    for name, options in table.items():
        if name not in _GROUPS:
            yield f"{name} is no group with a communicator of its own; possible groups are {choices(_GROUPS)}"
        elif not isinstance(options, dict) or not options:
            yield f"{name} has no options; write a line such as {name}: {{max_ctas: 8}}"
        else:
            yield from (f"{name}: {problem}" for problem in _problems_of(options))


def _problems_of(options: Mapping[Any, Any]) -> Iterator[str]:
    names = (*_COUNTS, "net_name", "is_high_priority_stream")
    for name, value in options.items():
        if name in _COUNTS:
            most = _LARGEST_CLUSTER if name == "cga_cluster_size" else 64
            least = 0 if name == "cga_cluster_size" else 1
            if type(value) is not int or not least <= value <= most:
                yield f"{name} is {value!r}; use a whole number from {least} to {most}"
        elif name == "net_name":
            if not isinstance(value, str) or not value:
                yield f"{name} is {value!r}; use the name of a network, such as IB or Socket"
        elif name == "is_high_priority_stream":
            if value is not True:
                yield f"{name} is {value!r}, but every communicator has a high-priority stream; omit it"
        else:
            yield f"{name} is not an option; possible options are {choices(names)}"
    fewest, highest = options.get("min_ctas"), options.get("max_ctas")
    if type(fewest) is int and type(highest) is int and fewest > highest:
        yield f"min_ctas {fewest} is larger than max_ctas {highest}; use at most {highest}"
