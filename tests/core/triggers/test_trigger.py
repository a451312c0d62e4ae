"""Eq. 5, T_max and the rules around them; T_trig for every family of tokenizers (Sec. 3.1)."""

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from benchmarks.train_bundled import build_tokenizer
from sfi_core.errors import ConfigError
from sfi_core.settings.config import SfiConfig
from sfi_core.state.request import RequestState
from sfi_core.triggers.trigger import Trigger, build_trigger_set

STOP, WORD = 7, 1  # 7 is in T_trig
PAPER = SfiConfig.preset("paper")


def slow_steps(tokens: list[int], **settings) -> dict[int, str]:
    """Map each slow step t >= 1 to its reason; tokens are told one by one: step t sees x_0 to x_{t-1}."""
    settings = {"trigger_delay": 0, "t_max": 1000, **settings}
    trigger = Trigger(frozenset({STOP}), PAPER.replace(**settings))
    state = RequestState(prompt_tokens=10)
    state.begin(slow=True, reason="first", new_tokens=10)
    slow = {}
    for token in tokens:
        state.finish_step(token)
        reason = trigger.reason(state)
        state.begin(slow=bool(reason), reason=reason, new_tokens=1)
        if reason:
            slow[state.step] = reason
    return slow


def text(length: int, *stops: int) -> list[int]:
    return [STOP if t in stops else WORD for t in range(length)]


def test_step_after_a_boundary_token_is_slow():
    """Eq. 5: g_t = 1 if x_{t-1} is in T_trig."""
    assert slow_steps(text(10, 3, 6)) == {4: "trigger", 7: "trigger"}
    assert slow_steps(text(5, 0)) == {1: "trigger"}, "the first generated token counts"


@pytest.mark.parametrize("delay", [0, 1, 2])
def test_a_delay_puts_the_slow_step_off_by_that_many_steps(delay: int):
    assert list(slow_steps(text(12, 3, 7), trigger_delay=delay)) == [4 + delay, 8 + delay]


@pytest.mark.parametrize("delay", [0, 1, 2])
def test_tokens_of_the_prompt_never_trigger(delay: int):
    assert slow_steps(text(6), trigger_delay=delay) == {}
    state = RequestState(prompt_tokens=10, length=10, step=0)
    trigger = Trigger(frozenset({STOP}), PAPER.replace(trigger_delay=delay))
    assert trigger.reason(state) == ""


@pytest.mark.parametrize("t_max", [0, 1, 2, 5])
def test_t_max_is_the_largest_number_of_consecutive_fast_steps(t_max: int):
    slow = slow_steps(text(30), t_max=t_max)
    assert list(slow) == list(range(t_max + 1, 31, t_max + 1))
    assert set(slow.values()) == {"t_max"}


@pytest.mark.parametrize(
    ("gap", "expected"), [(0, [3, 4, 6, 9]), (1, [3, 4, 6, 9]), (2, [3, 6, 9]), (4, [4, 9]), (5, [6]), (10, [])]
)
def test_a_trigger_too_soon_after_a_slow_step_is_dropped(gap: int, expected: list[int]):
    """Steps 3, 4, 6 and 9 follow a boundary token, step 0 is slow; a dropped trigger never comes back."""
    stops = [t - 1 for t in (3, 4, 6, 9)]
    assert list(slow_steps(text(16, *stops), min_gap=gap)) == expected


def test_min_gap_does_not_hold_t_max_back_and_a_trigger_is_named_when_both_are_due():
    assert slow_steps(text(6, 4), t_max=4) == {5: "trigger"}
    assert slow_steps(text(9), t_max=2, min_gap=8) == {3: "t_max", 6: "t_max", 9: "t_max"}


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("boundary", {4: "trigger", 8: "t_max"}), ("t-max", {4: "t_max", 8: "t_max"}), ("stride", {5: "stride"}),
        ("never", {}), ("always", dict.fromkeys(range(1, 10), "always")),
    ],
)  # fmt: skip
def test_each_policy_asks_its_own_question(policy: str, expected: dict[int, str]):
    tokens = text(9, 3)
    assert slow_steps(tokens, trigger_policy=policy, t_max=3, stride=5) == expected


@pytest.mark.parametrize("trigger_policy", ["boundary", "t-max", "stride", "never"])
def test_the_first_steps_are_slow_under_every_policy_if_asked(trigger_policy: str):
    settings = {"slow_start": 3, "trigger_policy": trigger_policy}
    assert slow_steps(text(8), **settings) == {1: "first", 2: "first"}


def drawn(settings: dict, **fields) -> str:
    config = PAPER.replace(trigger_policy="random", **settings)
    state = RequestState(**{"step": 9, "steps_since_slow": 9, "prompt_tokens": 50, "tokens": [1], **fields})
    return Trigger(frozenset(), config).reason(state)


def test_gap_and_t_max_hold_for_chance():
    sure = {"random_rate": 1.0}
    assert drawn(sure) == "random"
    assert drawn({**sure, "min_gap": 11}) == ""
    assert drawn({**sure, "min_gap": 11, "t_max": 9}) == "t_max"


def test_chance_follows_rate_and_seed():
    def steps(**settings) -> list[int]:
        return [i for i in range(500) if drawn(settings, step=i)]

    assert len(steps(random_rate=0.25)) == pytest.approx(125, abs=40)
    assert steps(random_rate=0.25) == steps(random_rate=0.25)
    assert steps(random_rate=0.25) != steps(random_rate=0.25, trigger_seed=1)
    assert set(steps(random_rate=0.1)) < set(steps(random_rate=0.25))


def test_chance_tells_requests_of_one_length_apart_by_their_text():
    def steps(text: list[int]) -> list[int]:
        return [i for i in range(50) if drawn({"random_rate": 0.5, "trigger_delay": 0}, step=i, tokens=text)]

    assert steps([1] * 50) != steps([2] * 50)


PUNCTUATION = (".", "?", "!", ";", "\n")
# each is one token of the byte-level tokenizer below
MERGED = (
    *(" .", "...", '."', ".)", ".\n", "?!", '?"', "!!", "!=", "?.", "./", "};\n", ")\n", ":\n"),
    *("\n\n", " \n", "\n  ", "\n#", ".**", "」", "。", "。」", "．", "？", "！", "；", "…"),  # noqa: RUF001
    *("3.", "1.5", "Mr.", " Mr.", " U.S.", "了。", "###", " ###", "\u0301."),
)
PART = "Ĥ."  # the byte 0x82, as in the last third of a CJK character, and a full stop


def wrap(model, pre_tokenizer, decoder, normalizer=None):
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizer, decoder
    if normalizer:
        tokenizer.normalizer = normalizer
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.fixture(scope="module")
def byte_level():
    """GPT-2, Llama 3, Qwen: bytes written as printable characters, merged."""
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    pieces = [split.pre_tokenize_str(text)[0][0] for text in MERGED]
    pieces.append(PART)
    vocab = {p: i for i, p in enumerate([*sorted(pre_tokenizers.ByteLevel.alphabet()), *pieces])}
    model = models.BPE(vocab=vocab, merges=[], ignore_merges=True)
    tokenizer = wrap(model, split, decoders.ByteLevel())
    tokenizer.add_special_tokens({"eos_token": "<|.|>."})
    tokenizer.add_tokens([AddedToken("</think>"), AddedToken("<;>;", special=True)])
    return tokenizer


@pytest.fixture(scope="module")
def sentence_piece():
    """Llama 2, Gemma: a space is `▁`, a byte `<0x0A>`, and decoding strips the first space."""
    pieces = [*(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "a", ".", "▁.", "。", "##", "#", "###", "▁###"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    model = models.BPE(vocab=vocab, merges=[], byte_fallback=True, ignore_merges=True)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    decoder = decoders.Sequence([*steps, decoders.Strip(content=" ", left=1, right=0)])
    return wrap(model, pre_tokenizers.Metaspace(), decoder)


@pytest.fixture(scope="module")
def word_piece():
    vocab = {piece: i for i, piece in enumerate(["[UNK]", "end", ".", "##.", "?", "##s", "mr"])}
    model = models.WordPiece(vocab=vocab)
    split, lower = pre_tokenizers.BertPreTokenizer(), normalizers.BertNormalizer()
    return wrap(model, split, decoders.WordPiece(), lower)


@pytest.fixture(scope="module")
def unigram():
    """T5: NFKC, and a newline is a space."""
    pieces = ["<unk>", "▁", *"abc.?!;", "▁.", '?"', "▁b."]
    model = models.Unigram([(piece, -1.0) for piece in pieces], unk_id=0)
    space = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace("\n", " ")])
    return wrap(model, pre_tokenizers.Metaspace(), decoders.Metaspace(), space)


class PlainTokenizer:
    """Only the members that the builder asks for; remembers what it decoded."""

    all_special_ids = (4,)

    def __init__(self):
        self.pieces, self.decoded = ["word", "3.", ".", "?!", "<.>."], []

    @property
    def added_tokens_decoder(self):
        """As in transformers' MistralCommonBackend."""
        raise NotImplementedError

    def get_vocab(self):
        return {piece: i for i, piece in enumerate(self.pieces)}

    def encode(self, text, *, add_special_tokens):
        return [self.pieces.index(text)] if text in self.pieces else []

    def batch_decode(self, sequences):
        self.decoded.append(sequences)
        return [self.pieces[i] for [i] in sequences]


def texts_for(tokenizer, trigger, triggers=PUNCTUATION):
    return {text for _, text in build_trigger_set(tokenizer, triggers).chosen[trigger]}


@pytest.mark.parametrize(
    ("trigger", "texts"),
    [
        (".", {".", " .", "...", '."', ".)", ".\n", ".**", "?.", "。", "。」", "．"}),  # noqa: RUF001
        ("?", {"?", '?"', "？"}),  # noqa: RUF001
        ("!", {"!", "!!", "?!", "！"}),  # not the inequality operator  # noqa: RUF001
        (";", {";", "};\n", "；"}),  # noqa: RUF001
        ("\n", {"\n", ".\n", "};\n", ")\n", ":\n", "\n\n", " \n", "\n  "}),
    ],
)
def test_each_of_the_papers_triggers_takes_its_tokens(byte_level, trigger, texts):
    assert texts_for(byte_level, trigger) == texts


@pytest.mark.parametrize(
    ("trigger", "texts"),
    [
        ("\n\n", {"\n\n"}),
        ("Mr.", {"Mr.", " Mr."}),  # listed, an abbreviation is chosen with and without its space
        ("...", {"..."}),
        (".\n", {".\n"}),  # does not bring the bare mark
        ("。", {"。", "。」"}),  # does not bring the ASCII mark
        ("」", {"」", "。」"}),
        ("</think>", {"</think>"}),
        ("<|.|>.", {"<|.|>."}),  # a special token, by its own name
        ("###", {"###", " ###"}),
    ],
)
def test_a_trigger_of_the_user_takes_its_tokens(byte_level, trigger, texts):
    assert texts_for(byte_level, trigger, [trigger]) == texts


def test_words_special_tokens_and_parts_of_characters_are_not_chosen(byte_level):
    chosen = set(build_trigger_set(byte_level, PUNCTUATION).token_ids)
    for text in ("3.", "1.5", "Mr.", " U.S.", "了。", "\u0301."):
        [token] = byte_level.encode(text)
        assert token not in chosen, text
    assert not chosen & set(byte_level.convert_tokens_to_ids(["<|.|>.", "<;>;", PART]))


def missing(triggers) -> list[str]:
    return [trigger for trigger, tokens in triggers.chosen.items() if not tokens]


def test_trigger_of_several_tokens_is_missing(byte_level):
    triggers = build_trigger_set(byte_level, (".", "<a>"))
    assert missing(triggers) == ["<a>"]
    assert byte_level.convert_tokens_to_ids(">") not in triggers.token_ids  # its last token


def test_sentence_piece_s_bytes_and_spaces_are_found(sentence_piece):
    chosen = build_trigger_set(sentence_piece, PUNCTUATION).chosen
    assert chosen["\n"] == [(sentence_piece.convert_tokens_to_ids("<0x0A>"), "\n")]
    expected = sentence_piece.convert_tokens_to_ids(["<0x2E>", ".", "▁.", "。"])
    assert [i for i, _ in chosen["."]] == expected
    expected = sentence_piece.convert_tokens_to_ids(["###", "▁###"])
    assert build_trigger_set(sentence_piece, ["###"]).token_ids == tuple(expected)


def test_word_piece_s_continuation_is_taken_and_what_it_drops_or_rewrites_is_missing(word_piece):
    expected = tuple(word_piece.convert_tokens_to_ids([".", "##."]))
    trigger_set = build_trigger_set(word_piece, (".", "\n", "END", "§§", "."))
    assert trigger_set.token_ids == expected
    assert missing(trigger_set) == ["\n", "END", "§§"]
    assert build_trigger_set(word_piece, ("\n", ".", "?", ".")).describe() == [
        ("'\\n'", 0, "no single token"),
        ("'.'", 2, "'.' '##.'"),
        ("'?'", 1, "'?'"),
    ]


def test_unigram_full_stop_takes_the_piece_with_a_space_and_no_word(unigram):
    expected = tuple(unigram.convert_tokens_to_ids([".", "▁."]))
    assert build_trigger_set(unigram, ["."]).token_ids == expected
    assert missing(build_trigger_set(unigram, PUNCTUATION)) == ["\n"]  # it turns it into a space


def test_bundled_tokenizer_has_its_eight_sentence_ends():
    tokenizer = build_tokenizer(1024)
    triggers = build_trigger_set(tokenizer, PUNCTUATION)
    texts = {tokenizer.decode([token]) for token in triggers.token_ids}
    assert texts == {".", "!", ";", "?", ".\n", "!\n", "?\n", "\n"}


@pytest.mark.parametrize("triggers", [("",), (".", ""), ".?"])
def test_empty_trigger_or_a_bare_string_is_refused(byte_level, triggers):
    with pytest.raises(ConfigError, match="triggers must be a list of non-empty strings, got "):
        build_trigger_set(byte_level, triggers)


def test_triggers_that_all_miss_are_refused_and_none_are_the_empty_set(byte_level):
    with pytest.raises(ConfigError, match=r"must match a token of .*, got \['<a>', '\\n#x'\]"):
        build_trigger_set(byte_level, ["<a>", "\n#x"])
    assert build_trigger_set(byte_level, ()).token_ids == ()


def test_tokenizer_decodes_its_wordless_tokens_once_in_bulk():
    tokenizer = PlainTokenizer()
    triggers = build_trigger_set(tokenizer, (".", "!", "</think>"))
    assert tokenizer.decoded == [[[2], [3]]]
    assert (triggers.token_ids, missing(triggers)) == ((2, 3), ["</think>"])
