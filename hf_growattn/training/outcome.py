"""What a fine-tuning with growth gave: its figures, as a file, a table and a picture."""

import json
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from itertools import pairwise, product
from pathlib import Path

from ..growable.models import cache_bytes
from ..interop.cards import PICTURE
from ..interop.figures import FIGURES, growth_figures
from ..measure.kinds import KINDS
from ..model.configuration import PREFIX, layer_widths, stock_head_dim
from ..report.pictures import BLUE, GREY, HELD_OUT, ORANGE, draw_gains, draw_lead, draw_losses, drawn, loss_curves
from ..report.report import GrowthReport, grown_layers
from ..report.words import Compared, advised, beside, cost, printed, slower, text_of

BEFORE, AFTER, _ = HELD_OUT
SECONDS, FORWARD = "growth_seconds", "growth_forward_ratio"
RUNS = {"with_growth": "with growth", "without_growth": "without growth", "lora": "LoRA, all linear layers"}
OTHERS = {"without_growth": "training without growth", "lora": "LoRA on all linear layers"}
REPORT = "report.html"


def drawable() -> bool:
    """Whether pictures can be drawn."""
    return find_spec("matplotlib") is not None


def size_of(model) -> dict:
    """The parameters of a model, stock or grown, the widths of its layers, and if it is patched its KV cache."""
    config = model.config
    growable, stock = config.model_type.startswith(PREFIX), (stock_head_dim(config),) * 2
    widths = [layer_widths(config, layer) if growable else stock for layer in range(config.num_hidden_layers)]
    qk_head_dim, v_head_dim = map(list, zip(*widths))
    size = {"parameters": model.num_parameters(), "qk_head_dim": qk_head_dim, "v_head_dim": v_head_dim}
    return size | ({"cache_bytes": cache_bytes(model)} if growable else {})


def figures(
    source: dict,
    histories: dict[str, list[dict]],
    started: GrowthReport | None,
    before: dict,
    after: dict,
    seconds: float,
    difference: float,
    compared: Sequence[Compared] = (),
    race: str = "",
    saved: float | None = None,
) -> dict:
    """Gather all figures as one dict for JSON.

    Args:
        source: `source_of` the training.
        histories: the log histories of those trainings there were: "with_growth", "without_growth", "lora".
        started: of a growth before the first step, if there was one.
        before: `size_of` the model before the training.
        after: the same after it.
        seconds: wall time of the training, of the one with growth if there are two, since it was started or resumed,
            without the growths.
        difference: largest difference of the logits after reloading.
        compared: what was trained beside it.
        race: what a race before it told.
        saved: the held-out loss of what was saved, where that is not what was trained: dense weights, not quantized.
    """
    growths = []
    if started is not None:
        timed = {"seconds": sum(started.seconds.values()), "forward": started.forward_ratio}
        growths.append({"step": 0, **growth_figures(started), **timed})
    growths += [
        {
            "step": entry["step"],
            "held_out": [measured[BEFORE], measured[AFTER]],
            "growth_batches": [entry["growth_loss_before"], entry["growth_loss_after"]],
            "added_parameters": entry["growth_added_parameters"],
            "layers": grown_layers(entry),
            "seconds": measured[SECONDS],
            "forward": measured.get(FORWARD),
        }
        for entry, measured in pairwise(histories.get("with_growth", []))
        if AFTER in measured
    ]
    return {
        **source,
        **{name: loss_curves(histories[name]) if name in histories else None for name in RUNS},
        "growths": growths,
        "before": before,
        "after": after,
        "seconds": {"growing": sum(growth["seconds"] for growth in growths), "training": seconds},
        "reloaded_difference": difference,
        "compared": list(map(vars, compared)),
        "race": race,
        "saved_loss": saved,
    }


def write(figures: dict, output: Path) -> None:
    """Leave `figures.json`, and of a training with growth, where matplotlib is installed, `growth.png`."""
    (output / FIGURES).write_text(json.dumps(figures, indent=1))
    if figures["with_growth"] and drawable():
        picture(figures, output / PICTURE)


def summary(figures: dict, output: Path) -> str:
    """What a user wants to know at the end."""
    runs = [name for name in RUNS if figures[name]]
    first, *others = (figures[name]["held_out"] for name in runs)
    moments, rows = [("start", *first[0])], []
    for growth in figures["growths"]:
        whens = ("before growth", "after growth") if growth["layers"] else ("nothing grew",)
        moments += [(when, growth["step"], loss) for when, loss in zip(whens, growth.get("held_out", ()))]
    for when, step, loss in [*moments, ("end", *first[-1])]:
        theirs = [f"{dict(losses)[step]:.4f}" if step in dict(losses) else "-" for losses in others]
        rows.append([f"step {step}, {when}", f"{loss:.4f}", *theirs])
    before, after, seconds = figures["before"], figures["after"], figures["seconds"]
    compared = [Compared(**other) for other in figures["compared"]]
    caches = before["cache_bytes"], after["cache_bytes"]
    grew = [growth["forward"] for growth in figures["growths"] if growth["layers"]]
    told = [("Loss", f"{first[0][1]:.4f} -> {first[-1][1]:.4f} on held-out rows.")]
    if figures["saved_loss"] is not None:
        told.append(("Saved", f"{figures['saved_loss']:.4f}, merged into the weights as they are before quantizing."))
    if grew:
        added = after["parameters"] - before["parameters"]
        told.append(("Cost", cost(caches, added, before["parameters"]) + slower(grew)))
    if grew or figures["race"]:
        told.append(("Advice", advised(compared, figures["race"], caches)))
    parts = [printed(*beside(compared, caches[1]))] if compared else []
    parts += [text_of(told) + "\n", printed(["held-out loss", *(RUNS[name] for name in runs)], rows)]
    lines = []
    for name, what in (("qk_head_dim", "queries and keys"), ("v_head_dim", "values")):
        widths = [" ".join(map(str, size[name])) for size in (before, after)]
        lines.append(f"Widths of {what}, by layer: {' -> '.join(dict.fromkeys(widths))}.")
    growing = f"growing {seconds['growing']:.0f} s, " if figures["with_growth"] else ""
    with_page = f", its figures and {REPORT}" if (output / REPORT).exists() else " and its figures"
    lines += [
        f"Time: {growing}training and evaluating since the last start {seconds['training']:.0f} s.",
        f"Reloaded in a fresh process: largest difference of the logits {figures['reloaded_difference']:.2e}.",
        f"The model{with_page}: {output}.",
    ]
    if figures["with_growth"] and not drawable():
        lines[-1] += f" For {REPORT} and {PICTURE}, pip install matplotlib first."
    return "\n".join([*parts, "\n".join(lines)])


def picture(figures: dict, path: Path) -> None:
    """Draw the losses by step, the lead of the grown model, and the validated gains of the last growth, into a PNG."""
    grown, plain, growths = figures["with_growth"], figures["without_growth"], figures["growths"]
    steps = [growth["step"] for growth in growths]
    colors = {"lora": ORANGE, "without_growth": GREY, "with_growth": BLUE}
    runs = [(f"{RUNS[name]}, ", figures[name], color) for name, color in colors.items() if figures[name]]
    panels = [partial(draw_losses, runs=runs, growths=steps)]
    if plain:
        panels.append(partial(draw_lead, grown=grown, plain=plain, growths=steps))
    if last := [growth for growth in growths if growth["layers"]][-1:]:
        gains = dict.fromkeys(product(range(len(figures["after"]["qk_head_dim"])), KINDS))
        gains |= {(grew["layer"], grew["kind"]): grew["gain"] for grew in last[0]["layers"]}
        title = "Validated gain" + (f", growth at step {last[0]['step']}" if len(growths) > 1 else "")
        panels.append(partial(draw_gains, title=title, gains=gains))
    drawn(panels, columns=len(panels)).savefig(path, dpi=110)
