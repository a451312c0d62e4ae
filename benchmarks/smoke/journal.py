"""What the smoke run finds: printed as it comes, written after every stage, ended when the device is lost."""

import faulthandler
import json
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch

from benchmarks.smoke.plan import Plan
from sfi_core.machine.files import atomic_file
from sfi_core.measure.kernel_bench.gates import reason

HANGS, FRAMES, INTERRUPTED = 100, 8, 130  # seconds of a stage, frames of a traceback, exit code
Stage = tuple[str, Callable[["Journal", Plan], None]]


class DeviceLostError(Exception):
    """The device answers no further call of this process."""


class Journal:
    """Runs stages and keeps what they find.

    Attributes:
        document: All that was found, as it is written.
    """

    def __init__(self, device: torch.device, path: Path | None) -> None:
        self.document: dict[str, Any] = {"device": str(device), "ended": "not yet", "stages": []}
        self._device, self._path = device, path
        self._rows: list[dict[str, Any]] = []

    def run(self, stages: Mapping[int, Stage], plan: Plan) -> int:
        """Run the stages in order; return 0, 1 where something failed, or 130 after Ctrl-C."""
        ended = "whole"
        for number, (name, stage) in stages.items():
            print(f"\n== stage {number}: {name}", flush=True)
            faulthandler.dump_traceback_later(HANGS, exit=False)
            began, self._rows = time.perf_counter(), []
            try:
                self.trial(f"stage {number}", lambda stage=stage: stage(self, plan))
            except (DeviceLostError, KeyboardInterrupt) as error:
                ended = f"{type(error).__name__} in stage {number}"
            faulthandler.cancel_dump_traceback_later()
            seconds = round(time.perf_counter() - began, 1)
            print(f"-- stage {number}: {seconds} s", flush=True)
            self.document["stages"].append({"number": number, "name": name, "seconds": seconds, "rows": self._rows})
            self._write()
            if ended != "whole":
                break
        self.document["ended"] = ended
        self._write()
        print(f"\nended: {ended}; failed: {self.failed() or 'nothing'}", flush=True)
        if ended.startswith("Keyboard"):
            return INTERRUPTED
        return int(bool(self.failed()) or ended != "whole")

    def trial(self, what: str, call: Callable[[], Mapping[str, Any] | None]) -> None:
        """Note what a call returns, or why it fails; what returns nothing has noted its own trials.

        Raises:
            DeviceLostError: The call has lost the device.
        """
        try:
            row = call()
        except DeviceLostError:
            raise
        except Exception as error:  # noqa: BLE001 - what a first run raises is what it is for
            traceback.print_exc(limit=-FRAMES, file=sys.stdout)
            self.note(what, failed=reason(error))
        else:
            if row is not None:
                self.note(what, **row)
        self._look(what)

    def note(self, what: str, **columns: Any) -> None:
        """Print a row and keep it."""
        self._rows.append({"what": what, **columns})
        words = ", ".join(f"{name} {_short(value)}" for name, value in columns.items())
        print(f"{what}: {words}", flush=True)

    def failed(self) -> list[str]:
        """Name the trials that failed."""
        rows = [row for stage in self.document["stages"] for row in stage["rows"]]
        return [row["what"] for row in rows if "failed" in row or row.get("right") is False]

    def _look(self, what: str) -> None:
        # an error that waits in the device's queue belongs to the trial that just ran
        if self._device.type == "cuda":
            try:
                torch.cuda.synchronize()
            except RuntimeError as error:
                self._lose(what, error)

    def _lose(self, what: str, error: RuntimeError) -> NoReturn:
        self.note(what, failed=f"the device is lost: {reason(error)}")
        raise DeviceLostError from error

    def _write(self) -> None:
        if self._path is not None:
            with atomic_file(self._path) as part:
                part.write_text(json.dumps(self.document, indent=2, default=str) + "\n")


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.4g}"
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "".join(f"\n    {', '.join(map(_short, row.values()))}" for row in value)
    return str(value)
