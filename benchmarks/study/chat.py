"""Questions and answers as a chat: worked examples of lm-eval's tasks."""

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import yaml  # type: ignore[import-untyped]

from sfi_core.errors import InputError

# few-shot examples with their reasoning written out, by field of the question
PATTERNS = {"mmlu/flan_cot_fewshot/mmlu_*.yaml": "question", "bbh/cot_fewshot/*.yaml": "input"}


def chats() -> list[str]:
    """Return chats in ChatML, the template of SmolLM2, a document a subject of questions.

    Raises:
        InputError: lm-eval is not installed.
    """
    tasks = Path(sysconfig.get_path("purelib")) / "lm_eval" / "tasks"
    seen: set[str] = set()  # some tasks share their examples, and no turn may be in both halves
    documents = []
    for pattern, field in PATTERNS.items():
        for path in sorted(tasks.glob(pattern)):
            fresh = [turn for turn in _turns(path, field) if turn not in seen]
            seen.update(fresh)
            documents.append("".join(fresh))
    if not any(documents):
        raise InputError(f"texts of kind dialogue must have lm-eval's tasks, got none in {tasks}")
    return [text for text in documents if text]


def _turns(path: Path, field: str) -> Iterator[str]:
    text = path.read_text(encoding="utf-8")
    if "!function" in text:  # a template that loads code
        return
    for sample in (yaml.safe_load(text).get("fewshot_config") or {}).get("samples") or ():
        turns = ("user", sample[field]), ("assistant", sample["target"])
        yield "".join(f"<|im_start|>{who}\n{said.strip()}<|im_end|>\n" for who, said in turns)
