"""The models as classes of transformers: same logits, Auto classes, files, generation, padding, packing, training."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from live_memory import LiveMemory
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    ByT5Tokenizer,
    DynamicCache,
    Trainer,
    TrainingArguments,
    pipeline,
)

from zonal import hf
from zonal.errors import ArgumentError
from zonal.models import CausalLM, ModelConfig, TextEncoder, VisionConfig, VisionEncoder, build

PAIRS = (("sko", "softmax"), ("ska(power=1)", "mamba2"), ("squared_affine", "slay"), ("performer", "retention"))


def native(layers: tuple[str, ...] = PAIRS[0], seed: int = 0, **fields: Any) -> CausalLM:
    """A small decoder of this library with a convolution and rotary positions."""
    return build(ModelConfig(vocab_size=97, dim=32, layers=layers, heads=2, rotary=True, conv=4, **fields), seed)


def model(layers: tuple[str, ...] = PAIRS[0], seed: int = 0, **fields: Any) -> Any:
    return hf.ZonalForCausalLM.of(native(layers, seed, **fields)).eval()


def checkpoint(made: Any) -> Callable[..., None]:
    """Transformers' method that switches checkpoints of activations on; it has this name since 5.23."""
    return getattr(made, "activation_checkpointing_enable", made.gradient_checkpointing_enable)


def tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(1, 97, shape, generator=torch.Generator().manual_seed(seed))


# --- the same model ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
def test_logits_are_those_of_the_native_model_and_back(tied: bool) -> None:
    own = native(tie_embeddings=tied)
    made = hf.ZonalForCausalLM.of(own)
    assert torch.equal(made(tokens(2, 9)).logits, own(tokens(2, 9)))
    assert torch.equal(made.native()(tokens(2, 9)), own(tokens(2, 9)))
    assert made.num_parameters() == own.num_parameters()


def test_operators_stay_in_float32_from_and_to_the_native_model(tmp_path: Path) -> None:
    model(("ska(power=1)", "performer")).save_pretrained(tmp_path)
    half = hf.ZonalForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    own = half.native()
    for each in (own, hf.ZonalForCausalLM.of(own)):
        kinds = {(".operator." in name, value.dtype) for name, value in each.state_dict().items()}
        assert kinds == {(True, torch.float32), (False, torch.bfloat16)}
        assert each(tokens(1, 5))[0].dtype == torch.bfloat16


@pytest.mark.parametrize("layers", PAIRS)
def test_a_saved_model_is_read_by_the_auto_classes(layers: tuple[str, ...], tmp_path: Path) -> None:
    made = model(layers)
    made.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert isinstance(AutoConfig.from_pretrained(tmp_path), hf.ZonalConfig)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(again(tokens(2, 9)).logits, made(tokens(2, 9)).logits)
    half = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert half.lm_head.weight.dtype == torch.bfloat16
    assert (half(tokens(2, 9)).logits.float() - made(tokens(2, 9)).logits).abs().max() < 0.02


def test_an_encoder_and_its_heads(tmp_path: Path) -> None:
    shape = ModelConfig(vocab_size=97, dim=32, layers=("sko", "sinkhorn"), heads=2, rotary=True)
    config = hf.ZonalConfig.of(shape, {"causal": False, "num_labels": 3})
    masked = hf.ZonalForMaskedLM(config).eval()
    own = TextEncoder(shape)
    own.load_state_dict(masked.model.core.state_dict())
    assert torch.equal(masked(tokens(2, 7)).logits, own(tokens(2, 7)))
    masked.save_pretrained(tmp_path)
    assert torch.equal(AutoModelForMaskedLM.from_pretrained(tmp_path)(tokens(2, 7)).logits, own(tokens(2, 7)))
    # a head that the file does not hold is drawn, and all else is read
    sorted_texts = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    mask = torch.tensor([[1, 1, 1, 1, 0, 0, 0], [1] * 7])
    pooled = own.pooled(tokens(2, 7), key_padding_mask=mask.bool())
    assert torch.allclose(sorted_texts(tokens(2, 7), attention_mask=mask).logits, sorted_texts.score(pooled), atol=1e-6)
    assert 0 < sorted_texts.score.weight.std() < 0.1


def test_a_classifier_reads_the_last_real_token() -> None:
    config = hf.ZonalConfig.of(native().config, {"num_labels": 3, "pad_token_id": 0})
    made = hf.ZonalForSequenceClassification(config).eval()
    short, long = tokens(1, 4), tokens(1, 7, seed=1)
    rows = torch.cat([torch.cat([short, torch.zeros(1, 3, dtype=torch.long)], 1), long])
    both = made(rows, labels=torch.tensor([0, 2]))
    assert torch.allclose(both.logits, torch.cat([made(short).logits, made(long).logits]), atol=1e-6)
    assert torch.allclose(both.loss, torch.nn.functional.cross_entropy(both.logits, torch.tensor([0, 2])))


def test_an_image_classifier(tmp_path: Path) -> None:
    shape = VisionConfig(image=8, patch=4, channels=1, classes=5, dim=16, layers=("sko",), heads=2)
    made = hf.ZonalForImageClassification(hf.ZonalVisionConfig(**shape.to_dict())).eval()
    own = VisionEncoder(shape)
    own.load_state_dict(made.model.state_dict())
    images = torch.randn(3, 1, 8, 8)
    assert torch.equal(made(images).logits, own(images))
    made.save_pretrained(tmp_path)
    again = AutoModelForImageClassification.from_pretrained(tmp_path)
    assert torch.equal(again(images).logits, own(images))
    assert again.config.num_labels == 5
    with pytest.raises(ArgumentError, match="classes and num_labels are one number"):
        hf.ZonalVisionConfig(classes=5, num_labels=3)


def test_labels_of_an_image_classifier_are_its_classes(tmp_path: Path) -> None:
    """A number of labels that is changed on the config, as transformers does, changes the model."""
    made = hf.ZonalForImageClassification(hf.ZonalVisionConfig(image=8, classes=2, dim=16, layers="sko", heads=2))
    made.save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).shape.classes == 2
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        AutoModelForImageClassification.from_pretrained(tmp_path, num_labels=7)
    wide = AutoModelForImageClassification.from_pretrained(tmp_path, num_labels=7, ignore_mismatched_sizes=True)
    images = torch.randn(3, 1, 8, 8)
    assert wide(images).logits.shape == (3, 7)
    assert torch.equal(wide.model.patches.weight, made.model.patches.weight)
    assert 0 < wide.model.head.weight.std() < 1
    wide.save_pretrained(tmp_path / "wide")
    again = AutoModelForImageClassification.from_pretrained(tmp_path / "wide")
    assert torch.equal(again(images).logits, wide.eval()(images).logits)


def test_hidden_states_of_images_and_checkpointed_gradients() -> None:
    shape = VisionConfig(image=8, patch=2, classes=5, dim=16, layers=("sko", "softmax"), heads=2, merge=(0.0, 0.5))
    made = hf.ZonalForImageClassification(hf.ZonalVisionConfig(**shape.to_dict()))
    images, labels = torch.randn(3, 1, 8, 8), torch.tensor([0, 4, 2])
    outputs = made(images, labels=labels, output_hidden_states=True)
    assert [state.shape[1] for state in outputs.hidden_states] == [16, 16, 8]
    assert torch.allclose(outputs.loss, torch.nn.functional.cross_entropy(outputs.logits, labels))
    gradients = []
    for checkpointed in (False, True):
        made.zero_grad()
        if checkpointed:
            checkpoint(made)()
        made.train()(images, labels=labels).loss.backward()
        gradients.append([value.grad for value in made.parameters()])
    torch.testing.assert_close(*gradients)
    with pytest.raises(ArgumentError, match="output_attentions is not available"):
        made(images, output_attentions=True)


# --- generation -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", PAIRS)
def test_generation_with_a_cache_is_generation_without(layers: tuple[str, ...]) -> None:
    made, prompt = model(layers), tokens(2, 9)
    plain = made.generate(prompt, max_new_tokens=8, do_sample=False, use_cache=False)
    assert torch.equal(made.generate(prompt, max_new_tokens=8, do_sample=False), plain)
    beams = {"max_new_tokens": 6, "num_beams": 3, "do_sample": False}
    assert torch.equal(made.generate(prompt, **beams), made.generate(prompt, **beams, use_cache=False))


@pytest.mark.parametrize("layers", PAIRS)
def test_assisted_generation_gives_the_same_tokens(layers: tuple[str, ...]) -> None:
    made, prompt = model(layers), tokens(1, 9)
    plain = made.generate(prompt, max_new_tokens=12, do_sample=False)
    near = copy.deepcopy(made)  # a draft that is right often, not always
    with torch.no_grad():
        near.model.core.embedding.weight.add_(0.02 * torch.randn(97, 32, generator=torch.Generator().manual_seed(0)))
    for draft in (near, model(layers, seed=1)):
        assert torch.equal(made.generate(prompt, max_new_tokens=12, do_sample=False, assistant_model=draft), plain)
    assert torch.equal(made.generate(prompt, max_new_tokens=12, do_sample=False, prompt_lookup_num_tokens=3), plain)


@pytest.mark.parametrize("layers", PAIRS)
def test_a_cropped_cache_is_one_that_never_read_the_tokens(layers: tuple[str, ...]) -> None:
    made, text = model(layers), tokens(2, 12)
    cache = hf.ZonalCache()
    cache.activate_past_recording()
    for part in (text[:, :4], text[:, 4:9]):
        made(part, past_key_values=cache)
    cache.crop(-3)
    assert cache.get_seq_length() == 6
    after = made(text[:, 6:], past_key_values=cache).logits
    assert torch.allclose(after, made(text).logits[:, 6:], atol=1e-5)
    with pytest.raises(ArgumentError, match="5 of 13 tokens were read before the cache recorded"):
        cache.crop(-13)
    assert cache.get_seq_length() == 12
    more = tokens(2, 3, seed=1)  # the refused call has changed nothing
    expected = made(torch.cat([text, more], 1)).logits[:, 12:]
    assert torch.allclose(made(more, past_key_values=cache).logits, expected, atol=1e-5)


def test_a_batch_of_unequal_prompts_is_each_alone() -> None:
    made, short, long = model(), tokens(1, 5), tokens(1, 9, seed=1)
    rows = torch.cat([torch.cat([torch.zeros(1, 4, dtype=torch.long), short], 1), long])
    mask = (rows != 0).long()
    both = made.generate(rows, attention_mask=mask, max_new_tokens=6, do_sample=False)
    assert torch.equal(both[0, 9:], made.generate(short, max_new_tokens=6, do_sample=False)[0, 5:])
    assert torch.equal(both[1], made.generate(long, max_new_tokens=6, do_sample=False)[0])
    flipped = torch.cat([torch.cat([short, torch.zeros(1, 4, dtype=torch.long)], 1), long])
    right = made(flipped, attention_mask=(flipped != 0).long()).logits
    assert torch.allclose(right[0, :5], made(short).logits[0], atol=1e-6)


def test_a_cache_goes_on_forks_and_becomes_a_memory() -> None:
    made, text = model(("sko", "ska(power=1)")), tokens(1, 12)
    whole = made(text).logits
    cache = made(text[:, :7], use_cache=True)[hf.CACHE]
    fork = cache.fork()
    assert torch.allclose(made(text[:, 7:], past_key_values=cache).logits, whole[:, 7:], atol=1e-5)
    one = [made(text[:, [i]], past_key_values=fork).logits for i in range(7, 12)]
    assert torch.allclose(torch.cat(one, 1), whole[:, 7:], atol=1e-5)
    restarted = hf.ZonalCache(made(text[:, :7], use_cache=True)[hf.CACHE].memory())
    assert torch.allclose(made(text[:, 7:], past_key_values=restarted).logits, whole[:, 7:], atol=1e-5)
    restarted.batch_repeat_interleave(3)
    assert restarted.batch_size == 3


@pytest.mark.parametrize("kind", [hf.ZonalModel, hf.ZonalForCausalLM, hf.ZonalForSequenceClassification])
def test_a_cache_has_either_name(kind: Any) -> None:
    """Before transformers 5.24 and since."""
    made, text = kind(model().config).eval(), tokens(1, 12)
    caches = [made(text[:, :7], use_cache=True)[hf.CACHE] for _ in range(2)]
    first, second = made(text[:, 7:], past_key_values=caches[0]), made(text[:, 7:], cache=caches[1])
    assert torch.equal(first[0], second[0])
    assert [cache.get_seq_length() for cache in caches] == [12, 12]
    assert [first[hf.CACHE], second[hf.CACHE]] == caches
    with pytest.raises(ArgumentError, match="two names of one argument"):
        made(text[:, :1], past_key_values=caches[0], cache=caches[1])
    made(text[:, :1], past_key_values=caches[0], cache=None)
    assert [cache.get_seq_length() for cache in caches] == [13, 12]


def test_a_call_in_training_that_asks_for_a_cache_gets_one() -> None:
    zonal, ids = model().train(), tokens(2, 9)
    assert zonal(ids).get(hf.CACHE) is None
    cache = zonal(ids[:, :5], use_cache=True)[hf.CACHE]
    after = zonal(ids[:, 5:], **{hf.CACHE: cache}).logits
    torch.testing.assert_close(after, zonal(ids).logits[:, 5:], rtol=1e-3, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("layers", [("sko", "mamba2"), ("softmax", "softmax")])
def test_offloaded_blocks_are_refused(layers: tuple[str, ...], tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    model(layers).save_pretrained(tmp_path / "model")
    core = "model.core"
    places: dict[str, Any] = {f"{core}.{name}": "cpu" for name in ("embedding", "norm", "blocks.0")}
    places |= {"lm_head": "cpu", f"{core}.blocks.1": "disk"}
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map=places, offload_folder=tmp_path / "offloaded"
    )
    for cached in (False, True):
        with pytest.raises(ArgumentError, match="offloaded to the disk or the CPU"):
            loaded(tokens(2, 5), use_cache=cached)


def test_the_cache_does_not_grow() -> None:
    made = model(("squared_affine", "ska(power=1)"))
    sizes = [made(tokens(1, n), use_cache=True)[hf.CACHE].memory().nbytes for n in (8, 64)]
    assert sizes[0] == sizes[1]


@torch.no_grad()
def test_states_that_nobody_asks_for_are_not_kept() -> None:
    """The inputs of all blocks were held until the call ended."""
    peaks = []
    for count in (1, 9):
        made = model(("retention",) * count).model
        with LiveMemory() as held:
            made(tokens(1, 512), use_cache=False)
        peaks.append(held.peak)
    assert peaks[1] - peaks[0] < 4 * 512 * 32 * 4  # eight states less


# --- training ---------------------------------------------------------------------------------------------------------


def test_packed_documents_do_not_see_each_other() -> None:
    made, first, second = model(), tokens(1, 5), tokens(1, 9, seed=1)
    row = torch.cat([first, second], 1)
    positions = torch.cat([torch.arange(5), torch.arange(9)])[None]
    packed = made(row, position_ids=positions).logits
    assert torch.allclose(packed[:, :5], made(first).logits, atol=1e-6)
    assert torch.allclose(packed[:, 5:], made(second).logits, atol=1e-6)
    two = made(row.repeat(2, 1), position_ids=positions.repeat(2, 1), output_hidden_states=True)
    assert torch.allclose(two.logits[1], packed[0], atol=1e-6)
    assert [state.shape for state in two.hidden_states] == [(2, 14, 32)] * 3
    with pytest.raises(ArgumentError, match="go on by one"):
        made(row, position_ids=2 * torch.arange(14)[None])
    with pytest.raises(ArgumentError, match="have no padding"):
        made(row, position_ids=positions, attention_mask=(torch.arange(14) < 13).long()[None])
    with pytest.raises(ArgumentError, match="begin afresh and take no cache"):
        made(row, position_ids=positions, past_key_values=hf.ZonalCache())


@pytest.mark.parametrize("residual", ["pre", "dense"])
def test_checkpointed_gradients_are_the_same(residual: str) -> None:
    made = model(("sko", "ska(power=1)"), residual=residual).train()
    gradients = []
    for checkpointed in (False, True):
        made.zero_grad()
        if checkpointed:
            checkpoint(made)({"use_reentrant": False})
        assert len(made(tokens(2, 9), output_hidden_states=True).hidden_states) == 3
        made(tokens(2, 9), labels=tokens(2, 9)).loss.backward()
        gradients.append([weight.grad.clone() for weight in made.parameters()])
    assert all(torch.allclose(*pair, atol=1e-7) for pair in zip(*gradients, strict=True))
    if residual == "dense":
        checkpoint(made)({"use_reentrant": True})
        with pytest.raises(ArgumentError, match="use_reentrant=False"):
            made(tokens(2, 9))


@pytest.mark.parametrize("layers", [("softmax",), ("ska(power=1)",), ("mixture(parts=('sko', 'softmax'))",)])
def test_checkpointed_gradients_through_a_cache_are_those_of_one_text(layers: tuple[str, ...]) -> None:
    made, text = model(layers).train(), tokens(2, 12)
    gradients = []
    for checkpointed in (False, True):
        made.zero_grad()
        if checkpointed:
            checkpoint(made)({"use_reentrant": False})
            cache = hf.ZonalCache()
            found = torch.cat([made(part, **{hf.CACHE: cache}).logits for part in text.split(4, 1)], 1)
        else:
            found = made(text, use_cache=False).logits
        (found * torch.linspace(-1, 1, found.numel()).view_as(found)).sum().backward()
        gradients.append([weight.grad.clone() for weight in made.parameters()])
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-4)
    checkpoint(made)({"use_reentrant": True})
    with pytest.raises(ArgumentError, match=r"reads a cache.*use_reentrant=False"):
        made(text, **{hf.CACHE: cache})


def test_the_trainer_trains_saves_and_goes_on(tmp_path: Path) -> None:
    rows = [{"input_ids": row, "labels": row} for row in tokens(24, 12)]

    def trainer(steps: int) -> Trainer:
        settings = TrainingArguments(
            str(tmp_path / "run"), max_steps=steps, per_device_train_batch_size=4, gradient_accumulation_steps=2,
            learning_rate=1e-2, save_steps=3, logging_steps=3, report_to=[], use_cpu=True, bf16=True, seed=0,
            disable_tqdm=True,
        )  # fmt: skip
        return Trainer(model(("sko", "ska(power=1)")), settings, train_dataset=rows)

    whole = trainer(6)
    whole.train()
    losses = [entry["loss"] for entry in whole.state.log_history if "loss" in entry]
    assert losses[0] > losses[1]
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "checkpoint-6")
    resumed = trainer(6)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-3"))
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "checkpoint-6")
    assert torch.equal(again(tokens(2, 9)).logits, trained(tokens(2, 9)).logits)
    assert not torch.equal(again(tokens(2, 9)).logits, model(("sko", "ska(power=1)"))(tokens(2, 9)).logits)


def _heads() -> dict[str, tuple[Any, dict[str, Tensor]]]:
    """A model of each head, and 8 examples."""
    text = {"vocab_size": 97, "dim": 16, "layers": "softmax", "heads": 2, "rotary": True}
    classes = torch.arange(8) % 3
    some = tokens(8, 6)
    return {
        "causal": (hf.ZonalForCausalLM(hf.ZonalConfig(**text)), {"input_ids": some, "labels": some}),
        "masked": (
            hf.ZonalForMaskedLM(hf.ZonalConfig(**text, causal=False)),
            {"input_ids": some, "labels": some.masked_fill(some % 3 == 0, -100)},
        ),
        "classes": (
            hf.ZonalForSequenceClassification(hf.ZonalConfig(**text, num_labels=3)),
            {"input_ids": some, "labels": classes},
        ),
        "numbers": (
            hf.ZonalForSequenceClassification(hf.ZonalConfig(**text, num_labels=1)),
            {"input_ids": some, "labels": classes.float()},
        ),
        "images": (
            hf.ZonalForImageClassification(hf.ZonalVisionConfig(image=8, classes=3, dim=16, layers="sko", heads=2)),
            {"pixel_values": torch.randn(8, 1, 8, 8), "labels": classes},
        ),
    }


@pytest.mark.parametrize("head", ["causal", "masked", "classes", "numbers", "images"])
def test_the_trainer_accumulates_the_gradient_of_one_large_batch(head: str, tmp_path: Path) -> None:
    made, columns = _heads()[head]
    rows = [{name: column[index] for name, column in columns.items()} for index in range(8)]
    gradients: list[list[Tensor]] = []

    class Keeping(Trainer):
        def training_step(self, *inputs: Any, **others: Any) -> Tensor:
            loss = super().training_step(*inputs, **others)
            gradients.append([value.grad.clone() for value in made.parameters() if value.grad is not None])
            return loss

    for size, times in ((8, 1), (2, 4)):
        settings = TrainingArguments(
            str(tmp_path), max_steps=1, per_device_train_batch_size=size, gradient_accumulation_steps=times,
            learning_rate=0.0, weight_decay=0.0, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
        )  # fmt: skip
        Keeping(made, settings, train_dataset=rows).train()
        made.zero_grad()
    torch.testing.assert_close(gradients[-1], gradients[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("head", ["causal", "masked", "classes", "numbers", "images"])
def test_the_trainer_evaluates_and_predicts(head: str, tmp_path: Path) -> None:
    made, columns = _heads()[head]
    rows = [{name: column[index] for name, column in columns.items()} for index in range(8)]
    settings = TrainingArguments(str(tmp_path), report_to=[], use_cpu=True, disable_tqdm=True)
    found = Trainer(made, settings).predict(rows)  # type: ignore[arg-type]
    wanted = made(**columns)
    assert found.metrics is not None
    assert found.metrics["test_loss"] == pytest.approx(wanted.loss.item(), rel=1e-5)
    torch.testing.assert_close(torch.as_tensor(found.predictions), wanted.logits)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own tracer does that
@pytest.mark.timeout(900)  # inductor compiles a dozen C++ files, one after the other
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_the_trainer_compiles_one_graph(backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The losses of ``torch_compile=True`` are those without it, also with padding."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    rows = [
        {"input_ids": row, "labels": row, "attention_mask": (torch.arange(12) < 12 - index % 3).long()}
        for index, row in enumerate(tokens(8, 12))
    ]

    def losses(**compiling: Any) -> list[float]:
        settings = TrainingArguments(
            str(tmp_path / "run"), max_steps=2, per_device_train_batch_size=4, learning_rate=1e-2, logging_steps=1,
            save_strategy="no", report_to=[], use_cpu=True, seed=0, disable_tqdm=True, **compiling,
        )  # fmt: skip
        trainer = Trainer(model(("squared_affine",)), settings, train_dataset=rows)
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    with torch._inductor.config.patch(compile_threads=1):
        found = losses(torch_compile=True, torch_compile_backend=backend)
    assert found == pytest.approx(losses(), rel=1e-5)
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 1


def test_a_resized_vocabulary() -> None:
    made = model()
    before = made(tokens(1, 6)).logits
    made.resize_token_embeddings(120)
    assert made.config.vocab_size == 120
    assert made(tokens(1, 6)).logits.shape == (1, 6, 120)
    assert torch.allclose(made(tokens(1, 6)).logits[..., :97], before, atol=1e-6)
    assert made.native().config.vocab_size == 120


def test_initial_weights_follow_the_global_seed() -> None:
    drawn = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        drawn.append(AutoModel.from_config(hf.ZonalConfig(vocab_size=97, dim=32, layers="sko*2", heads=2)))
    first, same, other = (each.core.embedding.weight for each in drawn)
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


# --- bad input --------------------------------------------------------------------------------------------------------


def test_bad_input_is_refused_by_a_sentence() -> None:
    made, text = model(), tokens(2, 6)
    with pytest.raises(ArgumentError, match="output_attentions is not available"):
        made(text, output_attentions=True)
    with pytest.raises(ArgumentError, match=r"token_type_ids is for other models.* model_input_names"):
        made(text, token_type_ids=torch.ones_like(text))
    with pytest.raises(ArgumentError, match="Give position_ids that start again"):
        made(text, cu_seq_lens_q=torch.tensor([0, 6, 12]))
    with pytest.raises(ArgumentError, match=r"attention_mask must be \(batch, tokens\) = \(2, 6\)"):
        made(text, attention_mask=torch.ones(2, 5))
    with pytest.raises(ArgumentError, match="one of input_ids and inputs_embeds"):
        made()
    with pytest.raises(ArgumentError, match=r"tokens must be integers \(batch, length >= 1\)"):
        made(text[:, :0])
    with pytest.raises(ArgumentError, match=r"tokens must lie in \[0, 97\), received .* 197"):
        made(torch.full_like(text, 197))
    with pytest.raises(ArgumentError, match="must be a ZonalCache of this model, received a MemoryCache"):
        made(text, past_key_values=hf.MemoryCache())
    foreign = DynamicCache()
    foreign.update(torch.zeros(2, 2, 3, 8), torch.zeros(2, 2, 3, 8), 0)
    with pytest.raises(ArgumentError, match="must be a ZonalCache of this model"):
        made(text, past_key_values=foreign)
    cache = made(text, use_cache=True)[hf.CACHE]
    with pytest.raises(ArgumentError, match="of 2 sequences, and the call is of 2 layers and 1 sequences"):
        made(text[:1], past_key_values=cache)
    with pytest.raises(ArgumentError, match="activate_past_recording"):
        cache.crop(-1)
    with pytest.raises(ArgumentError, match="cache_implementation is for keys and values"):
        made.generate(text, max_new_tokens=2, cache_implementation="static")
    with pytest.raises(ArgumentError, match="a config with causal=True is required"):
        hf.ZonalForCausalLM(hf.ZonalConfig(causal=False))
    encoder = hf.ZonalModel(hf.ZonalConfig(vocab_size=97, dim=32, layers="sko", heads=2, causal=False))
    with pytest.raises(ArgumentError, match=r"an encoder \(causal=False\) .* keeps no cache"):
        encoder(text, **{hf.CACHE: hf.ZonalCache()})
    with pytest.raises(ArgumentError, match="continuous batching"):
        made.generate_batch(inputs=[[1, 2], [3]])
    for given, words in (
        ({"hidden_size": 32}, "hidden_size is read from the shape, and the argument is called dim"),
        ({"num_key_value_heads": 2}, "Pass kv_heads instead"),
    ):
        with pytest.raises(ArgumentError, match=f"ZonalConfig: .*{words}"):
            hf.ZonalConfig(**given)
    with pytest.raises(ArgumentError, match=r"ZonalVisionConfig: image_size is read .* called image"):
        hf.ZonalVisionConfig(image_size=8)
    shape = {"vocab_size": 97, "dim": 30, "layers": "sko"}
    with pytest.raises(ArgumentError, match="silent_tokens"):
        hf.ZonalConfig(**shape, heads=2, silent_tokens=[3])
    with pytest.raises(ArgumentError, match="heads"):
        hf.ZonalConfig(**shape, heads=4)
    with pytest.raises(ArgumentError, match=r"ZonalConfig: heads missing. The arguments are those of ModelConfig"):
        hf.ZonalConfig(**shape)


def test_a_pipeline_continues_texts() -> None:
    torch.manual_seed(0)
    config = hf.ZonalConfig(
        vocab_size=384, dim=32, layers="squared_affine, ska(power=1)", heads=4, eos_token_id=1, pad_token_id=0
    )
    model, tokenizer = hf.ZonalForCausalLM(config).eval(), ByT5Tokenizer()
    writer = pipeline("text-generation", model=model, tokenizer=tokenizer)
    found = writer(["one text", "another, longer text"], max_new_tokens=6, do_sample=False, batch_size=2)
    assert all(
        each[0]["generated_text"].startswith(start) for each, start in zip(found, ("one", "another"), strict=True)
    )
    alone = writer("one text", max_new_tokens=6, do_sample=False)
    assert alone[0]["generated_text"] == found[0][0]["generated_text"]


def test_an_adapter_trains_projections_and_operators(tmp_path: Any) -> None:
    peft = pytest.importorskip("peft")

    def made() -> Any:
        torch.manual_seed(0)
        return hf.ZonalForCausalLM(hf.ZonalConfig(vocab_size=61, dim=32, layers="sko*2", heads=4, rotary=True))

    config = peft.LoraConfig(target_modules=["query", "value"], modules_to_save=["operator"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(made(), config)
    learned = {name: value for name, value in model.named_parameters() if value.requires_grad}
    assert {part for part in ("lora_", "operator") if any(part in name for name in learned)} == {"lora_", "operator"}
    tokens = torch.randint(61, (2, 20), generator=torch.Generator().manual_seed(1))
    before = {name: value.clone() for name, value in learned.items()}
    descent = torch.optim.AdamW(learned.values(), lr=1e-2)
    for _ in range(2):
        descent.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        descent.step()
    assert [name for name in before if torch.equal(learned[name], before[name])] == []
    model.eval().save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(made(), tmp_path).eval()
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, model(tokens).logits)


def test_one_map_for_queries_and_keys_is_saved_and_adapted_once(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    made = hf.ZonalForCausalLM(hf.ZonalConfig(vocab_size=97, dim=32, layers="rewa_categorical", heads=4)).eval()
    made.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    config = peft.LoraConfig(target_modules=["query"], r=4, init_lora_weights=False)
    adapted = peft.get_peft_model(made, config).eval()
    with torch.no_grad():
        logits = adapted(input_ids=tokens(2, 9)).logits
        assert not torch.allclose(logits, again(tokens(2, 9)).logits, atol=1e-3)
        torch.testing.assert_close(adapted.merge_and_unload()(tokens(2, 9)).logits, logits, rtol=1e-4, atol=1e-5)
