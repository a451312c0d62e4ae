"""Threads of a compiled step: tickets for pieces of work, and barriers."""

from platform import machine
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from sfi_kernels.loops.vectors import inner

PATIENCE = 2000  # looks at a barrier until a thread lets others run


@intrinsic
def _add_one(context: Any, counters: Any, place: Any) -> Any:
    """Add 1 to a counter at once for all threads; return what it was."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, args[0])
        pointer = builder.gep(builder.bitcast(array.data, ir.IntType(64).as_pointer()), [args[1]])
        return builder.atomic_rmw("add", pointer, ir.Constant(ir.IntType(64), 1), "seq_cst")

    return types.int64(counters, types.int64), generate


@intrinsic
def _look(context: Any, counters: Any) -> Any:
    """Return the first counter as other threads have left it."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, args[0])
        return builder.load_atomic(builder.bitcast(array.data, ir.IntType(64).as_pointer()), "acquire", 8)

    return types.int64(counters), generate


@intrinsic
def _pause(context: Any) -> Any:
    """Leave the core's resources to its other thread for a moment."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if machine() in ("x86_64", "AMD64"):
            kind = ir.FunctionType(ir.VoidType(), [])
            builder.call(builder.module.declare_intrinsic("llvm.x86.sse2.pause", fnty=kind), [])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def _yield(context: Any) -> Any:
    """Let another thread have the core."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(32), [])
        builder.call(cgutils.get_or_insert_function(builder.module, kind, "sched_yield"), [])
        return context.get_dummy_value()

    return types.void(), generate


@inner
def meet(sync, threads, met):
    # wait until all threads have come; returns how many arrivals there are then
    met += threads
    if threads > 1:
        _add_one(sync, np.int64(0))
        looks = 0
        while _look(sync) < met:
            _pause()
            looks += 1
            if looks > PATIENCE:
                _yield()
    return met


@inner
def take(sync, ticket, threads, turn):
    # the number of the next piece; without other threads that is the turn
    return _add_one(sync, ticket) if threads > 1 else turn
