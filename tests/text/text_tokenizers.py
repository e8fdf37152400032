"""Small tokenizers for the text tests, trained here: five families, each saved as a Hugging Face folder."""

import inspect
import json
import random
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN = LLAMA3.replace("{1,3}", "")
WORDS = "the quick brown fox jumps over a dog while rivers of light don't stop, we'll see 42 birds (or 1,234) today"
FOREIGN = ["café", "naïve", "„Zitat“", "東", "Ωmega", "e\u0301", "\u00a0", "😀", "ﬁ", "Straße", "İ", "’s", "\u2028"]
SPACES = [" ", " ", " ", " ", "  ", "\n", "\n\n", "\t", " \n", "\r\n", "   ", ""]
ODD = ["...", "--", "'S", "''s", "<b>", "x=1;", "\x0b", "\x0c", "\x1c", "\x00", "\x7f", "[", "<|", "#!", "_a_"]


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


def build(kind: str, vocab_size: int = 600) -> Tokenizer:
    """`bpe` (words, with an unknown token), `gpt2`, `wordpiece` (BERT), `llama3`, `qwen`, `metaspace`."""
    if kind == "wordpiece":
        tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        tokenizer.normalizer = normalizers.BertNormalizer()
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = decoders.WordPiece()
        special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
        trainer = trainers.WordPieceTrainer(vocab_size=vocab_size, special_tokens=special, show_progress=False)
    elif kind in ("bpe", "metaspace"):
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace() if kind == "bpe" else pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.BPEDecoder() if kind == "bpe" else decoders.Metaspace()
        trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=["<unk>", "</s>"], show_progress=False)
    else:
        tokenizer = Tokenizer(models.BPE())
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind == "gpt2")
        if kind == "gpt2":
            tokenizer.pre_tokenizer = byte_level
        else:
            split = pre_tokenizers.Split(Regex(LLAMA3 if kind == "llama3" else QWEN), "isolated")
            tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
        if kind == "qwen":
            tokenizer.normalizer = normalizers.NFC()
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
        how = {"special_tokens": ["<|endoftext|>"], "initial_alphabet": pre_tokenizers.ByteLevel.alphabet()}
        trainer = trainers.BpeTrainer(vocab_size=vocab_size, show_progress=False, **how)
    tokenizer.train_from_iterator(_training_texts(), trainer)
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
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
