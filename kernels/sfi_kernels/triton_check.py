"""Launch one small Triton kernel, to see whether Triton runs: `python -m sfi_kernels.triton_check`.

In its own process, since a process chooses Triton's interpreter once.
"""

import torch
import triton
import triton.language as tl

SIZE = 64


@triton.jit
def _double_kernel(source, target, SIZE: tl.constexpr):  # noqa: ANN001, ANN202 - not typed Python
    offset = tl.arange(0, SIZE)
    tl.store(target + offset, tl.load(source + offset) * 2)


def main() -> None:
    """Launch the kernel; raise `RuntimeError` if the result is wrong."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    source = torch.arange(SIZE, dtype=torch.float32, device=device)
    target = torch.full_like(source, torch.nan)
    _double_kernel[(1,)](source, target, SIZE=SIZE)
    if not torch.equal(target, source * 2):
        raise RuntimeError(f"a Triton kernel gave {target[:4].tolist()}")


if __name__ == "__main__":
    main()
