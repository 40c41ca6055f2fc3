"""The memory of a model as a value: prefill, fork and continue; documents that are read apart, merged, forgotten; many
users in one batch.
"""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F

from zonal.errors import ArgumentError, FileFormatError
from zonal.memory import Memory
from zonal.models import CausalLM, ModelConfig, ModelMemory, build
from zonal.nn import LayerMemory

VOCABULARY = 19
LAYERS = {
    "softmax": ("softmax", "softmax"),
    "window": ("cosine", "softmax"),
    "sums": ("squared_affine", "linear"),
    "decayed": ("retention", "retention"),
    "ridge": ("ridge", "ska(power=1)"),
    "fading": ("ska(power=0, fading=True)", "ska(power=1, fading=True)"),
    "fast": (
        "mesanet(head_dim=8, state=4)",
        "gated_kalmanet(head_dim=8, state=4)",
        "gated_deltanet(head_dim=8, state=4)",
    ),
    "mamba2": ("mamba2(head_dim=8, state=4)", "mamba2(head_dim=8, state=4)"),
    "mamba3": ("mamba3(head_dim=8, state=4)", "mamba3(head_dim=8, state=4)"),
    "hybrid": (
        "mamba2(head_dim=8, state=4)",
        "softmax",
        "mamba3(head_dim=8, state=4)",
        "ska(power=2)",
        "squared_affine",
    ),
}
MERGED = [name for name in LAYERS if name not in ("mamba3", "hybrid")]


def make(name: str, depth: int = 9, **options) -> CausalLM:
    """A small model in float64 whose tokens differ clearly. name: one of LAYERS, or the spec of a layer."""
    layers = LAYERS.get(name, (name,))[:depth]
    settings = {"heads": 4, "kv_heads": 2, "rotary": True, "conv": 3, "mlp": "swiglu", "init_std": 0.3} | options
    model = build(ModelConfig(VOCABULARY, 16, layers, **settings), 0).double()
    with torch.no_grad():
        for block in model.blocks:
            block.attention.output.weight.normal_(0.0, 0.3, generator=torch.Generator().manual_seed(3))
    return model


def text(length: int, seed: int = 1, batch: int = 1) -> torch.Tensor:
    return torch.randint(VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def equal(a: ModelMemory, b: ModelMemory) -> None:
    """Bit for bit."""
    assert a.spans() == b.spans()
    for one, two in zip(a.layers, b.layers, strict=True):
        assert torch.equal(torch.as_tensor(one.position), torch.as_tensor(two.position))
        mine, theirs = one.memory.contents() | dict(one.carried), two.memory.contents() | dict(two.carried)
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[key], theirs[key]) for key in mine)
        assert one.tail is two.tail is None or torch.equal(one.tail, two.tail)


def near(a: torch.Tensor, b: torch.Tensor, tolerance: float = 1e-12) -> None:
    assert a.shape == b.shape
    assert (a - b).abs().max() <= tolerance * (1 + b.abs().max())


# --- prefill, fork, continue ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_forked_continuation_equals_recomputation(name: str, padded: bool) -> None:
    """The same calls give the same bits; one pass over the whole text gives the same numbers, after warm prefills of
    many tokens too.
    """
    model, prompt, more = make(name), text(11, batch=2), text(6, 2, batch=2)
    mask = torch.tensor([[False] * 4 + [True] * 7, [True] * 11]) if padded else None
    logits, memory = model.prefill(prompt, key_padding_mask=mask)
    fork = memory.fork()
    one = model.prefill(more, fork)
    other = model.continuation(logits, memory, 5, seed=3)
    again = model.prefill(more, memory)  # whatever went on from there, the memory is as it was
    assert torch.equal(one[0], again[0])
    equal(one[1], again[1])
    fresh = model.prefill(more, model.prefill(prompt, key_padding_mask=mask)[1])
    assert torch.equal(one[0], fresh[0])
    equal(one[1], fresh[1])
    twice = model.continuation(logits, memory.fork(), 5, seed=3)
    assert torch.equal(twice.tokens, other.tokens)
    assert torch.equal(twice.logits, other.logits)
    equal(twice.memory, other.memory)
    whole_mask = None if mask is None else torch.cat([mask, torch.ones(2, 6, dtype=torch.bool)], 1)
    whole = model(torch.cat([prompt, more], 1), key_padding_mask=whole_mask)
    near(logits, whole[:, 10])
    near(one[0], whole[:, -1])
    drawn = torch.cat([prompt, other.tokens], 1)
    near(other.logits, model(drawn, key_padding_mask=None if mask is None else whole_mask[:, :16])[:, -1])


@pytest.mark.parametrize("name", LAYERS)
def test_single_precision_by_the_compiled_kernels(name: str) -> None:
    """Prefill and steps by whatever runs in float32: forks go on bit for bit, spans are forgotten up to rounding."""
    model, prompt, more = make(name).float(), text(40, batch=2), text(3, 2, batch=2)
    logits, memory = model.prefill(prompt)
    one, two = (model.continuation(logits, fork, 6, seed=1) for fork in (memory.fork(), memory.fork()))
    assert torch.equal(one.logits, two.logits)
    equal(one.memory, two.memory)
    _, named = model.prefill(prompt, span="a")
    _, named = model.prefill(more, named, span="b")
    assert [s.name for s in model.step(more[:, :1], named)[1].spans()] == ["a", "b"]
    got, expected = model.prefill(more, named.forget("b"))[0], model.prefill(more, memory)[0]
    assert (got - expected).abs().max() < 1e-4 * (1 + expected.abs().max())


@pytest.mark.parametrize("name", LAYERS)
def test_prefill_in_chunks(name: str) -> None:
    model, tokens = make(name), text(13, batch=2)
    mask = torch.tensor([[False] * 5 + [True] * 8, [True] * 13])
    logits, memory = model.prefill(tokens, key_padding_mask=mask, span="all")
    for chunk in (1, 4, 13, 50):
        again, pieces = model.prefill(tokens, key_padding_mask=mask, chunk=chunk, span="all")
        near(again, logits)
        assert [(s.name, s.start, s.count) for s in pieces.spans()] == [("all", 0, 13)]
        near(model.prefill(tokens, pieces)[0], model.prefill(tokens, memory)[0])


def test_continuation_is_generate_that_keeps_its_place() -> None:
    model, prompt = make("hybrid"), text(7, batch=3)
    free = torch.stack(list(model.generate(prompt, 12, seed=1)), 1)
    whole = model.continuation(*model.prefill(prompt), 12, seed=1)
    assert torch.equal(whole.tokens, free)
    stop = [int(free[0, 3]), int(free[1, 6])]
    stopped = model.continuation(*model.prefill(prompt), 12, seed=1, stop=stop)
    assert torch.equal(stopped.tokens, torch.stack(list(model.generate(prompt, 12, seed=1, stop=stop)), 1))
    greedy = model.continuation(*model.prefill(prompt), 12, temperature=0)
    half = model.continuation(*model.prefill(prompt), 5, temperature=0)
    rest = model.continuation(half.logits, half.memory, 7, temperature=0)
    assert torch.equal(torch.cat([half.tokens, rest.tokens], 1), greedy.tokens)
    assert torch.equal(rest.logits, greedy.logits)
    nothing = model.continuation(*model.prefill(prompt), 0)
    assert nothing.tokens.shape == (3, 0)
    assert torch.equal(nothing.logits, model.prefill(prompt)[0])


@pytest.mark.parametrize(
    "name",
    ["softmax", "sums", "ridge", "mamba3", "regime(prior=('window(left=3)',))", "regime(prior=('alibi',))"],
)
def test_a_row_that_met_its_stop_reads_no_more(name: str) -> None:
    """It goes on as if its last token had been the stop."""
    model, prompt = make(name), text(7, batch=2)
    free = model.continuation(*model.prefill(prompt), 9, seed=1).tokens
    stop = int(free[0, 2])
    end = min(t for t in range(9) if int(free[0, t]) == stop) + 1
    done = model.continuation(*model.prefill(prompt), 9, seed=1, stop=[stop])
    assert done.tokens[0, end:].eq(-1).all()
    alone = torch.cat([prompt[:1], free[:1, :end]], 1)
    more = text(4, 5)
    near(done.logits[:1], model(alone)[:, -1])
    near(model.prefill(more, done.memory.gather([0]))[0], model(torch.cat([alone, more], 1))[:, -1])
    longer = torch.cat([prompt[1:], done.tokens[1:, done.tokens[1] >= 0], more], 1)
    near(model.prefill(more.expand(2, -1), done.memory)[0][1:], model(longer)[:, -1])


@pytest.mark.parametrize(("name", "span"), [("ska(power=1, chunk=4)", None), ("softmax", "prompt")])
def test_rows_of_one_length_stay_so_where_one_met_its_stop(name: str, span: str | None) -> None:
    model, prompt = make(name), text(8, batch=2)
    stop = int(model.continuation(*model.prefill(prompt), 9, seed=1).tokens[0, 0])
    done = model.continuation(*model.prefill(prompt, span=span), 9, seed=1, stop=[stop])
    assert done.tokens[0, 1:].eq(-1).all()
    assert done.memory.count == 8 + done.tokens.shape[1] > 9
    assert [s.name for s in done.memory.spans()] == ([] if span is None else [span])


# --- spans ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LAYERS)
def test_forgetting_the_newest_span_goes_back(name: str) -> None:
    """Exact through all layers: what came before never saw it. Tail, position and what else is carried go back too."""
    model = make(name)
    _, before = model.prefill(text(9, 1), span="first")
    _, after = model.prefill(text(6, 2), before, span="second")
    _, after = model.prefill(text(3, 3), after, span="third", chunk=2)
    more = text(5, 4)
    back = after.forget("third").forget("second")
    if name in (
        "fast",
        "decayed",
        "mamba2",
        "mamba3",
        "hybrid",
    ):  # these add up in another order than a memory its parts
        assert back.spans() == before.spans()
        near(model.prefill(more, back)[0], model.prefill(more, before)[0])
    else:
        equal(back, before)
        assert torch.equal(model.prefill(more, back)[0], model.prefill(more, before)[0])
    _, unnamed = model.prefill(text(9, 1))
    assert after.forget("third").forget("second").forget("first").count == 0
    opened = model.prefill(text(6, 2), unnamed, span="x")[1]
    assert torch.equal(model.prefill(more, opened.forget("x"))[0], model.prefill(more, unnamed)[0])


@pytest.mark.parametrize(
    ("name", "conv"),
    # Mamba2 and fast weights have a convolution of their own
    [(name, conv) for name in MERGED for conv in (0, 3) if conv or name not in ("mamba2", "fast")],
)
def test_documents_that_were_read_apart(name: str, conv: int, tmp_path) -> None:
    """A library: merged in any number, forgotten again as if never there, in every layer and bit for bit."""
    model, more = make(name, conv=conv), text(5, 9)
    documents = {f"doc-{i}": model.prefill(text(n, i))[1] for i, n in enumerate((7, 12, 4))}

    def library(*names: str) -> ModelMemory:
        found = model.empty_memory(1)
        for one in names:
            found = found.merge(documents[one], span=one)
        return found

    all_of_them = library(*documents)
    assert [(s.name, s.start, s.count) for s in all_of_them.spans()] == [
        ("doc-0", 0, 7),
        ("doc-1", 7, 12),
        ("doc-2", 19, 4),
    ]
    for gone in documents:
        left, never = all_of_them.forget(gone), library(*(n for n in documents if n != gone))
        equal(left, never)
        assert torch.equal(model.prefill(more, left)[0], model.prefill(more, never)[0])
    all_of_them.save(tmp_path / "m")
    equal(model.load_memory(tmp_path / "m"), all_of_them)
    assert torch.equal(model.prefill(more, all_of_them.fork())[0], model.prefill(more, all_of_them)[0])
    asked = model.prefill(more, all_of_them)[1]
    assert [s.name for s in asked.spans()] == ["doc-0", "doc-1", "doc-2"]


@pytest.mark.parametrize("name", ["softmax", "sums", "decayed", "ridge", "fading"])
def test_merged_is_documents_that_do_not_see_each_other(name: str) -> None:
    """Against all keys and values of every layer, kept one document after another: a text that sees both, which do not
    see each other.
    """
    model, a, b, more = make(name), text(7, 1), text(5, 2), text(4, 3)
    first = model.prefill(a)[1]
    second = model.prefill(b, model.empty_memory(1, position=7))[1]
    got = model.step(more, first.merge(second))[0]

    def keys(model_memory: ModelMemory, tokens: torch.Tensor) -> ModelMemory:
        layers = []
        for layer in model_memory.layers:
            form = layer.memory.form
            kept = Memory.empty(
                layer.memory.operator, form.batch, form.heads, form.key_dim, form.value_dim, form.dtype, kind="keys"
            )
            layers.append(type(layer)(kept, layer.tail, layer.length, layer.padding, layer.carried))
        return model.step(tokens, ModelMemory(tuple(layers)))[1]

    one, two = keys(model.empty_memory(1), a), keys(model.empty_memory(1, position=7), b)
    joint = [type(y)(x.memory.merge(y.memory), y.tail, 12) for x, y in zip(one.layers, two.layers, strict=True)]
    near(got, model.step(more, ModelMemory(tuple(joint)))[0])


def test_merged_softmax_equals_a_mask_over_one_sequence() -> None:
    """The same written out with torch's own attention: block-diagonal over the documents, all of them open to what
    follows.
    """
    model, a, b, more = make("softmax", conv=0, rotary=True), text(7, 1), text(5, 2), text(4, 3)
    second = model.prefill(b, model.empty_memory(1, position=7))[1]
    got = model.step(more, model.prefill(a)[1].merge(second))[0]
    seen = torch.ones(16, 16, dtype=torch.bool).tril()
    seen[7:12, :7] = False
    x = model.embedding(torch.cat([a, b, more], 1))
    for block in model.blocks:
        layer, c = block.attention, block.attention_norm(x)
        q, k, v = (
            f(c).unflatten(2, (h, -1)).transpose(1, 2) for f, h in ((layer.query, 4), (layer.key, 2), (layer.value, 2))
        )
        q, k = layer.rotary(q, 0), layer.rotary(k, 0)
        y = F.scaled_dot_product_attention(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), attn_mask=seen)
        x = x + layer.output(y.transpose(1, 2).flatten(2))
        x = x + block.mlp(block.mlp_norm(x))
    near(got, F.linear(model.norm(x), model.embedding.weight)[:, 12:])


@pytest.mark.parametrize(
    "name", ["softmax", "sums", "decayed", "ridge", "fading", "mamba2", "fast", "rewa_topological"]
)
def test_what_forgetting_an_older_span_of_one_text_means(name: str) -> None:
    """Keys and values of one layer without convolution do not depend on their past: forgetting is exact there, but for
    positions and shapes of neighbourhoods, which stay.

    In a deeper model later tokens have seen the span below, and the gap to never having read it is far beyond rounding.
    """
    a, b, c, more = text(6, 1), text(6, 2), text(6, 3), text(4, 4)

    def gap(model: CausalLM) -> float:
        memory = None
        for i, part in enumerate((a, b, c)):
            memory = model.prefill(part, memory, span=f"s{i}")[1]
        assert memory is not None
        forgotten = memory.forget("s1")
        never = model.prefill(c, model.prefill(a)[1])[1]
        got, expected = model.step(more, forgotten)[0], model.step(more, never)[0]
        return float((got - expected).abs().max() / expected.abs().max())

    flat = {"rotary": False, "conv": 0}
    if name not in ("mamba2", "fast", "rewa_topological"):
        assert gap(make(name, 1, **flat)) < 1e-12
    assert gap(make(name, **flat)) > 1e-4
    assert gap(make(name)) > 1e-4


def test_an_older_span_of_mamba_3_is_kept() -> None:
    """Its last token enters with the first one of the next span."""
    model, memory = make("mamba3", 1, rotary=False, conv=0), None
    for i in range(3):
        memory = model.prefill(text(6, i), memory, span=f"s{i}")[1]
    assert memory is not None
    with pytest.raises(ArgumentError, match=r"LayerMemory\.forget: the layer carries .*span 's1'\. Forget the newest"):
        memory.forget("s1")
    assert memory.forget("s2").forget("s1").count == 6


def test_positions_stay_when_an_older_span_goes() -> None:
    """The tokens after it keep their distance to what follows: the text with a gap, not the text moved together."""
    model = make("softmax", 1, conv=0)
    a, b, c, more = text(6, 1), text(6, 2), text(6, 3), text(4, 4)
    memory = model.prefill(a, span="a")[1]
    memory = model.prefill(c, model.prefill(b, memory, span="b")[1], span="c")[1]
    forgotten = memory.forget("b")
    assert (forgotten.position, forgotten.count) == (18, 12)
    gap = model.prefill(a)[1].merge(model.prefill(c, model.empty_memory(1, position=12))[1])
    near(model.step(more, forgotten)[0], model.step(more, gap)[0])


# --- many users -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LAYERS)
def test_users_are_stacked_step_once_and_part(name: str) -> None:
    model = make(name)
    prompts = [text(n, n) for n in (9, 3, 14)]
    users = [model.prefill(prompt)[1] for prompt in prompts]
    tokens = text(1, 7, batch=3)
    stacked = ModelMemory.stack(iter(users))
    logits, after = model.step(tokens, stacked)
    for i, (prompt, one) in enumerate(zip(prompts, after.unbind(), strict=True)):
        whole = torch.cat([prompt, tokens[i : i + 1]], 1)
        near(logits[i : i + 1], model(whole)[:, -1:])
        alone = model.step(tokens[i : i + 1], users[i])[1]
        assert (one.position, one.nbytes) == (alone.position, alone.nbytes)
        more = text(3, 11)
        near(model.step(more, one)[0], model.step(more, alone)[0])
    # one user leaves, another takes the place
    newcomer = model.prefill(text(5, 20))[1]
    changed = after.scatter([1], newcomer).gather([2, 1])
    logits, _ = model.step(text(1, 8, batch=2), changed)
    near(logits[1:], model(torch.cat([text(5, 20), text(1, 8, batch=2)[1:]], 1))[:, -1:])


def test_stacked_users_keep_their_spans() -> None:
    model = make("sums")
    users = [
        model.prefill(text(4, i), model.prefill(text(n, n), span="doc")[1], span="question")[1]
        for i, n in enumerate((9, 5))
    ]
    more = text(2, 3, batch=2)
    got = model.step(more, ModelMemory.stack(users).forget("doc"))[0]
    for i, user in enumerate(users):
        near(got[i : i + 1], model.step(more[i : i + 1], user.forget("doc"))[0])


# --- refusals -------------------------------------------------------------------------------------------------------


def test_memories_of_another_model_are_refused(tmp_path) -> None:
    model, other = make("sums"), make("sums")
    with torch.no_grad():
        other.embedding.weight.add_(0.1)
    mine, theirs = model.prefill(text(5))[1], other.prefill(text(5))[1]
    for act in (
        lambda: mine.merge(theirs),
        lambda: ModelMemory.stack([mine, theirs]),
        lambda: mine.scatter([0], theirs),
    ):
        with pytest.raises(ArgumentError, match="come from two models"):
            act()
    with pytest.raises(ArgumentError, match=r"made by another layer or model.*load_memory"):
        model.step(text(2), theirs)
    mine.save(tmp_path / "m")
    with pytest.raises(FileFormatError, match=r"other weights than this model's. Read the text again with prefill"):
        other.load_memory(tmp_path / "m")
    # the same weights in another object are the same model
    model.save(tmp_path / "model")
    twin = CausalLM.load(tmp_path / "model")
    near(twin.prefill(text(3), twin.load_memory(tmp_path / "m"))[0], model.prefill(text(3), mine)[0])


BAD = {
    "merge of lengths": (lambda model, a: a.merge(ModelMemory(a.layers[:1])), "two models"),
    "merge with nothing": (lambda model, a: a.merge("b"), "another ModelMemory is required"),
    "stack of nothing": (lambda model, a: ModelMemory.stack([]), "at least one memory"),
    "name taken": (lambda model, a: model.prefill(text(2), a, span="doc"), "a span 'doc' already, of 6 tokens"),
    "name taken by merge": (lambda model, a: a.merge(a.fork()), "a span 'doc' already"),
    "unknown span": (lambda model, a: a.forget("dok"), "Did you mean 'doc'"),
    "no such row": (lambda model, a: a.gather([1]), r"rows must lie in \[0, 1\)"),
    "chunk": (lambda model, a: model.prefill(text(2), chunk=0), "chunk must be at least 1"),
    "right padding": (
        lambda model, a: model.prefill(text(2), key_padding_mask=torch.tensor([[True, False]])),
        "on the left",
    ),
    "logits of another batch": (
        lambda model, a: model.continuation(torch.zeros(2, VOCABULARY), a, 3),
        r"logits must be \(1, 19\)",
    ),
    "fewer than none": (lambda model, a: model.continuation(torch.zeros(1, VOCABULARY), a, -1), "must not be negative"),
    "a place for the started": (lambda model, a: a.layers[0].at(4), "an empty memory and a position"),
}


@pytest.mark.parametrize("what", BAD)
def test_refusals_change_nothing(what: str) -> None:
    model = make("sums")
    memory = model.prefill(text(6), span="doc")[1]
    before, spans = model.prefill(text(3), memory)[0], memory.spans()
    act, words = BAD[what]
    with pytest.raises(ArgumentError, match=words):
        act(model, memory)
    assert torch.equal(model.prefill(text(3), memory)[0], before)
    assert memory.spans() == spans


def test_what_mamba3_read_apart_is_not_merged() -> None:
    model = make("mamba3")
    one, two = model.prefill(text(5, 1))[1], model.prefill(text(4, 2))[1]
    with pytest.raises(
        ArgumentError, match=r"carries previous, angle.*Read the second text from the first one's memory"
    ):
        one.merge(two)
    started = model.empty_memory(1).merge(one, span="x")
    assert torch.equal(model.prefill(text(3), started)[0], model.prefill(text(3), one)[0])


def test_memories_of_models_and_layers_are_printed_in_one_line_and_move() -> None:
    made = build(
        ModelConfig(vocab_size=20, dim=16, layers=("mamba2(head_dim=8, state=4)", "ska(power=1)"), heads=2, conv=3),
        seed=0,
    )
    _, memory = made.prefill(torch.randint(20, (2, 6), generator=torch.Generator().manual_seed(0)), span="text")
    assert repr(memory) == f"ModelMemory(2 layers, 2 sequences of 6 tokens, {memory.nbytes} bytes, spans ['text'])"
    for layer in memory.layers:
        assert repr(layer).startswith(f"LayerMemory({layer.memory!r}, 6 tokens read, a convolution's tail")
        assert "tensor(" not in repr(layer)
        there = layer.to("meta")
        assert there.tail is not None
        assert {x.device.type for x in (there.tail, *there.carried.values(), *there.memory.contents().values())} == {
            "meta"
        }
    token = torch.tensor([[3], [4]])
    assert torch.equal(made.prefill(token, memory.to("cpu"))[0], made.prefill(token, memory)[0])


@pytest.mark.parametrize("given", [None, "layer"])
@pytest.mark.parametrize("call", ["step", "step_with_report", "decoder", "continuation"])
def test_what_is_no_memory_of_a_model_is_refused(call: str, given: str | None) -> None:
    model = make("sums")
    memory = None if given is None else model.empty_memory(1).layers[0]
    arguments = {
        "step": (text(2), memory),
        "step_with_report": (text(2), memory, {}),
        "decoder": (memory,),
        "continuation": (torch.zeros(1, VOCABULARY), memory, 2),
    }
    received = "NoneType" if given is None else "LayerMemory"
    with pytest.raises(ArgumentError, match=rf"CausalLM\.\w+: a ModelMemory is required, received {received}"):
        getattr(model, call)(*arguments[call])


@pytest.mark.parametrize("verb", ["merge", "scatter", "stack"])
def test_what_is_no_memory_of_a_layer_is_refused(verb: str) -> None:
    layer = make("sums").empty_memory(1).layers[0]
    acts = {
        "merge": lambda other: layer.merge(other),
        "scatter": lambda other: layer.scatter([0], other),
        "stack": lambda other: LayerMemory.stack([layer, other]),
    }
    with pytest.raises(ArgumentError, match=rf"LayerMemory\.{verb}: another LayerMemory is required, received"):
        acts[verb](layer.memory)


def test_copies_of_a_memory_go_on_with_the_same_model() -> None:
    model = make("mamba2")
    memory = model.prefill(text(6, 1))[1]
    copied = copy.deepcopy(memory)
    assert torch.equal(model.step(text(1, 2), copied)[0], model.step(text(1, 2), memory)[0])
    with pytest.raises(ArgumentError, match=r"went through pickle.*save\(\) and load_memory\(\)"):
        model.step(text(1, 2), pickle.loads(pickle.dumps(memory)))
    with pytest.raises(ArgumentError, match=r"Memory\.to: a device such as 'cpu'.*torch\.float64"):
        memory.to(torch.float64)  # type: ignore[arg-type]
