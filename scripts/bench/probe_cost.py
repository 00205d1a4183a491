"""What measuring for a growth costs: against training passes, and against other ways to measure as d and T grow.

    OMP_NUM_THREADS=1 python scripts/bench/probe_cost.py

Random weights, heads 64 wide. Memory is the most bytes of tensors held at a time, beside the model.
"""

import argparse
import contextlib
import copy
import gc
import importlib.util
import math
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import page
import torch
from compared import compared_gradients
from memory import peak_of_tensors
from runs import collect, spread
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from hf_growattn import Grower, GrowthConfig, patch_model
from hf_growattn.growable.models import attentions
from hf_growattn.measure import blocks, gradients
from hf_growattn.measure import functional as F
from hf_growattn.measure.blocks import measure_moments
from hf_growattn.measure.gradients import SKETCH_PASSES, exact_gradients, sketched_gradients
from hf_growattn.measure.kinds import MESSAGES, PATTERNS
from hf_growattn.measure.passes import backward, mean_loss, undisturbed

DIMS, OVERSAMPLING, RIDGE = 8, 16, 0.05
LAYERS, BATCH = 2, 2  # of the growths; the ways to measure see one layer and two sequences


def build(width: int, layers: int, batch: int, tokens: int) -> tuple[nn.Module, dict[str, Tensor]]:
    """A patched Llama with heads 64 wide and random weights, and a batch."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=width,
        intermediate_size=width * 8 // 3,
        num_hidden_layers=layers,
        num_attention_heads=max(width // 64, 1),
        head_dim=64,
        max_position_embeddings=tokens,
    )
    ids = torch.randint(0, config.vocab_size, (batch, tokens))
    return patch_model(LlamaForCausalLM(config)).train(), {"input_ids": ids, "labels": ids}


def timed(action: Callable) -> float:
    """CPU seconds of one call."""
    start = time.process_time()
    action()
    return time.process_time() - start


@contextlib.contextmanager
def clocked(module, name: str):
    """Count the CPU seconds spent in a function of a module, wherever the module calls it."""
    original, spent = getattr(module, name), [0.0]

    def counting(*args, **kwargs):
        start = time.process_time()
        result = original(*args, **kwargs)
        spent[0] += time.process_time() - start
        return result

    setattr(module, name, counting)
    try:
        yield spent
    finally:
        setattr(module, name, original)


def growths(width: int, tokens: int, repeats: int, **_) -> dict:
    """A growth beside training: seconds of its passes, of the same without probes, of its linear algebra; peaks."""
    model, batch = build(width, LAYERS, BATCH, tokens)
    layers, both = attentions(model), [batch, batch]
    config = GrowthConfig(qk_dims=DIMS, v_dims=DIMS)

    def plain() -> None:
        """One forward pass and three there and back for each half, weights frozen as they are under the probe."""
        embeddings = model.get_input_embeddings()
        hook = embeddings.register_forward_hook(lambda module, args, output: output.requires_grad_())
        with undisturbed(model):
            mean_loss(model, both)
            for _ in SKETCH_PASSES:
                backward(model, both)
        hook.remove()

    def training() -> None:
        """The same with gradients of all weights, as a training step has them."""
        mean_loss(model, both)
        for _ in range(2 * len(SKETCH_PASSES)):
            model(**batch).loss.backward()
        model.zero_grad(set_to_none=True)

    def measured() -> None:
        with undisturbed(model):
            found, _ = measure_moments(model, layers, [PATTERNS, MESSAGES], both, RIDGE)
            sketched_gradients(model, found, ([batch], [batch]), DIMS, OVERSAMPLING, 0)

    def step() -> None:
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    seconds: dict[str, list[float]] = {}
    for repeat in range(repeats + 1):
        found = {"plain": timed(plain), "training": timed(training)}
        with clocked(blocks, "batch_loss") as forward, clocked(gradients, "backward") as there_and_back:
            total = timed(measured)
        found["probed"] = forward[0] + there_and_back[0]
        grower = Grower(copy.deepcopy(model), config)
        start = time.process_time()
        report = grower.grow(both)
        found["growth"] = time.process_time() - start
        found["solving"] = total - found["probed"] + report.seconds["solving"]
        for name, value in found.items() if repeat else ():  # the first warms up
            seconds.setdefault(name, []).append(value)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    step()
    peaks = {"training": peak_of_tensors(step)}
    peaks["growth"] = peak_of_tensors(lambda: Grower(model, config, optimizer).grow(both))
    return {"times": seconds, "peaks": peaks}


def probe(model: nn.Module, batches: list[dict]) -> None:
    """What `Grower` does: second moments, then a randomized SVD of the whitened gradient through the probe."""
    found, _ = measure_moments(model, attentions(model), [PATTERNS], batches, RIDGE)
    sketched_gradients(model, found, (batches[:1], batches[1:]), DIMS, OVERSAMPLING, 0)


def whole(estimator: str, model: nn.Module, batches: list[dict]) -> None:
    """The whole gradient, d x d for each head, and directions from that."""
    found, _ = measure_moments(model, attentions(model), [PATTERNS], batches, RIDGE)
    halves = (batches[:1], batches[1:])
    if estimator == "whitened":
        exact_gradients(model, found, halves, DIMS)
    else:
        compared_gradients(estimator, model, found, halves, DIMS, RIDGE, 0)


def drafted(model: nn.Module, batches: list[dict]) -> None:
    """Draft 000 to the letter: `G` of the logits, T x T for each head, then `X^+ G X^+T`, d x d, then its SVD."""
    kept: dict[nn.Module, list[Tensor]] = {}

    def attend(module, query, key, value, attention_mask, scaling, **_):
        logits = query @ key.mT * scaling + attention_mask
        if not logits.requires_grad:
            logits.requires_grad_()
        logits.retain_grad()
        kept[module].append(logits)
        return (logits.softmax(-1) @ value).transpose(1, 2), None

    model.set_attn_implementation("eager")
    hooks = []
    for layer in attentions(model):
        layer.eager_attention = attend
        keep = lambda module, args, kwargs: kept.update({module: [kwargs["hidden_states"]]})  # noqa: E731
        hooks.append(layer.register_forward_pre_hook(keep, with_kwargs=True))
    moments, targets = {}, {}
    for batch in batches:
        backward(model, [batch])
        for layer, (inputs, logits) in kept.items():
            x = inputs.detach()[:, None]
            moments[layer] = moments.get(layer, 0) + F.moment_sum(inputs.detach())
            targets[layer] = targets.get(layer, 0) + (x.mT @ logits.grad @ x).sum(0)
        kept.clear()
    for layer, target in targets.items():
        _, whitening = F.square_roots(F.ridged(moments[layer], RIDGE))
        inverse = whitening @ whitening
        F.best_directions(inverse @ target @ inverse, DIMS)
    for hook in hooks:
        hook.remove()


def gromo(model: nn.Module, batches: list[dict]) -> None:
    """Statistics S and M of gromo for one Linear, d to d, in the place of the queries' projection."""
    from gromo.modules.linear_growing_module import LinearGrowingModule

    width = model.config.hidden_size
    growing = [LinearGrowingModule(width, width, use_bias=False) for _ in attentions(model)]
    for layer, module in zip(attentions(model), growing):
        layer.q_proj = module
        module.init_computation()
    for batch in batches:
        model(**batch).loss.backward()
        for module in growing:
            module.tensor_s.update()
            module.tensor_m.update()
        model.zero_grad(set_to_none=True)
    for module in growing:
        module.tensor_s(), module.tensor_m()


def training(model: nn.Module, batches: list[dict]) -> None:
    """The yardstick: one forward and backward pass with gradients of all weights."""
    model.requires_grad_(True)
    for batch in batches:
        model(**batch).loss.backward()
    model.zero_grad(set_to_none=True)


OURS, GROMO = "probe (ours)", "gromo's S and M of a Linear"
LETTER, POOLED = "T x T (drafts, to the letter)", "pooled-truncated (drafts)"
COMPARED = (GROMO, POOLED, LETTER)  # in the claim
WAYS: dict[str, Callable] = {
    "training passes": training,
    GROMO: gromo,
    OURS: probe,
    "whole gradient (ours, exact)": partial(whole, "whitened"),
    POOLED: partial(whole, "pooled-truncated"),
    "per-sequence (drafts)": partial(whole, "per-sequence"),
    LETTER: drafted,
}


def ways(way: str, width: int, tokens: int, repeats: int, **_) -> dict:
    """Median CPU seconds and peak bytes of one way to measure two sequences."""
    model, batch = build(width, 1, 1, tokens)
    action = partial(WAYS[way], model, [batch, batch])
    with undisturbed(model):
        seconds = [timed(action) for _ in range(repeats + 1)][1:]
        return {"cpu": statistics.median(seconds), "peak": peak_of_tensors(action)}


def slope(points: list[tuple[float, float]]) -> float:
    """Exponent of a power law through points, by least squares of the logarithms."""
    xs, ys = ([math.log(point[axis]) for point in points] for axis in (0, 1))
    return statistics.linear_regression(xs, ys).slope


def curve(runs: list[dict], way: str, axis: str, quantity: str, fixed: int) -> list[tuple[float, float]]:
    """What one way takes along "width" or "tokens", the other one fixed."""
    other = "tokens" if axis == "width" else "width"
    return sorted((run[axis], run[quantity]) for run in runs if run["way"] == way and run[other] == fixed)


QUANTITIES = {"cpu": "CPU seconds", "peak": "peak, bytes"}
AXES = {"width": "d", "tokens": "T"}


def summary(runs: list[dict], names: list[str], base: dict[str, int]) -> str:
    """Time and memory at the largest d and at the largest T, and how they grow."""
    rows = []
    for way in names:
        cells = []
        for axis in AXES:
            fixed = base["tokens" if axis == "width" else "width"]
            for quantity, scale in (("cpu", 1e3), ("peak", 1e-6)):
                points = curve(runs, way, axis, quantity, fixed)
                cells.append(f"{points[-1][1] * scale:.0f} (^{slope(points):.1f})")
        rows.append([way, *cells])
    tops = {axis: max(run[axis] for run in runs) for axis in AXES}
    head = [f"{what}, {AXES[axis]} {tops[axis]}" for axis in AXES for what in ("ms", "peak MB")]
    return page.table(["way to measure", *head], rows)


def claim(grown: list[dict], runs: list[dict], names: list[str], base: dict[str, int]) -> str:
    """Ours against training passes, gromo and two of the drafts, where d and where T is largest."""
    ratios = [a / b for g in grown for a, b in zip(g["times"]["probed"], g["times"]["training"])]
    text = f"The probe's passes take {spread(ratios, 2)} times the CPU time of as many training passes. "
    for axis, letter in AXES.items():
        fixed = base["tokens" if axis == "width" else "width"]
        ends = {way: [curve(runs, way, axis, quantity, fixed)[-1] for quantity in QUANTITIES] for way in names}
        (top, seconds), (_, held) = ends.pop(OURS)
        parts = [
            f"{way} {cpu / seconds:.2f} times the time and {peak / held:.2f} times the memory"
            for way, ((_, cpu), (_, peak)) in ends.items()
            if way in COMPARED
        ]
        text += f"At {letter} = {top}, of what it takes: {', '.join(parts)}. "
    return text.strip()


def growth_table(grown: list[dict]) -> str:
    """A growth beside training, by width."""
    pairs = (("probed", "plain"), ("probed", "training"), ("solving", "growth"))
    rows = []
    for run in grown:
        times = run["times"]
        cells = [spread([a / b for a, b in zip(times[one], times[other])], 2) for one, other in pairs]
        rows.append([run["width"], *cells, f"{run['peaks']['growth'] / run['peaks']['training']:.2f}"])
    head = ["d", "passes / same without probes", "/ same of training", "solving, share of a growth", "peak / training"]
    return page.table(head, rows)


def draw(runs: list[dict], names: list[str], base: dict[str, int], plt):
    """Time above, memory below; by d on the left, by T on the right; both axes logarithmic."""
    figure, panels = plt.subplots(2, 2, figsize=(9, 6.5), layout="constrained", sharey="row")
    for column, (axis, letter) in enumerate(AXES.items()):
        fixed = base["tokens" if axis == "width" else "width"]
        for row, (quantity, label) in enumerate(QUANTITIES.items()):
            for way in names:
                style = "--" if way in ("training passes", GROMO) else "-"
                panels[row, column].loglog(*zip(*curve(runs, way, axis, quantity, fixed)), f"o{style}", label=way)
            sizes = [size for size, _ in curve(runs, OURS, axis, quantity, fixed)]
            panels[row, column].set_xticks(sizes, sizes)
            panels[row, column].minorticks_off()
            panels[row, column].set(xlabel=letter, ylabel=label if column == 0 else "")
        panels[0, column].set_title(f"{'T' if axis == 'width' else 'd'} = {fixed}")
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8)
    return figure


def page_of(figures: dict) -> page.Page:
    """The page, out of its figures."""
    setting, runs, grown = figures["setting"], figures["ways"], figures["growths"]
    base, repeats, names = setting["base"], setting["repeats"], list(dict.fromkeys(run["way"] for run in runs))
    missing = "" if GROMO in names else "The package gromo is not installed, so its row is left out. "
    return page.Page(
        title="What measuring costs",
        claim=claim(grown, runs, names, base),
        summary=summary(runs, names, base),
        text=(
            f"One layer, heads 64 wide, two sequences of T tokens, patterns alone, {DIMS} dims; CPU time is the median "
            f"of {repeats}, and memory the most bytes of tensors at a time, beside the model. By d at T = "
            f"{base['tokens']}, by T at d = {base['width']}; in brackets the exponents of a power law through all "
            f"points. {missing}gromo's is not the same job: for one Linear, d to d, in the place of the queries' "
            "projection, it sums what its own growth of neurons starts from, S = X^T X and M = X^T dY, and chooses no "
            "directions; the others do, for all heads, and say what they are worth on other batches, but for the one "
            "to the letter, which says nothing of that.\n\n"
            f"A growth of both kinds by {DIMS} dims beside training, {LAYERS} layers, batches of {BATCH} x "
            f"{setting['grown_tokens']} tokens, AdamW: CPU time of the passes that measure against the same passes "
            "without probes and against as many with gradients of all weights; how much of a growth is linear algebra; "
            f"and the most bytes of tensors in a growth over those in a training step. Median (range) of "
            f"{repeats}:\n\n{growth_table(grown)}"
        ),
        draw=partial(draw, runs, names, base),
    )


def main() -> None:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 128, 256, 512], help="d, in ascending order")
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 256, 512, 1024, 2048], help="T, likewise")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, default=page.RESULTS)
    parser.add_argument("--quick", action="store_true", help="two tiny sizes: shows that it runs")
    arguments = parser.parse_args()
    widths, tokens, repeats, grown_at = arguments.widths, arguments.tokens, arguments.repeats, ([256, 512], 512)
    if arguments.quick:
        widths, tokens, repeats, grown_at = [64, 128], [32, 64], 1, ([128], 32)
    base = {"width": widths[1], "tokens": tokens[1]}
    arguments.output.mkdir(parents=True, exist_ok=True)
    kept = arguments.output / "probe_cost.jsonl"
    names = [way for way in WAYS if way != GROMO or importlib.util.find_spec("gromo")]
    sizes = dict.fromkeys([(w, base["tokens"]) for w in widths] + [(base["width"], t) for t in tokens])
    jobs = [dict(way=way, width=w, tokens=t, repeats=repeats) for w, t in sizes for way in names]
    gc.freeze()  # what imports leave is no garbage, and each process would look through it
    runs = collect(ways, jobs, kept)
    jobs = [dict(way="growth", width=width, tokens=grown_at[1], repeats=repeats) for width in grown_at[0]]
    grown = collect(growths, jobs, kept)
    figures = {
        "setting": {"base": base, "repeats": repeats, "grown_tokens": grown_at[1]},
        "ways": page.kept(runs, "way", "width", "tokens", "cpu", "peak"),
        "growths": page.kept(grown, "width", "times", "peaks"),
    }
    page.publish("probe_cost", figures, [0], arguments.output, sum(run["seconds"] for run in [*runs, *grown]))


if __name__ == "__main__":
    main()
