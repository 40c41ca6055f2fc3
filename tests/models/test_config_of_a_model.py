"""ModelConfig: a value that survives JSON and refuses what it cannot mean."""

import json

import pytest

from zonal.errors import ArgumentError
from zonal.models import ModelConfig

SMALL = {"vocab_size": 17, "dim": 12, "layers": ("softmax", "ska(power=1)"), "heads": 2}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {
            "kv_heads": 1,
            "head_dim": 10,
            "qk_dim": 6,
            "mlp": "koopman-gated",
            "rotary": True,
            "qk_norm": True,
            "conv": (0, 3),
            "tie_embeddings": False,
        },
        {"mlp_ratio": 2, "conv": 4, "max_len": 99, "norm_eps": 1e-5, "init_std": 0.1},
        {"rotary": True, "rotary_base": 500.0},
    ],
)
def test_json_round_trip(options):
    config = ModelConfig(**SMALL, **options)
    again = ModelConfig.from_dict(json.loads(json.dumps(config.to_dict())))
    assert again == config
    assert hash(again) == hash(config)


def test_derived_sizes():
    config = ModelConfig(**SMALL, conv=3, mlp_ratio=8 / 3)
    assert (config.size_of_head, config.conv_widths, config.mlp_hidden) == (6, (3, 3), 32)
    # a ratio of two sizes is that ratio, whatever rounding does to it
    assert all(
        ModelConfig(**SMALL | {"dim": dim}, mlp_ratio=hidden / dim).mlp_hidden == hidden
        for dim in (12, 36, 448)
        for hidden in range(8, 1300, 8)
    )
    assert ModelConfig(**SMALL, head_dim=10, conv=(0, 2)).conv_widths == (0, 2)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"vocab_size": 0}, "vocab_size must be a whole number >= 1, received 0"),
        ({"dim": 12.0}, "dim must be a whole number >= 1, received 12.0"),
        ({"dim": True}, "dim must be a whole number >= 1"),
        ({"dim": 13}, "dim=13 is not a multiple of heads=2"),
        ({"heads": -1}, "heads"),
        ({"kv_heads": 3, "heads": 4}, "kv_heads must divide heads=4"),
        ({"kv_heads": 0}, "kv_heads"),
        ({"layers": ()}, "layers"),
        ({"layers": "softmax,"}, "empty entry"),
        ({"layers": "softmax*0"}, "repeated at least once"),
        ({"layers": ("mamba2(state=0)",)}, "state must be a whole number >= 1"),
        ({"layers": ("mamba2",)}, "head_dim must divide expand · dim = 24"),
        ({"layers": ("mamba2(stat=4)",)}, "state"),
        ({"layers": ("mamba4",)}, "mamba2"),
        ({"layers": ("softmx",)}, "softmax"),
        ({"layers": ("ska(powr=1)",)}, "power"),
        ({"layers": (3,)}, "layers"),
        ({"mlp": "gelu"}, "'swiglu', 'koopman', 'koopman-gated', 'experts' or 'none'"),
        ({"qk_dim": 0}, "qk_dim"),
        ({"qk_dim": 5, "rotary": True}, "rotary needs an even head size, received 5"),
        ({"mlp_ratio": 0}, "mlp_ratio"),
        ({"mlp_ratio": float("nan")}, "mlp_ratio"),
        ({"norm_eps": "1e-6"}, "norm_eps"),
        ({"init_std": float("inf")}, "init_std"),
        ({"conv": 1}, "conv"),
        ({"conv": (3,)}, "each of the 2 layers"),
        ({"conv": (3, 1)}, "conv"),
        ({"conv": "3,3"}, "conv"),
        ({"rotary": "yes"}, "True or False"),
        ({"rotary": True, "head_dim": 5}, "even head size, received 5"),
        ({"max_len": 0}, "max_len"),
        ({"rotary_base": 5e5}, "rotary_base does nothing without rotary=True"),
        ({"experts": 16}, "experts does nothing without mlp='experts'"),
        ({"experts_per_token": 4}, "experts_per_token does nothing without mlp='experts'"),
    ],
)
def test_what_cannot_be_is_refused_by_field(change, words):
    with pytest.raises(ArgumentError, match=words):
        ModelConfig(**{**SMALL, **change})


def test_unknown_and_missing_fields_are_named():
    with pytest.raises(ArgumentError, match="unknown: depth; missing: heads"):
        ModelConfig.from_dict({"vocab_size": 3, "dim": 4, "layers": ["softmax"], "depth": 2})
