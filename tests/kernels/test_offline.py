"""Compiling recorded launches without a GPU: what is made of them, which roundings are kept."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

ROOT = Path(__file__).parents[2]
pytest.importorskip("triton")

from sfi_kernels.launch import Launch  # noqa: E402 - needs Triton
from sfi_kernels.offline import signature  # noqa: E402

DIVISIBLE = [["tt.divisibility", 16]]
SCRIPTS = {}  # all run in one process, from a file, since Triton reads a kernel's source
SCRIPTS["compiled"] = """
import json, sys
import torch, triton
import triton.language as tl
from sfi_kernels.launch import Launch
from sfi_kernels.offline import compile_launch

@triton.jit
def _product_kernel(left_ptr, right_ptr, out_ptr, SIZE: tl.constexpr):
    n = tl.arange(0, SIZE)
    place = n[:, None] * SIZE + n[None, :]
    out = tl.zeros([SIZE, SIZE], tl.float32)
    for step in range(8):
        own = step * SIZE * SIZE + place
        out = tl.dot(tl.load(left_ptr + own), tl.load(right_ptr + own), out)
    tl.store(out_ptr + place, out)

half, full = torch.empty(4, dtype=torch.float16), torch.empty(4)
def report(label, kernel, arguments, options, capability, SIZE):
    launch = Launch(kernel, arguments, {"SIZE": SIZE}, options)
    print(json.dumps(compile_launch(label, launch, capability)))

product = (half, half, full)
report("small", _product_kernel, product, {"num_warps": 4, "num_stages": 3}, 80, 64)
# three buffers of two tiles of 32 KB: more than an A100 has, less than an H100 has
for capability, stages in ((80, 4), (90, 3)):
    options = {"num_warps": 8, "num_stages": stages}
    report("large", _product_kernel, product, options, capability, 128)
report("one stage", _product_kernel, product, {"num_warps": 4, "num_stages": 1}, 80, 64)
few = {"num_warps": 4, "num_stages": 1, "maxnreg": 32}
report("spills", _product_kernel, product, few, 80, 64)
"""
SCRIPTS["ptx"] = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from sfi_kernels.launch import recording, Target
from sfi_kernels.fused import add_rms_norm, rms_norm, silu_mul
from sfi_kernels.offline import _products, _rotate, signature

rows, weight = torch.empty(2, 2560, dtype=torch.bfloat16), torch.empty(2560, dtype=torch.bfloat16)
runs = {
    "rotary": lambda: _rotate(torch.bfloat16, 128, normed=False),
    "rotary, normed": lambda: _rotate(torch.bfloat16, 128, normed=True),
    "norm": lambda: rms_norm.triton(rows, weight, 1e-6),
    "norm, added": lambda: add_rms_norm.triton(rows, rows, weight, 1e-6),
    "gate": lambda: silu_mul.triton(rows, rows),
    "product": _products(torch.bfloat16, 1)["gate, up"],
}
for name, run in runs.items():
    with recording(Target(90, 132)) as record:
        run()
    *_, launch = record.launches  # of a rotation the one that appends, too
    types, constants, attributes = signature(launch)
    source = ASTSource(fn=launch.kernel, signature=types, constexprs=constants, attrs=attributes)
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=launch.options)
    print(json.dumps([name, built.asm["ptx"]]))
"""
SCRIPTS["chained"] = """
from collections import Counter
from sfi_kernels.launch import counting
from sfi_kernels.offline import Case, _chained

case = Case(torch.bfloat16, 128, 128, 4, None, sinks=False)
for capability in (80, 90):
    compiled = {"_rms_norm_kernel", "_silu_mul_kernel", "_project_kernel"}
    with recording(Target(capability, 132)) as record:
        _chained(case)
    for launch in record.launches:
        name, options = launch.kernel.__name__, launch.options
        if name == "_split_plan_kernel":  # once a step
            continue
        ptx = ""
        if name in compiled:
            compiled.remove(name)
            types, constants, attributes = signature(launch)
            source = ASTSource(fn=launch.kernel, signature=types, constexprs=constants, attrs=attributes)
            ptx = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).asm["ptx"]
        print(json.dumps([capability, name, options.get("launch_pdl", False), launch.constants.get("CHAINED"), ptx]))
"""
SCRIPTS["printed"] = """
import runpy
sys.argv[1:] = ["sm_80,sm_90", "0/1000"]
runpy.run_module("sfi_kernels.offline", run_name="__main__")
"""


def without_interpreter(*command: str) -> subprocess.CompletedProcess:
    paths = os.pathsep.join(str(ROOT / folder) for folder in (".", "kernels"))
    environment = os.environ | {"PYTHONPATH": paths}
    environment.pop("TRITON_INTERPRET", None)
    return subprocess.run([sys.executable, *command], check=False, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def told(tmp_path_factory) -> dict[str, list]:
    """What each script prints, where kernels are not interpreted."""
    script = tmp_path_factory.mktemp("offline") / "kernels.py"
    script.write_text("print('===')".join(SCRIPTS.values()))
    result = without_interpreter(str(script))
    assert result.returncode == 0, result.stderr
    parts = result.stdout.split("===\n")
    return {name: list(map(json.loads, part.splitlines())) for name, part in zip(SCRIPTS, parts, strict=True)}


@pytest.fixture
def compiled(told) -> dict[tuple[str, str], dict]:
    return {(row["kernel"], row["arch"]): row for row in told["compiled"]}


@pytest.mark.exhaustive
def test_registers_spills_and_buffers_are_what_the_compiler_made(compiled):
    """The buffers are the tiles in the pipeline."""
    row = compiled["product [small]", "sm_80"]
    assert 16 < row["registers"] < 255
    assert (row["spill_bytes"], row["over_limit"]) == (0, False)
    assert row["shared_bytes"] >= 2 * 2 * 64 * 64 * 2  # two buffers of two tiles of 16-bit numbers
    assert row["async_buffers"] in (2, 3)
    assert compiled["product [one stage]", "sm_80"]["async_buffers"] == 0
    spilled = compiled["product [spills]", "sm_80"]
    assert spilled["registers"] <= 32
    assert spilled["spill_bytes"] > 0


def test_too_much_shared_memory_is_over_the_limit_of_the_architecture(compiled):
    on_80, on_90 = (compiled["product [large]", arch] for arch in ("sm_80", "sm_90"))
    assert on_80["shared_bytes"] > 163 * 1024
    assert on_80["over_limit"]
    assert on_90["shared_bytes"] > 163 * 1024
    assert not on_90["over_limit"]


def test_one_specialization_is_compiled_and_printed(told):
    """The split plan, which comes first."""
    number, *rows = told["printed"]
    assert number > 1  # of all specializations, first of all
    assert [row["kernel"] for row in rows] == ["split_plan [any]"] * 2
    assert [row["arch"] for row in rows] == ["sm_80", "sm_90"]
    keys = "arch async_buffers kernel over_limit registers shared_bytes spill_bytes"
    assert sorted(rows[0]) == keys.split()


def kernel_of(*parameters: str) -> SimpleNamespace:
    """Make a kernel's signature: capitals are constexprs, a `*` means never specialized."""
    described = [
        SimpleNamespace(name=name.strip("*"), is_constexpr=name.isupper(), do_not_specialize=name.startswith("*"))
        for name in parameters
    ]
    return SimpleNamespace(params=described, arg_names=[parameter.name for parameter in described])


def types(name: str, value: object) -> str:
    return signature(Launch(kernel_of(name), (value,), {}, {}))[0][name.strip("*")]


def test_the_signature_has_types_constants_and_what_divides():
    kernel = kernel_of("query", "scale", "length", "SIZE")
    arguments = torch.empty(4, dtype=torch.bfloat16), 0.5, 48
    specialization = signature(Launch(kernel, arguments, {"SIZE": 64}, {}))
    assert specialization[0] == {"query": "*bf16", "scale": "fp32", "length": "i32", "SIZE": "constexpr"}
    assert specialization[1] == {(3,): 64}
    assert specialization[2] == {(0,): DIVISIBLE, (2,): DIVISIBLE}


def test_triton_makes_a_constant_of_one_unless_told_not_to():
    assert [types("heads", value) for value in (1, 2, 1.0)] == ["constexpr", "i32", "fp32"]
    assert types("*heads", 1) == "i32"


def test_a_number_or_address_that_16_does_not_divide_is_specialized_apart():
    base = torch.empty(64, dtype=torch.int32)

    def divides(name: str, value: object) -> bool:
        return (0,) in signature(Launch(kernel_of(name), (value,), {}, {}))[2]

    assert [divides("x", value) for value in (16, 24, 0)] == [True, False, True]
    assert not divides("*x", 16)
    assert [divides("x", base[first:]) for first in (0, 1, 3, 4)] == [True, False, False, True]


@pytest.fixture
def ptx(told) -> dict[str, str]:
    return dict(told["ptx"])


@pytest.mark.parametrize("name", ["rotary", "rotary, normed", "norm", "norm, added", "gate", "product"])
def test_no_product_in_bfloat16_loses_its_rounding_to_a_sum(ptx, name: str):
    """PyTorch rounds a product before it adds; `fma` does not."""
    assert re.search(r"\.bf16", ptx[name])
    assert not re.findall(r"fma\S*bf16\S*", ptx[name])


@pytest.mark.parametrize("name", ["rotary", "rotary, normed"])
def test_the_angle_s_products_are_rounded_one_by_one(ptx, name: str):
    assert not re.findall(r"fma\.rn\.f32", ptx[name])


def test_chained_kernels_wait_before_they_read_or_write(told):
    """All of a step's, from Hopper on; older chips have no such instruction. A product loads weights before."""
    rows = told["chained"]
    on_90 = [row for row in rows if row[0] == 90]
    assert len(rows) == 2 * len(on_90)
    assert len({name for _, name, *_ in on_90}) == 9
    for capability, name, asked, chained, ptx in rows:
        assert asked == chained == (capability == 90)
        before, *waits = ptx.split("griddepcontrol.wait")
        assert len(waits) == (bool(ptx) and chained)
        early = set(re.findall(r"\b(ld|st)\S*\.global", before)) if waits else set()
        assert early == ({"ld"} if waits and name == "_project_kernel" else set())
