"""The bundled example: a long document, a request, the answer, and the run's settings.

`python -m sfi_core.bundled.example` writes `example.json` anew.
"""

import json
import random
from dataclasses import dataclass
from pathlib import Path

from sfi_core.bundled.corpus import recall
from sfi_core.settings.config import SfiConfig

FILE = Path(__file__).parent / "example.json"
SEED, SENTENCES, ASKED = 901_000, 760, 5
# The prompt's last token is the first person's name, so that its query alone makes the first selection; the
# recent window holds the request and the answer so far.
SETTINGS = {"budget": 256, "recent": 128, "window_prefill": 1, "slow_start": 1}


@dataclass(frozen=True, slots=True)
class Example:
    """A prompt with its only right completion.

    Under `config`, `sfi` selects less than a tenth of the context. The prompt ends with the first word of the answer.
    """

    prompt: str
    answer: str
    config: SfiConfig


def load_example() -> Example:
    """Read the example."""
    data = json.loads(FILE.read_text(encoding="utf-8"))
    return Example(data["prompt"], data["answer"], SfiConfig().replace(**data["config"]))


def main() -> None:
    """Draw the document from its seed and write the example."""
    drawn = recall(random.Random(SEED), SENTENCES, ASKED)
    first = f" {drawn.names[0]}"
    data = {"prompt": drawn.prompt + first, "answer": drawn.answer.removeprefix(first), "config": SETTINGS}
    FILE.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
