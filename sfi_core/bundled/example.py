"""The bundled checkpoint's texts: one sentence a person, then a request to recall some of them; and an example.

A document is paragraphs of sentences such as ``Belora hid a red lantern under the old bridge.``; only one sentence
names a person. The request lists people, so the document determines the answer, their sentences word for word.
`python -m sfi_core.bundled.example` writes `example.json`, with the run's settings, anew.
"""

import json
import random
from dataclasses import dataclass
from pathlib import Path

from sfi_core.settings.config import SfiConfig

FIRST = (
    "Bel Tam Jor Mar Kel Vin Sor Dal Fen Gar Hal Ist Lor Nim Orr Pel "
    "Quin Ras Sel Tor Ulm Vel Wen Yar Zan Bram Cal Dor Esk Fal Gil Hes"
).split()
LAST = (
    "ora rin vex ina ash eth ondo ula ander ic oss ime ael urn ista obin "
    "eda ux amar elle iro ent asco ybel um ophe ard isk eon avi oth ulf"
).split()
NAMES = tuple(first + last for first in FIRST for last in LAST)
VERBS = (
    "hid found sold painted dropped carried buried repaired borrowed wrapped cleaned traded guarded "
    "polished opened closed carved copied counted covered delivered described designed discovered "
    "examined fetched finished forgot gathered handed inspected kept labelled lifted lost measured "
    "noticed offered ordered packed placed promised received returned saved searched showed stole"
).split()
ADJECTIVES = (
    "red blue green yellow purple silver golden wooden broken heavy tiny huge bright dusty shiny rusty "
    "hollow smooth striped spotted cracked painted folded frozen velvet copper marble paper plastic "
    "woollen leather crystal ancient modern foreign precious useless curious crooked narrow round square"
).split()
OBJECTS = (
    "lantern kettle coin book clock mirror ladder basket hammer violin drum flute map letter ring crown "
    "candle bottle barrel blanket brush bucket button camera carpet chair chest compass cup curtain desk "
    "dish doll feather fork glove harp helmet jar jewel kite knife lamp lock needle oar package pencil "
    "pillow pipe plate pot puzzle rope saddle scarf scissors shell shield shovel spoon statue stool sword "
    "table teapot telescope tent thimble toy trumpet trunk umbrella urn vase vest wagon wheel whistle"
).split()
PREPOSITIONS = "under near behind beside above below inside beyond opposite outside past against".split()
PLACE_ADJECTIVES = (
    "old cold quiet northern southern eastern western abandoned crowded empty famous flooded foggy "
    "forgotten gloomy hidden lonely misty muddy noisy ruined sacred sandy shady snowy steep stony sunny"
).split()
PLACES = (
    "bridge harbor mill well tower garden market forest river lake castle chapel library school station "
    "theatre museum temple barn bakery barracks beach bazaar canal cave cellar cottage courtyard dock "
    "factory farm ferry field fountain gate greenhouse hall hill hospital inn island kitchen lighthouse "
    "meadow mine monastery orchard palace park pier prison quarry ranch shrine stable stadium tavern valley "
    "village vineyard warehouse wharf workshop"
).split()
OPENERS = "Meanwhile Later Outside Elsewhere Nearby Today Yesterday Earlier Tonight Downtown".split()
REQUEST = "Question: What is written about"
ANSWER = "Answer:"
HELD_OUT = 900_000  # first seed of the test documents; training's are below 1000 * (seed + 1)
ADJACENT_SHARE = 0.2  # of requests that ask for neighbours
SENTENCE_TOKENS = 10.6  # mean, with its share of paragraph openers
FILE = Path(__file__).parent / "example.json"
SEED, SENTENCES, ASKED = 901_000, 760, 5
# The prompt's last token is the first person's name, so that its query alone makes the first selection; the
# recent window holds the request and the answer so far.
SETTINGS = {"budget": 256, "recent": 128, "window_prefill": 1, "slow_start": 1}


@dataclass(frozen=True, slots=True)
class Recall:
    """A document with a request, the answer after its ``Answer:``, space included, and the people asked about."""

    prompt: str
    answer: str
    names: tuple[str, ...]


def sentence(rng: random.Random, name: str, ending: str) -> str:
    """Write what `name` did, ending with `ending`, with the space that stands before it."""
    verb, adjective = rng.choice(VERBS), rng.choice(ADJECTIVES)
    article = "an" if adjective[0] in "aio" else "a"
    return (
        f" {name} {verb} {article} {adjective} {rng.choice(OBJECTS)} "
        f"{rng.choice(PREPOSITIONS)} the {rng.choice(PLACE_ADJECTIVES)} {rng.choice(PLACES)}{ending}"
    )


def recall(rng: random.Random, sentences: int, asked: int, *, adjacent: bool = False) -> Recall:
    """Make a document of `sentences` people, and ask for `asked` of them: neighbors if `adjacent`, else anybody."""
    names = rng.sample(NAMES, sentences)
    sentence_of: dict[str, str] = {}
    pieces: list[str] = []
    rest = 0  # sentences of the paragraph to come
    for name in names:
        if rest == 0:
            rest = rng.randint(3, 7)
            pieces.append(f"{rng.choice(OPENERS)},")
        rest -= 1
        ending = rng.choices([".", "!", ";", ", right?"], [6, 2, 1, 1])[0]
        if rest == 0 or name == names[-1]:
            ending = ending.replace(";", ".") + "\n"
        sentence_of[name] = sentence(rng, name, ending)
        pieces.append(sentence_of[name])
    first = rng.randint(0, sentences - asked)
    chosen = names[first : first + asked] if adjacent else rng.sample(names, asked)
    request = f"{REQUEST} {' and '.join(chosen)}?\n{ANSWER}"
    return Recall("".join(pieces) + request, "".join(sentence_of[name] for name in chosen), tuple(chosen))


def draw(rng: random.Random, length: int, asked: int | None = None) -> Recall:
    """Draw an example of about `length` tokens; without `asked`, long ones ask for more people."""
    most = max(2, min(32, length // 64))
    asked = asked or rng.randint(2, most)
    sentences = max(asked, int((length - 12 - (2 + SENTENCE_TOKENS) * asked) / SENTENCE_TOKENS))
    return recall(rng, min(sentences, 1000), asked, adjacent=rng.random() < ADJACENT_SHARE)


@dataclass(frozen=True, slots=True)
class Example:
    """A prompt that ends with the answer's first word, its only right completion, and settings that show `sfi`."""

    prompt: str
    answer: str
    config: SfiConfig


def load_example() -> Example:
    """Read the example."""
    data = json.loads(FILE.read_text(encoding="utf-8"))
    return Example(data["prompt"], data["answer"], SfiConfig().replace(**data["config"]))


def main() -> None:
    """Draw the document from its seed and write the example."""
    drawn = recall(random.Random(SEED), SENTENCES, ASKED)
    first = f" {drawn.names[0]}"
    data = {"prompt": drawn.prompt + first, "answer": drawn.answer.removeprefix(first), "config": SETTINGS}
    FILE.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
