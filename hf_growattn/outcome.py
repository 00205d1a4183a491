"""What a fine-tuning with growth gave: its figures, as a file, a table and a picture."""

import json
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

from rich.table import Table

from .cards import FIGURES, PICTURE
from .modeling import attentions
from .pictures import BLUE, COLORS_OF_KINDS, GREY, HELD_OUT, draw_losses, drawn, loss_curves, mark_growths
from .report import grown_layers, printed

BEFORE, AFTER, _ = HELD_OUT
SECONDS = "growth_seconds"
REPORT = "report.html"


def drawable() -> bool:
    """Whether pictures can be drawn."""
    return find_spec("matplotlib") is not None


def size_of(model) -> dict:
    """The parameters of a model, and the widths of its layers."""
    layers = attentions(model)
    return {
        "parameters": model.num_parameters(),
        "qk_head_dim": [layer.qk_head_dim for layer in layers],
        "v_head_dim": [layer.v_head_dim for layer in layers],
    }


def figures(source: dict, grown: list[dict], plain: list[dict] | None, before: dict, after: dict, seconds, difference):
    """Gather all figures as one dict for JSON.

    Args:
        source: `source_of` the training.
        grown: log history of the training with growth.
        plain: of the one without; None if there was none.
        before: `size_of` the model before the training.
        after: the same after it.
        seconds: wall time of the training with growth, since it was started or resumed, without the growths.
        difference: largest difference of the logits after reloading.
    """
    growths = _growths(grown)
    return {
        **source,
        "with_growth": loss_curves(grown),
        "without_growth": plain and loss_curves(plain),
        "growths": growths,
        "before": before,
        "after": after,
        "seconds": {"growing": sum(growth["seconds"] for growth in growths), "training": seconds},
        "reloaded_difference": difference,
    }


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
    """Leave `figures.json`, and where matplotlib is installed `growth.png`."""
    (output / FIGURES).write_text(json.dumps(figures, indent=1))
    if drawable():
        picture(figures, output / PICTURE)


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
        f"The model, its figures and {REPORT}: {output}."
        if drawable()
        else f"The model and its figures: {output}. For {REPORT} and {PICTURE}, pip install matplotlib first.",
    ]
    return printed(table) + "\n".join(lines)


def picture(figures: dict, path: Path) -> None:
    """Draw the losses by step, the lead of the grown model, and the validated gains of the last growth, into a PNG."""
    draw = [_draw_losses, *([_draw_lead] if figures["without_growth"] else []), _draw_gains]
    drawn([partial(fill, figures=figures) for fill in draw], columns=len(draw)).savefig(path, dpi=110)


def _draw_losses(panel, figures: dict) -> None:
    runs = [("without growth, ", figures["without_growth"], GREY), ("with growth, ", figures["with_growth"], BLUE)]
    draw_losses(panel, [run for run in runs if run[1]], [growth["step"] for growth in figures["growths"]])


def _draw_lead(panel, figures: dict) -> None:
    plain = dict(figures["without_growth"]["held_out"])
    lead = [(step, plain[step] - loss) for step, loss in figures["with_growth"]["held_out"] if step in plain]
    panel.axhline(0, color=GREY, linewidth=1)
    panel.plot(*zip(*lead), marker=".", color=BLUE, linewidth=1.8)
    mark_growths(panel, [growth["step"] for growth in figures["growths"]])
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
    for kind, shift in (("patterns", -0.2), ("messages", 0.2)):
        gains = {grew["layer"]: grew["gain"] for grew in grown[-1]["layers"] if grew["kind"] == kind}
        heights = [gains.get(layer, 0.0) for layer in layers]
        panel.bar([layer + shift for layer in layers], heights, width=0.38, color=COLORS_OF_KINDS[kind], label=kind)
    panel.grid(axis="x", visible=False)
    panel.legend()
