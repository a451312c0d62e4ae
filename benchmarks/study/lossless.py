"""Part `lossless`: how many drafts verification keeps, and what lossless runs read, beside the policies alone."""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.study.bootstrap import estimates
from benchmarks.study.listed import FULL
from benchmarks.study.markdown import table
from benchmarks.study.observed import windows
from benchmarks.study.part import FAILURES, Part, Row
from benchmarks.study.records import Key, short
from benchmarks.study.texts import Place, window
from sfi_core.generation.generate import generate, read_prompt
from sfi_core.machine.text import first_line
from sfi_core.settings.engine import EngineOptions

LOSSLESS = EngineOptions(lossless=True)


class LosslessPart(Part):
    """The rows of a window: full attention's greedy answer, and a lossless run of each method."""

    name = "lossless"
    columns = ("model", "kind", "half", "text", "length", "tokens", "number", "method", "share")
    table = "lossless"

    def make(self, item: Place, pending: set[Key]) -> Iterator[Row]:
        """Read the prompt once, answer under full attention, then lossless by each pending method."""
        prompt = window(self.tokenizer, item, self.options.tokens).ids[: item.length]
        capacity = item.length + self.options.tokens
        how: dict[str, Any] = {"max_new_tokens": self.options.tokens, "stop_token_ids": ()}
        how["shared"] = read_prompt(self.model, self.tokenizer, [prompt], capacity=capacity, engine=LOSSLESS)
        dense = generate(self.model, self.tokenizer, [prompt], policy=FULL, **how).report.requests[0]
        full, *rows = self.rows(item)
        yield full | {"token_ids": dense.token_ids}
        for row, listed in zip(rows, self.methods, strict=True):
            if self.key(row) in pending:
                began, config = time.monotonic(), listed.method.config_for(item.length)
                how |= {"config": config, "policy": listed.method.policy}
                try:
                    result = generate(self.model, self.tokenizer, [prompt], engine=LOSSLESS, **how)
                except FAILURES as error:
                    yield row | {"error": first_line(error)}
                    continue
                report = result.report.requests[0]
                drafts = report.lossless
                assert drafts is not None, "a lossless run verifies"
                yield row | {
                    "same": report.token_ids == dense.token_ids, "verifications": drafts.verifications,
                    "drafted": drafts.drafted, "tested": drafts.tested, "accepted": drafts.accepted,
                    "passes": short(drafts.passes_per_token), "read": short(report.read_ratio),
                    "selecting": short(report.selection_ratio), "seconds": round(time.monotonic() - began, 1),
                }  # fmt: skip


def drafted(rows: Sequence[Mapping[str, Any]], methods: Sequence[tuple[str, str]]) -> str:
    """Write a row a method and share: equal answers, drafts kept, and reads."""
    lines = []
    for label, method in methods:
        for share in sorted({row["share"] for row in rows if row["method"] == method}):
            some = [row for row in rows if (row["method"], row["share"]) == (method, share) and "error" not in row]
            figures = estimates(windows(some, _figures))
            equal = f"{sum(row['same'] for row in some)} of {len(some)}"
            lines.append([label, f"{100 * share:g} %", equal, *(estimate.text() for estimate in figures)])
    heads = "accepted a verification", "kept of tested", "passes a token", "total reads, %"
    return table(["drafts of", "share", "equal answers", *heads], lines)


def _figures(row: Mapping[str, Any]) -> list[float]:
    accepted = row["accepted"]
    reads = 100 * (row["read"] + row["selecting"])
    return [accepted / row["verifications"], accepted / max(1, row["tested"]), row["passes"], reads]
