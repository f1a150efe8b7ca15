"""Capture a graph while another thread asks for the state of the device, as the hang watchdog and NCCL's do."""

from __future__ import annotations

import json
import sys
import threading

import torch

from megatron.core.device import select_device


def main(path: str) -> None:
    """Write what the other thread was told, and what a replay computes."""
    device = select_device(0)
    device.make_current()
    backend = device.graph_backend()
    assert backend is not None
    x = torch.ones(8, device=device.torch_device)
    done = torch.cuda.current_stream().record_event()
    told: list[object] = []

    def look() -> None:
        # The first answers say that nothing is done.
        told.extend(device.queue_state() for _ in range(5))
        told.append(sum(done.query() for _ in range(5)) > 0)
        told.append(device.empty_host_memory(1 << 12).numel())

    def work() -> tuple[torch.Tensor, ...]:
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        return (x + 1,)

    graph = backend.capture(work)
    graph.replay()
    with open(path, "w") as file:
        file.write(json.dumps({"told": told, "computed": graph.outputs[0].sum().item()}) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
