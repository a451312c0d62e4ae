"""Build the bundled checkpoint's tokenizer: byte-level BPE in which every corpus word is one token."""

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from sfi_core.bundled.corpus import vocabulary

START, END, PAD = "<|start|>", "<|end|>", "<|pad|>"
# GPT-4's split without contractions: a word takes the space before it, punctuation the newlines after it
SPLIT = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+"


def build_tokenizer(max_length: int) -> PreTrainedTokenizerFast:
    """Train the tokenizer on the corpus's vocabulary; any other text falls back to bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=4096,
        min_frequency=1,
        show_progress=False,
        special_tokens=[START, END, PAD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(vocabulary(), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{START} $A", special_tokens=[(START, tokenizer.token_to_id(START))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=START,
        eos_token=END,
        pad_token=PAD,
        padding_side="left",
        model_max_length=max_length,
    )
