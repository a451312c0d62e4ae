"""A process that works on a results folder, without a model: `python shared_folder.py FOLDER [UNIT]`.

It waits for the file `go`, then makes the rows that no other process has. With UNIT it stops for good within
that sample, as soon as a half-written line is in the file.
"""

import sys
import time
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any, ClassVar

from sfi_core.measure.evaluation.claims import Claims, taken
from sfi_traces.results.evaluation.store import ResultsFolder

SEEDS = 24
MANIFEST = {
    "asked": {"samples": SEEDS}, "model": {"name": "made-up"}, "methods": [], "text": None, "device": "cpu",
    "machine": {}, "versions": {},
}  # fmt: skip
TEXT = "word " * 8_000  # longer than a buffer of the file


def row_of(seed: int, maker: str) -> dict[str, Any]:
    return {
        "method": "sfi", "policy": "sfi", "preset": "default", "settings": {}, "size": "10%", "share": 0.1,
        "task": "recall", "length": 512, "seed": seed, "score": 1.0, "scores": {}, "generated": 9,
        "read_ratio": 0.1, "selection_ratio": 0.0, "stored_ratio": 1.0, "slow_steps": 1, "fast_steps": 3,
        "tokens_per_second": 18.0, "text": TEXT, "finish_reason": maker, "error": None,
    }  # fmt: skip


class Seeds:
    """A grid of one method and a row for each seed."""

    table: ClassVar[str] = "samples"
    keys: ClassVar[list[tuple[Any, ...]]] = [(seed,) for seed in range(SEEDS)]

    def key(self, row: Any) -> tuple[Any, ...]:
        return (row["seed"],)

    def run(
        self, done: Container[Any], claims: Claims, maker: str, stop_at: int
    ) -> Iterator[dict[str, Any]]:
        for seed in range(SEEDS):
            with taken(claims, [seed], lambda seed: (seed,) not in done) as mine:
                for one in mine:
                    if one == stop_at:
                        stop(Path(sys.argv[1]))
                    time.sleep(0.01)
                    yield row_of(one, maker)


def stop(folder: Path) -> None:
    with (folder / "samples.jsonl").open("ab") as file:
        file.write(b'{"method": "sf')
    (folder / "stopped").touch()
    time.sleep(1000)


def main(folder: Path, stop_at: int) -> None:
    while not (folder / "go").exists():
        time.sleep(0.001)
    results, part = ResultsFolder.resume(folder), Seeds()
    results.begin()
    maker, made = str(stop_at), True
    while made:
        shared, made = results.shared(part), False
        for row in part.run(shared, shared, maker, stop_at):
            results.append("samples", row)
            made = True
    results.close(None, [part])


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else -1)
