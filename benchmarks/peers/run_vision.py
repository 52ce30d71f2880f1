"""PyTorch and ONNX Runtime on image models: `run_vision.py ENGINE MODEL STATE_DICT THREADS` or `make MODEL STATE_DICT`.

ENGINE is torch or onnxruntime, MODEL resnet101, yolov5m or vit_b. The first form answers, one JSON object per line:

  {"do": "run", "images": FILE}                    -> {"seconds": s}: of one batch, uint8 [B, H, W, 3] in a .npy file
  {"do": "outputs", "images": FILE, "to": FILE}    -> {}: writes logits or predictions as .npy

Before the first request it writes {"version": "...", "ways": []}. The second form writes random weights.

The models are written here from their published architectures, with the names of their usual state dicts, so that
neither torchvision, timm nor Ultralytics' code is needed. Batch normalisation is folded before anything is timed.
"""
# Runs in the peers' environment, whose packages ours lacks.
# pyright: reportMissingImports=false

import json
import os
import sys
import tempfile
import time

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

CLASSES = {"resnet101": 1000, "yolov5m": 80, "vit_b": 1000}


class Bottleneck(nn.Module):
    """1x1, 3x3 with the stride, 1x1; the input is added, projected where its shape changes."""

    def __init__(self, inputs: int, inner: int, stride: int):
        super().__init__()
        outputs = 4 * inner
        self.conv1, self.bn1 = nn.Conv2d(inputs, inner, 1, bias=False), nn.BatchNorm2d(inner)
        self.conv2, self.bn2 = nn.Conv2d(inner, inner, 3, stride, 1, bias=False), nn.BatchNorm2d(inner)
        self.conv3, self.bn3 = nn.Conv2d(inner, outputs, 1, bias=False), nn.BatchNorm2d(outputs)
        self.downsample = None
        if inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x):
        y = torch.relu(self.bn1(self.conv1(x)))
        y = torch.relu(self.bn2(self.conv2(y)))
        return torch.relu(self.bn3(self.conv3(y)) + (x if self.downsample is None else self.downsample(x)))


class ResNet101(nn.Module):
    """uint8 [B, H, W, 3] -> logits [B, classes]."""

    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64)
        inputs = 64
        for i, depth in enumerate((3, 4, 23, 3)):
            blocks, inner = [], 64 * 2**i
            for block in range(depth):
                blocks.append(Bottleneck(inputs, inner, 2 if i and not block else 1))
                inputs = 4 * inner
            setattr(self, f"layer{i + 1}", nn.Sequential(*blocks))
        self.fc = nn.Linear(inputs, CLASSES["resnet101"])
        self.register_buffer("mean", torch.tensor([0.485, 0.456, 0.406]), persistent=False)
        self.register_buffer("deviation", torch.tensor([0.229, 0.224, 0.225]), persistent=False)

    def forward(self, images):
        x = ((images.float() / 255 - self.mean) / self.deviation).permute(0, 3, 1, 2)
        x = nn.functional.max_pool2d(torch.relu(self.bn1(self.conv1(x))), 3, 2, 1)
        for i in range(4):
            x = getattr(self, f"layer{i + 1}")(x)
        return self.fc(x.mean((2, 3)))


class Conv(nn.Module):
    """A convolution, batch normalisation and SiLU."""

    def __init__(self, inputs: int, outputs: int, size: int = 1, stride: int = 1, padding: int | None = None):
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, size, stride, size // 2 if padding is None else padding, bias=False)
        self.bn = nn.BatchNorm2d(outputs, eps=1e-3)

    def forward(self, x):
        return nn.functional.silu(self.bn(self.conv(x)), inplace=True)


class Pair(nn.Module):
    """1x1 and 3x3, added to the input if `residual`."""

    def __init__(self, width: int, residual: bool):
        super().__init__()
        self.residual, self.cv1, self.cv2 = residual, Conv(width, width), Conv(width, width, 3)

    def forward(self, x):
        y = self.cv2(self.cv1(x))
        return x + y if self.residual else y


class CSP(nn.Module):
    """Half of the width through pairs, half past them."""

    def __init__(self, inputs: int, outputs: int, depth: int, residual: bool = False):
        super().__init__()
        half = outputs // 2
        self.cv1, self.cv2, self.cv3 = Conv(inputs, half), Conv(inputs, half), Conv(outputs, outputs)
        self.m = nn.Sequential(*(Pair(half, residual) for _ in range(depth)))

    def forward(self, x):
        return self.cv3(torch.cat((self.m(self.cv1(x)), self.cv2(x)), 1))


class PyramidPooling(nn.Module):
    """The features and three maxima of growing windows."""

    def __init__(self, width: int):
        super().__init__()
        self.cv1, self.cv2 = Conv(width, width // 2), Conv(2 * width, width)

    def forward(self, x):
        pooled = [self.cv1(x)]
        for _ in range(3):
            pooled.append(nn.functional.max_pool2d(pooled[-1], 5, 1, 2))
        return self.cv2(torch.cat(pooled, 1))


class Detect(nn.Module):
    """Three grids of features to candidates, [B, cells * anchors, 5 + classes]."""

    STRIDES = (8, 16, 32)
    ANCHORS = (
        ((10, 13), (16, 30), (33, 23)),
        ((30, 61), (62, 45), (59, 119)),
        ((116, 90), (156, 198), (373, 326)),
    )

    def __init__(self, widths: tuple[int, ...]):
        super().__init__()
        self.m = nn.ModuleList(nn.Conv2d(width, 3 * (5 + CLASSES["yolov5m"]), 1) for width in widths)

    def forward(self, levels):
        candidates = []
        for conv, x, stride, anchors in zip(self.m, levels, self.STRIDES, self.ANCHORS, strict=True):
            batch, _, height, width = x.shape
            s = conv(x).permute(0, 2, 3, 1).reshape(batch, height, width, 3, -1).sigmoid()
            y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
            cells = torch.stack((x, y), -1)[:, :, None].float()
            centres, sizes = (2 * s[..., :2] - 0.5 + cells) * stride, (2 * s[..., 2:4]) ** 2 * torch.tensor(anchors)
            candidates.append(torch.cat((centres, sizes, s[..., 4:]), -1).reshape(batch, -1, s.shape[-1]))
        return torch.cat(candidates, 1)


class YoloV5m(nn.Module):
    """uint8 [B, H, W, 3] -> predictions [B, candidates, 5 + classes]."""

    def __init__(self):
        super().__init__()
        layers: dict[int, nn.Module] = {
            **{0: Conv(3, 48, 6, 2, 2), 1: Conv(48, 96, 3, 2), 2: CSP(96, 96, 2, True), 3: Conv(96, 192, 3, 2)},
            **{4: CSP(192, 192, 4, True), 5: Conv(192, 384, 3, 2), 6: CSP(384, 384, 6, True)},
            **{7: Conv(384, 768, 3, 2), 8: CSP(768, 768, 2, True), 9: PyramidPooling(768), 10: Conv(768, 384)},
            **{13: CSP(768, 384, 2), 14: Conv(384, 192), 17: CSP(384, 192, 2), 18: Conv(192, 192, 3, 2)},
            **{20: CSP(384, 384, 2), 21: Conv(384, 384, 3, 2), 23: CSP(768, 768, 2), 24: Detect((192, 384, 768))},
        }
        self.model = nn.ModuleDict({str(number): layer for number, layer in layers.items()})

    def forward(self, images):
        m, x, kept = self.model, images.permute(0, 3, 1, 2).float() / 255, {}
        for number in range(11):
            x = kept[number] = m[str(number)](x)
        x = m["13"](torch.cat((nn.functional.interpolate(x, scale_factor=2.0), kept[6]), 1))
        x = lateral = m["14"](x)
        small = m["17"](torch.cat((nn.functional.interpolate(x, scale_factor=2.0), kept[4]), 1))
        middle = m["20"](torch.cat((m["18"](small), lateral), 1))
        large = m["23"](torch.cat((m["21"](middle), kept[10]), 1))
        return m["24"]((small, middle, large))


class Attention(nn.Module):
    """Every token attends to all, [B, N, D] -> [B, N, D]."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads, self.qkv, self.proj = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        batch, tokens, width = x.shape
        q, k, v = self.qkv(x).reshape(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.proj(mixed.transpose(1, 2).reshape(batch, tokens, width))


class Mlp(nn.Module):
    """Two linears with an exact GELU between them."""

    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x):
        return self.fc2(nn.functional.gelu(self.fc1(x)))


class Layer(nn.Module):
    """Attention and MLP, each of the normalised tokens and added to them."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(width, eps=1e-6), Attention(width, heads)
        self.norm2, self.mlp = nn.LayerNorm(width, eps=1e-6), Mlp(width, 4 * width)

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViTB(nn.Module):
    """ViT-B/16 (arXiv:2010.11929): uint8 [B, 224, 224, 3] -> logits [B, classes]."""

    def __init__(self, width: int = 768, side: int = 16):
        super().__init__()
        self.cls_token = nn.Parameter(0.02 * torch.randn(1, 1, width))
        self.pos_embed = nn.Parameter(0.02 * torch.randn(1, 1 + (224 // side) ** 2, width))
        self.patch_embed = nn.ModuleDict({"proj": nn.Conv2d(3, width, side, side)})
        self.blocks = nn.Sequential(*(Layer(width, 12) for _ in range(12)))
        self.norm, self.head = nn.LayerNorm(width, eps=1e-6), nn.Linear(width, CLASSES["vit_b"])

    def forward(self, images):
        pixels = images.float().permute(0, 3, 1, 2) / 127.5 - 1  # minus a mean of 0.5, divided by a deviation of 0.5
        patches = self.patch_embed["proj"](pixels).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls_token.expand(len(images), -1, -1), patches), 1) + self.pos_embed
        return self.head(self.norm(self.blocks(x))[:, 0])


MODELS = {"resnet101": ResNet101, "yolov5m": YoloV5m, "vit_b": ViTB}


def make(name: str, file: str) -> None:
    """Write random weights that keep the size of activations."""
    torch.manual_seed(0)
    model = MODELS[name]()
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.normal_(module.weight, std=module.weight[0].numel() ** -0.5)
    save_file(model.state_dict(), file)


def fold(module: nn.Module) -> None:
    """Fold batch normalisation into the convolution before it, everywhere."""
    children = dict(module.named_children())
    pairs = {"conv": "bn", "0": "1"} | {f"conv{i}": f"bn{i}" for i in range(1, 4)}
    for conv, norm in pairs.items():
        if isinstance(children.get(norm), nn.BatchNorm2d):
            setattr(module, conv, fuse_conv_bn_eval(children[conv], children[norm]))
            setattr(module, norm, nn.Identity())
    for child in module.children():
        fold(child)


class Torch:
    """Eager PyTorch, images with channels last."""

    version = torch.__version__

    def __init__(self, model: nn.Module, threads: int):
        torch.set_num_threads(threads)
        self.model = model.to(memory_format=torch.channels_last)

    def __call__(self, images: np.ndarray) -> np.ndarray:
        with torch.inference_mode():
            return self.model(torch.from_numpy(images)).numpy()


class OnnxRuntime:
    """ONNX Runtime on the CPU, the model exported by torch for each shape of images."""

    def __init__(self, model: nn.Module, threads: int):
        import onnxruntime

        self.version, self.runtime = onnxruntime.__version__, onnxruntime
        self.model, self.threads, self.sessions = model, threads, {}

    def __call__(self, images: np.ndarray) -> np.ndarray:
        if images.shape not in self.sessions:
            self.sessions[images.shape] = self._session(images)
        return self.sessions[images.shape].run(None, {"images": images})[0]

    def _session(self, images: np.ndarray):
        options = self.runtime.SessionOptions()
        options.intra_op_num_threads = self.threads
        with tempfile.TemporaryDirectory() as folder, torch.no_grad():
            file = os.path.join(folder, "model.onnx")
            torch.onnx.export(self.model, (torch.from_numpy(images),), file, input_names=["images"], dynamo=True)
            return self.runtime.InferenceSession(file, options, providers=["CPUExecutionProvider"])


def main() -> None:
    if sys.argv[1] == "make":
        return make(*sys.argv[2:])
    engine, name, file, threads = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries' prints must not end up in the protocol

    def answer(**fields) -> None:
        answers.write(json.dumps(fields) + "\n")
        answers.flush()

    model = MODELS[name]()
    model.load_state_dict(load_file(file))
    fold(model.eval())
    run = {"torch": Torch, "onnxruntime": OnnxRuntime}[engine](model, int(threads))
    answer(version=run.version, ways=[])
    for line in sys.stdin:
        request = json.loads(line)
        images = np.load(request["images"])
        start = time.perf_counter()
        outputs = run(images)
        seconds = time.perf_counter() - start
        if request["do"] == "run":
            answer(seconds=seconds)
        else:
            np.save(request["to"], outputs)
            answer()


if __name__ == "__main__":
    main()
