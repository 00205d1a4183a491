"""Fine-tuning of pretrained models: growth beside LoRA and its kin, at equal added parameters and equal tokens.

    python scripts/bench/finetuning.py --model a/llama --text Shakespeare.txt WikiText-2.txt --pretrain stories.jsonl

Frozen base: only what a row adds is trained, with growth the new dims alone. Full fine-tuning: all weights train, with
and without growth. Every row has a learning rate of its own for each text, swept on a seed that is not reported.
`--pretrain` also trains a small GPT-2 on a text and takes the leading rows there, on the first text. Tables are named
after the files.
"""

import argparse
import math
import statistics
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

import finetuning_page
import page
import torch
from finetuning_run import LINEAR, SOURCES, Row, Run, Setting, as_batch, cosine, data
from runs import collect
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

QUICK = Setting(steps=4, batch_size=2, block_size=16, measured=2, held_out=4, dims=2, sweeps=False)
TUNING_SEEDS = (100, 101, 102)
CLOSE = 0.01  # nats: rates that end nearer to the best one than that are compared on all tuning seeds


NONE, GUIDED, PATTERNS, LORA, LORA_QK = "no training", "growth", "growth of patterns", "LoRA", "LoRA on q, k"
ALL_LINEAR = "on all linear layers"
EVERYWHERE = f"LoRA {ALL_LINEAR}"
RANDOM, BEYOND, TOGETHER = "random growth", "growth beyond the old dims", f"1/3 growth, 2/3 LoRA {ALL_LINEAR}"
FROZEN = {
    NONE: Row(),
    GUIDED: Row((0.0,)),
    "growth in two steps": Row((0.0, 0.3)),
    RANDOM: Row((0.0,), config={"estimator": "random"}),
    BEYOND: Row((0.0,), config={"old_dims_train": True}),
    TOGETHER: Row((0.0,), share=1 / 3, adapter="LoRA", roles=LINEAR),
    LORA: Row(adapter="LoRA"),
    EVERYWHERE: Row(adapter="LoRA", roles=LINEAR),
    f"LoRA-GA {ALL_LINEAR}": Row(adapter="LoRA-GA", roles=LINEAR),
    f"DoRA {ALL_LINEAR}": Row(adapter="DoRA", roles=LINEAR),
    "AdaLoRA": Row(adapter="AdaLoRA"),
    "EVA": Row(adapter="EVA"),
    "LoRA-GA": Row(adapter="LoRA-GA"),
    "PiSSA": Row(adapter="PiSSA"),
    PATTERNS: Row((0.0,), config={"kinds": ("patterns",)}),
    LORA_QK: Row(adapter="LoRA", roles=("query", "key")),
}
FULL = {
    "no growth": Row(),
    "growth at the start": Row((0.0,)),
    "growth in the middle": Row((0.5,)),
    "growth in the middle, by batches set aside": Row((0.5,), aside=True),
}
PEFT = [name for name, row in FROZEN.items() if row.adapter and not row.growths]
FROZEN_TABLE, FULL_TABLE = "frozen base", "full fine-tuning"
TABLES = {FROZEN_TABLE: FROZEN, FULL_TABLE: FULL}
NAMES = {
    "growth": GUIDED,
    "peft": PEFT,
    "both": TOGETHER,
    "patterns": (PATTERNS, LORA_QK),
    "none": ["no growth"],
    "shown": [GUIDED, RANDOM, TOGETHER, LORA, EVERYWHERE],
}
RATES = {FROZEN_TABLE: (0.01, 0.02, 0.04), FULL_TABLE: (0.002, 0.004, 0.008)}


def measure(table: str, model: str, text: str, row: str, rate: float, seed: int, setting: dict) -> dict:
    """One run, for `collect`."""
    return Run(TABLES[table][row], table == FULL_TABLE, model, text, rate, seed, Setting(**setting)).run()


def tuned(table: str, model: str, rows: list[str], text: str, setting: Setting, kept: Path) -> dict[str, dict]:
    """Sweep each row's learning rate on seeds of its own.

    Returns:
        For each row its loss at each rate on the first tuning seed; of those that are close, above the best one's by
        the mean over all tuning seeds.
    """
    if not setting.sweeps:
        return {row: {RATES[table][1]: math.nan} for row in rows}
    losses: dict[str, dict[float, float]] = {row: {} for row in rows}
    wanted = {row: list(RATES[table]) if row != NONE else [0.0] for row in rows}
    while any(wanted.values()):
        jobs = [job(table, model, text, row, rate, TUNING_SEEDS[0], setting) for row in rows for rate in wanted[row]]
        for run in collect(measure, jobs, kept):
            losses[run["row"]][run["rate"]] = run["loss"]
        for row, of_row in losses.items():
            best = min(of_row, key=of_row.get)
            ends = {min(of_row): best / 2, max(of_row): best * 2}
            wanted[row] = [ends[best]] if best in ends and row != NONE else []
    near = {row: [r for r in of_row if of_row[r] < min(of_row.values()) + CLOSE] for row, of_row in losses.items()}
    close = {row: rates for row, rates in near.items() if len(rates) > 1}
    again = [(row, rate) for row, rates in close.items() for rate in rates]
    jobs = [job(table, model, text, *which, seed, setting) for which in again for seed in TUNING_SEEDS[1:]]
    more = {(run["row"], run["rate"], run["seed"]): run["loss"] for run in collect(measure, jobs, kept)}
    for row, rates in close.items():
        of_row, best = losses[row], min(losses[row], key=losses[row].get)
        for rate in rates:
            others = [more[row, rate, seed] - more[row, best, seed] for seed in TUNING_SEEDS[1:]]
            of_row[rate] = of_row[best] + statistics.fmean([of_row[rate] - of_row[best], *others])
    return losses


def job(table: str, model: str, text: str, row: str, rate: float, seed: int, setting: Setting) -> dict:
    """The arguments of `measure`."""
    names = {"table": table, "model": model, "text": text, "row": row}
    return names | {"rate": rate, "seed": seed, "setting": asdict(setting)}


def page_of(figures: dict) -> page.Page:
    """The page, out of its figures."""
    return finetuning_page.page_of(figures, NAMES)


def gpt2(tokenizer, heads: int = 8) -> GPT2LMHeadModel:
    """An untrained small GPT-2, 64 wide, with so many heads: the fewer, the wider."""
    sizes = {"n_embd": 64, "n_layer": 4, "n_head": heads, "n_positions": 256, "vocab_size": len(tokenizer)}
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    return GPT2LMHeadModel(GPT2Config(**sizes, **dropout, **ends))


def pretrained(name: str, build: Callable[[], PreTrainedModel], text: str, folder: Path, setting: Setting) -> str:
    """Train a model on a text and keep it in a folder, from which it is read if it is there."""
    if not (folder / "config.json").exists():
        torch.manual_seed(0)
        model, blocks = build(), data(name, text, setting.block_size)
        steps, generator = 600, torch.Generator().manual_seed(0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, partial(cosine, steps))
        for _ in range(steps):
            rows = blocks[torch.randint(len(blocks), (setting.batch_size,), generator=generator)]
            model(**as_batch(rows), use_cache=False).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        model.save_pretrained(folder)
    return str(folder)


def quick_sources() -> tuple[list[str], list[str]]:
    """Two tiny random models and one text that every CPython carries."""
    from texts import english, train_tokenizer

    SOURCES["Python's help"] = english()[:20]
    tokenizer = train_tokenizer(SOURCES["Python's help"], 300)
    sizes = {"vocab_size": len(tokenizer), "bos_token_id": None, "eos_token_id": None}
    llama = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    SOURCES["Llama"] = lambda: LlamaForCausalLM(LlamaConfig(**sizes, **llama, pad_token_id=None))
    SOURCES["GPT-2"] = lambda: GPT2LMHeadModel(GPT2Config(**sizes, n_embd=16, n_layer=1, n_head=2, n_positions=32))
    SOURCES["Llama's tokenizer"] = SOURCES["GPT-2's tokenizer"] = tokenizer
    return ["Llama", "GPT-2"], ["Python's help"]


def main() -> None:
    """Sweep the learning rates, run the rows, write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="path or Hub id of a causal LM")
    parser.add_argument(
        "--text", nargs="+", help="texts: files, also of JSON lines, or Hub ids; all rows see the first"
    )
    parser.add_argument(
        "--pretrain", help="text to train a small GPT-2 on, which takes the leading rows on the first text"
    )
    parser.add_argument("--gpt2", type=Path, default=Path("scripts/output/gpt2"), help="where that GPT-2 is kept")
    parser.add_argument("--rows", nargs="+", choices=[*FROZEN, *FULL], help="these rows, on every text")
    parser.add_argument("--steps", type=int, default=Setting.steps, help="batches that every row sees")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--output", type=Path, default=page.RESULTS)
    parser.add_argument("--quick", action="store_true", help="tiny random models and few steps: shows that it runs")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    setting, seeds = Setting(steps=arguments.steps), arguments.seeds
    if arguments.quick:
        setting, seeds = QUICK, [0]
        models, texts = quick_sources()
    else:
        models, texts = [Path(arguments.model).name], [Path(text).stem for text in arguments.text]
        SOURCES.update({models[0]: arguments.model, **dict(zip(texts, arguments.text))})
        SOURCES[f"{models[0]}'s tokenizer"] = tokenizer = AutoTokenizer.from_pretrained(arguments.model)
        if arguments.pretrain:
            SOURCES["pretraining"] = arguments.pretrain
            SOURCES["GPT-2's tokenizer"] = tokenizer
            SOURCES["GPT-2"] = pretrained("GPT-2", lambda: gpt2(tokenizer), "pretraining", arguments.gpt2, setting)
            models.append("GPT-2")
    arguments.output.mkdir(parents=True, exist_ok=True)
    kept = arguments.output / "finetuning.jsonl"
    runs, sweeps, led = [], [], list(arguments.rows or [])
    for place, model in enumerate(models):
        texts = texts if place == 0 else texts[:1]
        for text in texts:
            data(model, text, setting.block_size)  # here, so that the processes of the runs find it
        tables = TABLES if place == 0 else {FROZEN_TABLE: {row: FROZEN[row] for row in led if row in FROZEN}}
        for table, rows in tables.items():
            rows = [row for row in rows if arguments.rows is None or row in arguments.rows]
            rates = {}
            for text in texts:
                if text != texts[0]:
                    rows = [row for row in rows if row in led]
                swept = tuned(table, model, rows, text, setting, kept)
                sweeps.append({"table": table, "model": model, "text": text, "losses": swept})
                rates[text] = {row: min(losses, key=losses.get) for row, losses in swept.items()}
                led = led or leading({row: min(losses.values()) for row, losses in swept.items()})
            jobs = [
                job(table, model, text, row, rates[text][row], seed, setting)
                for seed in seeds
                for text in texts
                for row in rates[text]
                if row in led or table == FULL_TABLE or row in (PATTERNS, LORA_QK, BEYOND)
            ]
            runs += collect(measure, jobs, kept)
    costs = ("steps", "seconds", "growth_seconds", "peak_bytes", "cache", "forward")
    varied = ("seed", "added", *costs, "at_growth", "loss", "curve")
    needed = page.kept(runs, "table", "model", "text", "row", *varied)
    drawn = {FROZEN_TABLE, models[0], *NAMES["shown"]}
    for run in needed:
        if not {run["table"], run["model"], run["row"]} <= drawn:
            del run["curve"]
    figures = {"setting": asdict(setting), "sweeps": sweeps, "runs": page.in_columns(needed, *varied)}
    page.publish("finetuning", figures, seeds, arguments.output, sum(run["seconds"] for run in runs))


def leading(lowest: dict[str, float]) -> list[str]:
    """The rows that see every text: the plain ones, both together, what users pick, and the best of peft's."""
    peft = [row for row in lowest if row in PEFT]
    best = min(peft, key=lowest.get) if peft else None
    return [row for row in lowest if row in (NONE, GUIDED, RANDOM, TOGETHER, LORA, EVERYWHERE, best)]


if __name__ == "__main__":
    main()
