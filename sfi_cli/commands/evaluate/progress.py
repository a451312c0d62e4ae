"""How far an evaluation has come, and how long the rest will take."""

import time
from collections import Counter, defaultdict
from collections.abc import Iterable

from sfi_cli.terminal.progress import Progress


class EvaluationProgress(Progress):
    """Shows how many results are there, and about how long the others will take."""

    def __init__(self, what: str, weights: Iterable[int], *, quiet: bool) -> None:
        """Take a weight of every result that is to come, such as its context's length."""
        super().__init__(quiet=quiet)
        self._what, self._left, self._done = what, Counter(weights), 0
        self._total = self._left.total()
        self._took: defaultdict[int, list[float]] = defaultdict(list)
        self._since = time.monotonic()

    def update(self, weight: int) -> None:
        """Show that one more result, of this weight, is there."""
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
        """Seconds that the others will take, if each takes as long as those of its weight."""
        means = {weight: sum(took) / len(took) for weight, took in self._took.items()}
        share = sum(means.values()) / sum(means)
        return sum(left * means.get(weight, share * weight) for weight, left in self._left.items())


def clock(seconds: float) -> str:
    """Write seconds for a person."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"
