"""Pictures, and the networks that read them."""

import zlib

import numpy as np
import pytest
import timm
import torch
from helpers import timm_weights, untrained_resnet, without_training
from PIL import Image
from torchvision.transforms import Compose, Normalize, Resize, ToTensor

from common import InputError
from support.extractors import (
    FORMATS,
    Extractor,
    TimmGrid,
    check_pictures,
    preprocess_resnet,
    read_image,
)


def noise(*size):
    """A picture of random pixels."""
    pixels = np.random.default_rng(0).integers(0, 255, (*size, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


# ---- preprocessing and extractors ----------------------------------------------------------------


def cubic(d, a=-0.75):
    """The weight of a pixel at distance d (Keys 1981)."""
    d = abs(d)
    if d <= 1:
        return (a + 2) * d**3 - (a + 3) * d**2 + 1
    if d < 2:
        return a * (d**3 - 5 * d**2 + 8 * d - 4)
    return 0.0


@pytest.mark.parametrize("row, col", [(0, 0), (2, 69), (4, 54), (223, 223)])  # two are clipped
def test_bicubic_preprocessing_against_loop(row, col):
    """OpenCV's bicubic: half-pixel centres, a = -0.75, border repeated, no antialiasing, rounded to
    bytes."""
    image = noise(300, 280)
    pixels = np.array(image).astype(float)
    y = (row + 0.5) * 300 / 224 - 0.5
    z = (col + 0.5) * 280 / 224 - 0.5
    value = 0
    for i in range(int(np.floor(y)) - 1, int(np.floor(y)) + 3):
        for j in range(int(np.floor(z)) - 1, int(np.floor(z)) + 3):
            pixel = pixels[np.clip(i, 0, 299), np.clip(j, 0, 279)]
            value = value + cubic(y - i) * cubic(z - j) * pixel
    byte = np.clip(np.round(value), 0, 255) / 255
    expected = (byte - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.224]
    x = preprocess_resnet(image)
    np.testing.assert_allclose(x[:, row, col], expected, atol=1e-5)


@pytest.mark.parametrize(
    "name, side, grid",
    [
        ("resnet101-layer3", 224, (1024, 14, 14)),
        ("resnet101-layer3-256", 256, (1024, 14, 14)),  # 16 x 16 cells averaged to 14 x 14
        ("resnet101-layer4", 224, (2048, 7, 7)),
    ],
)
def test_resnet_extractors_are_torchvisions_layers(name, side, grid, monkeypatch):
    without_training(monkeypatch)
    picture = noise(300, 280)
    extractor = Extractor(name)
    x = extractor.preprocess(picture)[None]
    if name != "resnet101-layer3":  # the preprocessing of that one is tested above
        normalize = Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
        preprocess = Compose([Resize((side, side)), ToTensor(), normalize])
        torch.testing.assert_close(x[0], preprocess(picture))
    net = untrained_resnet()
    with torch.no_grad():
        expected = net.maxpool(net.relu(net.bn1(net.conv1(x))))
        expected = net.layer3(net.layer2(net.layer1(expected)))
        if name == "resnet101-layer4":
            expected = net.layer4(expected)
    if side == 256:
        expected = torch.nn.functional.adaptive_avg_pool2d(expected, 14)
    found = next(extractor.blocks([picture], 1))
    assert found.shape == (1, *grid)
    assert found.dtype == torch.float16
    torch.testing.assert_close(found.float(), expected, atol=2e-3, rtol=2e-3)


def test_features_stay_in_the_order_of_the_pictures():
    pictures = [Image.new("RGB", (64, 64), (i * 30, 0, 0)) for i in range(7)]
    extractor = Extractor("mini-cnn")
    blocks = list(extractor.blocks(pictures, 3))
    assert [len(block) for block in blocks] == [3, 3, 1]
    each = torch.cat([next(extractor.blocks([picture], 1)) for picture in pictures])
    torch.testing.assert_close(torch.cat(blocks), each, atol=1e-3, rtol=1e-2)


def test_a_timm_backbone(tmp_path):
    """timm/NAME:FILE is the last map of the model with the weights of the file, made from the whole
    picture and with the model's own mean and standard deviation."""
    net = timm_weights(tmp_path / "w.pt")
    extractor = Extractor(f"timm/test_resnet:{tmp_path / 'w.pt'}")
    pixels = np.zeros((120, 200, 3), np.uint8)
    pixels[:, :2] = 255  # at the border, which a centre crop would cut off
    picture = Image.fromarray(pixels)
    x = extractor.preprocess(picture)
    assert x.shape == (3, 224, 224)
    assert x[:, :, 0].mean() > x[:, :, 20:].mean() + 0.5
    mean = torch.tensor(net.default_cfg["mean"])
    std = torch.tensor(net.default_cfg["std"])
    torch.testing.assert_close(x[:, 112, 112], -mean / std)
    with torch.no_grad():
        expected = net.forward_features(x[None])
    found = next(extractor.blocks([picture], 1))
    torch.testing.assert_close(found.float(), expected, atol=5e-3, rtol=5e-3)


def test_timm_weights_as_training_scripts_save_them(tmp_path):
    """Wrapped, of several GPUs, with other classes; but whole, and under timm's names."""
    weights = timm_weights(tmp_path / "w.pt").state_dict()
    extractor = Extractor(f"timm/test_resnet:{tmp_path / 'w.pt'}")
    expected = next(extractor.blocks([noise(64, 64)], 1))
    other = weights | {"fc.weight": torch.zeros(3, 5), "fc.bias": torch.zeros(3)}
    content = {"state_dict": {f"module.{key}": value for key, value in other.items()}}
    torch.save(content, tmp_path / "other.pt")
    extractor = Extractor(f"timm/test_resnet:{tmp_path / 'other.pt'}")
    assert torch.equal(next(extractor.blocks([noise(64, 64)], 1)), expected)
    weights["trunk"] = weights.pop("conv1.0.weight")
    torch.save(weights, tmp_path / "other.pt")
    with pytest.raises(InputError, match="other.pt.*conv1.0.weight"):
        Extractor(f"timm/test_resnet:{tmp_path / 'other.pt'}")


@pytest.mark.parametrize("saved_at", [160, 224])
def test_a_vit_of_another_size_than_224(saved_at, tmp_path):
    """Its positions are resized, unless the weights were saved at 224 pixels."""
    torch.manual_seed(0)
    net = timm.create_model("test_vit", img_size=saved_at).eval()  # 160 is its own size
    torch.save(net.state_dict(), tmp_path / "w.pt")
    grid = TimmGrid(f"timm/test_vit:{tmp_path / 'w.pt'}").eval()
    net.set_input_size(224)
    pictures = torch.rand(2, 3, 224, 224)
    with torch.inference_mode():
        expected = net.forward_intermediates(pictures, indices=1, intermediates_only=True)
        torch.testing.assert_close(grid(pictures), expected[0])
    other = timm.create_model("test_vit", patch_size=32)
    torch.save(other.state_dict(), tmp_path / "w.pt")
    with pytest.raises(InputError, match="w.pt.*patch_embed.proj.weight"):
        TimmGrid(f"timm/test_vit:{tmp_path / 'w.pt'}")


def test_weights_that_cannot_be_loaded_are_named(tmp_path, monkeypatch):
    """A file in a cache may be cut off. There may be no network, either."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    file = tmp_path / "hub/checkpoints/resnet101-63fe2227.pth"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"cut off")
    with pytest.raises(InputError, match=f"{file}.*delete it"):
        Extractor("resnet101-layer3")

    def no_network(*_, **__):
        raise OSError("no network " * 100)

    monkeypatch.setattr("timm.create_model", no_network)
    with pytest.raises(InputError, match=r"timm/test_resnet in .*timm/test_resnet:FILE") as caught:
        Extractor("timm/test_resnet")
    assert len(str(caught.value)) < 400


# ---- pictures ------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMATS)
def test_pictures_are_known_by_their_content(form, tmp_path):
    """The name of a file is ignored. From Python, a picture may be a PIL image."""
    path = tmp_path / "a.picture"
    noise(12, 16).save(path, form)
    picture = Image.open(path)
    expected = np.array(picture.convert("RGB"))
    for source in (path, picture):
        assert np.array_equal(read_image(source), expected)


@pytest.mark.parametrize("form, mode", [("PNG", "RGBA"), ("PNG", "LA"), ("GIF", "RGBA")])
def test_what_is_transparent_lies_on_white(form, mode, tmp_path):
    picture = Image.new("RGBA", (16, 12), (40, 40, 40, 255))
    picture.paste((200, 200, 200, 0), (8, 0, 16, 12))
    picture.convert(mode).save(tmp_path / "a.picture", form)
    pixels = np.array(read_image(tmp_path / "a.picture"))
    assert (pixels[:, :8] == 40).all()
    assert (pixels[:, 8:] == 255).all()


def with_16_bits(content):
    """A PNG with a header that says 16 bits a channel."""
    header = bytearray(content[12:29])
    header[12] = 16
    checksum = zlib.crc32(header).to_bytes(4, "big")
    return content[:12] + header + checksum + content[33:]


@pytest.mark.parametrize(
    "mode, form, named",
    [
        ("RGB", "TIFF", "cannot identify"),  # some of them Pillow reads in a wrong way
        ("RGB", "PNG", "mode RGB"),
        ("I;16", "PNG", "mode I"),  # Pillow 10.1 calls it I
        ("L", "PPM", "cannot identify"),
    ],
)
def test_more_than_8_bits_and_other_formats_are_refused(mode, form, named, tmp_path):
    """11-bit values stored in 16 bits would turn black, larger ones white."""
    path = tmp_path / "a.picture"
    Image.new(mode, (16, 12)).save(path, form)
    if (mode, form) == ("RGB", "PNG"):  # Pillow cannot write this mode with 16 bits
        path.write_bytes(with_16_bits(path.read_bytes()))
    with pytest.raises(InputError, match=f"a.picture.*{named}.*8 bits a channel"):
        read_image(path)


def test_pictures_are_turned_upright(tmp_path):
    """From a file and, without changing it, from a PIL image."""
    stored = np.array(noise(12, 16))
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was held sideways
    noise(12, 16).save(tmp_path / "a.png", exif=exif)
    picture = Image.open(tmp_path / "a.png")
    for source in (tmp_path / "a.png", picture):
        assert np.array_equal(read_image(source), stored.transpose(1, 0, 2)[:, ::-1])
    assert np.array_equal(picture, stored)


def test_every_broken_picture_is_named_before_any_work(tmp_path):
    (tmp_path / "empty").touch()
    for form in FORMATS:
        good = tmp_path / f"good {form}"
        noise(60, 80).save(good, form)
        content = good.read_bytes()
        (tmp_path / f"cut {form}").write_bytes(content[: len(content) * 9 // 10])
    files = sorted(tmp_path.iterdir())
    with pytest.raises(InputError) as caught:
        check_pictures(files)
    with pytest.raises(FileNotFoundError, match="none 0.*none 1 .2 of 3 missing"):
        check_pictures([tmp_path / "none 0", *files[:1], tmp_path / "none 1"])
    whole = [file for file in files if f"{file.name} (" not in str(caught.value)]
    assert whole == sorted(tmp_path.glob("good *"))
    check_pictures(whole)
