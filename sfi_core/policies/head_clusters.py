"""Clusters of KV heads that attend alike, each with a representative (SyncKV, Sec. 4.1), and their file."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, Self

from sfi_core.errors import ConfigError, InputError, SfiError
from sfi_core.machine.files import write_atomically
from sfi_core.machine.text import parse_json, shown

FORMAT = 1
SHOWN = 12  # characters of a digest in a message


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadClusters:
    """The clusters of KV heads of each layer.

    By layer, `cluster_of` has the cluster of each KV head, and `representatives` the representative KV head
    of each cluster. `model_digest` is the checkpoint's digest, or its commit on the hub, "" if unknown;
    `model` its name for messages; `made_from` says how the similarity was measured, in plain values.
    """

    model_digest: str
    cluster_of: Mapping[int, tuple[int, ...]]
    representatives: Mapping[int, tuple[int, ...]]
    model: str = ""
    made_from: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raise `ConfigError` for numbers that contradict each other."""
        if self.cluster_of.keys() != self.representatives.keys():
            raise ConfigError(
                f"representatives must be of the layers {sorted(self.cluster_of)}, got {sorted(self.representatives)}"
            )
        if not self.cluster_of:
            raise ConfigError("layers must be at least one, got none")
        for layer, clusters in self.cluster_of.items():
            _check_layer(layer, clusters, self.representatives[layer])

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a head file; raises `InputError` if it cannot be read, is damaged or of another format."""
        try:
            data = parse_json(path.read_bytes())
        except OSError as error:
            raise InputError(f"head file {path} cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise InputError(f"head file {path} is damaged: no JSON, {error}") from error
        try:
            return cls._of(data)
        except SfiError as error:
            raise InputError(f"head file {path} is damaged: {error}") from error

    @classmethod
    def _of(cls, data: Any) -> Self:
        document = _a_table(data, "the file")
        if document.get("format") != FORMAT:
            raise ConfigError(f"format must be {FORMAT}, got {document.get('format')!r}")
        layers = {
            _layer_number(name): _a_table(layer, f"layer {name}")
            for name, layer in _a_table(document.get("layers"), "layers").items()
        }
        return cls(
            model_digest=_a_text(document, "digest"),
            cluster_of={number: _heads(layer, "cluster_of") for number, layer in layers.items()},
            representatives={number: _heads(layer, "representatives") for number, layer in layers.items()},
            model=_a_text(document, "model"),
            made_from=_a_table(document.get("made_from", {}), "made_from"),
        )

    def text(self) -> str:
        """Return the file's text: JSON with a line for each list of heads."""
        layers = ",\n".join(
            f'    "{layer}": {{\n'
            f'      "cluster_of": {json.dumps(self.cluster_of[layer])},\n'
            f'      "representatives": {json.dumps(self.representatives[layer])}\n'
            "    }"
            for layer in sorted(self.cluster_of)
        )
        return (
            f'{{\n  "format": {FORMAT},\n'
            f'  "model": {json.dumps(self.model, ensure_ascii=False)},\n'
            f'  "digest": {json.dumps(self.model_digest)},\n'
            f'  "layers": {{\n{layers}\n  }},\n'
            f'  "made_from": {json.dumps(dict(self.made_from), ensure_ascii=False)}\n}}\n'
        )

    def save(self, path: Path) -> None:
        """Write the file; on an error the old file stays, and `SfiError` is raised."""
        try:
            write_atomically(path, self.text().encode())
        except OSError as error:
            raise SfiError(f"head file {path} cannot be written: {error.strerror}") from error

    def leader_of(self, layer: int) -> tuple[int, ...]:
        """Return the representative of each KV head of a layer; a representative's is itself."""
        representatives = self.representatives[layer]
        return tuple(representatives[cluster] for cluster in self.cluster_of[layer])

    def check(self, heads_by_layer: Mapping[int, int], model_digest: str) -> None:
        """Raise `ConfigError` for a model with another checkpoint, other layers, or other KV heads.

        `heads_by_layer` are those of the full-attention layers; the running model's digest, "" if unknown,
        must agree if both are known.
        """
        whose = f"head clusters of {self.model or 'a model without a name'}"
        if self.model_digest and model_digest and self.model_digest != model_digest:
            raise ConfigError(
                f"{whose} must be of the checkpoint that runs, {model_digest[:SHOWN]}, "
                f"got {self.model_digest[:SHOWN]}; make them with sfi tune heads"
            )
        if self.cluster_of.keys() != heads_by_layer.keys():
            raise ConfigError(
                f"{whose} must be of the model's full-attention layers {sorted(heads_by_layer)}, "
                f"got {sorted(self.cluster_of)}"
            )
        for layer, heads in heads_by_layer.items():
            if len(self.cluster_of[layer]) != heads:
                raise ConfigError(
                    f"{whose} must have the model's {heads} KV heads in layer {layer}, "
                    f"got {len(self.cluster_of[layer])}"
                )


def _check_layer(layer: int, cluster_of: tuple[int, ...], representatives: tuple[int, ...]) -> None:
    if layer < 0:
        raise ConfigError(f"layers must be at least 0, got {layer}")
    if len(representatives) > len(cluster_of):
        raise ConfigError(
            f"representatives must be at most the layer's {len(cluster_of)} KV heads, "
            f"got {len(representatives)} in layer {layer}"
        )
    if set(cluster_of) != set(range(len(representatives))):
        raise ConfigError(
            f"cluster_of of layer {layer} must use each number from 0 to {len(representatives) - 1}, "
            f"got {list(cluster_of)}"
        )
    for cluster, head in enumerate(representatives):
        if not 0 <= head < len(cluster_of) or cluster_of[head] != cluster:
            raise ConfigError(
                f"representatives of layer {layer} must be in their own clusters, got head {head} for cluster {cluster}"
            )


def _layer_number(name: str) -> int:
    if not re.fullmatch(r"0|[1-9][0-9]{0,8}", name):
        raise ConfigError(f"layers must be whole numbers, got {shown(name)}")
    return int(name)


def _a_table(value: Any, what: str) -> dict[str, Any]:
    return value if isinstance(value, dict) else _wrong(value, what, "a JSON object")


def _a_text(table: Mapping[str, Any], name: str) -> str:
    value = table.get(name)
    return value if isinstance(value, str) else _wrong(value, name, "a text")


def _heads(table: Mapping[str, Any], name: str) -> tuple[int, ...]:
    value = table.get(name)
    if not isinstance(value, list) or any(type(head) is not int for head in value):
        _wrong(value, name, "a list of whole numbers")
    return tuple(value)


def _wrong(value: Any, what: str, expected: str) -> NoReturn:
    raise ConfigError(f"{what} must be {expected}, got {value!r:.60}")
