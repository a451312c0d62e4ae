"""The bundled example: a long document, a request, the right answer, and the settings it is run with."""

import json
from dataclasses import dataclass
from pathlib import Path

from sfi_core.config import SfiConfig

FILE = Path(__file__).parent / "example.json"


@dataclass(frozen=True, slots=True)
class Example:
    """A prompt with its answer.

    Attributes:
        prompt: Document and request.
        answer: The only right completion.
        config: Settings under which `sfi` reads at most a tenth of the context.
    """

    prompt: str
    answer: str
    config: SfiConfig


def load_example() -> Example:
    """Read the example."""
    data = json.loads(FILE.read_text(encoding="utf-8"))
    return Example(data["prompt"], data["answer"], SfiConfig().replace(**data["config"]))
