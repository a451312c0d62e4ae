"""What the dense pass over a prompt left, for the next prompt that begins alike: it goes on behind what agrees."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from sfi_core.errors import ConfigError, InputError
from sfi_core.machine.files import atomic_file
from sfi_core.machine.text import common_prefix, first_line, shown

FILE, FORMAT = "prompt.safetensors", "sfi-prompt-cache-1"
MOST_TOKENS = 1 << 24  # of a file, which become Python's numbers
UNKNOWN = "unknown"  # what the key of a model without a digest begins with


@dataclass(slots=True)
class PromptCache:
    """A prompt that was read, of one model.

    `sfi_core.generate(..., cache=...)` goes on behind the tokens with which its prompts begin alike, and a run of one
    prompt leaves the whole prompt here. It serves every policy: what a policy keeps besides keys is made anew of them.

    Attributes:
        tokens: The prompt's token ids; none before the first prompt.
        layers: By full-attention layer that has keys of its own, keys [1, H, T, D] and values [1, H, T, E].
        others: By a number of tokens what sliding windows and states held after so many, as `SfiCache.held` names it.
        model: What the model is known by, `Session.model_key`.
        checked: Whether the tensors are known to be such as this model's; those of a file are when a run takes them.
        moves: Whether a run whose requests share pages may take tokens out, those before `first`: only it uses them.
    """

    tokens: list[int] = field(default_factory=list)
    layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    others: dict[int, dict[str, Any]] = field(default_factory=dict)
    model: str = ""
    checked: bool = True
    moves: bool = False
    first: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self._tensors().values())

    @property
    def finite(self) -> bool:
        """Whether no number is NaN or infinite."""
        numbers = (tensor for tensor in self._tensors().values() if tensor.is_floating_point())
        return all(bool(end.isfinite()) for tensor in numbers for end in torch.aminmax(tensor))

    def agreed(self, prompt: Sequence[int]) -> int:
        """Return how many tokens a prompt shares with this one, from the first on."""
        return common_prefix(self.tokens, prompt)

    def column(self, prompts: Sequence[Sequence[int]], window: int, *, hosted: bool) -> int:
        """Return the column behind which prompts that are padded on the left to one length go on; 0 for none.

        At least `window` tokens of each are read anew, because their queries make the first selection. A model with
        `hosted` windows or states goes on where those are known, and only with prompts of one length.
        """
        width = max(map(len, prompts))
        most = min(width - max(1, window), *(width - len(prompt) + self.agreed(prompt) for prompt in prompts))
        if not hosted:
            return max(0, most)
        padded = any(len(prompt) < width for prompt in prompts)
        return 0 if padded else max((place for place in self.others if place <= most), default=0)

    def save(self, folder: str | Path) -> None:
        """Write the cache to a folder, whole or not at all, in place of the one that is there.

        Raise `ConfigError` for an empty cache, a model that nothing identifies, or a folder of other files, OSError
        for a folder that cannot be written or a full disk.
        """
        if not self.tokens:
            raise ConfigError("a prompt cache must have a prompt to be saved, got none")
        if self.model.startswith(UNKNOWN):
            raise ConfigError("a prompt cache must be of a checkpoint to be saved, got a model without a digest")
        folder = check_folder(folder)
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_file(folder / FILE) as temporary:
            tensors = {name: tensor.contiguous() for name, tensor in self._tensors().items()}
            save_file(tensors, temporary, {"format": FORMAT, "model": self.model})

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """Map the cache of a folder into memory; raise `InputError` for a folder without one, or a damaged one."""
        try:
            path = Path(folder) / FILE
            if not path.is_file():
                raise InputError(f"prompt cache {folder} must have a {FILE}, got none")  # a pipe would have no end
            with safe_open(path, "pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
                return cls._of(file.metadata() or {}, tensors)
        except (SafetensorError, OSError, ValueError, KeyError, RuntimeError) as error:
            raise InputError(f"prompt cache {folder} is damaged: {first_line(error)}") from error

    def _tensors(self) -> dict[str, torch.Tensor]:
        tensors = {"tokens": torch.tensor(self.tokens)}
        for index, (key, value) in self.layers.items():
            tensors |= {f"{index}.key": key, f"{index}.value": value}
        for place, parts in self.others.items():
            tensors |= {f"after {place}.{name}": torch.as_tensor(part) for name, part in parts.items()}
        return tensors

    @classmethod
    def _of(cls, metadata: dict[str, str], tensors: dict[str, torch.Tensor]) -> Self:
        if metadata["format"] != FORMAT:
            raise ValueError(f"its format must be {FORMAT}, got {shown(metadata['format'])}")
        tokens = tensors.pop("tokens")
        if tokens.dtype != torch.int64 or tokens.dim() != 1 or not 0 < len(tokens) <= MOST_TOKENS:
            shape = f"{' x '.join(map(str, tokens.shape))} {tokens.dtype}"
            raise ValueError(f"its tokens must be a row of {MOST_TOKENS:,} int64 at most, got {shape}")
        cache = cls(tokens.tolist(), model=metadata["model"], checked=False)
        for name, tensor in tensors.items():
            where, part = name.split(".", 1)
            if where.startswith("after "):
                place, value = int(where.removeprefix("after ")), tensor if tensor.dim() else tensor.item()
                if not 0 < place <= len(tokens):
                    raise ValueError(f"its windows must be after 1 to {len(tokens):,} tokens, got {shown(place)}")
                cache.others.setdefault(place, {})[part] = value
            elif part == "key":
                cache.layers[int(where)] = tensor, tensors[f"{where}.value"]
        return cache


def check_folder(folder: str | Path) -> Path:
    """Return the path of a folder for a prompt cache; raise `ConfigError` for a file, and for a folder of others."""
    path = Path(folder)
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        raise ConfigError(f"prompt cache {path} must be a folder, got a file or a link")
    names = [entry.name for entry in path.iterdir() if not entry.name.startswith(".")] if path.exists() else []
    if names and FILE not in names:
        raise ConfigError(f"prompt cache {path} must be a folder of its own, got one with {shown(min(names))}")
    return path
