"""A model under SFI: its forward passes, and their runs."""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from threading import RLock, get_ident, local
from typing import Any
from uuid import uuid4

import torch

from sfi_core.distributed.ranks import ranks_of
from sfi_core.engine.audit import Audit, check_audit, compare_logits, dense_twin
from sfi_core.engine.batch_pass import Watcher
from sfi_core.engine.maintenance import worked_off_together
from sfi_core.engine.picking import CPU_PIECE, PIECE
from sfi_core.engine.prompt_cache import UNKNOWN
from sfi_core.engine.report import RunReport
from sfi_core.engine.run import Run
from sfi_core.errors import ConfigError
from sfi_core.hosts.transformers import checks
from sfi_core.hosts.transformers.attention import probing
from sfi_core.hosts.transformers.cache import SfiCache, cache_in, under_way
from sfi_core.hosts.transformers.fusion import Fusion
from sfi_core.hosts.transformers.shapes import StateChecks
from sfi_core.hosts.transformers.stores import TierPlan
from sfi_core.models.describe import describe_model
from sfi_core.models.load import DTYPES, check_split
from sfi_core.models.source import model_digest
from sfi_core.observers.events import LogitsEvent, RunEvent
from sfi_core.observers.observer import Observer, Observers
from sfi_core.policies import EvidencePolicy, policy_class
from sfi_core.settings.config import SfiConfig
from sfi_core.settings.engine import PAGE_SIZE, AuditConfig, EngineOptions
from sfi_core.sizes import memory
from sfi_core.state.kv_cache import KVCache
from sfi_core.state.kv_store import KVStore
from sfi_core.state.layer_pages import LayerShape
from sfi_core.state.side_stream import ring_places
from sfi_core.triggers.trigger import Trigger, resolve_triggers

UNKNOWN_CAPACITY = 1024
# of a run and its cache, for the arguments of a call of the model: whether the body, a step, is replayed
NextStep = Callable[["Session", Run, SfiCache, tuple[Any, ...], dict[str, Any]], AbstractContextManager[bool]]


class Session:
    """A model under SFI.

    `config` are the settings as asked for, `policy.config` what runs: a policy may adapt its own copy. `observer` is
    all observers as one. `ranks` are the processes among which the model's heads are split, `fusion` the modules that
    run fused. `audit` is None for no audit. A call of `model.generate` holds the `lock`: those of several threads wait
    for each other. `next_step` decides whether a step of another loop is replayed; None where all loops are sfi's.
    """

    def __init__(
        self, model: Any, tokenizer: Any, config: SfiConfig, policy: str, observers: Sequence[Observer],
        page_size: int | None, audit: AuditConfig | None, engine: EngineOptions,
    ) -> None:  # fmt: skip
        config = checks.with_head_file(config, policy, model)
        self.model, self.config, self.policy_name = model, config, policy
        self.ranks = ranks_of(model)
        if self.ranks.size > 1:
            check_split(model.config, model.tp_plan, self.ranks.size)
            engine = replace(engine, overlap=False)  # all calls of other ranks in one order
        self.trigger_token_ids = resolve_triggers(tokenizer, config, needed=policy_class(policy).triggered)
        trigger = Trigger(frozenset(self.trigger_token_ids), config)
        checks.check_supported(model)
        cache = SfiCache(model)
        managed = [layer.index for layer in cache.managed]
        layers = (*managed, *(index for index, owner in cache.owners.items() if owner in managed))
        if unknown := sorted(set(config.dense_layers) - set(layers)):  # the setting would have no effect
            raise ConfigError(f"dense_layers must be among the full-attention layers {list(layers)}, got {unknown}")
        self.policy = policy_class(policy)(config, trigger, layers)
        self.observer = Observers(observers)
        self.audit, self.engine, self.fusion = audit, engine, Fusion()
        self.lock, self._thread, self._open = RLock(), get_ident(), set[SfiCache]()
        self._page_size = page_size
        self.next_step: NextStep | None = None
        self.backend = "torch"
        self._run: Run | None = None
        self._here = local()
        self.state_checks = StateChecks(model)

    @property
    def report(self) -> RunReport | None:
        """Counts, reasons, ratios and paths of this thread's last run, in a thread without one of the last run."""
        run = getattr(self._here, "run", self._run)
        if run is None:
            return None
        weights, fusion = getattr(self.model, "sfi_weights", None), self.fusion
        floats = {} if weights is None else dict(weights.floats)
        fused, left_alone = dict(fusion.modules), dict(fusion.left_alone)
        return replace(RunReport.of(run), fused=fused, left_alone=left_alone, not_blocks=floats)

    @property
    def run(self) -> Run:
        """The state of the run that `report` is of."""
        run: Run | None = getattr(self._here, "run", self._run)
        assert run is not None, "a run has begun"
        return run

    def cache(
        self, capacity: int | None = None, prompt_length: int | None = None, stop_ids: frozenset[int] = frozenset()
    ) -> SfiCache:
        """Make the cache of one run (`past_key_values`), for a loop of one's own around `model(...)`.

        Without a `capacity`, the tokens a request may reach, the cache grows by copying. `prompt_length` are
        the padded tokens of a prompt that comes in several pieces; `stop_ids` end a request.
        """
        return SfiCache(self.model, capacity, prompt_length, stop_ids)

    def forecast(
        self,
        batch: int,
        prompt_tokens: int,
        capacity: int,
        prefill_chunk: int = 0,
        generated: int | None = None,
        graphs: bool = False,
        beginning: int = 0,
    ) -> memory.Forecast:
        """Forecast the memory of a run; a request generates `generated` tokens, None for what `capacity` leaves.

        The first `beginning` tokens of all prompts are the same and known.
        """
        model, policy, tiers, shapes = self.model, self.policy, self.tiers, self.shapes()
        page, shared = self._sharing(batch, beginning)
        capacity = -(-capacity // (page or 1)) * (page or 1)
        heads = model.config.get_text_config(decoder=True).num_attention_heads
        on_triton = self.backend == "triton"  # a slow step refreshes all requests at once, as the oracle chooses
        refreshed = batch if on_triton or (policy.chooses and not policy.has_kept) else 1
        if isinstance(policy, EvidencePolicy) and tiers is None and not (on_triton and self.engine.overlap):
            refreshed *= worked_off_together(refreshed * heads * capacity, len(shapes), self.backend)
        drafting = memory.Drafting(
            tested=policy.config.draft.max_tokens + 1,
            together=CPU_PIECE if model.device.type == "cpu" else PIECE,
            compares=LogitsEvent in self.observer.wants,
            explicit=not on_triton,
        )
        expected = memory.forecast(
            model, shapes, policy, batch=batch, prompt_tokens=prompt_tokens - beginning, capacity=capacity,
            shared=shared, prefill_chunk=prefill_chunk, backend=self.backend, tiers=tiers is not None,
            refreshed_together=refreshed,
            evidence_buffers=ring_places(model.device, overlap=self.engine.overlap), graphs=graphs,
            drafting=drafting if self.engine.lossless else None,
        )  # fmt: skip
        if tiers is None:
            return expected
        tiered, _ = tiers.planned(batch, capacity, generated or capacity - prompt_tokens)
        host = tiered.host_bytes if model.device.type == "cpu" else 0  # both tiers in one memory
        packed, norms = tiered.parts["packed"], tiered.parts["norms"]
        others = tiered.device_bytes - packed - norms
        return replace(expected, kv_bytes=host + others, packed_bytes=packed, summary_bytes=0, norm_bytes=norms)

    @property
    def most_together(self) -> int | None:
        """The most requests together in a lossless run, None for any: states cannot go back one by one."""
        return 1 if any(shape.state_bytes for shape in self.shapes()) else None

    def together(self, asked: int | None) -> int | None:
        """Return `asked`, or the most requests of a lossless run together; raise `ConfigError` if `asked` is more."""
        most = self.most_together if self.engine.lossless else None
        if most is None:
            return asked
        if asked is not None and asked > most:
            raise ConfigError(f"max_batch must be at most {most} in a lossless run of a model with states, got {asked}")
        return most

    @property
    def tiers(self) -> TierPlan | None:
        """How host and device divide the keys and values; None without a device budget."""
        budget = self.engine.kv_device_budget
        if budget is None:
            return None
        return TierPlan(budget, self.policy, self.policy_name, self.shapes(), self.engine.kv_page, self.backend)

    @property
    def page_size(self) -> int | None:
        """Tokens of a cache page; None for one page a request."""
        if self.engine.kv_device_budget is not None:
            return self.engine.kv_page
        return self._page_size or (PAGE_SIZE if self.backend == "triton" else None)

    def shapes(self) -> list[LayerShape]:
        """Return the layers' shapes; the first call runs a pass over two tokens."""
        shapes, dtype = self.state_checks.shapes(), self.kv_dtype
        if dtype is None:
            return shapes
        return [replace(shape, itemsize=dtype.itemsize) if shape.window is None else shape for shape in shapes]

    @property
    def model_key(self) -> str:
        """What keys and values of a prompt belong to: the checkpoint, or this model alone, with the numbers' types."""
        model, weights = self.model, getattr(self.model, "sfi_weights", None)
        kinds = "" if weights is None else "+".join(sorted(weights.blocks))
        digest = model_digest(model) or model.__dict__.setdefault("sfi_key", f"{UNKNOWN} {uuid4().hex}")
        return " ".join(filter(None, (digest, str(self.kv_dtype or model.dtype), kinds)))

    @property
    def kv_dtype(self) -> torch.dtype | None:
        """The numbers of the cache; None for the model's."""
        asked = self.engine.kv_dtype
        return None if asked == "auto" else DTYPES[asked]

    def before_forward(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Enter a step: transformers calls this before every forward pass of the model.

        A pass without a cache of ours stays as it is without sfi; with another cache it is refused, but in another
        thread, whose call may have begun before the session.
        """
        if probing():
            return
        cache = cache_in(kwargs)
        if get_ident() == self._thread:
            checks.check_cache(cache)
        cache = cache if isinstance(cache, SfiCache) else None
        under_way.set(cache)
        if cache is None or cache.shadowed or cache.planned:
            return
        ids: Any = kwargs.get("input_ids", args[0] if args else None)
        tokens = ids if ids is not None else kwargs["inputs_embeds"]
        new = tokens.shape[1]
        run = cache.run or self.start(cache, len(tokens), new)
        cache.attach(run)
        # transformers does not say so: one token after the prompt's end is a decoding step
        decodes = cache.seen > 0 and new == 1 and cache.seen + 1 > (cache.prompt_length or 1)
        cache.replayed = False
        self._open.add(cache)
        if decodes:
            if not run.recorded:  # transformers' loop does not tell; ours has told already
                run.record(run.ranks.same_tokens(ids[:, -1]))
            if self.next_step is not None:
                cache.replayed = cache.span.enter_context(self.next_step(self, run, cache, args, kwargs))
            run.begin_decode()
            if audited_rows(run):
                shadow(model, run, cache, args, kwargs)
                under_way.set(cache)
        else:
            if cache.replays is not None:
                cache.span.enter_context(cache.replays.eager_pass())
            self._begin_prompt(run, cache, ids, tokens, kwargs)
        if not cache.replayed:
            cache.span.enter_context(run.observer.span("forward" if decodes else "prefill"))
            cache.span.enter_context(run.launches())

    def _begin_prompt(self, run: Run, cache: SfiCache, ids: Any, tokens: torch.Tensor, kwargs: dict[str, Any]) -> None:
        # a piece of the prompts, of token `ids` or of embeddings alone
        batch, new = tokens.shape[:2]
        final = cache.seen + new >= (cache.prompt_length or new)
        count = checks.prompt_tokens(kwargs.get("attention_mask"), batch, new, cache.seen, final=final)
        self.state_checks.padding(count)
        if cache.seen and new > 1:
            self.state_checks.passes("a prompt in pieces")
        run.begin_prefill(count, ids, final=final)
        keep = kwargs.get("logits_to_keep")
        if cache.owners and isinstance(keep, int) and keep:
            # with a number, layers that read another one's keys would get the last tokens' queries only
            kwargs["logits_to_keep"] = torch.arange(-keep, 0, device=tokens.device)

    def after_forward(self, model: Any, args: tuple[Any, ...], output: Any) -> None:
        """Leave a step: transformers calls this after every forward pass of the model."""
        cache = None if probing() else under_way.get()
        if cache is None:
            return
        under_way.set(None)
        cache.detach()
        if cache.run is not None and not (cache.shadowed or cache.planned):
            self._open.discard(cache)
            cache.span.close()
            run = cache.run
            run.maintenance.join()
            if self.next_step is not None:  # sfi's loop does so itself
                run.count_selected()
            if cache.on_prompt_end is not None and run.batch_pass.ended:
                cache.on_prompt_end(cache.seen)
            if cache.dense_BV is not None:
                compare_shadow(run, output.logits[:, -1], cache.dense_BV)
                cache.dense_BV = None

    def start(
        self, cache: SfiCache, batch: int, new: int, *, store: KVStore | None = None, watchers: tuple[Watcher, ...] = ()
    ) -> Run:
        """Make the run of a cache that has none.

        `new` are the padded tokens of the first pass; `watchers` look at every layer, before the audit.
        """
        if store is None:
            capacity = cache.capacity or max(new, cache.prompt_length or 0) + UNKNOWN_CAPACITY
            prompt = cache.prompt_length or new
            store = self.store(batch, capacity, cache.generated or capacity - prompt, cache.beginning)
        audit = () if self.audit is None else (Audit(self.audit),)
        self._run = self._here.run = Run(
            self.policy, self.observer, store, cache.stop_ids, self.model.device, self.engine,
            self.ranks, self.audit, (*watchers, *audit),
        )  # fmt: skip
        cache.attach(self._run)
        if self.state_checks.known:
            # every rank makes an event: all take the first rank's run id and clock
            run_id, began_unix_ns = self.ranks.exchange((uuid4().hex, time.time_ns()))[0]
            event = RunEvent(
                batch=batch, requests=cache.requests or batch, policy=self.policy_name, backend=self.backend,
                device=str(self.model.device), config=self.policy.config.to_dict(),
                trigger_token_ids=self.trigger_token_ids, model=describe_model(self.model, self.shapes()),
                lossless=self.engine.lossless, audit=None if self.audit is None else self.audit.to_dict(),
                rank=self.ranks.number, ranks=self.ranks.size, run_id=run_id, began_unix_ns=began_unix_ns,
            )  # fmt: skip
            self.observer.on(event)
        return self._run

    def store(self, batch: int, capacity: int, generated: int, beginning: int = 0) -> KVStore:
        """Make the store of a run that generates so many tokens; `beginning` as in `forecast`."""
        if self.tiers is None:
            page, shared = self._sharing(batch, beginning)
            return KVCache(batch, capacity, page, self.backend, dtype=self.kv_dtype, shared=shared)
        return self.tiers.store(batch, capacity, generated, self.model.device, self.model.dtype)

    def _sharing(self, batch: int, beginning: int) -> tuple[int | None, int]:
        # the tokens of a page, and those in pages of all requests: not all of the beginning, so that each adds some
        page = self.page_size or PAGE_SIZE
        shared = 0 if batch == 1 or self.tiers is not None else max(0, beginning - 1) // page * page
        return (page, shared) if shared else (self.page_size, 0)

    def close(self) -> None:
        """Leave a step that an error cut short."""
        under_way.set(None)  # it would keep the cache's memory
        for cache in self._open:
            cache.span.close()
        if self._run is not None:
            self._run.maintenance.drop()
            if self._run.attend is not None and self._run.device.type == "cuda":
                # a step launched ahead may still run, and its memory may go now
                torch.cuda.synchronize(self._run.device)

    def observe(self) -> None:
        """Prepare for the observers and the audit; raise `ConfigError` for what model, ranks or backend rule out."""
        if self.policy.mixes_heads:
            checks.check_heads(self.policy, self.shapes(), self.model, self.ranks.size)
        if self.tiers is not None and self.ranks.size > 1:
            raise ConfigError("kv_device_budget must be off under tensor parallelism")
        if self.kv_dtype is not None and (self.backend == "triton" or self.tiers is not None):
            where = "the triton backend" if self.tiers is None else "kv_device_budget"
            raise ConfigError(f"kv_dtype must be auto under {where}, got {self.engine.kv_dtype}")
        if self.audit is not None:
            check_audit(self.audit, self.shapes())
        if self.observer.each or self.ranks.size > 1:  # every rank, or none
            self.shapes()  # now: it takes a forward pass, which cannot be made within another


def shadow(model: Any, run: Run, cache: SfiCache, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Run an audited step densely, then undo its changes to the cache, but for keys that the step rewrites."""
    held, cache.shadowed = cache.taken(), True
    cache.attach(dense_twin(run))
    try:
        with run.observer.span("shadow"):
            cache.dense_BV = model(*args, **kwargs).logits[:, -1]
    finally:
        cache.shadowed = False
        cache.put_back(held)
        cache.attach(run)


def compare_shadow(run: Run, logits_BV: torch.Tensor, dense_BV: torch.Tensor) -> None:
    """Tell the observer how far the step's distributions are from its shadow's."""
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
