"""Whether a trace's steps are what Algorithm 1 makes of its token ids."""

from collections.abc import Iterator
from itertools import groupby

from sfi_core.settings.config import SfiConfig
from sfi_core.state.request import RequestState
from sfi_core.triggers.trigger import Trigger
from sfi_traces.read.reader import Trace

COLUMNS = [
    "request",
    "step",
    "token_id",
    "slow",
    "reason",
    "sentence",
    "trigger",
    "context_tokens",
]
SIGNALS = ("cosine", "entropy")  # reasons that the tokens do not give
OTHERS = "batch"  # slow because another request of the batch was


def broken_rules(trace: Trace) -> Iterator[str]:
    """Name the steps whose trigger, sentence or, under sfi, slowness is not what the tokens before give.

    Each step is judged by the steps before it as recorded, so that one wrong step is one line. A step that a
    query's cosine, an entropy or another request made slow is taken as it is.

    Args:
        trace: One with token ids, and each request's steps from 0 on without a gap.

    Raises:
        ConfigError: The trace has settings that this sfi does not know.
    """
    rules = trace.manifest["policy"] == "sfi"
    config = SfiConfig().replace(**trace.manifest["config"]) if rules else SfiConfig()
    trigger = Trigger(frozenset(trace.manifest["trigger_token_ids"]), config)
    rows = sorted(
        trace.table("steps", COLUMNS).to_pylist(), key=lambda row: (row["request"], row["step"])
    )
    for _, steps in groupby(rows, key=lambda row: row["request"]):
        state, sentence = RequestState(), 0
        for row in steps:
            state.prompt_tokens = state.prompt_tokens or row["context_tokens"]
            where = f"request {row['request']}, step {row['step']}"
            ends = row["token_id"] in trigger.token_ids
            if row["trigger"] is not ends:
                yield f"{where}: trigger must be {ends}, got {row['trigger']}"
            if row["sentence"] != sentence:
                yield f"{where}: sentence must be {sentence}, got {row['sentence']}"
            if rules:
                reason = trigger.reason(state)
                unknown = row["slow"] and (
                    row["reason"] == config.trigger_policy in SIGNALS
                    or (row["reason"] == OTHERS and not reason)
                )
                if not unknown and (bool(reason), reason) != (row["slow"], row["reason"]):
                    yield f"{where}: must be {_kind(reason)}, got {_kind(row['reason'], slow=row['slow'])}"
            state.begin(slow=row["slow"], reason=row["reason"], new_tokens=1)
            state.finish_step(row["token_id"])
            sentence += ends


def _kind(reason: str, *, slow: bool | None = None) -> str:
    if slow is None:
        slow = bool(reason)
    return f"slow ({reason})" if slow else "fast"
