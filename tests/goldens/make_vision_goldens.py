"""Makes the goldens of image models: tiny random ones, and what torchvision, `transformers`, timm or `yolov5` computes.

Runs in environments of its own, never in the tests: one for ResNet and ViT, and one for `yolov5` (AGPL; nothing of it
is copied), which needs an old huggingface-hub.

    python3.11 -m venv /tmp/resnet
    /tmp/resnet/bin/pip install torch==2.13.0 torchvision==0.28.0 transformers==5.23.0 timm==1.0.31 safetensors
    /tmp/resnet/bin/python tests/goldens/make_vision_goldens.py resnet
    /tmp/resnet/bin/python tests/goldens/make_vision_goldens.py vit
    /tmp/resnet/bin/python tests/goldens/make_vision_goldens.py relatives
    /tmp/resnet/bin/python tests/goldens/make_vision_goldens.py pixels
    python3.11 -m venv /tmp/yolov5
    /tmp/yolov5/bin/pip install torch==2.13.0 torchvision==0.28.0 yolov5==7.0.14 safetensors 'setuptools<81'
    /tmp/yolov5/bin/python tests/goldens/make_vision_goldens.py yolov5

Each golden is a directory in vision/ with the checkpoint (`model.safetensors`; from `transformers`, and once from timm,
beside `config.json`). In the `expected.safetensors` of all of them it has `images`, uint8 [B, H, W, 3], and `logits`
[B, classes], `features` [B, D] or `predictions` [B, candidates, 5 + classes] in float32, of images that are not
resized.

`image_processors.json` has the files of image processors, by name, and `image_processors` in `expected.safetensors` the
pixels that each makes of `photo.png`, uint8 [H, W, 3], before they are normalised.
"""

import json
import pathlib
import shutil
import sys

import numpy as np
import torch
from expected import write_expected
from safetensors.torch import save_file

HERE = pathlib.Path(__file__).parent / "vision"
SIZE = 64
MEAN, DEVIATION = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])

# name -> block, planes of each layer, blocks of each layer, classes
TORCHVISION = {
    "torchvision_basic": ("BasicBlock", (8, 8, 16, 16), (1, 2, 1, 1), 3),
    "torchvision_bottleneck": ("Bottleneck", (4, 4, 8, 8), (2, 1, 2, 1), 5),
}
# name -> fields of its config
TRANSFORMERS = {
    "resnet_basic": {
        "layer_type": "basic",
        "embedding_size": 8,
        "hidden_sizes": [8, 16, 24],
        "depths": [1, 2, 1],
        "id2label": {0: "cat", 1: "dog", 2: "fish"},
    },
    "resnet_bottleneck": {
        "embedding_size": 8,
        "hidden_sizes": [16, 32],
        "depths": [2, 1],
        "num_labels": 4,
    },
    "resnet_stride_in_first_conv": {
        "embedding_size": 8,
        "hidden_sizes": [8, 16],
        "depths": [1, 2],
        "downsample_in_bottleneck": True,
        "downsample_in_first_stage": True,
        "num_labels": 3,
    },
    "resnet_stride_in_first_stage": {
        "layer_type": "basic",
        "embedding_size": 8,
        "hidden_sizes": [8, 12],
        "depths": [2, 1],
        "downsample_in_first_stage": True,
        "num_labels": 2,
    },
}
# name -> fields of its config, mean and deviation of pixels
VITS = {
    "vit_odd": (
        {
            "hidden_size": 24,
            "num_hidden_layers": 3,
            "num_attention_heads": 3,
            "intermediate_size": 40,
            "patch_size": 16,
            "id2label": {0: "cat", 1: "dog", 2: "fish", 3: "hen", 4: "owl"},
        },
        ([0.25, 0.5, 0.625], [0.375, 0.25, 0.5]),
    ),
    "vit_unbiased": (
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 48,
            "patch_size": 16,
            "qkv_bias": False,
            "hidden_act": "gelu_pytorch_tanh",
            "layer_norm_eps": 1e-6,
            "num_labels": 3,
        },
        None,
    ),
}
NARROW = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3}
# name -> class, fields of its config; and of its image processor, if it has one
RELATIVES = {
    "deit_teacher": (
        "DeiTForImageClassificationWithTeacher",
        {**NARROW, "intermediate_size": 40, "image_size": 64, "id2label": {0: "cat", 1: "dog", 2: "fish"}},
        {
            "size": {"height": 72, "width": 72},
            "crop_size": {"height": 64, "width": 64},
            "image_mean": [0.25, 0.5, 0.75],
        },
    ),
    "deit_class": (
        "DeiTForImageClassification",
        {
            **NARROW,
            "intermediate_size": 36,
            "image_size": 64,
            "patch_size": 32,
            "qkv_bias": False,
            "hidden_act": "gelu_pytorch_tanh",
            "layer_norm_eps": 1e-5,
            "num_labels": 4,
        },
        None,
    ),
    "dinov2_backbone": (  # positions of 7 x 7 patches, interpolated to 4 x 4; 8 pixels beyond the last patch
        "Dinov2Model",
        {**NARROW, "mlp_ratio": 2, "image_size": 98, "patch_size": 14},
        {"size": {"shortest_edge": 72}, "crop_size": {"height": 64, "width": 64}, "image_std": [0.5, 0.25, 0.125]},
    ),
    "dinov2_gated": (
        "Dinov2ForImageClassification",
        {
            **NARROW,
            "mlp_ratio": 3,
            "image_size": 64,
            "patch_size": 16,
            "qkv_bias": False,
            "use_swiglu_ffn": True,
            "num_labels": 5,
        },
        None,
    ),
    "dinov2_registers": (  # 6 x 6 patches, interpolated to 4 x 4 with antialiasing
        "Dinov2WithRegistersForImageClassification",
        {**NARROW, "mlp_ratio": 2, "image_size": 96, "patch_size": 16, "num_register_tokens": 3, "num_labels": 2},
        {"size": {"shortest_edge": 64}, "crop_size": {"height": 64, "width": 64}},
    ),
    "dinov2_registers_backbone": (  # 3 x 3 patches, interpolated to 4 x 4
        "Dinov2WithRegistersModel",
        {**NARROW, "mlp_ratio": 2, "image_size": 48, "use_swiglu_ffn": True, "hidden_act": "relu"},
        {"size": {"shortest_edge": 64}, "crop_size": {"height": 64, "width": 64}},
    ),
    "siglip_vision": (  # 8 pixels beyond the last patch
        "SiglipVisionModel",
        {**NARROW, "intermediate_size": 40, "image_size": 64, "patch_size": 14},
        {"size": {"height": 64, "width": 64}},
    ),
    "siglip_vision_mean": (
        "SiglipVisionModel",
        {**NARROW, "intermediate_size": 20, "image_size": 64, "num_attention_heads": 4, "vision_use_head": False},
        None,
    ),
    "siglip_classifier": (
        "SiglipForImageClassification",
        {
            "vision_config": {**NARROW, "intermediate_size": 40, "image_size": 64, "hidden_act": "gelu"},
            "text_config": {**NARROW, "intermediate_size": 8, "vocab_size": 16, "max_position_embeddings": 4},
            "num_labels": 3,
        },
        None,
    ),
    "siglip_both": (
        "SiglipModel",
        {
            "vision_config": {**NARROW, "intermediate_size": 36, "image_size": 64, "num_attention_heads": 2},
            "text_config": {**NARROW, "intermediate_size": 8, "vocab_size": 16, "max_position_embeddings": 4},
        },
        None,
    ),
}
PROCESSORS = {"DeiT": "DeiT", "Dinov2": "Bit", "Siglip": "Siglip"}  # by the beginning of a model's class
STATISTICS = {"DeiT": (MEAN, DEVIATION), "Dinov2": (MEAN, DEVIATION)}  # of models without an image processor
# name -> class and fields of an image processor
PIXELS = {
    "vit": ("ViT", {"size": {"height": 64, "width": 64}}),
    "vit_lanczos": ("ViT", {"size": {"height": 100, "width": 100}, "resample": 1, "rescale_factor": 1 / 127.5}),
    "deit": ("DeiT", {"size": {"height": 72, "width": 72}, "crop_size": {"height": 64, "width": 64}}),
    "bit": ("Bit", {"size": {"shortest_edge": 71}, "crop_size": {"height": 64, "width": 64}}),
    "convnext": ("ConvNext", {"size": {"shortest_edge": 48}, "image_mean": [0.1, 0.2, 0.3]}),
    "siglip": ("Siglip", {"size": {"height": 30, "width": 30}, "image_std": [0.1, 0.2, 0.3]}),
}
# name -> arguments; mean and deviation of pixels, of one that has a config.json
TIMM = {
    "timm_vit_token": (
        {"patch_size": 8, "embed_dim": 64, "depth": 1, "num_classes": 5, "mlp_ratio": 0.75, "qkv_bias": False},
        None,
    ),
    "timm_vit_average": (
        {
            "patch_size": 8,
            "embed_dim": 64,
            "depth": 2,
            "num_heads": 4,
            "num_classes": 7,
            "mlp_ratio": 1.5,
            "global_pool": "avg",
        },
        ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
    ),
}
# name -> depth multiple, width multiple, classes, a factor of the anchors, dtype
YOLOV5 = {
    "yolov5_thin": (0.33, 0.03, 2, 1.0, torch.float32),
    "yolov5_deep": (0.67, 0.03, 3, 0.8125, torch.float16),
}


def randomise(model: torch.nn.Module) -> None:
    """Weights that keep the size of activations, and statistics far from those of a new model."""
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.weight.data = 1 + 0.3 * torch.randn(module.num_features)
            module.bias.data = 0.3 * torch.randn(module.num_features)
            module.running_mean = 0.3 * torch.randn(module.num_features)
            module.running_var = 0.5 + torch.rand(module.num_features)
            module.num_batches_tracked.fill_(7)
        elif isinstance(module, torch.nn.Conv2d | torch.nn.Linear):
            module.weight.data = torch.randn(module.weight.shape) * module.weight[0].numel() ** -0.5
            if module.bias is not None:
                module.bias.data = 0.5 * torch.randn(module.bias.shape)
        elif isinstance(module, torch.nn.LayerNorm):
            module.weight.data = 1 + 0.3 * torch.randn(module.weight.shape)
            module.bias.data = 0.3 * torch.randn(module.bias.shape)
    drawn = ("cls_token", "distillation_token", "register_tokens", "probe", "lambda1", "in_proj_bias")
    drawn += ("pos_embed", "position_embeddings", "position_embedding.weight")
    for name, parameter in model.named_parameters():
        if name.endswith(drawn):
            parameter.data = torch.randn(parameter.shape)


def write(name: str, tensors: dict, images: torch.Tensor, **outputs: torch.Tensor) -> None:
    directory = HERE / name
    directory.mkdir(parents=True, exist_ok=True)
    if tensors:
        save_file({key: value.contiguous() for key, value in tensors.items()}, directory / "model.safetensors")
    write_expected(directory, {"images": images.numpy(), **{name: x.numpy() for name, x in outputs.items()}})
    size = sum(file.stat().st_size for file in directory.iterdir())
    print(f"{name:24} {size / 1e3:6.1f} kB  largest output {max(v.abs().max() for v in outputs.values()):.2f}")


def some_images(seed: int) -> torch.Tensor:
    """Two images that are noise, and rather dark on one side."""
    torch.manual_seed(seed)
    shade = torch.linspace(0.2, 1, SIZE)[:, None]
    return (torch.rand(2, SIZE, SIZE, 3) * 256 * shade).to(torch.uint8)


def normalised(images: torch.Tensor, mean: torch.Tensor = MEAN, deviation: torch.Tensor = DEVIATION) -> torch.Tensor:
    return ((images / 255 - mean) / deviation).permute(0, 3, 1, 2)


@torch.no_grad()
def make_resnets() -> None:
    import torchvision.models.resnet as resnet
    import transformers

    class Small(resnet.ResNet):
        """torchvision's ResNet with other widths."""

        def __init__(self, block: type, planes: tuple, depths: tuple, classes: int):
            super().__init__(block, [1] * 4, num_classes=classes)
            self.inplanes = planes[0]
            self.conv1 = torch.nn.Conv2d(3, planes[0], 7, 2, 3, bias=False)
            self.bn1 = torch.nn.BatchNorm2d(planes[0])
            for i, (width, depth) in enumerate(zip(planes, depths, strict=True)):
                setattr(self, f"layer{i + 1}", self._make_layer(block, width, depth, stride=1 if i == 0 else 2))
            self.fc = torch.nn.Linear(planes[-1] * block.expansion, classes)

    for seed, (name, (block, planes, depths, classes)) in enumerate(TORCHVISION.items()):
        images = some_images(seed)
        model = Small(getattr(resnet, block), planes, depths, classes).eval()
        randomise(model)
        write(name, model.state_dict(), images, logits=model(normalised(images)))
    for seed, (name, fields) in enumerate(TRANSFORMERS.items(), 10):
        images = some_images(seed)
        model = transformers.ResNetForImageClassification(transformers.ResNetConfig(**fields)).eval()
        randomise(model)
        shutil.rmtree(HERE / name, ignore_errors=True)
        model.save_pretrained(HERE / name)
        write(name, {}, images, logits=model(normalised(images)).logits)


@torch.no_grad()
def make_vits() -> None:
    import timm
    import transformers
    from timm.models._hub import save_config_for_hf

    halves = [0.5] * 3, [0.5] * 3
    for seed, (name, (fields, pixels)) in enumerate(VITS.items(), 30):
        images = some_images(seed)
        config = transformers.ViTConfig(image_size=SIZE, **fields)
        model = transformers.ViTForImageClassification(config).eval()
        randomise(model)
        shutil.rmtree(HERE / name, ignore_errors=True)
        model.save_pretrained(HERE / name)
        mean, deviation = pixels or halves
        if pixels:
            size = {"height": SIZE, "width": SIZE}
            transformers.ViTImageProcessor(image_mean=mean, image_std=deviation, size=size).save_pretrained(HERE / name)
        pixel_values = normalised(images, torch.tensor(mean), torch.tensor(deviation))
        write(name, {}, images, logits=model(pixel_values).logits)
    for seed, (name, (arguments, pixels)) in enumerate(TIMM.items(), 40):
        images = some_images(seed)
        arguments = {"num_heads": arguments["embed_dim"] // 64, **arguments}
        model = timm.create_model("vit_tiny_patch16_224", img_size=SIZE, **arguments).eval()
        randomise(model)
        mean, deviation = pixels or halves
        write(name, model.state_dict(), images, logits=model(normalised(images, *map(torch.tensor, (mean, deviation)))))
        if pixels:
            data = {"mean": mean, "std": deviation, "input_size": [3, SIZE, SIZE]}
            save_config_for_hf(model, HERE / name / "config.json", {"pretrained_cfg": data}, model_args=arguments)


@torch.no_grad()
def make_relatives() -> None:
    import transformers

    for seed, (name, (kind, fields, pixels)) in enumerate(RELATIVES.items(), 50):
        images = some_images(seed)
        cls = getattr(transformers, kind)
        model = cls(cls.config_class(**fields)).eval()
        randomise(model)
        shutil.rmtree(HERE / name, ignore_errors=True)
        model.save_pretrained(HERE / name)
        family = next(family for family in PROCESSORS if kind.startswith(family))
        mean, deviation = STATISTICS.get(family, (torch.tensor([0.5] * 3), torch.tensor([0.5] * 3)))
        if pixels is not None:
            processor = getattr(transformers, f"{PROCESSORS[family]}ImageProcessorPil")(**pixels)
            processor.save_pretrained(HERE / name)
            mean, deviation = torch.tensor(processor.image_mean), torch.tensor(processor.image_std)
        pixel_values = normalised(images, mean, deviation)
        if kind == "SiglipModel":
            outputs = {"features": model.get_image_features(pixel_values).pooler_output}
        elif "Classification" in kind:
            outputs = {"logits": model(pixel_values).logits}
        else:
            output = model(pixel_values)
            mean = output.last_hidden_state.mean(1)  # what we take where nothing is pooled
            outputs = {"features": mean if output.pooler_output is None else output.pooler_output}
        write(name, {}, images, **outputs)


def make_pixels() -> None:
    import transformers
    from PIL import Image

    rng = np.random.default_rng(7)
    rows, columns = np.mgrid[0:101, 0:67] / 100
    waves = np.stack((np.sin(9 * rows * columns), np.cos(17 * columns), np.sin(5 * rows + 3 * columns)), axis=-1)
    noise = rng.normal(0, 0.15, (26, 17, 3)).repeat(4, axis=0).repeat(4, axis=1)[:101, :67]
    photo = (255 * np.clip(0.5 + 0.45 * waves + noise, 0, 1)).astype(np.uint8)
    Image.fromarray(photo).save(HERE / "photo.png")
    files, made = {}, {}
    for name, (kind, fields) in PIXELS.items():
        processor = getattr(transformers, f"{kind}ImageProcessorPil")(**fields)
        files[name] = processor.to_dict()
        pixels = processor(Image.fromarray(photo), do_normalize=False, do_rescale=False)["pixel_values"][0]
        made[name] = np.asarray(pixels).transpose(1, 2, 0).astype(np.uint8)
    (HERE / "image_processors.json").write_text(json.dumps(files, indent=2) + "\n")
    write_expected(HERE / "image_processors", made)


@torch.no_grad()
def make_yolos() -> None:
    import yaml
    import yolov5
    from yolov5.models.yolo import DetectionModel

    architecture = yaml.safe_load((pathlib.Path(yolov5.__file__).parent / "models/yolov5s.yaml").read_text())
    for seed, (name, (depth, width, classes, factor, dtype)) in enumerate(YOLOV5.items(), 20):
        images = some_images(seed)
        anchors = [[side * factor for side in grid] for grid in architecture["anchors"]]
        multiples = {"depth_multiple": depth, "width_multiple": width, "anchors": anchors}
        model = DetectionModel(architecture | multiples, nc=classes).eval()
        randomise(model)
        tensors = {key: x.to(dtype) if x.is_floating_point() else x for key, x in model.state_dict().items()}
        model.load_state_dict({key: x.float() if x.is_floating_point() else x for key, x in tensors.items()})
        predictions = model((images / 255).permute(0, 3, 1, 2))[0]
        write(name, tensors, images, predictions=predictions)


if __name__ == "__main__":
    made = {
        "resnet": make_resnets,
        "vit": make_vits,
        "relatives": make_relatives,
        "pixels": make_pixels,
        "yolov5": make_yolos,
    }
    made[sys.argv[1]]()
