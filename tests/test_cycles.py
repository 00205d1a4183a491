"""Growing again and again: what is grown, saved and loaded computes the same, and nothing of the old stays behind.

CI runs a few cycles and growths; GROWATTN_LONG=1 runs 1,000 and 20.
"""

import ctypes
import gc
import random
import resource
from pathlib import Path

import pytest
import torch
from compared import ComparedGrower
from conftest import LONG
from transformers import AutoConfig, AutoModelForCausalLM

from hf_growattn import Grower, GrowthConfig, attention_views, patch_model
from hf_growattn.growable.attention import attentions
from hf_growattn.measure.passes import Objective, evaluation_mode, mean_loss

CYCLES = 1000 if LONG else 24
GROWTHS = 20 if LONG else 5
FAMILIES = ("llama", "gpt2", "qwen3", "gpt_neox", "phi3", "granite", "opt")
WORDS = 31


def tiny(family: str, heads: int = 4, width: int = 4, dtype=torch.float32, tied: bool = False):
    """A model of one layer and a few thousand weights, patched."""
    sizes = dict(hidden_size=heads * width, intermediate_size=16, num_attention_heads=heads, vocab_size=WORDS)
    sizes |= dict(num_hidden_layers=1, max_position_embeddings=32, initializer_range=0.3, tie_word_embeddings=tied)
    special = dict(bos_token_id=1, eos_token_id=None, pad_token_id=0)
    if family in ("llama", "qwen3", "phi3", "granite"):
        sizes["num_key_value_heads"] = heads // 2
    sizes |= {"qwen3": dict(head_dim=width), "opt": dict(ffn_dim=16, word_embed_proj_dim=heads * width)}.get(family, {})
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes, **special), dtype=dtype)
    return patch_model(model).eval()


def batches(count: int, length: int = 8) -> list[dict]:
    """Sequences in which each token has one successor."""
    found = []
    for seed in range(count):
        ids = torch.randint(2, WORDS, (3, length), generator=torch.Generator().manual_seed(seed))
        for position in range(1, length):
            ids[:, position] = 2 + 5 * ids[:, position - 1] % (WORDS - 2)
        found.append({"input_ids": ids, "labels": ids})
    return found


def computed(model) -> torch.Tensor:
    with torch.no_grad():
        return model(batches(1)[0]["input_ids"], use_cache=False).logits


def any_growth(draw: random.Random, room: int) -> tuple[type[Grower], GrowthConfig]:
    """Some growth by fixed widths or a budget; or new dims without effect, which keep the function."""
    dims = {name: draw.randint(0, min(2, room)) for name in ("qk_dims", "v_dims")}
    if not any(dims.values()):
        dims["qk_dims"] = 1
    options = dict(oversampling=2, seed=draw.randrange(99))
    if draw.random() < 0.5:
        return ComparedGrower, GrowthConfig(**dims, **options)
    if draw.random() < 0.3:
        return Grower, GrowthConfig(budget=draw.choice([200, 0.1]), **options)
    return Grower, GrowthConfig(**dims, **options)


def test_grow_save_load_and_grow_again(tmp_path, record_property):
    """Chains of growths of each family, until its heads are full; what is computed is what it should be, each time."""
    draw, model, kept, chains = random.Random(0), None, 0, 0
    given = batches(2)
    for cycle in range(CYCLES):
        room = min(16 - max(a.width_of("query"), a.width_of("value")) for a in attentions(model)) if model else 0
        if room < 1 or draw.random() < 0.05:
            torch.manual_seed(cycle)
            precision = draw.choice([torch.float32, torch.float32, torch.float64, torch.bfloat16])
            model = tiny(FAMILIES[chains % len(FAMILIES)], dtype=precision, tied=draw.random() < 0.5)
            chains, room = chains + 1, 12
        (grower, config), before = any_growth(draw, room), computed(model)
        tolerance = 64 * torch.finfo(model.dtype).eps * before.abs().max().item()  # sums of other lengths
        report = grower(model, config).find(given).keep()
        kept += report.kept
        after = computed(model)
        if grower is ComparedGrower or not report.kept:
            torch.testing.assert_close(after, before, rtol=0, atol=tolerance if report.kept else 0)
        else:
            with evaluation_mode(model):
                assert mean_loss(Objective(model), given) < report.loss_before or not report.holds
        model.save_pretrained(tmp_path / "m")
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "m").eval()
        assert torch.equal(computed(again), after) and again.dtype == model.dtype, (cycle, config)
        widths = [[(a.width_of("query"), a.width_of("value")) for a in attentions(each)] for each in (model, again)]
        assert widths[0] == widths[1]
        model = again
    assert kept > CYCLES / 2
    record_property("cases", f"{CYCLES} cycles of grow, save and load in {chains} chains, {kept} growths kept")


def tensors() -> tuple[int, int]:
    """How many tensors are alive, and the bytes of memory that they hold."""
    gc.collect()
    alive = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor) and not each.is_meta]
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in alive}
    return len(alive), sum(storages.values())


def resident() -> int:
    """Bytes of the process in memory, once the allocator has given back what it holds in reserve."""
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def look(model, optimizer) -> tuple[int, int, int, int]:
    """Tensors alive beside those that training needs, their bytes, those of the weights, and all that is resident.

    Training needs a weight, its gradient, two moments of its size and the number of the step.
    """
    live = dict(model.named_parameters())
    assert [id(p) for group in optimizer.param_groups for p in group["params"]] == [id(p) for p in live.values()]
    assert optimizer.state.keys() == set(live.values())
    for parameter in live.values():
        assert parameter.grad.shape == optimizer.state[parameter]["exp_avg"].shape == parameter.shape
    view, attention = attention_views(model)[0], attentions(model)[0]
    assert view.pattern(0, 1).left.shape[1] == view.pattern(0, 1).right.shape[1] == attention.width_of("query")
    assert view.message(0).left.shape[1] == attention.width_of("value")
    del view
    count, size = tensors()
    own = sum(p.numel() * p.element_size() for p in live.values())
    return count - 5 * len(live), size - 4 * own - 4 * len(live), own, resident()


@pytest.fixture
def few_objects():
    """Leave what was there before out of what the garbage collector looks through."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def test_many_growths_leave_nothing_behind(few_objects, record_property):
    """No tensor more than the model, its gradients and Adam's state hold; and hooks, groups and views go along."""
    torch.manual_seed(0)
    model = tiny("llama", heads=8, width=8 if LONG else 4).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    config, given, seen = GrowthConfig(qk_dims=1, v_dims=1, oversampling=4), batches(4), []
    grower, called = Grower(model, config, optimizer), []
    names = {name for name, _ in model.named_parameters()}
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda gradient, name=name: called.append(name))
        parameter.register_post_accumulate_grad_hook(lambda parameter, name=name: called.append(name))

    def train():
        called.clear()
        model(**given[0]).loss.backward()
        assert sorted(called) == sorted([*names, *names])
        optimizer.step()

    train()
    for _ in range(GROWTHS):
        assert grower.grow(given).kept
        train()
        seen.append(look(model, optimizer))
    warm = 2
    counts, tensors, _, residents = zip(*seen[warm:])
    assert max(counts) == min(counts) and max(tensors) == min(tensors), "tensors are left behind"
    # All that the process holds, compilers and caches of libraries included.
    growth_of_weights = 4 * (seen[-1][2] - seen[warm][2])
    assert residents[-1] - growth_of_weights < 1.02 * residents[0]
    more = (residents[-1] - growth_of_weights) / residents[0] - 1
    record_property("cases", f"{GROWTHS} growths: 0 tensors left behind, resident memory {more:+.2%}")
