"""Programmatic dependent launch: a kernel is launched while the one before it ends, and waits for it here.

A chained kernel waits before anything else, and its programs all do: then it sees what every kernel before it wrote,
as those waited too. It lets the next one come at once, which costs that one's programs nothing but a wait.
"""

import inspect

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# Triton 3.4 has both, with a parameter that its own compiler does not give
AVAILABLE = "_semantic" in inspect.signature(gdc_wait).parameters


@triton.jit
def await_previous(CHAINED: tl.constexpr):
    """Wait for the kernel before this one, if they are chained, and let the next one be launched."""
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
