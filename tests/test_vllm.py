"""What vLLM's backend for transformers models asks of one, without vLLM: it was read (fusers/attention.py at 0848e67,
transformers/__init__.py at 055e47c, layers/attention/attention.py at 0014ca6), and not run.
"""

import ast
import inspect
import textwrap
from types import SimpleNamespace

import encoders
import pytest
import torch
from families import VARIANTS, build, tokens
from hf_growattn.model.attention import GrownAttention
from test_export import widened
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_growattn import patch_model
from hf_growattn.growable.models import attentions

TOLERANCE = 1e-5  # of the largest logit: fp32, whose sums run over other zeros


class Layer:
    """vLLM's layer of attention, for one text at once: it takes and gives joined heads of the width that it keeps."""

    def __init__(self, heads: int, head_size: int):
        self.heads, self.head_size, self.impl = heads, head_size, SimpleNamespace(scale=head_size**-0.5)

    def forward(self, query, key, value):
        query, key, value = (x.view(len(x), -1, self.head_size).transpose(0, 1) for x in (query, key, value))
        key, value = (x.repeat_interleave(self.heads // len(x), dim=0) for x in (key, value))
        options = dict(is_causal=True, scale=self.impl.scale)
        read = torch.nn.functional.scaled_dot_product_attention(query, key, value, **options)
        return read.transpose(0, 1).flatten(1)  # (tokens, heads * head_size)


def vllm_attention(module, query, key, value, attention_mask, scaling=None, attention_instances=None, **kwargs):
    """How it calls its layer: heads joined, of all tokens."""
    layer = attention_instances[module.layer_idx]
    layer.impl.scale = scaling
    joined = (x.transpose(1, 2).reshape(x.shape[2], -1) for x in (query, key, value))
    return layer.forward(*joined), None


@pytest.fixture
def vllm(monkeypatch):
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "vllm", vllm_attention)

    @torch.no_grad()
    def logits(model, head_size: int) -> torch.Tensor:
        layers = {a.layer_idx: Layer(a.heads_of("query"), head_size) for a in attentions(model)}
        model.config._attn_implementation = "vllm"
        found = model(tokens(1), use_cache=False, attention_instances=layers).logits
        model.config._attn_implementation = "eager"
        return found

    return logits


@pytest.mark.parametrize("name", ["llama-2", "gpt2-2", "opt", "olmo2", "gpt-neox"])
def test_layers_that_vllm_keeps_wide_enough_are_served(name, vllm):
    """Zeros fill what a layer does not need; a narrower one would read wider heads as more tokens, and is refused."""
    model = patch_model(build(name))
    width = attentions(model)[0].head_dim

    def agrees(head_size: int) -> bool:
        expected = model(tokens(1)).logits
        return (vllm(model, head_size) - expected).abs().max() < TOLERANCE * expected.abs().max()

    assert agrees(width) and agrees(width + 8)
    widened(model)
    widths = {(a.width_of("query"), a.width_of("value")) for a in attentions(model)}
    widest = max(max(pair) for pair in widths)
    assert len(widths) > 1 and agrees(widest) and agrees(widest + 3)
    for head_size in (width, widest - 1):
        with pytest.raises(ValueError, match=rf"vLLM keeps keys and values {head_size} wide, .*export_model"):
            vllm(model, head_size)


def scale_read(layer: torch.nn.Module):
    """The softmax scale as vLLM reads it off the source: of one call of what ALL_ATTENTION_FUNCTIONS gave."""
    nodes = [*ast.walk(ast.parse(textwrap.dedent(inspect.getsource(type(layer).forward))))]
    names = {
        target.id
        for node in nodes
        if isinstance(node, ast.Assign) and "ALL_ATTENTION_FUNCTIONS" in ast.unparse(node.value)
        for target in node.targets
    }
    (call,) = [node for node in nodes if isinstance(node, ast.Call) and getattr(node.func, "id", None) in names]
    (scaling,) = [keyword.value for keyword in call.keywords if keyword.arg == "scaling"]
    assert isinstance(scaling, ast.Attribute) and ast.unparse(scaling.value) == "self"
    return getattr(layer, scaling.attr)


def test_vllm_finds_the_attention_of_every_family():
    models = {name: build(name) for name in VARIANTS} | {name: encoders.build(name) for name in encoders.ENCODERS}
    for name, model in models.items():
        compatible = type(model).is_backend_compatible()
        model = patch_model(model)
        assert type(model).is_backend_compatible() == compatible, name
        for layer in attentions(model):
            scale = scale_read(layer)
            assert isinstance(layer, GrownAttention) and isinstance(layer.layer_idx, int)
            assert type(scale) is float and scale == layer.kernel_scaling, name
