"""Growth under tensor parallelism, which gives each process some heads of every layer.

Run by torchrun.py. The first run leaves what one on another number of ranks must give, too.
"""

from pathlib import Path

import accelerate
import torch
import torch.distributed as dist
from accelerate import ParallelismConfig
from families import lm_batches
from packaging.version import Version
from peft import LoraConfig, get_peft_model
from torchrun import keep_first, report
from training import Rows
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments
from transformers.distributed import DistributedConfig

from hf_growattn import GrowAttnConfig, Grower, GrowthCallback, GrowthConfig, export_model, patch_model, trim_model

FIXED = GrowthConfig(qk_dims=2, v_dims=2, oversampling=4)
BUDGET = GrowthConfig(budget=0.1, oversampling=4)
SIZES = dict(vocab_size=104, hidden_size=48, intermediate_size=64, num_hidden_layers=2, head_dim=8)
SIZES |= dict(num_attention_heads=8, num_key_value_heads=4, initializer_range=0.3, eos_token_id=None, pad_token_id=0)
CASES = (
    ("llama", FIXED, torch.float64, 1e-7),  # the loss itself is fp32
    ("qwen3", BUDGET, torch.float64, 1e-7),
    # Without any growth losses differ by 3e-7 after as many steps; singular vectors feel rounding more.
    ("llama", FIXED, torch.float32, 2e-5),
)


def loaded(folder: Path, family: str, dtype=torch.float64, **fields):
    """A patched model, the same for any number of processes, spread over them."""
    size = dist.get_world_size()
    place = folder / "-".join([family, *map(str, fields.values())])
    if dist.get_rank() == 0 and not place.exists():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZES | fields)).save_pretrained(place)
    dist.barrier()
    spread = {"distributed_config": DistributedConfig(tp_size=size)} if size > 1 else {}
    return patch_model(AutoModelForCausalLM.from_pretrained(place, dtype=dtype, **spread)).train()


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "placements") else tensor


def honour_tensor_parallelism_on_cpus() -> None:
    """accelerate takes it on accelerators only; all that it then does runs on CPUs, too."""
    ParallelismConfig._validate_accelerator = lambda *_: None


def train(model, optimizer, steps: int, seed: int) -> list[float]:
    losses = []
    for batch in lm_batches(steps, seed):
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def equal_on_any_number(folder: Path) -> None:
    """Losses before, at and after a growth, widths and weights."""
    for family, config, dtype, tolerance in CASES:
        model = loaded(folder, family, dtype)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        losses = train(model, optimizer, 3, seed=31)
        report = Grower(model, config, optimizer).grow(lm_batches(6, 11))
        assert report.applied
        losses += [report.loss_before, report.loss_after, *train(model, optimizer, 10, seed=50)]
        weight = model.model.layers[0].self_attn.q_proj.weight
        state = whole(optimizer.state[weight]["exp_avg_sq"])
        found = {"losses": losses, "widths": [layer.width for layer in report.layers], "state": state}
        found["weight"] = whole(weight.detach()).clone()
        wanted = keep_first(found, folder / f"{family}-{dtype}.pt")
        assert found["widths"] == wanted["widths"], (found["widths"], wanted["widths"])
        worst = max(abs(a - b) / a for a, b in zip(wanted["losses"], losses))
        assert worst < tolerance, (family, dtype, worst)
        for key in ("weight", "state"):
            apart = (found[key] - wanted[key]).abs().max() / wanted[key].abs().max()
            assert dtype == torch.float32 or apart < 1e-9, (family, key, apart)


def with_the_trainer(folder: Path) -> None:
    """A Trainer with GrowthCallback, and what it saves: loaded whole and spread."""
    if Version(accelerate.__version__) < Version("1.12"):  # there it wraps the model in DistributedDataParallel
        return
    model = loaded(folder, "llama")
    arguments = TrainingArguments(
        output_dir=str(folder / "trainer"),
        max_steps=6,
        per_device_train_batch_size=4,
        learning_rate=3e-3,
        logging_steps=1,
        save_steps=6,
        save_only_model=True,  # transformers cannot save the optimizer of a model that was spread when it was loaded
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
    )
    growth = GrowthCallback(FIXED, steps=(3,), batches=6)
    trainer = Trainer(model, arguments, train_dataset=Rows(60), callbacks=[growth])
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    wanted = keep_first(losses, folder / "trainer.pt")
    assert max(abs(a - b) for a, b in zip(losses, wanted)) < 1e-6, (losses, wanted)
    place = folder / "trainer" / "checkpoint-6"
    dist.barrier()
    spread = {"distributed_config": DistributedConfig(tp_size=dist.get_world_size())}
    batch = lm_batches(1, 5)[0]
    with torch.no_grad():
        expected = model.eval()(**batch).logits
        for how in ({}, spread if dist.get_world_size() > 1 else {}):
            again = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float64, **how).eval()
            assert again.model.layers[0].self_attn.q_proj.weight.shape == (8 * 10, 48)
            torch.testing.assert_close(again(**batch).logits, expected, rtol=0, atol=1e-10)


def refused(match: str, call) -> None:
    try:
        call()
    except ValueError as error:
        assert match in str(error), error
    else:
        raise AssertionError(f"not refused: {match}")


def what_is_refused(folder: Path) -> None:
    if dist.get_world_size() == 1:
        return
    model = loaded(folder, "llama")
    grower, batches = Grower(model, FIXED), lm_batches(4, 11)
    refused("different ones", lambda: grower.grow(batches[dist.get_rank() :]))
    refused("sharded: grow without it", lambda: Grower(model, GrowthConfig(v_dims=2, method="refactor")).grow(batches))
    refused("needs every weight", lambda: trim_model(model, batches))
    refused("needs every weight", lambda: export_model(model, folder / "stock"))
    refused("hf upload", lambda: model.push_to_hub("me/grown"))
    refused("tensor parallelism", lambda: get_peft_model(model, GrowAttnConfig(qk_dims=2)))
    refused("frozen and sharded", lambda: Grower(loaded(folder, "llama").requires_grad_(False), FIXED).grow(batches))
    adapted = get_peft_model(loaded(folder, "llama"), LoraConfig(r=2, target_modules=["q_proj"]))
    refused("carries adapters", lambda: Grower(adapted, FIXED))
    odd = loaded(folder, "llama", num_key_value_heads=1)
    refused("cannot share evenly", lambda: Grower(odd, FIXED))


def main(folder: Path) -> None:
    honour_tensor_parallelism_on_cpus()
    for check in (equal_on_any_number, with_the_trainer, what_is_refused):
        check(folder)
        report(check.__name__)
