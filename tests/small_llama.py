"""Small decoders of transformers and their tokenisers, which tests share."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.3,
}


def decoder(kind: str, **settings: Any) -> Any:
    """A decoder of transformers that knows 29 tokens, for inference, with the same weights each time."""
    import transformers  # takes seconds, which tests of the sizes alone should not wait

    torch.manual_seed(0)
    made = getattr(transformers, "GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM")
    tokens = {"vocab_size": 29, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
    return made(made.config_class(**tokens, **settings)).eval()


def word_tokenizer(words: Iterable[str]) -> Any:
    """One token for each word. The first is also the unknown word and the end of a text."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    numbers = {word: index for index, word in enumerate(words)}
    first = next(iter(numbers))
    plain = Tokenizer(models.WordLevel(numbers, unk_token=first))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=plain, eos_token=first)


def save_model_of(text: str, folder: Path, **sizes: Any) -> None:
    """Save a small Llama and a tokeniser of bytes that was trained on a text."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    plain = Tokenizer(models.BPE())
    plain.pre_tokenizer, plain.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<end>"], show_progress=False)
    plain.train_from_iterator([text], trainer)
    transformers.PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<end>").save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=300, eos_token_id=0, pad_token_id=0, **SIZES | sizes)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
