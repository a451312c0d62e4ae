"""A vLLM engine in a process of its own, for what a process can be told only at its start.

    python -m tests.vllm.apart '{"extra": {...}, "options": {...}, "max_tokens": 48}'

Completes the bundled example's prompt and prints a line of JSON: its tokens, what the answer says of it, and
the class of the attention.
"""

import json
import sys

from tests.vllm.engines import EXAMPLE, ask, engine


def main() -> None:
    """Run it."""
    given = json.loads(sys.argv[1])
    with engine(given["extra"], **given["options"]) as llm:
        output = ask(llm, [EXAMPLE["prompt"]], max_tokens=given["max_tokens"])[0]
        report = {
            "tokens": list(output.outputs[0].token_ids),
            "told": (output.kv_transfer_params or {}).get("sfi"),
            "attention": llm.collective_rpc(attention_class),
        }
        print("\n" + json.dumps(report))  # noqa: T201


def attention_class(worker: object) -> str:
    """Return the class of a worker's first attention layer."""
    modules = worker.model_runner.compilation_config.static_forward_context
    return type(next(iter(modules.values())).impl).__name__


if __name__ == "__main__":
    main()
