"""What the test session and the fork server say to each other."""

from __future__ import annotations

import pickle
from dataclasses import dataclass


@dataclass(frozen=True)
class Job:
    """Name what every rank of one job runs; ``arguments`` is a pickle that only the ranks open."""

    module_name: str
    module_path: str
    function_name: str
    arguments: bytes
    world_size: int
    backend: str
    folder: str
    timeout_s: float


@dataclass(frozen=True)
class Outcome:
    """Tell how a job's ranks ended: exit codes (a negative one is a signal), and which had to be ended."""

    exit_codes: tuple[int, ...]
    ended: tuple[int, ...]


@dataclass(frozen=True)
class RankError:
    """Carry one rank's exception: as text always, as a pickle of the object where it has one."""

    raised_at: float
    traceback_text: str
    exception: bytes | None


def describe_error(raised_at: float, traceback_text: str, error: BaseException) -> RankError:
    """Return the report of ``error``, with the object itself only if it survives pickling both ways."""
    try:
        payload = pickle.dumps(error)
        pickle.loads(payload)
    except Exception:  # noqa: BLE001 - a test may raise any class, and its constructor may refuse the pickle
        return RankError(raised_at, traceback_text, None)
    return RankError(raised_at, traceback_text, payload)
