"""Sharded training: growth refuses it, and scripts/grow_sharded.py grows in between."""

import math
import os
import random
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from accelerate.utils import DistributedType
from conftest import ROOT
from families import build
from tokenizers import ByteLevelBPETokenizer
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hf_growattn import Grower, GrowthConfig, patch_model
from hf_growattn.grow.checks import refuse_sharded
from hf_growattn.growable.models import attentions

STEPS, GROW_AT, ROWS, TOKENS, RATE, SEED = 20, 12, 4, 32, 3e-3, 5


def write_text(path):
    """Lines that say a few words twice, so that attention has something to find."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghij", k=4)) for _ in range(40)]
    lines = [draw.choices(words, k=4) for _ in range(1000)]
    path.write_text("\n".join(" ".join(line + line) for line in lines))


def write_model(path, text):
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator([text.read_text()], vocab_size=300, special_tokens=["<end>"], show_progress=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, eos_token="<end>", bos_token="<end>")
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, head_dim=4)
    config = LlamaConfig(
        **sizes,
        num_key_value_heads=2,
        vocab_size=len(tokenizer),
        max_position_embeddings=64,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """One training of two gloo processes, and what tests/sharded_run.py noted on the way."""
    folder = tmp_path_factory.mktemp("sharded")
    text, model, output, notes = folder / "text.txt", folder / "tiny", folder / "out", folder / "notes.pt"
    write_text(text)
    write_model(model, text)
    options = {
        **{"--model": model, "--dataset": text, "--output": output, "--steps": STEPS, "--grow-at": GROW_AT},
        **{"--batch-size": ROWS, "--block-size": TOKENS, "--learning-rate": RATE, "--seed": SEED},
        **{"--growth-batches": 6, "--budget": 0.1},
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command += [ROOT / "tests" / "sharded_run.py", notes, *(str(part) for pair in options.items() for part in pair)]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "scripts"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    return SimpleNamespace(
        text=text, model=model, output=output, stdout=done.stdout, **torch.load(notes, weights_only=True)
    )


def test_the_loss_falls_before_and_after_the_growth(run):
    assert len(run.losses) == STEPS and all(map(math.isfinite, run.losses))
    assert run.losses[GROW_AT - 1] < run.losses[0] and run.losses[-1] < run.losses[GROW_AT - 1]
    assert f"Step {STEPS - 1}: loss {run.losses[-1]:.4f}" in run.stdout
    for name in ("grown", "trained"):
        model = AutoModelForCausalLM.from_pretrained(run.output / name)
        assert any(a.qk_head_dim > 4 or a.v_head_dim > 4 for a in attentions(model))
    assert sorted(path.name for path in run.output.iterdir()) == ["grown", "trained"]


def test_two_processes_train_as_one_does(run):
    """Within 1e-5 of a loss near 6, of which rounding takes 1e-6; gradients summed, not averaged, differ by 4e-3."""
    from texts import blocks_of, load_texts
    from transformers import AutoTokenizer, get_cosine_schedule_with_warmup

    blocks = blocks_of(load_texts(str(run.text)), AutoTokenizer.from_pretrained(run.model), TOKENS)
    torch.manual_seed(SEED)
    order = torch.randint(len(blocks), (STEPS, 2, ROWS)).flatten(1)
    model = AutoModelForCausalLM.from_pretrained(run.model).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.01)
    scheduler = get_cosine_schedule_with_warmup(optimizer, STEPS // 20, STEPS)
    for step in range(GROW_AT):
        loss = model(input_ids=blocks[order[step]], labels=blocks[order[step]]).loss
        assert loss.item() == pytest.approx(run.losses[step], abs=1e-5)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    assert run.rate_when_gathered == scheduler.get_last_lr()


def test_the_sharded_grown_model_computes_what_the_whole_one_did(run):
    """Within 1e-5 of a loss near 5: the same fp32 operations on the same weights."""
    whole = run.whole["grown"]["loss"]
    assert run.reloaded_loss == pytest.approx(whole, abs=1e-5)
    probe = torch.arange(64).view(2, 32)
    with torch.no_grad():
        reloaded = AutoModelForCausalLM.from_pretrained(run.output / "grown")(input_ids=probe, labels=probe)
    assert reloaded.loss.item() == pytest.approx(whole, abs=1e-5)


def test_what_growth_does_not_touch_goes_through_it_to_the_bit(run):
    grown, before = AutoModelForCausalLM.from_pretrained(run.output / "grown").state_dict(), run.gathered
    state, untouched = run.whole["grown"]["state"], 0
    for name, weight in before["weights"].items():
        if grown[name].shape == weight.shape and name in state:
            assert torch.equal(grown[name], weight), name
            for key, value in before["optimizer"]["state"][name].items():
                assert torch.equal(state[name][key], value), (name, key)
            untouched += 1
    assert untouched >= 12
    assert any(state[name]["exp_avg"].shape != before["weights"][name].shape for name in state)


def test_optimizer_state_and_schedule_go_on_where_they_were(run):
    reloaded, whole = run.reloaded, run.whole["grown"]["state"]
    assert reloaded["optimizer"]["state"].keys() == whole.keys()
    for name, state in whole.items():
        assert state["step"] == GROW_AT and state["exp_avg"].any()
        for key, value in state.items():
            assert torch.equal(reloaded["optimizer"]["state"][name][key], value), (name, key)
    groups = run.gathered["optimizer"]["param_groups"], reloaded["optimizer"]["param_groups"]
    before, after = ({**g, "params": set(g["params"]), "betas": list(g["betas"])} for (g,) in groups)
    assert before == after
    assert reloaded["rate"] == run.rate_when_gathered and 0 < reloaded["rate"][0] < RATE


def test_a_sharded_run_cannot_grow(run):
    """Right after sharding, and after a forward pass that leaves parameters gathered; stock and grown."""
    assert len(run.refusals) == 4
    for message in run.refusals:
        assert "sharded by FSDP2" in message and "scripts/grow_sharded.py" in message


def test_the_sharded_model_is_gone_when_the_whole_one_is_built(run):
    assert run.alive_at_growth == 0


def test_a_save_is_whole_or_not_at_all(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    import grow_sharded

    model, tokenizer = build("llama-2"), SimpleNamespace(save_pretrained=lambda folder: None)
    optimizer = torch.optim.AdamW(model.parameters())

    def fail(*_):
        raise OSError("the disk is full")

    with monkeypatch.context() as patched, pytest.raises(OSError, match="full"):
        patched.setattr(torch, "save", fail)
        grow_sharded.save(model, optimizer, tokenizer, tmp_path / "grown")
    assert not (tmp_path / "grown").exists()
    grow_sharded.save(model, optimizer, tokenizer, tmp_path / "grown")
    assert [path.name for path in tmp_path.iterdir()] == ["grown"]
    assert {"model.safetensors", "optimizer.pt"} < {path.name for path in (tmp_path / "grown").iterdir()}


@pytest.fixture
def mesh(tmp_path):
    """A process group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def refused(match, model, optimizer=None, accelerator=None):
    with pytest.raises(ValueError, match=rf"{match}.*scripts/grow_sharded.py"):
        Grower(model, GrowthConfig(qk_dims=2), optimizer, accelerator)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore:FSDP is switching to use:UserWarning")
def test_torch_shardings_are_refused(mesh):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    cpu = torch.device("cpu")
    refused("the model is sharded by FSDP2", fully_shard(patch_model(build("llama-2")), mesh=mesh))
    wrapped = FullyShardedDataParallel(patch_model(build("llama-2")), device_id=cpu)
    refused("the model is wrapped by FSDP1", wrapped)
    refused("_flat_param is flattened by FSDP1", wrapped.module)
    wrapped = FullyShardedDataParallel(patch_model(build("llama-2")), device_id=cpu, use_orig_params=True)
    refused("embed_tokens.weight is flattened by FSDP1", wrapped.module)
    inner = patch_model(build("llama-2"))
    inner.model.layers[1] = FullyShardedDataParallel(inner.model.layers[1], device_id=cpu)
    refused("model.layers.1 is wrapped by FSDP1", inner)
    parallel = patch_model(build("llama-2"))
    parallelize_module(parallel.model.layers[0].self_attn.q_proj, mesh, ColwiseParallel())
    refused("layers.0.self_attn.q_proj.weight is a DTensor", parallel)
    plain = patch_model(build("llama-2"))
    zero = ZeroRedundancyOptimizer(plain.parameters(), optimizer_class=torch.optim.AdamW)
    refused("ZeroRedundancyOptimizer", plain, zero)
    refused("ZeroRedundancyOptimizer", plain, SimpleNamespace(optimizer=zero))
    refuse_sharded(torch.nn.parallel.DistributedDataParallel(plain), [torch.optim.AdamW(plain.parameters()), None])


def test_deepspeed_is_refused(monkeypatch):
    """DeepSpeed itself is not installed here: its mark on parameters and classes of its name stand in for it."""
    model = patch_model(build("llama-2"))
    model.lm_head.weight.ds_id = 0
    refused("lm_head.weight is partitioned by DeepSpeed ZeRO-3", model)

    package = ModuleType("deepspeed.runtime.zero.stage_1_and_2")
    package.DeepSpeedZeroOptimizer = type("DeepSpeedZeroOptimizer", (), {"__module__": package.__name__})
    package.DeepSpeedEngine = type("DeepSpeedEngine", (torch.nn.Sequential,), {"__module__": package.__name__})
    monkeypatch.setitem(sys.modules, package.__name__, package)
    model = patch_model(build("llama-2"))
    refused("the optimizer, DeepSpeedZeroOptimizer, is DeepSpeed's", model, package.DeepSpeedZeroOptimizer())
    refused("the model is DeepSpeed's", package.DeepSpeedEngine(model))


@pytest.mark.parametrize("kind", ["FSDP", "DEEPSPEED", "MEGATRON_LM"])
def test_an_accelerator_that_shards_is_refused(kind):
    accelerator = SimpleNamespace(distributed_type=DistributedType(kind), num_processes=2)
    refused(f"accelerator.distributed_type is {kind}", patch_model(build("llama-2")), accelerator=accelerator)
