"""Part `health`: which broken selections the rules of selection health see within 100 steps."""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

from benchmarks.study.broken import BROKEN, packed
from benchmarks.study.markdown import table
from benchmarks.study.part import FAILURES, Part, Row
from benchmarks.study.records import Key, short
from benchmarks.study.texts import Place, window
from sfi_core.engine import select
from sfi_core.generation.generate import generate
from sfi_core.machine.text import first_line
from sfi_core.settings.config import SfiConfig
from sfi_core.settings.engine import AuditConfig
from sfi_traces.health import judge
from sfi_traces.model.request import Request
from sfi_traces.model.trace import Trace
from sfi_traces.record.parquet import ParquetObserver

SOUND = ("sfi", "codescan")
SHARE = 4  # a fast step may read the prompt's length / 4


class HealthPart(Part):
    """The rows of a window: one for each broken selection, and for the sound policies."""

    name = "health"
    columns = ("model", "kind", "half", "text", "length", "tokens", "number", "selection")

    def rows(self, item: Place) -> list[Row]:
        """See `Part`."""
        where = self.where(item)
        return [{**where, "selection": name} for name in (*SOUND, *BROKEN)]

    def make(self, item: Place, pending: set[Key]) -> Iterator[Row]:
        """Decode two windows of a kind under each pending policy, every step audited, and judge the second."""
        places = item, Place(item.number + 1, item.kind, item.half, item.length)
        prompts = [window(self.tokenizer, place, self.options.tokens).ids[: item.length] for place in places]
        for row in self.rows(item):
            if self.key(row) in pending:
                yield row | self._judged(row["selection"], prompts)

    def _judged(self, name: str, prompts: list[tuple[int, ...]]) -> Row:
        codes = "code" in name
        recent, sink = (16 if codes else 128), 4
        config = SfiConfig(budget=len(prompts[0]) // SHARE - recent - sink, recent=recent)
        noted = packed(select.note)
        with TemporaryDirectory() as folder:
            path = Path(folder) / "run"
            try:
                with ParquetObserver(path, positions=True) as observer, patch.object(select, "note", noted):
                    generate(
                        self.model, self.tokenizer, prompts, config, policy=name,
                        max_new_tokens=self.options.tokens, stop_token_ids=(), observers=[observer],
                        audit=AuditConfig(every=1, top=1024),
                    )  # fmt: skip
            except FAILURES as error:
                return {"error": first_line(error)}
            request = Request.of(Trace.open(path))
            document = judge(request)
            findings = [finding for finding in document["findings"] if finding["request"] == 1]
            kl = request.single("SELECT avg(kl_next_token) AS kl FROM logits WHERE request = 1")["kl"]
        return {
            "kl": short(kl or 0.0),
            "rules": sorted({finding["rule"] for finding in findings}),
            "beyond": {
                finding["rule"]: [short(finding["value"]), finding["beyond"], finding["places"]] for finding in findings
            },
            "worst": {verdict["rule"]: short(verdict["value"]) for verdict in document["judged"]},
        }


def seen(rows: Sequence[Row]) -> str:
    """Write a row a selection: KL, how many windows have a problem, and how often each rule found one."""
    lines = []
    for name in (*SOUND, *BROKEN):
        some = [row for row in rows if row["selection"] == name and "rules" in row]
        if some:
            counted = Counter(rule for row in some for rule in row["rules"]).most_common()
            problems = sum(bool(row["rules"]) for row in some)
            kl = sum(row["kl"] for row in some) / len(some)
            rules = ", ".join(f"{rule} {count}" for rule, count in counted) or "-"
            lines.append([name, f"{kl:.3g}", f"{problems} of {len(some)}", rules])
    return table(["selection", "KL, nats", "windows with a problem", "rules"], lines)
