"""What `benchmarks/quality.sh` runs, and how long that takes; see `quality.py` for the estimate."""

from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from sfi_core.errors import SfiError

RULER_LENGTHS = (4096, 16384, 32768)
OWN_TASKS = (
    "niah-single", "niah-multi-key", "niah-multi-value", "niah-multi-query", "variable-tracking",
    "common-words", "sentence-recall",
)  # fmt: skip
START = 60.0  # seconds in which a command loads the model


@dataclass(frozen=True, kw_only=True)
class Part:
    """One call of `sfi eval`.

    Attributes:
        name: Its name, and that of its folder.
        task: A comma list of our tasks, or a task of the harness.
        harness: Whether it is the harness's.
        prompt: Tokens of a prompt.
        answer: Tokens of an answer, at most.
        documents: Documents of each task in it.
        tasks: The number of tasks in it.
        decodes: Whether a policy can make a difference: not where an answer is one token of a choice.
    """

    name: str
    task: str
    harness: bool
    prompt: int
    answer: int
    documents: int
    tasks: int = 1
    decodes: bool = True

    def seconds(self, variants: int, probe: "Probe") -> float:
        """Estimate what all documents take under all methods and budgets."""
        variants = variants if self.decodes else 1
        read = self.prompt * probe.prompt_token * max(1.0, self.prompt / probe.length)
        document = (variants if self.harness else 1) * read + variants * self.answer * probe.token
        return START + self.documents * self.tasks * document


@dataclass(frozen=True, kw_only=True)
class Probe:
    """What a short run has measured: seconds of a prompt token and of a decoded token at `length` tokens."""

    length: int
    prompt_token: float
    token: float


def parts_of(limit: int, *, dry: bool) -> list[Part]:
    """List the parts whose prompts a model of `limit` positions can hold."""
    if dry:
        tiny = {"harness": True, "prompt": 170, "documents": 2}
        return [
            Part(name="own-256", task="bundled-recall,bundled-recall-1", harness=False, prompt=256, answer=64,
                 documents=2, tasks=2),
            Part(name="tiny_text", task="tiny_text", answer=8, **tiny),
            Part(name="tiny_choice", task="tiny_choice", answer=0, decodes=False, **tiny),
        ]  # fmt: skip
    lengths = [length for length in RULER_LENGTHS if length + 512 <= limit]
    return [
        *(
            Part(name=f"own-{length}", task=",".join(OWN_TASKS), harness=False, prompt=length, answer=150,
                 documents=40, tasks=len(OWN_TASKS))
            for length in lengths
        ),
        *(
            Part(name=f"ruler-{length}", task="ruler", harness=True, prompt=length, answer=128, documents=100,
                 tasks=13)
            for length in lengths
        ),
        Part(name="gsm8k_cot", task="gsm8k_cot", harness=True, prompt=1000, answer=256, documents=1319),
        # documents of up to millions of words, cut to the model's positions
        Part(name="longbench2", task="longbench2", harness=True, prompt=min(limit, 100_000), answer=0,
             documents=25, tasks=20, decodes=False),
    ]  # fmt: skip


def known_parts(parts: list[Part], folder: Path | None) -> tuple[list[Part], list[str]]:
    """Split off the parts that the installed harness does not have, each with the reason."""
    kept, left_out = [], []
    wanted = [part for part in parts if part.harness]
    names: set[str] = set()
    if wanted and find_spec("lm_eval") is not None:
        from sfi_core.measure.evaluation.harness import task_manager  # noqa: PLC0415 - an extra

        names = set(task_manager(folder, defaults=folder is None).task_index)
    lacking = [name for name in ("wonderwords", "nltk") if find_spec(name) is None]
    for part in parts:
        if part.harness and part.task not in names:
            left_out.append(f"{part.name}: lm-evaluation-harness does not have {part.task!r} here")
        elif part.task == "ruler" and lacking:
            left_out.append(f"{part.name}: it needs {lacking[0]}; pip install wonderwords nltk")
        else:
            kept.append(part)
    return kept, left_out


def capped(parts: list[Part], hours: float | None, variants: int, probe: Probe) -> list[Part]:
    """Take documents away, of all parts alike, until the estimate stays within the hours.

    Raises:
        SfiError: Not even one document of each task does.
    """

    def total(some: list[Part]) -> float:
        return sum(part.seconds(variants, probe) for part in some) / 3600

    if hours is None or total(parts) <= hours:
        return parts
    least = [replace(part, documents=1) for part in parts]
    if total(least) > hours:
        raise SfiError(
            f"hours must be at least {total(least):.1f} for a document of each task, got {hours:g}"
        )
    low, high = 0.0, 1.0
    for _ in range(40):
        share = (low + high) / 2
        some = [replace(part, documents=max(1, int(share * part.documents))) for part in parts]
        low, high = (share, high) if total(some) <= hours else (low, share)
    return [replace(part, documents=max(1, int(low * part.documents))) for part in parts]
