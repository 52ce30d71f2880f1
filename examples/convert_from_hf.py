"""Convert a Hugging Face checkpoint to a model directory, verify it, and print its contents.

    python examples/convert_from_hf.py HF_DIR OUT_DIR [--quantize int8]

HF_DIR has config.json and safetensors files, like a download from the hub. `jaxinfer convert` does the same with a
progress bar.
"""

import argparse
from pathlib import Path

from jaxinfer.checkpoints import read_manifest, verify_files
from jaxinfer.models.files.conversion import convert
from jaxinfer.models.files.verification import compare_tensors


def main() -> None:
    parser = argparse.ArgumentParser(description="Convert a Hugging Face checkpoint.")
    parser.add_argument("hf_dir", type=Path)
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--quantize", choices=("int8",))
    arguments = parser.parse_args()

    description = convert(arguments.hf_dir, arguments.out_dir, dtype=arguments.dtype, quantize=arguments.quantize)
    verify_files(arguments.out_dir)
    manifest = read_manifest(arguments.out_dir)
    report = compare_tensors(arguments.out_dir, arguments.hf_dir)
    print(f"{arguments.out_dir}: {description.family}, {len(manifest.leaves)} leaves, {manifest.bytes:,} bytes")
    print(f"largest difference from the original: {report.max_abs_diff:.3g}")


if __name__ == "__main__":
    main()
