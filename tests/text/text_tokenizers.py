"""Small tokenizers for the text tests, trained here, each saved as a Hugging Face folder."""

import inspect
import json
import random
import unicodedata
from pathlib import Path
from typing import Sequence

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from dfm_nb.text.tokenizer import TokenizerSpec
from tests.json_files import write_json

CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_ENDING = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDING}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDING}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^%s\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[%s]*|\s*[%s]+|\s+(?!\S)|\s+"
).replace("%s", "\r\n")
FAMILY = {  # kind: patterns of the pre-tokenizer, normaliser, ignore_merges
    "gpt2": ((), None, False),
    "llama3": ((CL100K,), None, True),
    "cl100k": ((CL100K,), None, False),
    "qwen": ((CL100K.replace("{1,3}", ""),), normalizers.NFC(), False),
    "o200k": ((O200K,), None, False),
    "gpt-oss": ((O200K,), None, True),
    "deepseek": ((r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+", DEEPSEEK), normalizers.Sequence([]), False),
    "llama2": (None, normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]), False),
    "mistral": (pre_tokenizers.Metaspace(prepend_scheme="first", split=False), None, False),
    "gemma": (pre_tokenizers.Split(" ", "merged_with_previous"), normalizers.Replace(" ", "▁"), False),
}
WORDS = "the quick brown fox jumps over a dog while rivers of light don't stop, we'll see 42 birds (or 1,234) today"
FOREIGN = ["café", "naïve", "„Zitat“", "東", "Ωmega", "e\u0301", "\u00a0", "😀", "ﬁ", "Straße", "İ", "’s", "\u2028"]
SPACES = [" ", " ", " ", " ", "  ", "\n", "\n\n", "\t", " \n", "\r\n", "   ", ""]
ODD = ["...", "--", "'S", "''s", "<b>", "x=1;", "\x0b", "\x0c", "\x1c", "\x00", "\x7f", "[", "<|", "#!", "_a_"]
ODD_TEXTS = [
    *(unicodedata.normalize(form, "Äpfel naïve Việt Nam 한국어 が") for form in ("NFC", "NFD")),
    "👨‍👩‍👧‍👦 👍🏽 🏳️‍🌈 🇩🇪 \U0001f600",
    "שָׁלוֹם مرحبا हिन्दी ไทย 漢字カナ 123",
    "a\x00b 'S don't ’s 'ſ x\u2028y\x85z\u00a0w \u200b\ufeff \ue000\U0010ffff",
    " <|endoftext|> \n<|endoftext|><|endoftext|>x <unk></s> <0x41> ▁a",
    "x" * 100_000,
    "\u0c5c\n\u088f a\u09fe\u032c \u0295\u04cb\u034f \U000333a1\u0276",  # where their versions of Unicode differ
    "",
]


def sample_text(seed: int, words: int = 60, foreign: float = 0.05, odd: float = 0.05) -> str:
    """A text that mixes words, odd white space, marks, control characters and other scripts."""
    rng, parts = random.Random(seed), []
    vocabulary = WORDS.split()
    for _ in range(words):
        r = rng.random()
        if r < foreign:
            parts.append(rng.choice(FOREIGN))
        elif r < foreign + odd:
            parts.append(rng.choice(ODD))
        else:
            parts.append(rng.choice(vocabulary))
        parts.append(rng.choice(SPACES))
    return "".join(parts)


def _training_texts() -> list[str]:
    docs = [inspect.getdoc(o) or "" for o in (str, int, dict, list, random, json, Path, inspect)]
    return docs + [sample_text(s, foreign=0.1) for s in range(20)]


def spec_of(tokenizer: Tokenizer) -> TokenizerSpec:
    return TokenizerSpec("test", tokenizer.to_str(), tokenizer.get_vocab_size(), tokenizer.get_vocab_size() - 1, None)


def build(kind: str, vocab_size: int = 600, texts: Sequence[str] = ()) -> Tokenizer:
    """`bpe` (words, with an unknown token), `wordpiece` (BERT), or one of `FAMILY`."""
    if kind == "wordpiece":
        tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        tokenizer.normalizer = normalizers.BertNormalizer()
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = decoders.WordPiece()
        special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
        trainer = trainers.WordPieceTrainer(vocab_size=vocab_size, special_tokens=special, show_progress=False)
    elif kind == "bpe":
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        tokenizer.decoder = decoders.BPEDecoder()
        trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=["<unk>", "</s>"], show_progress=False)
    elif isinstance(FAMILY[kind][0], tuple):  # bytes
        patterns, normalizer, ignore_merges = FAMILY[kind]
        tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not patterns)
        splits = [pre_tokenizers.Split(Regex(p), "isolated") for p in patterns]
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level]) if splits else byte_level
        if normalizer:
            tokenizer.normalizer = normalizer
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
        how = {"special_tokens": ["<|endoftext|>"], "initial_alphabet": pre_tokenizers.ByteLevel.alphabet()}
        trainer = trainers.BpeTrainer(vocab_size=vocab_size, show_progress=False, **how)
    else:  # characters, and bytes for those that are not in the vocabulary
        pre_tokenizer, normalizer, _ = FAMILY[kind]
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
        if pre_tokenizer:
            tokenizer.pre_tokenizer = pre_tokenizer
        if normalizer:
            tokenizer.normalizer = normalizer
        special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size + 256, special_tokens=special, max_token_length=16, show_progress=False
        )
    tokenizer.train_from_iterator(texts or _training_texts(), trainer)
    if kind == "wordpiece":
        ids = [(t, tokenizer.token_to_id(t)) for t in ("[CLS]", "[SEP]")]
        tokenizer.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", special_tokens=ids)
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path, eos: bool = True) -> Path:
    """Save as a folder that AutoTokenizer reads."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    added = {t.content for t in tokenizer.get_added_tokens_decoder().values()}
    config: dict[str, object] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    if eos:
        for token in ("<|endoftext|>", "</s>"):
            if token in added:
                config["eos_token"] = token
        if "[SEP]" in added:
            config |= {"sep_token": "[SEP]", "cls_token": "[CLS]", "pad_token": "[PAD]", "unk_token": "[UNK]"}
    write_json(folder / "tokenizer_config.json", config)
    return folder
