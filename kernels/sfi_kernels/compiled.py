"""Functions that numba compiles for a CPU: whether it can here, what they take, and who hears of a compilation.

numba is an extra (`cpu`). Nothing imports it before an op asks `why_not`.
"""

import logging
import os
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, suppress
from contextvars import ContextVar, copy_context
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np
import torch

from sfi_kernels.launch import setting

# sums may change their order; unlike with `fastmath=True`, infinity and NaN keep their meaning
MATH = {"contract", "reassoc", "nsz", "arcp", "afn"}
OPTIONS: dict[str, Any] = {"fastmath": MATH, "error_model": "numpy", "nogil": True}

# what reading a file of compiled code raises that another user locked, or that was cut off
UNREADABLE = (OSError, EOFError, UnpicklingError)

CORES = os.cpu_count() or 1
WORTH = 100  # microseconds of work that another thread pays for
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # as `loops` numbers them
NO_FLOATS, NO_HALVES = np.empty((0, 0), np.float32), np.empty((0, 0), np.uint16)
NO_PAGES = NO_FLOATS, NO_FLOATS, NO_HALVES, NO_HALVES, 1

logger = logging.getLogger(__name__)
_heard: ContextVar[Callable[[], None] | None] = ContextVar("heard", default=None)


class _Pause:
    """When the compilation under way began, None without one, and the seconds of all before it: one value."""

    value: tuple[float | None, float] = (None, 0.0)


def compiling_seconds() -> float:
    """Return the seconds that numba has compiled in this process, up to the last compilation's end."""
    return _Pause.value[1]


def clock() -> float:
    """Return `time.perf_counter()` without the seconds that numba compiled: it stands still meanwhile."""
    since, before = _Pause.value
    return (time.perf_counter() if since is None else since) - before


class Failure:
    """What came of the first function that numba could not compile, "" without one."""

    why = ""


def why_not() -> str:
    """Return why numba compiles nothing in this process, "" if it does."""
    return Failure.why or missing()


@cache
def missing() -> str:
    """Return what numba lacks here, "" if nothing; whether it compiles, the first function shows."""
    try:
        import numba  # noqa: PLC0415 - takes a quarter of a second
        from llvmlite.binding import ffi  # noqa: PLC0415
        from numba.core import event  # noqa: PLC0415
    except ModuleNotFoundError as error:
        return "not installed" if error.name == "numba" else f"not importable: {error}"
    except (ImportError, AttributeError, OSError, SystemError) as error:  # another numpy or Python
        return f"not importable: {error}"
    if numba.config.DISABLE_JIT:
        return "NUMBA_DISABLE_JIT is set"
    event.register("numba:compile", _listener(event.Listener))
    with suppress(AttributeError):
        # this library finds a C function of any name, also a `__dict__`; vLLM 0.32 looks into those of everything that
        # is imported before an engine starts, and would fail
        ffi.lib._fntab.setdefault("__dict__", {})  # noqa: SLF001
    return ""


def entry(function: Callable[..., None]) -> Any:
    """Compile a function at its first call, and keep its code on disk where that can be written and read.

    Where that fails, `why_not` says so from then on, and the log.
    """
    import numba  # noqa: PLC0415

    compiled = _kept(numba.njit(**OPTIONS)(function), function)
    compile_it = compiled.compile

    def compile_or_say(signature: Any) -> Any:
        try:
            return compile_it(signature)
        except Exception as error:
            if not Failure.why:
                told = re.sub(r"\x1b\[[0-9;]*m", "", str(error))  # colors
                Failure.why = f"numba does not compile: {' '.join(told.split())[:200] or type(error).__name__}"
                logger.warning("sfi goes on in PyTorch's operators, slower than compiled loops: %s", Failure.why)
            raise

    compiled.compile = compile_or_say
    return compiled


def by_address(function: Callable[[int], None]) -> Any:
    """Compile a function when its `address` is first asked for; `loops.views.call` calls it there.

    It takes the address of its arguments, int64. What a function calls otherwise, numba compiles anew for each caller.
    """
    from numba.core import event, types  # noqa: PLC0415
    from numba.core.ccallback import CFunc  # noqa: PLC0415

    class Callee(CFunc):
        @property
        def address(self: Any) -> int:
            if self._wrapper_address is None:
                self.compile()
            return int(self._wrapper_address)

        def _compile_uncached(self: Any) -> Any:
            with event.trigger_event("numba:compile", data={}):
                return vars(CFunc)["_compile_uncached"](self)

    return _kept(Callee(function, ((types.int64,), types.void), {}, {**OPTIONS}), function)


def _kept(compiled: Any, function: Callable[..., None]) -> Any:
    # keep code on disk. `cache=True` sets numba's own files, which end the run where the folder is full, locked or
    # damaged, and which see changes of the function's own file alone
    from numba.core.caching import FunctionCache  # noqa: PLC0415

    class Files(FunctionCache):  # type: ignore[misc]
        def load_overload(self, *names: Any) -> Any:
            try:
                return super().load_overload(*names)
            except UNREADABLE:
                return None

        def save_overload(self, *code: Any) -> None:
            try:
                super().save_overload(*code)
            except UNREADABLE:
                with suppress(OSError):
                    self.flush()  # its index may name a file of older code

    with suppress(RuntimeError):  # no folder can be written
        compiled._cache = Files(function)  # noqa: SLF001
        compiled._cache._cache_file._source_stamp = _source_stamp()  # noqa: SLF001
    return compiled


@cache
def _source_stamp() -> tuple[float, int]:
    # of all that a function may call, and of the constants that its code holds
    files = [path.stat() for path in Path(__file__).parent.rglob("*.py")]
    return max(file.st_mtime for file in files), sum(file.st_size for file in files)


def by_heads(run: Callable[[int, int], None], heads: int, microseconds: float) -> None:
    """Run `run(first, stop)` for parts of the heads, on as many of PyTorch's threads as the work is worth."""
    parts = min(torch.get_num_threads(), heads, int(microseconds / WORTH))
    if parts < 2:  # noqa: PLR2004 - no other thread
        run(0, heads)
        return
    first, *others = pairwise(heads * part // parts for part in range(parts + 1))
    running = [pool().submit(copy_context().run, partial(run, *part)) for part in others]
    try:
        run(*first)
    finally:
        wait(running)
    for job in running:
        job.result()


@cache
def pool() -> ThreadPoolExecutor:
    """Return the threads that compiled loops share work with."""
    return ThreadPoolExecutor(CORES, "sfi", _leave_core)


def _leave_core() -> None:
    # a thread begins on its maker's core, where a host may have bound each of PyTorch's threads to one, as vLLM does
    with suppress(AttributeError, OSError):  # no Linux
        threads = [int(task.name) for task in Path("/proc/self/task").iterdir()]
        os.sched_setaffinity(0, set().union(*map(os.sched_getaffinity, threads)))


def telling(heard: Callable[[], None]) -> AbstractContextManager[object]:
    """Call `heard` before the first compilation inside; a `telling` around this one keeps its own."""
    return setting(_heard, _heard.get() or heard)


def _listener(base: type[Any]) -> Any:
    # numba compiles in one thread at a time; what a function calls is compiled within it
    announced, depth = False, 0

    def on_start(*_: Any) -> None:
        nonlocal announced, depth
        depth += 1
        if depth == 1:
            _Pause.value = time.perf_counter(), compiling_seconds()
        heard = _heard.get()
        if heard is not None and not announced:
            announced = True
            heard()

    def on_end(*_: Any) -> None:
        nonlocal depth
        depth -= 1
        since, before = _Pause.value
        if depth == 0 and since is not None:
            _Pause.value = None, before + time.perf_counter() - since

    return type("Listener", (base,), {"on_start": on_start, "on_end": on_end})()


def plain(tensor: torch.Tensor) -> Any:
    """Return a tensor as a contiguous float32 array, without a copy where it lies so."""
    if tensor.dtype is not torch.float32 or tensor.requires_grad or not tensor.is_contiguous():
        tensor = tensor.detach().float().contiguous()
    return tensor.numpy()


def fastest(backend: str, device: torch.device, *pages: torch.Tensor) -> str:
    """Return "numba" in place of "torch" on a CPU where numba compiles and its loops read `pages`; else `backend`."""
    compiles = backend == "torch" and device.type == "cpu" and not why_not()
    return "numba" if compiles and readable(*pages) else backend


def readable(*pages: torch.Tensor) -> bool:
    """Say whether the loops read pages [P, H, N, D] as they lie: rows of a multiple of 8 numbers, at one distance."""
    return all(
        page.device.type == "cpu" and page.dtype in KINDS and page.shape[-1] % 8 == 0 and _pitch(page) > 0
        for page in pages
    )


def _pitch(pages_PHND: torch.Tensor) -> int:
    # the distance of rows in rows: 1 of contiguous pages, 2 where a key and a value lie side by side; 0 for no such
    if pages_PHND.is_contiguous():
        return 1
    (_, H, N, D), (page, head, token, column) = pages_PHND.shape, pages_PHND.stride()
    pitch, rest = divmod(token, D)
    return pitch if (page, head, column, rest) == (H * head, N * token, 1, 0) else 0


def check_readable(*pages: torch.Tensor) -> None:
    """Raise `ValueError` unless pages are `readable`."""
    if not readable(*pages):
        raise ValueError(
            "pages must have rows at one distance, be on the CPU, of a multiple of 8 numbers a row, and float32, "
            "bfloat16 or float16"
        )


def pages_of(key_PHND: torch.Tensor, value_PHNE: torch.Tensor) -> tuple[Any, ...]:
    """Return pages as rows of keys and of values, and their pitch: of float32, then of uint16, two of which are empty.

    Raise `ValueError` unless all rows are at one distance.
    """
    pitch = _pitch(key_PHND)
    if not 0 < pitch == _pitch(value_PHNE):
        raise ValueError("keys and values must have rows at one distance")
    key_XD, value_XE = (_rows(pages, pitch) for pages in (key_PHND, value_PHNE))
    if key_XD.dtype == torch.float32:
        return key_XD.numpy(), value_XE.numpy(), NO_HALVES, NO_HALVES, pitch
    return NO_FLOATS, NO_FLOATS, key_XD.view(torch.uint16).numpy(), value_XE.view(torch.uint16).numpy(), pitch


def _rows(pages_PHND: torch.Tensor, pitch: int) -> torch.Tensor:
    # as one array, in which every row of pages is at `pitch` times its number
    P, H, N, D = pages_PHND.shape
    return pages_PHND.detach().as_strided((max(0, P * H * N * pitch - pitch + 1), D), (D, 1))
