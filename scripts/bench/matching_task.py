"""Records in context: labelled rows of a table, and further rows to be labelled like them. The task and its model."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from fit import fit
from neighbours import at_length_one, best_loss, logistic_regression_loss, matched_pairs, shared_directions
from safetensors.torch import load_model, save_model
from tables import EMBEDDINGS, MOST_FEATURES, SENTENCES, Table, read_embeddings, read_table
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot, pad
from transformers import EuroBertConfig, EuroBertForTokenClassification

from hf_growattn import patch_model
from hf_growattn.training.methods import weights_of_rank_one

MATCH, CLASSIFY = "match", "classify"
NEAREST, COSINE, LOGISTIC = "nearest neighbours", "cosine", "logistic regression"
MOST_CLASSES = 26  # of a synthetic table
TUNING_SEED = 100  # of the batches that neighbours are fitted to


@dataclass(frozen=True)
class Records:
    """Rows with labels, then rows without. The labels mean something else in each episode.

    Attributes:
        steps: of a race.
        growth_batches: that a growth looks at.
        kind: to "match" a row with the one that it is a corrupted copy of, whose label is its own, or to "classify".
        table: one of `tables.SOURCES`, or embeddings or sentences; `encoder` and `pairs` say what is embedded.
        components: of the table, see `tables.read_table`.
        d, layers: of the model.
        width: of queries, keys and values; there are `d / width` heads.
        rows, asked: with labels and without in an episode.
        corrupted: share of a row's features that are those of other rows.
        episodes: of a batch.
        held_out: episodes to measure on.
        rank: of LoRA on all linear layers, whose weights are the budget.
        pretraining: steps on synthetic tables, at `pretraining_rate`.
    """

    steps: int = 200
    growth_batches: int = 8
    kind: str = MATCH
    table: str = "digits"
    components: int = 0
    encoder: str = ""
    pairs: str = ""
    d: int = 64
    layers: int = 2
    width: int = 8
    rows: int = 64
    asked: int = 32
    labels: int = 64
    corrupted: float = 0.3
    episodes: int = 4
    held_out: int = 32
    rank: int = 6
    pretraining: int = 2400
    pretraining_rate: float = 3e-3

    @property
    def name(self) -> str:
        """What tables call it."""
        given = "" if self.rows == Records.rows else f", {self.rows} rows given"
        heads = f"{self.d // self.width} heads {self.width} wide"
        return f"{self.kind} {self.table}, {self.features} features, {heads}{given}"

    def without_training(self) -> dict[str, float]:
        """Nearest neighbours in a fitted metric and by cosine, and a logistic regression on the rows given."""
        directions = shared_directions(self.pairs_of_rows())
        seen = [self.batch(TUNING_SEED, step) for step in range(self.growth_batches)]
        batches = list(self.held_out_batches())
        return {
            NEAREST: best_loss(seen, batches, directions, self.labels),
            COSINE: best_loss(at_length_one(seen), at_length_one(batches), torch.eye(self.features), self.labels),
            LOGISTIC: logistic_regression_loss(batches),
        }

    @property
    def features(self) -> int:
        """Of a row."""
        return self.split(held_out=False).features.shape[1]

    def split(self, held_out: bool) -> Table:
        """The rows for training, or the others."""
        if self.encoder:
            return read_embeddings(self.encoder, self.pairs)[held_out]
        return read_table(self.table, self.components)[held_out]

    def batch(self, seed: int, step: int) -> dict:
        """Episodes of rows for training."""
        generator = torch.Generator().manual_seed((1000 + seed) * 100_003 + step)
        return self.draw(self.split(held_out=False), self.episodes, generator)

    def pairs_of_rows(self) -> Tensor:
        """Rows for training that share a label, (pairs, 2, features)."""
        batches = [self.batch(TUNING_SEED, step) for step in range(self.growth_batches)]
        return torch.cat([matched_pairs(batch) for batch in batches])

    def held_out_batches(self) -> Iterator[dict]:
        """Episodes of the other rows."""
        generator = torch.Generator().manual_seed(2000)
        for _ in range(self.held_out // self.episodes):
            yield self.draw(self.split(held_out=True), self.episodes, generator)

    def draw(self, table: Table, episodes: int, generator: torch.Generator) -> dict[str, Tensor]:
        """Rows and their labels, then rows that are asked for.

        Returns:
            `rows` (episodes, rows + asked, features), `given` (episodes, rows), and `labels` (episodes, asked), which
            are -100 for classes that no row given has.
        """
        order = [torch.randperm(len(table.features), generator=generator) for _ in range(episodes)]
        chosen = torch.stack(order)[:, : self.rows + self.asked]
        shown, asked = chosen.split([self.rows, self.asked], 1)
        names = torch.stack([torch.randperm(self.labels, generator=generator) for _ in range(episodes)])
        if self.kind == MATCH:
            asked = shown[:, : self.asked]
            given, labels = names[:, : self.rows], names[:, : self.asked]
        else:
            names = torch.stack([torch.randperm(int(table.classes.max()) + 1, generator=generator) for _ in order])
            given, labels = names.gather(1, table.classes[shown]), names.gather(1, table.classes[asked])
            is_known = (labels[..., None] == given[:, None]).any(-1)
            labels = torch.where(is_known, labels, -100)
        queries = table.others[asked]
        if self.kind == MATCH and self.table not in (EMBEDDINGS, SENTENCES):
            queries = corrupt(queries, table.features, self.corrupted, generator)
        return {"rows": torch.cat((table.features[shown], queries), 1), "given": given, "labels": labels}

    def logits(self, model: nn.Module, batch: dict) -> Tensor:
        """The scores of labels for the rows asked for, (episodes, asked, rows)."""
        rows, given = batch["rows"], batch["given"]
        _, length, count = rows.shape
        padded = pad(rows * (MOST_FEATURES / count) ** 0.5, (0, MOST_FEATURES - count))
        labels = pad(one_hot(given, self.labels).to(rows), (0, 0, 0, length - given.shape[1]))
        tokens = model.read_in(torch.cat((padded, labels), -1))
        mask = (torch.arange(length) < given.shape[1]).long().expand(len(tokens), -1)  # rows asked for are no keys
        places = torch.zeros(1, length, dtype=torch.long)  # all the same: the order of rows means nothing
        found = model(inputs_embeds=tokens, attention_mask=mask, position_ids=places)
        return found.logits[:, given.shape[1] :]

    def loss(self, model: nn.Module, batch: dict) -> Tensor:
        """Of the labels of the rows asked for."""
        return cross_entropy(self.logits(model, batch).flatten(0, 1), batch["labels"].flatten())

    def budget(self, model: nn.Module) -> int:
        """Weights of LoRA on all linear layers, read-in and head among them."""
        return self.rank * weights_of_rank_one(model, {})

    def model(self, kept: Path) -> nn.Module:
        """The model, trained on synthetic tables by the first call, which keeps it in a folder for all tables."""
        base = replace(self, table="", encoder="")
        model, file = build(base), kept / f"reader-{self.width}-{self.d}.safetensors"
        if not file.exists():
            weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
            groups = [{"params": weights, "lr": self.pretraining_rate}]
            fit(model, groups, synthetic_batches(base), base.loss, self.pretraining, warmup=0.0)
            kept.mkdir(parents=True, exist_ok=True)
            save_model(model, str(file))
        load_model(model, file)
        return patch_model(model.eval())


def corrupt(rows: Tensor, table: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """Rows, a share of whose features are those of other rows of a table."""
    drawn = torch.randint(len(table), rows.shape, generator=generator)
    others = table.gather(0, drawn.flatten(0, -2)).view_as(rows)
    return torch.where(torch.rand(rows.shape, generator=generator) < share, others, rows)


def build(task: Records) -> EuroBertForTokenClassification:
    """An encoder with a linear read-in of features and labels."""
    torch.manual_seed(0)
    config = EuroBertConfig(
        vocab_size=1,
        hidden_size=task.d,
        intermediate_size=2 * task.d,
        num_hidden_layers=task.layers,
        num_attention_heads=task.d // task.width,
        head_dim=task.width,
        num_labels=task.labels,
        initializer_range=task.d**-0.5 / 2,
        use_cache=False,
        attn_implementation="eager",  # faster than sdpa on sequences this short
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id", "mask_token_id"), 0),
    )
    model = EuroBertForTokenClassification(config)
    model.read_in = nn.Linear(MOST_FEATURES + task.labels, task.d)
    with torch.no_grad():
        nn.init.normal_(model.read_in.weight, std=task.d**-0.5)
        model.classifier.weight.copy_(model.read_in.weight[:, MOST_FEATURES:].T)  # labels are read as they are written
    model.get_input_embeddings().weight.requires_grad_(False)
    return model


def synthetic_batches(task: Records) -> Iterator[dict]:
    """Tables of random functions of a few causes, to be matched and to be classified in turn.

    Episodes of few rows come first: among many rows, a model takes much longer to begin to match.
    """
    generator = torch.Generator().manual_seed(0)
    for step in range(task.pretraining):
        rows = max(task.rows // (8, 3, 1, 1)[4 * step // task.pretraining], 1)
        sized = replace(task, kind=(MATCH, CLASSIFY)[step % 2], rows=rows, asked=max(rows // 2, 1))
        yield synthetic(sized, generator)


def synthetic(task: Records, generator: torch.Generator) -> dict:
    """A batch of one episode for each of some random tables."""

    def between(least: int, most: int) -> int:
        return int(torch.randint(least, most + 1, (1,), generator=generator))

    count, features = task.rows + task.asked, between(4, MOST_FEATURES)
    causes, classes = between(2, features), between(2, min(MOST_CLASSES, task.rows))
    belongs = torch.randint(classes, (task.episodes, count), generator=generator)
    centres = torch.randn(task.episodes, classes, causes, generator=generator)
    hidden = torch.randn(task.episodes, count, causes, generator=generator)
    hidden = hidden + 2 * centres.gather(1, belongs[..., None].expand(-1, -1, causes))
    mixing = torch.randn(task.episodes, causes, features, generator=generator) / causes**0.5
    noise = torch.randn(task.episodes, count, features, generator=generator)
    rows = torch.tanh(hidden @ mixing) + 0.3 * noise
    rows = (rows - rows.mean(1, keepdim=True)) / rows.std(1, keepdim=True)
    episodes = []
    for number in range(task.episodes):
        table = Table(rows[number], belongs[number], rows[number])
        episodes.append(task.draw(table, 1, generator))
    return {name: torch.cat([episode[name] for episode in episodes]) for name in episodes[0]}
