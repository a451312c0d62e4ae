"""Two traces of one model and one prompt beside each other."""

from typing import Any

from sfi_core.errors import TraceError
from sfi_traces.reader import Trace
from sfi_traces.summary import Scope, summarize
from sfi_traces.summary.facts import flat_settings
from sfi_traces.summary.scope import spread

TEXT_BEFORE = 12  # tokens shown before the first difference
FACTS = ("policy", "preset", "seed", "backend", "device", "sfi_version", "trigger_token_ids")
MODEL = ("name", "architecture", "query_heads", "vocabulary")
LAYER = ("layer", "heads", "key_width", "value_width", "window")


def compare(first: Trace, second: Trace, request: int | None = None) -> dict[str, Any]:
    """Compare two traces, or one request of both.

    Supports and selections are compared at equal steps, up to the first step whose token differs: there, the
    tokens before are still the same. In a redacted trace that step is unknown, and nothing of this is.

    Returns:
        Numbers of each trace under `a` and `b`; what needs both beside them.

    Raises:
        TraceError: They are of different models or prompts, or one is damaged.
        ConfigError: One has no such request.
    """
    _check_model(first, second)
    scope, other = Scope.of(first, request), Scope.of(second, request)
    requests = _check_prompts(first, second, request)
    redacted = bool(first.manifest.get("redacted") or second.manifest.get("redacted"))
    steps = [_steps(one) for one in (scope, other)]
    tokens = [_compare_steps(number, steps[0][number], steps[1][number], redacted=redacted) for number in requests]
    ...
