"""Paragraphs of English prose, picked from what Python and installed packages ship."""

import ast
import re
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import distributions
from pathlib import Path
from pydoc_data import topics

SENTENCES = re.compile(r"[A-Z\"'(].*[.!?:;][\"')]?", re.DOTALL)
LISTING = re.compile(r">>>|::=|^\s*\|.*\||--{2,}|^ {5,}\S")
MARKUP = re.compile(rf"{LISTING.pattern}|[|`<>{{}}=\\#\[\]@~]|https?:|--|::$|^\s*[*+-] |:[a-z]+:")
# packages that torch and lm-eval bring, whose docstrings explain at length
EXPLAINED = ("networkx", "nltk", "scipy", "sklearn")
LEGAL = re.compile(
    r"licen[cs]|copyright|warrant|redistribut|liab|herein|thereof|deprecat|Parameters|Returns", re.IGNORECASE
)


def topics_prose() -> list[str]:
    """Return the language reference (`pydoc_data.topics`), a document a topic, without its listings."""
    texts = [text for _, text in sorted(topics.topics.items())]
    return _documents(texts, lambda text: paragraphs(text, LISTING, least=60, letters=0.85))


def explanations() -> list[str]:
    """Return READMEs and docstrings of installed packages, a document a file, without code and licences.

    Python ships no fiction: this is exposition by many hands, beside the one voice of the reference.
    """
    texts = (*_descriptions(), *_readmes(), *_docstrings())
    return _documents(texts, lambda text: [line for line in paragraphs(text, MARKUP) if not LEGAL.search(line)])


def paragraphs(text: str, markup: re.Pattern[str], *, least: int = 160, letters: float = 0.9) -> list[str]:
    """Return the paragraphs of a text that are sentences, each on one line.

    Args:
        text: The text; empty lines part its paragraphs.
        markup: What no line of a paragraph may hold.
        least: The fewest characters of a paragraph.
        letters: The smallest share of letters and spaces.
    """
    lines = []
    for block in re.split(r"\n\s*\n", text):
        line = " ".join(block.split())
        plain = sum(char.isalpha() or char == " " for char in line)
        if (
            len(line) >= least
            and plain >= letters * len(line)
            and SENTENCES.fullmatch(line)
            and not any(markup.search(row) for row in block.split("\n"))
        ):
            lines.append(line)
    return lines


def _documents(texts: Iterable[str], pick: Callable[[str], list[str]]) -> list[str]:
    # no paragraph twice: topics, READMEs and docstrings copy from each other
    seen: set[str] = set()
    documents = []
    for text in texts:
        fresh = [paragraph for paragraph in dict.fromkeys(pick(text)) if paragraph not in seen]
        seen.update(fresh)
        if fresh:
            documents.append("\n\n".join(fresh))
    return documents


def _descriptions() -> list[str]:
    bodies = {}
    for distribution in distributions():
        _, _, body = (distribution.read_text("METADATA") or "").partition("\n\n")
        bodies[distribution.name.lower()] = body
    return [text for _, text in sorted(bodies.items())]


def _readmes() -> Iterator[str]:
    packages = Path(sysconfig.get_path("purelib"))
    for pattern in ("lm_eval/tasks/**/*.md", "sklearn/datasets/descr/*.rst"):
        for path in sorted(packages.glob(pattern)):
            yield path.read_text(encoding="utf-8", errors="replace")


def _docstrings() -> Iterator[str]:
    packages = Path(sysconfig.get_path("purelib"))
    for package in EXPLAINED:
        for path in sorted((packages / package).rglob("*.py")):
            if "tests" not in path.parts:
                yield "\n\n".join(_strings(path))


def _strings(path: Path) -> Iterator[str]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, kinds) and (text := ast.get_docstring(node)):
            yield text
