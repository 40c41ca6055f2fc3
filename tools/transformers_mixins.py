"""The generic tests of transformers, of models and of generation, on the models of this library:

    make test-transformers FOLDER=…

FOLDER is a checkout of transformers at the installed version, whose folder `tests` is not part of the package. The
tests need the package parameterized.
"""

import tempfile
import unittest
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tests.generation.test_utils import GenerationTesterMixin
from tests.test_configuration_common import ConfigTester
from tests.test_modeling_common import ModelTesterMixin, floats_tensor, ids_tensor
from transformers.models.auto import modeling_auto

from zonal import hf

# by these lists of names the tests know what is a head, and which labels it takes
modeling_auto.MODEL_MAPPING_NAMES["zonal"] = "ZonalModel"
modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["zonal"] = "ZonalForCausalLM"
modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES["zonal"] = "ZonalForMaskedLM"
modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES["zonal"] = "ZonalForSequenceClassification"
modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES["zonal_vision"] = "ZonalForImageClassification"


class Texts:
    """What the generic tests ask for: a small config of a model of text, and inputs."""

    is_training = True
    batch_size, seq_length, vocab_size, hidden_size = 2, 12, 99, 32
    num_attention_heads = num_key_value_heads = 4

    def __init__(self, layers: str, causal: bool) -> None:
        self.layers, self.causal = layers, causal
        self.num_hidden_layers = len(layers.split(", "))

    def get_config(self) -> hf.ZonalConfig:
        return hf.ZonalConfig(
            vocab_size=self.vocab_size, dim=self.hidden_size, layers=self.layers, heads=self.num_attention_heads,
            causal=self.causal, rotary=True, tie_embeddings=False, pad_token_id=0, bos_token_id=1, eos_token_id=2,
            num_labels=3,
        )  # fmt: skip

    def prepare_config_and_inputs_for_common(self) -> tuple[hf.ZonalConfig, dict[str, Any]]:
        tokens = ids_tensor([self.batch_size, self.seq_length], self.vocab_size)
        return self.get_config(), {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}


class Images:
    """The same for images: 9 patches are the tokens."""

    is_training = True
    batch_size, image, hidden_size, num_attention_heads, num_hidden_layers, seq_length = 2, 12, 32, 4, 2, 9

    def get_config(self) -> hf.ZonalVisionConfig:
        return hf.ZonalVisionConfig(
            image=self.image, channels=3, classes=3, dim=self.hidden_size, layers="sko, squared_affine",
            heads=self.num_attention_heads,
        )  # fmt: skip

    def prepare_config_and_inputs_for_common(self) -> tuple[hf.ZonalVisionConfig, dict[str, Any]]:
        return self.get_config(), {"pixel_values": floats_tensor([self.batch_size, 3, self.image, self.image])}


class Models(ModelTesterMixin):
    """All generic tests of models of text."""

    layers = ""
    causal = True
    has_attentions = False  # operators make no matrix of weights

    def setUp(self) -> None:
        self.model_tester = Texts(self.layers, self.causal)
        self.config_tester = ConfigTester(self, config_class=hf.ZonalConfig)

    def test_config(self) -> None:
        self.config_tester.run_common_tests()


class Decoders(Models, GenerationTesterMixin):
    """All generic tests of decoders and of generation."""

    all_model_classes = (hf.ZonalModel, hf.ZonalForCausalLM, hf.ZonalForSequenceClassification)
    all_generative_model_classes = (hf.ZonalForCausalLM,)

    def test_left_padding_compatibility(self) -> None:
        self.has_attentions = True  # else it is skipped
        super().test_left_padding_compatibility()

    def _check_caches_are_equal(self, cache1: hf.ZonalCache, cache2: hf.ZonalCache) -> None:
        """Theirs compares keys and values; here the memories that the caches hold."""
        with tempfile.TemporaryDirectory() as folder:
            paths = Path(folder) / "first", Path(folder) / "second"
            for cache, path in zip((cache1, cache2), paths, strict=True):
                cache.memory().save(path)
            first, second = map(load_file, paths)
        torch.testing.assert_close(first, second)


class TestSumsAndRidge(Decoders, unittest.TestCase):
    layers = "squared_affine, ska(power=1)"


class TestSphereAndRecurrence(Decoders, unittest.TestCase):
    layers = "sko, mamba2"


class TestEncoders(Models, unittest.TestCase):
    layers = "sko, squared_affine"
    causal = False
    all_model_classes = (hf.ZonalModel, hf.ZonalForMaskedLM, hf.ZonalForSequenceClassification)


class TestImages(ModelTesterMixin, unittest.TestCase):
    all_model_classes = (hf.ZonalForImageClassification,)
    has_attentions = False
    test_resize_embeddings = False  # images have no vocabulary

    def setUp(self) -> None:
        self.model_tester = Images()
        self.config_tester = ConfigTester(self, config_class=hf.ZonalVisionConfig, has_text_modality=False)

    def test_config(self) -> None:
        self.config_tester.run_common_tests()

    def test_model_get_set_embeddings(self) -> None:
        model = hf.ZonalForImageClassification(self.model_tester.get_config())  # theirs asks for a vocabulary
        assert model.get_input_embeddings() is model.model.patches
