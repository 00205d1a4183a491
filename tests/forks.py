"""Runs scripts in forks of a process that has the libraries, since importing them takes longer than what most run.

A script may run on several ranks, which find each other as under torchrun. `Forks` is what tests use. Run as a script,
this is that process: it reads lines of JSON, and answers each with a list of exit statuses.
"""

import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
import traceback
from contextlib import suppress
from importlib import import_module
from pathlib import Path

TIMEOUT = 600.0  # seconds for a script
MODELS = ("bert", "gpt2", "llama", "smollm3")
LIBRARIES = ["hf_growattn.cli.measuring", "matplotlib.pyplot", "peft", "sentence_transformers", "torch._dynamo"]
LIBRARIES += ["accelerate", "transformers.trainer", *(f"trl.trainer.{name}_trainer" for name in ("sft", "dpo"))]
LIBRARIES += [f"transformers.models.{name}.modeling_{name}" for name in MODELS]


class Forks:
    """The process, which ends with the `with` block."""

    def __init__(self, folder: Path):
        self.folder, self.count = folder, 0
        tests = Path(__file__).parent
        folders = [str(tests.parent), str(tests), os.environ.get("PYTHONPATH", "")]
        settings = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONFAULTHANDLER": "1"}
        environment = {**os.environ, **settings, "PYTHONPATH": os.pathsep.join(folders)}
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        self.process = subprocess.Popen([sys.executable, __file__], cwd=tests.parent, env=environment, **pipes)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.stdin.close()
        self.process.wait()

    def run(self, script: str | Path, *arguments, ranks: int = 0, **environment: str) -> subprocess.CompletedProcess:
        """Run `python script arguments`, or `python -m script arguments` if the name has no suffix; maybe on ranks."""
        self.count += 1
        outputs = [self.folder / f"{self.count}.{name}" for name in ("stdout", "stderr")]
        job = [str(script), [str(word) for word in arguments], ranks, environment, [str(path) for path in outputs]]
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        statuses = json.loads(self.process.stdout.readline())
        failed = [status for status in statuses if status]
        texts = [path.read_text(errors="replace") for path in outputs]
        return subprocess.CompletedProcess(job[:2], failed[0] if failed else 0, *texts)


def run_script(script: str, arguments: list[str], outputs: list[str]) -> None:
    """Run a script in this process, which then ends."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for stream, path in enumerate(outputs, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    sys.argv = [script, *arguments]
    status = 1
    try:
        if script.endswith(".py"):
            sys.path[0] = str(Path(script).parent)
            runpy.run_path(script, run_name="__main__")
        else:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def ranks_environment(ranks: int, rank: int, port: int) -> dict[str, str]:
    """What torchrun tells a rank."""
    if not ranks:
        return {}
    sizes = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "RANK": rank, "LOCAL_RANK": rank}
    return {name: str(value) for name, value in sizes.items()} | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def wait_for(children: list[int]) -> list[int]:
    """The exit statuses in the order in which the children end; when one has failed, the others are killed."""
    statuses, remaining, deadline = [], set(children), time.monotonic() + TIMEOUT
    while remaining:
        child, status = os.waitpid(-1, os.WNOHANG)
        if child:
            remaining.discard(child)
            statuses.append(os.waitstatus_to_exitcode(status))
        else:
            time.sleep(0.02)
        if any(statuses) or time.monotonic() > deadline:
            for other in remaining:
                os.kill(other, signal.SIGKILL)
    return statuses


def serve() -> None:
    """Answer every line of the input."""
    for name in LIBRARIES:
        with suppress(ImportError):  # of extras that are not installed
            import_module(name)
    for line in sys.stdin:
        script, arguments, ranks, environment, outputs = json.loads(line)
        port, children = free_port(), []
        for rank in range(max(ranks, 1)):
            child = os.fork()
            if not child:
                os.environ.update(ranks_environment(ranks, rank, port) | environment)
                run_script(script, arguments, outputs)
            children.append(child)
        print(json.dumps(wait_for(children)), flush=True)
    os._exit(0)  # at once: taking the libraries down takes seconds


if __name__ == "__main__":
    serve()
