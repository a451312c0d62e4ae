"""The tiles of the prompt's attention: each gives the same, and none computes a product twice."""

import json
import re

import pytest
import torch

pytest.importorskip("triton")

from sfi_kernels.attention_tile import QueryTile
from sfi_kernels.dense_attention.triton import dense_attention
from tests.fakes import kernel_device, paged
from tests.kernels.test_dense_attention_with_logits import SCALE, check_output
from tests.kernels.test_offline import without_interpreter

H, G, D = 1, 2, 16
# compiled where kernels are not interpreted; a line for each
LAYOUTS = """
import json, sys, torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
import triton
from sfi_kernels.launch import Target, recording
from sfi_kernels.offline import Case, compile_launch, signature

for capability in (80, 90):
    for D in (64, 128, 256):
        with recording(Target(capability, 132)) as record:
            Case(torch.bfloat16, D, D, 4, None, sinks=False).prompt()
        launch = record.launches[0]
        types, constants, attributes = signature(launch)
        source = ASTSource(launch.kernel, types, constants, attributes)
        target = GPUTarget("cuda", capability, 32)
        built = triton.compile(source, target=target, options=launch.options)
        made = compile_launch("", launch, capability)
        print(json.dumps({
            "capability": capability, "D": D, "rows": launch.constants["BLOCK_M"],
            "tokens": launch.constants["BLOCK_N"], "spills": made["spill_bytes"],
            "buffers": made["async_buffers"], "stages": launch.options["num_stages"],
            "text": [line for line in built.asm["ttgir"].splitlines() if "nvidia_mma<" in line],
        }))
"""


@pytest.mark.parametrize(
    ("shape", "W", "lengths"),
    [
        (QueryTile(16, 4, 16, 3), 20, [33, 64]),
        (QueryTile(32, 8, 32, 5), 70, [129, 30]),
        (QueryTile(128, 8, 64, 5), 140, [300, 130]),
        (QueryTile(32, 8, 32, 5), 3, [64, 65]),
    ],
    ids=str,
)
def test_every_tile_attends_as_the_textbook_does(shape: QueryTile, W: int, lengths: list[int]):
    """Across the diagonal, before it, and where a request is shorter than the piece."""
    device = kernel_device("triton", torch.float32, 64)
    query = torch.randn(len(lengths), H, G, W, D)
    keys, values = ([torch.randn(H, T, D) for T in lengths] for _ in range(2))
    (key, table), (value, _) = paged(keys, 64), paged(values, 64)
    length = torch.tensor(lengths, dtype=torch.int32)
    operands = (x.to(device) for x in (query, key, value, table, length))
    out = dense_attention(*operands, scale=SCALE, shape=shape).cpu()
    for row in range(len(lengths)):
        check_output(out[row : row + 1], query[row : row + 1], keys[row][None], values[row][None], {})


@pytest.fixture(scope="module")
def compiled() -> list[dict]:
    """Compile the prompt's attention for two architectures, in a process without the interpreter."""
    result = without_interpreter("-W", "ignore", "-c", LAYOUTS)
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.mark.exhaustive
def test_no_warp_repeats_a_product_and_nothing_spills(compiled):
    """A warp takes 16 rows of a tile, and 8 columns where rows are not enough."""
    assert len(compiled) == 6
    for kernel in compiled:
        assert kernel["spills"] == 0, kernel
        assert kernel["text"], kernel
        for line in kernel["text"]:
            rows, columns = map(int, re.search(r"warpsPerCTA = \[(\d+), (\d+)\]", line).groups())
            assert 16 * rows <= kernel["rows"], kernel
            assert 8 * columns <= kernel["tokens"], kernel


def test_the_pipeline_holds_the_tiles_that_its_depth_says(compiled):
    """Page numbers are fetched ahead of the keys; on sm_80 the tile in use is in registers."""
    held = {(kernel["capability"], kernel["D"]): kernel["buffers"] for kernel in compiled}
    assert held == {
        (kernel["capability"], kernel["D"]): (kernel["stages"] + (1 if kernel["capability"] == 90 else -1)) // 2
        for kernel in compiled
    }
    assert held[90, 128] == 3
