"""A tour of hf_growattn, from the race to a saved model: about a minute on one core, and nothing is downloaded.

    pip install . matplotlib
    python scripts/tour.py

To run it cell by cell, open `scripts/tour.ipynb` in Jupyter or Colab, or this file in an editor that knows `# %%`
(VS Code, PyCharm, Spyder).
"""

# %% [markdown]
# # A tour of hf_growattn
#
# Are the heads of a model too narrow for its data, and is widening them better than LoRA? First ask; then grow.

# %%
import copy
import subprocess
import sys
import warnings
from pathlib import Path

import torch
from matplotlib import pyplot
from passages import ENDS, Matcher, Passages, loss_of, make_base, share_found
from transformers import AutoModel
from transformers import logging as transformers_logging

from hf_growattn import (
    Grower,
    GrowthConfig,
    Method,
    attention_views,
    load_growth,
    patch_model,
    race,
    save_growth,
    unpatch_model,
    write_card,
)

transformers_logging.disable_progress_bar()
transformers_logging.set_verbosity_error()
warnings.simplefilter("ignore", FutureWarning)  # peft uses deprecated names of transformers
torch.manual_seed(0)
torch.set_num_threads(1)  # a model this small is slower on more
output = Path("scripts/output/tour")
output.mkdir(parents=True, exist_ok=True)

# %% [markdown]
# ## A model and its task
#
# 64 passages of text are given, each read as one vector of numbers and with a label; a damaged copy of one comes next.
# Which one is it? A small transformer with heads 8 wide was trained to answer that on random vectors, not yet on text.

# %%
generator, text = torch.Generator().manual_seed(0), Passages()
base = make_base(1000, generator)
batches = [text.batch(text.seen, generator) for _ in range(32)]
held_out = [text.batch(text.unseen, generator) for _ in range(8)]


def make_model() -> Matcher:
    """The model, the same each time."""
    return copy.deepcopy(base)


@torch.no_grad()
def held_out_loss(model) -> float:
    """Mean loss on passages that no training has seen, in nats."""
    return sum(loss_of(model.eval(), batch).item() for batch in held_out) / len(held_out)


print(f"It finds {share_found(base, held_out):.0%} of the passages, with a loss of {held_out_loss(base):.3f} nats.")

# %% [markdown]
# ## Ask first: the race
#
# LoRA, growth and a mix of both train the same number of weights on the same batches, and are compared on others. The
# layers before and after the transformer train in all three. If LoRA wins, use LoRA.

# %%
result = race(make_model, batches, held_out, loss_of, budget=0.15, steps=32, seeds=2, modules_to_save=ENDS)
print(result)

# %% [markdown]
# ## Find
#
# `Grower` does a growth by itself, in the middle of any training. Half of the batches says where wider heads would
# lower the loss; the other half judges what that is worth. The model does not change yet.

# %%
matcher = make_model()
model = patch_model(matcher.transformer)  # in place: weights, outputs and attention stay as they are
optimizer = torch.optim.AdamW([weight for weight in matcher.parameters() if weight.requires_grad], lr=2e-3)
growth = Grower(matcher, GrowthConfig(budget=0.15), optimizer, loss=loss_of).find(batches[:16])
print(growth.report)

# %% [markdown]
# ## Keep, and train on
#
# `keep` makes the new dims a part of the model, and of the optimizer. `Grower.grow` does `find`, and then `keep` if the
# loss falls by more than chance would let it.

# %%
before = held_out_loss(matcher)
growth.keep()
print(f"On passages that growth has not read, the loss falls from {before:.3f} to {held_out_loss(matcher):.3f}.")
for batch in batches:
    loss_of(matcher.train(), batch).backward()
    optimizer.step()
    optimizer.zero_grad()
print(f"After {len(batches)} steps of training it is {held_out_loss(matcher):.3f}.")

# %% [markdown]
# ## What is new in a head
#
# A head compares tokens along as many directions as it is wide: 8 before the growth. The picture has a bar for each
# direction, the strongest first. Its height, called a singular value, says how much that direction counts. Only the
# grown head has bars beyond the 8th, for the directions that growth added. `pattern(0)` is `W_Q W_K^T` of head 0.

# %%
grown_most = max(
    (layer for layer in growth.report.layers if layer.kind == "qk"), key=lambda layer: layer.width[1]
).layer
figure, axes = pyplot.subplots(figsize=(5, 3), layout="constrained")
for name, shown, place in (("before", base.transformer, -0.2), ("now", model, 0.2)):
    values = attention_views(shown)[grown_most].pattern(0).singular_values.tolist()
    axes.bar([number + place for number in range(1, len(values) + 1)], values, width=0.4, label=name)
    print(f"Layer {grown_most}, head 0, {name}: {', '.join(f'{value:.2f}' for value in values)}.")
axes.set(xlabel="direction", ylabel="singular value", title=f"Layer {grown_most}, head 0")
axes.legend()
figure.savefig(output / "directions.png")

# %% [markdown]
# ## LoRA with growth
#
# A `Method` prepares a model for training as the race does: here a third of the new weights by growth, and the rest
# LoRA by peft. The groups carry the learning rates of both.

# %%
method = Method("mix", budget=0.15, learning_rate=5e-3, modules_to_save=ENDS)
mixed, groups = method.prepare(make_model(), batches, loss_of)
adapters = torch.optim.AdamW(groups)
for batch in batches:
    loss_of(mixed.train(), batch).backward()
    adapters.step()
    adapters.zero_grad()
print(f"LoRA with growth: {held_out_loss(mixed):.3f}.")

# %% [markdown]
# ## Save, share, take off
#
# A grown checkpoint is safetensors, with the code by which `trust_remote_code=True` loads it without this library.
# `save_growth` keeps the new dims alone.

# %%
FRESH = """
import sys, torch, transformers
transformers.logging.disable_progress_bar()
model = transformers.AutoModel.from_pretrained(sys.argv[1], trust_remote_code=True).eval()
with torch.no_grad():
    print(f"{model(inputs_embeds=torch.ones(1, 3, 64)).last_hidden_state.sum():.6f}", "hf_growattn" in sys.modules)
"""
model.eval().save_pretrained(output / "grown")
write_card(model, output / "grown", [growth.report])
with torch.no_grad():
    print(f"Here: {model(inputs_embeds=torch.ones(1, 3, 64)).last_hidden_state.sum():.6f}")
fresh = [sys.executable, "-W", "ignore", "-c", FRESH, output / "grown"]
done = subprocess.run(fresh, check=True, stdout=subprocess.PIPE, text=True)
print(f"In a fresh process (and whether it has imported hf_growattn): {done.stdout.strip()}")
again = AutoModel.from_pretrained(output / "grown").eval()

save_growth(model, output / "growth")
size = (output / "growth" / "growth.safetensors").stat().st_size
print(f"The growth alone has {size / 1024:.0f} KB.")
print(f"Taken off: {type(unpatch_model(again, drop_growth=True)).__name__}.")
load_growth(patch_model(again), output / "growth")
with torch.no_grad():
    print(f"Put on again: {again(inputs_embeds=torch.ones(1, 3, 64)).last_hidden_state.sum():.6f}")
