"""Train the demo model: a small Llama-shaped `Decoder` on the source of Python's standard library.

python examples/train_demo_model.py --work-dir demo --minutes 90 --export examples/demo_model

Some modules are held out; at the end their bits per byte are printed, and those of `xz -9` for comparison. Another run
with the same work directory continues from the last saved state, also with another sequence length.

`examples/demo_model` was trained this way on two shared CPU cores in 75 minutes: 830 steps of 16 sequences of 512
tokens, then 273 of 8 sequences of the whole context (`--length 1024 --batch 8`), 9.0 million tokens in all. Bits per
byte on the held-out modules: 1.22, against 2.01 of `xz -9` on each file and 1.77 on all files as one.
"""

import argparse
import functools
import hashlib
import lzma
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.experimental.layout import Layout, with_layout_constraint
from orbax.checkpoint import v1 as ocp
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from jaxinfer.checkpoints import Layout as FileLayout
from jaxinfer.models.abstract import split_model
from jaxinfer.models.config import (
    Activation,
    AttentionConfig,
    DecoderConfig,
    LayerConfig,
    MlpConfig,
    NormConfig,
    NormKind,
    PositionKind,
    PositionsConfig,
)
from jaxinfer.models.files.loading import save_model
from jaxinfer.models.layers.attention import Attention
from jaxinfer.models.layers.mlp import Mlp
from jaxinfer.models.layers.rotary import rotary_table
from jaxinfer.models.text.decoder import Decoder
from jaxinfer.models.weight_format import WeightFormat
from jaxinfer.pallas_kernels.rotary import rotate

END_OF_TEXT = "<|endoftext|>"
STORED = "bfloat16"

CONFIG = DecoderConfig(
    vocab=4096,
    embed=256,
    layers=8,
    context=1024,
    pattern=(
        LayerConfig(
            mixer=AttentionConfig(
                q_heads=4,
                kv_heads=2,
                head_dim=64,
                positions=PositionsConfig(kind=PositionKind.ROTARY, rotary_dim=64),
            ),
            mlp=MlpConfig(hidden=704, activation=Activation.SILU, gated=True),
        ),
    ),
    norm=NormConfig(kind=NormKind.RMS),
    tied=True,
)

# Files and folders of the standard library that are not trained on, nor are their tests.
HELD_OUT = (
    "argparse.py",
    "bisect.py",
    "calendar.py",
    "csv.py",
    "difflib.py",
    "fractions.py",
    "heapq.py",
    "json",
    "queue.py",
    "sched.py",
    "shelve.py",
    "shlex.py",
    "statistics.py",
    "textwrap.py",
)
# Tables rather than programs, and files that are invalid on purpose.
LEFT_OUT = ("site-packages", "encodings", "pydoc_data", "lib2to3/tests/data", "test/tokenizedata", "turtledemo")


# --- data ---------------------------------------------------------------------------------------------------------


class Corpus(NamedTuple):
    """Texts by path relative to the library; `held_out` is without tests."""

    training: dict[str, str]
    held_out: dict[str, str]


def read_corpus(library: Path) -> Corpus:
    """Read the library's Python files without duplicates, split into training and held-out files."""
    hidden_tests = {f"test/test_{name.removesuffix('.py')}{end}" for name in HELD_OUT for end in (".py", "")}
    seen: set[bytes] = set()
    corpus = Corpus({}, {})
    for path in sorted(library.rglob("*.py")):
        name = path.relative_to(library).as_posix()
        content = path.read_bytes()
        digest = hashlib.sha256(content).digest()
        if digest in seen or _inside(name, LEFT_OUT) or _inside(name, hidden_tests):
            continue
        seen.add(digest)
        try:
            text = content.decode()
        except UnicodeDecodeError:  # a test of source encodings
            continue
        if text:
            (corpus.held_out if _inside(name, HELD_OUT) else corpus.training)[name] = text
    return corpus


def _inside(name: str, places: tuple[str, ...] | set[str]) -> bool:
    return any(name == place or name.startswith(f"{place}/") for place in places)


def train_tokenizer(texts: list[str], vocab: int) -> Tokenizer:
    """Train a byte-level BPE over words.

    Words are letters with the preceding character, and punctuation with the following line ends.
    """
    words = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(words), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def end_of_text(tokenizer: Tokenizer) -> int:
    return tokenizer.get_vocab()[END_OF_TEXT]


def encode(tokenizer: Tokenizer, texts: list[str]) -> np.ndarray:
    """Encode all texts as one int32 stream, with an end-of-text token before each and after the last."""
    end = end_of_text(tokenizer)
    stream = [end]
    for encoding in tokenizer.encode_batch(texts, add_special_tokens=False):
        stream += [*encoding.ids, end]
    return np.array(stream, np.int32)


def batch_at(stream: np.ndarray, step: int, batch: int, length: int, seed: int = 0) -> np.ndarray:
    """Return batch number `step`, [batch, length + 1].

    Every epoch cuts the stream at a new offset and shuffles the cuts.
    """
    count = (len(stream) - 1) // length - 1  # one less than fit, because of the offset
    if count < batch:
        raise ValueError(f"{len(stream)} tokens make fewer than batch={batch} sequences of length={length}.")
    epoch, index = divmod(step, count // batch)
    rng = np.random.default_rng((seed, epoch))
    offset = rng.integers(length)
    chosen = rng.permutation(count)[index * batch : (index + 1) * batch]
    return np.stack([stream[start : start + length + 1] for start in offset + chosen * length])


# --- model --------------------------------------------------------------------------------------------------------
#
# The Decoder's mathematics, arranged for the backward pass on a CPU, in bfloat16 with float32 weights. XLA:CPU
# multiplies bfloat16 matrices with AMX only if both operands are laid out in memory as the product reads them; those
# in gradients from autodiff are not, and take 5 to 10 times as long.


def _row_major(x: jax.Array) -> jax.Array:
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


def _transposed(x: jax.Array) -> jax.Array:
    """Swap the last two dimensions, in memory as well."""
    return _row_major(jnp.swapaxes(_row_major(x), -1, -2))


@jax.custom_vjp
def product(a: jax.Array, b: jax.Array) -> jax.Array:
    """Compute `a b^T`: [..., M, K], [..., N, K] -> [..., M, N]."""
    leading = tuple(range(a.ndim - 2))
    y = jax.lax.dot_general(a, b, (((a.ndim - 1,), (b.ndim - 1,)), (leading, leading)))
    return jax.lax.optimization_barrier(y)  # otherwise a later cast would make the product float32


def _product_forward(a: jax.Array, b: jax.Array):
    return product(a, b), (a, b)


def _product_backward(saved: tuple[jax.Array, jax.Array], dy: jax.Array):
    a, b = saved
    return dy @ b, _transposed(_transposed(a) @ dy)


product.defvjp(_product_forward, _product_backward)


def linear(x: jax.Array, weight: jax.Array) -> jax.Array:
    """`x W^T`, with W cast to x's dtype: [B, T, K], [N, K] -> [B, T, N]."""
    return product(x.reshape(-1, x.shape[-1]), weight.astype(x.dtype)).reshape(*x.shape[:-1], -1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def causal_attention(q: jax.Array, k: jax.Array, v: jax.Array, scale: float) -> jax.Array:
    """`softmax(scale * q k^T) v`, causal, with one pass over the scores in each direction.

    q [B, H, G, T, K], k and v [B, H, T, K] -> [B, H, G, T, K], with G queries per KV head.
    """
    return _attention_forward(q, k, v, scale)[0]


def _attention_forward(q: jax.Array, k: jax.Array, v: jax.Array, scale: float):
    batch, heads, group, tokens, size = q.shape
    scores = product(q.reshape(batch, heads, group * tokens, size), k).reshape(batch, heads, group, tokens, tokens)
    capped = jnp.minimum(scores.astype(jnp.float32) * scale, 60.0)  # exp stays finite without the row's maximum
    weights = jnp.where(jnp.tri(tokens, dtype=bool), jnp.exp(capped), 0.0).astype(q.dtype)
    weights = weights.reshape(batch, heads, group * tokens, tokens)
    ones = jnp.ones((batch, heads, 1, tokens), v.dtype)
    summed = product(weights, jnp.concatenate([_transposed(v), ones], axis=2)).astype(jnp.float32)
    total = summed[..., -1:]
    out = (summed[..., :-1] / total).astype(q.dtype)
    return out.reshape(q.shape), (q, k, v, weights, total, out)


def _attention_backward(scale: float, saved: tuple[jax.Array, ...], dout: jax.Array):
    q, k, v, weights, total, out = saved
    dout = dout.reshape(out.shape).astype(jnp.float32) / total
    shift = (dout * out.astype(jnp.float32)).sum(axis=-1, keepdims=True)
    dout = dout.astype(q.dtype)
    dweights = product(dout, v).astype(jnp.float32)
    dscores = (weights.astype(jnp.float32) * (dweights - shift) * scale).astype(q.dtype)
    dq = (dscores @ k).reshape(q.shape)
    dk = _transposed(_transposed(q.reshape(out.shape)) @ dscores)
    return dq, dk, _transposed(_transposed(dout) @ weights)


causal_attention.defvjp(_attention_forward, _attention_backward)


def attend(module: Attention, x: jax.Array, rotary: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Apply the attention block, [B, T, D] -> [B, T, D]."""
    cfg, (batch, tokens) = module.cfg, x.shape[:2]
    heads = linear(x, module.qkv.weight[...]).reshape(batch, tokens, -1, cfg.head_dim)
    rotated, plain = (
        jnp.einsum("bthgk->bhgtk", y.reshape(batch, tokens, cfg.kv_heads, cfg.group + 2, cfg.head_dim))
        for y in (rotate(heads, rotary), heads)
    )
    mixed = causal_attention(rotated[:, :, :-2], rotated[:, :, -2], plain[:, :, -1], cfg.score_scale)
    return linear(jnp.einsum("bhgtk->bthgk", mixed).reshape(batch, tokens, -1), module.out.weight[...])


def feed_forward(module: nnx.Module, x: jax.Array) -> jax.Array:
    """`down(silu(gate(x)) * up(x))`, gate and up as two products: splitting weights is cheaper than activations."""
    assert isinstance(module, Mlp)
    weight = module.gate_up.weight[...]
    gate, up = linear(x, weight[0::2]).astype(jnp.float32), linear(x, weight[1::2]).astype(jnp.float32)
    return linear((jax.nn.silu(gate) * up).astype(x.dtype), module.down.weight[...])


def logits(
    model: Decoder,
    tokens: jax.Array,
    dtype=jnp.bfloat16,
    mlp: Callable[[nnx.Module, jax.Array], jax.Array] = feed_forward,
) -> jax.Array:
    """Compute `model.logits(model(tokens, positions)[0])`: int32 [B, T] -> float32 [B, T, V].

    mlp: computes a layer's feed-forward block, [B, T, D] -> [B, T, D].
    """
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    rotary = rotary_table(model.cfg.layer(0).attention.positions, positions)
    x = model.embed(tokens).astype(dtype)
    for layer in model.layers:
        assert layer.attention is not None
        assert layer.mlp_norm is not None
        x += attend(layer.attention, layer.attention_norm(x), rotary)
        x += mlp(layer.mlp, layer.mlp_norm(x))
    assert model.final_norm is not None
    return linear(model.final_norm(x), model.embed.table[...]).astype(jnp.float32)


# --- training -----------------------------------------------------------------------------------------------------


class TrainState(NamedTuple):
    """The state from which a run continues.

    Attributes:
      step: int32 [], steps done.
      spent: float32 [], fraction of the training time that is over.
      params: float32 weights by name.
      optimizer: its state.
    """

    step: jax.Array
    spent: jax.Array
    params: dict[str, jax.Array]
    optimizer: optax.OptState


def cross_entropy(scores: jax.Array, targets: jax.Array) -> jax.Array:
    """Compute nats per token; the target's score is selected by comparison, whose gradient needs no scatter."""
    target = jnp.where(targets[..., None] == jnp.arange(scores.shape[-1]), scores, 0.0).sum(axis=-1)
    return (jax.nn.logsumexp(scores, axis=-1) - target).mean()


def learning_rate(step: jax.Array, spent: jax.Array, peak: float, warmup: int = 100) -> jax.Array:
    """Compute the rate: warm-up, then constant, then linearly to zero over the last 70 percent of the training time."""
    return peak * jnp.minimum(1.0, (step + 1) / warmup) * jnp.clip((1.0 - spent) / 0.7, 0.0, 1.0)


def is_layer_matrix(name: str) -> bool:
    """Return whether a parameter is a matrix of a layer, which is multiplied in bfloat16; a router's is not."""
    return name.endswith("weight") and not name.endswith("router.weight")


def make_optimizer() -> optax.GradientTransformation:
    """Make the optimiser: Muon for the layers' matrices, AdamW for the rest, at rate 1; the step scales the updates."""

    def orthogonalised(params: optax.Params) -> Any:
        dimensions = optax.contrib.MuonDimensionNumbers(reduction_axis=-2, output_axis=-1)  # before them: experts
        return {name: dimensions if is_layer_matrix(name) else None for name in cast(dict, params)}

    muon = optax.contrib.muon(
        1.0,
        weight_decay=0.1,
        weight_decay_mask=lambda params: jax.tree.map(lambda x: x.ndim >= 2, params),
        mu_dtype=jnp.bfloat16,
        consistent_rms=0.2,  # updates of AdamW's size, so that both use one rate
        adam_b2=0.98,
        muon_weight_dimension_numbers=orthogonalised,
    )
    return optax.chain(optax.clip_by_global_norm(1.0), muon)


class Trainer:
    """The model's graph definition, the optimizer, and the compiled step."""

    def __init__(self, cfg: DecoderConfig, peak: float):
        self.cfg, self.peak = cfg, peak
        model = Decoder(cfg, WeightFormat(dtype=np.dtype(np.float32)), rngs=nnx.Rngs(0))
        self.graphdef, state = nnx.split(model)
        leaves, self.treedef = jax.tree.flatten_with_path(nnx.to_pure_dict(state))
        self.names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in leaves]
        self.leaves = [leaf for _, leaf in leaves]
        self.optimizer = make_optimizer()
        self.step = jax.jit(self._step, donate_argnums=0)

    def start(self) -> TrainState:
        """Return the state before the first step."""
        params = {name: leaf.copy() for name, leaf in zip(self.names, self.leaves, strict=True)}  # steps donate them
        return TrainState(jnp.int32(0), jnp.float32(0), params, self.optimizer.init(params))

    def model(self, params: dict[str, jax.Array]) -> Decoder:
        """The Decoder with these weights."""
        return nnx.merge(self.graphdef, nnx.State(jax.tree.unflatten(self.treedef, [params[n] for n in self.names])))

    def loss(self, params: dict[str, jax.Array], batch: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Compute what a step makes smaller, and the nats per token."""
        nats = cross_entropy(logits(self.model(params), batch[:, :-1]), batch[:, 1:])
        return nats, nats

    def _step(self, state: TrainState, batch: jax.Array, spent: jax.Array) -> tuple[TrainState, jax.Array]:
        (_, nats), gradients = jax.value_and_grad(self.loss, has_aux=True)(state.params, batch)
        # Muon multiplies matrices in the gradients' dtype, and these were computed in bfloat16.
        gradients = {n: g.astype(jnp.bfloat16) if is_layer_matrix(n) else g for n, g in gradients.items()}
        updates, optimizer = self.optimizer.update(gradients, state.optimizer, state.params)
        rate = learning_rate(state.step, spent, self.peak)
        params = jax.tree.map(lambda weight, update: weight + rate * update, state.params, updates)
        return TrainState(state.step + 1, spent, params, optimizer), nats


def train(trainer: Trainer, stream: np.ndarray, args: argparse.Namespace) -> TrainState:
    """Train until the time is over, from the last saved state if there is one, saving every few minutes."""
    state = trainer.start()
    latest: Any = ocp.training.preservation_policies.LatestN(2)
    with ocp.training.Checkpointer(args.work_dir / "states", preservation_policy=latest) as checkpointer:
        if checkpointer.latest is not None:
            state = _from_leaves(state, checkpointer.load(None, _leaves(state)))
            print(f"Continuing at step {state.step} with {state.spent:.1%} of the time spent.", flush=True)
        for trained in steps(trainer, state, stream, args):
            checkpointer.save(int(trained.step), _leaves(trained), force=True)
            state = trained
    return state


def _leaves(state: TrainState) -> dict[str, jax.Array]:
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(state)}


def _from_leaves(like: TrainState, leaves: dict[str, jax.Array]) -> TrainState:
    return jax.tree.unflatten(jax.tree.structure(like), [leaves[name] for name in _leaves(like)])


def steps(trainer: Trainer, state: TrainState, stream: np.ndarray, args: argparse.Namespace) -> Iterator[TrainState]:
    """Yield the state every `args.save_minutes`, and at the end if there was a step."""
    budget = 60 * args.minutes  # seconds
    before, step = float(state.spent) * budget, int(state.step)
    first = step
    started = saved = logged = time.monotonic()
    nats = []
    while (spent := (before + time.monotonic() - started) / budget) < 1 and step < args.max_steps:
        batch = batch_at(stream, step, args.batch, args.length)
        state, loss = trainer.step(state, batch, spent)
        nats.append(float(loss))  # waits for the step
        step += 1
        now = time.monotonic()
        if step % args.log_every == 0:
            rate = len(nats) * args.batch * args.length / (now - logged)
            print(f"step {step:6d}  {spent:6.1%}  loss {np.mean(nats):.4f}  {rate:,.0f} tokens/s", flush=True)
            nats, logged = [], now
        if now - saved > 60 * args.save_minutes:
            yield state
            saved = now
    if step > first:
        yield state


# --- evaluation ---------------------------------------------------------------------------------------------------


def model_bits(model: Decoder, tokenizer: Tokenizer, text: str, *, window: int = 512, stride: int = 256) -> float:
    """Count the bits that the model needs for a text.

    Tokens have at least `window - stride` tokens of context, if they exist.
    """
    tokens = encode(tokenizer, [text])
    starts = np.arange(0, max(len(tokens) - 1 - (window - stride), 1), stride)
    padded = np.pad(tokens, (0, int(starts[-1]) + window + 1 - len(tokens)))
    windows = np.stack([padded[start : start + window + 1] for start in starts])
    index = starts[:, None] + np.arange(1, window + 1)  # index of each target in the text
    new = (index < len(tokens)) & ((np.arange(window) >= window - stride) | (starts[:, None] == 0))
    nats = np.concatenate([_nats(model, cut[None]) for cut in windows])
    return float(np.sum(nats * new)) / np.log(2)


@nnx.jit
def _nats(model: Decoder, tokens: jax.Array) -> jax.Array:
    """Compute nats per token: [B, T + 1] -> [B, T]."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1] - 1), tokens[:, 1:].shape)
    hidden, _ = model(tokens[:, :-1], positions)
    return optax.softmax_cross_entropy_with_integer_labels(model.logits(hidden), tokens[:, 1:])


def xz_bits(data: bytes) -> float:
    """Count the bits of `xz -9` without the few bytes of its container."""
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9}]
    return 8.0 * len(lzma.compress(data, format=lzma.FORMAT_RAW, filters=filters))


def evaluate(model: Decoder, tokenizer: Tokenizer, held_out: dict[str, str]) -> None:
    """Print bits per byte on the held-out modules, of the model and of xz."""
    size = xz = ours = 0.0
    print(f"{'held-out module':24s} {'bytes':>8s} {'xz -9':>7s} {'model':>7s}   bits per byte")
    for name, text in held_out.items():
        data = text.encode()
        mine, theirs = model_bits(model, tokenizer, text), xz_bits(data)
        print(f"{name:24s} {len(data):8d} {theirs / len(data):7.3f} {mine / len(data):7.3f}", flush=True)
        size, xz, ours = size + len(data), xz + theirs, ours + mine
    together = xz_bits("".join(held_out.values()).encode())
    print(f"{'each file by itself':24s} {size:8.0f} {xz / size:7.3f} {ours / size:7.3f}")
    print(f"{'xz on all files as one':24s} {size:8.0f} {together / size:7.3f}")


def as_stored(model: Decoder) -> Decoder:
    """Round the model's weights to their dtypes in the exported checkpoint."""
    (graph, state), (_, stored) = nnx.split(model), split_model(model.cfg, WeightFormat(dtype=np.dtype(STORED)))
    return nnx.merge(graph, jax.tree.map(lambda x, kept: x.astype(kept.dtype).astype(x.dtype), state, stored))


def export(path: Path, model: Decoder, tokenizer: Tokenizer, layout: FileLayout = "orbax") -> None:
    """Write the model directory."""
    save_model(
        path,
        model,
        family="demo",
        dtype=STORED,
        tokenizer={"tokenizer.json": tokenizer.to_str().encode()},
        eos_ids=(end_of_text(tokenizer),),
        layout=layout,
    )


def prepare(args: argparse.Namespace, vocab: int) -> tuple[Corpus, Tokenizer, np.ndarray]:
    """Read the corpus, train the tokenizer or take that of the work directory, and encode what is trained on."""
    corpus = read_corpus(args.library)
    texts = list(corpus.training.values())
    args.work_dir.mkdir(parents=True, exist_ok=True)
    tokenizer_file = args.work_dir / "tokenizer.json"
    if not tokenizer_file.exists():
        train_tokenizer(texts, vocab).save(str(tokenizer_file))
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    stream = encode(tokenizer, texts)
    size = sum(len(text.encode()) for text in texts)
    print(f"Training on {len(texts)} files, {size:,} bytes, {len(stream):,} tokens.", flush=True)
    return corpus, tokenizer, stream


def run(args: argparse.Namespace, cfg: DecoderConfig = CONFIG) -> Decoder:
    """Train the tokenizer and the model, export and evaluate it."""
    corpus, tokenizer, stream = prepare(args, cfg.vocab)
    trainer = Trainer(cfg, args.learning_rate)
    model = as_stored(trainer.model(train(trainer, stream, args).params))
    if args.export:
        export(args.export, model, tokenizer)
    evaluate(model, tokenizer, corpus.held_out)
    return model


def parse(argv: list[str] | None = None, description: str | None = __doc__, **defaults: Any) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work-dir", type=Path, required=True, help="for training states and the tokenizer")
    parser.add_argument("--export", type=Path, help="write the trained model to this model directory")
    parser.add_argument(
        "--library", type=Path, default=Path(sysconfig.get_path("stdlib")), help="Python source to learn"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=90,
        help="minutes of training over all runs; sets the learning rate",
    )
    parser.add_argument("--max-steps", type=int, default=10**9, help="stop earlier; 0 only exports and evaluates")
    parser.add_argument("--batch", type=int, default=16, help="sequences per step")
    parser.add_argument("--length", type=int, default=512, help="tokens per sequence")
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="maximum learning rate")
    parser.add_argument("--save-minutes", type=float, default=5)
    parser.add_argument("--log-every", type=int, default=20, help="steps between log lines")
    parser.set_defaults(**defaults)
    args = parser.parse_args(argv)
    args.work_dir = args.work_dir.absolute()  # Orbax asks for it
    return args


if __name__ == "__main__":
    run(parse())
