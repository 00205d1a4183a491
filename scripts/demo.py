"""Is width the bottleneck? A race on a task that needs it, in a minute, without a download: `bash scripts/demo.sh`.

Which of 64 passages did a damaged copy come from (`scripts/passages.py`)? LoRA on all linear layers, growth, and a mix
of both are each trained on passages, with the same number of weights, and compared on passages that none has seen. The
winner is trained once more, saved, loaded and asked again.
"""

import argparse
import copy
from pathlib import Path

import torch
from passages import ENDS, Matcher, Passages, loss_of, make_base, share_found, train
from safetensors.torch import load_model, save_model
from torch import nn
from transformers import AutoModel

from hf_growattn import race, write_card


def save(model: Matcher, folder: Path) -> None:
    """Save the transformer as a checkpoint of transformers, and what is around it as a file."""
    model.transformer.save_pretrained(folder / "transformer")
    save_model(nn.ModuleDict({name: getattr(model, name) for name in ENDS}), str(folder / "ends.safetensors"))


def load(folder: Path) -> Matcher:
    """Load what `save` wrote."""
    model = Matcher(AutoModel.from_pretrained(folder / "transformer"))
    load_model(nn.ModuleDict({name: getattr(model, name) for name in ENDS}), str(folder / "ends.safetensors"))
    return model.eval()


def main() -> None:
    """Race, train by the winner, save and load."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default="scripts/output/demo", help="folder for the trained model")
    parser.add_argument("--pretraining", type=int, default=1000, help="steps on made-up records")
    parser.add_argument("--steps", type=int, default=100, help="steps of each training on passages")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)  # a model this small is slower on more
    generator, text = torch.Generator().manual_seed(0), Passages()
    base = make_base(arguments.pretraining, generator)
    train_batches = [text.batch(text.seen, generator) for _ in range(arguments.steps)]
    held_out = [text.batch(text.unseen, generator) for _ in range(16)]

    def make_model() -> Matcher:
        return copy.deepcopy(base)

    options = {"budget": 0.15, "steps": arguments.steps, "modules_to_save": ENDS}
    result = race(make_model, train_batches, held_out, loss_of, **options)
    print(result)
    model, groups = result.method.prepare(make_model(), train_batches, loss_of)
    train(model, train_batches, groups, "the winner")
    model = model.merge_and_unload() if hasattr(model, "merge_and_unload") else model
    save(model, arguments.output)
    if result.winner != "lora":
        write_card(model.transformer, arguments.output / "transformer")
    found = [share_found(each, held_out) for each in (base, model, load(arguments.output))]
    print(f"Passages found: {found[0]:.0%} before, {found[1]:.0%} after training by the winner.")
    print(f"Saved in {arguments.output}, and loaded from there: {found[2]:.0%}.")


if __name__ == "__main__":
    main()
