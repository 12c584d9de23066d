"""Learns the demo model's byte-pair vocabulary from its captions and writes a CLIPTokenizer folder."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path

START, END = "<|startoftext|>", "<|endoftext|>"
LENGTH = 32
EXTRA_WORDS = "a an the of on in and with picture photo drawing icon"


def byte_letters() -> list[str]:
    """The 256 printable letters that GPT-2 and CLIP write bytes with, in CLIP's order."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in printable]
    return [chr(b) for b in printable] + [chr(256 + i) for i in range(len(rest))]


def learn(words: list[str], merges: int) -> list[tuple[str, str]]:
    """Byte-pair merges in the order learned; ties go to the alphabetically first pair."""
    counts = Counter(words)
    splits = {word: (*word[:-1], word[-1] + "</w>") for word in counts}
    learned: list[tuple[str, str]] = []
    while len(learned) < merges:
        pairs: Counter[tuple[str, str]] = Counter()
        for word, parts in splits.items():
            for pair in pairwise(parts):
                pairs[pair] += counts[word]
        if not pairs:
            break
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        learned.append(best)
        for word, parts in splits.items():
            merged, i = [], 0
            while i < len(parts):
                if parts[i : i + 2] == best:
                    merged.append(parts[i] + parts[i + 1])
                    i += 2
                else:
                    merged.append(parts[i])
                    i += 1
            splits[word] = tuple(merged)
    return learned


def write(captions: dict[str, list[str]], folder: Path, merges: int = 600) -> None:
    # CLIP splits off digits and punctuation before merging, so only runs of letters are learned
    text = " ".join(caption for several in captions.values() for caption in several) + " " + EXTRA_WORDS
    words = "".join(c if c.isalpha() else " " for c in text.lower()).split()
    learned = learn(words, merges)
    letters = byte_letters()
    tokens = [*letters, *(c + "</w>" for c in letters), *("".join(pair) for pair in learned), START, END]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.json").write_text(json.dumps({t: i for i, t in enumerate(tokens)}), encoding="utf-8")
    lines = ["#version: 0.2", *(" ".join(pair) for pair in learned)]
    (folder / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    special = {"bos_token": START, "eos_token": END, "unk_token": END, "pad_token": END}
    (folder / "special_tokens_map.json").write_text(json.dumps(special, indent=2) + "\n", encoding="utf-8")
    config = {
        "tokenizer_class": "CLIPTokenizer",
        "model_max_length": LENGTH,
        "do_lower_case": True,
        "add_prefix_space": False,
        "errors": "replace",
        **special,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
