"""The loop of a lossless run: draft, verify, accept, take back, refresh; each request on its own."""

from collections.abc import Generator, Sequence
from dataclasses import replace

from sfi_core.engine.lossless.drafts import Block, Drafts, Outcome
from sfi_core.engine.lossless.rule import Cost, DraftRule
from sfi_core.engine.scheduler import Scheduler
from sfi_core.errors import ConfigError
from sfi_core.hosts.transformers.block_pass import BlockPass, Steps
from sfi_core.hosts.transformers.lossless import most_drafted, most_together
from sfi_core.hosts.transformers.session import Session
from sfi_core.models.byte_model import ByteModel
from sfi_core.models.describe import describe_model


def decode_lossless(
    scheduler: Scheduler, decoder: Steps, outcome: Outcome | None = None
) -> Generator[list[list[int]]]:
    """Yield each pass's tokens by row: none where a request drafts, one or more where it verifies.

    The tokens are full attention's: a drafted token counts once a dense pass over the draft has picked the
    same one, with the same random numbers. No request of the `scheduler` has begun. For benchmarks, `outcome`
    decides how much of a draft is kept; None compares the picks.
    """
    token_B = scheduler.sample(scheduler.prefill())
    scheduler.record(token_B)
    yield [[token] for token in token_B]
    run, session = decoder.session.run, decoder.session
    draft = run.policy.config.draft
    rule = DraftRule(
        config=replace(draft, max_tokens=most_drafted(session, draft.max_tokens)),
        stop_ids=run.stop_ids,
        cost=draft_cost(session),
        selecting=run.policy.selection_tokens,
    )
    drafts = Drafts(run, rule, scheduler.limits, outcome)
    block_pass = BlockPass(decoder, scheduler.pad_id)
    try:
        while scheduler.admit(token_B):
            logits_XV = block_pass(drafts)
            token_X = scheduler.sampler.pick(logits_XV, *positions(drafts.blocks))
            given = drafts.record(token_X, logits_XV)
            block_pass.keep(drafts.blocks, given)
            scheduler.take(given)
            token_B = [state.tokens[-1] for state in run.requests]
            yield given
    finally:
        drafts.drop()


def positions(blocks: Sequence[Block | None]) -> tuple[list[int], list[int], list[tuple[int, ...]]]:
    """Return the row of every token to pick, how many drafted tokens precede it, and which."""
    row_X, offset_X, tail_X = [], [], []
    for row, block in enumerate(blocks):
        if block is None:
            continue
        counts = range(len(block.drafted) + 1) if block.reason else [len(block.drafted)]
        for count in counts:
            row_X.append(row)
            offset_X.append(count)
            tail_X.append(block.drafted[:count])
    return row_X, offset_X, tail_X


def together(session: Session, asked: int | None) -> int | None:
    """Return the most requests to decode together: `asked`, or the model's limit in lossless runs.

    Raise `ConfigError` if `asked` is more than the limit.
    """
    most = most_together(session) if session.engine.lossless else None
    if most is None:
        return asked
    if asked is not None and asked > most:
        raise ConfigError(
            f"max_batch must be at most {most} in a lossless run of a model with sliding-window layers, "
            f"got {asked}"
        )
    return most


def draft_cost(session: Session) -> Cost:
    """Return the cost of a fast step relative to a verification, by the bytes that both read."""
    dense_layers, refreshes = session.policy.config.dense_layers, session.policy.refreshes()
    batch = session.run.store.batch
    description = describe_model(session.model, session.shapes())
    model = ByteModel.of(description, dense_layers=dense_layers, batch=batch)

    def cost(length: float, attended: float) -> float:
        whole = model.slow(length, min(length, attended)) if refreshes else model.dense(length)
        return min(1.0, float(model.fast(length, attended)) / float(whole))

    return cost
