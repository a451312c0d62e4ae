"""What each part of the study does with the options of the command line."""

import argparse
import sys
from dataclasses import replace
from functools import cache
from typing import Any

from benchmarks.study import fidelity, long, lossless, stability, tasks
from benchmarks.study.listed import read_methods
from benchmarks.study.records import about_run, begin
from benchmarks.study.report import Report
from benchmarks.study.texts import Place, text_digest, windows_of
from benchmarks.study.work import work
from sfi_core.models.load import load, load_tokenizer


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
    groups: dict[tuple[Any, ...], list[Place]] = {}
    for place in places(options, tokenizer):  # the kinds together: a step reads the weights once
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


def run_lossless(options: argparse.Namespace) -> None:
    """Answer losslessly under the methods of a table."""
    model, tokenizer = load_model(options.model)
    methods = read_methods(options.table, tokenizer, options.methods)
    part = lossless.LosslessPart(model, tokenizer, options.model, methods, options.tokens)
    records = begin(options.out / "lossless.jsonl", lossless.key, about(options, model))
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
