"""The report as a page: whole, escaped, offline, and looked at by a real browser where there is one."""

import html
import json
import re
import shlex
import sys
from html.parser import HTMLParser

import browser
import pytest
import torch
from families import build, lm_batches

from hf_growattn import Grower, GrowthConfig, GrowthReport, patch_model, save_report
from hf_growattn.grow.search import StepSearch
from hf_growattn.measure.functional import step_factors
from hf_growattn.report import words
from hf_growattn.report.pictures import draw_growth

ODD = "python <script>alert(1)</script> --name \"a&b\" 'c' {{ 7 * 7 }} </code>"
EMPTY = GrowthReport(1.0, 1.0, [], 0, {1.0: float("inf")}, {})
VOID = {"meta", "link"}


@pytest.fixture(scope="module")
def grown():
    return Grower(patch_model(build("llama-2")), GrowthConfig(budget=0.02)).grow(lm_batches(4))


@pytest.fixture(scope="module")
def rolled_back():
    """A growth all of whose steps go uphill."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "hf_growattn.measure.functional.step_factors",
            lambda *args: [s * (-1) ** i for i, s in enumerate(step_factors(*args))],
        )
        return Grower(patch_model(build("llama-2")), GrowthConfig(qk_dims=2, layers=[1])).grow(lm_batches())


@pytest.fixture(scope="module")
def history(grown, rolled_back):
    """As Trainer keeps it: a growth at step 4 and one at step 8, and a loss that was not finite."""
    losses = [{"step": step, "loss": 4.0 - step / 8 if step != 6 else float("nan")} for step in range(1, 12)]
    evaluated = [{"step": step, "eval_loss": 4.1 - step / 8} for step in (0, 6, 11)]
    growths = [{**report.figures(), "step": step, "epoch": 1.0} for report, step in ((grown, 4), (rolled_back, 8))]
    return sorted([*losses, *evaluated, *growths], key=lambda entry: entry["step"])


class Page(HTMLParser):
    """The tags, attributes and text of a page whose every tag is closed where it should be."""

    def __init__(self, text: str):
        super().__init__()
        self.tags, self.attributes, self.words, self._open = [], [], [], []
        self.feed(text)
        self.close()
        assert self._open == []
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag, attributes):
        self.handle_startendtag(tag, attributes)
        self._open += [] if tag in VOID else [tag]

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def read(path) -> Page:
    """A page that holds nothing that could run, or ask for something."""
    page = Page(path.read_text(encoding="utf-8"))
    assert not {"script", "img", "iframe", "object", "embed", "base", "image"} & set(page.tags)
    for name, value in page.attributes:
        assert not name.startswith("on")
        assert name not in ("src", "href", "xlink:href") or value.startswith(("#", "data:"))
        assert "url(" not in (value or "") or "url(#" in value
    assert "@import" not in page.text
    names = [value for name, value in page.attributes if name == "id"]
    assert len(names) == len(set(names))
    used = {value[1:] for name, value in page.attributes if name == "xlink:href"}
    assert used <= set(names)
    return page


def test_a_growth_as_a_page(grown, tmp_path):
    assert grown.applied
    grown.save(tmp_path / "new" / "report.html", command=ODD)
    page = read(tmp_path / "new" / "report.html")
    assert ODD in page.text and "49" not in page.text.split("How this came about")[1].split(" hf_growattn")[0]
    (top,) = [layer for layer in grown.layers if layer.predicted_gain == max(g.predicted_gain for g in grown.layers)]
    assert f"of layer {top.layer} gain most: {top.starvation:.0%} of their gradient" in page.text
    assert all(text.replace("->", "→").replace("`", "") in page.text for _, text in words.facts([grown]))
    assert "<code>growattn race" in (tmp_path / "new" / "report.html").read_text()
    assert grown.promise() in page.text and grown.timing() in page.text and words.prices(grown) in page.text
    for layer in grown.layers:
        assert " ".join(layer.cells()) in page.text
        assert " ".join(words.map_cells(grown, layer)).replace("->", "→") in page.text
        assert f"Layer {layer.layer}, {layer.kind}: {sum(layer.taken)} of {len(layer.strength)}." in page.text
        assert all(f"{gain:.3g}" in page.text for gain in (*layer.in_sample, *layer.validated))
    assert f"torch {torch.__version__}" in page.text and "Line search" in page.text and "Loss by step" not in page.text
    assert list((tmp_path / "new").iterdir()) == [tmp_path / "new" / "report.html"]


def test_all_growths_of_a_training_on_its_loss_curve(grown, rolled_back, history, tmp_path):
    assert not rolled_back.applied
    save_report([grown, rolled_back, EMPTY], tmp_path / "report.html", history)
    page = read(tmp_path / "report.html")
    assert "Growth 1, at step 4" in page.text and "Growth 2, at step 8" in page.text and "Growth 3 " in page.text
    assert (
        "no step along the new directions lowers the loss" in page.text
        and "Loss by step" in page.text
        and "held out" in page.text
    )
    assert shlex.join(sys.orig_argv[1:]) in page.text.split("How this came about")[1]  # pytest, or what runs it
    save_report([rolled_back], tmp_path / "report.html", history)  # as a resumed training knows the last one only
    assert "Grown at step 8." in read(tmp_path / "report.html").text


def test_what_was_not_done_stands_on_the_first_screen(grown, rolled_back, tmp_path):
    """The best of the others decides, a tie goes to it, and nothing is advised without a comparison."""
    cache = grown.cache_bytes[0]
    lora, stay = (
        words.Compared(name, 2.0 + lead, lead, 0.002, cache) for name, lead in (("LoRA", 0.02), ("stay", 0.5))
    )
    save_report([grown], tmp_path / "a.html", compared=[stay, lora])
    page = read(tmp_path / "a.html").text
    first = page[page.index("What growing did") : page.index("Where")]
    rows = [
        first.index(row) for row in ("growth 2.0000", "LoRA 2.0200 +0.0200 ± 0.0020", "stay 2.5000 +0.5000 ± 0.0020")
    ]
    assert rows == sorted(rows) and "Keep the grown model, if" in first
    assert "larger: it ends 0.0200 ± 0.0020 nats a token below LoRA, the best of the others. Each had one" in first
    larger = f"{grown.cache_bytes[1] / cache - 1:.0%} larger"
    for lead, error, advised in (
        (0.02, 0.011, "It is a tie"),
        (0.009, 0.001, "It is a tie"),
        (-0.02, 0.002, "below the"),
    ):
        other = words.Compared("LoRA", 2.0, lead, error, cache)
        _, _, (_, advice) = words.facts([grown], [other, stay])
        assert advice.startswith("Use LoRA instead.") and advised in advice and larger in advice
    assert (
        "`growattn race my_model my.txt -o race`"
        in words.facts([grown], race="growattn race my_model my.txt -o race")[-1][1]
    )
    assert words.facts([grown], verdict="Growth pays.")[-1][1].endswith("told: Growth pays.")
    assert [label for label, _ in words.facts([rolled_back])] == ["Loss", "Advice"]
    assert (
        "Do not grow here" in words.facts([rolled_back, EMPTY])[-1][1] and words.facts([EMPTY, grown])[1][0] == "Cost"
    )


def test_the_map_says_why_the_rest_was_not_bought(rolled_back):
    """Each reason is met by a growth that has it, and explained."""

    def left(report) -> set:
        assert all(meaning in report_lines(str(report)) for meaning in words.meanings(report))
        return {layer.left for layer in report.layers}

    batches = lm_batches(4)
    few = Grower(patch_model(build("llama-2")), GrowthConfig(budget=600)).grow(batches)
    assert left(few) == {"", words.SPENT} and few.added_parameters <= 600
    for layer in few.layers:
        assert (layer.left == "") == (layer.width[1] > layer.width[0]) and layer.price[0] > 600 - few.added_parameters
    model = patch_model(build("llama-2"))
    wide = Grower(model, GrowthConfig(qk_dims=2, v_dims=2, max_v_head_dim=16, layers=[1])).grow(batches)
    assert left(wide) == {"", words.AT_LIMIT} and wide.layers[0].price == (
        wide.added_parameters // 2,
        (wide.cache_bytes[1] - wide.cache_bytes[0]) // 2,
    )
    assert left(rolled_back) == {words.NO_STEP}
    rows = [torch.randint(1, 90, (2, 9), generator=torch.Generator().manual_seed(seed)) for seed in (0, 1)]
    noise = Grower(model, GrowthConfig(qk_dims=2)).measure([{"input_ids": row, "labels": row} for row in rows])
    assert left(noise) == {words.NOTHING_HELD}


def report_lines(text: str) -> str:
    """A printed report as one line, once it is seen that it fits a terminal."""
    assert max(map(len, text.splitlines())) <= 80
    return " ".join(text.split())


def test_printed_tables_fit_a_terminal_and_cut_no_word(grown):
    report_lines(str(grown)), report_lines(grown.details())
    columns = ["held-out loss", "KV cache, bytes a token", "unbreakable"]
    table = words.format_table(columns, [["1", "2", "3"]])
    assert all(word in table.split() for name in columns for word in name.split())


def test_a_report_as_json(grown, rolled_back):
    for report in (grown, rolled_back):
        read_back = json.loads(json.dumps(report.to_dict(), allow_nan=False))
        assert read_back["applied"] == report.applied and read_back["loss_after"] == report.loss_after
        assert [layer["width"] for layer in read_back["layers"]] == [list(layer.width) for layer in report.layers]


def test_two_pictures_of_a_growth(grown, history):
    titles = [panel.get_title(loc="left") for panel in draw_growth([grown]).axes]
    assert titles == ["Where it grew: first-order gain", "Line search"]
    where, loss = draw_growth([grown], history).axes
    assert loss.get_title(loc="left") == "Loss" and len(where.texts) == len(grown.layers)
    draw_growth([EMPTY])


def test_the_fall_that_is_printed_was_measured_on_the_other_half():
    model, searches = patch_model(build("llama-2")), []
    with pytest.MonkeyPatch.context() as patch:
        run = StepSearch.run
        patch.setattr(
            StepSearch, "run", lambda self, spare=0: searches.append((self, run(self, spare))) or searches[-1][1]
        )
        report = Grower(model, GrowthConfig(qk_dims=2)).grow(lm_batches(4))
    search, (_, lowest) = searches[-1]
    assert (report.judged_before, report.judged_after) == (search.loss_before, lowest) and lowest < search.loss_before
    assert f"{search.loss_before:.4f} -> {lowest:.4f} on batches" in report_lines(str(report))


def test_a_page_names_model_and_data(grown, tmp_path):
    save_report([grown], tmp_path / "a.html", model="<me>/model", data="a & b.txt")
    assert "<me>/model on a & b.txt" in read(tmp_path / "a.html").text


def test_a_printed_report_is_text_in_a_notebook_too(grown, monkeypatch):
    expected = str(grown)
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    assert str(grown) == expected


def test_losses_of_a_loop_of_ones_own(grown, tmp_path):
    grown.save(tmp_path / "a.html", [(1, 3.0), (2, 2.5)], step=1, command="")
    page = read(tmp_path / "a.html")
    assert "Loss by step" in page.text and "training" in page.text and "--name" not in page.text
    with pytest.raises(ValueError, match="1 reports and 2 steps"):
        save_report([grown], tmp_path / "a.html", steps=[1, 2])
    with pytest.raises(ValueError, match="There is no growth to show"):
        save_report([], tmp_path / "a.html")


def test_the_command_line_without_secrets(grown, tmp_path, monkeypatch):
    words = "python train.py --hub_token abc --tokenizer words --api-key=def x=hf_0123456789abcdef --max_steps 3"
    monkeypatch.setattr(sys, "orig_argv", ["/home/me/bin/python", *words.split()[1:]])
    grown.save(tmp_path / "a.html")
    shown = "python train.py --hub_token '***' --tokenizer words '--api-key=***' 'x=***' --max_steps 3"
    assert shown in read(tmp_path / "a.html").text


def test_without_matplotlib(grown, tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for draw in (grown.plot, lambda: grown.save(tmp_path / "a.html")):
        with pytest.raises(ImportError, match="pip install matplotlib"):
            draw()
    assert list(tmp_path.iterdir()) == []
    assert all(html.escape(part) in grown._repr_html_() for part in words.facts([grown])[-1][1].split("`"))


def test_in_a_notebook(grown, rolled_back):
    for report in (grown, rolled_back):
        fragment = Page(report._repr_html_())
        assert "html" not in fragment.tags and "script" not in fragment.tags and "table" in fragment.tags
        assert all(f"{layer.starvation:.2f}" in fragment.text for layer in report.layers)
        figure = report.plot()
        titles = [panel.get_title(loc="left") for panel in figure.axes]
        assert titles[:3] == ["Starvation", "Validated gain", "Line search"]
        assert set(titles[3:]) == {f"Layer {layer.layer}, {layer.kind}" for layer in report.layers}
        assert figure._repr_png_().startswith(b"\x89PNG")
    EMPTY.plot()
    assert "Nothing was grown" in EMPTY._repr_html_()


@pytest.mark.skipif(not browser.found(), reason=f"no browser here: one of {', '.join(browser.NAMES)}")
def test_in_a_real_browser(grown, rolled_back, history, tmp_path):
    """No console error, no request but for the page, no sideways scrolling, and colours that follow the reader's."""
    grown.save(tmp_path / "one.html", command=ODD)
    save_report([grown, rolled_back, EMPTY], tmp_path / "all.html", history)
    (tmp_path / "bad.html").write_text("<img src='http://outside.invalid/a.png'><script>console.log(1); no()</script>")
    colors = "['body', 'svg text', 'td'].map(name => getComputedStyle(document.querySelector(name)))"
    with browser.Browser() as reader:
        reader.open((tmp_path / "bad.html").as_uri())
        assert len(reader.requests) == 2 and len(reader.errors) >= 2  # so it would notice
        for name in ("one", "all"):
            seen = {}
            for scheme, width in (("light", 1000), ("light", 400), ("dark", 1000), ("dark", 400)):
                address = (tmp_path / f"{name}.html").as_uri()
                reader.open(address, width, scheme)
                assert reader.errors == [] and reader.requests == [address]
                assert reader.value("document.documentElement.scrollWidth") <= width
                assert reader.value("document.querySelectorAll('svg').length") >= 3
                paper, *inks = reader.value(
                    f"{colors}.map((s, i) => i ? (i > 1 ? s.color : s.fill) : s.backgroundColor)"
                )
                assert all(abs(_light(ink) - _light(paper)) > 0.5 for ink in inks)
                seen[scheme] = paper
            assert _light(seen["light"]) > 0.8 and _light(seen["dark"]) < 0.2
            assert len(reader.picture()) > 10_000


def _light(color: str) -> float:
    """How light a color is, 0 to 1."""
    return sum(map(int, re.findall(r"\d+", color)[:3])) / 765
