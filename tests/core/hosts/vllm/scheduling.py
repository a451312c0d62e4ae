"""A stand-in for vLLM's scheduler: chunked prompts, blocks, preemption, tokens that come a step late."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

from sfi_core.hosts.serving.plan import Entry
from sfi_core.hosts.vllm.planner import Planner, Tracked
from sfi_core.hosts.vllm.settings import RequestSettings
from sfi_core.policies.built_in.sfi import SFI
from sfi_core.triggers.trigger import Trigger

BLOCK = 8
STOP = 3  # the token that ends a sentence


@dataclass
class Fake:
    """A live request whose next tokens are written down; `output_token_ids` are those that are known."""

    request_id: str
    num_prompt_tokens: int
    script: Sequence[int]
    output_token_ids: list[int] = field(default_factory=list)
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    generated: int = 0
    began: bool = False

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + len(self.output_token_ids)

    @property
    def ended(self) -> bool:
        return len(self.output_token_ids) == len(self.script)


class FakeScheduler:
    """Runs a planner; `late` tokens are known one engine step after the next one has been planned."""

    def __init__(
        self, config, *, slots: int = 4, late: bool = False, piece: int = 10, observer=None, evidence: int | None = None
    ):
        def make(own) -> SFI:
            return SFI(own, Trigger(frozenset({STOP}), own), [0, 1])

        self.config, self.late, self.piece = config, late, piece
        self.planner = Planner(make, slots=slots, block=BLOCK, layers=2, evidence=evidence, observer=observer)
        self.live: dict[str, Fake] = {}
        self.ended: dict[str, Tracked] = {}
        self.coming: list[tuple[Fake, int]] = []
        self.lost: list[str] = []
        self.blocks = 1

    def add(self, name: str, prompt: int, script: Sequence[int], /, **settings) -> None:
        self.live[name] = Fake(name, prompt, script)
        own = {f"sfi.{key}": value for key, value in settings.items()}
        self.planner.see(self.live[name], RequestSettings.of(own, self.config, lambda _: None))

    def step(self, names: Sequence[str] | None = None) -> dict[str, Entry]:
        """Schedule some requests, all that can go on by default; return their entries."""
        chosen = [
            one
            for one in self.live.values()
            if (names is None or one.request_id in names) and one.generated < len(one.script)
        ]
        lost, self.lost, resumed = self.lost, [], set()
        count, new, cached = {}, [], []
        for one in chosen:
            left = one.num_prompt_tokens + one.generated - one.computed
            count[one.request_id] = piece = min(left, self.piece)
            fresh = self.take(-(-(one.computed + piece) // BLOCK) - len(one.blocks))
            if one.began:
                cached.append((one.request_id, (list(fresh),) if fresh else None, one.computed))
            else:
                ids = {"req_id": one.request_id, "block_ids": (list(fresh),)}
                new.append(SimpleNamespace(**ids, num_computed_tokens=one.computed))
            resumed |= {one.request_id} if one.began and not one.blocks else set()
            one.began = True
            one.blocks += fresh
        names, blocks, computed = zip(*cached, strict=True) if cached else ((), (), ())
        again = SimpleNamespace(
            req_ids=names, new_block_ids=blocks, num_computed_tokens=computed, resumed_req_ids=resumed
        )
        plan = self.planner.plan(
            SimpleNamespace(
                num_scheduled_tokens=count, scheduled_new_reqs=new, scheduled_cached_reqs=again, preempted_req_ids=lost
            )
        )
        if self.late:
            self.settle()
        for one in chosen:
            one.computed += count[one.request_id]
            if one.computed == one.num_prompt_tokens + one.generated:
                self.coming.append((one, one.script[one.generated]))
                one.generated += 1
        if not self.late:
            self.settle()
        return dict(zip(count, plan.entries, strict=True))

    def settle(self) -> None:
        for one, token in self.coming:
            one.output_token_ids.append(token)
            if one.ended:
                self.end(one.request_id)
        self.coming = []

    def run(self) -> dict[str, Tracked]:
        while self.live:
            self.step()
            if self.late and all(one.generated == len(one.script) for one in self.live.values()):
                self.settle()
        return self.ended

    def end(self, name: str) -> None:
        """End or abort a request."""
        del self.live[name]
        ended = self.planner.finish(name)
        assert ended is not None
        self.ended[name] = ended

    def preempt(self, name: str) -> None:
        """Take a request's blocks, and drop the token that is not known yet, if there is one."""
        one = self.live[name]
        kept = [(who, token) for who, token in self.coming if who is not one]
        one.generated -= len(self.coming) - len(kept)
        self.coming = kept
        one.blocks, one.computed = [], 0
        self.lost.append(name)

    def take(self, count: int) -> list[int]:
        self.blocks += count
        return list(range(self.blocks - count, self.blocks))
