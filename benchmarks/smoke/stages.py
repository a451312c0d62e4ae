"""The seven stages, the most basic first."""

from benchmarks.smoke import capture, decoding, layers, machine, ops, tokens
from benchmarks.smoke.journal import Stage

STAGES: dict[int, Stage] = {
    1: ("the machine", machine.look),
    2: ("each op once, against its reference", ops.check),
    3: ("a toy step captured and replayed", capture.replay),
    4: ("a tiny model under every switch", tokens.compare),
    5: ("a step of Qwen3-4B as a graph", decoding.replayed),
    6: ("the same without graphs, and the host's share", decoding.hosted),
    7: ("reading a prompt, beside SDPA", layers.prompts),
}
