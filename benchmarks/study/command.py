"""The command line of the study."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.study import fidelity, long, stability, tasks
from benchmarks.study.listed import METHODS, read_methods
from benchmarks.study.own_tasks import OWN
from benchmarks.study.records import RESULTS, about_run, begin
from benchmarks.study.report import DOCS, Report
from benchmarks.study.texts import HALVES, KINDS, Place, text_digest, windows_of
from benchmarks.study.work import Process, work
from sfi_core.errors import SfiError
from sfi_core.measure.evaluation.tasks import TASKS
from sfi_core.models.load import load, load_tokenizer, quiet


def main(about: str, arguments: Sequence[str] | None = None) -> int:
    """Run a part; return the exit code."""
    options = _parser(about).parse_args(arguments)
    quiet()
    try:
        options.run(options)
    except SfiError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def run_texts(options: argparse.Namespace) -> None:
    """Print how many windows each kind and half has."""
    tokenizer = read_tokenizer(options.model)
    for kind in options.kinds:
        for half in options.halves:
            counts = [
                f"{windows_of(tokenizer, kind, half, length + options.tokens)} of {length}"
                for length in options.lengths
            ]
            print(f"{kind:<10} {half:<5} {text_digest(kind, half)}  windows: {', '.join(counts)}")


def run_fidelity(options: argparse.Namespace) -> None:
    """Compare the methods of a table with full attention on windows of every kind."""
    model, tokenizer = load_model(options.model)
    methods = read_methods(options.table, tokenizer, options.methods)
    shares = options.shares
    methods = [one for one in methods if not shares or one.share in shares]
    part = fidelity.FidelityPart(model, tokenizer, options.model, methods, options.tokens)
    records = begin(options.out / "fidelity.jsonl", fidelity.key, about(options, model))
    found = places(options, tokenizer)
    groups: dict[tuple[Any, ...], list[Place]] = {}
    for place in found:  # the kinds together, so that a step reads the weights once
        groups.setdefault((place.number, place.length, place.half), []).append(place)
    work(records, list(groups.values()), part.keys, part.make, options.process)


def run_stability(options: argparse.Namespace) -> None:
    """Look at full attention's supports on windows of every kind."""
    model, tokenizer = load_model(options.model)
    part = stability.StabilityPart(model, tokenizer, options.model, options.tokens, options.modes)
    records = begin(options.out / "stability.jsonl", stability.key, about(options, model))
    work(records, places(options, tokenizer), part.keys, part.make, options.process)


def run_tasks(options: argparse.Namespace) -> None:
    """Answer questions under the methods of the table `tasks`."""
    model, tokenizer = load_model(options.model)
    methods = read_methods("tasks", tokenizer, options.methods)
    part = tasks.TasksPart(model, tokenizer, options.model, methods)
    samples = [
        tasks.Sample(number, task, half, length)
        for number in range(options.windows.start, options.windows.stop)
        for length in options.lengths
        for half in options.halves
        for task in options.tasks
    ]
    records = begin(options.out / "tasks.jsonl", tasks.key, about_run(model, options.model))
    work(records, samples, part.keys, part.make, options.process)


def run_long(options: argparse.Namespace) -> None:
    """Follow long answers under the methods of the table `long`."""
    model, tokenizer = load_model(options.model)
    methods = read_methods("long", tokenizer, options.methods)
    part = long.LongPart(model, tokenizer, options.model, methods, options.tokens, options.modes)
    records = begin(options.out / "long.jsonl", long.key, about(options, model))
    work(records, places(options, tokenizer), part.keys, part.make, options.process)


def run_report(options: argparse.Namespace) -> None:
    """Write tables and figures of all parts."""

    @cache
    def tokenizer() -> Any:
        return read_tokenizer(options.model)

    made = Report(
        results=options.out, folder=options.docs, model=options.model, half=options.half,
        methods=options.methods, text_of=lambda token: tokenizer().decode([token]),
    ).write()  # fmt: skip
    for path in made:
        print(f"Wrote {path}", file=sys.stderr)


def places(options: argparse.Namespace, tokenizer: Any) -> list[Place]:
    """Return the windows asked for, number by number: a cut run has all kinds. Short texts have fewer."""
    asked = (
        Place(number, kind, half, length)
        for number in range(options.windows.start, options.windows.stop)
        for length in options.lengths
        for half in options.halves
        for kind in options.kinds
    )
    have: dict[Place, int] = {}
    found = []
    for place in asked:
        first = replace(place, number=0)
        if first not in have:
            size = place.length + options.tokens
            have[first] = windows_of(tokenizer, place.kind, place.half, size)
        if place.number < have[first]:
            found.append(place)
    return found


def about(options: argparse.Namespace, model: Any) -> dict[str, Any]:
    """Describe a run, with the texts that it may read."""
    texts = {
        f"{kind}/{half}": text_digest(kind, half)
        for kind in options.kinds
        for half in options.halves
    }
    return about_run(model, options.model) | {"texts": texts}


def read_tokenizer(name: str) -> Any:
    """Load a tokenizer alone."""
    return load_tokenizer(None if name == "bundled" else name)


def load_model(name: str) -> tuple[Any, Any]:
    """Load the bundled checkpoint, or another on the CPU."""
    return load(None if name == "bundled" else name, device="cpu")


def count_or_range(text: str) -> range:
    """Read `8` as the first eight windows, `4:8` as four after the first four; for argparse."""
    start, colon, stop = text.partition(":")
    if not (start.isdigit() and (not colon or stop.isdigit())):
        raise argparse.ArgumentTypeError(f"windows must be COUNT or START:STOP, got {text}")
    return range(int(start), int(stop)) if colon else range(int(start))


def _parser(about: str) -> argparse.ArgumentParser:
    shape = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=about, formatter_class=shape)
    parts = parser.add_subparsers(required=True, metavar="PART")
    texts = parts.add_parser("texts", help="print how much text there is")
    _window_options(texts, run_texts)
    one = parts.add_parser("fidelity", help="KL to full attention, teacher-forced")
    _window_options(one, run_fidelity)
    one.add_argument("--table", default="front", help="table of the list of methods")
    one.add_argument("--shares", type=float, nargs="*", help="only these of the table's shares")
    one = parts.add_parser("stability", help="full attention's supports, by place in the sentence")
    _window_options(one, run_stability, tokens=200)
    one.add_argument("--modes", nargs="*", choices=stability.MODES, default=stability.MODES)
    one = parts.add_parser("tasks", help="exact answers; a window is a sample, a seed of its own")
    _common_options(one, run_tasks, windows=20, lengths=[1024])
    one.add_argument("--tasks", nargs="*", choices=[*TASKS, *OWN], default=tasks.DEFAULT)
    one = parts.add_parser("long", help="long answers: first difference, error by step")
    _window_options(one, run_long, tokens=1000, windows=2, lengths=[1536], kinds=["prose"])
    one.add_argument("--modes", nargs="*", choices=long.MODES, default=long.MODES)
    one = parts.add_parser("report", help="tables and figures, from the rows")
    one.set_defaults(run=run_report)
    one.add_argument("--model", default="smollm2", help="the model whose rows count")
    one.add_argument("--half", choices=HALVES, default="held", help="the half that is reported")
    one.add_argument("--methods", type=Path, default=METHODS, help="the list of methods")
    one.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    one.add_argument("--docs", type=Path, default=DOCS, help="folder of pages and figures")
    return parser


def _window_options(
    parser: argparse.ArgumentParser,
    run: Any,
    *,
    tokens: int = 64,
    windows: int = 8,
    lengths: Sequence[int] = (2048,),
    kinds: Sequence[str] = KINDS,
) -> None:
    _common_options(parser, run, windows=windows, lengths=lengths)
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=kinds)
    parser.add_argument("--tokens", type=int, default=tokens, help="decoded tokens of a window")


def _common_options(
    parser: argparse.ArgumentParser, run: Any, *, windows: int, lengths: Sequence[int]
) -> None:
    parser.set_defaults(run=run)
    parser.add_argument("--model", default="smollm2", help="as `sfi --model`, or bundled")
    parser.add_argument("--halves", nargs="*", choices=HALVES, default=HALVES)
    parser.add_argument("--lengths", type=int, nargs="*", default=lengths, help="prompt tokens")
    parser.add_argument(
        "--windows", type=count_or_range, default=range(windows), help="8, or 4:8 after 0:4"
    )
    parser.add_argument("--process", type=Process.parse, default=Process(), help="0/2 or 1/2")
    parser.add_argument("--methods", type=Path, default=METHODS, help="the list of methods")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
