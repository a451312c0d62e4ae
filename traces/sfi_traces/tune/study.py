"""The search: an Optuna study on disk, which several processes on several machines may share.

A study's name identifies its traces, space and objectives. Workers coordinate by the file: a trial is too
many if its number is preceded by as many trials, done or running, as were asked for. Optuna's
`MaxTrialsCallback` counts only after a trial, so workers that finish together would begin too many.
"""

import json
import logging
import os
import random
import signal
import socket
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from sfi_core.errors import ConfigError, InputError, SfiError, not_installed

PREFIX, SUFFIX = "sfi-tune", ".journal"
FIRST = b'{"op_code":'  # how a line begins
Direction = Literal["minimize", "maximize"]
Measured = tuple[Sequence[float], Mapping[str, float]]  # values; constraints, kept if at most 0


def check_optuna() -> None:
    """Raise `BackendError` if a package of the extra is missing."""
    for package in ("optuna", "scipy"):
        if find_spec(package) is None:
            raise not_installed("tuning needs", package, "tune")


def check_path(path: Path, *, resume: bool) -> None:
    """Raise `ConfigError` for another suffix, or for a file that exists without `resume`."""
    if path.suffix != SUFFIX:
        raise ConfigError(f"study must end in {SUFFIX}, got {path.name}")
    if path.exists() and not resume:
        raise ConfigError(f"study {path} exists; remove it, or add --resume to go on with it")


@contextmanager
def careful(path: Path) -> Iterator[None]:
    """Silence Optuna's messages; raise `SfiError` if the file cannot be written, `InputError` if it is damaged."""
    import optuna  # noqa: PLC0415 - an extra

    optuna.logging.set_verbosity(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            yield
    except OSError as error:
        raise SfiError(f"study {path} cannot be written: {error.strerror}") from error
    except json.JSONDecodeError as error:
        raise InputError(f"study {path} is damaged") from error


def open_storage(path: Path) -> Any:
    """Open or make a study's file, inside `careful`; raises `InputError` for a damaged or another file.

    A last line that a full disk or a crash has torn is cut off before each write: what follows would join it.
    """
    from optuna.storages import JournalStorage  # noqa: PLC0415 - an extra
    from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock  # noqa: PLC0415

    class Lock(JournalFileSymlinkLock):
        def acquire(self) -> bool:
            taken: bool = super().acquire()
            _cut_torn_line(path)
            return taken

    lock = Lock(str(path.resolve()))  # a link to a relative path would not be found from the journal's folder
    try:
        if path.exists():
            with path.open("rb") as file:
                first = file.readline()
            torn = FIRST.startswith(first[: len(FIRST)]) and not first.endswith(b"\n")
            if not torn:
                json.loads(first)["op_code"]
            lock.acquire()
            lock.release()
        return JournalStorage(JournalFileBackend(str(path), lock))
    except (ValueError, LookupError, TypeError, AttributeError, AssertionError) as error:  # as Optuna replays it
        raise InputError(f"study {path} is damaged, or no journal of Optuna's") from error


def _cut_torn_line(path: Path) -> None:
    with path.open("r+b") as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(0, end - 1))
        if file.read(1) not in (b"", b"\n"):
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Purpose:
    """What a study searches, as hashes; trials of studies with different purposes cannot be compared."""

    traces: str
    space: str
    objectives: str

    @property
    def name(self) -> str:
        """The study's name."""
        return f"{PREFIX}/{self.traces}/{self.space}/{self.objectives}"

    def difference(self, name: str) -> str:
        """Say in what a study with another name differs."""
        prefix, *parts = name.split("/")
        own = {"traces": self.traces, "search space": self.space, "objectives": self.objectives}
        if prefix != PREFIX or len(parts) != len(own):
            return "by another program"
        pairs = zip(own.items(), parts, strict=True)
        return "with other " + " and ".join(kind for (kind, mine), its in pairs if mine != its)


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """An open study; `created` says whether this process made it."""

    study: Any
    path: Path
    created: bool

    @classmethod
    def open(
        cls, path: Path, purpose: Purpose, directions: Sequence[Direction], *, seed: int = 0, resume: bool = False
    ) -> "Search":
        """Make a study in an Optuna `.journal`, or with `resume` go on with one.

        `purpose` says what it searches, `directions` has "minimize" or "maximize" for each objective. A
        process that joins a study derives another seed of the sampler.

        Raises `ConfigError` for another suffix, or a file that exists without `resume`; `InputError` for a file that is
        no study, damaged, or of another purpose; `SfiError` for one that is locked or cannot be written.
        """
        import optuna  # noqa: PLC0415 - an extra

        check_path(path, resume=resume)
        with careful(path):
            storage = open_storage(path)
            names = optuna.get_all_study_names(storage)
            if names and purpose.name not in names:
                raise InputError(f"study {path} was made {purpose.difference(names[0])}; choose another --study")
            created = True
            try:
                study = optuna.create_study(storage=storage, study_name=purpose.name, directions=list(directions))
            except optuna.exceptions.DuplicatedStudyError:
                study = optuna.load_study(study_name=purpose.name, storage=storage)
                created = False
            own_seed = seed if created else _joined_seed(seed, study)
            study.sampler = optuna.samplers.TPESampler(seed=own_seed)
        return cls(study=study, path=path, created=created)

    def run(
        self,
        suggest: Callable[[Any], Any],
        measure: Callable[[Any], Measured],
        trials: int,
        *,
        first: Mapping[str, Any] | None = None,
        on_trial: Callable[[int], None] = lambda _: None,
    ) -> bool:
        """Try settings until all workers together have made `trials`; return whether Ctrl-C ended it.

        `suggest` lets a trial pick a setting; `measure` returns its values, once for equal settings of all
        workers; `first` has the values of the first trial, if this process made the study; `on_trial` is told
        how many trials the study has. A running trial is finished first. Raises `SfiError` if the file is
        locked or cannot be written.
        """
        with careful(self.path), _interrupts() as interrupted:
            if first and self.created:
                self.study.enqueue_trial(dict(first), skip_if_exists=True)
            while not interrupted():
                if len(self._trials("COMPLETE", "RUNNING")) >= trials:
                    break
                trial = self.study.ask()
                try:
                    before = self._before(trial.number)
                    if before >= trials:  # another worker was faster
                        self._drop(trial)
                        break
                    self._try(trial, suggest(trial), measure)
                    on_trial(before + 1)
                except BaseException:
                    self._drop(trial)
                    raise
            return interrupted()

    def complete(self) -> list[Any]:
        """Return the finished trials, by number."""
        with careful(self.path):
            return self._trials("COMPLETE")

    def best(self) -> list[Any]:
        """Return the feasible trials that no other dominates."""
        with careful(self.path):
            return list(self.study.best_trials)

    def _try(self, trial: Any, setting: Any, measure: Callable[[Any], Measured]) -> None:
        equal = (earlier for earlier in self._trials("COMPLETE") if earlier.params == trial.params)
        if (known := next(equal, None)) is not None:
            values, constraints = known.values, known.constraints
        else:
            values, constraints = measure(setting)
        for name, value in constraints.items():
            trial.set_constraint(name, value)
        self.study.tell(trial, list(values))

    def _trials(self, *states: str) -> list[Any]:
        from optuna.trial import TrialState  # noqa: PLC0415 - an extra

        wanted = tuple(TrialState[state] for state in states)
        return list(self.study.get_trials(deepcopy=False, states=wanted))

    def _before(self, number: int) -> int:
        earlier = self._trials("COMPLETE", "RUNNING", "WAITING")
        return sum(trial.number < number for trial in earlier)

    def _drop(self, trial: Any) -> None:
        from optuna.trial import TrialState  # noqa: PLC0415 - an extra

        self.study.tell(trial, state=TrialState.FAIL, skip_if_finished=True)


def _joined_seed(seed: int, study: Any) -> int:
    # another seed for each worker, so that they try different settings
    mixed = f"{seed} {len(study.get_trials(deepcopy=False))} {socket.gethostname()} {os.getpid()}"
    return random.Random(mixed).getrandbits(32)  # noqa: S311 - no secret


@contextmanager
def _interrupts() -> Iterator[Callable[[], bool]]:
    # the first Ctrl-C waits: inside a write it would tear a line that others read; a second one is immediate
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked.is_set
        return
    before = signal.getsignal(signal.SIGINT)

    def ask(_number: int, _frame: Any) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    signal.signal(signal.SIGINT, ask)
    try:
        yield asked.is_set
    finally:
        signal.signal(signal.SIGINT, before)
