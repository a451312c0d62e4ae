"""Record what a sparse-attention indexer of transformers selects at each step, for `sfi trace import`.

    python examples/import_dsa.py --prompt-tokens 120 --new-tokens 64 -o indexer.npz
    sfi trace import indexer.npz -o indexer
    sfi trace show indexer
    sfi trace replay indexer --refresh-every 1,2,4,8,16

Without --model it is a tiny DeepSeek-V3.2 with random weights. `record` takes any model of transformers whose
indexers are modules named `...Indexer` that return positions [1, queries, K] (DeepSeek-V3.2, GLM-5) or blocks
[1, heads, queries, B] (MiniMax-M3).
"""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DeepseekV32Config

TINY = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 16,
    "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 20,
    "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "index_n_heads": 2, "index_head_dim": 16, "index_topk": 32, "max_position_embeddings": 4096,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip

Selected = dict[int, list[np.ndarray]]  # by layer, the last query's of each forward pass: [K] or [heads, B]


def indexers(model: Any) -> dict[int, Any]:
    """Find the indexers by layer."""
    found = {}
    for name, module in model.named_modules():
        if type(module).__name__.endswith("Indexer"):
            found[next(int(part) for part in name.split(".") if part.isdecimal())] = module
    return found


@contextmanager
def watched(model: Any) -> Iterator[Selected]:
    """Note what each indexer selects for the last query of each forward pass."""
    selected: Selected = {layer: [] for layer in indexers(model)}

    def note(layer: int) -> Any:
        return lambda _module, _args, out: selected[layer].append(out[0, ..., -1, :].cpu().numpy())

    hooks = [module.register_forward_hook(note(layer)) for layer, module in indexers(model).items()]
    try:
        yield selected
    finally:
        for hook in hooks:
            hook.remove()


def record(model: Any, prompt: torch.Tensor, new_tokens: int) -> dict[str, np.ndarray]:
    """Decode greedily and return the arrays of a file for `sfi trace import`; `prompt` is [1, P]."""
    with watched(model) as selected:
        sequence = model.generate(prompt, max_new_tokens=new_tokens, do_sample=False)[0].cpu().numpy()
    longest = max(rows[-1].shape[-1] for rows in selected.values())
    positions = np.stack([[padded(row, longest) for row in rows] for rows in selected.values()], 1)
    block_size = getattr(next(iter(indexers(model).values())), "block_size", None)
    P = prompt.shape[1]
    return {
        "sfi_import_version": np.array(1),
        "positions" if block_size is None else "blocks": positions,
        **({} if block_size is None else {"block_size": np.array(block_size)}),
        "layers": np.array(list(selected)),
        "token_ids": sequence[P:],
        "prompt_token_ids": sequence[:P],
    }


def padded(row: np.ndarray, longest: int) -> np.ndarray:
    """Fill a short selection's end with -1."""
    return np.pad(row, [(0, 0)] * (row.ndim - 1) + [(0, longest - row.shape[-1])], constant_values=-1)


def main() -> None:
    """Record one run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", help="hub id or folder; without it a tiny random DeepSeek-V3.2")
    parser.add_argument("--prompt-file", type=Path, help="the prompt's text; needs --model")
    parser.add_argument("--prompt-tokens", type=int, default=120, help="length of a random prompt")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("-o", "--output", type=Path, default=Path("indexer.npz"))
    options = parser.parse_args()
    torch.manual_seed(0)
    if options.model:
        model = AutoModelForCausalLM.from_pretrained(options.model)
    else:
        model = AutoModelForCausalLM.from_config(DeepseekV32Config(**TINY))
    if options.model and options.prompt_file:
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        prompt = tokenizer(options.prompt_file.read_text(encoding="utf-8-sig"), return_tensors="pt").input_ids
    else:
        prompt = torch.randint(3, model.config.vocab_size, (1, options.prompt_tokens))
    np.savez_compressed(options.output, **record(model.eval(), prompt, options.new_tokens))


if __name__ == "__main__":
    main()
