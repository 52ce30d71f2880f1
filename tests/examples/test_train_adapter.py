import jax
import numpy as np
import pytest
from tokenizers import Tokenizer

from examples.train_adapter import DEMO, RANK, batch_of, save, start, train
from examples.train_demo_model import CONFIG
from jaxinfer.generation.lora.peft import read_adapter


def test_the_loss_is_of_capitals_after_plain_lines():
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    texts = [f"def function_{i}(argument):\n    return argument + {i}\n\n\n" * 20 for i in range(3)]
    ids, counted = batch_of(texts, tokenizer, np.random.default_rng(0), batch=4, length=96)
    assert ids.shape == (4, 97)
    for row, chosen in zip(ids, counted, strict=True):
        capitals = tokenizer.decode(row[1:][chosen])
        assert len(capitals) > 50
        assert capitals == capitals.upper()
        plain = tokenizer.decode(row[1 : 1 + chosen.argmax()])
        assert plain == plain.lower()
        assert plain.endswith("\n")


def test_pairs_are_saved_as_peft_has_them(tmp_path):
    save(tmp_path, start(jax.random.key(0)))
    adapter = read_adapter(tmp_path, "demo", CONFIG)
    assert adapter.max_rank == RANK
    assert adapter.layers.keys() == {f"layers.{i}.{name}" for i in range(8) for name in ("attention.out", "mlp.down")}
    assert all(pair.a.any() and not pair.b.any() for pair in adapter.layers.values())


@pytest.mark.slow
def test_training_changes_b(monkeypatch, capsys):
    batches = []

    def the_first(*args, **options):
        batches.append(batches[0] if batches else batch_of(*args, **options))
        return batches[0]

    monkeypatch.setattr("examples.train_adapter.batch_of", the_first)  # some batches are harder than others
    pairs = train(steps=11, rate=5e-3, batch=2, length=64)
    assert all(np.abs(b).max() > 0 for _, b in pairs.values())
    first, *_, last = (float(line.split()[2]) for line in capsys.readouterr().out.splitlines())
    assert last < 0.8 * first
