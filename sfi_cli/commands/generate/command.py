"""`sfi generate`: decode prompts under a policy."""

from pathlib import Path
from typing import Annotated

import typer

from sfi_cli import options as o
from sfi_cli.commands.generate.recording import TraceRecording
from sfi_core.settings.audit import AuditConfig
from sfi_core.settings.engine import EngineOptions

MAX_NEW_TOKENS = 256
PREFILL_CHUNK = 4096


def generate(
    prompt: Annotated[
        str | None,
        typer.Argument(help="Text to continue; - reads stdin. Without one: the bundled example."),
    ] = None,
    prompt_file: Annotated[
        Path | None,
        typer.Option("--prompt-file", "-f", help="Read the prompt from a file; - is stdin."),
    ] = None,
    batch: Annotated[
        Path | None,
        typer.Option(
            help='JSON Lines: {"prompt": ...} or {"messages": [...]} a line, with its own '
            '"max_new_tokens" if it has one.'
        ),
    ] = None,
    max_batch: Annotated[
        int | None,
        typer.Option(
            help="Most prompts decoded together; the next one begins when one has ended.",
            show_default="as many as fit into memory",
        ),
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Apply the tokenizer's chat template.")
    ] = False,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "-n", help="Most tokens to generate.")
    ] = MAX_NEW_TOKENS,
    prefill_chunk: Annotated[
        int, typer.Option(help="Prompt tokens of one forward pass; 0 for all at once.")
    ] = PREFILL_CHUNK,
    compare: Annotated[
        bool | None,
        typer.Option(
            "--compare/--no-compare",
            help="Run full-kv too, and report both.",
            show_default="only for the bundled example",
        ),
    ] = None,
    model: o.Model = None,
    revision: o.Revision = None,
    dtype: o.Dtype = "auto",
    device: o.Device = "auto",
    backend: o.Backend = "auto",
    trust_remote_code: o.TrustRemoteCode = False,
    policy: o.Policy = "sfi",
    preset: o.Preset = None,
    config: o.Config = None,
    sink: o.Sink = None,
    recent: o.Recent = None,
    recent_mode: o.RecentMode = None,
    budget: o.Budget = None,
    t_max: o.TMax = None,
    min_gap: o.MinGap = None,
    trigger: o.Triggers = None,
    trigger_policy: o.TriggerPolicy = None,
    trigger_delay: o.TriggerDelay = None,
    stride: o.Stride = None,
    cosine_threshold: o.CosineThreshold = None,
    entropy_threshold: o.EntropyThreshold = None,
    random_rate: o.RandomRate = None,
    slow_start: o.SlowStart = None,
    span: o.Span = None,
    window: o.Window = None,
    dense_layer: o.DenseLayers = None,
    group_reduce: o.GroupReduce = None,
    do_sample: Annotated[
        bool,
        typer.Option(
            "--do-sample",
            help="Sample; any option below but the penalty implies it.",
            rich_help_panel=o.SAMPLING,
        ),
    ] = False,
    temperature: Annotated[float | None, typer.Option(rich_help_panel=o.SAMPLING)] = None,
    top_k: Annotated[int | None, typer.Option(rich_help_panel=o.SAMPLING)] = None,
    top_p: Annotated[float | None, typer.Option(rich_help_panel=o.SAMPLING)] = None,
    min_p: Annotated[float | None, typer.Option(rich_help_panel=o.SAMPLING)] = None,
    repetition_penalty: Annotated[float | None, typer.Option(rich_help_panel=o.SAMPLING)] = None,
    seed: o.Seed = 0,
    trace: Annotated[
        Path | None,
        typer.Option(help="Record a trace into this folder.", rich_help_panel=o.TRACE),
    ] = None,
    audit: o.Audit = None,
    audit_top: o.AuditTop = o.DEFAULT_AUDIT.top,
    audit_layers: o.AuditLayers = None,
    audit_heads: o.AuditHeads = None,
    positions: o.Positions = None,
    redact_text: o.RedactText = False,
    nvtx: o.Nvtx = None,
    pack_weights: o.PackWeights = False,
    overlap: o.Overlap = True,
    graphs: o.Graphs = None,
    synchronized: o.Synchronized = False,
    json: o.Json = False,
    quiet: o.Quiet = False,
    output: o.OutputPath = None,
    force: o.Force = False,
) -> None:
    """Continue a prompt and stream the text; a report of what was read follows on stderr.

    Without arguments it asks the bundled checkpoint about a bundled document of several thousand tokens, and
    runs full attention beside it.

    For example:

      sfi generate

      sfi generate "Once upon a time" --model ./my-model --budget 1024 -n 200

      sfi generate -f long.txt --model Qwen/Qwen3-0.6B --chat --preset paper --json

      sfi generate --batch prompts.jsonl --max-batch 8 --json

      sfi generate -f long.txt --model Qwen/Qwen3-0.6B --trace run --audit 16
    """
    from sfi_cli.commands.generate.job import GenerateJob
    from sfi_cli.commands.generate.prompts import read_prompts
    from sfi_cli.loading import Subject
    from sfi_cli.parsing import number_list
    from sfi_cli.terminal.output import Output

    prompts = read_prompts(prompt, prompt_file, batch)
    settings = o.build_config(
        prompts.config, preset, config,
        {
            "sink": sink, "recent": recent, "recent_mode": recent_mode, "budget": budget, "t_max": t_max,
            "min_gap": min_gap, "triggers": trigger, "trigger_policy": trigger_policy,
            "trigger_delay": trigger_delay, "stride": stride, "cosine_threshold": cosine_threshold,
            "entropy_threshold": entropy_threshold, "random_rate": random_rate, "slow_start": slow_start,
            "span": span, "window_prefill": window, "dense_layers": dense_layer, "group_reduce": group_reduce,
        },
    )  # fmt: skip
    warpers = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    sampling = {**warpers, "repetition_penalty": repetition_penalty}
    job = GenerateJob(
        prompts=prompts,
        chat=chat,
        subject=Subject(
            model=model,
            loading={
                "revision": revision, "dtype": dtype, "device": device,
                "trust_remote_code": trust_remote_code,
            },
            pack_weights=pack_weights,
        ),
        backend=backend,
        policy=policy,
        preset=preset or ("example" if prompts.is_example and config is None else "default"),
        config=settings,
        sampling={name: value for name, value in sampling.items() if value is not None}
        | {"do_sample": do_sample or any(value is not None for value in warpers.values())},
        seed=seed,
        max_new_tokens=max_new_tokens,
        max_batch=max_batch,
        prefill_chunk=prefill_chunk,
        compare=prompts.is_example and policy != "full-kv" if compare is None else compare,
        recording=TraceRecording(
            folder=trace,
            force=force,
            positions=positions,
            redact_text=redact_text,
            nvtx=nvtx,
            audit=None if audit is None else AuditConfig(
                every=audit,
                top=audit_top,
                layers=number_list(audit_layers, "--audit-layers"),
                heads=number_list(audit_heads, "--audit-heads"),
            ),
        ),
        engine=EngineOptions(overlap=overlap, graphs=graphs, synchronized=synchronized),
    )  # fmt: skip
    with Output(output, json=json, force=force, quiet=quiet) as written:
        job.run(written)
