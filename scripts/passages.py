"""Which passage did a damaged copy come from? The task of the demo and the tour, and a small model that can match.

64 passages of the documentation that every CPython carries stand in context, each with a label. A damaged copy of one
comes next, a third of whose words are those of other passages. The model is a transformer with heads 8 wide, first
trained on made-up records: width helps a model that can match already, and is held back by its width.
"""

from zlib import crc32

import torch
from texts import english
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot
from tqdm.auto import tqdm
from transformers import EuroBertConfig, EuroBertModel, get_cosine_schedule_with_warmup

ROWS, ASKED, FEATURES, EPISODES = 64, 32, 64, 4  # records in context, damaged copies, numbers of each, of a batch
WIDTH, LAYERS, HEAD = 64, 2, 8
WORDS, BUCKETS, DAMAGE = 40, 1024, 1 / 3  # of a passage, of its word counts, share of the words that are exchanged
ENDS = ["read_in", "classifier"]  # which learn the passages, whatever else trains


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


def train(model: nn.Module, batches: list, groups: list[dict], name: str) -> nn.Module:
    """AdamW with learning rates that rise and then fall to zero along a cosine."""
    optimizer, weights = torch.optim.AdamW(groups), [weight for group in groups for weight in group["params"]]
    schedule = get_cosine_schedule_with_warmup(optimizer, len(batches) // 10, len(batches))
    for batch in tqdm(batches, desc=name, leave=False):
        loss_of(model.train(), batch).backward()
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return model.eval()


@torch.no_grad()
def share_found(model: nn.Module, batches: list) -> float:
    """The share of damaged copies whose passage is found."""
    return torch.cat([model(*batch[:2]).argmax(-1) == batch[2] for batch in batches]).float().mean().item()


def make_base(steps: int, generator: torch.Generator) -> Matcher:
    """The matcher, trained on made-up records, fewer of them at first: it can match, as far as its width allows."""
    tokens = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "mask_token_id"), 0)
    sizes = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": LAYERS}
    sizes |= {"num_attention_heads": WIDTH // HEAD, "initializer_range": WIDTH**-0.5 / 2, "vocab_size": 1}
    base = Matcher(EuroBertModel(EuroBertConfig(**sizes, **tokens)))
    base.transformer.get_input_embeddings().weight.requires_grad_(False)  # records come as vectors
    rows = [ROWS // (8, 3, 1, 1)[4 * step // steps] for step in range(steps)]
    weights = [weight for weight in base.parameters() if weight.requires_grad]
    groups = [{"params": weights, "lr": 3e-3, "weight_decay": 0.0}]
    return train(base, [made_up(count, generator) for count in rows], groups, "made-up records")
