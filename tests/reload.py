"""Run in a fresh process: load every checkpoint named in a JSON file and save what it computes.

Usage: python reload.py JOBS RESULTS [without-library | stock], where JOBS holds {name: {"path", "auto_class",
"input_ids", "new_tokens"}}, and may add "kwargs" for from_pretrained and "save_to". Without the library the code that
the checkpoints carry runs instead; stock checkpoints carry none.
"""

import json
import sys

import pytest
import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

torch.set_num_threads(1)
transformers.logging.disable_progress_bar()
jobs_file, results_file, mode = (*sys.argv[1:], "with-library")[:3]
jobs, results, trust = json.load(open(jobs_file)), {}, {}

if mode == "with-library":
    import hf_growattn  # noqa: F401  registers the Auto classes
else:
    sys.modules["hf_growattn"] = None  # importing it raises ImportError
if mode == "without-library":
    trust = {"trust_remote_code": True}
    job = next(iter(jobs.values()))
    for refusal in ({}, {"trust_remote_code": False}):  # standard input is closed: a question has no answer
        with pytest.raises(ValueError, match="trust_remote_code=True"):
            getattr(transformers, job["auto_class"]).from_pretrained(job["path"], **refusal)

for name, job in jobs.items():
    auto_class, kwargs = getattr(transformers, job["auto_class"]), job.get("kwargs", {})
    model = auto_class.from_pretrained(job["path"], **trust, **kwargs).eval()
    input_ids = torch.tensor(job["input_ids"])
    with torch.no_grad():
        results[name] = {"output": model(input_ids)[0], "class": type(model).__name__, "dtype": str(model.dtype)}
        results[name]["module"] = type(model).__module__
        if job["new_tokens"]:
            results[name]["tokens"] = model.generate(input_ids, max_new_tokens=job["new_tokens"], do_sample=False)
    if "save_to" in job:
        model.save_pretrained(job["save_to"])
if mode != "stock":  # by these names Trainer shifts labels
    assert "GrowAttnLlamaForCausalLM" in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
torch.save(results, results_file)
