"""Compile recorded launches without a GPU: registers, spills and shared memory by architecture.

Triton's interpreter must be off: the process chooses it when it imports the kernels.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sfi_kernels.launch import Launch, name_of
from sfi_kernels.specializations import signature, specializations

WARP = 32
# bytes of shared memory that one program may have (CUDA programming guide, compute capabilities)
SHARED_LIMIT = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}


def compile_launch(label: str, launch: Launch, capability: int) -> dict[str, Any]:
    """Compile a recorded launch for a compute capability times ten; `label` goes into the kernel's name.

    Returns:
        `kernel`, `arch`, `registers` and `spill_bytes` of a thread, `shared_bytes` of a program; `async_buffers`, the
        tiles of the largest operand that asynchronous copies fill, 0 without a pipeline; and `over_limit`, whether
        the architecture has less shared memory.
    """
    types, constants, attributes = signature(launch)
    source = ASTSource(fn=launch.kernel, signature=types, constexprs=constants, attrs=attributes)
    gpu = GPUTarget("cuda", capability, WARP)
    built = triton.compile(source, target=gpu, options=launch.options)
    registers, spills = _resources(built.asm["cubin"])
    shared = int(built.metadata.shared)
    return {
        "kernel": f"{name_of(launch.kernel)} [{label}]",
        "arch": f"sm_{capability}",
        "registers": registers,
        "spill_bytes": spills,
        "shared_bytes": shared,
        "async_buffers": _buffers(built.asm["ttgir"]),
        "over_limit": shared > SHARED_LIMIT[capability],
    }


def _resources(cubin: bytes) -> tuple[int, int]:
    tool = next(Path(triton.__file__).parent.rglob("cuobjdump"))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout  # noqa: S603
    resources = dict(re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text))
    return int(resources["REG"]), int(resources["STACK"]) + int(resources["LOCAL"])


def _buffers(ttgir: str) -> int:
    # a pipelined operand is one allocation with the number of buffers as its first size
    sizes = re.findall(r"ttg\.local_alloc : \(\) -> !ttg\.memdesc<(\d+)x\d+x\d+x", ttgir)
    return max(map(int, sizes), default=0)


def main() -> None:
    """Compile every N-th specialization from I on, with `sm_80,sm_90 I/N`; print their number and each in JSON."""
    archs, part = sys.argv[1:]
    place, parts = map(int, part.split("/"))
    capabilities = [int(arch.removeprefix("sm_")) for arch in archs.split(",")]
    launches = [
        (*launch, capability)
        for capability in capabilities
        for launch in list(specializations(capability))[place::parts]
    ]
    print(len(launches), flush=True)  # noqa: T201
    for launch in launches:
        print(json.dumps(compile_launch(*launch)), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
