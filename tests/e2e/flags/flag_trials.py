"""What a flag is tried with: a value other than its default, and the flags without which it counts for nothing.

`flag_values.tsv` has a line for each flag whose trial does not follow from its field: a value, its companions
(``{data}`` and the like are files that the tests make), the flags of the plain command line that are left out, and the
number of processes.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from megatron.config.run_config import command_line_fields
from megatron.core.config_base import FieldSpec
from tests.e2e.toy_run import toy_args
from tests.harness.faults import Faults

_TABLE = Path(__file__).with_name("flag_values.tsv")
PLAIN = "--train-iters 2 --eval-interval 1 --lr-warmup-iters 0 --cpu-gemm-backend mkl"
"""What every trial begins with, beside the flags of a small run; nothing in it is measured or chosen by chance."""
_EVENTS = {
    "--exit-duration-in-mins": Faults(hour_passes_at=1),
    "--preemption-grace-seconds": Faults(slow_save_s=1.2),
    "--max-consecutive-skipped-iterations": Faults(nan_loss_at=(1, 2)),
    "--no-check-for-nan-in-loss-and-grad": Faults(nan_loss_at=(1,)),
    "--max-spikes": Faults(poisoned=(20,), poison=100.0),
    "--spike-policy": Faults(nan_loss_at=(1,)),
    "--spike-threshold": Faults(poisoned=(20,), poison=100.0),
    "--spike-window": Faults(poisoned=(20,), poison=100.0),
}


@dataclasses.dataclass(frozen=True)
class Trial:
    """Hold a flag, the words of its value, and the run that it is added to; ``event`` befalls both runs."""

    flag: str
    value: tuple[str, ...] = ()
    companions: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    num_processes: int = 1
    event: Faults = Faults()

    def plain(self, folder: Path, files: Mapping[str, Path]) -> list[str]:
        """Return the command line without the flag; it writes into ``folder``."""
        words = _leave_out(toy_args(folder, PLAIN), self.without)
        return [word.format(folder=folder, **files) for word in (*words, *self.companions)]

    def changed(self, folder: Path, files: Mapping[str, Path]) -> list[str]:
        """Return the command line with the flag."""
        return [*self.plain(folder, files), *(word.format(folder=folder, **files) for word in (self.flag, *self.value))]


def trials() -> dict[str, Trial]:
    """Return the trial of every field that a flag sets, by the flag's first name.

    Raises:
        ValueError: a field has no trial, or the table one for what is no field.
    """
    specs = {spec.flags[0]: spec for _, spec in command_line_fields()}
    table = dict(_table())
    unknown = table.keys() - specs.keys()
    if unknown:
        raise ValueError(f"{_TABLE.name} has values of what are no flags: {sorted(unknown)}")
    return {flag: table.get(flag) or _by_rule(spec) for flag, spec in specs.items()}


def _table() -> Iterator[tuple[str, Trial]]:
    for line in _TABLE.read_text(encoding="utf-8").splitlines()[1:]:
        flag, value, companions, without, processes = line.split("\t")
        words = (tuple(shlex.split(text)) for text in (value, companions, without))
        yield flag, Trial(flag, *words, int(processes), _EVENTS.get(flag, Faults()))


def _by_rule(spec: FieldSpec) -> Trial:
    """Return the trial of a switch, which is given, or of a field with choices, which has the first other one."""
    flag, value = spec.flags[0], tuple[str, ...]()
    if not spec.is_bool:
        others = [choice for choice in spec.options.choices or () if choice != str(spec.default)]
        if not others:
            raise ValueError(f"{flag} has no line in {_TABLE.name}; give it a value to be tried with")
        value = (others[0],)
    return Trial(flag, value, tuple(_conditions(spec)), event=_EVENTS.get(flag, Faults()))


def _conditions(spec: FieldSpec) -> Iterator[str]:
    """Yield the flags that a field's own description says it counts for nothing without."""
    fields = {other.name: other for _, other in command_line_fields()}
    for name, value in (spec.options.where or ("", None), (spec.options.needs or "", None)):
        if name in fields and name not in ("load", "save"):
            yield from _conditions(fields[name])
            yield from fields[name].typed(value).split()


def _leave_out(words: Sequence[str], flags: Sequence[str]) -> Iterator[str]:
    is_left_out = False
    for word in words:
        if word.startswith("--"):
            is_left_out = word in flags
        if not is_left_out:
            yield word
