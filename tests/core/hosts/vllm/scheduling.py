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
        def make(request_config) -> SFI:
            return SFI(request_config, Trigger(frozenset({STOP}), request_config), [0, 1])

        self.config, self.late, self.piece = config, late, piece
        self.planner = Planner(make, slots=slots, block=BLOCK, layers=2, evidence=evidence, observer=observer)
        self.live: dict[str, Fake] = {}
        self.ended: dict[str, Tracked] = {}
        self.coming: list[tuple[Fake, int]] = []
        self.lost: list[str] = []
        self.blocks = 1

    def add(self, name: str, prompt: int, script: Sequence[int], /, **settings) -> None:
        self.live[name] = Fake(name, prompt, script)
        extra = {f"sfi.{key}": value for key, value in settings.items()}
        self.planner.see(self.live[name], RequestSettings.of(extra, self.config, lambda _: None))

    def step(self, names: Sequence[str] | None = None) -> dict[str, Entry]:
        """Schedule some requests, all that can go on by default; return their entries."""
        chosen = [
            request
            for request in self.live.values()
            if (names is None or request.request_id in names) and request.generated < len(request.script)
        ]
        lost, self.lost, resumed = self.lost, [], set()
        count, new, cached = {}, [], []
        for request in chosen:
            left = request.num_prompt_tokens + request.generated - request.computed
            count[request.request_id] = piece = min(left, self.piece)
            fresh = self.take(-(-(request.computed + piece) // BLOCK) - len(request.blocks))
            if request.began:
                cached.append((request.request_id, (list(fresh),) if fresh else None, request.computed))
            else:
                ids = {"req_id": request.request_id, "block_ids": (list(fresh),)}
                new.append(SimpleNamespace(**ids, num_computed_tokens=request.computed))
            resumed |= {request.request_id} if request.began and not request.blocks else set()
            request.began = True
            request.blocks += fresh
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
        for request in chosen:
            request.computed += count[request.request_id]
            if request.computed == request.num_prompt_tokens + request.generated:
                self.coming.append((request, request.script[request.generated]))
                request.generated += 1
        if not self.late:
            self.settle()
        return dict(zip(count, plan.entries, strict=True))

    def settle(self) -> None:
        for request, token in self.coming:
            request.output_token_ids.append(token)
            if request.ended:
                self.end(request.request_id)
        self.coming = []

    def run(self) -> dict[str, Tracked]:
        while self.live:
            self.step()
            if self.late and all(request.generated == len(request.script) for request in self.live.values()):
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
        request = self.live[name]
        others = [(who, token) for who, token in self.coming if who is not request]
        request.generated -= len(self.coming) - len(others)
        self.coming = others
        request.blocks, request.computed = [], 0
        self.lost.append(name)

    def take(self, count: int) -> list[int]:
        self.blocks += count
        return list(range(self.blocks - count, self.blocks))
