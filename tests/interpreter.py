"""Triton's interpreter, made as fast as its own rules allow."""

import inspect
from collections.abc import Callable
from typing import Any

from triton.language import core
from triton.runtime import interpreter


def patch_the_language_once() -> None:
    """Skip a patch of Triton's language that is in place: half of the interpreter's time.

    A launch patches the language; every helper that a kernel calls patches it again, to the same end.
    """
    patch: Callable[..., Any] = interpreter._patch_lang  # noqa: SLF001

    def patch_unless_done(function: Callable[..., Any]) -> Any:
        modules = [module for module in function.__globals__.values() if inspect.ismodule(module)]
        languages = [module for module in modules if module in (interpreter.tl, core)]
        done = languages and not any(core.is_builtin(module.arange) for module in languages)
        return None if done else patch(function)

    interpreter._patch_lang = patch_unless_done  # noqa: SLF001
