"""Write how many communicators the links of each rank of a ring of stages have: none may share one with another."""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta

import torch.distributed as dist

from megatron.core.device import select_device
from megatron.core.parallel_config import ParallelSizes
from megatron.core.parallel_state import create_parallel_state
from megatron.core.pipeline_parallel.p2p_communication import create_pipeline_links


def main(folder: str) -> None:
    """Make the links of stages that pass activations from the last one to the first."""
    device = select_device(int(os.environ["LOCAL_RANK"]))
    device.make_current()
    dist.init_process_group(device.default_backend, timeout=timedelta(seconds=60))
    pp = create_parallel_state(ParallelSizes(pp=dist.get_world_size())).pp
    links = create_pipeline_links(pp, wraps_around=True, device=device.torch_device)
    of_rank = (links.activations_in, links.activations_out, links.gradients_in, links.gradients_out)
    number = len({id(link.handle) for link in of_rank if link is not None})
    with open(f"{folder}/links_of_rank_{pp.rank}.jsonl", "w") as file:
        file.write(json.dumps({"communicators": number}) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
