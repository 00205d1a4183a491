"""What a fine-tuning with growth gave: its figures, as a file, a table and a picture."""

import io
import json
from itertools import pairwise
from pathlib import Path

from rich.console import Console
from rich.table import Table

from hf_growattn.modeling import attentions
from hf_growattn.report import grown_layers

BEFORE, AFTER, SECONDS = "growth_held_out_before", "growth_held_out_after", "growth_seconds"

_WITH, _WITHOUT, _PATTERNS, _MESSAGES = "#1f77b4", "#8a8a8a", "#1f77b4", "#ff9f43"


def size_of(model) -> dict:
    """The parameters of a model, and the widths of its layers."""
    layers = attentions(model)
    return {
        "parameters": model.num_parameters(),
        "qk_head_dim": [layer.qk_head_dim for layer in layers],
        "v_head_dim": [layer.v_head_dim for layer in layers],
    }


def source_of(base_model: str, dataset: str) -> dict:
    """What the training started from, for the model card: Hub ids, or whole paths that cannot be taken for one."""
    names = {"base_model": base_model, "dataset": dataset}
    return {key: str(Path(name).resolve()) if name and Path(name).exists() else name for key, name in names.items()}


def figures(source: dict, grown: list[dict], plain: list[dict] | None, before: dict, after: dict, seconds, difference):
    """Gather all figures as one dict for JSON.

    Args:
        source: `source_of` the training.
        grown, plain: log histories of the training with growth, and of the one without.
        before, after: `size_of` the model.
        seconds: wall time of the training with growth, since it was started or resumed, without the growths.
        difference: largest difference of the logits after reloading.
    """
    growths = _growths(grown)
    return {
        **source,
        "with_growth": _curves(grown),
        "without_growth": plain and _curves(plain),
        "growths": growths,
        "before": before,
        "after": after,
        "seconds": {"growing": sum(growth["seconds"] for growth in growths), "training": seconds},
        "reloaded_difference": difference,
    }


def _curves(history: list[dict]) -> dict:
    """Losses as [step, loss]; a growth's step has two held-out ones."""
    held_out: list[list] = []
    for entry in history:
        for name in (BEFORE, AFTER, "eval_loss"):
            if name in entry and [entry["step"], entry[name]] not in held_out[-1:]:
                held_out.append([entry["step"], entry[name]])
    return {"training": [[entry["step"], entry["loss"]] for entry in history if "loss" in entry], "held_out": held_out}


def _growths(history: list[dict]) -> list[dict]:
    growths = []
    for entry, measured in pairwise(history):
        if AFTER in measured:
            growths.append(
                {
                    "step": entry["step"],
                    "held_out": [measured[BEFORE], measured[AFTER]],
                    "growth_batches": [entry["growth_loss_before"], entry["growth_loss_after"]],
                    "added_parameters": entry["growth_added_parameters"],
                    "layers": grown_layers(entry),
                    "seconds": measured[SECONDS],
                }
            )
    return growths


def write(figures: dict, output: Path) -> None:
    """Leave `figures.json` and `growth.png`."""
    (output / "figures.json").write_text(json.dumps(figures, indent=1))
    picture(figures, output / "growth.png")


def summary(figures: dict, output: Path) -> str:
    """What a user wants to know at the end."""
    table = Table("held-out loss", "with growth", *(["without growth"] if figures["without_growth"] else []))
    grown = figures["with_growth"]["held_out"]
    plain = dict(figures["without_growth"]["held_out"]) if figures["without_growth"] else {}
    rows = [("start", *grown[0])]
    for growth in figures["growths"]:
        rows += [
            (f"{when} growth", growth["step"], loss) for when, loss in zip(("before", "after"), growth["held_out"])
        ]
    for when, step, loss in [*rows, ("end", *grown[-1])]:
        beside = [f"{plain[step]:.4f}" if step in plain else "-"] if plain else []
        table.add_row(f"step {step}, {when}", f"{loss:.4f}", *beside)
    text = io.StringIO()
    Console(file=text, width=110).print(table)
    before, after, seconds = figures["before"], figures["after"], figures["seconds"]
    share = after["parameters"] / before["parameters"] - 1
    lines = [f"Parameters: {before['parameters']:,} -> {after['parameters']:,} ({share:+.1%})."]
    for name, what in (("qk_head_dim", "queries and keys"), ("v_head_dim", "values")):
        widths = [" ".join(map(str, size[name])) for size in (before, after)]
        lines.append(f"Widths of {what}, by layer: {' -> '.join(dict.fromkeys(widths))}.")
    lines += [
        f"Time: growing {seconds['growing']:.0f} s, training and evaluating since the last start "
        f"{seconds['training']:.0f} s.",
        f"Reloaded in a fresh process: largest difference of the logits {figures['reloaded_difference']:.2e}.",
        f"Checkpoint, growth.png and figures.json: {output}.",
    ]
    return text.getvalue() + "\n".join(lines)


def picture(figures: dict, path: Path) -> None:
    """Draw the losses by step, the lead of the grown model, and the validated gains of the last growth, into a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import MaxNLocator

    style = {
        "font.size": 9,
        "axes.titlesize": 10,
        "axes.titlelocation": "left",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": "#e6e6e6",
        "legend.edgecolor": "none",
        "legend.fancybox": False,
    }
    draw = [_draw_losses, *([_draw_lead] if figures["without_growth"] else []), _draw_gains]
    with plt.rc_context(style):
        figure, panels = plt.subplots(1, len(draw), figsize=(4.4 * len(draw), 3.5), layout="constrained")
        for panel, fill in zip(panels, draw):
            panel.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
            fill(panel, figures)
        figure.savefig(path, dpi=110)
        plt.close(figure)


def _mark_growths(panel, figures: dict) -> None:
    for growth in figures["growths"]:
        panel.axvline(growth["step"], color=_WITH, linestyle=":", linewidth=1.2, label="growth")


def _draw_losses(panel, figures: dict) -> None:
    runs = [("without growth", figures["without_growth"], _WITHOUT), ("with growth", figures["with_growth"], _WITH)]
    shown = []
    for label, run, color in runs:
        if run:
            if run["training"]:
                steps, losses = zip(*run["training"])
                middles = [(step + former) / 2 for former, step in pairwise((0, *steps))]  # a mean since the last one
                panel.plot(middles, losses, color=color, linewidth=0.9, alpha=0.5, label=f"{label}, training")
            panel.plot(*zip(*run["held_out"]), color=color, linewidth=1.8, label=f"{label}, held out")
            shown += [point for curve in run.values() for point in curve]
    _mark_growths(panel, figures)
    last = max(step for step, _ in shown)
    late = [loss for step, loss in shown if step >= 0.1 * last] or [loss for _, loss in shown]
    margin = 0.05 * (max(late) - min(late)) or 0.1
    panel.set_ylim(min(late) - margin, max(late) + margin)  # the first steps would flatten all that follows
    panel.set(xlabel="step", ylabel="nats a token", title="Loss")
    handles, labels = panel.get_legend_handles_labels()
    unique = dict(zip(labels, handles))
    panel.legend(unique.values(), unique.keys())


def _draw_lead(panel, figures: dict) -> None:
    plain = dict(figures["without_growth"]["held_out"])
    lead = [(step, plain[step] - loss) for step, loss in figures["with_growth"]["held_out"] if step in plain]
    panel.axhline(0, color=_WITHOUT, linewidth=1)
    panel.plot(*zip(*lead), marker=".", color=_WITH, linewidth=1.8)
    _mark_growths(panel, figures)
    panel.set(xlabel="step", ylabel="nats a token", title="Lead of the grown model, held out")


def _draw_gains(panel, figures: dict) -> None:
    grown = [growth for growth in figures["growths"] if growth["layers"]]
    panel.set(xlabel="layer", ylabel="nats a token", title="Validated gain by layer")
    if not grown:
        panel.text(0.5, 0.5, "nothing was grown", ha="center", transform=panel.transAxes)
        return
    if len(figures["growths"]) > 1:
        panel.set(title=f"Validated gain by layer, growth at step {grown[-1]['step']}")
    layers = range(len(figures["after"]["qk_head_dim"]))
    for kind, color, shift in (("patterns", _PATTERNS, -0.2), ("messages", _MESSAGES, 0.2)):
        gains = {grew["layer"]: grew["gain"] for grew in grown[-1]["layers"] if grew["kind"] == kind}
        heights = [gains.get(layer, 0.0) for layer in layers]
        panel.bar([layer + shift for layer in layers], heights, width=0.38, color=color, label=kind)
    panel.grid(axis="x", visible=False)
    panel.legend()
