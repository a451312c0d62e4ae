"""lm-evaluation-harness's own command line, which finds our decoding as its model `sfi`."""

import sys
from collections.abc import Sequence

from sfi_core.errors import ConfigError, SfiError, require
from sfi_core.machine.text import first_line

MODEL = "sfi_core.measure.evaluation.lm_eval_model:SfiLM"
# what lm-eval raises for a task, a file or an argument that it cannot take
THEIRS = (ValueError, KeyError, OSError)


def run_lm_eval(words: Sequence[str]) -> None:
    """Run lm-eval with these arguments, of the model `sfi` unless they name one; `SfiError` for what it refuses."""
    require("lm-eval needs", "eval", "lm_eval", "accelerate")
    # lm-eval is slow to import, and optional
    from lm_eval.__main__ import cli_evaluate  # noqa: PLC0415
    from lm_eval.api.registry import model_registry  # noqa: PLC0415

    if "sfi" not in model_registry:
        model_registry.register("sfi", target=MODEL)
    ours, sys.argv = sys.argv, ["lm-eval", *with_model(words)]
    try:
        cli_evaluate()
    except SfiError:
        raise
    except THEIRS as error:
        raise ConfigError(f"lm-eval: {first_line(error)}") from error
    finally:
        sys.argv = ours


def with_model(words: Sequence[str]) -> list[str]:
    """Name the model `sfi` among a run's arguments, whose own default is a model of transformers."""
    options = list(words[1:] if words[:1] == ["run"] else words)
    names = {word.partition("=")[0] for word in options}
    if not options or not options[0].startswith("-") or names & {"--model", "-M", "--config", "-C", "--help", "-h"}:
        return list(words)
    return ["run", "--model", "sfi", *options]
