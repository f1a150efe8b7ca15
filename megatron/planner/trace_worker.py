"""Take the traces that lines of standard input ask for, in a process without torch, and print them as lines of JSON."""

from __future__ import annotations

import json
import sys

from megatron.planner.simulation.pretended_cuda import load_pretended_cuda
from megatron.planner.traces import request_from_json


def main() -> None:
    """Answer each line until there are no more."""
    load_pretended_cuda()
    from megatron.planner.simulation.piece_tracer import take_traces

    answer: dict[str, object]
    for line in sys.stdin:
        try:
            requests = {each["key"]: request_from_json(each["request"]) for each in json.loads(line)}
            answer = {"traces": take_traces(requests)}
        except Exception as error:  # noqa: BLE001 the process that asked raises it
            answer = {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
