"""What the library refuses of models, batches, configs and adapters, one line for each, in an error that names the fix.

Every refusal leaves all models that it was given as they were; tests/test_refused_folders.py has those of folders.
"""

from functools import partial

import peft
import pytest
import torch
from families import (
    HEADS,
    VOCABULARY,
    build,
    fingerprint,
    lm_batches,
    padded,
    same,
    tokens,
    wide,
    word_tokenizer,
)
from torch import nn
from torch.nn.utils import parametrizations, prune
from transformers import (
    AlbertConfig,
    AlbertModel,
    AutoModel,
    DynamicCache,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
)

from hf_growattn import (
    GrowAttnConfig,
    Grower,
    GrowthCallback,
    GrowthConfig,
    Method,
    attention_views,
    export_model,
    load_growth,
    patch_model,
    race,
    save_growth,
    unpatch_model,
    write_card,
)
from hf_growattn.growable.attention import attentions
from hf_growattn.measure.passes import default_loss

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
BATCH = lm_batches(1)[0]
PAIR = [BATCH] * 2
llama = partial(build, "llama-2")
DIM = 6 * 48  # weights that one more dim of patterns or messages adds to a layer of "llama-2"


class Given:
    """Makes what a call needs, and remembers the models: afterwards they must be what they were."""

    def __init__(self, folder):
        self.folder, self._watched = folder, {}

    def watch(self, model, optimizer=None):
        if isinstance(model, PreTrainedModel):
            self._watched[id(model)] = model, optimizer, type(model), fingerprint(model, optimizer)
        return model

    def stock(self, variant="llama-2", head="causal-lm"):
        return self.watch(build(variant, HEADS.get(head, head)))

    def patched(self, variant="llama-2", head="causal-lm"):
        return self.watch(patch_model(build(variant, HEADS.get(head, head))))

    def lora(self, change=lambda base: base):
        model = peft.get_peft_model(change(build("llama-2")), peft.LoraConfig())
        self.watch(model.get_base_model())
        return model

    def adapted(self, **options):
        model = peft.get_peft_model(build("llama-2"), GrowAttnConfig(**options or {"v_dims": 1}))
        self.watch(model.get_base_model())
        return model

    def check(self):
        for model, optimizer, kind, before in self._watched.values():
            assert type(model) is kind and same(fingerprint(model, optimizer), before)


def check_refusal(call, kind, word, folder):
    """A call is refused in one line, and leaves the models that it was given as they were."""
    given = Given(folder)
    with pytest.raises(kind, match=word) as refused:
        call(given)
    text = str(refused.value)
    assert "\n" not in text and len(text) < 500 and "tensor(" not in text
    given.check()


def find(batches, variant="llama-2", head="causal-lm", change=None, **config):
    """A call that finds a growth on these batches in a model, or in what `change` makes of it."""

    def call(given):
        model = given.patched(variant, head)
        if change is not None:
            change(model)
            given.watch(model)
        Grower(model, GrowthConfig(**config or {"qk_dims": 4})).find(batches)

    return call


def config(**options):
    return lambda given: GrowthConfig(**options)


def edited(key, value, place=(1, 3)):
    batches = [{name: tensor.clone() for name, tensor in batch.items()} for batch in lm_batches(4)]
    batches[2][key][place] = value
    return batches


def freeze(model):
    for role in ("q_proj", "v_proj"):
        getattr(attentions(model)[1].module, role).requires_grad_(False)


def freeze_a_bias(model):
    attentions(model)[0].module.q_proj.bias.requires_grad_(False)


def wrap(model):
    first = attentions(model)[0].module
    first.o_proj = nn.Sequential(first.o_proj)


def compute(model):
    parametrizations.weight_norm(model.model.layers[0].self_attn.q_proj)
    prune.l1_unstructured(model.model.layers[1].self_attn.v_proj, "weight", 0.3)


def spoil(value, model):
    model.lm_head.weight.data[3, 3] = value


def in_inference_mode(given):
    model = given.patched()
    with torch.inference_mode():
        Grower(model, GrowthConfig(qk_dims=4)).find([BATCH])


def made_in_inference_mode(given):
    with torch.inference_mode():
        model = patch_model(build("llama-2"))
    Grower(model, GrowthConfig(qk_dims=4)).find([BATCH])


def on_meta(given):
    with torch.device("meta"):
        model = patch_model(build("llama-2"))
    Grower(model, GrowthConfig(qk_dims=4)).find([BATCH])


def other_optimizer(given):
    Grower(given.patched(), GrowthConfig(qk_dims=4), torch.optim.AdamW(build("llama-2").parameters())).find([BATCH])


def two_models(given):
    both = nn.ModuleList([given.patched(), patch_model(build("llama-2"))])
    Grower(both, GrowthConfig(qk_dims=4), loss=lambda _, batch: both[0](**batch).loss).find([BATCH])


def with_loss(loss):
    return lambda given: Grower(given.patched(), GrowthConfig(qk_dims=4), loss=loss).find(lm_batches(2))


def with_gradients_of_nan(model, batch):
    loss = model(**batch).loss
    return loss + (loss - loss.detach()).abs().sqrt()


def callback(given):
    rows = [{"input_ids": row, "labels": row} for row in tokens(8)]
    options = dict(max_steps=4, use_cpu=True, report_to="none", save_strategy="no", per_device_train_batch_size=2)
    trainer = Trainer(
        patch_model(build("llama-2")), TrainingArguments(str(given.folder), **options), train_dataset=rows
    )
    trainer.add_callback(GrowthCallback(trainer, GrowthConfig(budget=5), batches=2))
    trainer.train()


def old_cache(given):
    model, cache = patch_model(build("llama-2")), DynamicCache()
    model(tokens(), past_key_values=cache)
    Grower(model, GrowthConfig(qk_dims=2)).find(lm_batches(2)).keep()
    given.watch(model)(tokens(), past_key_values=cache)


def grown(given):
    return given.watch(wide("llama-2", 2, 2))


def albert(given):
    sizes = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    patch_model(given.watch(AlbertModel(AlbertConfig(**sizes))))


ROWS, ONE = lm_batches(4), GrowthConfig(qk_dims=1)
SHORT = [batch | {"labels": batch["labels"][:, :-1]} for batch in ROWS]
IGNORED = BATCH | {"labels": torch.full_like(BATCH["labels"], -100)}

REFUSED = {
    # what is no model, or not the one that is meant
    "a name": (lambda g: patch_model("gpt2"), TypeError, r"not a str: load it first.*from_pretrained"),
    "a tokenizer": (lambda g: patch_model(word_tokenizer()), TypeError, "not a TokenizersBackend: load it first"),
    "no model": (lambda g: patch_model(None), TypeError, "not a NoneType: load it first"),
    "unpatching a name": (lambda g: unpatch_model("gpt2"), TypeError, "not a str: load it first"),
    "a name grows": (lambda g: Grower("gpt2", ONE), TypeError, "not a str: load it first"),
    "model and data swapped": (lambda g: Grower(ROWS, ONE), TypeError, "not a list: load it first"),
    "model and config swapped": (lambda g: Grower(ONE, g.patched()), TypeError, r"GrowthConfig.*given a GrowAttnLlama"),
    "config and data swapped": (lambda g: Grower(g.patched(), ROWS), TypeError, "such as GrowthConfig.*given a list"),
    "a loss as an optimizer": (lambda g: Grower(g.patched(), ONE, default_loss), TypeError, "is a function.*loss="),
    "a config as a dict": (lambda g: Grower(g.patched(), {"qk_dims": 2}), TypeError, r"GrowthConfig\(budget=0.02\)"),
    "a model as data": (lambda g: Grower(g.patched(), ONE).find(g.patched()), ValueError, "A list of batches"),
    "saving nothing": (lambda g: save_growth(None, g.folder), TypeError, "not a NoneType: load it first"),
    "folder and model swapped": (lambda g: load_growth(str(g.folder), grown(g)), TypeError, "not a str: load it first"),
    "a card of nothing": (lambda g: write_card(None, g.folder), TypeError, "not a NoneType: load it first"),
    "a growth that is not there": (lambda g: save_growth(g.patched(), g.folder), ValueError, "has not grown"),
    "a card of no growth": (lambda g: write_card(g.patched(), g.folder), ValueError, "has not grown"),
    "a card of a stock model": (lambda g: write_card(g.stock(), g.folder), ValueError, "has not grown"),
    "views of nothing": (lambda g: attention_views(None), TypeError, "not a NoneType: load it first"),
    "exporting a name": (lambda g: export_model("gpt2", g.folder), TypeError, "model is needed here, not a str"),
    "an unpatched model": (lambda g: Grower(g.stock(), ONE), ValueError, "call patch_model.model. first"),
    "an unpatched model in a module": (
        lambda g: Grower(nn.ModuleDict({"body": g.stock()}), ONE),
        ValueError,
        r"call patch_model.model\.body. first",
    ),
    "an unpatched base": (lambda g: Grower(g.lora(), ONE), ValueError, r"patch_model.model.get_base_model"),
    "patching a peft model": (lambda g: patch_model(g.lora()), TypeError, r"patch_model\(model\.base_model\.model\)"),
    "unpatching a peft model": (lambda g: unpatch_model(g.lora(patch_model)), ValueError, "unpatch_model.that."),
    "a wrapper": (lambda g: patch_model(nn.DataParallel(g.stock())), TypeError, r"patch_model\(model\.module\)"),
    "attention that norms its output": (albert, ValueError, r"cannot join AlbertModel.*AlbertAttention"),
    "no such submodel": (lambda g: patch_model(g.stock(), "encoder"), ValueError, "no inner model 'encoder'"),
    "unpatching a grown model": (lambda g: unpatch_model(grown(g)), ValueError, "drop_growth=True"),
    "racing a model": (lambda g: race(g.stock(), PAIR, PAIR), TypeError, "make_model must be a.*is a LlamaForCausalLM"),
    "racing a name": (lambda g: race(lambda: "gpt2", PAIR, PAIR), TypeError, "not a str: load it first"),
    "training a name": (lambda g: Method("lora").prepare("gpt2"), TypeError, "not a str: load it first"),
    # batches
    "racing on one batch": (lambda g: race(llama, PAIR, BATCH), ValueError, "is needed, not a dict"),
    "racing a model and data swapped": (
        lambda g: race(PAIR, llama(), PAIR),
        TypeError,
        "make_model must be a.*a list",
    ),
    "racing without labels": (lambda g: race(llama, [padded()] * 2, PAIR), ValueError, "no loss for a batch.*labels"),
    "racing on short labels": (lambda g: race(llama, SHORT * 2, PAIR), ValueError, "give each token a label"),
    "racing by a number": (lambda g: race(llama, PAIR, PAIR, 0.5), TypeError, "loss must be a function of model"),
    "an empty list": (find([]), ValueError, "no batches"),
    "an empty iterator": (find(iter([])), ValueError, "no batches"),
    "a text as a batch": (find(["text"]), ValueError, "Batch 0 is a str"),
    "a single batch": (find(BATCH), ValueError, r"A list of batches is needed, not a dict: pass \[batch\]"),
    "a text": (find("some text"), ValueError, "needed, not a str"),
    "nothing": (find(None), ValueError, "needed, not a NoneType"),
    "a single tensor": (find(tokens()), ValueError, r"int64 of shape \(17,\).*list of batches, \[batch\]"),
    "tokens as a list": (find([{"input_ids": [[3, 4, 5]]}]), ValueError, "are a list, not a tensor"),
    "tokens as floats": (find([tokens().float()]), ValueError, "float32 of shape"),
    "no rows": (find([tokens()[:0]]), ValueError, r"shape \(0, 17\)"),
    "short labels": (find(SHORT), ValueError, r"labels of batch 0 are of shape \(3, 16\).*\(3, 17\): give each token"),
    "unknown tokens": (find(edited("input_ids", VOCABULARY)), ValueError, r"Batch 2 has input_ids from.*own tokenizer"),
    "negative tokens": (find(edited("input_ids", -1), "gpt2-2"), ValueError, "Batch 2 has input_ids from -1 to"),
    "unknown labels": (find(edited("labels", VOCABULARY)), ValueError, "Batch 2 has labels from"),
    # losses
    **{
        f"no labels, {head}": (find([padded()], head=head), ValueError, "no loss for batch 0.*labels") for head in HEADS
    },
    "no head": (find([padded()], head=AutoModel), ValueError, "model with a head"),
    "all labels ignored": (find([BATCH, IGNORED]), ValueError, "batch 1 is nan.*-100"),
    "a loss of nan": (find([BATCH], change=partial(spoil, float("nan"))), ValueError, "batch 0 is nan"),
    "a loss of inf": (find([BATCH], change=partial(spoil, float("inf"))), ValueError, "batch 0 is (nan|inf)"),
    "a tuple without a loss": (
        find(
            [{"input_ids": tokens()}], head=AutoModel, change=lambda model: setattr(model.config, "return_dict", False)
        ),
        ValueError,
        r"tensor of one number.*shape \(\d, 17, 48\)",
    ),
    "a loss that is a number": (with_loss(0.5), TypeError, "loss must be a function of model and batch"),
    "a loss of outputs": (with_loss(lambda m, b: m(**b)), ValueError, r"is a CausalLM.*return outputs\.loss"),
    "a loss of logits": (with_loss(lambda m, b: m(**b).logits), ValueError, r"is a tensor.*return outputs\.loss"),
    "a loss without gradients": (with_loss(lambda m, b: m(**b).loss.detach()), ValueError, "0 has no gradient"),
    "a loss of nan gradients": (with_loss(with_gradients_of_nan), ValueError, "its gradients are not. Look for"),
    "a loss past the attention": (
        with_loss(lambda m, b: m.lm_head(m.model.embed_tokens(b["input_ids"])).square().mean()),
        ValueError,
        "runs none of the attention modules that shall grow: choose other layers",
    ),
    # weights and optimizers
    "frozen weights": (
        find([BATCH], change=freeze, qk_dims=2, update_existing=True),
        ValueError,
        r"q_proj of layer 1 is frozen.*requires_grad_\(True\)",
    ),
    "frozen values": (
        find([BATCH], change=freeze, v_dims=2, method="refactor"),
        ValueError,
        "v_proj of layer 1 is frozen",
    ),
    "a frozen bias": (
        find([BATCH], "llama-5-bias", change=freeze_a_bias, qk_dims=2, update_existing=True),
        ValueError,
        "q_proj of layer 0 is frozen",
    ),
    "weights within another module": (
        find([BATCH], change=wrap, v_dims=2, update_existing=True),
        ValueError,
        "o_proj of layer 0 is a Sequential",
    ),
    "rotated queries refactored": (
        find([BATCH], qk_dims=2, method="refactor"),
        ValueError,
        "rotates its queries and keys.*append",
    ),
    "computed weights": (
        find(ROWS, change=compute, qk_dims=1, update_existing=True),
        ValueError,
        "remove_parametrizations or prune",
    ),
    "two models": (two_models, ValueError, "holds several models that could grow"),
    "inference mode": (in_inference_mode, ValueError, "outside torch.inference_mode"),
    "inference tensors": (made_in_inference_mode, ValueError, "was made under torch.inference_mode|is frozen"),
    "the meta device": (on_meta, ValueError, "meta device"),
    "an optimizer of another model": (other_optimizer, ValueError, "optimizer holds none"),
    "a cache of before the growth": (old_cache, ValueError, r"\(16, 16\) wide.*\(18, 18\) wide.*empty cache"),
    # configs
    "no dims": (config(qk_dims=0), ValueError, "Nothing to grow: give qk_dims"),
    "fewer dims": (config(qk_dims=-2), ValueError, "qk_dims must be a whole number"),
    "half a dim": (config(qk_dims=2.5), ValueError, "qk_dims must be a whole number"),
    "dims as a flag": (config(qk_dims=True), ValueError, "qk_dims must be a whole number"),
    "no layers": (config(qk_dims=2, layers=[]), ValueError, "layers must be an index, a list"),
    "layers as a text": (config(qk_dims=1, layers="01"), ValueError, "layers must be an index, a list"),
    "a seed as a text": (config(qk_dims=1, seed="x"), ValueError, "seed must be a whole number"),
    "a seed too large": (config(qk_dims=1, seed=2**70), ValueError, r"seed must be a whole number, .*below 2\*\*63"),
    "kinds as a text": (config(budget=0.1, kinds="qk"), ValueError, "kinds must be a list of 'qk', 'v'"),
    "a kind as a text": (config(budget=0.1, kinds="v"), ValueError, "kinds must be a list of 'qk', 'v'"),
    "an unknown kind": (config(budget=0.1, kinds=["values"]), ValueError, "kinds must be a list of 'qk', 'v'"),
    "a budget of nothing": (config(budget=0), ValueError, "between 0 and 1"),
    "a budget as a text": (config(budget="1%"), ValueError, "between 0 and 1"),
    "an unknown method": (config(qk_dims=2, method="replace"), ValueError, "append, refactor"),
    "old dims that move and stay": (
        config(qk_dims=2, update_existing=True, old_dims_train=False),
        ValueError,
        "Drop one",
    ),
    "a layer too many": (find([BATCH], qk_dims=2, layers=[2]), ValueError, "no attention in layer 2.*0, 1"),
    "a negative layer": (find([BATCH], qk_dims=2, layers=-1), ValueError, "no attention in layer -1.*0, 1"),
    "more dims than rank": (find([BATCH], qk_dims=33), ValueError, "48 features"),
    "a budget one too small": (find(ROWS, budget=DIM - 1), ValueError, "287 weights buy nothing"),
    "a share too small": (find(ROWS, budget=0.001), ValueError, "46 weights buy nothing"),
    "a budget of a callback": (callback, ValueError, "5 weights buy nothing"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_refusal_names_the_fix_and_leaves_everything_as_it_was(case, tmp_path):
    check_refusal(*REFUSED[case], tmp_path)
