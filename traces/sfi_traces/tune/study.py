"""The search: an Optuna study, whose trials are made by this process."""

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Self

from sfi_core.errors import not_installed

Measured = tuple[Sequence[float], Mapping[str, float]]  # values; constraints, kept if at most 0


def check_optuna() -> None:
    """Raise `BackendError` if a package of the extra is missing."""
    for package in ("optuna", "scipy"):
        if find_spec(package) is None:
            raise not_installed("tuning needs", package, "tune")


@contextmanager
def _silent() -> Iterator[None]:
    import optuna  # noqa: PLC0415 - an extra

    optuna.logging.set_verbosity(logging.CRITICAL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        yield


@dataclass(frozen=True, slots=True)
class Search:
    """A study, in memory."""

    study: Any

    @classmethod
    def of(cls, seed: int = 0) -> Self:
        """Make a study without trials, of two numbers to make small; the same seed tries the same settings."""
        import optuna  # noqa: PLC0415 - an extra

        with _silent():
            sampler = optuna.samplers.TPESampler(seed=seed)
            return cls(optuna.create_study(directions=["minimize", "minimize"], sampler=sampler))

    def run(
        self,
        suggest: Callable[[Any], Any],
        measure: Callable[[Any], Measured],
        trials: int,
        *,
        first: Mapping[str, Any] | None = None,
        on_trial: Callable[[int], None] = lambda _: None,
    ) -> bool:
        """Try so many settings; return whether Ctrl-C ended it.

        `suggest` lets a trial pick a setting, and `measure` returns its values; `first` has the values of the first
        trial; `on_trial` is told how many trials are done.
        """
        with _silent():
            if first:
                self.study.enqueue_trial(dict(first))
            try:
                for number in range(trials):
                    trial = self.study.ask()
                    values, constraints = measure(suggest(trial))
                    for name, value in constraints.items():
                        trial.set_constraint(name, value)
                    self.study.tell(trial, list(values))
                    on_trial(number + 1)
            except KeyboardInterrupt:
                return True
        return False

    def complete(self) -> list[Any]:
        """Return the finished trials, by number."""
        return [trial for trial in self.study.trials if trial.values is not None]

    def best(self) -> list[Any]:
        """Return the feasible trials that no other dominates."""
        with _silent():
            return list(self.study.best_trials)
