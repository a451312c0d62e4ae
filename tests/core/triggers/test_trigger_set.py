"""T_trig: which token ids end a sentence, for every family of tokenizers (Sec. 3.1)."""

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from sfi_core.bundled.tokenizer import build_tokenizer
from sfi_core.errors import ConfigError
from sfi_core.triggers.trigger_set import build_trigger_set

PAPER = (".", "?", "!", ";", "\n")
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


def texts_for(tokenizer, trigger, triggers=PAPER):
    return {text for _, text in build_trigger_set(tokenizer, triggers).chosen[trigger]}


def test_full_stop_takes_merged_closed_and_cjk_tokens_only(byte_level):
    merged = {"...", '."', ".)", ".\n", ".**", "?.", "。", "。」", "．"}  # noqa: RUF001
    assert texts_for(byte_level, ".") == merged | {".", " ."}


def test_question_mark_takes_quoted_and_fullwidth_tokens(byte_level):
    assert texts_for(byte_level, "?") == {"?", '?"', "？"}  # noqa: RUF001


def test_exclamation_mark_does_not_take_the_inequality_operator(byte_level):
    assert texts_for(byte_level, "!") == {"!", "!!", "?!", "！"}  # noqa: RUF001


def test_semicolon_takes_the_end_of_a_statement(byte_level):
    assert texts_for(byte_level, ";") == {";", "};\n", "；"}  # noqa: RUF001


def test_newline_takes_every_token_that_ends_a_line(byte_level):
    lines = {".\n", "};\n", ")\n", ":\n", "\n\n", " \n", "\n  "}
    assert texts_for(byte_level, "\n") == lines | {"\n"}


def test_blank_line_takes_only_tokens_with_two_newlines(byte_level):
    assert texts_for(byte_level, "\n\n", ["\n\n"]) == {"\n\n"}


@pytest.mark.parametrize("text", ["3.", "1.5", "Mr.", " U.S.", "了。", "\u0301."])
def test_token_with_a_letter_mark_or_digit_is_not_chosen(byte_level, text):
    [token] = byte_level.encode(text)
    assert token not in build_trigger_set(byte_level, PAPER).token_ids


def test_abbreviation_that_the_user_lists_is_chosen_with_and_without_its_space(byte_level):
    assert texts_for(byte_level, "Mr.", ["Mr."]) == {"Mr.", " Mr."}


def test_marks_in_a_row_stand_for_themselves(byte_level):
    assert texts_for(byte_level, "...", ["..."]) == {"..."}


def test_merged_trigger_does_not_bring_the_bare_mark(byte_level):
    assert texts_for(byte_level, ".\n", [".\n"]) == {".\n"}


def test_cjk_trigger_does_not_bring_the_ascii_mark(byte_level):
    assert texts_for(byte_level, "。", ["。"]) == {"。", "。」"}


def test_closing_mark_may_itself_be_a_trigger(byte_level):
    assert texts_for(byte_level, "」", ["」"]) == {"」", "。」"}


def test_special_tokens_are_not_chosen_for_their_last_character(byte_level):
    special = set(byte_level.convert_tokens_to_ids(["<|.|>.", "<;>;"]))
    assert not special & build_trigger_set(byte_level, PAPER).token_ids


@pytest.mark.parametrize("trigger", ["</think>", "<|.|>."])
def test_added_or_special_token_is_chosen_by_its_own_name(byte_level, trigger):
    assert texts_for(byte_level, trigger, [trigger]) == {trigger}


def test_heading_marker_is_chosen_with_and_without_its_space(byte_level):
    assert texts_for(byte_level, "###", ["###"]) == {"###", " ###"}


def test_trigger_of_several_tokens_is_missing_and_says_how_it_is_written(byte_level):
    triggers = build_trigger_set(byte_level, (".", "<a>"))
    assert (triggers.missing, triggers.reasons) == (
        ("<a>",),
        {"<a>": "no single token; written as '<' 'a' '>'"},
    )


def test_last_token_of_a_longer_trigger_is_not_taken(byte_level):
    token_ids = build_trigger_set(byte_level, (".", "<a>")).token_ids
    assert byte_level.convert_tokens_to_ids(">") not in token_ids


def test_sentence_piece_newline_is_the_byte_token(sentence_piece):
    expected = [(sentence_piece.convert_tokens_to_ids("<0x0A>"), "\n")]
    assert build_trigger_set(sentence_piece, PAPER).chosen["\n"] == expected


def test_sentence_piece_full_stop_takes_the_piece_with_a_space(sentence_piece):
    expected = sentence_piece.convert_tokens_to_ids(["<0x2E>", ".", "▁.", "。"])
    assert [i for i, _ in build_trigger_set(sentence_piece, PAPER).chosen["."]] == expected


def test_sentence_piece_marker_is_found_at_and_after_the_start_of_a_word(sentence_piece):
    expected = sentence_piece.convert_tokens_to_ids(["###", "▁###"])
    assert build_trigger_set(sentence_piece, ["###"]).sorted_token_ids == tuple(expected)


def test_token_with_part_of_a_character_is_not_chosen(byte_level):
    token = byte_level.convert_tokens_to_ids(PART)
    assert token not in build_trigger_set(byte_level, PAPER).token_ids


def test_word_piece_full_stop_takes_the_continuation(word_piece):
    expected = tuple(word_piece.convert_tokens_to_ids([".", "##."]))
    assert build_trigger_set(word_piece, ["."]).sorted_token_ids == expected


def test_trigger_that_the_tokenizer_drops_is_missing(word_piece):
    assert build_trigger_set(word_piece, (".", "\n")).reasons == {
        "\n": "no single token; written as nothing"
    }


def test_trigger_that_the_tokenizer_rewrites_is_missing(word_piece):
    assert build_trigger_set(word_piece, (".", "END")).missing == ("END",)


def test_unknown_token_does_not_stand_for_a_trigger(word_piece):
    assert build_trigger_set(word_piece, (".", "§§")).missing == ("§§",)


def test_unigram_full_stop_takes_the_piece_with_a_space_and_no_word(unigram):
    expected = tuple(unigram.convert_tokens_to_ids([".", "▁."]))
    assert build_trigger_set(unigram, ["."]).sorted_token_ids == expected


def test_newline_is_missing_where_the_tokenizer_turns_it_into_a_space(unigram):
    assert build_trigger_set(unigram, PAPER).missing == ("\n",)


def test_bundled_tokenizer_has_its_eight_sentence_ends():
    tokenizer = build_tokenizer(1024)
    triggers = build_trigger_set(tokenizer, PAPER)
    texts = {tokenizer.decode([token]) for token in triggers.token_ids}
    assert texts == {".", "!", ";", "?", ".\n", "!\n", "?\n", "\n"}


@pytest.mark.parametrize("triggers", [("",), (".", ""), ".?"])
def test_empty_trigger_or_a_bare_string_is_refused(byte_level, triggers):
    with pytest.raises(ConfigError, match="triggers must be a list of non-empty strings, got "):
        build_trigger_set(byte_level, triggers)


def test_triggers_that_all_miss_are_refused(byte_level):
    with pytest.raises(ConfigError, match=r"must match a token of .*, got \['<a>', '\\n#x'\]"):
        build_trigger_set(byte_level, ["<a>", "\n#x"])


def test_no_triggers_give_the_empty_set(byte_level):
    assert build_trigger_set(byte_level, ()).token_ids == frozenset()


def test_description_has_a_row_per_trigger_with_examples_or_the_reason(word_piece):
    assert build_trigger_set(word_piece, ("\n", ".", "?")).describe() == [
        ("'.'", 2, "'.' '##.'"),
        ("'?'", 1, "'?'"),
        ("'\\n'", 0, "no single token; written as nothing"),
    ]


def test_repeated_trigger_counts_once(word_piece):
    assert len(build_trigger_set(word_piece, (".", ".")).describe()) == 1


def test_tokenizer_decodes_its_wordless_tokens_once_in_bulk():
    tokenizer = PlainTokenizer()
    build_trigger_set(tokenizer, (".", "!"))
    assert tokenizer.decoded == [[[2], [3]]]


def test_trigger_that_nothing_is_written_for_leaves_the_others_alone():
    triggers = build_trigger_set(PlainTokenizer(), (".", "</think>"))
    assert (triggers.token_ids, triggers.missing) == ({2}, ("</think>",))
