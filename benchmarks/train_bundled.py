"""Train the bundled checkpoint: `python benchmarks/train_bundled.py --output FOLDER`.

Deterministic by seed on one machine. A curriculum: pure copying of random words, which makes the induction
circuit appear in minutes, then sentences with a recall request over longer and longer documents. Every stage
saves its weights, so that an interrupted run goes on with `--resume`.
"""

import argparse
import json
import math
import random
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / folder) for folder in (".", "kernels", "traces")]

import torch  # noqa: E402
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers  # noqa: E402
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM  # noqa: E402

from sfi_core.bundled import example  # noqa: E402
from sfi_core.bundled.example import HELD_OUT, draw  # noqa: E402

MAX_LENGTH = 16384
START, END, PAD = "<|start|>", "<|end|>", "<|pad|>"
# GPT-4's split without contractions: a word takes the space before it, punctuation the newlines after it
SPLIT = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+"


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of the curriculum; its `name` is also that of its weights in the output folder.

    Each step draws one of the `lengths` for its sequences, empty for pure copying; a batch has `tokens` over
    all sequences. A cosine lowers the learning rate to a tenth.
    """

    name: str
    lengths: tuple[int, ...]
    steps: int
    learning_rate: float
    tokens: int = 8192


STAGES = (
    Stage("copy", (), 500, 2e-3),
    Stage("64", (72,), 500, 2e-3),
    Stage("256", (72, 256), 500, 2e-3),
    Stage("1024", (72, 256, 1024, 1024), 500, 2e-3),
    Stage("4096", (256, 1024, 4096, 4096), 400, 1.5e-3),
    Stage("8192", (256, 1024, 4096, 8192, 8192), 400, 1e-3),
    Stage("final", (1024, 4096, 8192, 8192, 8192), 500, 1e-3),
)


def model_config(tokenizer: PreTrainedTokenizerFast) -> Qwen3Config:
    """Describe the model: Qwen3, 4 layers, 4 query and 2 KV heads."""
    return Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_LENGTH,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def vocabulary() -> list[str]:
    """List the texts that must be one token each."""
    words = [*example.NAMES, *example.VERBS, *example.ADJECTIVES, *example.OBJECTS, *example.PREPOSITIONS]
    words += [*example.PLACE_ADJECTIVES, *example.PLACES]
    words += ["a", "an", "the", "and", "right", "What", "is", "written", "about"]
    bare = [*example.OPENERS, "Question", "Answer", ".", "!", ";", "?", ",", ":", ".\n", "!\n", "?\n", "\n"]
    return [f" {word}" for word in words] + bare


def build_tokenizer(max_length: int) -> PreTrainedTokenizerFast:
    """Make a byte-level BPE in which every word of the corpus is one token; other text falls back to bytes."""
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


class Batches:
    """Draws training batches as `(input ids, targets)`, with -100 where nothing is learned."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
        self._tokenizer = tokenizer
        self._rng = random.Random(seed)
        self._words = tokenizer.convert_tokens_to_ids([tokenizer.tokenize(word)[0] for word in vocabulary()])

    def copying(self, stage: Stage) -> tuple[torch.Tensor, torch.Tensor]:
        """21 random words, then their segments of 7 in shuffled order; the copy is learned."""
        rows = []
        for _ in range(stage.tokens // 44):
            words = self._rng.sample(self._words, 21)
            order = self._rng.sample(range(3), 3)
            copied = [word for part in order for word in words[7 * part : 7 * part + 7]]
            rows.append([self._tokenizer.bos_token_id, *words, self._tokenizer.eos_token_id, *copied])
        ids = torch.tensor(rows)
        target = ids.clone()
        target[:, :23] = -100
        return ids[:, :-1], target[:, 1:]

    def recalls(self, stage: Stage) -> tuple[torch.Tensor, torch.Tensor]:
        """Documents of one length with requests; the answers are learned."""
        length = self._rng.choice(stage.lengths)
        examples = [draw(self._rng, length) for _ in range(max(1, stage.tokens // length))]
        prompts = self._tokenizer([example.prompt for example in examples])["input_ids"]
        answers = self._tokenizer([example.answer for example in examples], add_special_tokens=False)["input_ids"]
        eos, pad = self._tokenizer.eos_token_id, self._tokenizer.pad_token_id
        width = max(len(p) + len(a) + 1 for p, a in zip(prompts, answers, strict=True))
        ids = torch.full((len(prompts), width), pad)
        target = torch.full_like(ids, -100)
        for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            text = torch.tensor([*prompt, *answer, eos])
            ids[row, : len(text)] = text
            target[row, len(prompt) : len(text)] = text[len(prompt) :]
        return ids[:, :-1], target[:, 1:]


def loss_and_accuracy(
    model: Qwen3ForCausalLM, ids: torch.Tensor, target: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Score only the learned positions; the head's product over all others would be wasted."""
    hidden = model.model(ids, use_cache=False).last_hidden_state
    learned = target >= 0
    logits, wanted = model.lm_head(hidden[learned]), target[learned]
    return torch.nn.functional.cross_entropy(logits, wanted), (logits.argmax(-1) == wanted)


@torch.no_grad()
def exact_match(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, length: int, *, samples: int, asked: int = 5
) -> float:
    """Return the share of held-out requests answered word for word (teacher-forced, so equal to greedy)."""
    right = 0
    for index in range(samples):
        example = draw(random.Random(HELD_OUT + index), length, asked)
        prompt = tokenizer(example.prompt)["input_ids"]
        answer = tokenizer(example.answer, add_special_tokens=False)["input_ids"]
        ids = torch.tensor([[*prompt, *answer]])
        wanted = torch.tensor([*answer, tokenizer.eos_token_id])
        hidden = model.model(ids, use_cache=False).last_hidden_state[0, len(prompt) - 1 :]
        right += int((model.lm_head(hidden).argmax(-1) == wanted).all())
    return right / samples


def optimizer_of(model: Qwen3ForCausalLM) -> torch.optim.Optimizer:
    """AdamW; norms and gains do not decay."""
    decayed = [p for p in model.parameters() if p.dim() > 1]
    undecayed = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": undecayed, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.98))


def run_stage(model: Qwen3ForCausalLM, batches: Batches, stage: Stage, *, log: int = 50) -> None:
    """Train one stage, printing loss and token accuracy."""
    optimizer = optimizer_of(model)
    warmup = min(50, stage.steps // 10)
    started, seen = time.perf_counter(), 0
    losses: list[float] = []
    hits: list[float] = []
    for step in range(stage.steps):
        cosine = 0.55 + 0.45 * math.cos(math.pi * step / stage.steps)
        for group in optimizer.param_groups:
            group["lr"] = stage.learning_rate * min(1.0, (step + 1) / warmup) * cosine
        ids, target = batches.recalls(stage) if stage.lengths else batches.copying(stage)
        loss, hit = loss_and_accuracy(model, ids, target)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        seen += ids.numel()
        losses.append(float(loss.detach()))
        hits.append(float(hit.float().mean()))
        if (step + 1) % log == 0:
            rate = seen / (time.perf_counter() - started)
            print(
                f"{stage.name} {step + 1}/{stage.steps} loss {sum(losses[-log:]) / log:.4f} "
                f"accuracy {sum(hits[-log:]) / log:.4f} {rate:,.0f} tokens/s",
                flush=True,
            )


def main() -> None:
    """Train, test and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", metavar="STAGE", help="start from the weights of this stage")
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    tokenizer = build_tokenizer(MAX_LENGTH)
    model = Qwen3ForCausalLM(model_config(tokenizer))
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(tokenizer)} tokens")
    names = [stage.name for stage in STAGES]
    first = names.index(arguments.resume) + 1 if arguments.resume else 0
    if arguments.resume:
        model.load_state_dict(torch.load(arguments.output / f"{arguments.resume}.pt"))
    arguments.output.mkdir(parents=True, exist_ok=True)
    for number, stage in enumerate(STAGES[first:], first):
        run_stage(model, Batches(tokenizer, 1000 * arguments.seed + number), stage)
        torch.save(model.state_dict(), arguments.output / f"{stage.name}.pt")
        for length in (256, 1024, 4096, 8192):
            if length <= 4 * max(stage.lengths or (64,)):
                score = exact_match(model, tokenizer, length, samples=40)
                print(f"{stage.name}: exact match at {length} tokens: {score:.3f}", flush=True)
        tokenizer.save_pretrained(arguments.output)
        model.save_pretrained(arguments.output)
    facts = {"seed": arguments.seed, "stages": [asdict(stage) for stage in STAGES]}
    (arguments.output / "training.json").write_text(json.dumps(facts, indent=1))


if __name__ == "__main__":
    main()
