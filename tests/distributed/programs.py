"""What ranks do besides single calls: models and losses, transformers, meshes, refusals, and counts of bytes.

Each check returns what is wrong on this rank, or None.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from small_llama import SIZES
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import zonal
from zonal import mechanisms as m
from zonal.distributed import sequence_parallel
from zonal.errors import ArgumentError
from zonal.memory.sent import sent
from zonal.models import ModelConfig, build

LAYERS = ("mamba2", "ska(power=1)", "softmax", "squared_affine")


def drawn(*shape: int) -> Tensor:
    """Tokens, the same on every rank."""
    return torch.randint(31, shape, generator=torch.Generator().manual_seed(3))


def apart(found: dict[str, Tensor], wanted: dict[str, Tensor], bound: float = 1e-5) -> str | None:
    """Which tensors differ by more than ``bound`` of their norm."""
    if found.keys() != wanted.keys():
        return f"{sorted(found)} are there, not {sorted(wanted)}"
    errors = {name: float((found[name] - x).norm() / x.norm().clamp_min(1e-6)) for name, x in wanted.items()}
    wrong = {name: error for name, error in errors.items() if not error <= bound}
    return f"differs by {wrong}" if wrong else None


def gradients(module: nn.Module) -> dict[str, Tensor]:
    """A copy of all gradients, which are then forgotten. Learned numbers of operators are one tensor for each layer."""
    found: dict[str, list[Tensor]] = {}
    for name, x in module.named_parameters():
        if x.grad is not None:
            found.setdefault(name.partition(".learned_parts")[0], []).append(x.grad.flatten())
    module.zero_grad(set_to_none=True)
    return {name: torch.cat(parts) for name, parts in found.items()}


def model(remade: bool = False) -> str | None:
    """A model of several kinds of layers; its loss over targets of which some are not supervised. remade: activations
    are computed again in the backward pass."""
    made = build(ModelConfig(vocab_size=31, dim=32, layers=LAYERS, heads=4, kv_heads=2, rotary=True, conv=3), seed=0)
    tokens, targets = drawn(2, 41), drawn(2, 41)
    targets[0, :25] = -100

    def loss(part: Tensor, wanted: Tensor) -> Tensor:
        if not remade:
            return made.loss(part, wanted)[0]
        logits = checkpoint(made, part, use_reentrant=False)
        return F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="sum")

    count = int((targets != -100).sum())
    one = loss(tokens, targets) / count
    one.backward()
    wanted = gradients(made) | {"loss": one.detach()}
    with sequence_parallel() as parallel:
        own = parallel.shard(targets)
        mean = parallel.mean(loss(parallel.shard(tokens), own), int((own != -100).sum()))
        mean.backward()
        parallel.sum_gradients(made.parameters())
    return apart(gradients(made) | {"loss": mean.detach()}, wanted)


def means() -> str | None:
    """Weights that sum to less than 1, counts beyond float16, none at all, and the dtype of the total."""
    cases = ((2.0, 0.25, torch.float64), (4096.0, 50_000, torch.float16), (3.0, 0, torch.float32), (6, 4, torch.int64))
    for value, count, dtype in cases:
        with sequence_parallel() as parallel:
            total = torch.tensor(value, dtype=dtype, requires_grad=dtype.is_floating_point)
            found = parallel.mean(total, torch.tensor(count))
            wanted = value / count if count else value * parallel.size
            kind = dtype if dtype.is_floating_point else torch.float32
            if found.dtype != kind or abs(found.item() / wanted - 1) > 1e-3:
                return f"the mean of {value} by {count} in {dtype} is {found}, not {wanted}"
            if dtype.is_floating_point:
                found.backward()
                if total.grad is None or total.grad.dtype != dtype or not total.grad > 0:
                    return f"the gradient in {dtype} is {total.grad}"
    return None


def transformers_model() -> str | None:
    """``ZonalForCausalLM``: the loss of labels that are shifted before they are split."""
    from zonal import hf  # transformers takes seconds, which other checks need not wait for

    config = ModelConfig(vocab_size=31, dim=32, layers=("softmax", "mamba2"), heads=4, conv=3, rotary=True)
    made = hf.ZonalForCausalLM.of(build(config, seed=0)).train()
    tokens = drawn(2, 41)
    one = made(tokens, labels=tokens).loss
    one.backward()
    wanted = gradients(made) | {"loss": one.detach()}
    shifted = F.pad(tokens[:, 1:], (0, 1), value=-100)
    with sequence_parallel() as parallel:
        own = parallel.shard(tokens)
        with refusing("as shift_labels"):
            made(own, labels=own)
        part = made(own, shift_labels=parallel.shard(shifted), num_items_in_batch=2 * 40).loss
        part.backward()
        parallel.sum_gradients(made.parameters())
        loss = parallel.ranks.summed(part)
    return apart(gradients(made) | {"loss": loss}, wanted)


def converted_model() -> str | None:
    """A converted Llama, with positions of the whole sequence and with packed documents."""
    import transformers

    from zonal import hf

    torch.manual_seed(0)
    made = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=31, **SIZES)).eval()
    hf.convert(made, "softmax", layers={0: "softmax", 1: "squared_affine"})
    tokens, offsets = drawn(1, 41), torch.tensor([0, 9, 30, 41])
    places = {None: torch.arange(41)[None], 1: torch.cat([torch.arange(int(n)) for n in offsets.diff()])[None]}
    with torch.no_grad():
        for packed, positions in places.items():
            whole = made(tokens, position_ids=positions, use_cache=False).logits
            with sequence_parallel(cu_seqlens=offsets if packed else None) as parallel:
                own, at = parallel.shard(tokens), parallel.shard(positions)
                found = made(own, position_ids=at, use_cache=False).logits
                wrong = apart({"logits": found}, {"logits": parallel.shard(whole)})
            if wrong:
                return f"packed={packed}: {wrong}"
        with sequence_parallel() as parallel, refusing("position_ids must go on"):
            made(parallel.shard(tokens), use_cache=False)
    return None


def silent() -> str | None:
    """A stretch that stores none of its tokens, in a memory that reads without storing."""
    stored = torch.arange(22)[None] < 5
    q = torch.randn(1, 2, 22, 4, generator=torch.Generator().manual_seed(0))
    whole = zonal.attention(q, q, q, "ska(power=1)", causal=True, action_mask=stored)
    with sequence_parallel() as parallel:
        part = parallel.shard(q.transpose(1, 2)).transpose(1, 2)
        mask = parallel.shard(stored)
        found = zonal.attention(part, part, part, "ska(power=1)", causal=True, action_mask=mask)
        wanted = parallel.shard(whole.transpose(1, 2)).transpose(1, 2)
    return apart({"y": found}, {"y": wanted})


def compiled() -> str | None:
    """A layer under torch.compile, whose graph breaks at messages."""
    layer = zonal.nn.Attention(16, 2, m.squared_affine(), conv=3, rotary=True)
    for x in layer.parameters():
        nn.init.normal_(x, std=0.2, generator=torch.Generator().manual_seed(1))
    inputs = torch.randn(1, 22, 16, generator=torch.Generator().manual_seed(0))
    layer(inputs).square().sum().backward()
    wanted = gradients(layer)
    with sequence_parallel() as parallel:
        torch.compile(layer, backend="eager")(parallel.shard(inputs)).square().sum().backward()
        parallel.sum_gradients(layer.parameters())
    return apart(gradients(layer), wanted)


def meshes() -> str | None:
    """Half of the ranks of four hold one batch, half another."""
    ranks = torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("data", "sequence"))
    layer = zonal.nn.Attention(16, 2, m.retention(), conv=2)
    for x in layer.parameters():
        nn.init.normal_(x, std=0.2, generator=torch.Generator().manual_seed(1))
    inputs = torch.randn(ranks // 2, 1, 23, 16, generator=torch.Generator().manual_seed(0))[
        mesh["data"].get_local_rank()
    ]
    with refusing("one dimension is required"), sequence_parallel(mesh):
        pass
    with sequence_parallel(mesh["sequence"]) as parallel, torch.no_grad():
        found = layer(parallel.shard(inputs))
        own = parallel.shard(inputs).shape[1]
        first = own * parallel.rank if parallel.rank == 0 else 23 - own
    return apart({"y": found}, {"y": layer(inputs).detach()[:, first : first + own]})


def bytes_sent() -> str | None:
    """Sums send the same for any number of tokens; keys and values go once to each later rank."""
    ranks, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    told: dict[tuple[str, int], int] = {}
    for name in ("linear", "ridge", "ska(fading=True)", "mamba2", "softmax"):
        layer = (
            zonal.nn.Mamba2(16, state=4, head_dim=8) if name == "mamba2" else zonal.nn.Attention(16, 2, name, conv=4)
        )
        for tokens in (20, 80):
            with sequence_parallel() as parallel, torch.no_grad():
                layer(torch.zeros(1, tokens // ranks, 16))
            told[name, tokens] = parallel.bytes_sent
        grown = told[name, 80] - told[name, 20]
        each = (80 - 20) // ranks * (2 * (8 + 8) * 4 + 1)  # two heads of keys and values in float32, and a mask
        wanted = (ranks - 1 - rank) * each if name == "softmax" else 0
        if grown != wanted:
            return f"{name}: {told[name, 20]} bytes for 20 tokens, {told[name, 80]} for 80; {wanted} more were expected"
    return None


def scanned() -> str | None:
    """A scan takes 1 + log2(ranks - 1) messages, rounded up, and each is one memory."""
    ranks, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    distances = [1, *(2**i for i in range(math.ceil(math.log2(ranks - 1))))]
    messages = sum(rank + distance < ranks for distance in distances)
    wrong, q = list[str](), torch.zeros(1, 2, 5, 16)  # a memory is larger than all that is sent beside it
    for name in ("linear", "ridge", "ska(power=1)", "retention"):
        memory = zonal.Memory.empty(name, batch=1, heads=2, key_dim=16, value_dim=16)
        each = sum(x.nbytes for x in sent(memory).values())
        with sequence_parallel() as parallel, torch.no_grad():
            zonal.attention(q, q, q, name, causal=True)
        beside = parallel.bytes_sent - messages * each  # the lengths of stretches
        if not 0 <= beside <= 64 * ranks:
            wrong.append(f"{name}: {parallel.bytes_sent} bytes; {messages} memories of {each} bytes were expected")
    return "; ".join(wrong) or None


@contextlib.contextmanager
def refusing(text: str) -> Iterator[None]:
    """A block that an ArgumentError with this text ends."""
    try:
        yield
    except ArgumentError as error:
        if text not in str(error):
            raise AssertionError(f"{text!r} was expected in: {error}") from error
    else:
        raise AssertionError(f"nothing was refused where {text!r} was expected")


def refusals() -> str | None:
    """What is not split over ranks is refused on every rank."""
    x, mask = torch.randn(1, 6, 16), torch.ones(1, 6, dtype=torch.bool)
    q = torch.randn(1, 2, 6, 4)
    attention = zonal.nn.Attention(16, 2, "linear")
    plan = zonal.plan("linear", q.shape, q.shape, causal=True)
    others: dict[str, Callable[[], Any]] = {
        "must be causal": lambda: zonal.attention(q, q, q, "softmax"),
        "as many queries as keys": lambda: zonal.attention(q[:, :, :3], q, q, "softmax", causal=True),
        "a call neither takes nor leaves a memory": lambda: zonal.attention(
            q, q, q, "linear", causal=True, return_memory=True
        ),
        "Leave memory, return_memory": lambda: attention(x, return_memory=True),
        "Use path='auto', 'chunked'": lambda: zonal.attention(q, q, q, "linear", causal=True, path="dense"),
        "Use path='auto' or 'tiled'": lambda: zonal.attention(q, q, q, "softmax", causal=True, path="dense"),
        "dropout of attention weights": lambda: zonal.attention(q, q, q, "softmax", causal=True, dropout=0.1),
        "nn.Mamba3: the layer hands on more": lambda: zonal.nn.Mamba3(16, state=4, head_dim=8)(x),
        "nn.GatedDeltaNet: the layer hands on more": lambda: zonal.nn.GatedDeltaNet(16, state=4, head_dim=8)(x),
        "a plan is for the tokens of one process": lambda: plan(q, q, q),
        "weights and evidence are of whole sequences": lambda: attention.weights(x),
        "those of this rank's stretch": lambda: attention(x, cu_seqlens=torch.tensor([0, 2, 6])),
        "stretches of one size": lambda: attention(x[:, :5]),
        "it is on already": lambda: sequence_parallel().__enter__(),
    }
    for text, call in others.items():
        with sequence_parallel():
            attention(x, key_padding_mask=mask)
            with refusing(text):
                call()
    for offsets in ([0, 6], torch.tensor([0.0, 6.0]), torch.tensor([], dtype=torch.int64), torch.tensor(6)):
        with refusing("cu_seqlens must be"), sequence_parallel(cu_seqlens=offsets):  # type: ignore[arg-type]
            pass
    with refusing("must rise strictly"), sequence_parallel(cu_seqlens=torch.tensor([0, 4])):
        attention(x)
    with refusing("have batch 1"), sequence_parallel(cu_seqlens=torch.tensor([0, 4])):
        attention(torch.cat([x, x]))
    for spec in ("linear", "softmax"):
        with sequence_parallel() as parallel:
            y = zonal.nn.Attention(16, 2, spec)(x)
        with refusing("inside the with block"):
            y.sum().backward()
    with refusing("one per rank"), sequence_parallel() as parallel:
        parallel.shard(x[:, :1])
    return None


CHECKS: dict[str, Callable[[], str | None]] = {
    "model": model,
    "model with remade activations": lambda: model(remade=True),
    "means": means,
    "transformers": transformers_model,
    "converted": converted_model,
    "silent": silent,
    "compiled": compiled,
    "meshes": meshes,
    "bytes": bytes_sent,
    "scanned": scanned,
    "refusals": refusals,
}
