"""Run in a fresh process: load every checkpoint named in a JSON file and save what it computes.

Usage: python reload.py JOBS RESULTS, where JOBS holds {name: {"path", "auto_class", "input_ids", "new_tokens"}}.
"""

import json
import sys

import torch
import transformers

import hf_growattn  # noqa: F401  registers the Auto classes

torch.set_num_threads(1)
transformers.logging.disable_progress_bar()
results = {}
for name, job in json.load(open(sys.argv[1])).items():
    model = getattr(transformers, job["auto_class"]).from_pretrained(job["path"]).eval()
    input_ids = torch.tensor(job["input_ids"])
    with torch.no_grad():
        results[name] = {"output": model(input_ids)[0], "class": type(model).__name__, "dtype": str(model.dtype)}
        if job["new_tokens"]:
            results[name]["tokens"] = model.generate(input_ids, max_new_tokens=job["new_tokens"], do_sample=False)
torch.save(results, sys.argv[2])
