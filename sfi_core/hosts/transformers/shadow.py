"""The shadow pass: run an audited step densely first, for its dense next-token distribution."""

from collections.abc import Mapping
from typing import Any

import torch

from sfi_core.engine.audit import compare_logits
from sfi_core.engine.derived_runs import dense_twin
from sfi_core.engine.run import Run
from sfi_core.hosts.transformers.cache import SfiCache
from sfi_core.observers.events import LogitsEvent


class Shadow:
    """Runs an audited step twice; the second pass finds nothing changed.

    `under_way` says whether the current forward pass is a shadow.
    """

    def __init__(self) -> None:
        self.under_way = False
        self._dense_BV: torch.Tensor | None = None

    @staticmethod
    def due(run: Run) -> bool:
        """Say whether the step that has begun is audited, and not dense already."""
        return bool(audited_rows(run))

    def run(self, model: Any, cache: SfiCache, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Run the model's step densely, then undo its changes to the cache.

        The keys of the step's own token stay: the step overwrites them.
        """
        run = cache.run
        assert run is not None, "a run has begun"
        kept = cache.taken()
        self.under_way = True
        cache.attach(dense_twin(run))
        try:
            with run.observer.span("shadow"):
                self._dense_BV = model(*args, **kwargs).logits[:, -1]
        finally:
            self.under_way = False
            cache.put_back(kept)
            cache.attach(run)

    def compare(self, run: Run, logits_BV: torch.Tensor) -> None:
        """Tell the observer how far the step's distributions are from its shadow's, if there is one."""
        if self._dense_BV is None:
            return
        dense_BV, self._dense_BV = self._dense_BV, None
        rows = audited_rows(run)
        chosen = torch.tensor(rows, device=logits_BV.device)
        compared = compare_logits(logits_BV[chosen], dense_BV[chosen])
        steps = tuple(run.requests[row].step for row in rows)
        run.observer.on(LogitsEvent(requests=run.requests_of(rows), steps=steps, **compared))


def audited_rows(run: Run) -> tuple[int, ...]:
    """Return the rows of the audited requests whose step reads sparsely."""
    audit, states = run.audit, run.requests
    if audit is None:
        return ()
    sparse = run.batch_pass.fast
    if run.policy.mixes_heads:  # some heads of a slow step read sparsely
        sparse = tuple(sorted((*sparse, *run.batch_pass.slow)))
    return tuple(row for row in sparse if audit.due(states[row].step, slow=states[row].slow))
