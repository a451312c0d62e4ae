"""`sfi lm-eval`: lm-evaluation-harness's own command line, with our decoding as its model `sfi`."""

import typer


def lm_eval(context: typer.Context) -> None:
    """Run lm-evaluation-harness with slow-fast decoding as its model "sfi", unless --model names another.

    Every argument goes to lm-eval; sfi lm-eval run --help shows its own help. Arguments of the model:
    pretrained (as --model elsewhere, or bundled), policy, preset, backend, device, dtype, kv_device_budget
    and every setting of decoding. With --use_cache give each method a file of its own.

    For example:

      sfi lm-eval --model_args pretrained=smollm2,policy=codescan,budget=1024 --tasks gsm8k

      sfi lm-eval --model_args selector.alpha=0.4 --tasks lambada --limit 50 -o results

      sfi lm-eval ls tasks
    """
    from sfi_core.measure.evaluation.lm_eval_run import run_lm_eval

    run_lm_eval(context.args)
