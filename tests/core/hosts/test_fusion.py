"""Norms, rotations and gates as one kernel each: same tokens, fewer kernels, and nothing else changed."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama import modeling_llama as llama

import sfi_core
from sfi_core import EngineOptions, slow_fast
from sfi_core.errors import ConfigError
from sfi_core.hosts.transformers.cache import CACHE_NAME
from sfi_core.hosts.transformers.fusion import forward_for, fused, wants_fusion
from sfi_core.hosts.transformers.known import digest, rotates_halves
from sfi_core.models import linear
from sfi_kernels.launch import counting, name_of
from tests.architectures import WORKS
from tests.architectures import tiny as tiny_architecture
from tests.core.conftest import TINY
from tests.fake_graph import FakeRecorder, use_tensors
from tests.replays import CONFIG

pytest.importorskip("triton")
from triton.runtime.interpreter import GridExecutor

from tests.covering import first

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PROMPTS = [list(range(5, 45)), list(range(3, 28))]
NEW = 4
MODELS = {
    "qwen3": {},
    "llama": {},
    "qwen2": {},
    "mixtral": {"sliding_window": None, "num_local_experts": 4, "num_experts_per_tok": 2},
    "granite": {},
    "gemma3_text": {},
}
# ops of PyTorch that launch nothing on a GPU
FREE = {
    "view", "_unsafe_view", "reshape", "transpose", "t", "unsqueeze", "squeeze", "expand", "slice", "select",
    "permute", "detach", "alias", "as_strided", "split", "unbind", "split_with_sizes", "_reshape_alias",
    "lift_fresh", "empty", "new_empty", "empty_like",
}  # fmt: skip


def tiny(kind: str, layers: int = 2):
    torch.manual_seed(0)
    sizes = {**TINY, "num_hidden_layers": layers, "initializer_range": 0.3, **MODELS[kind]}
    if kind == "gemma3_text":
        sizes["layer_types"] = ["full_attention"] * layers
    config = AutoConfig.for_model(kind, vocab_size=96, **sizes)
    model = AutoModelForCausalLM.from_config(config).eval().to(DEVICE)
    for name, parameter in model.named_parameters():
        if "norm" in name:  # all ones, which no wrong product would show
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return model


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tensor functions stand in for the kernels that take the interpreter long; not for ours."""
    if DEVICE == "cpu":
        use_tensors(monkeypatch)


def complete(model, on: bool | None, *, graphs: bool = False, new: int = NEW, policy: str = "sfi"):
    engine = EngineOptions(backend="triton", fused=on, graphs=graphs)
    options = {"page_size": 16, "max_new_tokens": new, "stop_token_ids": (), "engine": engine}
    return sfi_core.generate(model, None, PROMPTS, CONFIG, policy=policy, **options).report


def launched(report) -> dict[str, int]:
    return {kernel.name: kernel.launches for kernel in report.kernels}


@pytest.mark.parametrize("kind", first(["qwen3", "llama", "qwen2", "mixtral", "granite"], 2))
def test_fused_models_choose_the_same_tokens(quick, kind: str):
    layers, policy = (2, "codescan") if kind == "qwen3" else (1, "sfi")
    model = tiny(kind, layers)
    plain, ours = (complete(model, on=on, policy=policy) for on in (False, True))
    assert [r.token_ids for r in ours.requests] == [r.token_ids for r in plain.requests]
    assert len({token for r in ours.requests for token in r.token_ids}) > 4
    assert launched(ours)["rotary"] == NEW * layers
    assert not {"rms_norm", "rotary", "silu_mul"} & launched(plain).keys()
    assert not plain.fused
    assert not plain.left_alone


def test_the_report_says_what_ran_fused_and_what_did_not(quick):
    report = complete(tiny("qwen3"), on=True)
    norms = {"Qwen3RMSNorm": 9, "Qwen3MLP": 2, "Qwen3Attention": 2, "Qwen3DecoderLayer": 2}
    assert (report.fused, report.left_alone) == (norms, {})
    # the first norm, and each layer's two sums with the norm behind each; q_norm and k_norm in `rotary`
    assert launched(report)["rms_norm"] == NEW * (2 * 2 + 1)
    with slow_fast(tiny("gemma3_text"), config=CONFIG, engine=EngineOptions(backend="triton", fused=True)) as s:
        assert not s.fusion.modules
        assert s.fusion.left_alone == {
            "Gemma3DecoderLayer": 2, "Gemma3Attention": 2, "Gemma3MLP": 2, "Gemma3RMSNorm": 13,
        }  # fmt: skip


class Launches(TorchDispatchMode):
    """Counts what a GPU would launch: PyTorch's ops that compute or copy, and Triton's kernels."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

        def launch(executor, *args, **kwargs) -> None:
            self.found[name_of(executor.fn)] += 1  # what it computes does not count

        monkeypatch.setattr(GridExecutor, "__call__", launch)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.found[name] += name not in FREE
        return func(*args, **(kwargs or {}))


def one_step(monkeypatch: pytest.MonkeyPatch, kind: str, layers: int, policy: str, **switches: bool) -> Counter[str]:
    """Count the launches of a step in float16, where a change of dtype is a kernel."""
    model = tiny(kind, layers).half()
    token, engine = torch.full((2, 1), 7), EngineOptions(backend="triton", **switches)
    with (
        monkeypatch.context() as patch,
        torch.no_grad(),
        slow_fast(model, config=CONFIG, policy=policy, page_size=16, engine=engine) as session,
    ):
        cache = session.cache(32)
        model(token.expand(2, 20), **{CACHE_NAME: cache}, use_cache=True)
        model(token, position_ids=token + 13, **{CACHE_NAME: cache}, use_cache=True)  # allocates
        with Launches(patch) as launches:
            model(token, position_ids=token + 14, **{CACHE_NAME: cache}, use_cache=True)
        kind = "dense" if policy == "full-kv" else "sparse"
        assert session.report.paths[f"triton.{kind}_attention"] > 0
    return +launches.found


def per_layer(monkeypatch: pytest.MonkeyPatch, kind: str, policy: str, **switches: bool) -> Counter[str]:
    two, one = (one_step(monkeypatch, kind, layers, policy, **switches) for layers in (2, 1))
    return two - one


@pytest.mark.skipif(DEVICE == "cuda", reason="counts what the interpreter is given")
@pytest.mark.parametrize(
    ("kind", "policy", "plain"), first([("qwen3", "codescan", 58), ("qwen3", "full-kv", 56), ("llama", "sfi", 40)])
)
def test_a_layer_of_a_decoding_step_is_ten_kernels_or_seven(monkeypatch, kind: str, policy: str, plain: int):
    """Four products, two sums with a norm, the rotation that appends, the gate, two of attention, three of a choice.

    Products of ours have norms, sums and gate inside.
    """
    monkeypatch.setattr(linear, "crawls", lambda _: False)  # of this processor's float16, not of a GPU's
    ours, own_products = (
        per_layer(monkeypatch, kind, policy, fused=True, products=products) for products in (False, True)
    )
    attention = {"split_attention": 1, "join_splits": 1}
    if policy == "codescan":
        attention |= {"code_scan_sums": 1, "code_scan_score": 1, "code_scan_choose": 1}
    assert ours == {"mm": 4, "rms_norm": 2, "rotary": 1, "silu_mul": 1, **attention}
    assert own_products == {"project": 4, "rotary": 1, **attention}
    assert per_layer(monkeypatch, kind, policy, fused=False).total() == plain


@pytest.mark.exhaustive
@pytest.mark.skipif(DEVICE == "cuda", reason="on CPU tensors")
def test_fused_steps_can_be_replayed(monkeypatch, quick):
    recorder = FakeRecorder()
    recorder.install(monkeypatch)
    reports = [complete(tiny("qwen3", 1), on=True, graphs=graphs, new=6) for graphs in (False, True)]
    eager, replayed = reports
    assert recorder.plays > 0
    assert [r.token_ids for r in replayed.requests] == [r.token_ids for r in eager.requests]
    ours = {"rms_norm", "rotary", "silu_mul"}
    counts = [{k: v for k, v in launched(report).items() if k in ours} for report in reports]
    assert counts[0].keys() == ours
    assert counts[0] == counts[1]


def forwards(model) -> dict:
    return {name: module.forward.__func__ for name, module in model.named_modules()}


def test_leaving_gives_every_module_its_forward_back():
    model = tiny("qwen3")
    before = forwards(model)
    with fused(model):
        assert forwards(model) != before
    assert forwards(model) == before
    with pytest.raises(TypeError, match="str"), fused(model):
        model("no tokens")
    assert forwards(model) == before
    assert not any("forward" in vars(module) for module in model.modules())


def test_projections_of_the_same_rows_are_moved_once_and_keep_their_numbers():
    model, places = tiny("qwen3", 1), []
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    attention, mlp = model.model.layers[0].self_attn, model.model.layers[0].mlp
    for _ in range(2):
        with fused(model):
            pass
        places.append([weight.data_ptr() for weight in model.parameters()])
        for group in ((attention.q_proj, attention.k_proj, attention.v_proj), (mlp.gate_proj, mlp.up_proj)):
            assert len({linear.weight.untyped_storage().data_ptr() for linear in group}) == 1
    assert places[0] == places[1]
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_hooks_hear_the_modules_that_a_kernel_would_pass_over():
    """A norm of heads, the second norm and a projection have no call of their own unless one listens."""
    model, heard = tiny("qwen3"), []
    layer = model.model.layers[0]
    ids = torch.tensor([PROMPTS[1]], device=DEVICE)
    named = dict(layer.named_modules())
    norms = ("self_attn.q_norm", "self_attn.k_norm", "post_attention_layernorm")
    for name in ("", *norms, "mlp.act_fn", "self_attn.k_proj"):
        named[name].register_forward_hook(lambda module, args, out, name=name: heard.append(name))
    with torch.no_grad():
        plain = model(ids).logits
        wanted = heard.copy()
        heard.clear()
        with fused(model):
            ours = model(ids).logits
    assert sorted(heard) == sorted(wanted)
    assert len(wanted) == 6
    torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["layers.0", "layers.1", "layers.1.input_layernorm", "norm"])
def test_a_sum_that_a_hook_changes_is_normed_anew(name: str):
    """The norm behind a layer's sum is computed with it, unless someone may touch the sum in between."""
    model, ids = tiny("llama"), torch.tensor([PROMPTS[1]], device=DEVICE)
    module = model.model.get_submodule(name)
    if name == "layers.0":
        module.register_forward_hook(lambda module, args, out: out.add_(1))
    else:
        module.register_forward_pre_hook(lambda module, args: args[0].add_(1))
    with torch.inference_mode():
        plain = model(ids).logits
        with fused(model):
            torch.testing.assert_close(model(ids).logits, plain, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["qwen3", "mixtral"])
def test_hidden_states_are_the_sums_and_one_kernel_norms_them(kind: str):
    model, ids = tiny(kind), torch.tensor([PROMPTS[1]], device=DEVICE)
    with torch.inference_mode(), counting(Counter()) as launches:
        plain = model(ids, output_hidden_states=True).hidden_states
        with fused(model):
            ours = model(ids, output_hidden_states=True).hidden_states
    assert launches["rms_norm"] == 2 * 2 + 1
    torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-4)


def test_gradients_take_transformers_own_way():
    model, ids = tiny("llama"), torch.tensor([PROMPTS[1]], device=DEVICE)
    with fused(model):
        model(ids).logits.sum().backward()
    assert model.model.layers[0].input_layernorm.weight.grad.abs().sum() > 0


def test_a_forward_that_is_not_known_is_left_alone(monkeypatch):
    """One of another library on the instance, another source of the class, or another helper of its file."""
    model = tiny("qwen3")
    layer = model.model.layers[0]
    norm, attention = layer.post_attention_layernorm, layer.self_attn
    assert all(map(forward_for, (layer, norm, attention, layer.mlp)))

    class OtherRMSNorm(type(norm)):
        def forward(self, hidden_states):
            return super().forward(hidden_states) * 2

    layer.post_attention_layernorm.__class__ = OtherRMSNorm
    assert forward_for(norm) is forward_for(layer) is None, "the layer would pass over the norm"
    layer.mlp.act_fn = torch.nn.GELU()
    assert forward_for(layer.mlp) is None
    attention.q_norm.forward = attention.q_norm.forward
    assert forward_for(attention.q_norm) is forward_for(attention) is None
    del attention.q_norm.forward
    monkeypatch.setitem(type(attention).forward.__globals__, "rotate_half", lambda x: x)
    assert forward_for(attention) is None


def test_what_the_hub_wraps_in_a_module_is_still_known():
    """With the package `kernels`, `apply_rotary_pos_emb` is a module that calls the function."""
    func = llama.apply_rotary_pos_emb

    class Wrapped(torch.nn.Module):
        def forward(self, *args, **kwargs):
            return func(*args, **kwargs)

    def forward() -> None:
        """Stand for an attention's."""

    names = {**vars(llama), "apply_rotary_pos_emb": Wrapped()}
    assert rotates_halves(type(forward)(forward.__code__, names))
    names["apply_rotary_pos_emb"].forward = func  # as `kernelize` replaces it
    assert not rotates_halves(type(forward)(forward.__code__, names))


def described():
    def square(x: int) -> int:
        """Square the next number."""
        y: int = x + 1  # the next
        return y * y

    return square


def bare():
    def square(x):
        y = x + 1
        return y * y

    return square


def another():
    def square(x):
        y = x + 2
        return y * y

    return square


def test_a_digest_is_of_what_a_function_does():
    assert digest(described()) == digest(bare()) != digest(another())
    assert digest(len) == ""


def test_fusion_is_for_triton_on_cuda_unless_asked_for():
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert wants_fusion(None, "triton", cuda)
    assert not wants_fusion(None, "triton", cpu)
    assert not wants_fusion(None, "torch", cuda)
    assert not wants_fusion(False, "triton", cuda)
    assert wants_fusion(True, "triton", cpu)
    message = "^engine.fused must be none or false on the torch backend, got true$"
    with pytest.raises(ConfigError, match=message):
        wants_fusion(True, "torch", cpu)


def test_the_page_says_what_is_fused_of_each_architecture():
    kinds = {"Norm": "norm", "Attention": "rotation", "MLP": "gate", "DecoderLayer": "sum"}
    for architecture in WORKS:
        with fused(tiny_architecture(architecture.label)) as fusion:
            names = " ".join(fusion.modules)
        parts = [kind for suffix, kind in kinds.items() if suffix in names]
        assert " ".join(parts) == architecture.fused, architecture.name
