"""Samples that a run has passed over, recorded with what it has read. Importing this module imports no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron.core.errors import DataError

LEFT_OUT, NUM_REWOUND = "left_out", "num_rewound"
"""The names of the record beside the data history's own."""


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """Hold the consumed samples ``[start, end)`` of one step that was left out, and why.

    ``samples`` are the ids of those that were found to be bad, where some were.
    """

    start: int
    end: int
    iteration: int
    reason: str
    samples: tuple[int, ...] = ()


@dataclass(frozen=True)
class LeftOutSamples:
    """Hold all that a run has left out, in the order in which it did.

    ``num_rewound`` counts how often it went back and left nothing out.
    """

    steps: tuple[LeftOut, ...] = ()
    num_rewound: int = 0

    def with_step(self, step: LeftOut) -> LeftOutSamples:
        """Return the record with one more step; a step of the same samples is replaced."""
        others = tuple(known for known in self.steps if (known.start, known.end) != (step.start, step.end))
        return LeftOutSamples((*others, step), self.num_rewound)

    def with_rewind(self) -> LeftOutSamples:
        """Return the record with one more rewind that left nothing out."""
        return LeftOutSamples(self.steps, self.num_rewound + 1)

    def meeting(self, start: int, end: int) -> LeftOut | None:
        """Return the first step of which a sample is among the consumed samples ``[start, end)``."""
        return next((step for step in self.steps if step.start < end and start < step.end), None)

    def to_dict(self) -> dict[str, Any]:
        """Return the record as JSON-ready values, to stand beside a data history's; what is empty is not in it."""
        steps = {LEFT_OUT: [dataclasses.asdict(step) for step in self.steps]} if self.steps else {}
        return steps | ({NUM_REWOUND: self.num_rewound} if self.num_rewound else {})

    @classmethod
    def from_dict(cls, values: Mapping[str, Any] | None) -> LeftOutSamples:
        """Read back what `to_dict` returned, from among other values.

        Raises:
            DataError: it is something else.
        """
        try:
            steps = tuple(
                LeftOut(
                    start=int(step["start"]),
                    end=int(step["end"]),
                    iteration=int(step["iteration"]),
                    reason=str(step["reason"]),
                    samples=tuple(map(int, step["samples"])),
                )
                for step in (values or {}).get(LEFT_OUT, ())
            )
            num_rewound = int((values or {}).get(NUM_REWOUND, 0))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(f"the checkpoint's record of the samples left out is damaged ({error!r})") from error
        return cls(steps, num_rewound)
