"""The report: tables and figures of every part that has rows, from the JSON lines alone."""

import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Iterable, Sequence
from operator import itemgetter
from pathlib import Path

from benchmarks.study import ahead, answers, front, health, lossless, observed
from benchmarks.study.fidelity import TOP, FidelityPart
from benchmarks.study.figures import draw_front, draw_stability
from benchmarks.study.health import HealthPart
from benchmarks.study.listed import FULL, read_table, spec
from benchmarks.study.long import LONG, by_step
from benchmarks.study.lossless import LosslessPart
from benchmarks.study.markdown import page
from benchmarks.study.measured import Measured, measured
from benchmarks.study.part import Part, Row
from benchmarks.study.records import Key, Records
from benchmarks.study.stability import StabilityPart
from benchmarks.study.tasks import TasksPart
from benchmarks.study.texts import KINDS
from sfi_core.measure.evaluation.grid import Method

DOCS = Path(__file__).parents[2] / "docs" / "evidence"
MADE = "Made by `python benchmarks/study.py report`."
BESIDE_THE_FIRST = ("apart", "ablation", "granularity")
FEWEST = 2  # methods of a page
AT_READS = "KL at equal total reads, between the measured shares."
BOOTSTRAP = (
    "Intervals are 95 % bootstrap intervals: whole windows drawn within each kind of text, and where a kind has a "
    "single window the kinds too; kinds weigh the same."
)
WILSON = "Intervals are 95 % Wilson intervals."


class Report:
    """Pages and figures of the rows of one model and half.

    Args:
        options: `out` is the folder of the JSON lines, whose folders count too; `docs` that of pages and
            figures; `model`, `half` and `methods` (the list of methods) say which rows count.
    """

    def __init__(self, options: Namespace) -> None:
        self.results, self.folder = options.out, options.docs
        self.model, self.half, self.methods = options.model, options.half, options.methods

    def write(self) -> None:
        """Write every page and figure that has rows."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in (
            *self.fidelity(),
            *self.ahead(),
            *self.stability(),
            *self.lossless(),
            *self.health(),
            *self.tasks(),
        ):
            print(f"Wrote {path}", file=sys.stderr)

    def fidelity(self) -> list[Path]:
        """Write the pages of methods for each length, and the front's figure."""
        pages = []
        rows = self._rows(FidelityPart)
        for length, tokens in sorted({(row["length"], row["tokens"]) for row in rows}):
            some = [row for row in rows if (row["length"], row["tokens"]) == (length, tokens)]
            data = measured(some)
            about = f"{self.model}, {length} prompt and {tokens} decoded tokens, half `{self.half}`, {_counts(some)}"
            if tokens >= LONG:
                pages += self._long(some, data, about, length)
                continue
            pages += self._front(data, about, length)
            for name in BESIDE_THE_FIRST:
                pages += self._beside_the_first(name, data, about, length)
        return pages

    def ahead(self) -> list[Path]:
        """Write the pages of choosing half a layer ahead, which have rows of their own in `ahead.jsonl`."""
        pages, rows = list[Path](), self._rows(FidelityPart, "ahead")
        named = self._listed("ahead") if rows else []
        for length, tokens in sorted({(row["length"], row["tokens"]) for row in rows}):
            some = [row for row in rows if (row["length"], row["tokens"]) == (length, tokens)]
            data, shares = measured(some), sorted({row["share"] for row in some} - {None})
            parts = [
                ("KL beside the same method's that chooses in its turn.", ahead.times(data, named, shares)),
                (f"Of the {TOP} likeliest positions, and of all probability, what fast steps read.",
                 ahead.recalled(some, named)),
            ]  # fmt: skip
            about = f"{self.model}, {length} prompt and {tokens} decoded tokens, half `{self.half}`, {_counts(some)}"
            pages.append(self._page(f"ahead-{length}" + f"-{tokens}" * (tokens >= LONG), about, parts))
        return pages

    def stability(self) -> list[Path]:
        """Write page `stability` and a figure for each thing decoded and size of a support."""
        rows = self._rows(StabilityPart)
        if not rows:
            return []
        parts = [
            ("Overlap of a step's support with the last step's, by steps since a sentence's end.",
             observed.consecutive(rows)),
            ("By how much less supports agree across a boundary; the same when the sentences are shuffled.",
             observed.gaps(rows)),
            ("Overlap by lag, in one sentence and across a boundary.", observed.lags(rows)),
            ("What an older support holds of the best support's probability, by its age; `mass` as is.",
             observed.retained(rows)),
            ("KV heads by the probability on the first 4 and the last 128 positions; a head that looks there is local.",
             observed.heads(rows)),
        ]  # fmt: skip
        pages = [self._page("stability", f"{_counts(rows)}, half `{self.half}`", parts)]
        for mode, size in sorted({(row["mode"], row["size"]) for row in rows}):
            pages.append(self.folder / f"stability-{mode}-{size}.png")
            draw_stability(rows, mode, size, pages[-1])
        return pages

    def lossless(self) -> list[Path]:
        """Write page `lossless`."""
        rows, parts = self._rows(LosslessPart), []
        for length in sorted({row["length"] for row in rows}):
            some = [row for row in rows if row["length"] == length]
            drafts = [row for row in some if row["method"] != FULL and "error" not in row]
            about = f"{length} prompt tokens, {_counts(some)}."
            parts.append((about, lossless.drafted(drafts, self._listed("lossless"))))
        return [self._page("lossless", f"{self.model}, half `{self.half}`, greedy", parts)] if parts else []

    def health(self) -> list[Path]:
        """Write page `health`."""
        rows = self._rows(HealthPart)
        if not rows:
            return []
        title = "Of 100 steps, all audited; each rule with the windows in which it found a problem."
        note = "A fast step may read a quarter of the prompt."
        return [self._page("health", f"{self.model}, half `{self.half}`", [(title, health.seen(rows))], note)]

    def tasks(self) -> list[Path]:
        """Write page `tasks`, of every model that has rows."""
        records = Records(self.results / "tasks.jsonl", TasksPart.columns)
        rows = [row for row in records.rows() if row["half"] == self.half]
        named = self._listed("tasks")
        models = sorted({row["model"] for row in rows})
        parts = [
            (f"Model {model}.", answers.scores([r for r in rows if r["model"] == model], named)) for model in models
        ]
        return [self._page("tasks", f"Half `{self.half}`", parts, WILSON)] if parts else []

    def _front(self, data: Measured, about: str, length: int) -> list[Path]:
        named = self._having(data, "front")
        if not named:
            return []
        shares = _shares(data, named)
        figure = self.folder / f"front-{length}.png"
        draw_front(data, named, _kinds(data), figure)
        parts = [
            (AT_READS, front.at_reads(data, named)),
            ("Each method at each share of a fast step.", front.by_share(data, named, shares)),
        ]
        for share in shares:
            title = f"Each kind of text at {100 * share:g} %, with total reads."
            parts.append((title, front.by_kind(data, named, share, _kinds(data))))
        return [self._page(f"front-{length}", about, parts), figure]

    def _long(self, rows: Sequence[Row], data: Measured, about: str, length: int) -> list[Path]:
        named = self._having(data, "long")
        if not named:
            return []
        parts = [
            (f"KL along the text, a share of {100 * share:g} %.", by_step(rows, named, share))
            for share in _shares(data, named)
        ]
        return [self._page(f"long-{length}", about, parts)]

    def _beside_the_first(self, name: str, data: Measured, about: str, length: int) -> list[Path]:
        named = self._having(data, name)
        if 2 * len(named) <= len(self._listed(name)):  # rows of another table, which shares some methods
            return []
        shares = _shares(data, named)
        words = f"Times: of the KL of the first row, `{named[0][0]}`, on the same windows."
        parts = [(words, front.against(data, named, named[0][1], shares))]
        if len(shares) > 1:
            parts.append((AT_READS, front.at_reads(data, named)))
        return [self._page(f"{name}-{length}", about, parts)]

    def _page(self, name: str, about: str, parts: Sequence[tuple[str, str]], note: str = BOOTSTRAP) -> Path:
        path = self.folder / f"{name}.md"
        path.write_text(page(f"Evidence: {name}", f"{about}. {note} {MADE}", parts), encoding="utf-8")
        return path

    def _listed(self, table: str) -> list[tuple[str, str]]:
        # label and text of each method of a table
        parsed = [(text, Method.parse(text)) for text in read_table(table, self.methods)["methods"]]
        return [(method.label, spec(text, method)) for text, method in parsed]

    def _having(self, data: Measured, table: str) -> list[tuple[str, str]]:
        have, listed = {method for method, _ in data.windows}, self._listed(table)
        named = [(label, method) for label, method in listed if method in have]
        return named if len(named) >= FEWEST else []  # else rows of another table, which shares some methods

    def _rows(self, part: type[Part], name: str = "") -> list[Row]:
        by_key: dict[Key, Row] = {}
        for path in sorted(self.results.rglob(f"{name or part.name}.jsonl")):
            records = Records(path, part.columns)
            by_key |= {records.key(row): row for row in records.rows()}
        asked = (self.model, self.half)
        rows = [row for row in by_key.values() if (row["model"], row["half"]) == asked]
        # of a text that has changed with its package, a page has the rows of the version that has the most
        pages = [(row["kind"], row["length"], row["tokens"]) for row in rows]
        counts = Counter((page, row["text"]) for page, row in zip(pages, rows, strict=True))
        most = {page: text for (page, text), _ in sorted(counts.items(), key=itemgetter(1))}
        return [row for page, row in zip(pages, rows, strict=True) if row["text"] == most[page]]


def _shares(data: Measured, named: Sequence[tuple[str, str]]) -> list[float]:
    return sorted({share for _, method in named for share in data.shares(method)})


def _kinds(data: Measured) -> list[str]:
    have = {kind for windows in data.windows.values() for kind, _ in windows}
    return [kind for kind in KINDS if kind in have]


def _counts(rows: Iterable[Row]) -> str:
    places = {(row["kind"], row["number"], row["length"]) for row in rows if row.get("method", FULL) == FULL}
    counts = Counter(kind for kind, _, _ in places)
    return "windows: " + ", ".join(f"{kind} {count}" for kind, count in sorted(counts.items()))
