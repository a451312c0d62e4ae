"""The model of a command: `--model`, `--random-weights`, `model.pack_weights`."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from sfi_cli.settings.given import Given
from sfi_cli.settings.tables import ModelTable
from sfi_cli.terminal.progress import BenchProgress
from sfi_core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The model of a command.

    Attributes:
        model: Hub id, folder, GGUF file or alias; None is the bundled checkpoint.
        loading: Other arguments of `load`.
        random_weights: A config file or a known architecture, instead of a checkpoint; None for none.
        seed: Seed of random weights.
    """

    model: str | None
    loading: dict[str, Any]
    pack_weights: bool
    random_weights: str | None = None
    seed: int = 0

    @classmethod
    def of(cls, settings: Given, model: str | None, dtype: str, device: str, trust: bool, **more: Any) -> "Subject":
        """Take the options of a command; `trust` allows code from the checkpoint."""
        table = settings.table(ModelTable)
        loading = {"revision": table.revision, "dtype": dtype, "device": device, "trust_remote_code": trust}
        return cls(model=model, loading=loading, pack_weights=table.pack_weights, **more)

    @property
    def name(self) -> str:
        """The model's name in documents."""
        return self.random_weights or self.model or "bundled"

    def check(self) -> None:
        """Check the options before a large model loads.

        Raises `ConfigError` for both a checkpoint and random weights, `BackendError` if the weights cannot be packed.
        """
        if self.model is not None and self.random_weights is not None:
            raise ConfigError(f"random_weights must come without --model, got {self.random_weights} and {self.model}")
        if not self.pack_weights:
            return
        import torch

        from sfi_core.models.linear import check_packing
        from sfi_core.models.load import resolve_device, resolve_dtype

        dtype = resolve_dtype(self.loading["dtype"])
        # "auto" is known only when the model is loaded
        known = dtype if isinstance(dtype, torch.dtype) else torch.bfloat16
        check_packing(resolve_device(self.loading["device"]), known)

    def loaded(self, *, quiet: bool, check: Callable[[Any], None] | None = None) -> tuple[Any, Any]:
        """Return the model, packed if asked for, and its tokenizer; for random weights the bundled one.

        Args:
            quiet: Show no progress.
            check: Called with a checkpoint's config before its weights are read; may refuse it.
        """
        from sfi_core.models.load import load, load_tokenizer, resolve_device

        if self.random_weights is None:
            model, tokenizer = load(self.model, **self.loading, check=check)
        else:
            from sfi_core.measure.bench.architectures import random_config, random_model

            config, device = (random_config(self.random_weights), resolve_device(self.loading["device"]))
            model = random_model(config, device, self._dtype(), self.seed)
            tokenizer = load_tokenizer()
        if self.pack_weights:
            from sfi_core.models.linear import pack_weights

            with BenchProgress(quiet=quiet) as progress:
                pack_weights(model, partial(progress.update, "packing the weights"))
        return model, tokenizer

    def unloaded(self) -> Any:
        """Return the model without weights, on the meta device."""
        import torch

        from sfi_core.measure.bench.architectures import empty_model, model_config, random_config

        meta = torch.device("meta")
        if self.random_weights is not None:
            return empty_model(random_config(self.random_weights), meta, self._dtype())
        config = model_config(self.model)
        asked = self._dtype() if self.loading["dtype"] != "auto" else config.dtype
        return empty_model(config, meta, asked or torch.bfloat16)

    def _dtype(self) -> Any:
        import torch

        from sfi_core.models.load import resolve_dtype

        dtype = resolve_dtype(self.loading["dtype"])
        return torch.bfloat16 if dtype == "auto" else dtype
