"""The report: tables and figures of every part that has rows, from the JSON lines alone."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.study import (
    answers,
    drafted,
    fidelity,
    front,
    long,
    lossless,
    moving,
    observed,
    stability,
    tasks,
)
from benchmarks.study.figures import draw_front, draw_long, draw_stability
from benchmarks.study.listed import FULL, read_table, spec
from benchmarks.study.markdown import page
from benchmarks.study.measured import Measured, measured
from benchmarks.study.records import Key, Records
from benchmarks.study.texts import KINDS
from sfi_core.measure.evaluation.method import Method

Row = dict[str, Any]
DOCS = Path(__file__).parents[2] / "docs" / "evidence"
MADE = "Made by `python benchmarks/study.py report`."
BESIDE_THE_FIRST = ("ablation", "candidates", "page-scores", "granularity")
AT_READS = "KL at equal total reads, between the measured shares."
BOOTSTRAP = (
    "Intervals are 95 % bootstrap intervals: whole windows drawn within each kind of text, kinds weighed "
    "equally."
)
WILSON = "Intervals are 95 % Wilson intervals."


@dataclass(frozen=True, slots=True)
class Report:
    """Where the rows are, which of them count, and where pages and figures go.

    Attributes:
        results: The folder of the JSON lines; files of a part in folders below count too.
        folder: The folder of pages and figures.
        model: The model whose rows count.
        half: The half of the texts whose rows count.
        methods: The list of methods.
        text_of: Turns a token's id into text.
    """

    results: Path
    folder: Path
    model: str
    half: str
    methods: Path
    text_of: Callable[[int], str]

    def write(self) -> list[Path]:
        """Write every page and figure that has rows; return their paths."""
        self.folder.mkdir(parents=True, exist_ok=True)
        return [*self.fidelity(), *self.stability(), *self.tasks(), *self.long(), *self.lossless()]

    def fidelity(self) -> list[Path]:
        """Write the pages of methods for each length, and the front's figure."""
        made = []
        rows = self._rows("fidelity", fidelity.key)
        for length, tokens in sorted({(row["length"], row["tokens"]) for row in rows}):
            some = [row for row in rows if (row["length"], row["tokens"]) == (length, tokens)]
            data = measured(some)
            about = (
                f"{self.model}, {length} prompt and {tokens} decoded tokens, half `{self.half}`, "
                f"{_counts(some)}"
            )
            made += self._front(data, about, length)
            for name in BESIDE_THE_FIRST:
                made += self._beside_the_first(name, data, about, length)
        return made

    def stability(self) -> list[Path]:
        """Write page `stability` and a figure for each thing decoded and size of a support."""
        every = self._rows("stability", stability.key, half=None)
        rows = [row for row in every if row["half"] == self.half]
        if not rows:
            return []
        largest = [
            r for r in every if r["size"] == max(r["size"] for r in every) and r["mode"] == "forced"
        ]
        moved = moving.moving(
            [row for row in largest if row["half"] == "dev"],
            [row for row in largest if row["half"] == "held"],
        )
        parts = [
            ("Overlap of a step's support with the last step's, by steps since a sentence's end.",
             observed.consecutive(rows)),
            ("By how much less supports agree across a boundary; the same when the sentences are shuffled.",
             observed.gaps(rows)),
            ("Overlap by lag, in one sentence and across a boundary.", observed.lags(rows)),
            ("What an older support holds of the best support's probability, by its age; `mass` as is.",
             observed.retained(rows)),
            ("Drift since the prompt.", observed.drift(rows)),
            ("Heads and queries.", observed.heads(rows)),
            ("Tokens after which the support moves most.", moving.moving_table(moved, self.text_of)),
        ]  # fmt: skip
        made = [self._page("stability", f"{_counts(rows)}, half `{self.half}`", parts)]
        for mode, size in sorted({(row["mode"], row["size"]) for row in rows}):
            made.append(self.folder / f"stability-{mode}-{size}.png")
            draw_stability(rows, mode, size, made[-1])
        return made

    def tasks(self) -> list[Path]:
        """Write page `tasks`, of every model that has rows."""
        records = Records(self.results / "tasks.jsonl", tasks.key)
        rows = [row for row in records.rows() if row["half"] == self.half]
        named = self._listed("tasks")
        models = sorted({row["model"] for row in rows})
        parts = [
            (f"Model {model}.", answers.scores([r for r in rows if r["model"] == model], named))
            for model in models
        ]
        return [self._page("tasks", f"Half `{self.half}`", parts, WILSON)] if parts else []

    def long(self) -> list[Path]:
        """Write page `long` and its figure."""
        rows = self._rows("long", long.key)
        if not rows:
            return []
        named = self._listed("long")
        modes = [mode for mode in long.MODES if any(row["mode"] == mode for row in rows)]
        parts = [("Own greedy answers.", answers.first_differences(rows, named))]
        parts += [
            (f"KL along the {mode} answer.", answers.by_step(rows, named, mode)) for mode in modes
        ]
        draw_long(rows, named, modes, self.folder / "long.png")
        return [self._page("long", f"{_counts(rows)}", parts), self.folder / "long.png"]

    def lossless(self) -> list[Path]:
        """Write page `lossless`: the half that rules were chosen on, and the one that judges them."""
        every = self._rows("lossless", lossless.key, half=None)
        tables = {"dev": "lossless", "held": "lossless-held"}
        parts = []
        for half, length in sorted({(row["half"], row["length"]) for row in every}):
            rows = [row for row in every if (row["half"], row["length"]) == (half, length)]
            named = self._listed(tables[half])
            kinds = [kind for kind in KINDS if any(row["kind"] == kind for row in rows)]
            where = f"Half `{half}`, {length:,} prompt tokens, {_counts(rows)}"
            parts.append((f"{where}.", drafted.drafts(rows, named)))
            title = f"{where}: accepted a verification, and total reads."
            parts.append((title, drafted.by_kind(rows, named, kinds)))
        about = f"{self.model}, {every[0]['tokens']} tokens, greedy" if every else ""
        note = "What drafts keep, and what lossless runs read; no intervals: a few windows."
        return [self._page("lossless", about, parts, note)] if parts else []

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
            title = f"KL by steps since a sentence's end, at {100 * share:g} %."
            parts.append((title, front.by_sentence(data, named, share)))
        return [self._page(f"front-{length}", about, parts), figure]

    def _beside_the_first(self, name: str, data: Measured, about: str, length: int) -> list[Path]:
        named = self._having(data, name)
        if len(named) < 2:  # noqa: PLR2004 - the first and one to compare with it
            return []
        shares = _shares(data, named)
        found = front.against(data, named, named[0][1], shares)
        words = f"Times: of the KL of the first row, `{named[0][0]}`, on the same windows."
        parts = [(words, found)]
        if len(shares) > 1:
            parts.append((AT_READS, front.at_reads(data, named)))
        return [self._page(f"{name}-{length}", about, parts)]

    def _page(
        self, name: str, about: str, parts: Sequence[tuple[str, str]], note: str = BOOTSTRAP
    ) -> Path:
        path = self.folder / f"{name}.md"
        path.write_text(
            page(f"Evidence: {name}", f"{about}. {note} {MADE}", parts), encoding="utf-8"
        )
        return path

    def _listed(self, table: str) -> list[tuple[str, str]]:
        # label and text of each method of a table
        parsed = [(text, Method.parse(text)) for text in read_table(table, self.methods)["methods"]]
        return [(method.label, spec(text, method)) for text, method in parsed]

    def _having(self, data: Measured, table: str) -> list[tuple[str, str]]:
        have = {method for method, _ in data.windows}
        return [(label, method) for label, method in self._listed(table) if method in have]

    def _rows(
        self, part: str, key: Callable[[Mapping[str, Any]], Key], half: str | None = ""
    ) -> list[Row]:
        wanted = self.half if half == "" else half
        found: dict[Key, Row] = {}
        for path in sorted(self.results.rglob(f"{part}.jsonl")):
            found |= {key(row): row for row in Records(path, key).rows()}
        rows = [row for row in found.values() if row["model"] == self.model]
        rows = [row for row in rows if wanted is None or row["half"] == wanted]
        # of a text that has changed, the rows of its last version count
        last = {(row["kind"], row["half"]): row["text"] for row in rows}
        return [row for row in rows if row["text"] == last[row["kind"], row["half"]]]


def _shares(data: Measured, named: Sequence[tuple[str, str]]) -> list[float]:
    return sorted({share for _, method in named for share in data.shares(method)})


def _kinds(data: Measured) -> list[str]:
    have = {kind for windows in data.windows.values() for kind, _ in windows}
    return [kind for kind in KINDS if kind in have]


def _counts(rows: Iterable[Mapping[str, Any]]) -> str:
    places = {
        (row["kind"], row["number"], row["length"])
        for row in rows
        if row.get("method", FULL) == FULL
    }
    found = Counter(kind for kind, _, _ in places)
    return "windows: " + ", ".join(f"{kind} {count}" for kind, count in sorted(found.items()))
