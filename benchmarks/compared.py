"""What the scripts of digests share: writing the digests of a list of cases, or comparing them."""

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def add_options(parser: ArgumentParser) -> None:
    """Add --write, --compare and --only."""
    for name in ("write", "compare"):
        parser.add_argument(f"--{name}", type=lambda text: Path(text).resolve())
    parser.add_argument("--only", default="", help="a part of the names of the cases that run")


def compared(options: Namespace, digests: Iterable[tuple[str, Any]]) -> int:
    """Write named digests or compare them, each as it comes; return 1 where one differs."""
    known = json.loads(options.compare.read_text()) if options.compare else {}
    made, differing = {}, 0
    for name, digest in digests:
        made[name] = digest
        old = known.get(name)
        if not options.compare:
            print(name, digest, flush=True)
        elif isinstance(digest, dict) and isinstance(old, dict):
            odd = [key for key, value in digest.items() if old.get(key) != value]
            differing += bool(odd)
            print(f"{'differs: ' + ', '.join(odd) if odd else 'same':40} {name}", flush=True)
        elif digest != old:
            differing += 1
            print(f"differs: {name} {digest}", flush=True)
    if options.write:
        options.write.write_text(json.dumps(made, indent=1) + "\n")
    print(f"{len(made)} digests, {differing} differ")
    return 1 if differing else 0
