"""`sfi trace replay --refresh-every`: how well recorded selections would serve later steps."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sfi_cli.commands.trace.replay.grid import ReplayGrid
from sfi_cli.commands.trace.replay.job import Choice
from sfi_cli.commands.trace.replay.reuse_views import reuse_text
from sfi_cli.parsing import numbers
from sfi_cli.terminal.output import Output, leave_interrupted
from sfi_cli.terminal.progress import BenchProgress
from sfi_core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ReuseJob:
    """The options of `--refresh-every`.

    Attributes:
        against: Must be None.
        grid: Other schedules of selections.
        every: The intervals, with commas between; None for `EVERY` without a grid, else for none.
        batch: Must be 1: no bytes are counted.
    """

    choice: Choice
    output: Output
    against: Path | None
    grid: ReplayGrid
    every: str | None
    batch: int

    def run(self) -> None:
        """Load the trace, replay the schedules, write and show the outcomes."""
        for name, value in (("against", self.against), ("plot", self.output.plot)):
            if value is not None:
                raise ConfigError(f"{name} needs a recorded run's memory and bytes, got {value}")
        if self.batch != 1:
            raise ConfigError(
                f"batch must come without --refresh-every and an imported trace, got {self.batch}"
            )
        self._check_axes()
        with self.output:
            document = self._document()
            self.output.data(document, reuse_text)
        if document["interrupted"]:
            leave_interrupted()

    def _check_axes(self) -> None:
        from sfi_traces.replay.setting import MEMORY, PAGE_SIZE

        for name in (*MEMORY, PAGE_SIZE):
            if name in self.grid.axes:
                raise ConfigError(
                    f"{name} must come without --refresh-every and an imported trace: selections are "
                    "reused as they are"
                )

    def _document(self) -> dict[str, Any]:
        from sfi_traces.model.trace import Trace
        from sfi_traces.replay import Supports, chance

        trace = Trace.open(self.choice.trace)
        settings = self._settings(trace)
        recorded = Supports.load(trace, self.choice.request, self.choice.layers, self.choice.heads)
        rows, interrupted = self._rows(recorded, settings)
        return {
            **self.choice.describe(trace, recorded),
            "masses": trace.masses,
            "chance": chance(recorded),
            "rows": rows,
            "interrupted": interrupted,
        }

    def _rows(
        self, recorded: list[Any], settings: list[tuple[int | None, Any]]
    ) -> tuple[list[dict[str, Any]], bool]:
        # a row for each schedule, and whether Ctrl-C left schedules out
        from sfi_traces.replay import reuse, schedule

        rows: list[dict[str, Any]] = []
        try:
            with BenchProgress(quiet=self.output.quiet) as progress:
                for every, setting in settings:
                    progress.update("replaying schedules", len(rows), len(settings))
                    found = reuse(recorded, [schedule(one, setting) for one in recorded])
                    rows.append({"every": every, **_when(setting), **asdict(found)})
        except KeyboardInterrupt:
            return rows, True
        return rows, False

    def _settings(self, trace: Any) -> list[tuple[int | None, Any]]:
        # the intervals with their settings, then the grid's settings
        from sfi_traces.replay import EVERY, Setting

        base = Setting.recorded(trace)
        others = self.grid.settings(trace, note=self.output.say) if self.grid.given else []
        every = list(EVERY) if self.every is None and not others else _intervals(self.every)
        found: list[tuple[int | None, Any]] = []
        for count in every:
            config = base.config.replace(trigger_policy="stride", stride=count, slow_start=1)
            found.append((count, Setting(config=config, trigger_token_ids=frozenset())))
        return [*found, *((None, setting) for setting in others)]


def is_imported(folder: Path) -> bool:
    """Say whether a trace was imported: such a trace has neither memory nor bytes."""
    from sfi_traces.model.trace import Trace

    return Trace.open(folder).imported is not None


def _intervals(text: str | None) -> list[int]:
    if text is None:
        return []
    found = numbers([text], int, "refresh-every must be whole numbers")
    if not found or min(found) < 1:
        raise ConfigError(f"refresh-every must be at least 1, got {text!r}")
    return list(dict.fromkeys(found))


def _when(setting: Any) -> dict[str, Any]:
    # the trigger policy and the settings that it uses
    from sfi_traces.replay import RULES

    values = setting.to_dict()
    return {"policy": values["policy"], **{name: values[name] for name in RULES[values["policy"]]}}
