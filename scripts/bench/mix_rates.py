"""How large the steps should be of what grew beside LoRA, against LoRA's own: the wider the model, the smaller.

    OMP_NUM_THREADS=1 python scripts/bench/mix_rates.py --model path/to/smollm2 path/to/gpt2 --text a.txt b.json

LoRA on all linear layers tries learning rates of its own. The mix of a third of growth and two thirds of LoRA then
trains at the best of these, and what grew at shares of it. Data, batches and budget are those of `real_model.py`. Runs
are kept, each as soon as it ends; the same command goes on with those that are missing.
"""

import argparse
from dataclasses import asdict
from pathlib import Path

import page
import runs
from real_model import LORA, QUICK, Setting, best, data, measured, prepared, tiny, trained_at
from tasks import restore
from texts import english
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_growattn import patch_model
from hf_growattn.training.methods import METHODS, readable

MIX = METHODS["both"].title
RATES = (0.5, 1.5, 4.5)  # over hidden_size: those of a race, and one that it tries where the larger of them is better
SHARES = (1, 1 / 3, 1 / 9, 1 / 27, 1 / 81, 0)


def measure(model: str, text: str, row: str, tries: list[list[float]], setting: dict) -> dict:
    """Train a row with each learning rate and share of it from the same start, for `collect`."""
    how, tokenizer = Setting(**setting), AutoTokenizer.from_pretrained(model)
    batches, held_out = data(tokenizer, "", text, how, 0)
    fresh = patch_model(AutoModelForCausalLM.from_pretrained(model, dtype="float32"))
    told = {"width": fresh.config.hidden_size, "start": measured(fresh, held_out)["loss"], "ended": []}
    trained, _ = prepared(fresh, row, batches, how, 0)
    at_start = {p: p.detach().clone() for p in trained.parameters() if p.requires_grad}
    for rate, share in tries:
        restore(at_start)
        trained_at(trained, rate, share, batches)
        told["ended"].append({"rate": rate, "share": share, "loss": measured(trained, held_out)["loss"]})
    return told


def collected(models: list[str], texts: list[str], setting: Setting, kept: Path) -> list[dict]:
    """LoRA for each model and text, then the mix at its best learning rate."""
    done = []
    for model in models:
        width = AutoModelForCausalLM.from_pretrained(model).config.hidden_size
        for text in texts:
            job = {"model": model, "text": text, "setting": asdict(setting)}
            tries = [[readable(rate / width), 1] for rate in RATES]
            lora = runs.collect(measure, [job | {"row": LORA, "tries": tries}], kept)
            tries = [[best(lora[0])["rate"], share] for share in SHARES]
            done += lora + runs.collect(measure, [job | {"row": MIX, "tries": tries}], kept)
    return done


def page_of(figures: dict) -> page.Page:
    """What the figures say."""
    pairs = figures["pairs"]
    lines, found = [], []
    for pair in pairs:
        top = best({"ended": pair["mix"]})
        ends = [f"**{end['loss']:.3f}**" if end is top else f"{end['loss']:.3f}" for end in pair["mix"]]
        share = METHODS["both"].grown_share(pair["width"])
        lora = best({"ended": pair["lora"]})
        lines.append([pair["model"], pair["width"], pair["text"], f"{lora['loss']:.3f} at {lora['rate']:.1e}", *ends])
        lines[-1].append(f"{share:.3f}")
        found.append(f"{top['share']:.2g} on {pair['text']} with {pair['model']}, {pair['width']} wide")
    lowest = [best({"ended": pair["mix"]})["loss"] for pair in pairs]
    whole, still = ([pair["mix"][at]["loss"] - low for pair, low in zip(pairs, lowest)] for at in (0, -1))
    said = f"Beside LoRA, what grew ends lowest at these shares of its learning rate: {'; '.join(found)}. That is "
    said += f"{min(whole):.3f} to {max(whole):.3f} nats below one rate for both, and {min(still):.3f} to "
    said += f"{max(still):.3f} below leaving it as the growth made it."
    head = ["model", "wide", "text", LORA, *(f"mix at {share:.2g}" for share in SHARES), "share taken by default"]
    sizes = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in figures["setting"].items())
    text = f"""
{LORA} tries {len(figures["pairs"][0]["lora"])} learning rates, and the best one is the mix's. Its columns are held-out
losses at shares of that for what grew; at 0 that stays as the growth made it, which has lowered the loss already. One
seed; {sizes}. The share that a race and `finetune` take, min(1, (64 / width)^1.5) and at least 1 / 30, was chosen after
these models; nothing wider was at hand.
"""
    return page.Page(
        title="What grew beside LoRA, and its learning rate",
        claim=said,
        summary=page.table(head, lines),
        text=text,
        draw=lambda plt: draw(plt, pairs),
    )


def draw(plt, pairs: list[dict]):
    """How far the mix ends above LoRA, by the share."""
    figure, panel = plt.subplots(figsize=(6.4, 4), layout="constrained")
    panel.axhline(0, color="black", linewidth=0.8)
    for pair in pairs:
        ends = [end for end in pair["mix"] if end["share"]]
        lora = best({"ended": pair["lora"]})["loss"]
        label = f"{pair['model']}, {pair['width']} wide, {pair['text']}"
        panel.plot([end["share"] for end in ends], [end["loss"] - lora for end in ends], "o-", label=label)
    panel.set(xscale="log", xlabel="learning rate of what grew, over LoRA's", ylabel=f"loss above {LORA}, nats")
    panel.legend(fontsize=7)
    return figure


def main() -> None:
    """Train, then write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="*", default=[], help="paths or Hub ids of causal LMs")
    parser.add_argument("--text", nargs="*", default=[], help="texts, as for finetuning.py")
    parser.add_argument("--output", type=Path, default=page.RESULTS)
    parser.add_argument("--quick", action="store_true", help="a tiny model, a few steps: shows that it runs")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    if arguments.quick:
        text = arguments.output / "english.txt"
        text.write_text("\n\n".join(english()))
        arguments.model, arguments.text = [tiny(arguments.output / "tiny")], [str(text)]
    if not arguments.model or not arguments.text:
        parser.error("--model and --text are needed, or --quick")
    setting = QUICK if arguments.quick else Setting()
    done = collected(arguments.model, arguments.text, setting, arguments.output / "mix_rates.jsonl")
    pairs = [
        {"model": Path(lora["model"]).name, "text": Path(lora["text"]).stem, "width": lora["width"]}
        | {"start": lora["start"], "lora": lora["ended"], "mix": mix["ended"]}
        for lora, mix in zip(done[::2], done[1::2])
    ]
    figures = {"setting": asdict(setting), "pairs": pairs}
    page.publish("mix_rates", figures, [0], arguments.output, sum(run["seconds"] for run in done))


if __name__ == "__main__":
    main()
