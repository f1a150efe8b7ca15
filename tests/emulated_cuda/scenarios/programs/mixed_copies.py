"""Copy tensors of several dtypes and odd sizes to host memory, where they share blocks, and back."""

from __future__ import annotations

import torch

from megatron.core.device import select_device

SIZES = (301, 150, 303, 77, 299, 90)
DTYPES = (torch.bfloat16, torch.float32, torch.uint8, torch.float64, torch.float16, torch.int64)


def main() -> None:
    """Compare what comes back with what has left, in turns that use the blocks again."""
    device = select_device(0)
    device.make_current()
    copies = device.host_copies()
    for turn in range(3):
        sent = [
            torch.arange(size, device=device.torch_device).remainder_(7 + turn).to(dtype)
            for size, dtype in zip(SIZES, DTYPES, strict=True)
        ]
        out = [copies.to_host(tensor) for tensor in sent]
        for copied in out:
            copies.wait_on_host(copied)
        back = [copies.to_device(copied.tensor) for copied in out]
        for tensor, copied in zip(sent, back, strict=True):
            copies.wait(copied)
            assert torch.equal(copied.tensor, tensor), (
                f"{tensor.numel()} elements of {tensor.dtype} came back as others"
            )


if __name__ == "__main__":
    main()
