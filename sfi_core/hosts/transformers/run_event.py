"""The event of a run that begins."""

import time
from typing import Any
from uuid import uuid4

from sfi_core.models.describe import describe_model
from sfi_core.observers.events import RunEvent


def run_event(session: Any, batch: int, requests: int) -> RunEvent:
    """Describe a run of so many rows and requests; the session knows the layers' shapes.

    Every rank must call it: all take the first rank's run id and clock.
    """
    run_id, began_unix_ns = session.ranks.first_ones((uuid4().hex, time.time_ns()))
    return RunEvent(
        batch=batch,
        requests=requests,
        policy=session.policy_name,
        backend=session.backend,
        device=str(session.model.device),
        config=session.policy.config.to_dict(),
        trigger_token_ids=session.trigger_token_ids,
        model=describe_model(session.model, session.shapes()),
        lossless=session.engine.lossless,
        audit=None if session.audit is None else session.audit.to_dict(),
        rank=session.ranks.number,
        ranks=session.ranks.size,
        run_id=run_id,
        began_unix_ns=began_unix_ns,
    )
