"""Run in a process of its own: print the peak memory of one training step or of one sketching pass at 2,048 tokens.

Usage: python memory.py training|sketch. Prints JSON in bytes: "work" is the peak of what torch allocates beyond the
loaded model, "square" the size of one layer's T x T logits.
"""

import json
import sys
from itertools import accumulate

import torch
from torch.autograd.profiler import profile
from transformers import LlamaConfig, LlamaForCausalLM

from hf_growattn import patch_model
from hf_growattn.growable.attention import attentions
from hf_growattn.measure.bottlenecks import QK, V, compute_moments
from hf_growattn.measure.directions import sketched_directions
from hf_growattn.measure.passes import Objective, evaluation_mode

BATCH, TOKENS, HEADS = 1, 2048, 8


torch.set_num_threads(1)
config = LlamaConfig(
    vocab_size=512,
    hidden_size=512,
    intermediate_size=1408,
    num_hidden_layers=2,
    num_attention_heads=HEADS,
    max_position_embeddings=TOKENS,
)
model = patch_model(LlamaForCausalLM(config)).train()
input_ids = torch.randint(0, 512, (BATCH, TOKENS))
batch = {"input_ids": input_ids, "labels": input_ids}
short = {key: value[:, :16] for key, value in batch.items()}
model(**short).loss.backward()  # libraries load, and gradients of the weights exist before the count starts
model.zero_grad(set_to_none=sys.argv[1] == "sketch")
with profile(profile_memory=True) as allocations:  # what the process keeps of freed memory differs between machines
    if sys.argv[1] == "training":
        model(**batch).loss.backward()
    else:
        objective = Objective(model)
        with evaluation_mode(model):
            bottlenecks, _ = compute_moments(objective, attentions(model), [QK, V], [batch])
            sketched_directions(objective, bottlenecks, ([batch], [batch]), dims=8, seed=0)
sizes = [event.nbytes() for event in allocations.kineto_results.events() if event.name() == "[memory]"]
print(json.dumps({"work": max(accumulate(sizes)), "square": BATCH * HEADS * TOKENS**2 * 4}))
