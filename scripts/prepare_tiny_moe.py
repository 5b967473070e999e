#!/usr/bin/env python3
"""Turn the Python standard library's source into the training data and the tokenizer of `tiny-moe`.

First of three steps; `train_tiny_moe.py` (GPU) and `export_tiny_moe.py` (CPU) follow.

Whole files are held out, chosen by a hash of their path, and train nothing: neither the network nor the tokenizer.
An eighth or so of the training tokens are conversations made from the training files: a request for a function, method or
class by its name, and its source as the answer, so that the chat template leads to Python code.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import random
import re
import sysconfig
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from tokenizers import Tokenizer

VOCAB_SIZE = 5120
BOS, EOS, PAD, IM_START, IM_END = "<|bos|>", "<|eos|>", "<|pad|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = [PAD, BOS, EOS, IM_START, IM_END]  # ids 0 to 4
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# Tables of numbers and character maps, which are Python only in name.
SKIPPED_FOLDERS = ("site-packages/", "encodings/", "pydoc_data/", "lib2to3/tests/data/")
CHAT_TOKEN_SHARE = 0.13
SPECIAL_RE = re.compile("|".join(re.escape(t) for t in SPECIAL_TOKENS))


def python_files(root: Path) -> Iterator[tuple[str, str]]:
    """Yield (relative path, text) of every distinct, parsable, prose-like Python file under `root`, sorted.

    Files that are mostly digits are left out: they are tables, and would make perplexity look better than it is.
    """
    seen: set[str] = set()
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if any(part in name for part in SKIPPED_FOLDERS):
            continue
        try:
            text = path.read_text(encoding="utf-8")
            ast.parse(text)
        except (UnicodeDecodeError, SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        digest = hashlib.sha256(text.encode()).hexdigest()
        digits = sum(c.isdigit() for c in text)
        if digest in seen or len(text) < 64 or digits > 0.12 * len(text) or SPECIAL_RE.search(text):
            continue
        seen.add(digest)
        yield name, text


def split_of(name: str) -> str:
    """Return "test", "valid" or "train" for a file's relative path: a hash decides, so it never changes."""
    bucket = int(hashlib.sha256(name.encode()).hexdigest(), 16) % 40
    return {0: "test", 1: "valid"}.get(bucket, "train")


def chat_documents(name: str, text: str) -> Iterator[tuple[str, str]]:
    """Yield (request, source) pairs, one for each function, method or class of 3 to 60 lines in a file."""
    lines = text.splitlines()
    owner: dict[int, str] = {}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef):
            owner.update({id(child): node.name for child in node.body})
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
        source = textwrap.dedent("\n".join(lines[first - 1 : node.end_lineno]))
        if not 3 <= source.count("\n") + 1 <= 60:
            continue
        rng = random.Random(f"{name}:{node.name}:{node.lineno}")
        is_test = node.name.lower().startswith("test")
        if is_test and rng.random() > 0.25:
            continue
        yield _request(node, owner.get(id(node)), rng), source


def _request(node: ast.AST, owner: str | None, rng: random.Random) -> str:
    """Phrase a request for one definition: its name, at times its arguments, class and documentation."""
    doc = ast.get_docstring(node) or ""
    summary = " ".join(doc.split("\n\n")[0].split()).rstrip(".")[:160]
    if isinstance(node, ast.ClassDef):
        what = rng.choice(["a Python class", "a class"])
        call = node.name
    else:
        kind = "method" if owner else "function"
        if node.name.startswith("test"):
            kind = "unit test"
        what = rng.choice([f"a Python {kind}", f"a {kind}", f"the {kind}"])
        call = node.name
        if rng.random() < 0.5:
            call += f"({', '.join(a.arg for a in node.args.args)})"
    verb = rng.choice(["Write", "Write", "Write", "Implement", "Please write"])
    request = f"{verb} {what} {rng.choice(['', '', 'named ', 'called '])}{call}"
    if owner and rng.random() < 0.6:
        request += f" of the class {owner}"
    if summary and rng.random() < 0.8:
        if rng.random() < 0.25:
            return f"{verb} {what} that does this: {summary}."
        return f"{request}. {summary}."
    return request + rng.choice(["", "."])


def chat_text(turns: list[tuple[str, str]], system: str | None = None) -> str:
    """Return a conversation in the form that CHAT_TEMPLATE gives it."""
    out = f"{IM_START}system\n{system}{IM_END}\n" if system else ""
    for user, assistant in turns:
        out += f"{IM_START}user\n{user}{IM_END}\n{IM_START}assistant\n{assistant}{IM_END}\n"
    return out


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Return a byte-level BPE `tokenizers.Tokenizer` of VOCAB_SIZE entries that gives any text back exactly."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    # A word takes one leading mark or space with it (".append", " self"), digits stand alone, and an indent is one piece.
    pattern = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    return tokenizer


def prepare(args: argparse.Namespace) -> None:
    """Write tokenizer.json, {train,valid,test}.bin (uint16 token ids) and data.json to `args.data`."""
    root = Path(args.source or sysconfig.get_paths()["stdlib"])
    files: dict[str, list[tuple[str, str]]] = {"train": [], "valid": [], "test": []}
    for name, text in python_files(root):
        files[split_of(name)].append((name, text))
    out = Path(args.data)
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer([text for _, text in files["train"]])
    tokenizer.save(str(out / "tokenizer.json"))
    bos, eos = tokenizer.token_to_id(BOS), tokenizer.token_to_id(EOS)

    def encode(texts: list[str]) -> list[list[int]]:
        return [[bos, *e.ids, eos] for e in tokenizer.encode_batch(texts)]

    rng = random.Random(0)
    documents = {s: encode([text for _, text in files[s]]) for s in files}
    plain = sum(map(len, documents["train"]))
    pairs = [pair for name, text in files["train"] for pair in chat_documents(name, text)]
    rng.shuffle(pairs)
    chats: list[str] = []
    while pairs:
        turns = [pairs.pop() for _ in range(min(len(pairs), 2 if rng.random() < 0.1 else 1))]
        system = "You are a helpful assistant." if rng.random() < 0.15 else None
        chats.append(chat_text(turns, system))
    budget = plain * CHAT_TOKEN_SHARE / (1 - CHAT_TOKEN_SHARE)
    chat_tokens = 0
    for document in encode(chats):
        if chat_tokens > budget:
            break
        chat_tokens += len(document)
        documents["train"].append(document)
    rng.shuffle(documents["train"])

    facts = {
        "source": f"CPython {sysconfig.get_config_var('VERSION')} standard library",
        "chat_tokens": chat_tokens,
    }
    for split, docs in documents.items():
        ids = np.concatenate([np.asarray(d, dtype=np.uint16) for d in docs])
        ids.tofile(out / f"{split}.bin")
        size = sum(len(text.encode()) for _, text in files[split])
        facts[split] = {"files": len(files[split]), "bytes": size, "tokens": int(ids.size)}
    facts["held_out_files"] = {s: [name for name, _ in files[s]] for s in ("valid", "test")}
    (out / "data.json").write_text(json.dumps(facts, indent=1))
    print(json.dumps({k: v for k, v in facts.items() if k != "held_out_files"}, indent=1))


def main() -> None:
    """Parse the command line and prepare."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--data", default=".tiny", help="folder to write token arrays and tokenizer.json to"
    )
    parser.add_argument(
        "--source", help="folder of Python files (default: this interpreter's library)"
    )
    prepare(parser.parse_args())


if __name__ == "__main__":
    main()
