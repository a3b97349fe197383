"""cuops.nn.replace_rms_norm: models of Hugging Face and others, with cuops.nn.RMSNorm in place of their own."""

from __future__ import annotations

import ast
import functools
import importlib
import textwrap
from pathlib import Path

import cuops
import pytest
import torch
from cuops.nn import _known_rms_norms
from module_tolerance import close
from samples import DTYPES, make

pytestmark = pytest.mark.filterwarnings(
    "ignore:Mismatch dtype between input and weight:UserWarning"
)  # PyTorch's of its own speed

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
         "head_dim": 8, "vocab_size": 64, "pad_token_id": 0}  # fmt: skip
T5_SIZES = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 64, "decoder_start_token_id": 0,
            "dropout_rate": 0.0}  # fmt: skip
MODELS = {  # model: how many RMSNorm modules it has
    "Llama": 5, "Mistral": 5, "Qwen2": 5, "Qwen3": 9, "Gemma": 5, "Gemma2": 9, "Phi3": 5, "Olmo2": 9, "T5": 12,
}  # fmt: skip


def make_model(name, dtype=torch.float32, device="cpu"):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**(T5_SIZES if name == "T5" else SIZES))
    model = getattr(transformers, "T5ForConditionalGeneration" if name == "T5" else f"{name}ForCausalLM")(config)
    for module in model.modules():  # weights that the test would miss if they were not used
        if type(module).__name__.endswith(("RMSNorm", "T5LayerNorm")):
            torch.nn.init.normal_(module.weight, module.weight.mean().item(), 0.2)
    return model.to(device, dtype)


def tokens(device):
    return torch.randint(1, 64, (2, 12), generator=torch.Generator().manual_seed(1)).to(device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_models_of_hugging_face_compute_the_same(name, dtype, device):
    model = make_model(name, dtype, device)
    arguments = {"input_ids": tokens(device), "labels": tokens(device)}
    before = model(**arguments).logits
    old = dict(model.named_modules())
    names = list(model.state_dict())
    replacement = cuops.nn.replace_rms_norm(model)
    assert len(replacement.replaced) == MODELS[name]
    assert not replacement.left
    assert all(isinstance(model.get_submodule(path), cuops.nn.RMSNorm) for path, _ in replacement.replaced)
    assert list(model.state_dict()) == names
    after = model(**arguments).logits
    assert after.dtype == before.dtype
    # The function is that of float32's in 16 bits too, apart from what a rounding more or less does in two layers.
    torch.testing.assert_close(
        after, before, rtol=0.05 if dtype == torch.bfloat16 else 1e-4, atol=0.05 if dtype == torch.bfloat16 else 1e-5
    )
    replacement.undo()
    assert {path: id(module) for path, module in model.named_modules()} == {
        path: id(module) for path, module in old.items()
    }
    assert torch.equal(model(**arguments).logits, before)


@pytest.mark.parametrize("name", ["Llama", "Gemma", "T5"])
def test_training_goes_on_as_before(name, device):
    def losses(model, optimizer, steps):
        found = []
        for _ in range(steps):
            loss = model(input_ids=tokens(device), labels=tokens(device)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    model, reference = make_model(name, device=device), make_model(name, device=device)
    optimizer, other = (torch.optim.SGD(m.parameters(), lr=0.05) for m in (model, reference))
    want = losses(reference, other, 6)
    got = losses(model, optimizer, 1)
    replacement = cuops.nn.replace_rms_norm(model)
    got += losses(model, optimizer, 3)
    replacement.undo()
    got += losses(model, optimizer, 2)  # the weights trained meanwhile stay
    assert got == pytest.approx(want, rel=1e-4)
    assert want[-1] < want[0]


@pytest.mark.parametrize("weight_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "name",
    [
        "llama.Llama",
        "gemma.Gemma",
        "olmo2.Olmo2",
        "t5.T5LayerNorm",
        "llama4.Llama4Text",
        "gemma3n.Gemma3n",
        "moshi.Moshi",
    ],
)
def test_dtypes_are_those_of_each_class(name, dtype, weight_dtype):
    pytest.importorskip("transformers")
    module, _, cls = name.partition(".")
    source = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
    old = getattr(source, cls if cls.endswith("Norm") else f"{cls}RMSNorm")(8, eps=1e-3)
    old.weight.data = make((8,), weight_dtype, seed=1)
    model = torch.nn.Sequential(old)
    x = make((3, 8), dtype)
    want = model(x)
    assert cuops.nn.replace_rms_norm(model).replaced == [("0", type(old))]
    got = model(x)
    assert got.dtype == want.dtype
    loosest = max((dtype, weight_dtype, torch.float32), key=lambda d: torch.finfo(d).eps)
    close(got, want, loosest)


def test_every_class_of_the_table_has_its_formula():
    transformers = pytest.importorskip("transformers", minversion="5.23")  # Python 3.10 has an older one
    samples = {}
    for name, formula in _known_rms_norms.FORMULAS.items():
        module, _, cls = name.rpartition(".")
        source = Path(transformers.__file__).parent.joinpath(*module.split(".")[1:]).with_suffix(".py").read_text()
        start = source.index(f"class {cls}(")
        body = source[start:].split("\n\n\n")[0]
        forward = ast.unparse(
            ast.parse(textwrap.dedent(body[body.index("    def forward(") :]).split("def extra_repr")[0])
        )
        samples.setdefault(formula, {})[name] = (body, forward)
    scaled = {
        _known_rms_norms.Formula(
            "variance_epsilon", y_dtype="promoted"
        ): "return self.weight * hidden_states.to(input_dtype)",
        _known_rms_norms.Formula("eps", y_dtype="promoted"): "return output * self.weight",
        _known_rms_norms.Formula("variance_epsilon", y_dtype="t5"): "return self.weight * hidden_states",
        _known_rms_norms.Formula("eps", weight_offset=1.0): "output = output * (1.0 + self.weight.float())",
    }
    assert set(scaled) < set(samples)
    for formula, classes in samples.items():
        for name, (body, forward) in classes.items():
            assert f"self.{formula.eps} = eps" in body, name
            assert f"+ self.{formula.eps}" in body, name
            assert scaled.get(formula, "self.weight") in forward, name
            assert not any(
                word in body
                for word in ("gate", "group", ".mean(-1, keepdim=True)\n        hidden_states = (hidden_states -")
            ), name
            if formula.y_dtype == "x":
                assert forward.endswith((".to(input_dtype)", ".type_as(x)", ".type_as(hidden_states)")), name


class RMSNorm(torch.nn.Module):
    """A user's own, of a formula that nobody else knows."""

    def __init__(self, n, eps=1e-6):
        super().__init__()
        self.weight, self.eps, self.shift = torch.nn.Parameter(torch.ones(n)), eps, 0.5

    def forward(self, x):
        return self.weight * (x + self.shift) * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)


class LlamaRMSNorm(RMSNorm):
    pass


class Derived(torch.nn.RMSNorm):
    def forward(self, x):
        return 2 * super().forward(x)


def test_unknown_modules_are_left_alone():
    patched, with_more = torch.nn.RMSNorm(8), torch.nn.RMSNorm(8)
    patched.forward = lambda x: x
    with_more.scale = 2.0
    model = torch.nn.Sequential(
        torch.nn.LayerNorm(8), RMSNorm(8), LlamaRMSNorm(8), Derived(8), patched, with_more, torch.nn.RMSNorm(8)
    )
    before, x = list(model), make((3, 8))
    want = model(x)
    replacement = cuops.nn.replace_rms_norm(model)
    assert [path for path, _ in replacement.replaced] == ["6"]
    assert [module is old for module, old in zip(model, before, strict=True)] == 6 * [True] + [False]
    assert {path: reason for path, _, reason in replacement.left} == {
        "1": "its class is not known", "2": "its class is not known",
        "3": "its class is not known, only that it derives from RMSNorm", "4": "its forward was patched",
        "5": "it has attributes that its class is not known for: scale",
    }  # fmt: skip
    torch.testing.assert_close(model(x), want)
    shown = repr(replacement)
    assert "1 module of Sequential replaced by cuops.nn.RMSNorm, 5 left alone" in shown
    assert "torch.nn.modules.normalization.RMSNorm\n    6" in shown
    assert "left: 4, torch.nn.modules.normalization.RMSNorm: its forward was patched" in shown
    assert shown.endswith("to replace a class of the same formula: also={Class: cuops.nn.Formula('name of its eps')}")
    replacement.undo()
    assert "1 module of Sequential replaced by cuops.nn.RMSNorm and put back, 5 left alone" in repr(replacement)


def test_modules_of_a_class_that_was_patched_are_left_alone(monkeypatch):
    original = torch.nn.RMSNorm.forward

    @functools.wraps(original)
    def doubled(self, x):
        return 2 * original(self, x)

    for patch in (doubled, lambda self, x: 2 * original(self, x), functools.partialmethod(doubled)):
        monkeypatch.setattr(torch.nn.RMSNorm, "forward", patch)
        model, x = torch.nn.Sequential(torch.nn.RMSNorm(8)), make((3, 8))
        want = model(x)
        replacement = cuops.nn.replace_rms_norm(model)
        assert [reason for *_, reason in replacement.left] == ["its forward was patched"]
        assert torch.equal(model(x), want)


def test_modules_whose_formula_was_patched_are_left_alone(monkeypatch):
    Gemma2RMSNorm = pytest.importorskip("transformers.models.gemma2.modeling_gemma2").Gemma2RMSNorm  # noqa: N806
    model = torch.nn.Sequential(Gemma2RMSNorm(8), Gemma2RMSNorm(8))
    model[0]._norm = lambda x: 3 * x
    replacement = cuops.nn.replace_rms_norm(model)
    assert [(path, reason) for path, _, reason in replacement.left] == [("0", "its _norm was patched")]
    monkeypatch.setattr(Gemma2RMSNorm, "_norm", lambda self, x: 3 * x)
    assert len(cuops.nn.replace_rms_norm(torch.nn.Sequential(Gemma2RMSNorm(8))).left) == 1


@pytest.mark.parametrize("wrap", [lambda norm: torch.compile(norm, backend="eager"), torch.compiler.disable])
def test_modules_that_a_compiled_one_calls_are_left_alone(wrap):
    model, x = torch.nn.Sequential(wrap(torch.nn.RMSNorm(8))), make((3, 8))
    want = model(x)
    replacement = cuops.nn.replace_rms_norm(model)
    assert [(path, reason) for path, _, reason in replacement.left] == [
        ("0._orig_mod", "it is compiled by itself, as it is now")
    ]
    assert torch.equal(model(x), want)
    with pytest.raises(ValueError, match="^model: expected a module with RMSNorm modules in it, got a RMSNorm itself"):
        cuops.nn.replace_rms_norm(model[0])


DTYPE = "its weight is lazy, a single number, or of a dtype that cuops.rms_norm does not take"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda module: module.compile(backend="eager"), "it is compiled by itself, as it is now"),
        (lambda module: setattr(module, "eps", -1e-6), "its eps is no finite number of at least 0: -1e-06"),
        (
            lambda module: setattr(module, "eps", torch.ones(())),
            "its eps is no finite number of at least 0: tensor(1.)",
        ),
        (lambda module: setattr(module, "eps", True), "its eps is no finite number of at least 0: True"),
        (lambda module: setattr(module, "weight", torch.nn.Parameter(torch.ones(8, dtype=torch.complex64))), DTYPE),
        (
            lambda module: module.register_parameter("bias", torch.nn.Parameter(torch.ones(8))),
            "it has other parameters than weight, or no weight at all",
        ),
    ],
    ids=["compiled", "negative eps", "a tensor as eps", "a truth as eps", "complex", "a bias that nothing adds"],
)
def test_modules_that_would_not_work_are_left_alone(change, reason):
    model = torch.nn.Sequential(torch.nn.RMSNorm(8), torch.nn.RMSNorm(8))
    change(model[1])
    replacement = cuops.nn.replace_rms_norm(model)
    assert [path for path, _ in replacement.replaced] == ["0"]
    assert [(path, found) for path, _, found in replacement.left] == [("1", reason)]


def test_undo_refuses_modules_that_have_become_others():
    model = torch.nn.Sequential(torch.nn.RMSNorm(8))
    replacement = cuops.nn.replace_rms_norm(model)
    torch.nn.utils.parametrize.register_parametrization(model[0], "weight", torch.nn.Identity())
    parametrized = model[0]
    with pytest.raises(RuntimeError, match="no longer those that replace_rms_norm put there: 0"):
        replacement.undo()
    assert model[0] is parametrized
    torch.nn.utils.parametrize.remove_parametrizations(model[0], "weight")
    replacement.undo()
    assert type(model[0]) is torch.nn.RMSNorm


def test_undo_refuses_modules_whose_parameters_have_moved():
    """As sharding by DeepSpeed does."""
    model = torch.nn.Sequential(torch.nn.RMSNorm(8))
    replacement = cuops.nn.replace_rms_norm(model)
    model[0]._parameters = {**model[0]._parameters}
    with pytest.raises(RuntimeError, match="no longer those that replace_rms_norm put there: 0"):
        replacement.undo()


def test_undo_refuses_modules_with_a_forward_of_their_own():
    model = torch.nn.Sequential(torch.nn.RMSNorm(8))
    replacement = cuops.nn.replace_rms_norm(model)
    model[0].forward = lambda x: x
    with pytest.raises(RuntimeError, match="no longer those that replace_rms_norm put there: 0"):
        replacement.undo()
    del model[0].forward
    replacement.undo()
    assert type(model[0]) is torch.nn.RMSNorm
