"""Progress of an evaluation, and an estimate of the time left."""

import time
from collections import Counter, defaultdict
from collections.abc import Iterable

from sfi_cli.terminal.progress import Progress


class EvaluationProgress(Progress):
    """Shows how many results are done, and about how long the others will take."""

    def __init__(self, what: str, weights: Iterable[int], *, quiet: bool) -> None:
        """Begin with no result done; `weights` has one of each result, such as its context's length."""
        super().__init__(quiet=quiet)
        self._what, self._left, self._done = what, Counter(weights), 0
        self._total = self._left.total()
        self._took: defaultdict[int, list[float]] = defaultdict(list)
        self._since = time.monotonic()

    def update(self, weight: int) -> None:
        """Show that one more result, of this weight, is done."""
        now = time.monotonic()
        self._took[weight].append(now - self._since)
        self._since = now
        self._left[weight] -= 1
        self._done += 1
        left = clock(self.seconds_left)
        line = f"{self._what}: {self._done:,} of {self._total:,}, about {left} left"
        self._show(line, self._done, self._total, line)

    @property
    def seconds_left(self) -> float:
        """Estimate of the time left: each result takes as long as the mean of its weight so far."""
        means = {weight: sum(took) / len(took) for weight, took in self._took.items()}
        share = sum(means.values()) / sum(means)
        return sum(left * means.get(weight, share * weight) for weight, left in self._left.items())


def clock(seconds: float) -> str:
    """Write seconds as minutes and seconds, or from an hour on as hours and minutes."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"
