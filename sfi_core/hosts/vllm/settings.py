"""The plugin's settings, those of one request, and the vLLM settings that the plugin refuses.

The plugin's come from vLLM's `kv_connector_extra_config`, a request's from its `extra_args`, over HTTP `vllm_xargs`,
with names `sfi.*`.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sfi_core.errors import ConfigError
from sfi_core.hosts.vllm import SLOTS, ServeTable
from sfi_core.machine.text import printable, shown
from sfi_core.policies import Policy, policy_class
from sfi_core.settings.config import SfiConfig
from sfi_core.settings.engine import AuditConfig
from sfi_core.settings.fields import require, setting
from sfi_core.sizes.policy import untriggered


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginOptions(ServeTable):
    """The plugin's own settings, beside a run's."""

    policy: str = setting("sfi", "The decoding policy.")
    preset: str = setting("default", "The preset that the settings start from.")
    slots: int = setting(
        SLOTS, "Requests that may be sparse at once, each with its own memory; others run dense.", least=1
    )
    trace: str | None = setting(None, "Folder of a trace; none records nothing.")
    trace_audit: int = setting(0, "Compare every N-th step with dense attention; 0 for none. Needs a trace.", least=0)
    trace_redact_text: bool = setting(False, "Keep token ids and text out of the trace.")


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings of one server: those of every run, and the plugin's own."""

    config: SfiConfig
    options: PluginOptions

    @classmethod
    def of(cls, extra: Mapping[str, Any]) -> "Settings":
        """Read `kv_connector_extra_config`; raise `ConfigError` for what is wrong, or cannot be planned."""
        values = dict(extra)
        names = {field.name for field in dataclasses.fields(PluginOptions)}
        options = PluginOptions(**{name: values.pop(name) for name in names & values.keys()})
        config = SfiConfig.preset(options.preset).replace(**values)
        kind = policy_class(options.policy)
        if kind.ahead or kind.mixes_heads:
            raise ConfigError(f"policy must be one whose reads vLLM's scheduler can plan, got {options.policy}")
        if options.trace_audit and options.trace is None:
            raise ConfigError("trace_audit needs a trace, got trace=none")
        if (settings := cls(config, options)).policy.predicts:
            raise ConfigError(f"{options.policy}.ahead must be off in vLLM, got half")
        return settings

    @property
    def policy(self) -> Policy:
        """The policy, without a trigger."""
        return untriggered(self.options.policy, self.config)

    @property
    def audit(self) -> AuditConfig | None:
        """What to audit."""
        return AuditConfig(every=self.options.trace_audit) if self.options.trace_audit else None


def check_host(vllm_config: Any, config: SfiConfig) -> None:
    """Raise `ConfigError`, with the setting, for vLLM settings that the plugin cannot run with."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    cache_dtype, dtype = str(vllm_config.cache_config.cache_dtype), str(model.dtype)
    context = max(parallel.decode_context_parallel_size, parallel.prefill_context_parallel_size)
    # kinds that choose themselves what a token attends to, by transformers' names
    kinds = set(getattr(model.hf_text_config, "layer_types", None) or ())
    sparse = sorted(kind for kind in kinds if "sparse" in kind or "indexed" in kind)
    ranks, on_cpu = parallel.tensor_parallel_size, vllm_config.device_config.device_type == "cpu"
    # alone in having chunks; vLLM's kernel for CPUs returns no state at their ends
    mamba_2 = model.is_hybrid and {"mamba_chunk_size", "chunk_size"} & vars(model.hf_text_config).keys()
    refused = {
        "speculative_config": vllm_config.speculative_config is not None,
        "pipeline_parallel_size above 1": parallel.pipeline_parallel_size > 1,
        "decode_context_parallel_size above 1": context > 1,
        f"kv_cache_dtype {cache_dtype}": cache_dtype not in ("auto", dtype.removeprefix("torch.")),
        "multi-head latent attention": model.use_mla,
        "enable_dbo or ubatch_size": parallel.use_ubatching,
        "a pooling model": model.runner_type == "pooling",
        "a model without attention": model.is_attention_free,
        f"layers of {' and '.join(sparse)}": sparse,
        "more tensor-parallel processes than KV heads": ranks > model.get_total_num_kv_heads(),
    }
    for name, is_so in refused.items():
        if is_so:
            raise ConfigError(f"sfi does not run in vLLM with {name}; leave it out")
    if on_cpu and mamba_2 and vllm_config.cache_config.enable_prefix_caching:
        raise ConfigError(
            "enable_prefix_caching must be off for Mamba 2 on a CPU, where vLLM keeps no state within a prompt, got it "
            "on; add --no-enable-prefix-caching"
        )
    late = vllm_config.scheduler_config.async_scheduling
    if late and config.trigger_delay < 1 and config.trigger_policy == "boundary":
        raise ConfigError(
            "trigger_delay must be at least 1 with async_scheduling, which plans a step before the last "
            "token is known, got 0; set async_scheduling=false or trigger_delay=1"
        )


PREFIX = "sfi."
ENABLED = "enabled"
# what decides when a step is slow; everything else is the same for all rows of a batch
OWN = ("trigger_policy", "t_max", "min_gap", "trigger_delay", "slow_start", "stride", "random_rate")


@dataclass(frozen=True, slots=True)
class RequestSettings:
    """How one request is decoded: the server's `config` but for `OWN`; dense if not `enabled`, or with an `error`."""

    config: SfiConfig
    enabled: bool = True
    error: str = ""

    @classmethod
    def of(
        cls, extra: Mapping[str, Any] | None, config: SfiConfig, check: Callable[[SfiConfig], None]
    ) -> "RequestSettings":
        """Read a request's `extra_args`, over the server's `config`; `check` raises ConfigError for what cannot run.

        A mistake goes into `error`: a scheduler cannot refuse a request, and an exception there ends the server.
        """
        try:
            given = {str(name): value for name, value in (extra or {}).items()}
            changes = {name.removeprefix(PREFIX): value for name, value in given.items() if name.startswith(PREFIX)}
            enabled = changes.pop(ENABLED, True)
            is_flag = isinstance(enabled, int) and enabled in {True, False}
            require(is_flag, f"{PREFIX}{ENABLED} must be 0 or 1, got {shown(enabled)}")
            others = [shown(f"{PREFIX}{name}")[1:-1] for name in sorted(changes.keys() - set(OWN))]
            rule = f"is no setting of one request; expected one of {(ENABLED, *OWN)}"
            require(not others, f"{''.join(others[:1])} {rule}")
            wanted = config.replace(**changes)
            if changes:
                check(wanted)
            return cls(wanted, bool(enabled))
        except ConfigError as error:
            return cls(config, enabled=False, error=printable(str(error)))
        except Exception as error:  # noqa: BLE001 - it would end the server, and is one client's
            return cls(config, enabled=False, error=f"settings must be numbers, got {type(error).__name__}")

    def salt(self, policy: str) -> str:
        """Return a name for all that the keys and values of generated tokens depend on."""
        facts = {"policy": policy, **self.config.to_dict()} if self.enabled else {}
        text = json.dumps(facts, sort_keys=True)
        return "sfi-" + hashlib.sha256(text.encode()).hexdigest()[:16]
