"""Make a model of `make_model.py` one that servers can be asked for by text: `make_served_model.py FOLDER`.

FOLDER/hf gets a tokenizer in which every token is one character, so that texts of n characters have n tokens in each
server; FOLDER/served.gguf has the weights of FOLDER/f32.gguf, and the same tokens.
"""
# Runs in the peers' environment, whose packages ours lacks.
# pyright: reportMissingImports=false

import pathlib
import sys

import gguf
import tokenizers
import transformers

SPECIAL = ("<unk>", "<s>", "</s>")


def characters(vocab):
    """The tokens: Chinese characters, then Korean syllables, of which there are 32,164."""
    points = [*range(0x4E00, 0xA000), *range(0xAC00, 0xD7A4)]
    return [*SPECIAL, *map(chr, points[: vocab - len(SPECIAL)])]


def write_tokenizer(folder, tokens):
    """Write the tokenizer of Hugging Face's formats: a BPE without merges splits texts into characters."""
    vocab = {token: index for index, token in enumerate(tokens)}
    words = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [], unk_token=SPECIAL[0]))
    words.decoder = tokenizers.decoders.Fuse()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token=SPECIAL[0], bos_token=SPECIAL[1], eos_token=SPECIAL[2]
    ).save_pretrained(folder)


def write_gguf(source, file, tokens):
    """Copy a GGUF file, with the tokens in place of no vocabulary."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(file, gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH.LLAMA])
    skipped = ("GGUF.", "general.architecture", "tokenizer.")
    for field in reader.fields.values():
        if not field.name.startswith(skipped):
            writer.add_key_value(field.name, field.contents(), field.types[0])
    types = gguf.TokenType
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_token_types([types.UNKNOWN, types.CONTROL, types.CONTROL] + [types.NORMAL] * (len(tokens) - 3))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_add_space_prefix(False)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main(folder):
    vocab = transformers.AutoConfig.from_pretrained(folder / "hf").vocab_size
    write_tokenizer(folder / "served-hf", characters(vocab))
    for file in ("config.json", "generation_config.json", "model.safetensors"):
        (folder / "served-hf" / file).symlink_to(f"../hf/{file}")
    write_gguf(folder / "f32.gguf", folder / "served.gguf", characters(vocab))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]).resolve())
