"""Runs scripts, one after the other, in forks of a process that has the libraries: importing them takes longer.

It reads lines of JSON, [script, log, arguments], and answers each with the exit status.
"""

import json
import os
import runpy
import sys
import traceback
from pathlib import Path

import matplotlib.pyplot  # noqa: F401
import peft  # noqa: F401
import torch._dynamo  # noqa: F401
from transformers import BertModel, GPT2LMHeadModel, LlamaForCausalLM, SmolLM3ForCausalLM  # noqa: F401

import hf_growattn  # noqa: F401


def run(script: str, log: str, arguments: list[str]) -> None:
    """What `python script arguments` does, in this process; what it prints goes into the log."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.argv, sys.path[0] = [script, *arguments], str(Path(script).parent)
    status = 1
    try:
        runpy.run_path(script, run_name="__main__")
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


for line in sys.stdin:
    child = os.fork()
    if not child:
        run(*json.loads(line))
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), flush=True)
