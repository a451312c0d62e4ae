"""`sfi lm-eval`: lm-evaluation-harness's own command line, with our decoding as its model `sfi`."""

import sys
from importlib.util import find_spec

import typer

MODEL = "sfi_core.measure.evaluation.lm_eval_model:SfiLM"
# what lm-eval raises for a task, a file or an argument that it cannot take
THEIRS = (ValueError, KeyError, OSError)


def lm_eval(context: typer.Context) -> None:
    """Run lm-evaluation-harness with slow-fast decoding as its model "sfi".

    Every argument goes to lm-eval; sfi lm-eval run --help shows its own help. Arguments of the model:
    pretrained (as --model elsewhere, or bundled), policy, preset, backend, device, dtype, kv_device_budget
    and every setting of decoding. With --use_cache give each method a file of its own.

    For example:

      sfi lm-eval --model sfi --model_args pretrained=smollm2,policy=codescan,budget=1024 --tasks gsm8k

      sfi lm-eval --model sfi --model_args selector.alpha=0.4 --tasks lambada --limit 50 -o results

      sfi lm-eval ls tasks
    """
    from sfi_core.errors import BackendError, ConfigError, SfiError

    missing = [name for name in ("lm_eval", "accelerate") if find_spec(name) is None]
    if missing:
        raise BackendError(
            f"lm-eval needs {missing[0]}, which is not installed; pip install 'sfi-toolkit[eval]'"
        )
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.registry import model_registry

    from sfi_core.models.load import first_line

    if "sfi" not in model_registry:
        model_registry.register("sfi", target=MODEL)
    ours, sys.argv = sys.argv, ["lm-eval", *context.args]
    try:
        cli_evaluate()
    except SfiError:
        raise
    except THEIRS as error:
        raise ConfigError(f"lm-eval: {first_line(error)}") from error
    finally:
        sys.argv = ours
