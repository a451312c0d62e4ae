"""The keys of the player."""

from textual.binding import Binding, BindingType

KEYS: list[BindingType] = [
    Binding("space,right,enter", "move(1)", "next", key_display="space"),
    Binding("left,b,backspace", "move(-1)", "back", key_display="b"),
    Binding("s", "next('slow_at', 1)", "slow step"),
    Binding("S", "next('slow_at', -1)", "slow step before", show=False),
    Binding("d", "next('disagreeing', 1)", "differs"),
    Binding("D", "next('disagreeing', -1)", "differing step before", show=False),
    Binding("g", "ask('go')", "go to"),
    Binding("slash", "ask('search')", "search", key_display="/"),
    Binding("n", "match(1)", "next"),
    Binding("N", "match(-1)", "match before", show=False),
    Binding("a", "play", "play"),
    Binding("plus,equals_sign", "faster(2)", "faster", key_display="+"),
    Binding("minus", "faster(0.5)", "slower", key_display="-"),
    Binding("l", "pick('layer', 1)", "layer"),
    Binding("L", "pick('layer', -1)", "layer before", show=False),
    Binding("h", "pick('head', 1)", "head"),
    Binding("H", "pick('head', -1)", "head before", show=False),
    Binding("home", "go(0)", "first step", show=False),
    Binding("end", "go(-1)", "last step", show=False),
    Binding("up", "scroll(-1)", "up", show=False),
    Binding("down", "scroll(1)", "down", show=False),
    Binding("pageup", "scroll(-10)", "page up", show=False),
    Binding("pagedown", "scroll(10)", "page down", show=False),
    Binding("escape", "leave_field", "leave the field", show=False),
    Binding("q,ctrl+d", "quit", "quit", key_display="q"),
    Binding("ctrl+c", "interrupt", "interrupt", show=False, priority=True),
]
