"""Hostile cases as plain recipes: hypothesis draws them, the corpus keeps them, `cases.py` runs them."""

import json
import math
from functools import cache
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from sfi_traces.schema import TABLES
from tests.fuzz.cases import ARRAYS, CACHED, COMMANDS, CONFIG_TEXT, HEADS, LINES, MANIFEST

Recipe = dict[str, Any]
DEEP, HUGE, HALF = "$deep", "$huge", "\ud800"  # `cases.value` makes the first two: JSON text of them is not short

NUMBERS = [0, -1, 1, 2, 7, 255, 2**15, 2**24 + 1, 2**31 - 1, 2**31, 2**53 + 1, 2**63, 10**30, 1.5, -0.0, 1e308, 1e-320]
WORDS = ["", "x", "sfi", "\x1b[2J\x9b31m\u202e", HALF, "\n", "../x", "/dev/zero", "{{ 1/0 }}", "é" * 300]
values = st.one_of(
    st.sampled_from([None, True, False, *NUMBERS, *WORDS, [], {}, [[]], [None], {"x": 1}, DEEP, HUGE]),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=8),
    st.lists(st.integers(-3, 300), max_size=4),
)


@cache
def paths(text: str) -> list[tuple[Any, ...]]:
    """Every place in a JSON document; of the elements of a list the first and the last."""
    places: list[tuple[Any, ...]] = []

    def walk(node, path: tuple) -> None:
        places.append(path)
        if isinstance(node, dict):
            for key, child in node.items():
                walk(child, (*path, key))
        elif isinstance(node, list):
            for place in {0, len(node) - 1} if node else ():
                walk(node[place], (*path, place))

    walk(json.loads(text), ())
    return places


def edits(document) -> st.SearchStrategy[Any]:
    """Changes of a JSON document: other values at some places, places that are gone, further keys."""
    places = st.sampled_from(paths(json.dumps(document)))
    change = st.tuples(st.just("set"), places, values) | st.tuples(st.just("delete"), places, st.none())
    return st.lists(change | st.tuples(st.just("add"), places, values), min_size=1, max_size=3)


# changes of a file's bytes: cut off, flipped, put before
spoils = st.lists(
    st.one_of(
        st.tuples(st.just("cut"), st.floats(0, 1), st.just(0)),
        st.tuples(st.just("flip"), st.floats(0, 1), st.integers(1, 255)),
        st.tuples(st.just("before"), st.sampled_from(["\ufeff", "[" * 5000, "9" * 5000, "\x00", "{"]), st.just(0)),
        st.tuples(st.just("become"), st.sampled_from(["fifo", "folder", "empty", "link"]), st.just(0)),
    ),
    min_size=1, max_size=2,
)  # fmt: skip


def recipe(kind: str, **parts: st.SearchStrategy[Any]) -> st.SearchStrategy[Recipe]:
    return st.fixed_dictionaries({"kind": st.just(kind), **parts})


def some(changes: list[st.SearchStrategy[Any]]) -> st.SearchStrategy[list[Any]]:
    return st.lists(st.one_of(changes), min_size=1, max_size=2)


def of_type(kind: str) -> st.SearchStrategy[Any]:
    """Values that a column of an Arrow type can hold, the ends of its range among them."""
    if kind.startswith("list"):
        return st.none() | st.lists(of_type(kind.partition(": ")[2].rstrip(">")), max_size=5)
    whole = st.sampled_from([0, 1, -1, -2, 7, 2**15 - 1])
    if kind in ("int32", "int64"):
        whole |= st.sampled_from([2**16, 2**24, 2**24 + 1, 2**31 - 1, -(2**31)])
    known = {"bool": st.booleans(), "string": st.sampled_from([*WORDS[:4], "first", "pack"]) | st.text(max_size=3)}
    known |= dict.fromkeys(("float", "double"), st.floats(width=32) | st.sampled_from([0.0, -1.0, 1e30]))
    return st.none() | known.get(kind, whole)


def cells(rows: int, of: str = "int64") -> st.SearchStrategy[Any]:
    """Changes of a table: a cell, a column's type, rows."""
    row = st.integers(0, rows)
    cell = st.tuples(st.sampled_from(["cell", "column", "cell"]), row, of_type(of))
    kind = st.tuples(
        st.just("type"), st.just(0), st.sampled_from(["string", "int64", "float64", "bool", "list", "struct"])
    )
    whole = st.tuples(st.sampled_from(["drop", "double", "reverse", "empty", "keep"]), row, st.none())
    return cell | kind | whole


commands = st.sampled_from(sorted(COMMANDS))
manifests = recipe("manifest", command=commands, edits=edits(MANIFEST)) | recipe(
    "manifest", command=commands, spoils=spoils
)
tables = st.one_of(
    [
        recipe(
            "table", command=commands, table=st.just(name),
            edits=some([st.tuples(st.just(field.name), cells(8, str(field.type))) for field in schema]),
            statistics=st.booleans(),
        )
        for name, schema in TABLES.items()
    ]
    + [recipe("table", command=commands, table=st.sampled_from(sorted(TABLES)), spoils=spoils)]
)  # fmt: skip
lines = st.one_of(
    [recipe("lines", file=st.just(name), edits=edits(document)) for name, document in LINES.items()]
    + [recipe("lines", file=st.sampled_from(sorted(LINES)), spoils=spoils)]
    + [recipe("lines", file=st.just("heads"), edits=edits(HEADS))]
)
configs = st.one_of(
    recipe("config", file=st.lists(st.tuples(st.sampled_from(paths(CONFIG_TEXT)), values), min_size=1, max_size=2)),
    recipe("config", spoils=spoils),
    recipe(
        "config", sets=st.lists(st.tuples(st.integers(0, 200), values | st.text(max_size=20)), min_size=1, max_size=2)
    ),
)
shape = st.lists(st.sampled_from([0, 1, 2, 3, 12, 2**20, 2**40, 2**62]), max_size=5)
array_edits = st.one_of(
    st.tuples(st.just("claim"), st.sampled_from(sorted(ARRAYS)), shape),
    st.tuples(st.just("reshape"), st.sampled_from(sorted(ARRAYS)), shape),
    st.tuples(
        st.just("type"), st.sampled_from(sorted(ARRAYS)), st.sampled_from(["i1", "u8", "f4", "f8", "U3", "O", "c16"])
    ),
    st.tuples(st.just("value"), st.sampled_from(sorted(ARRAYS)), values),
    st.tuples(st.just("drop"), st.sampled_from(sorted(ARRAYS)), st.none()),
    st.tuples(st.just("add"), st.sampled_from(["block_size", "blocks", "mass", "layers", "x"]), values),
)
imports = st.one_of(recipe("import", edits=some([array_edits])), recipe("import", spoils=spoils))
names = st.sampled_from(
    ["enabled", "trigger_policy", "t_max", "min_gap", "trigger_delay", "slow_start", "stride", "random_rate", "budget"]
)
requests = recipe("request", settings=st.dictionaries(names | st.text(max_size=5), values, min_size=1, max_size=4))

named = st.sampled_from(
    ["after -1.0.keys", f"after {10**30}.1.keys", "after 5.0.keys", "after 1.-1.keys", "7.key", "x", "1.key.value"]
)
cache_edits = st.one_of(
    st.tuples(st.just("reshape"), st.integers(0, 60), shape),
    st.tuples(
        st.just("type"), st.integers(0, 60), st.sampled_from(["float16", "float64", "int64", "bool", "float8_e5m2"])
    ),
    st.tuples(st.just("fill"), st.integers(0, 60), st.sampled_from([math.nan, math.inf, -1, 1e30])),
    st.tuples(st.just("drop"), st.integers(0, 60), st.none()),
    st.tuples(st.just("rename"), st.integers(0, 60), named | st.text(max_size=8)),
    st.tuples(st.just("tell"), st.sampled_from(["format", "model"]), st.text(max_size=8)),
)
caches = recipe("cache", label=st.sampled_from(CACHED), edits=some([cache_edits])) | recipe(
    "cache", label=st.sampled_from(CACHED), spoils=spoils
)

KINDS = {
    "caches": caches, "manifests": manifests, "tables": tables, "lines": lines, "configs": configs, "imports": imports,
    "requests": requests,
}  # fmt: skip
CORPUS = Path(__file__).parent / "corpus"
