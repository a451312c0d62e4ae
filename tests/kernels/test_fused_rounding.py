"""Which roundings the compiler keeps, from the code it makes for a GPU: the interpreter cannot show them."""

import json
import re
import subprocess

import pytest

from tests.kernels.test_offline import without_interpreter

pytest.importorskip("triton")
SCRIPT = """
import json, re
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from sfi_kernels.launch import name_of, recording, Target
from sfi_kernels.specializations import _gate, _norm, _add_and_norm, _rotate, signature

runs = {
    "rotary": lambda: _rotate(torch.bfloat16, 128, normed=False),
    "rotary, normed": lambda: _rotate(torch.bfloat16, 128, normed=True),
    "norm": lambda: _norm(torch.bfloat16, 2560),
    "norm, added": lambda: _add_and_norm(torch.bfloat16, 2560),
    "gate": lambda: _gate(torch.bfloat16),
}
for name, run in runs.items():
    with recording(Target(90, 132)) as record:
        run()
    launch, = record.launches
    types, constants, attributes = signature(launch)
    source = ASTSource(fn=launch.kernel, signature=types, constexprs=constants, attrs=attributes)
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=launch.options)
    print(json.dumps([name, built.asm["ptx"]]))
"""


@pytest.fixture(scope="module")
def ptx() -> dict[str, str]:
    result: subprocess.CompletedProcess = without_interpreter("-c", SCRIPT)
    assert result.returncode == 0, result.stderr
    return dict(map(json.loads, result.stdout.splitlines()))


@pytest.mark.parametrize("name", ["rotary", "rotary, normed", "norm", "norm, added", "gate"])
def test_no_product_in_bfloat16_loses_its_rounding_to_a_sum(ptx, name: str):
    """PyTorch rounds a product before it adds; `fma` does not."""
    assert re.search(r"\.bf16", ptx[name])
    assert not re.findall(r"fma\S*bf16\S*", ptx[name])


@pytest.mark.parametrize("name", ["rotary", "rotary, normed"])
def test_the_angle_s_products_are_rounded_one_by_one(ptx, name: str):
    assert not re.findall(r"fma\.rn\.f32", ptx[name])
