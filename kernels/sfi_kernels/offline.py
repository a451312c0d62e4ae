"""Compile without a GPU every kernel specialization that a model can need: registers, spills, shared memory.

The ops' launches are recorded. Triton's interpreter must be off: the process chooses it when it imports the kernels.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sfi_kernels.code_scan import BatchCodes, CodeBasis, bits_of, code_scan, code_tokens, encode_keys
from sfi_kernels.decode_attention import resident_programs, split_plan, work_items
from sfi_kernels.decode_attention.triton import decode_attention
from sfi_kernels.dense_attention import dense_attention, window_logits
from sfi_kernels.fused import Appending, add_rms_norm, rms_norm, rotary, silu_mul
from sfi_kernels.launch import Launch, Target, counting, name_of, recording
from sfi_kernels.pack import append, pack, recall
from sfi_kernels.page_scan import LastStep, PageSummaries, page_scan
from sfi_kernels.pages import HeadPages, Ring
from sfi_kernels.partial_attention import PseudoToken
from sfi_kernels.products import MOST_ROWS, project
from sfi_kernels.selector import selector
from sfi_kernels.step_descriptor import FAST, SLOW, NewRows, StepDescriptor, StepRequest, describe_step
from sfi_kernels.top_k import top_k

WARP = 32
# bytes of shared memory that one program may have (CUDA programming guide, compute capabilities)
SHARED_LIMIT = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
TYPES = {
    torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.float64: "*fp64",
    torch.uint8: "*u8", torch.uint16: "*u16", torch.int32: "*i32", torch.int64: "*i64", torch.bool: "*i1",
}  # fmt: skip
ALIGNMENT = 16  # bytes of a pointer, or what divides a number
DIVISIBLE = [["tt.divisibility", ALIGNMENT]]
# (head dimension, width of the values, query heads per KV head, soft cap, learned sinks); groups of 1 to 16
# query heads share a padded tile, MLA expands to 192 and 128
HEADS = (
    (64, 64, 8, False, True),
    (96, 96, 1, False, False),
    (128, 128, 4, False, False),
    (128, 128, 16, False, False),
    (128, 128, 4, True, False),
    (192, 128, 1, False, False),
    (256, 256, 2, True, False),
)
# the heads that are compiled in a type: bfloat16 is what models are served in; float32 takes the most registers
# and memory, float16 as many as bfloat16
COVERED = {"bf16": HEADS, "fp16": HEADS[::5], "fp32": HEADS[::2]}
# queries of a request that verifies a draft: with 4 query heads they fill 32, 64 and most of 128 rows
VERIFIED = (8, 16, 17)
WIDTHS = (128, 2560, 16384)  # that are normed: a head, a small model, the widest that the kernel takes
H, PAGE, PAGES, S, T, W = 8, 64, 4, 68, 200, 512
SELECTOR: Any = {
    "alpha": 0.5, "gamma": 0.5, "beta": 0.5, "power": 1.8, "eta": 0.4, "lambda_clip": 0.02,
    "alpha_soft": 0.5, "radius": 16, "alpha_cross": 0.35, "temperature": 2.0,
}  # fmt: skip
SELECTIONS = ((1, 1, 1, 0), (8, 4, 1, 0), (8, 4, 16, 0), (8, 4, 16, 10))  # KV heads, group, window, span
NUMBERS: Any = {"length": T, "recent_start": 100, "packed": S, "sink": 4}  # of a request
PROCESSORS = 132  # of the architectures' large chips; plans depend on them, compiled code does not


def compile_launch(label: str, launch: Launch, capability: int) -> dict[str, Any]:
    """Compile a recorded launch for a compute capability times ten; `label` goes into the kernel's name.

    Registers and spills are a thread's. `async_buffers` are the tiles of the largest operand that asynchronous copies
    fill, 0 without a pipeline; `over_limit` says whether the architecture has less shared memory.
    """
    types, constants, attributes = signature(launch)
    source = ASTSource(fn=launch.kernel, signature=types, constexprs=constants, attrs=attributes)
    built = triton.compile(source, target=GPUTarget("cuda", capability, WARP), options=launch.options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        tool = next(Path(triton.__file__).parent.rglob("cuobjdump"))
        command = [str(tool), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout  # noqa: S603
    resources = dict(re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text))
    # a pipelined operand is one allocation with the number of buffers as its first size
    buffers = re.findall(r"ttg\.local_alloc : \(\) -> !ttg\.memdesc<(\d+)x\d+x\d+x", built.asm["ttgir"])
    shared = int(built.metadata.shared)
    return {
        "kernel": f"{name_of(launch.kernel)} [{label}]",
        "arch": f"sm_{capability}",
        "registers": int(resources["REG"]),
        "spill_bytes": int(resources["STACK"]) + int(resources["LOCAL"]),
        "shared_bytes": shared,
        "async_buffers": max(map(int, buffers), default=0),
        "over_limit": shared > SHARED_LIMIT[capability],
    }


def specializations(capability: int) -> Iterator[tuple[str, Launch]]:
    """Yield every specialization for a compute capability times ten, with a name."""
    seen: set[str] = set()
    names: Counter[str] = Counter()
    for label, run in _runs():
        with recording(Target(capability, PROCESSORS)) as record:
            run()
        for launch in record.launches:
            key = f"{launch.kernel.__name__} {signature(launch)} {launch.options}"
            if key not in seen:
                seen.add(key)
                name = f"{name_of(launch.kernel)} {label}"
                names[name] += 1
                yield label + (f", {names[name]}" if names[name] > 1 else ""), launch


def signature(launch: Launch) -> tuple[dict[str, str], dict[Any, Any], dict[Any, Any]]:
    """Return Triton's key of a launch: types by name, constants and attributes by place."""
    types: dict[str, str] = {}
    constants, attributes = {}, {}
    values = dict(zip(launch.kernel.arg_names, launch.arguments, strict=False)) | launch.constants
    for place, parameter in enumerate(launch.kernel.params):
        name, value = parameter.name, values[parameter.name]
        number = value.data_ptr() if isinstance(value, torch.Tensor) else value
        specialize = not parameter.do_not_specialize and isinstance(number, int)
        if parameter.is_constexpr or (specialize and number == 1):
            types[name], constants[place,] = "constexpr", value
            continue
        if isinstance(value, torch.Tensor):
            types[name] = TYPES[value.dtype]
        else:
            types[name] = "i32" if isinstance(value, int) else "fp32"
        if specialize and number % ALIGNMENT == 0:
            attributes[place,] = DIVISIBLE
    return types, constants, attributes


def _runs() -> Iterator[tuple[str, Callable[[], object]]]:
    step = describe_step([StepRequest(mode=FAST, **NUMBERS)] * 2, work_items(2, H, 264), torch.device("cpu"))
    yield "any", partial(split_plan.triton, step, H, 264)
    for name, dtype in DTYPES.items():
        for heads in COVERED[name]:
            yield from _attention_runs(name, dtype, *heads)
        for D in (64, 96, 128, 256) if name == "bf16" else (64, 256):
            case = Case(dtype, D, D, 4, None, sinks=False)
            yield f"{name}, D={D}", case.move
            yield f"{name}, D={D}, heads", partial(case.move, heads=True)
            yield f"{name}, D={D}", partial(_rotate, dtype, D, normed=False)
            yield f"{name}, D={D}, normed", partial(_rotate, dtype, D, normed=True)
        for F in WIDTHS:
            hidden, weight = torch.empty(2, F, dtype=dtype), torch.empty(F, dtype=dtype)
            yield f"{name}, F={F}", partial(rms_norm.triton, hidden, weight, 1e-6)
            yield f"{name}, F={F}, added", partial(add_rms_norm.triton, hidden, hidden, weight, 1e-6)
        gate = torch.empty(2, 1024, dtype=dtype)
        yield name, partial(silu_mul.triton, gate, gate)
        for rows in (1, MOST_ROWS):
            for kind, run in _products(dtype, rows).items():
                yield f"{name}, M={rows}, {kind}", run
    chain = Case(torch.bfloat16, 128, 128, 4, None, sinks=False)
    yield "bf16, chained", partial(_chained, chain)
    rival = Case(torch.bfloat16, 128, 128, 4, None, sinks=False)
    yield "bf16, D=128, G=4, paper-like", partial(rival.decode, block_n=16)
    yield "bf16, D=128, G=4, gather", partial(rival.decode, position_BHS=rival.position)
    for count, group, window, span in SELECTIONS:
        label = f"H={count}, G={group}, W={window}, span={span}"
        yield label, partial(_select, count, group, window, span)


def _attention_runs(
    name: str, dtype: torch.dtype, D: int, E: int, G: int, capped: bool, sinks: bool
) -> Iterator[tuple[str, Callable[[], object]]]:
    label = f"{name}, D={D if D == E else f'{D}/{E}'}, G={G}" + ", soft cap" * capped + ", sinks" * sinks
    operands = dtype, D, E, G, 30.0 if capped else None, sinks
    case = Case(*operands)
    in_place = {"pseudo": case.parts, "position_BHS": case.position}
    kinds: dict[str, dict[str, Any]] = {
        "fast": {}, "mixed": {"slow": True}, "heads, fast": {"heads": True},
        "heads, mixed": {"slow": True, "heads": True}, "pseudo, fast": {"pseudo": case.pseudo},
        "in place, fast": in_place, "in place, mixed": in_place | {"slow": True},
    }  # fmt: skip
    if dtype == torch.bfloat16:
        kinds |= {
            "ring, fast": {"ring": case.ring}, "ring, mixed": {"ring": case.ring, "slow": True},
            "ring, pseudo": {"ring": case.ring, "pseudo": case.parts},
            "ring, heads": {"ring": case.homes, "slow": True, "heads": True},
        }  # fmt: skip
    for kind, options in kinds.items():
        yield f"{label}, {kind}", partial(case.decode, **options)
    yield label, case.choose
    yield f"{name}, D={D}, G={G}", case.choose_pages
    yield f"{name}, D={D}, G={G}, ahead", partial(case.choose_pages, ahead=True)
    yield f"{name}, D={D}, G={G}, early", partial(case.choose_pages, early=True)
    for queries in VERIFIED:
        yield f"{label}, {queries} queries", partial(case.decode, slow=True, queries=queries)
    yield label, case.prompt
    yield f"{name}, D={D}, G={G}", case.code
    if dtype == torch.bfloat16:  # what models are served in
        label, halves, queries = f"{label}, halves", Case(*operands, halves=True), VERIFIED[1]
        for kind in ("fast", "mixed", "heads, mixed"):
            yield f"{label}, {kind}", partial(halves.decode, **kinds[kind])
        yield f"{label}, {queries} queries", partial(halves.decode, slow=True, queries=queries)
        yield label, halves.prompt
        yield label, halves.move


class Case:
    """Small operands of one kind, never read."""

    def __init__(
        self, dtype: torch.dtype, D: int, E: int, G: int, soft_cap: float | None, sinks: bool, halves: bool = False
    ) -> None:
        self.query = torch.empty(2, H, G, W, D, dtype=dtype)
        self.key, self.value = (torch.empty(2 * PAGES, H, PAGE, n, dtype=dtype) for n in (D, E))
        if halves:  # a token's key and value side by side, as in vLLM
            both = torch.empty(2 * PAGES, H, PAGE, D + E, dtype=dtype)
            self.key, self.value = both[..., :D], both[..., D:]
        self.packed_key, self.packed_value = (torch.empty(2, H, S, n, dtype=dtype) for n in (D, E))
        self.position = torch.empty(2, H, S, dtype=torch.int32)
        self.length_BH = torch.empty(2, H, dtype=torch.int32)
        self.table = torch.empty(2, PAGES, dtype=torch.int32)
        self.length = torch.full((2,), T, dtype=torch.int32)
        self.options: Any = {"scale": 1.0, "soft_cap": soft_cap}
        self.sink = torch.empty(H, G) if sinks else None
        self.pseudo = PseudoToken(torch.empty(2, H, G), torch.empty(2, H, E))
        self.parts = PseudoToken(torch.empty(2, H, G, 2), torch.empty(2, H, E))
        self.norm = torch.empty(2 * PAGES, H, PAGE)
        self.ring = Ring(self.key, self.value, self.table)
        kept = HeadPages(self.length_BH[0], self.key[:, :2].contiguous(), self.value[:, :2].contiguous())
        self.homes = self.ring._replace(heads=kept)

    def decode(self, *, slow: bool = False, queries: int = 1, heads: bool = False, **variant: Any) -> None:
        """Plan and attend with several queries of the first request, or a variant of the benchmark."""
        places = resident_programs(self.query.device)
        requests = [
            StepRequest(mode=SLOW if slow else FAST, **NUMBERS, mixed=heads, count=queries),
            StepRequest(mode=FAST, **NUMBERS, mixed=heads),
        ]
        step = describe_step(requests, work_items(2, H, places), self.query.device)
        split_plan.triton(step, H, places)
        decode_attention(
            self.query[:, :, :, :queries], self.packed_key, self.packed_value, self.length_BH, self.key,
            self.value, self.table, step, **self.options, sink_HG=self.sink, evidence=slow,
            dense_BH=self.length_BH if heads else None, **variant,
        )  # fmt: skip

    def prompt(self) -> None:
        """Attend with a prompt, and compute the logits of its last queries."""
        dense_attention.triton(
            self.query, self.key, self.value, self.table, self.length, **self.options, sink_HG=self.sink
        )
        window_logits.triton(self.query[:, :, :, -16:], self.key, self.table, self.length, **self.options, longest=T)

    def choose(self) -> None:
        """Code new keys, appended first or not, and choose for a batch by the codes of all keys."""
        codes = BatchCodes.empty(2, self.query.shape[2], self.key, self.value, PAGES * PAGE)
        step = describe_step([StepRequest(mode=FAST, **NUMBERS)] * 2, 0, self.query.device)
        new = NewRows(self.key[:2, :, :1], self.value[:2, :, :1], self.value, self.norm)
        for described in (step, replace(step, new=new)):
            code_tokens.triton(self.key, self.table, described, codes)
            self._scan(described, codes)
        for described in (step, replace(step, new=new)):
            code_tokens.triton(self.key, self.table, described, codes, self.query[:, :, :, 0], self.parts)
        self._scan(step, codes, early=True)

    def _scan(self, step: StepDescriptor, codes: BatchCodes, *, early: bool = False) -> None:
        code_scan.triton(
            self.query[:, :, :, 0], self.key, self.value, self.table, step, codes, self.position, self.length_BH,
            budget=S - 4, scale=1.0, rest=0.5, early=early,
        )  # fmt: skip

    def choose_pages(self, *, ahead: bool = False, early: bool = False) -> None:
        """Choose pages for a batch by the bounds of their keys, for this step, `early` or not, or for the next."""
        (_, _, G, _, D), page, budget = self.query.shape, 32, S - 4
        step = describe_step([StepRequest(mode=FAST, **NUMBERS)] * 2, 0, self.query.device)
        pages = PageSummaries(*self.key.new_empty(2, 2, H, PAGES * PAGE // page, D))
        last = LastStep(self.key.new_empty(2, 2, H, G, D), self.position.new_empty(2, 2, H, budget))
        page_scan.triton(
            self.query[:, :, :, 0], self.key, self.table, step, pages, self.position, self.length_BH,
            last if ahead else None, page=page, budget=budget, grouped=early, early=early,
        )  # fmt: skip

    def code(self) -> None:
        """Code the keys of a piece of a prompt."""
        D = self.query.shape[-1]
        projection = torch.empty(H, D, len(bits_of(D)))
        encode_keys.triton(self.key[0], CodeBasis(torch.empty(H, D), projection, projection))

    def move(self, *, heads: bool = False) -> None:
        """Append a token and a piece of a prompt, pack, and recall, the last two for some heads or all."""
        tiered = self.key.dtype == torch.bfloat16 and self.key.is_contiguous()
        for ring, tokens in product((None, self.ring, self.homes) if tiered else (None,), (1, PAGE)):
            append.triton(
                self.key[:2, :, :tokens], self.value[:2, :, :tokens], self.length, self.length,
                self.key, self.value, self.norm, self.table, ring=ring,
            )  # fmt: skip
        index = torch.empty(2, H, S - 4, dtype=torch.int32)
        segment = self.packed_key, self.packed_value, self.position, self.length_BH
        marks = self.length_BH if heads else None
        refreshed = self.table, self.length, index, self.length
        pack.triton(self.key, self.value, *refreshed, *segment, heads_RH=marks)
        recall.triton(self.key, self.value, *refreshed, *segment, *segment, self.length_BH, heads_RH=marks)


def _rotate(dtype: torch.dtype, D: int, *, normed: bool) -> None:
    """Rotate, and rotate and append."""
    query, key = (torch.empty(2, 1, heads, D, dtype=dtype) for heads in (4 * H, H))
    angle = torch.empty(2, 1, D, dtype=dtype)
    weight = angle[0, 0] if normed else None
    case = Case(dtype, D, D, 4, None, sinks=False)
    into = Appending(key, case.length, case.length, case.key, case.value, case.norm, case.table)
    for appending in (None, into):
        rotary.triton(query, key, angle, angle, weight, weight, 1e-6, appending)


def _products(dtype: torch.dtype, M: int) -> dict[str, Callable[[], object]]:
    """Return the products of a layer of Qwen3-4B, with the bias that Qwen2 has, for M rows."""

    def run(N: int, K: int, **around: Any) -> Callable[[], object]:
        return partial(project.triton, torch.empty(M, K, dtype=dtype), torch.empty(N, K, dtype=dtype), **around)

    norm: Any = {"norm_K": torch.empty(2560, dtype=dtype), "eps": 1e-6}
    residual = torch.empty(M, 2560, dtype=dtype)
    return {
        "q, k, v": run(6144, 2560, bias_N=torch.empty(6144, dtype=dtype), **norm),
        "output": run(2560, 4096, residual_XN=residual),
        "gate, up": run(19456, 2560, gated=True, **norm),
        "down": run(2560, 9728, residual_XN=residual),
    }


def _chained(case: Case) -> None:
    """Run what a layer of a step of Qwen3-4B launches, chained where the architecture can."""
    hidden, weight = torch.empty(2, 2560, dtype=torch.bfloat16), torch.empty(2560, dtype=torch.bfloat16)
    with counting(Counter(), chained=True):
        add_rms_norm.triton(hidden, hidden, weight, 1e-6)
        _rotate(torch.bfloat16, 128, normed=True)
        case.choose()
        case.decode()
        silu_mul.triton(hidden, hidden)
        for run in _products(torch.bfloat16, 1).values():
            run()


def _select(heads: int, group: int, window: int, span: int) -> None:
    logits, norm = torch.empty(2, heads, group, window, T), torch.empty(2, heads, T)
    score, _ = selector.triton(logits, norm, torch.empty(2, T, dtype=torch.bool), **SELECTOR, span=span)
    top_k.triton(score, 64)


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
