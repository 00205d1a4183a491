"""Why the softmax scale does not follow a width: logits and softmax under three scales, as dims are added (draft 004).

    OMP_NUM_THREADS=1 python scripts/bench/scale.py --model path/to/llama --text my_text.txt

Queries and keys with independent entries of unit variance, as the draft assumes them; a Llama with random weights of
that variance; and a pretrained model on a text, which shows the loss too. New dims are zero, as `widen` leaves them,
random, as large as the old ones, or (pretrained) guided, as `Grower` makes them with the kept scale.
"""

import copy
import statistics
from collections.abc import Callable
from functools import partial

import page
import torch
from compared import logit_variance
from tasks import Batches, chosen, task_parser
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import LlamaConfig, LlamaForCausalLM

from hf_growattn import GrowableAttention, Grower, GrowthConfig, patch_model
from hf_growattn.growable.models import attentions
from hf_growattn.measure.extension import set_extension
from hf_growattn.measure.passes import undisturbed

KEPT = "kept (ours)"
# The scale after growth, of the scale before it and both widths.
POLICIES: dict[str, Callable[[float, int, int], float]] = {
    KEPT: lambda scale, old, new: scale,
    "1 / sqrt(width) again": lambda scale, old, new: scale * (old / new) ** 0.5,
    "unscaled": lambda scale, old, new: 1.0,
}
HEAD, TOKENS = 16, 128  # of the first two sources
SEQUENCES = 2  # of a batch whose logits are looked at
ADDED = (0.0, 0.5, 1.0, 3.0)  # new dims, over the old ones
COLORS = dict(zip(POLICIES, ("C0", "C1", "0.5")))
STYLES = {"zero": "-", "random": "--", "guided": ":"}
QUANTITIES = {
    "variance": "Variance of a query's logits",
    "entropy": "Softmax entropy, over that of a uniform one",
    "loss": "Held-out loss, nats a token",
}


def describe(query: Tensor, key: Tensor, scale: float, causal: bool) -> dict[str, float]:
    """Variance of the logits and entropy of their softmax, each over the keys of a query, then the mean.

    Args:
        query: (batch, heads, tokens, width).
        key: the same shape.
        scale: the softmax scale.
        causal: whether queries see no later keys; queries that see a single key are left out then.
    """
    logits = (scale * query @ key.mT).float()
    tokens = logits.shape[-1]
    seen = torch.ones(tokens, tokens, dtype=torch.bool)
    seen = seen.tril()[1:] if causal else seen
    logits, counts = logits[..., -len(seen) :, :], seen.sum(-1)
    mean = (logits * seen).sum(-1, keepdim=True) / counts[:, None]
    variance = ((logits - mean).square() * seen).sum(-1) / (counts - 1)
    logs = logits.masked_fill(~seen, -torch.inf).log_softmax(-1)
    entropy = -(logs.exp() * logs.masked_fill(~seen, 0.0)).sum(-1)
    return {"variance": variance.mean().item(), "entropy": (entropy / counts.log()).mean().item()}


class Watch(nn.Module):
    """An extension that adds nothing and keeps the queries and keys as they are compared."""

    def forward(self, hidden_states: Tensor, query: Tensor, key: Tensor, value: Tensor):
        """Note queries and keys, (batch, heads, tokens, width)."""
        self.query, self.key = query, key
        return query, key, value


@torch.no_grad()
def watched(model: nn.Module, batches: Batches, policy: Callable) -> dict[str, float]:
    """Means over layers and batches of what `describe` says, and the loss, under a policy; the model stays as it is."""
    layers, found = attentions(model), []
    scales = [layer.scaling for layer in layers]
    with undisturbed(model):
        try:
            for layer, scale in zip(layers, scales):
                layer.scaling = policy(scale, layer.head_dim, layer.qk_head_dim)
                set_extension(layer, Watch())
            for batch in batches:
                loss = model(**batch).loss.item()
                found += [described(layer) | {"loss": loss} for layer in layers]
        finally:
            for layer, scale in zip(layers, scales):
                layer.scaling = scale
    return {name: statistics.mean(values[name] for values in found) for name in QUANTITIES}


def described(layer: GrowableAttention) -> dict[str, float]:
    """What `describe` says of a layer's last forward."""
    query, key = layer.extension.query[:SEQUENCES], layer.extension.key[:SEQUENCES]
    return describe(query, key.repeat_interleave(query.shape[1] // key.shape[1], 1), layer.scaling, causal=True)


def add(model: nn.Module, dims: int, new: str, growth: Batches, seed: int) -> nn.Module:
    """A copy of a patched model with new pattern dims in every layer: zero, random, or guided by growth batches."""
    model = copy.deepcopy(model)
    if new == "guided":
        if dims:
            Grower(model, GrowthConfig(qk_dims=dims)).grow(growth)
        return model
    generator = torch.Generator().manual_seed(seed)
    for layer in attentions(model):
        layer.widen(qk_dims=dims)
        for role in ("query", "key"):
            old, fresh = layer.weight_of(role).split((layer.head_dim, dims), dim=1)
            if new == "random":
                fresh.copy_(torch.randn(fresh.shape, generator=generator) * old.square().mean().sqrt())
    return model


def random_llama(seed: int) -> tuple[nn.Module, Batches]:
    """A Llama whose queries and keys have entries of unit variance, and a batch of random tokens."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=8,
        head_dim=HEAD,
        initializer_range=128**-0.5,
    )
    ids = torch.randint(512, (2, TOKENS))
    return patch_model(LlamaForCausalLM(config)).eval(), [{"input_ids": ids, "labels": ids}]


def of_entries(seed: int, added: list[float], name: str) -> list[dict]:
    """Independent entries, with what proposition 5 of the draft predicts."""
    generator, rows = torch.Generator().manual_seed(seed), []
    for dims in [round(HEAD * share) for share in added]:
        query, key = torch.randn(2, 1, 64, TOKENS, HEAD + dims, generator=generator)
        just_added = query * (torch.arange(HEAD + dims) < HEAD)
        for new, queries in (("zero", just_added), ("random", query)):
            for policy, scale_of in POLICIES.items():
                scale = scale_of(HEAD**-0.5, HEAD, HEAD + dims)
                predicted = logit_variance(HEAD, dims, float(new == "random")) * scale**2 * HEAD
                row = {"source": name, "new": new, "dims": dims, "policy": policy, "seed": seed, "predicted": predicted}
                rows.append(row | describe(queries, key, scale, causal=False))
    return rows


def of_model(model, growth, fresh, seed: int, added: list[float], name: str, kinds: tuple[str, ...]) -> list[dict]:
    """A model, on fresh batches."""
    rows = []
    for new in kinds:
        for dims in [round(attentions(model)[0].head_dim * share) for share in added]:
            grown = add(model, dims, new, growth, seed)
            for policy, scale in POLICIES.items():
                row = {"source": name, "new": new, "dims": dims, "policy": policy, "seed": seed}
                rows.append(row | watched(grown, fresh, scale))
    return rows


def middle(rows: list[dict], quantity: str, **where) -> float:
    """Median over the seeds."""
    return statistics.median(r[quantity] for r in rows if all(r[key] == value for key, value in where.items()))


def shown(rows: list[dict], source: str) -> list[str]:
    """The quantities that a source shows: the loss is none of random weights."""
    present = next(row for row in rows if row["source"] == source)
    return [q for q in QUANTITIES if q in present and not (q == "loss" and "random weights" in source)]


def values_of(rows: list[dict], source: str, name: str) -> list:
    """The distinct values of a field in a source's rows, in order."""
    return list(dict.fromkeys(row[name] for row in rows if row["source"] == source))


def tables(rows: list[dict]) -> str:
    """The page: for each source and quantity a table by new dims, policy and their number."""
    text = []
    for source in dict.fromkeys(row["source"] for row in rows):
        dims = values_of(rows, source, "dims")
        text.append(f"## {source[0].upper()}{source[1:]}\n")
        for quantity in shown(rows, source):
            lines = []
            for new in values_of(rows, source, "new"):
                for policy in POLICIES:
                    where = [dict(source=source, new=new, policy=policy, dims=number) for number in dims]
                    lines.append([new, policy, *(cell(rows, quantity, **w) for w in where)])
            shown_table = page.table(["new dims", "scale", *dims], lines)
            text.append(f"{QUANTITIES[quantity]}, by number of new dims:\n\n{shown_table}\n")
    return "\n".join(text)


def cell(rows: list[dict], quantity: str, **where) -> str:
    """A figure, with the predicted one in brackets where there is one."""
    value = f"{middle(rows, quantity, **where):.3f}"
    predicted = quantity == "variance" and any("predicted" in r for r in rows if r["source"] == where["source"])
    return f"{value} ({middle(rows, 'predicted', **where):.3f})" if predicted else value


def summary(rows: list[dict], source: str) -> str:
    """Each quantity of one source without new dims, and with the most of them, by policy and kind."""
    most, lines = max(values_of(rows, source, "dims")), []
    for new in values_of(rows, source, "new"):
        for policy in POLICIES:
            cells = [f"{middle(rows, q, source=source, new=new, policy=policy, dims=most):.3f}" for q in QUANTITIES]
            lines.append([f"{most} {new}", policy, *cells])
    before = [f"{middle(rows, q, source=source, policy=KEPT, dims=0):.3f}" for q in QUANTITIES]
    return page.table(["new dims", "scale", *QUANTITIES.values()], [["none", KEPT, *before], *lines])


def claim(rows: list[dict], source: str) -> str:
    """What each policy does to the loss when dims of zero are added, before anything is learned."""
    most = max(values_of(rows, source, "dims"))
    zero = {p: middle(rows, "loss", source=source, new="zero", policy=p, dims=most) for p in POLICIES}
    before = middle(rows, "loss", source=source, new="zero", policy=KEPT, dims=0)
    changes = ", ".join(f"{policy} {loss - before:+.3f}" for policy, loss in zero.items())
    return f"{most} dims of zero in every head change the loss ({source}) by: {changes} nats."


def draw(rows: list[dict], plt):
    """A column for each source, a row for each quantity; colours are policies, line styles kinds of new dims."""
    sources = list(dict.fromkeys(row["source"] for row in rows))
    size = (4.2 * len(sources), 2.7 * len(QUANTITIES))
    figure, panels = plt.subplots(len(QUANTITIES), len(sources), figsize=size, layout="constrained", squeeze=False)
    for column, source in enumerate(sources):
        dims = values_of(rows, source, "dims")
        for quantity, panel in zip(QUANTITIES, panels[:, column]):
            if quantity not in shown(rows, source):
                panel.set_visible(False)
                continue
            for new in values_of(rows, source, "new"):
                for policy in POLICIES:
                    line = [middle(rows, quantity, source=source, new=new, policy=policy, dims=d) for d in dims]
                    panel.plot(dims, line, STYLES[new], color=COLORS[policy], label=f"{policy}, {new}", marker=".")
            panel.set(xlabel="new dims a head", ylabel=QUANTITIES[quantity].replace(", ", ",\n"))
            if quantity == "variance":
                panel.set(title=source, yscale="log")
    figure.legend(*panels[0, -1].get_legend_handles_labels(), loc="outside right upper", fontsize=8, handlelength=4)
    return figure


def page_of(figures: dict) -> page.Page:
    """The page, out of its figures."""
    setting, rows = figures["setting"], page.in_rows(figures["rows"])
    text = (
        "Medians over the seeds. In brackets: what proposition 5 of draft 004 predicts. Variance and entropy are taken "
        "over the keys that a query may attend to, and averaged over queries, heads and layers. Random new dims are as "
        f"large as the old ones. A pretrained model grows on {setting['batches']} batches of "
        f"{setting['batch_size']} x {setting['block_size']} tokens, with the scale kept; "
        f"its loss is that of as many held-out ones, the other figures of {SEQUENCES} sequences of each.\n\n"
    )
    return page.Page(
        title="The softmax scale as dims are added",
        claim=claim(rows, setting["data"]),
        summary=summary(rows, setting["data"]),
        text=text + tables(rows),
        draw=partial(draw, rows),
    )


def main() -> None:
    """Measure, and write the page."""
    arguments, task = chosen(task_parser(__doc__))
    added = (0.0, 1.0) if arguments.quick else ADDED
    rows = []
    for seed in tqdm(arguments.seeds, desc="seeds", disable=None):
        rows += of_entries(seed, added, f"independent entries, heads {HEAD} wide")
        model, batch = random_llama(seed)
        rows += of_model(model, batch, batch, seed, added, "Llama, random weights", ("zero", "random"))
        rows += of_model(task.load(seed), *task.data(seed), seed, added, task.name, ("zero", "random", "guided"))
    rows = page.in_columns(rows, "seed", "predicted", *QUANTITIES)
    page.publish("scale", {"setting": task.setting(), "rows": rows}, arguments.seeds, arguments.output)


if __name__ == "__main__":
    main()
