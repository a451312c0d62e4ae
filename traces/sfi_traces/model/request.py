"""One request of a trace; what was recorded of it is read when it is asked for."""

from collections.abc import Collection, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sfi_core.errors import ConfigError, TraceError
from sfi_traces.model.selections import Selections
from sfi_traces.model.steps import Ints, Memory, Steps
from sfi_traces.model.trace import Place, Trace, of_request, rows_of
from sfi_traces.schema import TABLES

NO_TOKEN = -1  # a redacted token that is no trigger


class Request:
    """One request of a trace: its number, its rows of the table `steps` in order, and the same as arrays."""

    def __init__(self, trace: Trace, index: int, rows: pa.Table) -> None:
        """Take the request's rows of the table `steps`, at least one."""
        self.trace, self.index = trace, index
        self.rows = rows.sort_by("step")
        self.steps = Steps.of(self.rows)

    @classmethod
    def open(cls, trace: Trace, index: int) -> "Request":
        """Read the steps of a request that the trace has."""
        return cls(trace, index, of_request(step_table(trace), index))

    @cached_property
    def tokens(self) -> list[int]:
        """The generated ids; in a redacted trace the first trigger's id for any trigger."""
        ids = self.rows["token_id"]
        if ids.null_count == 0:
            return list(ids.to_pylist())
        first = next(iter(self.trace.manifest["trigger_token_ids"]), NO_TOKEN)
        return [first if trigger else NO_TOKEN for trigger in self.rows["trigger"].to_pylist()]

    @cached_property
    def memory(self) -> Memory:
        """Sizes of the memory at each step."""
        steps = self.steps
        config = self.trace.manifest["config"]
        return Memory.of(config, steps.slow, steps.context.astype(np.int64))

    @cached_property
    def compared(self) -> dict[int, dict[str, Any]]:
        """The row of the table `logits` of each step whose next token was compared with dense attention's."""
        rows = self.trace.rows("logits", TABLES["logits"].names, self.wanted())
        return {row["step"]: row for row in rows.to_pylist()}

    @cached_property
    def disagreeing(self) -> list[int]:
        """The steps where dense attention has another most probable token; lossless runs give its own."""
        steps = sorted(step for step, row in self.compared.items() if not row["argmax_agrees"])
        return [] if self.trace.lossless else steps

    @property
    def segments(self) -> tuple[int, Ints | None]:
        """Sink tokens, and the first of each step's recent ones; 0 and None if all steps were slow."""
        if self.steps.slow.all():
            return 0, None
        return self.memory.sink, self.memory.start_N

    @cached_property
    def prompt(self) -> list[str | None]:
        """The prompt's tokens by position; empty, or None for a token, where the trace has no text."""
        wanted = rows_of(self.index)
        rows = self.trace.rows("prompts", ["position", "token_text"], wanted).sort_by("position")
        return list(rows["token_text"].to_pylist())

    @cached_property
    def selections(self) -> Selections:
        """The selections, without their positions."""
        return Selections(self.trace, self.index, self.steps)

    def places(self, layer: int | None = None, head: int | None = None) -> list[Place]:
        """Return the layers and KV heads of full-attention layers; of one layer or KV head if given."""
        return [
            (one["layer"], own)
            for one in self.trace.manifest["model"]["layers"]
            if one["window"] is None and layer in (None, one["layer"])
            for own in range(one["heads"])
            if head in (None, own)
        ]

    def wanted(self, layer: int | None = None, head: int | None = None) -> pc.Expression:
        """Return a filter for the rows of the recorded steps; of one layer or KV head if given."""
        # a killed run may have written other rows of a step before the step
        return rows_of(self.index, layer, head) & (pc.field("step") <= int(self.steps.step[-1]))


def step_table(trace: Trace) -> pa.Table:
    """Read the table `steps`; raises `TraceError` if it has no row."""
    table = trace.table("steps")
    if not len(table):
        raise TraceError(f"trace {trace.path} has no finished step")
    return table


def check_known(name: str, values: Collection[int | None], known: Collection[int]) -> None:
    """Raise `ConfigError` for a value that a trace does not have; None is no value."""
    for value in values:
        if value is not None and value not in known:
            raise ConfigError(f"{name} must be one of {_ranges(known)}, got {value}")


def _ranges(values: Collection[int]) -> Sequence[int] | str:
    ordered = sorted(values)
    whole = len(ordered) > 1 and ordered == list(range(ordered[0], ordered[-1] + 1))
    return f"{ordered[0]} to {ordered[-1]}" if whole else ordered
