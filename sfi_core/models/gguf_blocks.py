"""Matrices of a GGUF file that a model on a CPU keeps as blocks: which they are, and layers that multiply by them.

transformers loads all else of the file, and of these matrices sees one number that stands for all.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from sfi_core.machine.text import first_line
from sfi_core.models.blocks import BYTES, Blocks
from sfi_core.models.gguf_file import PLAIN, Tensor, read_header, replaced
from sfi_core.models.linear import BlockEmbedding, BlockLinear, Weights

COMPARED = 8  # columns by which a processor is seen to change nothing but the order of rows


class GgufBlocks:
    """Blocks of the matrices of a file, to be put into a model that transformers makes while they are `taken`."""

    def __init__(self) -> None:
        self.weights = Weights()
        self._blocks: dict[str, Blocks] = {}

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Keep matrices of blocks from transformers' loader inside; with `gguf_file.read_once` around it."""
        import gguf  # noqa: PLC0415 - of an extra
        from transformers import modeling_gguf_pytorch_utils as loader  # noqa: PLC0415 - looks for gguf

        plain = loader.load_gguf_checkpoint

        def load(path: str, return_tensors: bool = False, model_to_load: Any = None, **more: Any) -> Any:
            if not return_tensors:
                return plain(path, **more)
            header = read_header(path)
            # transformers parses every token of the vocabulary, at each look at the file; the config is made already
            fields = {name: field for name, field in header.fields.items() if name != "tokenizer.ggml.tokens"}
            header = replace(header, fields=fields)
            kind = loader.TENSOR_PROCESSORS.get(header.metadata["general.architecture"], loader.TensorProcessor)
            with replaced(gguf, {"GGUFReader": lambda _: header}):
                processor = kind(config=plain(path)["config"])
            names = loader.get_gguf_hf_weights_map(model_to_load, processor)
            rest = [t for t in header.tensors if not self._take(t, names.get(t.name), model_to_load, processor.process)]
            header = replace(header, tensors=rest)
            with replaced(gguf, {"GGUFReader": lambda _: header}):
                parsed = plain(path, return_tensors=True, model_to_load=model_to_load, **more)
            for name, blocks in self._blocks.items():
                parsed["tensors"][name] = torch.zeros(()).expand(blocks.shape)
            return parsed

        with replaced(loader, {"load_gguf_checkpoint": load}):
            yield

    def _take(self, tensor: Tensor, name: str | None, model: Any, process: Callable[..., Any]) -> bool:
        # whether the loader is to leave a tensor out
        kind = tensor.tensor_type.name
        if name is None or kind in PLAIN:
            return False
        layer = model.get_submodule(name.removesuffix(".weight"))
        why = "" if kind in BYTES else f"{kind} has no compiled product"
        if type(layer) is not torch.nn.Linear and not isinstance(layer, torch.nn.Embedding):
            why = f"no linear layer, {type(layer).__name__}"
        try:
            self._blocks[name] = _checked(tensor, process, why)
        except Exception as error:  # noqa: BLE001 - of a processor that takes no rows alone, too
            self.weights.floats[name] = first_line(error)
            return False
        self.weights.blocks[kind] = self.weights.blocks.get(kind, 0) + 1
        return True

    def into(self, model: Any, why: str) -> None:
        """Put the blocks into a model that transformers has loaded, and note `model.sfi_weights`."""
        blocks_of = {id(model.get_parameter(name)): blocks for name, blocks in self._blocks.items()}
        for name, module in list(model.named_modules()):
            blocks = blocks_of.get(id(getattr(module, "weight", None)))  # an output matrix may be the embedding's
            if blocks is not None:
                model.set_submodule(name, _layer(module, blocks))
        if why or not (self._blocks or self.weights.floats):
            self.weights.floats[""] = why or "transformers unpacks the matrices of this architecture"
        model.sfi_weights = self.weights


def _checked(tensor: Tensor, process: Callable[..., Any], why: str) -> Blocks:
    # the blocks with rows in transformers' order; raise `ValueError` for `why`, or where it changes more than that
    import gguf  # noqa: PLC0415 - of an extra

    if why:
        raise ValueError(why)
    count, name = len(tensor.data), tensor.name
    number_OI = np.arange(count * COMPARED, dtype=np.float64).reshape(count, -1)
    result = process(weights=number_OI.copy(), name=name, tensor_key_mapping={}, parsed_parameters={"tensors": {}})
    processed_OI = result.weights
    if result.name != name or processed_OI.shape != number_OI.shape:
        raise ValueError("transformers changes its shape")
    order = (processed_OI[:, 0] // COMPARED).astype(np.int64)
    whole = np.array_equal(np.sort(order), np.arange(count))
    if not (whole and np.array_equal(processed_OI, number_OI[order])):
        raise ValueError("transformers changes its numbers")
    same = np.array_equal(order, np.arange(count))
    blocks = Blocks.unpacked(tensor.data, tensor.tensor_type, None if same else order)
    places = _sample(count)
    rows = gguf.dequantize(tensor.data[order[places]], tensor.tensor_type)
    if not np.array_equal(rows, blocks.floats(torch.from_numpy(places)).numpy()):
        raise ValueError("its blocks are not the numbers that gguf unpacks")
    return blocks


def _sample(count: int) -> np.ndarray:
    # rows that are compared: some next to each other, since touching a row of a new matrix clears 2 MB
    pairs = ((place, place + 1) for place in (0, count // 3, count // 2, count - 2))
    return np.unique(np.clip(np.array(list(pairs), np.int64), 0, count - 1))


def _layer(module: Any, blocks: Blocks) -> torch.nn.Module:
    # in place of one whose weights stand for the blocks
    if not isinstance(module, torch.nn.Embedding):
        return BlockLinear(blocks, module.bias)
    layer = BlockEmbedding(blocks, getattr(module, "embed_scale", None))
    places = torch.from_numpy(_sample(blocks.shape[0]))
    rows = np.zeros(blocks.shape, np.float32)
    rows[places] = blocks.floats(places).numpy()
    module.weight = torch.nn.Parameter(torch.from_numpy(rows), requires_grad=False)
    if torch.equal(module(places), layer(places)):
        return layer
    module.weight = torch.nn.Parameter(blocks.floats(), requires_grad=False)  # its forward pass is of another kind
    return module
