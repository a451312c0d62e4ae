"""The forwards of transformers that sfi can replace, known by their source, whatever their class."""

import ast
import hashlib
import inspect
import re
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from sfi_core.hosts.transformers.cache import CACHE_NAME, OLD_NAME

UNKNOWN = ""
RMS_NORM = {"9635bcd843f309a0"}  # LlamaRMSNorm
GATED_MLP = {"7d2027d4464e3e71", "0d7b11835db6b508"}  # LlamaMLP, Qwen2MLP
DECODER_LAYER = {"1a8125909341e389", "d4699009e63a2518"}  # LlamaDecoderLayer, MixtralDecoderLayer
# what a compiled step knows besides: Gemma's norm and layer; the forwards around the layers
GEMMA_NORM = {"2dad5f5760750e09"}
GEMMA_LAYER = {"eb03c623c021985a"}  # Gemma2DecoderLayer
MODEL = {  # of Llama, Qwen2, Mistral, Gemma, Gemma2, Gemma3Text; of Qwen2, Gemma2, Gemma3Text since 5.24
    "607fef072d27711e", "7082cc645fa7709b", "3e106c8cfc95b78a", "0a3474e701f9cd62", "920e2eb3800bfa8e",
    "128b85c21ad2ae7c", "56b28df85a051424", "cb811bc071217306", "206bbfc1edd9891a",
}  # fmt: skip
PASSES = MODEL | {"851e9999148b6cd5"}  # MixtralModel; none changes what a layer returns before the next one has it
# LlamaForCausalLM, Gemma2ForCausalLM; both since 5.24
CAUSAL_LM = {"f27668f33910885d", "ab8731295151cdf2", "34392993e49d4fef", "6e998f1561b70e9e"}
# LlamaAttention calls the first, which calls the second
ROTARY = {"apply_rotary_pos_emb": "4a8f8b85ee37bd3f", "rotate_half": "7b6c9b425ca04287"}


@dataclass(frozen=True, slots=True)
class AttentionSource:
    """The differences between the known attentions.

    `norms`: are queries and keys normed before the rotation? `window`: which has one, the module, its config, or ""?
    """

    norms: bool
    window: str


ATTENTION = {
    "ee9b11aafecd166c": AttentionSource(norms=False, window=""),  # LlamaAttention
    "4303b9d12716b783": AttentionSource(norms=False, window="module"),  # Qwen2Attention
    "9fd52adda2db73b6": AttentionSource(norms=False, window="config"),  # MistralAttention
    "0a88802c2838d189": AttentionSource(norms=True, window="module"),  # Qwen3Attention
    "2d8e9493a5546bd7": AttentionSource(norms=True, window=""),  # Qwen3VLTextAttention
}
GEMMA_ATTENTION = {
    "348368a8632bbe94": AttentionSource(norms=False, window="module"),  # Gemma2Attention
    "5c514af68ddf0777": AttentionSource(norms=True, window="module"),  # Gemma3Attention
}


@cache
def digest(function: Callable[..., Any]) -> str:
    """Return 16 hexadecimal digits of a function's code, or `UNKNOWN`; hints, comments and docstrings do not count."""
    try:
        source = textwrap.dedent(inspect.getsource(function))
        node = ast.parse(source).body[0]
    except (OSError, TypeError, SyntaxError):
        return UNKNOWN
    if not isinstance(node, ast.FunctionDef):
        return UNKNOWN
    text = ast.unparse(ast.fix_missing_locations(_Bare().visit(node)))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def rotates_halves(forward: Callable[..., Any]) -> bool:
    """Say whether the `apply_rotary_pos_emb` that a forward calls is the one that `rotary` replaces."""
    names = names_of(forward)
    return all(digest(_unwrapped(names.get(name))) == known for name, known in ROTARY.items())


def names_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the names of the module that a function was written in, which decorators of other modules hide."""
    return getattr(inspect.unwrap(function), "__globals__", {})


def _unwrapped(function: Any) -> Any:
    # the package `kernels`, where it is installed, makes a module of a function, to replace its forward later
    if isinstance(function, torch.nn.Module) and "forward" not in vars(function):
        return inspect.getclosurevars(type(function).forward).nonlocals.get("func", function)
    return function


class _Bare(ast.NodeTransformer):
    """Drops what changes nothing; comments and line breaks are gone already."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        """Drop the docstring, the return annotation, and decorators that change nothing."""
        node.returns = None
        # those of the hub note a name, until `kernelize` gives the module a forward of its own; others rename
        names = [name for name in node.decorator_list if not re.search("kernel|deprecate_kwarg", ast.unparse(name))]
        node.decorator_list = names
        if ast.get_docstring(node) is not None:
            node.body = node.body[1:]
        return self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        # since 5.24 a cache's `update` receives the options of attention, which ours does not use
        node.keywords = [keyword for keyword in node.keywords if keyword.arg != "kwargs"]
        return self.generic_visit(node)

    def generic_visit(self, node: ast.AST) -> ast.AST:
        """Give the cache its old name where it is an argument, a keyword or a variable."""
        for name in ("arg", "id"):
            if getattr(node, name, None) == CACHE_NAME:
                setattr(node, name, OLD_NAME)
        return super().generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if node.value is None:
            return node
        return ast.Assign(targets=[node.target], value=node.value)
