"""CausalLM: loss, prediction, memory, generation, files, and starts that do not depend on the operator."""

import pytest
import torch
import torch.nn.functional as F
from matrix import CAUSAL_NAMES

from zonal import mechanisms, store
from zonal.errors import ArgumentError, FileFormatError
from zonal.models import CausalLM, ModelConfig, build

SPECS = (*CAUSAL_NAMES, "ska(power=1)", "ska(power=2)")
VOCABULARY = 19


def make(*layers, seed=0, awake=True, **options):
    """A small model in float64. ``awake``: no projection at zero, weights large enough for tokens to differ clearly."""
    kv_heads = 4 if "rewa_categorical" in layers else 2  # one map makes its queries and keys
    settings = {
        "heads": 4,
        "kv_heads": kv_heads,
        "rotary": True,
        "conv": (3, 0),
        "mlp": "swiglu",
        "init_std": 0.3,
    } | options
    model = build(ModelConfig(VOCABULARY, 16, layers or ("softmax", "ska(power=1)"), **settings), seed).double()
    if awake:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for block in model.blocks:
                block.attention.output.weight.normal_(0.0, 0.3, generator=generator)
    return model


def text(batch=2, length=13, seed=1):
    return torch.randint(VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def targets_for(tokens, every=3):
    targets = tokens.roll(-1, dims=1)
    targets[:, -1] = -100
    targets[:, ::every] = -100
    return targets


# --- loss and prediction --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
def test_loss_equals_torch_on_all_logits_with_gradients(tied):
    model = make(tie_embeddings=tied)
    tokens = text()
    targets = targets_for(tokens)
    total, count = model.loss(tokens, targets)
    expected = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=-100)
    assert count == int((targets != -100).sum())
    torch.testing.assert_close(total, expected, rtol=1e-11, atol=1e-11)
    parameters = dict(model.named_parameters())
    got = torch.autograd.grad(total, list(parameters.values()))
    wanted = torch.autograd.grad(expected, list(parameters.values()))
    for name, a, b in zip(parameters, got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")


def test_the_head_runs_at_supervised_positions_alone(monkeypatch):
    model = make()
    seen = []
    from zonal.models import parts

    original = parts.cross_entropy_sum
    monkeypatch.setattr(parts, "cross_entropy_sum", lambda h, w, t: seen.append(h.shape) or original(h, w, t))
    targets = torch.full((2, 13), -100)
    targets[1, 4] = 3
    assert model.loss(text(), targets)[1] == 1
    assert seen == [(1, 16)]


def test_nothing_supervised_is_a_zero_that_can_be_differentiated():
    model = make()
    total, count = model.loss(text(), torch.full((2, 13), -100))
    total.backward()
    assert (total.item(), count) == (0.0, 0)
    assert model.embedding.weight.grad.abs().max() == 0


def test_predict_reports_every_supervised_position_in_reading_order():
    model = make()
    tokens = text()
    targets = targets_for(tokens)
    predicted, target, row, loss = model.predict(tokens, targets)
    logits = model(tokens)
    places = [(b, t) for b in range(2) for t in range(13) if targets[b, t] != -100]
    assert row.tolist() == [b for b, _ in places]
    assert target.tolist() == [int(targets[b, t]) for b, t in places]
    assert predicted.tolist() == [int(logits[b, t].argmax()) for b, t in places]
    torch.testing.assert_close(loss.sum(), model.loss(tokens, targets)[0].detach(), rtol=1e-11, atol=1e-11)
    for value, (b, t) in zip(loss, places, strict=True):
        torch.testing.assert_close(value, F.cross_entropy(logits[b, t], targets[b, t]).detach(), rtol=1e-10, atol=1e-10)
    assert not loss.requires_grad


@pytest.mark.parametrize("spec", SPECS)
def test_every_parameter_has_a_finite_nonzero_gradient(spec):
    model = make(spec, spec)
    tokens = text()
    model.loss(tokens, targets_for(tokens, every=99))[0].backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().max() > 0, name


@pytest.mark.parametrize("spec", SPECS)
def test_no_logit_depends_on_a_later_token(spec):
    model, tokens = make(spec, spec), text()
    changed = tokens.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % VOCABULARY
    difference = (model(changed) - model(tokens)).abs().amax(dim=(0, 2))
    assert difference[:7].max() < 1e-10
    assert difference[7:].min() > 1e-4


def test_packed_and_padded_batches_equal_separate_texts():
    model = make()
    a, b = text(1, 5, seed=3), text(1, 8, seed=4)
    packed = model(torch.cat((a, b), dim=1), cu_seqlens=torch.tensor([0, 5, 13]))
    torch.testing.assert_close(packed, torch.cat((model(a), model(b)), dim=1), rtol=1e-9, atol=1e-9)
    mask = torch.tensor([[False] * 3 + [True] * 5, [True] * 8])
    padded = model(torch.cat((torch.cat((text(1, 3), a), dim=1), b)), key_padding_mask=mask)
    torch.testing.assert_close(padded[0, 3:], model(a)[0], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(padded[1], model(b)[0], rtol=1e-9, atol=1e-9)


def test_bfloat16_autocast_trains_in_float32_state():
    model = make().float()
    tokens = text()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        total, _ = model.loss(tokens, targets_for(tokens))
    expected, _ = model.loss(tokens, targets_for(tokens))
    total.backward()
    assert total.dtype == torch.float32
    assert abs(total.item() / expected.item() - 1) < 0.02
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())


# --- memory ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", [[13], [1] * 13, [6, 1, 1, 5]], ids=str)
@pytest.mark.parametrize("spec", SPECS)
def test_steps_equal_one_pass(spec, split):
    model, tokens = make(spec, spec), text()
    memory, parts = model.empty_memory(2), []
    for piece in tokens.split(split, dim=1):
        logits, memory = model.step(piece, memory)
        parts.append(logits)
    torch.testing.assert_close(torch.cat(parts, dim=1), model(tokens), rtol=1e-9, atol=1e-9)


def test_last_only_is_the_last():
    model, tokens = make(), text()
    full, _ = model.step(tokens, model.empty_memory(2))
    last, _ = model.step(tokens, model.empty_memory(2), last_only=True)
    torch.testing.assert_close(last, full[:, -1:], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("spec", SPECS)
def test_memory_bytes_equals_what_is_really_held(spec):
    model = make(spec, spec)
    for length in (0, 1, 13, 64):
        memory = model.empty_memory(1)
        if length:
            _, memory = model.step(text(1, length), memory)
        tensors = [layer.memory.tensors() for layer in memory.layers]
        # a read of ridge statistics leaves the inverse of G there; it is counted from the start
        held = sum(
            value.nbytes
            for group in tensors
            for value in (*group.values(), *([group["gram"]] if "gram" in group else []))
        )
        held += sum(layer.tail.nbytes for layer in memory.layers if layer.tail is not None)
        assert model.memory_bytes(length) == memory.nbytes == held, length


@pytest.mark.parametrize(
    "spec",
    [
        s
        for s in SPECS
        if s.split("(")[0] in ("linear", "retention", "ridge", "ska", "squared_affine", "polynomial_square")
    ],
)
def test_constant_memories_are_constant(spec):
    model = make(spec, spec)
    assert model.memory_bytes(10) == model.memory_bytes(131072)


def test_memory_of_another_model_is_refused():
    with pytest.raises(ArgumentError, match="holds 1 layers, the model has 2"):
        make().step(text(), make("softmax", conv=3).empty_memory(2))


def test_a_memory_file_goes_on_where_it_stood(tmp_path):
    model, tokens = make(), text()
    _, memory = model.step(tokens[:, :6], model.empty_memory(2))
    memory.save(tmp_path / "memory.safetensors")
    loaded = model.load_memory(tmp_path / "memory.safetensors")
    torch.testing.assert_close(
        model.step(tokens[:, 6:], loaded)[0], model.step(tokens[:, 6:], memory)[0], rtol=0, atol=0
    )
    assert loaded.nbytes == memory.nbytes
    (tmp_path / "memory.safetensors").write_bytes((tmp_path / "memory.safetensors").read_bytes()[:-7])
    with pytest.raises(FileFormatError, match="truncated"):
        model.load_memory(tmp_path / "memory.safetensors")


# --- generation -----------------------------------------------------------------------------------------------------


def run(model, tokens, count, **options):
    return torch.stack(list(model.generate(tokens, count, **options)), dim=1)


@pytest.mark.parametrize("spec", SPECS)
def test_greedy_equals_the_argmax_of_full_passes(spec):
    model, tokens = make(spec, spec), text(2, 5)
    new = run(model, tokens, 8, temperature=0)
    whole = torch.cat((tokens, new), dim=1)
    assert torch.equal(model(whole)[:, 4:-1].argmax(-1), new)


def test_a_seed_fixes_the_draw():
    model, tokens = make(), text(2, 5)
    one, two, other = (run(model, tokens, 30, seed=s) for s in (5, 5, 6))
    assert torch.equal(one, two)
    assert not torch.equal(one, other)
    before = torch.random.get_rng_state()
    run(model, tokens, 3, seed=5)
    assert torch.equal(torch.random.get_rng_state(), before)  # a seeded draw leaves the global generator alone


def test_draws_follow_the_model():
    """Frequencies of the first new token over many rows of one prompt match the model's own probabilities."""
    model, tokens = make(), text(1, 5).expand(4000, 5)
    first = next(iter(model.generate(tokens, 1, temperature=0.7, seed=0)))
    expected = (model(tokens[:1])[0, -1] / 0.7).softmax(-1)
    frequency = torch.bincount(first, minlength=VOCABULARY) / 4000
    assert bool(((frequency - expected).abs() <= 5 * (expected * (1 - expected) / 4000).sqrt() + 1e-3).all())


def test_top_k_one_and_tiny_top_p_are_greedy():
    model, tokens = make(), text(2, 5)
    greedy = run(model, tokens, 8, temperature=0)
    assert torch.equal(run(model, tokens, 8, top_k=1), greedy)
    assert torch.equal(run(model, tokens, 8, top_p=1e-6), greedy)


def test_stop_ends_rows_one_by_one():
    model, tokens = make(), text(2, 5)
    free = run(model, tokens, 20, seed=1)
    token = int(free[0, 3])
    pair = free[1, 6:8].tolist()
    stopped = run(model, tokens, 20, seed=1, stop=[token, pair])

    def end(row):
        for t in range(20):
            if row[t] == token or row[max(0, t - 1) : t + 1] == pair:
                return t + 1
        return 20

    ends = [end(row) for row in free.tolist()]
    assert stopped.shape[1] == max(ends) < 20
    for row, stop in enumerate(ends):
        assert stopped[row, :stop].tolist() == free[row, :stop].tolist()  # the stop itself is yielded
        assert (stopped[row, stop:] == -1).all()


def test_generation_is_lazy_and_checks_at_the_call():
    model = make()
    with pytest.raises(ArgumentError, match="temperature"):
        model.generate(text(), 3, temperature=-1)
    assert list(model.generate(text(), 0)) == []
    stream = model.generate(text(), 10**9, seed=0)
    assert next(stream).shape == (2,)
    assert torch.is_grad_enabled()  # nothing leaks out of a suspended generator


def test_generation_reads_the_prompt_once_then_single_tokens(monkeypatch):
    model = make()
    lengths = []
    original = CausalLM.read_on

    def spy(self, tokens, *before, **options):
        lengths.append(tokens.shape[1])
        return original(self, tokens, *before, **options)

    monkeypatch.setattr(CausalLM, "read_on", spy)
    list(model.generate(text(2, 9), 4, seed=0))
    assert lengths == [9, 1, 1, 1]


def test_padding_of_whole_chunks_leaves_a_row_as_it_is_alone():
    """Chunks count padding, which ``prefill`` and docs/mechanisms/ska.md say."""
    model, tokens = make("ska(chunk=4)", conv=0), text(1, 15)
    for padding, alike in ((8, True), (3, False)):
        real = torch.arange(15)[None] >= padding
        found = model.prefill(tokens, key_padding_mask=real)[0] - model.prefill(tokens[:, padding:])[0]
        assert (found.abs().max() < 1e-9) == alike


def test_left_padded_prompts_continue_as_if_alone():
    model = make()
    a, b = text(1, 4, seed=3), text(1, 9, seed=4)
    mask = torch.tensor([[False] * 5 + [True] * 4, [True] * 9])
    both = run(model, torch.cat((torch.cat((text(1, 5), a), dim=1), b)), 8, temperature=0, key_padding_mask=mask)
    assert torch.equal(both[0], run(model, a, 8, temperature=0)[0])
    assert torch.equal(both[1], run(model, b, 8, temperature=0)[0])
    with pytest.raises(ArgumentError, match="on the left"):
        model.generate(text(1, 3), 2, key_padding_mask=torch.tensor([[True, True, False]]))


def test_generation_goes_on_from_a_memory():
    model, tokens = make(), text(2, 9)
    _, memory = model.step(tokens[:, :6], model.empty_memory(2))
    assert torch.equal(run(model, tokens[:, 6:], 8, temperature=0, memory=memory), run(model, tokens, 8, temperature=0))
    assert torch.equal(run(model, tokens[:, 6:], 8, temperature=0, memory=memory), run(model, tokens, 8, temperature=0))


# --- starts ---------------------------------------------------------------------------------------------------------


def test_shared_parameters_start_identical_across_operators():
    models = {spec: build(ModelConfig(VOCABULARY, 16, (spec, spec), 4, conv=3), 7) for spec in SPECS}
    reference = dict(models["softmax"].named_parameters())
    for spec, model in models.items():
        orthogonal = model.blocks[0].attention.operator.layer_init == "orthogonal"
        own = ("query.weight", "key.weight", "value.weight", "attention.output.weight") if orthogonal else ()
        shared = {
            name: p for name, p in model.named_parameters() if name in reference and not name.endswith(own or ("\0",))
        }
        assert len(shared) >= len(reference) - 8
        for name, parameter in shared.items():
            if ".operator." not in name:
                assert torch.equal(parameter, reference[name]), (spec, name)


def test_a_start_is_a_function_of_config_and_seed():
    config = ModelConfig(VOCABULARY, 16, ("sko", "ska"), 4, conv=3)
    torch.manual_seed(0)
    before = torch.random.get_rng_state()
    one = build(config, 3).state_dict()
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.rand(5)
    two, other = build(config, 3).state_dict(), build(config, 4).state_dict()
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not torch.equal(one["embedding.weight"], other["embedding.weight"])
    # depth adds layers and leaves the others' draws alone, up to the residual scale
    deep = build(ModelConfig(VOCABULARY, 16, ("sko", "ska", "softmax"), 4, conv=3), 3).state_dict()
    assert torch.equal(deep["blocks.0.attention.query.weight"], one["blocks.0.attention.query.weight"])


def test_scale_of_the_start():
    model = build(ModelConfig(1000, 128, ("softmax",) * 8, 4), 0)
    assert model.embedding.weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert model.blocks[3].attention.query.weight.std().item() == pytest.approx(0.02, rel=0.05)
    for weight in (model.blocks[3].attention.output.weight, model.blocks[3].mlp.down.weight):
        assert weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)


def test_operators_keep_their_declared_start():
    model = build(ModelConfig(VOCABULARY, 16, ("ska(power=1)", "sko"), 4), 0)
    for spec, block in zip(model.config.layers, model.blocks, strict=True):
        declared = mechanisms.resolve(spec).for_heads(4, 4, dim=4)
        for (name, got), (_, wanted) in zip(
            block.attention.operator.named_parameters(), declared.named_parameters(), strict=True
        ):
            if name != "learned_parts.score_log_factor":  # which starts by the size of the layer's keys
                assert torch.equal(got, wanted), name


# --- looking at it, files -------------------------------------------------------------------------------------------


def test_parameters_are_counted_once():
    tied, untied = (
        build(ModelConfig(100, 16, ("softmax",), 4, tie_embeddings=t, mlp="none"), 0) for t in (True, False)
    )
    assert tied.num_parameters() == 100 * 16 + 4 * 16 * 16 + 16 + 16
    assert untied.num_parameters() == tied.num_parameters() + 100 * 16


def test_learned_names_layer_and_operator():
    report = make("sko", "ska(power=1)").learned()
    assert [(entry["layer"], entry["operator"]) for entry in report] == [(0, "sko"), (1, "ska(power=1)")]
    assert len(report[0]["kernel_curve"]["heads"]) == 4
    assert len(report[1]["eta"]) == 4


@pytest.mark.parametrize("tied", [True, False])
def test_a_saved_model_is_the_same_model(tmp_path, tied):
    model, tokens = make("sko", "ska(power=1)", tie_embeddings=tied), text()
    path = tmp_path / "model.safetensors"
    model.save(path)
    loaded = CausalLM.load(path)
    assert loaded.config == model.config
    assert loaded.embedding.weight.dtype == torch.float64
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    torch.testing.assert_close(loaded(tokens), model(tokens), rtol=1e-12, atol=1e-12)
    assert loaded.num_parameters() == model.num_parameters()
    assert all(p.requires_grad for p in loaded.parameters())


def test_files_that_are_no_model_are_refused_in_one_line(tmp_path):
    path = tmp_path / "model.safetensors"
    with pytest.raises(FileFormatError, match="does not exist"):
        CausalLM.load(path)
    store.save_tensors(path, {"x": torch.zeros(1)}, {"kind": "memory"})
    with pytest.raises(FileFormatError, match="'memory', a 'model' was required"):
        CausalLM.load(path)
    model = make()
    fields = model.config.to_dict()
    store.save_tensors(path, model.state_dict(), {"kind": "model", "config": {**fields, "vocab_size": 20}})
    with pytest.raises(FileFormatError, match=r"embedding.weight is \(19, 16\) and should be \(20, 16\)"):
        CausalLM.load(path)
    state = model.state_dict()
    state["extra"] = state.pop("norm.weight")
    store.save_tensors(path, state, {"kind": "model", "config": fields})
    with pytest.raises(FileFormatError, match=r"norm.weight is missing; extra is unknown"):
        CausalLM.load(path)
    store.save_tensors(path, state, {"kind": "model", "config": {**fields, "width": 1}})
    with pytest.raises(FileFormatError, match="unknown: width"):
        CausalLM.load(path)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda m: m(text()[0]), r"\(batch, length >= 1\)"),
        (lambda m: m(text().float()), "integers"),
        (lambda m: m(text() + 5), r"\[0, 19\), received"),
        (lambda m: m(text() - 19), r"\[0, 19\), received -"),
        (lambda m: m.loss(text(), text()[:, :-1]), "shape of tokens"),
        (lambda m: m.loss(text(), text().float()), "int64"),
        (lambda m: m.loss(text(), text() + 19), "-100"),
        (lambda m: m.predict(text(), text() - 50), "-100"),
        (lambda m: m.generate(text(), -1), "max_new_tokens"),
        (lambda m: m.generate(text()[:, :0], 1), "length >= 1"),
        (lambda m: m.generate(text(), 1, top_k=0), "top_k"),
        (lambda m: m.generate(text(), 1, key_padding_mask=torch.ones(2, 0).bool()), r"generate: .*received .*\(2, 0\)"),
        (lambda m: m.prefill(text(), key_padding_mask=torch.ones(12).bool()), r"prefill: .*received .*\(12,\)"),
        (lambda m: m.prefill(text(), chunk=2, key_padding_mask=torch.ones(2, 20).bool()), r"prefill: .*\(2, 20\)"),
        (lambda m: m.memory_bytes(-1), "length"),
    ],
)
def test_bad_input_is_refused_by_name(call, words):
    with pytest.raises(ArgumentError, match=words):
        call(make())
