"""Loading a checkpoint: what works, and one line for everything that does not."""

import json
import os
import shutil
from contextlib import nullcontext
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from transformers import T5Config, ViTConfig

from sfi_core.distributed.ranks import Ranks
from sfi_core.errors import BackendError, ConfigError, InputError, SfiError, UnsupportedModelError
from sfi_core.generation.prompts import chat_text, text_ids
from sfi_core.machine.text import first_line
from sfi_core.models.load import load, load_tokenizer, resolve_device, resolve_dtype
from sfi_core.models.source import checkpoint_digest, commit_of
from tests.core.conftest import tiny_qwen3

pytestmark = pytest.mark.seam
COMMIT = "0123456789abcdef0123456789abcdef01234567"
no_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a GPU that is not there")


class Compared(Exception):  # noqa: N818 - it carries what ranks compare, and is no error
    """Ends a load where the ranks compare what they load."""


class FakeRanks(Ranks):
    def agreed(self):
        return nullcontext()

    def check_same(self, facts: dict) -> None:
        raise Compared(facts)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    tiny_qwen3(len(tiny_tokenizer)).save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "model"))


@pytest.fixture
def _offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


@pytest.fixture
def hub_id(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, _offline: None) -> str:
    """Return the id of the checkpoint, which lies in the hub's cache as a download leaves it."""
    home = tmp_path / "models--owner--name"
    shutil.copytree(saved, home / "snapshots" / COMMIT)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text(COMMIT)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    return "owner/name"


def refusal(error: type[SfiError], source: str, **options) -> str:
    with pytest.raises(error) as caught:
        load(source, **options)
    assert type(caught.value) is error
    message = str(caught.value)
    assert "\n" not in message
    assert not message.endswith(".")
    return message


def edit(folder: Path, **changes) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_folder_loads_in_evaluation_mode(saved: Path, tiny_tokenizer):
    model, tokenizer = load(str(saved), device="cpu")
    assert not model.training
    assert tokenizer.get_vocab() == tiny_tokenizer.get_vocab()
    expected = tiny_qwen3(len(tiny_tokenizer))
    ids = torch.arange(5)[None]
    with torch.no_grad():
        assert torch.equal(model(ids).logits, expected(ids).logits)


@pytest.mark.parametrize("revision", [None, "main", COMMIT])
def test_a_hub_id_loads_from_the_cache(hub_id: str, saved: Path, revision: str | None):
    model, _ = load(hub_id, revision=revision, device="cpu")
    assert model.config.name_or_path == hub_id
    assert commit_of(hub_id, revision) == COMMIT
    assert commit_of(hub_id, "other") is commit_of("owner/other", None) is None
    ids = torch.arange(5)[None]
    with torch.no_grad():
        assert torch.equal(model(ids).logits, load(str(saved), device="cpu")[0](ids).logits)


@pytest.mark.parametrize("hub", [True, False])
def test_ranks_compare_the_commit_of_a_hub_id_and_the_digest_of_a_folder(hub, hub_id, saved, monkeypatch):
    monkeypatch.setattr("sfi_core.models.load.join", lambda: FakeRanks(size=2))
    with pytest.raises(Compared) as caught:
        load(hub_id if hub else str(saved), device="cpu")
    digest = COMMIT if hub else checkpoint_digest(saved)
    assert caught.value.args == ({"model": digest, "dtype": "auto", "device": "cpu"},)


@pytest.mark.parametrize("name", ["auto", "float32", "bf16", "bfloat16", "fp16"])
def test_weights_have_the_dtype_asked_for(saved: Path, name: str):
    full = {"auto": "float32", "bf16": "bfloat16", "fp16": "float16"}.get(name, name)
    assert load(str(saved), dtype=name, device="cpu")[0].dtype == getattr(torch, full)


def test_auto_takes_the_checkpoint_s_dtype(tmp_path: Path, tiny_tokenizer):
    tiny_qwen3(len(tiny_tokenizer)).bfloat16().save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    assert load(str(tmp_path), device="cpu")[0].dtype == torch.bfloat16


@pytest.mark.parametrize("source", ["/no/such/folder", "./absent", "../absent", "~/absent", "a/b/c"])
def test_a_missing_folder_is_named_and_a_file_is_no_model(source: str):
    assert refusal(InputError, source) == f"model folder {source} does not exist"
    assert refusal(InputError, __file__) == f"model must be a folder, a hub id or a .gguf file, got the file {__file__}"


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("config.json", "model folder {} has no config.json"),
        ("tokenizer.json", "model folder {} has no tokenizer; save one there"),
        ("model.safetensors", "model {} cannot be loaded: Error no file named "),
    ],
)
def test_a_folder_without_a_file_is_refused(folder: Path, file: str, words: str):
    (folder / file).unlink()
    assert refusal(InputError, str(folder)).startswith(words.format(folder))


@pytest.mark.usefixtures("_offline")
@pytest.mark.parametrize("name", ["no-such-owner/no-such-model", "no-such-model", "no model at all!"])
def test_a_hub_id_that_cannot_be_had_is_named(name: str):
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    assert refusal(InputError, name).startswith(f"model {name} cannot be loaded: ")


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"])
def test_a_truncated_file_is_refused(folder: Path, name: str):
    data = (folder / name).read_bytes()
    (folder / name).write_bytes(data[: len(data) // 2])
    assert refusal(InputError, str(folder)).startswith(f"model {folder} cannot be loaded: ")


@pytest.mark.parametrize("data", [b"", b"\xff" * 100])
def test_weights_that_are_none_are_refused(folder: Path, data: bytes):
    (folder / "model.safetensors").write_bytes(data)
    message = refusal(InputError, str(folder))
    assert message.startswith(f"model {folder} cannot be loaded: Error while deserializing header")


def test_weights_that_the_config_does_not_fit_are_counted_and_named(folder: Path):
    """transformers would draw them at random."""
    edit(folder, head_dim=16)
    assert refusal(InputError, str(folder)) == (
        f"model {folder} has 12 weights of another shape than its config says, among them "
        "model.layers.0.self_attn.k_norm.weight, which must be [16], got [8]"
    )
    edit(folder, head_dim=8, num_hidden_layers=3, layer_types=["full_attention"] * 3)
    lacks = "lacks 11 weights, among them model.layers.2.input_layernorm.weight"
    assert refusal(InputError, str(folder)) == f"model {folder} {lacks}"


@pytest.mark.parametrize(
    ("file", "text", "reason"),
    [
        ("config.json", "[]", "cannot be loaded"),
        ("config.json", "[" * 100_000, "cannot be loaded"),
        ("generation_config.json", "[]", "cannot be loaded"),
        ("config.json", {"model_type": "nonesuch"}, "model type `nonesuch`"),
        ("config.json", {"hidden_size": "x"}, "'hidden_size' expected int, got str"),
        ("config.json", {"head_dim": 0}, "head_dim must be in 1 to 16,384, got 0"),
        ("config.json", {"num_hidden_layers": 10**5, "layer_types": None}, "num_hidden_layers must be in 1 to 2,048"),
        ("config.json", {"vocab_size": 2**40}, "vocab_size must be in 1 to 16,777,216"),
    ],
)
def test_a_stranger_s_config_is_one_line_and_soon(folder: Path, file: str, text: str | dict, reason: str):
    if isinstance(text, dict):
        edit(folder, **text)
    else:
        (folder / file).write_text(text)
    assert reason in refusal(InputError, str(folder))


@pytest.mark.parametrize(
    "template", ["{% for x in %}", "{{ 1 / 0 }}", "{{ messages.x.y }}", "{{ raise_exception('no') }}"]
)
def test_a_broken_chat_template_is_one_line(saved: Path, template: str):
    tokenizer = load_tokenizer(str(saved))
    tokenizer.chat_template = template
    with pytest.raises(InputError, match="the model's chat template cannot be filled: ") as error:
        chat_text(tokenizer, [{"role": "user", "content": "x"}])
    assert "\n" not in str(error.value)


PRINTS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
LISTS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "joined"), [(PRINTS, "\n"), (PRINTS.replace("m.content", "m.content | tojson"), "\\n"), (LISTS, "")]
)
def test_text_parts_and_null_are_read_as_text(saved: Path, template: str, joined: str):
    tokenizer = load_tokenizer(str(saved))
    tokenizer.chat_template = template
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    chat = [{"role": "user", "content": parts}, {"role": "assistant", "content": None, "tool_calls": []}]
    assert chat_text(tokenizer, chat).replace('"', "") == f"<user>a{joined}b<assistant>"


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ([{"type": "image_url", "image_url": {}}], "parts of type 'text' with a text, got 'image_url'"),
        ([{"type": "text"}], "parts of type 'text' with a text, got 'text'"),
        (["a"], "parts of type 'text' with a text, got 'a'"),
        (5, "a text as content, got 5"),
    ],
)
def test_a_content_that_is_no_text_is_refused_by_name(saved: Path, content: object, told: str):
    tokenizer = load_tokenizer(str(saved))
    tokenizer.chat_template = PRINTS
    with pytest.raises(InputError, match=f"message 1 must have {told}"):
        chat_text(tokenizer, [{"role": "user", "content": "x"}, {"role": "user", "content": content}])


def test_half_a_character_is_no_prompt(saved: Path):
    with pytest.raises(InputError, match="prompt must be Unicode, got half of a character at 3"):
        text_ids(load_tokenizer(str(saved)), "abc\ud800")


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (T5Config(), " is an encoder-decoder model (t5); sfi runs decoder-only models"),
        (ViTConfig(), " (vit) is no causal language model"),
    ],
)
def test_a_model_of_something_else_is_unsupported(folder: Path, config, told: str):
    config.save_pretrained(folder)
    assert refusal(UnsupportedModelError, str(folder)) == f"{folder}{told}"


@pytest.mark.parametrize(
    ("option", "name", "known"),
    [
        ("dtype", "int8", ("auto", "bfloat16", "bf16", "float16", "fp16", "float32", "fp32")),
        *(("device", name, ("auto", "cpu", "cuda")) for name in ("", "mps", "cuda:-1")),
    ],
)
def test_an_unknown_dtype_or_device_is_named_with_the_known_ones(saved: Path, option: str, name: str, known: tuple):
    """PyTorch knows more kinds of devices, which sfi does not run on."""
    message = f"unknown {option} {name!r}; expected one of {known}"
    assert refusal(ConfigError, str(saved), **{option: name}) == message


@no_cuda
@pytest.mark.parametrize("name", ["cuda", "cuda:3"])
def test_a_gpu_that_is_not_there_is_a_machine_s_limit(saved: Path, name: str):
    assert refusal(BackendError, str(saved), device=name) == (
        f"device {name} is not on this machine, which has 0 CUDA devices; use cpu"
    )


def test_a_gpu_beyond_the_last_is_a_machine_s_limit(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve_device("cuda:1") == torch.device("cuda:1")
    assert resolve_device("auto") == torch.device("cuda")
    with pytest.raises(BackendError, match=r"^device cuda:2 is not on this machine, which has 2 "):
        resolve_device("cuda:2")


@no_cuda
def test_auto_takes_the_cpu_where_there_is_no_gpu():
    assert resolve_device("auto") == torch.device("cpu")
    assert resolve_dtype("auto") == "auto"


@pytest.mark.parametrize(
    ("text", "expected"),
    [("One.\nTwo.", "One"), ("Bad field:\n  not an int", "Bad field: not an int"), ("", "OSError")],
)
def test_a_message_of_many_lines_becomes_one(text: str, expected: str):
    assert first_line(OSError(text)) == expected
