"""The plan of `benchmarks/quality.sh`, and the table and the figure of its results.

    python benchmarks/quality.py plan MODEL OUT [--hours H] [--heads FILE] [--dry-run]
    python benchmarks/quality.py commands OUT
    python benchmarks/quality.py table OUT

A plan is made once for a folder, OUT/plan.json, and kept by every later call. Its hours are an estimate:

    documents x (prompt tokens x seconds of a prompt token + answer tokens x seconds of a decoded token)

for each method and budget; our own tasks read a prompt once for all of them. Both seconds are measured on a
short probe, the slower of full-kv and sfi; prompts longer than the probe's grow by the square of their
length.
"""

import argparse
import json
import shlex
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from quality_parts import RULER_LENGTHS, Part, Probe, capped, known_parts, parts_of
from quality_results import write_results

import sfi_core
from sfi_core.errors import SfiError
from sfi_core.generation.read_prompt import read_prompt
from sfi_core.measure.evaluation.positions import positions_of
from sfi_core.models.load import load
from sfi_core.policies import POLICIES
from sfi_core.settings.config import SfiConfig

BUNDLED = "bundled"
METHODS = (
    "full-kv",
    "sfi",
    "paper=sfi@paper",
    "released=sfi@released",
    "freekv",
    "quest",
    "snapkv",
    "codescan",
)
BUDGETS, DRY_BUDGETS = (512, 1024, 2048), (16, 32, 64)
PROBE, DECODED = 8192, 32  # tokens of the probe's prompt, and those that are decoded after it
WORDS = (
    "Belora hid a red lantern under the old bridge. Tamvex stole a blue kettle near the cold mill."
)


def methods_of(model: Any, *, bundled: bool, heads: str | None) -> list[str]:
    """List the methods that this sfi knows; SyncKV with a head file, or with neighbors grouped."""
    named = [name for name in METHODS if name.split("=")[-1].split("@")[0] in POLICIES]
    groups = 1 if model.config.get_text_config(decoder=True).num_key_value_heads < 4 else 2  # noqa: PLR2004
    even = f"synckv=synckv:synckv.heads=even,synckv.representatives={groups}"
    given = f"synckv=synckv:synckv.heads={heads}" if heads else even
    return [*named, "synckv" if bundled and not heads else given]


def probed(model: Any, tokenizer: Any, length: int, budget: int) -> Probe:
    """Read a prompt of `length` tokens and decode a few, under full attention and under sfi."""
    ids = (tokenizer(WORDS)["input_ids"] * (1 + length // 10))[:length]
    shared = read_prompt(model, tokenizer, [ids], capacity=length + DECODED, prefill_chunk=4096)
    seconds = []
    for policy in ("full-kv", "sfi"):
        report = sfi_core.generate(
            model, tokenizer, [ids], SfiConfig(budget=budget), policy=policy, max_new_tokens=DECODED,
            stop_token_ids=(), shared=shared,
        ).report  # fmt: skip
        seconds.append(report.decode_seconds / (DECODED - 1))
    return Probe(length=length, prompt_token=shared.seconds / length, token=max(seconds))


def make_plan(arguments: argparse.Namespace) -> dict[str, Any]:
    """Probe the model, choose the parts and write them with their commands."""
    dry, out = arguments.dry_run, arguments.out
    name = None if arguments.model == BUNDLED else arguments.model
    folder = tiny_tasks(out / "tasks") if dry else None
    model, tokenizer = load(name)
    limit = positions_of(model) or RULER_LENGTHS[-1] + 512
    budgets = DRY_BUDGETS if dry else BUDGETS
    methods = methods_of(model, bundled=name is None, heads=arguments.heads)
    length = 256 if dry else min(PROBE, limit - DECODED)
    probe = probed(model, tokenizer, length, budgets[0])
    parts, left_out = known_parts(parts_of(limit, dry=dry), folder)
    variants = 1 + (len(methods) - 1) * len(budgets)
    parts = capped(parts, arguments.hours, variants, probe)
    return {
        "model": arguments.model,
        "methods": methods,
        "budgets": list(budgets),
        "probe": asdict(probe),
        "left_out": left_out,
        "parts": [
            {**asdict(part), "hours": part.seconds(variants, probe) / 3600, "command": shlex.join(
                command_of(part, name, methods, budgets, folder, dry=dry)
            )}
            for part in parts
        ],
    }  # fmt: skip


def command_of(
    part: Part,
    model: str | None,
    methods: list[str],
    budgets: tuple[int, ...],
    folder: Path | None,
    *,
    dry: bool,
) -> list[str]:
    """Write the words after `sfi` of a part that begins."""
    words = ["eval"] if model is None else ["eval", "--model", model]
    for method in methods if part.decodes else methods[:1]:
        words += ["--method", method]
    words += ["--budget", ",".join(map(str, budgets)), "--recent", "16" if dry else "128"]
    if not part.harness:
        sizes = ["--length", str(part.prompt), "--samples", str(part.documents)]
        return [*words, "--task", part.task, *sizes]
    words += ["--harness", part.task, "--limit", str(part.documents), "--length", str(part.prompt)]
    return words if folder is None else [*words, "--set", f"eval.include_path={folder}"]


def tiny_tasks(folder: Path) -> Path:
    """Write two tasks of the harness with their data, so that a dry run needs no network."""
    folder.mkdir(parents=True, exist_ok=True)
    text = " ".join([WORDS] * 8)
    rows = [{"q": f"{text} {lead}", "a": "a"} for lead in ("Tamvex stole", "Belora hid")]
    kinds = {
        "tiny_text": "output_type: generate_until\ndoc_to_target: '{{a}}'\n"
        "generation_kwargs: {until: ['.'], max_gen_toks: 8}\nmetric_list: [{metric: exact_match}]\n",
        "tiny_choice": "output_type: multiple_choice\ndoc_to_choice: ['a', 'the']\ndoc_to_target: 0\n"
        "metric_list: [{metric: acc}]\n",
    }
    for name, settings in kinds.items():
        data = folder / f"{name}.jsonl"
        data.write_text("\n".join(map(json.dumps, rows)))
        (folder / f"{name}.yaml").write_text(
            f"task: {name}\ndataset_path: json\ntest_split: test\ndoc_to_text: '{{{{q}}}}'\n"
            f"dataset_kwargs: {{data_files: {{test: {data}}}, cache_dir: {folder}/cache}}\n{settings}"
        )
    return folder


def show(plan: dict[str, Any]) -> None:
    """Print a plan."""
    probe = plan["probe"]
    print(f"{plan['model']}: {', '.join(plan['methods'])} at budgets {plan['budgets']}")
    print(
        f"probe at {probe['length']:,} tokens: {1 / probe['prompt_token']:,.0f} prompt tokens/s, "
        f"{1 / probe['token']:,.1f} decoded tokens/s"
    )
    for part in plan["parts"]:
        once = "" if part["decodes"] else ", full-kv alone: the prompt settles the answer"
        print(
            f"  {part['name']:<12} {part['documents']:>5,} documents of {part['tasks']} task(s), "
            f"{part['prompt']:,} tokens: {part['hours']:.2f} h{once}"
        )
    for line in plan["left_out"]:
        print(f"  left out: {line}")
    print(f"about {sum(part['hours'] for part in plan['parts']):.1f} hours of this device in all")


def commands(out: Path, plan: dict[str, Any]) -> None:
    """Print a line for each part: its name, and the words after `sfi` that begin it."""
    for part in plan["parts"]:
        print(f"{part['name']}\t{part['command']} --output {shlex.quote(str(out / part['name']))}")


def main() -> None:
    """Run one of the three."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    kinds = parser.add_subparsers(dest="kind", required=True)
    plans = kinds.add_parser("plan")
    plans.add_argument("model")
    plans.add_argument("out", type=Path)
    plans.add_argument("--hours", type=float)
    plans.add_argument("--heads")
    plans.add_argument("--dry-run", action="store_true")
    for kind in ("commands", "table"):
        kinds.add_parser(kind).add_argument("out", type=Path)
    arguments = parser.parse_args()
    path = arguments.out / "plan.json"
    try:
        if arguments.kind == "plan":
            if not path.exists():
                made = json.dumps(make_plan(arguments), indent=2) + "\n"
                with (
                    suppress(FileExistsError),
                    path.open("x") as file,
                ):  # another shell's plan stays
                    file.write(made)
            show(json.loads(path.read_text()))
            return
        plan = json.loads(path.read_text())
        if arguments.kind == "commands":
            commands(arguments.out, plan)
        else:
            write_results(arguments.out, plan)
    except SfiError as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    main()
