"""`sfi generate`: decode prompts under a policy."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from sfi_cli import options as o
from sfi_cli.settings import Given, given
from sfi_core.errors import ConfigError
from sfi_core.settings.engine import AuditConfig, EngineOptions
from sfi_core.settings.policy_names import default_policy

_of = partial(o.option, "Options")


def generate(
    prompt: Annotated[o.Text, typer.Argument(help="Text to continue; - or a pipe is stdin. Else an example.")] = None,
    prompt_file: Annotated[o.File, _of("File of a prompt; - is stdin.", "--prompt-file", "-f")] = None,
    batch: Annotated[o.File, _of('JSON Lines: "prompt" or "messages"; id, seed, temperature, max_new_tokens.')] = None,
    max_batch: Annotated[o.Number, _of("Most prompts decoded together.", shown="as many as fit into memory")] = None,
    chat: Annotated[bool, _of("Apply the chat template.", "--chat")] = False,
    max_new_tokens: Annotated[int, _of("Most tokens to generate.", "--max-new-tokens", "-n")] = 256,
    compare: Annotated[bool | None, _of("Also run full-kv.", shown="only for the bundled example")] = None,
    model: o.Model = None,
    dtype: o.Dtype = "auto",
    device: o.Device = "auto",
    kv_device_budget: o.KvDeviceBudget = None,
    trust_remote_code: o.TrustRemoteCode = False,
    policy: o.PolicyOrDefault = None,
    preset: o.Preset = None,
    config: o.Config = None,
    sets: o.Sets = None,
    budget: o.Budget = None,
    recent: o.Recent = None,
    trigger: o.Triggers = None,
    t_max: o.TMax = None,
    lossless: o.Lossless = False,
    draft_max: o.DraftMax = None,
    temperature: o.Temperature = None,
    top_p: o.TopP = None,
    seed: o.Seed = 0,
    prompt_cache: o.PromptCache = None,
    trace: Annotated[o.File, o.option(o.TRACE, "Record a trace into this folder.")] = None,
    audit: o.Audit = None,
    json: o.Json = False,
    quiet: o.Quiet = False,
    output: o.OutputPath = None,
    force: o.Force = False,
    resume: Annotated[bool, o.option(o.OUTPUT, "Go on with a --batch and its -o FILE.jsonl.", "--resume")] = False,
) -> None:
    """Continue a prompt and stream the text; a report of what was read follows on stderr.

    Without arguments, the bundled checkpoint answers a question about a long
    bundled text; full attention and a lossless run follow for comparison.

    For example:

      sfi generate

      sfi generate "Once upon a time" --model ./my-model --budget 1024 -n 200

      sfi generate -f long.txt --model Qwen/Qwen3-0.6B --chat --lossless

      sfi generate --batch prompts.jsonl --max-batch 8 -o answers.jsonl

      sfi generate -f long.txt --model Qwen/Qwen3-0.6B --prompt-cache long

      sfi generate -f long.txt --model Qwen/Qwen3-0.6B --trace run --audit 16
    """
    from sfi_cli.commands.generate.job import run
    from sfi_cli.commands.generate.prompts import SUFFIX, read_prompts, unanswered
    from sfi_cli.options import Subject
    from sfi_cli.terminal.output import Output

    prompts = read_prompts(prompt, prompt_file, batch)
    if prompts.expected is not None and model is not None:
        raise ConfigError("prompt must be given for a --model of your own, got none; add a text, -f FILE, or pipe one")
    by_line = batch is not None and output is not None and output.suffix == SUFFIX and not json
    if resume and not by_line:
        raise ConfigError("--resume must come with --batch and -o FILE.jsonl, without --json")
    settings = given(
        "generate", base=prompts.config, preset=preset, file=config, sets=sets,
        options={
            "budget": budget, "recent": recent, "triggers": trigger, "t_max": t_max,
            "sampling.temperature": temperature, "sampling.top_p": top_p, "audit.every": audit,
            "engine.kv_device_budget": kv_device_budget, "engine.lossless": lossless or None,
            "draft.max_tokens": draft_max,
        },
    )  # fmt: skip
    drafting = [name for name in sorted(settings.said) if name.startswith("draft.")]
    lossless = settings.table(EngineOptions).lossless
    if drafting and not lossless:
        name = drafting[0] if draft_max is None else "--draft-max"
        raise ConfigError(f"{name} must come with --lossless, got it alone")
    audits = _audit(settings, trace)
    example = prompts.expected is not None
    named = preset or ("example" if example and config is None else "default")
    plain = not (settings.said or preset or config or policy or compare is not None)
    chosen = policy or default_policy(lossless=lossless)
    with Output(output, json=json, force=force, append=resume, quiet=quiet) as written:
        if resume and output is not None and not (prompts := unanswered(prompts, output)).lines:
            written.say(f"{output} has an answer to each line")
            return
        run(
            written, prompts, Subject.of(settings, model, dtype, device, trust_remote_code), settings,
            policy=chosen, named=policy is not None, preset=named, chat=chat,
            compare=example and chosen != "full-kv" if compare is None else compare,
            beside=example and plain, trace=trace, audit=audits,
            seed=seed, max_new_tokens=max_new_tokens, max_batch=max_batch, by_line=by_line,
            prompt_cache=prompt_cache,
        )  # fmt: skip


def _audit(settings: Given, trace: Path | None) -> AuditConfig | None:
    if "every" in settings.of("audit"):
        if trace is None:
            raise ConfigError("--audit needs a trace to write to; add --trace DIR")
        return settings.table(AuditConfig)
    for name in sorted(settings.said):
        if name.startswith("audit."):
            raise ConfigError(f"{name} must come with --audit N, got it alone")
    return None
