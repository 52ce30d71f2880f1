"""Makes the GGUF files of the tests, with the tokens that llama.cpp generates from them and takes texts for.

Runs in the environment of the peers (`make peers`) and needs sentencepiece too, never in the tests:

    .venv-peers/bin/pip install --target /tmp/sentencepiece sentencepiece
    PYTHONPATH=/tmp/sentencepiece .venv-peers/bin/python tests/goldens/make_gguf_goldens.py

Each model is a random one of transformers, whose tensors are written as llama.cpp's converter writes them; llama.cpp
quantises it. In `gguf/models.zip` there is NAME.TYPE.gguf for each, and NAME.vocab.gguf with a tokenizer alone.
`gguf/expected.json` has, by file, `greedy`: the tokens that llama.cpp chooses after `prompt`, and by name `texts`: the
ids of each of TEXTS. They are those of the tokenizer that the file was made from, and llama.cpp's where it normalises
alike; those of SentencePiece, which knows no special tokens in a text, are llama.cpp's.
"""

import ctypes
import io
import json
import pathlib
import sys
import tempfile
import unicodedata
import zipfile

import gguf
import llama_cpp
import numpy as np
import sentencepiece
import tokenizers
import torch
import transformers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers

OUT = pathlib.Path(__file__).parent / "gguf"
NEW_TOKENS, PROMPTS, LEAD = 12, 150, 0.1
TEXTS = (
    *(
        "",
        " ",
        "a",
        "  two  spaces, and three   at the end   ",
        "line\n\n\nline\r\n\t\ttabs\n ",
        "1234567 12,345.6 0x1F",
    ),
    *(
        "don't DON'T we'll I'VE 'tis",
        "naïve café cafe\u0301",
        "日本語 テスト",
        "😀👍🏽 emoji",
        "\u00a0\u2028no\u200bbreak",
    ),
    *("def f(n):\n    return n * (n - 1)", "<|im_start|>user\nhi<|im_end|>", "<start_of_turn>user hi<end_of_turn>\n"),
    *("<s>[INST] hi [/INST]</s> x", "!?...--==>>", "_snake_case CamelCase", "<think>\n\n</think>"),
)
SYMBOLS = ("\n\n", "<think>", "<start_of_turn>", "<end_of_turn>", "<s>", "</s>")
SPECIAL = ("<|end|>", "<|begin|>", "<|im_start|>", "<|im_end|>")
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"

SIZES = {
    "hidden_size": 8,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "head_dim": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}
ROPES = {
    "llama3": {
        **{"rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0},
        **{"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
    },
    "linear": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0},
    "yarn": {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 32},
    "default": {"rope_type": "default", "rope_theta": 10_000.0},
    "quarter": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25},
    "gemma3": {
        "full_attention": {"rope_type": "linear", "rope_theta": 1_000_000.0, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    },
}
FLOATS = ("F32", "F16", "BF16")
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "hidden_size": 32}
EXPERTS |= {"intermediate_size": 32, "head_dim": 16, "tie_word_embeddings": False}
SHARED = EXPERTS | {"shared_expert_intermediate_size": 24}
DELTA = {
    **{"hidden_size": 16, "head_dim": 16, "full_attention_interval": 2, "linear_conv_kernel_dim": 3},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
}
# name -> (architecture, tokenizer.ggml.pre, or SentencePiece's space prefix, rope, further sizes, types)
GOLDENS = {
    "llama": ("llama", "llama-bpe", "llama3", {"attention_bias": True}, FLOATS),
    "llama_spm": ("llama", True, "default", {}, ("BF16",)),
    "qwen2": ("qwen2", "qwen2", "linear", {"head_dim": 4}, FLOATS),
    "qwen3": ("qwen3", "qwen2", "yarn", {"head_dim": 12}, FLOATS),
    "gemma3": (
        *("gemma3", False, "gemma3"),
        {"num_hidden_layers": 7, "intermediate_size": 16, "sliding_window": 4, "query_pre_attn_scalar": 8},
        FLOATS,
    ),
    "gemma": ("gemma", None, "default", {"head_dim": 12}, ("F32",)),
    "ernie4_5": ("ernie4_5", None, "default", {"head_dim": 12}, ("F32",)),
    "exaone4": (
        "exaone4",
        None,
        "default",
        {"head_dim": 4, "sliding_window": None, "layer_types": ["full_attention"] * 2},
        ("F32",),
    ),
    "qwen2moe": ("qwen2moe", None, "default", SHARED, ("F32",)),
    "qwen3moe": ("qwen3moe", None, "default", EXPERTS | {"norm_topk_prob": True}, ("Q4_0",)),
    "qwen3next": ("qwen3next", None, "quarter", SHARED | DELTA, ("F32",)),
    "qwen35": ("qwen35", "qwen35", "quarter", DELTA, ("F32",)),
    "qwen35moe": ("qwen35moe", None, "quarter", SHARED | DELTA, ("F32",)),
    "quantised": (
        *("llama", None, "default"),
        {"hidden_size": 256, "intermediate_size": 32, "head_dim": 32, "num_hidden_layers": 1}
        | {"tie_word_embeddings": False},
        ("Q8_0", "Q4_0"),
    ),
    "smollm": (None, "smollm", None, {}, ()),
    "gpt2": (None, "gpt-2", None, {}, ()),
}


MODEL_TYPES = {"gemma3": "gemma3_text", "qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe", "qwen3next": "qwen3_next"}
MODEL_TYPES |= {"qwen35": "qwen3_5_text", "qwen35moe": "qwen3_5_moe_text"}
WITH_DELTA_RULES = ("qwen3next", "qwen35", "qwen35moe")


def corpus():
    return pathlib.Path(__file__).read_text() * 2


def train_bpe(pre):
    """A byte-level BPE tokenizer that splits as the published models with this `pre` do."""
    tokenizer = tokenizers.Tokenizer(models.BPE(ignore_merges=pre == "llama-bpe"))
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    pieces = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = {
        "llama-bpe": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA3), "isolated"), pieces]),
        "qwen2": pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(LLAMA3.replace("{1,3}", "")), "isolated"), pieces]
        ),
        "qwen35": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(QWEN35), "isolated"), pieces]),
        "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), whole]),
        "gpt-2": whole,
    }[pre]
    if pre.startswith("qwen"):
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([corpus()], trainer)
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in ("<think>", "</think>")])
    return tokenizer


def write_bpe(writer, tokenizer, pre, vocab):
    fields = json.loads(tokenizer.to_str())
    added = {token["id"]: token["special"] for token in fields["added_tokens"]}
    types = gguf.TokenType
    tokens, kinds = [], []
    for id_ in range(vocab):
        token = tokenizer.id_to_token(id_)
        tokens.append(token or f"[PAD{id_}]")
        kind = types.UNUSED if token is None else types.NORMAL
        kinds.append((types.CONTROL if added[id_] else types.USER_DEFINED) if id_ in added else kind)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(merge) for merge in fields["model"]["merges"]])
    writer.add_eos_token_id(tokenizer.token_to_id("<|end|>"))
    writer.add_bos_token_id(tokenizer.token_to_id("<|begin|>"))
    writer.add_chat_template(
        [{"name": "default", "template": TEMPLATE}, {"name": "rag", "template": "{{ documents }}"}]
    )


def train_spm(prefix):
    """A SentencePiece model as Llama 2's (with a space before each text) or Gemma's (without)."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus().splitlines()),
        model_writer=model,
        model_type="bpe",
        vocab_size=420,
        byte_fallback=True,
        add_dummy_prefix=prefix,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        split_digits=True,
        allow_whitespace_only_pieces=True,
        user_defined_symbols=list(SYMBOLS[:2]),
        control_symbols=list(SYMBOLS[2:4]),
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def write_spm(writer, spm, prefix, vocab):
    def kind(id_):
        for name in ("unknown", "control", "unused", "byte"):
            if getattr(spm, f"is_{name}")(id_):
                return gguf.TokenType[name.upper()]
        defined = spm.id_to_piece(id_) in SYMBOLS[:2]
        return gguf.TokenType.USER_DEFINED if defined else gguf.TokenType.NORMAL

    assert vocab == spm.vocab_size()
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([spm.id_to_piece(id_) for id_ in range(vocab)])
    writer.add_token_scores([spm.get_score(id_) for id_ in range(vocab)])
    writer.add_token_types([kind(id_) for id_ in range(vocab)])
    writer.add_bos_token_id(spm.bos_id())
    writer.add_eos_token_id(spm.eos_id())
    writer.add_unk_token_id(spm.unk_id())
    if not prefix:
        writer.add_add_space_prefix(False)
    writer.add_chat_template(TEMPLATE)


def make_model(architecture, fields):
    torch.manual_seed(len(architecture))
    model_type = MODEL_TYPES.get(architecture, architecture)
    ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    config = transformers.CONFIG_MAPPING[model_type](**fields, **ids)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    adds_one = architecture.startswith("gemma") or architecture in WITH_DELTA_RULES  # norms multiply by 1 + weight
    for name, parameter in sorted(model.named_parameters()):
        values = torch.randn(parameter.shape)
        if parameter.ndim >= 2:
            values *= (1.5 if "embed" in name else 3) / parameter.shape[-1] ** 0.5
        elif name.endswith("A_log"):
            values -= 2  # states that remember
        elif name.endswith("bias") or (adds_one and not name.endswith("linear_attn.norm.weight")):
            values *= 0.3
        else:
            values = 1 + 0.3 * values
        parameter.data = values
    model.tie_weights()
    return model


def write_config(writer, architecture, config, vocab):
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    if architecture != "qwen35moe":
        writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_vocab_size(vocab)
    if hasattr(config, "num_experts"):
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if hasattr(config, "shared_expert_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    rope = config.rope_parameters
    if architecture == "gemma3":
        writer.add_sliding_window(config.sliding_window)
        rope = rope["full_attention"]
    else:
        writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1)))
    if architecture in WITH_DELTA_RULES:
        writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
        writer.add_ssm_state_size(config.linear_key_head_dim)
        writer.add_ssm_group_count(config.linear_num_key_heads)
        writer.add_ssm_time_step_rank(config.linear_num_value_heads)
        writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
        writer.add_full_attention_interval(2)
    if architecture.startswith("qwen35"):
        writer.add_rope_dimension_sections([1, 1, 0, 0])
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def write_tensors(writer, architecture, model):
    config = model.config
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        weight = tensor.float().numpy()
        if architecture == "llama" and (".q_proj." in name or ".k_proj." in name):
            heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
            weight = weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            weight = weight + 1
        tensors = of_experts(name, weight)
        if architecture in WITH_DELTA_RULES:
            tensors = [made for part in tensors for made in of_delta_rule(architecture, config, *part)]
        for part, values in tensors:
            writer.add_tensor(names.get_name(part, try_suffixes=(".weight", ".bias")), np.ascontiguousarray(values))
    if architecture in ("llama", "exaone4") and config.rope_parameters["rope_type"] == "llama3":
        scaled, _ = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
        plain = config.rope_parameters["rope_theta"] ** -(torch.arange(0, config.head_dim, 2) / config.head_dim)
        writer.add_tensor("rope_freqs.weight", (plain / scaled).numpy())


def of_delta_rule(architecture, config, name, weight):
    """A tensor of a model with delta rules as the converter writes it: Qwen3.5's value heads go through key heads."""
    keys, group = config.linear_num_key_heads, config.linear_num_value_heads // config.linear_num_key_heads
    channels = 2 * keys * config.linear_key_head_dim

    def in_turn(values):
        if architecture == "qwen3next":
            return values
        return values.reshape(keys, group, -1, *values.shape[1:]).swapaxes(0, 1).reshape(values.shape)

    if name.endswith("in_proj_qkvz.weight"):
        sizes = (config.linear_key_head_dim,) * 2 + (group * config.linear_value_head_dim,) * 2
        heads = np.split(weight.reshape(keys, -1, weight.shape[-1]), np.cumsum(sizes)[:-1], axis=1)
        q, k, v, z = (part.reshape(-1, weight.shape[-1]) for part in heads)
        return [(name.replace("qkvz", "qkv"), np.concatenate((q, k, v))), (name.replace("qkvz", "z"), z)]
    if name.endswith("norm.weight") and "linear_attn" not in name:
        weight = weight + 1
    elif name.endswith("A_log"):
        weight = in_turn(-np.exp(weight))
    elif name.endswith("dt_bias"):
        name, weight = name.replace("dt_bias", "dt_proj.bias"), in_turn(weight)
    elif name.endswith(("conv1d.weight", "in_proj_qkv.weight")):
        weight = np.concatenate((weight[:channels], in_turn(weight[channels:]))).squeeze()
    elif name.endswith(("in_proj_z.weight", "in_proj_a.weight", "in_proj_b.weight")):
        weight = in_turn(weight)
    elif name.endswith("linear_attn.out_proj.weight"):
        weight = in_turn(weight.T).T
    return [(name, weight)]


def of_experts(name, weight):
    """A tensor as the converter takes it: the gates and ups of all experts apart."""
    if name.endswith("experts.gate_up_proj"):
        gate, up = np.split(weight, 2, axis=1)
        module = name.removesuffix("gate_up_proj")
        return [(f"{module}gate_proj.weight", gate), (f"{module}up_proj.weight", up)]
    return [(f"{name}.weight" if name.endswith("experts.down_proj") else name, weight)]


def finish(writer):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def quantise(source, target, type_):
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, "LLAMA_FTYPE_ALL_F32" if type_ == "F32" else f"LLAMA_FTYPE_MOSTLY_{type_}")
    params.nthread = 1
    if type_ == "Q8_0":  # with blocks of 256 where the rows are long enough
        params.token_embedding_type, params.output_tensor_type = llama_cpp.GGML_TYPE_Q4_K, llama_cpp.GGML_TYPE_Q6_K
    if code := llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(params)):
        raise RuntimeError(f"llama.cpp could not quantise {target}: {code}")


class LlamaCpp:
    """llama.cpp on a file, with everything that can be in float32."""

    def __init__(self, file, vocab_only=False):
        options = llama_cpp.llama_model_default_params()
        options.vocab_only, options.use_extra_bufts = vocab_only, False
        self.model = llama_cpp.llama_model_load_from_file(str(file).encode(), options)
        self.vocab = llama_cpp.llama_model_get_vocab(self.model)

    def tokenize(self, text):
        """The ids of a text, in which special tokens may be, with what is put around it."""
        encoded, room = text.encode(), 1000
        ids = (llama_cpp.llama_token * room)()
        count = llama_cpp.llama_tokenize(self.vocab, encoded, len(encoded), ids, room, True, True)
        return ids[:count]

    def logits(self, ids):
        """The logits after each of the tokens."""
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = 128
        params.n_threads = params.n_threads_batch = 1
        params.type_k = params.type_v = llama_cpp.GGML_TYPE_F32
        params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        context = llama_cpp.llama_init_from_model(self.model, params)
        batch = llama_cpp.llama_batch_init(128, 0, 1)
        batch.n_tokens = len(ids)
        for i, id_ in enumerate(ids):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = id_, i, 1, True
            batch.seq_id[i][0] = 0
        assert llama_cpp.llama_decode(context, batch) == 0
        size = llama_cpp.llama_vocab_n_tokens(self.vocab)
        rows = [
            np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, i), (size,)).copy() for i in range(len(ids))
        ]
        llama_cpp.llama_batch_free(batch)
        llama_cpp.llama_free(context)
        return np.stack(rows)

    def greedy(self, prompt):
        """The most likely tokens one after the other, and the smallest lead that one had."""
        ids, lead = list(prompt), np.inf
        for _ in range(NEW_TOKENS):
            last = self.logits(ids)[-1]
            second, first = np.sort(last)[-2:]
            lead = min(lead, float(first - second))
            ids.append(int(last.argmax()))
        return ids[len(prompt) :], lead


def ids_of_texts(name, kind, bpe, spm, theirs):
    """The ids of TEXTS, after checking that llama.cpp has the same."""
    rows = [theirs.tokenize(text) for text in TEXTS]
    for i, text in enumerate(TEXTS):
        if bpe:
            ours = [bpe.token_to_id("<|begin|>")] * (kind == "llama-bpe") + bpe.encode(text).ids
            same = not kind.startswith("qwen") or text == unicodedata.normalize("NFC", text)
        else:
            ours, same = [spm.bos_id(), *spm.encode(text)] if text else rows[i], not any(s in text for s in SYMBOLS)
        if same and rows[i] != ours:
            raise RuntimeError(f"{name}: {text!r} is {ours}, but llama.cpp has {rows[i]}")
        if bpe:
            rows[i] = ours
    return dict(zip(TEXTS, rows, strict=True))


def make(name, out, expected):
    architecture, kind, rope, sizes, types = GOLDENS[name]
    bpe = train_bpe(kind) if isinstance(kind, str) else None
    spm = train_spm(kind) if isinstance(kind, bool) else None
    vocab = 32 if kind is None else bpe.get_vocab_size() + 2 if bpe else spm.vocab_size()
    with tempfile.TemporaryDirectory() as folder:
        file = out / f"{name}.vocab.gguf" if architecture is None else pathlib.Path(folder, "made.gguf")
        writer = gguf.GGUFWriter(file, architecture or "llama")
        if bpe:
            write_bpe(writer, bpe, kind, vocab)
        elif spm:
            write_spm(writer, spm, kind, vocab)
        else:
            writer.add_tokenizer_model("no_vocab")
        if architecture is None:
            writer.add_vocab_size(vocab)
            finish(writer)
        else:
            fields = SIZES | sizes | {"vocab_size": vocab, "rope_parameters": ROPES[rope]}
            model = make_model(architecture, fields)
            write_config(writer, architecture, model.config, vocab)
            write_tensors(writer, architecture, model)
            finish(writer)
            made(name, model, file, out, types, expected)
    if kind is not None:
        theirs = LlamaCpp(out / f"{name}.{types[0] if types else 'vocab'}.gguf", vocab_only=True)
        expected[name] = {"texts": ids_of_texts(name, kind, bpe, spm, theirs)}


def made(name, model, file, out, types, expected):
    """Quantise a model, and have llama.cpp generate with it, after checking its logits against transformers'.

    Of some prompts that one is kept after which most different tokens come, each clearly the most likely one.
    """
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, model.config.vocab_size, (PROMPTS, 6)).tolist()
    with torch.no_grad():
        reference = model(torch.tensor(prompts[:1])).logits[0].numpy()
    difference = np.abs(LlamaCpp(file).logits(prompts[0]) - reference).max()
    print(f"{name}: logits up to {np.abs(reference).max():.1f}, {difference:.1e} from transformers'")
    outputs = {}
    for type_ in types:
        target = out / f"{name}.{type_}.gguf"
        quantise(file, target, type_)
        theirs = LlamaCpp(target)
        outputs[target] = [theirs.greedy(prompt) for prompt in prompts]

    def merits(i):
        lead = min(rows[i][1] for rows in outputs.values())
        return lead > LEAD, min(len(set(rows[i][0])) for rows in outputs.values()), lead

    best = max(range(PROMPTS), key=merits)
    for target, rows in outputs.items():
        tokens, lead = rows[best]
        print(f"{target.name}: {target.stat().st_size / 1e3:.0f} kB, {tokens}, by {lead:.2f} at least")
        expected[target.name] = {"prompt": prompts[best], "greedy": tokens}


def main():
    """Make all, or those that the command line names, beside those that there are."""
    names = sys.argv[1:] or GOLDENS
    expected = json.loads((OUT / "expected.json").read_text()) if sys.argv[1:] else {}
    with tempfile.TemporaryDirectory() as folder:
        if sys.argv[1:]:
            zipfile.ZipFile(OUT / "models.zip").extractall(folder)
        for name in names:
            make(name, pathlib.Path(folder), expected)
        OUT.mkdir(exist_ok=True)
        with zipfile.ZipFile(OUT / "models.zip", "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
            for file in sorted(pathlib.Path(folder).iterdir()):
                archive.writestr(zipfile.ZipInfo(file.name), file.read_bytes(), zipfile.ZIP_DEFLATED)
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(expected[name])}" for name in sorted(expected))
    (OUT / "expected.json").write_text(f"{{\n{lines}\n}}\n")


@llama_cpp.llama_log_callback
def log_errors(level, text, _):
    if level == 4:
        sys.stderr.write(text.decode())


if __name__ == "__main__":
    llama_cpp.llama_log_set(log_errors, None)
    llama_cpp.llama_backend_init()
    main()
