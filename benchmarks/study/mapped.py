"""Is a predicted query closer to the true one by a linear map learned from the prompt? Not in the product.

`python -m benchmarks.study.mapped --model smollm2` prints rows: of each share, the KL of `codescan`, of `codescan` that
chooses half a layer ahead, and of that by queries that are mapped. A map is learned in closed form for each query head
and prompt, before rotation, from `--learned` tokens at the prompt's end: the ridge regression, towards the identity,
of the true query on the predicted one (`map`), or the mean of their difference alone (`shift`).
"""

import argparse
import json
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.study.texts import SHORT, Place, window
from sfi_core.hosts.transformers import fusion, predictions
from sfi_core.measure.evaluation.fidelity import fidelity, reference
from sfi_core.measure.evaluation.grid import Method, at_sizes
from sfi_core.models.load import load

METHOD, AHEAD = "codescan=codescan:recent=16", ",codescan.ahead=half"
SHARES, LENGTH, TOKENS, RIDGE = (0.1, 0.05, 0.25), 2048, 48, 0.1
Map = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # means of predicted and true queries, and what is between


class Maps:
    """The maps of a model's layers, [prompts, heads, D, D]; none are applied before `learn`."""

    def __init__(self, model: Any, learned: int) -> None:
        self.model, self.learned, self.of_layer = model, learned, dict[int, Map]()
        self._seen: dict[tuple[str, int], torch.Tensor] = {}

    def note(self, read: Callable[[], Any]) -> Any:
        """Read prompts, and keep what the layers' norms see at their ends."""
        layers, hooks = self.model.model.layers, []
        for index, layer in enumerate(layers):
            norm = getattr(layer, "pre_feedforward_layernorm", layer.post_attention_layernorm)
            hooks += [
                norm.register_forward_pre_hook(self._keeping("early", index + 1)),
                layer.input_layernorm.register_forward_pre_hook(self._keeping("true", index)),
            ]
        made = read()
        for hook in hooks:
            hook.remove()
        return made

    def _keeping(self, which: str, index: int) -> Callable[..., None]:
        def keep(_: Any, arguments: tuple[torch.Tensor, ...]) -> None:
            if arguments[0].shape[1] >= self.learned:  # neither a probe nor a step
                self._seen[which, index] = arguments[0][:, -self.learned :].clone()

        return keep

    def learn(self, how: str) -> None:
        """Learn the maps of all layers but the first."""
        self.of_layer.clear()
        for index in range(1, len(self.model.model.layers)) if how in ("map", "shift") else ():
            early, true = (self._queries(index, self._seen[which, index]) for which in ("early", "true"))
            means = early.mean(2, keepdim=True), true.mean(2, keepdim=True)
            early, true = early - means[0], true - means[1]
            identity = torch.eye(early.shape[-1]).expand(*early.shape[:2], -1, -1)
            square = early.mT @ early
            ridge = RIDGE * square.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None] * identity
            between = torch.linalg.solve(square + ridge, early.mT @ true + ridge) if how == "map" else identity
            self.of_layer[index] = *means, between

    def _queries(self, index: int, residual_BTI: torch.Tensor) -> torch.Tensor:
        layer = self.model.model.layers[index]
        query_BTJ = layer.self_attn.q_proj(layer.input_layernorm(residual_BTI))
        return query_BTJ.view(*query_BTJ.shape[:2], -1, layer.self_attn.head_dim).transpose(1, 2).float()

    def rotated(self, attention: Any, source: str, query_BTXD: torch.Tensor, *others: Any) -> Any:
        """Rotate a predicted query, once it has been mapped."""
        if attention.layer_idx in self.of_layer:
            early, true, between = self.of_layer[attention.layer_idx]
            query_BXTD = (query_BTXD.transpose(1, 2).float() - early) @ between + true
            query_BTXD = query_BXTD.transpose(1, 2).to(query_BTXD.dtype)
        return ROTATED(attention, source, query_BTXD, *others)


ROTATED = fusion.rotated


def main() -> None:
    """Print the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="as `sfi --model`")
    parser.add_argument("--half", default="dev", help="the half that is measured")
    parser.add_argument("--learned", type=int, default=1024, help="tokens that a map is learned from")
    options = parser.parse_args()
    model, tokenizer = load(options.model, device="cpu")
    maps = Maps(model, options.learned)
    given = {kind: window(tokenizer, Place(0, kind, options.half, LENGTH), TOKENS) for kind in SHORT}
    with torch.no_grad(), patch.object(predictions, "rotated", maps.rotated):
        full = maps.note(lambda: reference(model, tokenizer, list(given.values())))
        for share in SHARES:
            for how in ("in its turn", "ahead", "shift", "map"):
                maps.learn(how)
                method = Method.parse(METHOD + AHEAD * (how != "in its turn"))
                (sized,) = at_sizes([method], shares=[share], recent=128)
                windows = fidelity(model, tokenizer, full, sized.config_for(LENGTH), policy=sized.policy)
                kl = {
                    kind: float(f"{sum(f.kl[1:]) / len(f.kl[1:]):.4g}") for kind, f in zip(given, windows, strict=True)
                }
                about = {"model": options.model, "half": options.half, "learned": options.learned}
                print(json.dumps({**about, "share": share, "how": how, "kl": kl}), flush=True)


if __name__ == "__main__":
    main()
