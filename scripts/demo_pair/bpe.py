"""The demo pair's tokenizer: a byte-level BPE of 2048 tokens, lossless on any text, and its chat template."""

import json
from collections.abc import Iterable
from pathlib import Path

from corpus import ASSISTANT, EOS, USER
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 2048
SPECIALS = [EOS, USER, ASSISTANT]
# Words with one leading mark, digits one by one, marks, line ends, then indentation short of the space before a word.
PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ '<|assistant|>' + message['content'] + '<|endoftext|>' }}"
    "{% elif message['role'] in ['user', 'system', 'developer'] %}{{ '<|user|>' + message['content'] }}"
    "{% else %}{{ raise_exception('unknown role ' + message['role'] + ': use system, user or assistant') }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Return a BPE trained on the texts: the three special tokens, all 256 bytes, then merges up to VOCAB_SIZE."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=VOCAB_SIZE,
            special_tokens=SPECIALS,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, *, max_length: int) -> None:
    """Write tokenizer.json and tokenizer_config.json, as transformers' AutoTokenizer loads them."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=False), encoding="utf-8")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": EOS,
        "eos_token": EOS,
        "pad_token": EOS,
        "additional_special_tokens": [USER, ASSISTANT],
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
