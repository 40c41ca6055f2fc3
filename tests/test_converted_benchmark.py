"""`python -m benchmarks.converted` on tiny models, where transformers is installed."""

from pathlib import Path
from typing import Any

import pytest


def test_rows_of_tiny_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers: Any = pytest.importorskip("transformers")
    tokenizers: Any = pytest.importorskip("tokenizers")
    from benchmarks import common, converted
    from zonal import hf

    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=64, intermediate_size=32, num_hidden_layers=2, num_attention_heads=1
    )
    model = transformers.LlamaForCausalLM(config)
    for name in ("original", "converted"):
        model.save_pretrained(tmp_path / name)
        transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path / name)
        hf.convert(model, "squared_affine", cache="memory")
    written: list[dict[str, Any]] = []
    monkeypatch.setattr(common.Run, "write", lambda self, rows, *inputs: written.extend(rows))
    folders = ["--model", str(tmp_path / "converted"), "--original", str(tmp_path / "original")]
    assert converted.main([*folders, "--quick", "--threads", "1"]) == 0
    assert [(row["part"], row["tokens"]) for row in written] == [
        ("decoding", 64), ("decoding", 128), ("prefill", 64), ("training step", 64)
    ]  # fmt: skip
    for row in written:
        assert set(row["seconds"]) == set(row["bytes"]) == set(row["runs"]) == {"original", "converted", "mamba2"}
        assert row["to_original"]["original"] == 1
    assert written[0]["bytes"]["converted"] == written[1]["bytes"]["converted"]
    assert 2 * written[0]["bytes"]["original"] == written[1]["bytes"]["original"]
    written.clear()
    assert converted.main([*folders, "--quick", "--threads", "1", "--parts", "decoding", "--longest", "64"]) == 0
    assert [(row["part"], row["tokens"]) for row in written] == [("decoding", 64)]
