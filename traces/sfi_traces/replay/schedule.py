"""Which steps of a recorded run another trigger would have made slow."""

from sfi_core.state.request import RequestState
from sfi_core.triggers.trigger import Trigger
from sfi_traces.replay.setting import Setting
from sfi_traces.replay.support import Supports


def schedule(supports: Supports, setting: Setting) -> list[str]:
    """Say why each step would be slow, empty for a fast one, if the tokens stayed as recorded."""
    trigger = Trigger(setting.trigger_token_ids, setting.config)
    state = RequestState(prompt_tokens=supports.prompt_tokens)
    state.begin(slow=True, reason="first", new_tokens=supports.prompt_tokens)
    reasons = ["first"]
    for token in supports.tokens[:-1]:
        state.finish_step(token)
        reason = trigger.reason(state)
        state.begin(slow=bool(reason), reason=reason, new_tokens=1)
        reasons.append(reason)
    return reasons
