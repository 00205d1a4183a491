"""A tour of hf_growattn, from `patch_model` to the Hub: about a minute on one core, and nothing is downloaded.

    pip install ".[peft,trl]"
    python scripts/tour.py

Or cell by cell: as `scripts/tour.ipynb`, which `python scripts/notebook.py` makes of this file, in Jupyter or Colab; or
here, in an editor that knows `# %%` (VS Code, PyCharm, Spyder).
"""

# %% [markdown]
# # A tour of hf_growattn
#
# A small Llama learns English, finds its attention too narrow, and grows in the middle of its training. At the end it
# is a checkpoint that plain transformers loads, and a folder that is ready for the Hub.

# %%
import copy
import itertools
import os
import subprocess
import sys
import warnings
from pathlib import Path
from urllib.parse import urlsplit

import torch
from accelerate import Accelerator
from matplotlib import pyplot
from peft import LoraConfig, PeftModel, get_peft_model
from texts import blocks_of, english, train_tokenizer
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaConfig, PrinterCallback, Trainer, TrainingArguments
from transformers import logging as transformers_logging

from hf_growattn import (
    GrowAttnConfig,
    Grower,
    GrowthCallback,
    GrowthConfig,
    attention_views,
    export_model,
    initialize_growattn_weights,
    patch_model,
    save_report,
    write_card,
)

transformers_logging.disable_progress_bar()
transformers_logging.set_verbosity_error()
warnings.simplefilter("ignore", FutureWarning)  # peft uses deprecated names of transformers
torch.manual_seed(0)
output = Path("scripts/output/tour")
output.mkdir(parents=True, exist_ok=True)

# %% [markdown]
# ## A model that is too narrow
#
# The text is the English that every CPython carries, its own documentation. The model has two layers of eight heads,
# and each head is only 4 wide: that is how many directions it can compare tokens in.

# %%
texts = english()
tokenizer = train_tokenizer(texts, 512)
blocks = blocks_of(texts, tokenizer, 64)
blocks = blocks[torch.randperm(len(blocks))]
unseen = blocks[:128]  # to measure on, and never to train on
held_out, rows = ([{"input_ids": ids, "labels": ids} for ids in part] for part in (unseen, blocks[128:]))
config = LlamaConfig(
    vocab_size=len(tokenizer),
    hidden_size=64,
    intermediate_size=192,
    num_hidden_layers=2,
    num_attention_heads=8,
    head_dim=4,
    max_position_embeddings=64,
    tie_word_embeddings=True,
    bos_token_id=tokenizer.bos_token_id,
    eos_token_id=tokenizer.eos_token_id,
)
model = AutoModelForCausalLM.from_config(config)
print(f"{len(rows):,} rows of 64 tokens, and a Llama of {model.num_parameters():,} parameters with heads 4 wide.")

# %% [markdown]
# ## Train it, as ever
#
# A loop of your own, with accelerate or without, needs nothing special before it grows. The loss is in nats a token;
# the held-out loss is that of rows which no step sees.

# %%
accelerator = Accelerator(cpu=True)
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=5e-3))
batches = iter(DataLoader(rows, batch_size=16, shuffle=True))
losses = []  # by step, for the report


def train(steps: int) -> None:
    """Take a number of optimizer steps on the next batches, and note the losses."""
    model.train()
    for batch in itertools.islice(batches, steps):
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append({"step": len(losses) + 1, "loss": loss.item()})


@torch.no_grad()
def held_out_loss(of) -> float:
    """Mean loss of a model on the held-out rows, in nats a token."""
    return of.eval()(input_ids=unseen, labels=unseen).loss.item()


train(120)
model.save_pretrained(output / "base")
print(f"After {len(losses)} steps: training loss {losses[-1]['loss']:.3f}, held-out loss {held_out_loss(model):.3f}.")

# %% [markdown]
# ## Patch it
#
# `patch_model` swaps the classes of this one model for growable ones. Weights, optimizer and outputs stay what they
# were, to the bit.

# %%
sample = unseen[:2]
with torch.no_grad():
    before = model(sample).logits
    patch_model(model)
    same = torch.equal(model(sample).logits, before)
print(f"{type(model).__name__} computes the same as before, to the bit: {same}.")

# %% [markdown]
# ## Look inside
#
# A head's pattern says what it looks for, its message what it passes on. Their effective ranks say how many of the
# 4 directions are in use: where it is nearly all of them, the head is full.

# %%
for view in attention_views(model):
    ranks = {
        "qk": [view.pattern(head).effective_rank.item() for head in range(view.heads)],
        "v": [view.message(head).effective_rank.item() for head in range(view.heads)],
    }
    used = ", ".join(f"{kind} {sum(found) / len(found):.1f}" for kind, found in ranks.items())
    print(f"Layer {view.layer}, effective ranks of {view.heads} heads 4 wide, on average: {used}.")

# %% [markdown]
# ## Measure before you spend
#
# Some batches show where width is missing. Starvation, the gradient out of reach, is the share of it that training the
# present weights cannot realize; for queries and keys that rotate it is not known. New dims are tried on batches kept
# out of their computation, then removed again.

# %%
growth_batches = list(itertools.islice(batches, 24))
measured = Grower(model, GrowthConfig(qk_dims=4, v_dims=4)).measure(growth_batches)
for layer in measured.layers:
    if layer.out_of_reach is not None:
        print(f"Layer {layer.layer}, {layer.kind}: gradient out of reach {layer.out_of_reach:.2f}.")
print(f"With 4 new dims everywhere the loss falls by {measured.fall:.4f} ± {measured.error:.4f} on those batches.")

# %% [markdown]
# ## Grow
#
# At most 5 % more weights go where each is worth most. `Grower` finds new dims, searches their scale on forward passes,
# and keeps them only if the loss falls by more than its error, on batches that they were not computed from. They join a
# group of the optimizer, and all old weights stay as they were.

# %%
before = held_out_loss(model)
grower = Grower(model, GrowthConfig(budget=0.05), optimizer=optimizer)
report = grower.grow(growth_batches)
print(f"On held-out rows, before any further training: {before:.4f} -> {held_out_loss(model):.4f}.")
print(report)

# %% [markdown]
# ## Train on
#
# The same loop and the same optimizer: growth happens between two steps. The report becomes a page that opens offline,
# and a picture; in a notebook, `report` and `report.plot()` show themselves.

# %%
train(50)
print(f"After {len(losses)} steps: held-out loss {held_out_loss(model):.3f}.")
report.plot().savefig(output / "growth.png")
save_report([report], output / "growth.html", losses)
print(f"What grew and why: {output / 'growth.html'} and {output / 'growth.png'}.")

# %% [markdown]
# ## What is new in a head
#
# The singular values of a pattern say how strongly it uses each of its directions. The picture has one head of the
# layer that gained most queries and keys, with the bars of the present model beside those of the model before its
# growth. See the bars on the right, which only the present one has: they are what the new dims add.

# %%
grown_most = max((layer for layer in report.layers if layer.kind == "qk"), key=lambda layer: layer.width[1]).layer
narrow = AutoModelForCausalLM.from_pretrained(output / "base").eval()  # as it was before any growth
figure, axes = pyplot.subplots(figsize=(5, 3), layout="constrained")
for name, shown, place in (("before", narrow, -0.2), ("now", model, 0.2)):
    values = attention_views(shown)[grown_most].pattern(0).singular_values
    axes.bar([number + place for number in range(1, len(values) + 1)], values, width=0.4, label=name)
    print(f"Layer {grown_most}, head 0, {name}: {', '.join(f'{value:.2f}' for value in values)}.")
axes.set(xlabel="direction", ylabel="singular value", title=f"Pattern of layer {grown_most}, head 0")
axes.legend()
figure.savefig(output / "directions.png")

# %% [markdown]
# ## Several growths, inside Trainer
#
# `GrowthCallback` grows at chosen steps, on the last batches of the training, and logs what grew where Trainer logs.
# Here it may grow twice, by 3 % of the weights each time. What does not hold is not kept, and its report says so.

# %%
arguments = TrainingArguments(
    output_dir=str(output / "trainer"),
    max_steps=45,
    per_device_train_batch_size=16,
    learning_rate=2e-3,
    logging_steps=5,
    eval_strategy="steps",
    eval_steps=15,
    save_strategy="no",
    report_to="none",
    disable_tqdm=True,
    use_cpu=True,
)
trainer = Trainer(model, arguments, train_dataset=rows, eval_dataset=held_out)
growth = GrowthCallback(trainer, GrowthConfig(budget=0.03), steps=[15, 30], batches=15)
trainer.add_callback(growth)
trainer.remove_callback(PrinterCallback)  # the reports are enough to read
trainer.train()
save_report(growth.reports, output / "report.html", trainer.state.log_history)
kept = sum(report.kept for report in growth.reports)
print(f"{len(growth.reports)} more growths, {kept} of them kept: {output / 'report.html'}.")
print(f"After them, held-out loss {held_out_loss(model):.3f}.")

# %% [markdown]
# ## Save, export, and load without this library
#
# A grown checkpoint is safetensors with the new dims in its config, and carries the code that it needs. An exported one
# is a stock Llama with wider heads. Both are now loaded in a fresh process that never imports `hf_growattn`.

# %%
FRESH = """
import sys, torch, transformers
folder, tokens = sys.argv[1], torch.load(sys.argv[2])
transformers.logging.disable_progress_bar()
transformers.logging.set_verbosity_error()
for name, options in (("grown", {"trust_remote_code": True}), ("exported", {})):
    model = transformers.AutoModelForCausalLM.from_pretrained(f"{folder}/{name}", **options).eval()
    with torch.no_grad():
        print(f"{name}: {type(model).__name__}, loss {model(input_ids=tokens, labels=tokens).loss:.6f}")
tokenizer = transformers.AutoTokenizer.from_pretrained(f"{folder}/exported")
prompt = tokenizer("The value of the", return_tensors="pt", return_token_type_ids=False)
text = model.generate(**prompt, min_new_tokens=24, max_new_tokens=24, do_sample=False)
print("It says:", " ".join(tokenizer.decode(text[0]).split()))
assert "hf_growattn" not in sys.modules
"""
model.save_pretrained(output / "grown")
tokenizer.save_pretrained(output / "grown")
exported = export_model(model, output / "exported", tokenizer=tokenizer)
print(f"Exported as {exported.model_type}, heads {exported.head_dim} wide, logits within {exported.difference:.0e}.")
torch.save(sample, output / "sample.pt")
with torch.no_grad():
    print(f"here: {type(model).__name__}, loss {model.eval()(input_ids=sample, labels=sample).loss:.6f}")
fresh = [sys.executable, "-c", FRESH, output, output / "sample.pt"]
print(subprocess.run(fresh, check=True, stdout=subprocess.PIPE, text=True).stdout.strip())

# %% [markdown]
# ## Growth as an adapter
#
# With peft the base stays frozen, and only the new dims are trained and saved: a file of kilobytes. The guided start
# puts them where growth would; they can be switched off, loaded elsewhere, or merged into a wider model.

# %%
adapted = get_peft_model(copy.deepcopy(narrow), GrowAttnConfig(qk_dims=2, v_dims=2))
start = held_out_loss(adapted)
initialize_growattn_weights(adapted, growth_batches)
guided = held_out_loss(adapted)
new_dims = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=5e-3)
adapted.train()
for batch in growth_batches:
    adapted(**batch).loss.backward()
    new_dims.step()
    new_dims.zero_grad()
trained = held_out_loss(adapted)
print(f"Held-out loss with a frozen base: {start:.4f}, from the guided start {guided:.4f}, trained {trained:.4f}.")

adapted.save_pretrained(output / "adapter")
size = (output / "adapter" / "adapter_model.safetensors").stat().st_size
again = PeftModel.from_pretrained(copy.deepcopy(narrow), output / "adapter").eval()
with torch.no_grad():
    expected = adapted(sample).logits
    loaded = torch.equal(again(sample).logits, expected)
    with again.disable_adapter():
        off = torch.equal(again(sample).logits, narrow(sample).logits)
    merged = again.merge_and_unload()
    apart = (merged(sample).logits - expected).abs().max().item()
print(f"The adapter has {size / 1024:.0f} KB. Loaded again, the same logits: {loaded}. Off, those of the base: {off}.")
print(f"Merged, a {type(merged).__name__} of {merged.num_parameters():,} parameters; logits within {apart:.0e}.")

# %% [markdown]
# ## LoRA and growth together
#
# LoRA moves the present weights, and growth adds new ones; both train next to a frozen base. One `save_pretrained`
# keeps them, and peft loads them together: the folder `growth` holds the new weights alone. Here `find` and `keep` keep
# them by word, whether they hold or not.

# %%
lora = LoraConfig(r=4, target_modules="all-linear")
both = get_peft_model(patch_model(copy.deepcopy(narrow)), lora)
adapters = torch.optim.AdamW([p for p in both.parameters() if p.requires_grad], lr=5e-3)
found = Grower(both, GrowthConfig(budget=0.02), adapters).find(growth_batches)
found.keep()  # the new weights join that optimizer
both.train()
for batch in growth_batches:
    both(**batch).loss.backward()
    adapters.step()
    adapters.zero_grad()
both.eval().save_pretrained(output / "both")
once_more = PeftModel.from_pretrained(copy.deepcopy(narrow), output / "both").eval()
size = (output / "both" / "growth" / "growth.safetensors").stat().st_size
with torch.no_grad():
    same = torch.equal(once_more(sample).logits, both(sample).logits)
print(f"Beside LoRA the loss falls by {found.report.fall:.4f} ± {found.report.error:.4f}.")
print(f"LoRA and growth: held-out loss {held_out_loss(both):.4f}; the growth alone has {size / 1024:.0f} KB.")
print(f"Both loaded again, the same logits: {same}.")

# %% [markdown]
# ## A card, and the Hub
#
# The card says what grew, and where. `hf upload you/your-model FOLDER` pushes the folder with it, and
# `model.push_to_hub("you/your-model")` the model alone. The tour only shows the folder, and pushes to nothing but a
# stand-in for the Hub on this machine.

# %%
reports = [report, *growth.reports]
write_card(model, output / "grown", reports)
print("This is what would be pushed to you/your-model:")
for path in sorted(path for path in (output / "grown").rglob("*") if path.is_file()):
    print(f"{path.stat().st_size:>10,}  {path.relative_to(output / 'grown')}")

if urlsplit(os.environ.get("HF_ENDPOINT", "")).hostname in ("127.0.0.1", "localhost"):
    print(f"Pushed: {model.push_to_hub('me/tour')}")
    from_hub = AutoModelForCausalLM.from_pretrained("me/tour").eval()
    with torch.no_grad():
        print(f"Loaded from there, the same logits: {torch.equal(from_hub(sample).logits, model(sample).logits)}.")

# %% [markdown]
# ## Where to go from here
#
# `scripts/finetune.py` does this for a model and a text of yours, and `scripts/bench/README.md` says when growth is
# worth it and when it is not. On a model as young as this one, ordinary training is far from done, and growth adds
# little; it pays where heads are too narrow for the task.

# %%
print(f"Look at {output / 'report.html'}, then try: growattn race gpt2 my_text.txt -o race")
