"""Take the traces that lines of standard input ask for, and print them as lines of JSON.

The process starts without torch. What libraries print goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys

from megatron.core.errors import ConfigurationError
from megatron.planner.simulation.pretended_cuda import load_pretended_cuda
from megatron.planner.traces import request_from_json


def main() -> None:
    """Write the traces of each request until standard input ends."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    problem = ""
    try:
        load_pretended_cuda()
    except ConfigurationError as error:
        problem = str(error)
    for line in sys.stdin:
        print(json.dumps({"error": problem} if problem else _answer(line)), file=answers, flush=True)


def _answer(line: str) -> dict[str, object]:
    from megatron.planner.simulation.piece_tracer import take_traces

    try:
        requests = {each["key"]: request_from_json(each["request"]) for each in json.loads(line)}
        return {"traces": take_traces(requests)}
    except Exception as error:  # noqa: BLE001 the process that sent the request raises it
        return {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"}


if __name__ == "__main__":
    main()
