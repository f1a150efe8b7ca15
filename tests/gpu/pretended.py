"""Kernel pairs on CUDA tensors without values: python -m tests.gpu.pretended prints what each makes, as JSON."""

from __future__ import annotations

import json

from megatron.planner.simulation.fake_cuda import load_fake_cuda


def main() -> None:
    """Run each pair, gradients too, and print the shapes, formats and devices of what comes out."""
    load_fake_cuda()
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from megatron.core.device import Device
    from megatron.planner.simulation.fake_triton import recorded_programs
    from megatron.planner.simulation.operators import CudaOperators, FakeFlexAttention
    from megatron.planner.simulation.recorder import Recorder
    from tests.gpu.kernels import KernelSizes, kernel_pairs, run_with_gradients

    device, recorder, found = Device("cuda"), Recorder(), []
    documents = FakeFlexAttention(recorder, second_document=KernelSizes().length // 3)
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        recorder,
        CudaOperators(recorder, (9, 0)),
        documents.taking_calls(),
        recorded_programs(recorder),
    ):
        for dtype in (torch.float32, torch.bfloat16):
            for pair in kernel_pairs(device, dtype, KernelSizes()):
                inputs = [torch.empty(shape, dtype=dtype, device="cuda") for shape in pair.shapes]
                for kernel in (pair.kernel, pair.twin):
                    result, gradients = run_with_gradients(kernel, inputs, pair.has_gradient)
                    made = [[str(each.device), str(each.dtype), list(each.shape)] for each in (result, *gradients)]
                    found.append([pair.name, made])
    print(json.dumps(found))


if __name__ == "__main__":
    main()
