"""A pytest plugin: a test that loses the GPU ends its xdist worker, and a new one runs the tests that follow.

After an illegal access every further call of the process fails, and so would every test of the worker.
"""

import os
import sys

import pytest

WORDS = ("CUDA error", "Triton Error [CUDA]")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """End the worker where the device is lost; xdist reports the test as crashed."""
    report = yield
    if report.failed and "PYTEST_XDIST_WORKER" in os.environ and is_lost(report.longreprtext):
        os.write(2, f"\n{item.nodeid} lost the device:\n{report.longreprtext}\n".encode())
        os._exit(1)
    return report


def is_lost(text: str) -> bool:
    """Say whether a failure's text is of CUDA, and CUDA answers no more."""
    torch = sys.modules.get("torch")  # who has not imported it has lost nothing
    if torch is None or not any(word in text for word in WORDS) or not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False
