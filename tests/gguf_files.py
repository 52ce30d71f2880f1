"""GGUF files for tests: the goldens, and others made of them."""

import pathlib
import zipfile

import gguf

GOLDENS = pathlib.Path(__file__).parent / "goldens" / "gguf"


def extract(name: str, folder: pathlib.Path) -> pathlib.Path:
    """Extract one of the goldens into a folder."""
    with zipfile.ZipFile(GOLDENS / "models.zip") as archive:
        return pathlib.Path(archive.extract(name, folder))


def rewrite(
    out: pathlib.Path, file: pathlib.Path, tensors: dict | None = None, *, per_part: int = 0, **changes
) -> pathlib.Path:
    """A copy of a file with other metadata and tensors by name; None: left out. Keys have __ for a dot.

    per_part: how many tensors a part has; 0: it is not split.
    """
    reader = gguf.GGUFReader(file)
    changes = {key.replace("__", "."): value for key, value in changes.items()}
    fields = {key: field for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    architecture = changes.pop("general.architecture", fields["general.architecture"].contents())
    writer = gguf.GGUFWriter(out, architecture, split_max_tensors=per_part)
    for key, field in fields.items():
        if key != "general.architecture" and key not in changes:
            writer.add_key_value(key, field.contents(), field.types[0], field.types[-1])
    for key, value in changes.items():
        if value is not None:
            writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    data = {tensor.name: tensor.data for tensor in reader.tensors} | (tensors or {})
    types = {tensor.name: tensor.tensor_type for tensor in reader.tensors}
    for tensor, values in data.items():
        if values is not None:
            writer.add_tensor(tensor, values, raw_dtype=None if tensor in (tensors or {}) else types[tensor])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def split(out: pathlib.Path, file: pathlib.Path, *, tensors: int) -> list[pathlib.Path]:
    """Split a file into parts of so many tensors, named after `out`."""
    rewrite(out, file, per_part=tensors)
    return sorted(out.parent.glob(f"{out.stem}-*.gguf"))
