"""The command line of the study."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.study.broken import BROKEN
from benchmarks.study.controls import CONTROLS
from benchmarks.study.fidelity import FidelityPart
from benchmarks.study.fresh import FRESH
from benchmarks.study.health import HealthPart
from benchmarks.study.last_queries import LAST_QUERIES
from benchmarks.study.listed import METHODS
from benchmarks.study.lossless import LosslessPart
from benchmarks.study.own_tasks import OWN
from benchmarks.study.part import Part
from benchmarks.study.reader_tasks import READER
from benchmarks.study.records import RESULTS
from benchmarks.study.report import DOCS, Report
from benchmarks.study.stability import StabilityPart
from benchmarks.study.tasks import DEFAULT, TasksPart
from benchmarks.study.texts import HALVES, KINDS, SHORT
from sfi_core.errors import SfiError
from sfi_core.measure.evaluation.tasks import TASKS
from sfi_core.models.load import quiet
from sfi_core.policies import POLICIES


def main(about: str, arguments: Sequence[str] | None = None) -> int:
    """Run a part; return the exit code."""
    options = _parser(about).parse_args(arguments)
    quiet()
    POLICIES.update(CONTROLS | BROKEN | FRESH | LAST_QUERIES)
    try:
        options.run(options)
    except SfiError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def count_or_range(text: str) -> range:
    """Read `8` as the first eight windows, `4:8` as four after the first four; for argparse."""
    start, colon, stop = text.partition(":")
    if not (start.isdigit() and (not colon or stop.isdigit())):
        raise argparse.ArgumentTypeError(f"windows must be COUNT or START:STOP, got {text}")
    return range(int(start), int(stop)) if colon else range(int(start))


def _parser(about: str) -> argparse.ArgumentParser:
    shape = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=about, formatter_class=shape)
    subparsers = parser.add_subparsers(required=True, metavar="PART")
    subparser = subparsers.add_parser("fidelity", help="KL to full attention, teacher-forced")
    subparser.add_argument("--table", default="front", help="table of the list of methods")
    subparser.add_argument(
        "--audit", type=int, default=0, metavar="N", help="also say, of every N-th step, what each layer read"
    )
    subparser.add_argument(
        "--modules",
        action="store_true",
        help="run no compiled steps, as choosing ahead does not: bfloat16 rounds alike",
    )
    _window_options(subparser, FidelityPart)
    subparser = subparsers.add_parser("stability", help="full attention's supports, by place in the sentence")
    _window_options(subparser, StabilityPart, tokens=200)
    subparser = subparsers.add_parser("lossless", help="drafts that verification keeps, and what lossless runs read")
    _window_options(subparser, LosslessPart)
    subparser = subparsers.add_parser("tasks", help="exact answers; a window is a sample, a seed of its own")
    subparser.add_argument("--tasks", nargs="*", choices=[*TASKS, *OWN, *READER], default=DEFAULT)
    _options(subparser, TasksPart, windows=20, lengths=[1024])
    subparser = subparsers.add_parser("health", help="whether health rules see broken selections")
    _window_options(subparser, HealthPart, tokens=100)
    subparser = subparsers.add_parser("report", help="tables and figures, from the rows")
    subparser.set_defaults(run=lambda options: Report(options).write())
    subparser.add_argument("--model", default="smollm2", help="the model whose rows count")
    subparser.add_argument("--half", choices=HALVES, default="held", help="the half that is reported")
    subparser.add_argument("--methods", type=Path, default=METHODS, help="the list of methods")
    subparser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    subparser.add_argument("--docs", type=Path, default=DOCS, help="folder of pages and figures")
    return parser


def _window_options(parser: argparse.ArgumentParser, part: type[Part], *, tokens: int = 64) -> None:
    _options(parser, part)
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=SHORT)
    parser.add_argument("--tokens", type=int, default=tokens, help="decoded tokens of a window")


def _options(
    parser: argparse.ArgumentParser, part: type[Part], *, windows: int = 8, lengths: Sequence[int] = (2048,)
) -> None:
    parser.set_defaults(run=lambda options: part(options).run())
    parser.add_argument("--model", default="smollm2", help="as `sfi --model`, or bundled")
    parser.add_argument("--dtype", default="auto", help="as `sfi --dtype`; bfloat16 reads long prompts sooner")
    parser.add_argument("--halves", nargs="*", choices=HALVES, default=HALVES)
    parser.add_argument("--lengths", type=int, nargs="*", default=lengths, help="prompt tokens")
    parser.add_argument("--windows", type=count_or_range, default=range(windows), help="8, or 4:8 after 0:4")
    parser.add_argument("--methods", type=Path, default=METHODS, help="the list of methods")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
