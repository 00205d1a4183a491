"""Convert what `export_model` wrote to GGUF, and compare llama.cpp with transformers: greedy tokens, and logits.

    git clone https://github.com/ggml-org/llama.cpp
    cmake -S llama.cpp -B llama.cpp/build -DCMAKE_BUILD_TYPE=Release
    cmake --build llama.cpp/build --target llama
    python scripts/to_gguf.py exported --llama-cpp llama.cpp  # leaves exported.gguf, if both agree

llama.cpp's converter needs the sentencepiece package, and a tokenizer that it knows in the checkpoint:
`export_model(model, "exported", tokenizer)`. A C compiler builds `greedy.c` against llama.cpp's library.
Both sides compute in fp32; quantize the file with llama.cpp's own tools afterwards. Of SmolLM2-135M, converting and
comparing 40 tokens after each of four prompts takes 50 seconds of processor time.

Measured with llama.cpp 0.5.0-dev on the CPU: Llama, Mistral without its window (llama.cpp has none for it), Mixtral,
Qwen2 as a Llama and Qwen3 agree. The converter or the loader refuses Granite, OLMo 2, SmolLM3 and Phi-3, since it takes
head widths from the hidden size or knows no frequencies for them. Gemma and Gemma 2 convert, but rotate new dims too,
which the comparison below finds.

The rotary frequencies of a source with scaled rotation (Llama 3.1 and later) are exported as "longrope", which the
converter drops without a word for a Llama: such a file rotates every dim by one radian a token. So the converter is
given these frequencies as the tensor that llama.cpp has for them.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers import logging as transformers_logging

PROMPTS = ("Once upon a time", "The meaning of attention is", "To be, or not to be: that is the question.")
RANDOM_TOKENS = 200  # of one more prompt: long ones show wrong rotations
# Largest difference of the prompt's logits, over the largest logit. Rounding is below 1e-5; llama.cpp looks GELU up in
# fp16, 1e-3; the least wrong of the wrong rotations that were tried made 0.25.
TOLERANCE = 1e-2


def for_converter(checkpoint: Path, folder: Path) -> Path:
    """Link the checkpoint's files into the folder, with rotary frequencies as the converter understands them."""
    for path in checkpoint.iterdir():
        (folder / path.name).symlink_to(path.resolve())
    config = json.loads((checkpoint / "config.json").read_text())
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") == "longrope" and rope["rope_theta"] == 1.0:
        # A file of its own: the converter reads all that are named so.
        save_file({"rope.freqs.weight": torch.tensor(rope["short_factor"])}, folder / "model-rope.safetensors")
        config |= {
            "rope_parameters": {"rope_type": "default", "rope_theta": 1.0},
            "rope_theta": 1.0,
            "rope_scaling": None,
        }
        (folder / "config.json").unlink()
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def convert(checkpoint: Path, llama_cpp: Path, file: Path) -> None:
    """Run llama.cpp's converter."""
    with tempfile.TemporaryDirectory() as folder:
        source = for_converter(checkpoint, Path(folder))
        command = [sys.executable, llama_cpp / "convert_hf_to_gguf.py", source, "--outtype", "f32", "--outfile", file]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"llama.cpp's converter refused {checkpoint}:\n{done.stderr[-2000:]}")


def build_greedy(llama_cpp: Path, program: Path) -> None:
    """Compile greedy.c against llama.cpp's library."""
    built = llama_cpp.resolve() / "build" / "bin"
    folders = [f"-I{llama_cpp / 'include'}", f"-I{llama_cpp / 'ggml' / 'include'}"]
    library = [f"-L{built}", "-lllama", f"-Wl,-rpath,{built}"]
    subprocess.run(["cc", "-O2", Path(__file__).with_name("greedy.c"), *folders, *library, "-o", program], check=True)


def in_llama_cpp(program: Path, file: Path, ids: list[int], tokens: int) -> tuple[torch.Tensor, list[int]]:
    """Logits of the prompt, (len(ids), vocabulary), and greedy tokens."""
    with tempfile.NamedTemporaryFile() as logits:
        words = [program, file, logits.name, tokens, *ids]
        # Threads that wait by spinning take seven times as long where other programs want the cores, too.
        environment = {**os.environ, "OMP_WAIT_POLICY": "passive"}
        done = subprocess.run([str(word) for word in words], capture_output=True, text=True, env=environment)
        if done.returncode:
            sys.exit(f"llama.cpp could not run {file}:\n{done.stderr[-2000:]}")
        values = torch.frombuffer(bytearray(Path(logits.name).read_bytes()), dtype=torch.float32)
    return values.view(len(ids), -1), [int(token) for token in done.stdout.split()]


@torch.no_grad()
def in_transformers(model, ids: list[int], found: list[int]) -> tuple[torch.Tensor, list[int]]:
    """The same by transformers, which takes llama.cpp's tokens as they come: one pass instead of one for each token."""
    logits = model(torch.tensor([ids + found[:-1]]), use_cache=False).logits[0]
    return logits[: len(ids)], logits[len(ids) - 1 :].argmax(-1).tolist()


def prompts_of(checkpoint: Path, texts: list[str], config, tokens: int) -> list[list[int]]:
    """Token ids of the texts, and random ones."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    length = min(RANDOM_TOKENS, getattr(config, "max_position_embeddings", 512) - tokens)
    generator = torch.Generator().manual_seed(0)
    return [*tokenizer(texts)["input_ids"], torch.randint(config.vocab_size, (length,), generator=generator).tolist()]


def main() -> int:
    """Convert, compare, and keep the file where both agree."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="folder that export_model wrote, with its tokenizer")
    parser.add_argument("--llama-cpp", type=Path, required=True, help="folder of llama.cpp's sources, built in build/")
    parser.add_argument("--gguf", type=Path, help="file to write; CHECKPOINT.gguf by default")
    parser.add_argument("--prompts", nargs="+", default=PROMPTS, help="texts to continue")
    parser.add_argument("--tokens", type=int, default=40, help="tokens to add to each")
    arguments = parser.parse_args()
    transformers_logging.disable_progress_bar()
    checkpoint, llama_cpp = arguments.checkpoint.resolve(), arguments.llama_cpp
    target = arguments.gguf or checkpoint.with_name(f"{checkpoint.name}.gguf")
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    prompts = prompts_of(checkpoint, list(arguments.prompts), model.config, arguments.tokens)
    agreed = True
    with tempfile.TemporaryDirectory() as folder:
        file, program = Path(folder, "model.gguf"), Path(folder, "greedy")
        build_greedy(llama_cpp, program)
        convert(checkpoint, llama_cpp, file)
        for ids in prompts:
            logits, found = in_llama_cpp(program, file, ids, arguments.tokens)
            expected_logits, expected = in_transformers(model, ids, found)
            difference = ((logits - expected_logits).abs().max() / expected_logits.abs().max()).item()
            same = found == expected and difference < TOLERANCE
            agreed &= same
            print(f"{len(ids)} tokens of prompt: logits differ by {difference:.1e} of the largest one.")
            print("  llama.cpp:   ", *found)
            print("  transformers:", *expected, f"  {'equal' if same else 'DIFFERENT'}")
        if agreed:
            shutil.move(file, target)
    print(f"Equal: {target} is ready." if agreed else "llama.cpp computes something else: no file was left.")
    return 0 if agreed else 1


if __name__ == "__main__":
    sys.exit(main())
