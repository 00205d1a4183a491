"""Growth beside LoRA on a task that needs width, in two minutes, without a download: `bash scripts/demo.sh`.

64 passages of the documentation that every CPython carries stand in context, each with a label. A damaged copy of one
comes next, a third of whose words are those of other passages. Which one is it? A small transformer with narrow heads
is first trained on made-up records. Then LoRA on all linear layers and wider heads are each trained on passages, with
equally many weights, and asked about passages that neither has seen. The grown model is saved, loaded and asked again.
"""

import argparse
import copy
import math
from pathlib import Path
from zlib import crc32

import torch
from peft import LoraConfig, inject_adapter_in_model
from safetensors.torch import load_file, save_file
from texts import english
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot
from tqdm.auto import tqdm
from transformers import AutoModel, EuroBertConfig, EuroBertModel

from hf_growattn import Grower, GrowthConfig, GrowthReport, patch_model, write_card

ROWS, ASKED, FEATURES, EPISODES = 64, 32, 64, 4  # records in context, damaged copies, numbers of each, of a batch
WIDTH, LAYERS, HEAD = 64, 2, 8
WORDS, BUCKETS, DAMAGE = 40, 1024, 1 / 3  # of a passage, of its word counts, share of the words that are exchanged
RANK = 6  # of LoRA on all linear layers, whose weights are the budget of both
RATES = (1e-2, 3e-2)  # learning rates, tried on batches of their own
ENDS = ["read_in", "classifier"]
INSIDE = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class Matcher(nn.Module):
    """A transformer that reads records with labels, in no order, and scores the labels of records without."""

    def __init__(self, transformer: nn.Module):
        super().__init__()
        self.transformer = transformer
        self.read_in, self.classifier = nn.Linear(FEATURES + ROWS, WIDTH), nn.Linear(WIDTH, ROWS)
        with torch.no_grad():
            nn.init.normal_(self.read_in.weight, std=WIDTH**-0.5)
            self.classifier.weight.copy_(self.read_in.weight[:, FEATURES:].T)  # labels are read as they are written

    def forward(self, records: Tensor, labels: Tensor) -> Tensor:
        """(episodes, rows + asked, features), (episodes, rows) -> (episodes, asked, labels)."""
        rows, length = labels.shape[1], records.shape[1]
        marked = torch.zeros(*records.shape[:2], ROWS)
        marked[:, :rows] = one_hot(labels, ROWS)
        mask = (torch.arange(length) < rows).long().expand(len(records), -1)  # records asked for are no keys
        tokens = self.read_in(torch.cat((records, marked), -1))
        places = torch.zeros(1, length, dtype=torch.long)  # all the same: the order of records means nothing
        states = self.transformer(inputs_embeds=tokens, attention_mask=mask, position_ids=places).last_hidden_state
        return self.classifier(states[:, rows:])


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Of the labels of the records that are asked for."""
    records, labels, wanted = batch
    return cross_entropy(model(records, labels).flatten(0, 1), wanted.flatten())


class Passages:
    """Passages as the principal components of their word counts, and damaged copies of them."""

    def __init__(self):
        words = [article.split() for article in english()]
        every = [article[at : at + WORDS] for article in words for at in range(0, len(article) - WORDS + 1, WORDS)]
        ids = torch.tensor([[crc32(word.lower().encode()) % BUCKETS for word in passage] for passage in every])
        training = torch.arange(len(ids)) % 4 > 0
        self.seen, self.unseen, counted = ids[training], ids[~training], self.count(ids[training])
        self.mean = counted.mean(0)
        torch.manual_seed(0)
        self.axes = torch.pca_lowrank(counted, FEATURES, niter=4)[2]
        self.scale = ((counted - self.mean) @ self.axes).std(0)

    def count(self, passages: Tensor) -> Tensor:
        """Word counts, (passages, buckets), their square roots."""
        counts = torch.zeros(*passages.shape[:-1], BUCKETS)
        return counts.scatter_add(-1, passages, torch.ones(passages.shape)).sqrt()

    def read(self, passages: Tensor) -> Tensor:
        """Numbers of mean 0 and variance 1, (..., features)."""
        return (self.count(passages) - self.mean) @ self.axes / self.scale

    def batch(self, passages: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """Records with labels, damaged copies of half of them, and the labels of these."""
        chosen = torch.stack([torch.randperm(len(passages), generator=generator)[:ROWS] for _ in range(EPISODES)])
        shown = passages[chosen]
        others = passages.flatten()[torch.randint(passages.numel(), shown.shape, generator=generator)]
        damaged = torch.where(torch.rand(shown.shape, generator=generator) < DAMAGE, others, shown)[:, :ASKED]
        labels = torch.stack([torch.randperm(ROWS, generator=generator) for _ in range(EPISODES)])
        return self.read(torch.cat((shown, damaged), 1)), labels, labels[:, :ASKED]


def made_up(rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Records that follow from a few causes, and copies of half of them, of which some numbers are exchanged."""
    causes = int(torch.randint(2, FEATURES, (1,), generator=generator))
    mixing = torch.randn(EPISODES, causes, FEATURES, generator=generator) / causes**0.5
    records = torch.tanh(2 * torch.randn(EPISODES, rows, causes, generator=generator) @ mixing)
    records = (records - records.mean(1, keepdim=True)) / records.std(1, keepdim=True)
    asked = max(rows // 2, 1)
    exchanged = torch.rand(EPISODES, asked, FEATURES, generator=generator) < 0.3
    copies = torch.where(exchanged, records[:, torch.randperm(rows, generator=generator)[:asked]], records[:, :asked])
    labels = torch.stack([torch.randperm(ROWS, generator=generator)[:rows] for _ in range(EPISODES)])
    return torch.cat((records, copies), 1), labels, labels[:, :asked]


def train(model: nn.Module, batches: list, rate: float, name: str) -> nn.Module:
    """AdamW with a rate that rises and then falls to zero along a cosine."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=rate, weight_decay=0)
    warm, end = 0.1 * len(batches), len(batches)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warm, 0.5 + 0.5 * math.cos(math.pi * step / end))
    )
    for batch in tqdm(batches, desc=name, leave=False, disable=None):
        loss_of(model.train(), batch).backward()
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return model.eval()


@torch.no_grad()
def measure(model: nn.Module, batches: list) -> tuple[float, float]:
    """The loss, and the share of damaged copies that are found."""
    scores, wanted = zip(*((model(*batch[:2]).flatten(0, 1), batch[2].flatten()) for batch in batches))
    found, labels = torch.cat(scores), torch.cat(wanted)
    return cross_entropy(found, labels).item(), (found.argmax(-1) == labels).float().mean().item()


def add_lora(model: Matcher, batches: list) -> None:
    """LoRA on all linear layers, read-in and head among them."""
    inject_adapter_in_model(LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=ENDS + INSIDE), model)


def add_width(model: Matcher, batches: list) -> GrowthReport:
    """Wider heads, and LoRA on read-in and head, with as many weights as `add_lora` in all."""
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    budget = RANK * sum(module.in_features + module.out_features for module in linear)
    at_ends = sum(module.in_features + module.out_features for module in (model.read_in, model.classifier))
    config = GrowthConfig(budget=budget - RANK * at_ends, kinds=["qk"], old_dims_train=False)
    report = Grower(model, config, loss=loss_of).grow(batches[:8])
    grown = [weight for weight in model.parameters() if weight.requires_grad]
    inject_adapter_in_model(LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=ENDS), model)
    for weight in grown:
        weight.requires_grad_(True)  # peft freezes all but its own
    return report


METHODS = {"LoRA on all linear layers": add_lora, "wider heads, LoRA on read-in and head": add_width}


def main() -> None:
    """Train, compare, save and load."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default="scripts/output/demo", help="folder for the grown model")
    parser.add_argument("--pretraining", type=int, default=1500, help="steps on made-up records")
    parser.add_argument("--steps", type=int, default=200, help="steps on passages")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)  # a model this small is slower on more
    config = EuroBertConfig(
        vocab_size=1,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=WIDTH // HEAD,
        initializer_range=WIDTH**-0.5 / 2,
        pad_token_id=0,
        bos_token_id=0,
        eos_token_id=0,
        mask_token_id=0,
    )
    base, generator = Matcher(EuroBertModel(config)), torch.Generator().manual_seed(0)
    base.transformer.get_input_embeddings().weight.requires_grad_(False)  # records come as vectors
    rows = [ROWS // (8, 3, 1, 1)[4 * step // arguments.pretraining] for step in range(arguments.pretraining)]
    train(base, [made_up(count, generator) for count in rows], 3e-3, "made-up records")
    text = Passages()
    batches = [text.batch(text.seen, generator) for _ in range(arguments.steps)]
    tuning, held_out = ([text.batch(part, generator) for _ in range(16)] for part in (text.seen, text.unseen))
    patch_model(base.transformer)
    base.requires_grad_(False)
    lines = ["before: loss {:.3f}, {:.0%} of the copies found".format(*measure(base, held_out))]
    for name, add in METHODS.items():
        start = copy.deepcopy(base)
        report = add(start, batches)
        trained = [train(copy.deepcopy(start), batches, rate, f"{name}, rate {rate:g}") for rate in RATES]
        best = min(trained, key=lambda model: measure(model, tuning)[0])
        weights = sum(weight.numel() for weight in start.parameters() if weight.requires_grad)
        figures = measure(best, held_out)
        lines.append("{}: loss {:.3f}, {:.0%} found ({:,} weights)".format(name, *figures, weights))
    arguments.output.mkdir(parents=True, exist_ok=True)
    best.transformer.save_pretrained(arguments.output / "transformer")
    write_card(best.transformer, arguments.output / "transformer", [report])
    ends = {name: weight for name, weight in best.state_dict().items() if not name.startswith("transformer.")}
    save_file(ends, arguments.output / "ends.safetensors")
    again = copy.deepcopy(best)
    again.transformer = AutoModel.from_pretrained(arguments.output / "transformer")
    again.load_state_dict(load_file(arguments.output / "ends.safetensors"), strict=False)
    assert measure(again.eval(), held_out) == figures
    print(report, *lines, f"Saved, loaded, and the same again: {arguments.output}", sep="\n")


if __name__ == "__main__":
    main()
