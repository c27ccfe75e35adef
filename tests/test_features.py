"""Pictures, extractors, preparation, feature files."""

import copy
import functools
import os
import re
import sys
import threading
import time
import zlib
from pathlib import Path

import h5py
import numpy as np
import pytest
import timm
import torch
from conftest import GRID, MeanColor, write_own_pairs
from PIL import Image
from torchvision.models.resnet import Bottleneck, ResNet
from torchvision.transforms import Compose, Normalize, Resize, ToTensor

import data
import scorer_cbr
from common import InputError
from support.features import (
    FORMATS,
    Extractor,
    Features,
    TimmGrid,
    authors_features,
    check_pictures,
    in_threads,
    preprocess_resnet,
    read_image,
    write_features,
)
from support.releases import read_clevr_change


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


@functools.cache
def untrained_resnet():
    """ResNet-101's four stages with random weights, and with one block each."""
    torch.manual_seed(0)
    # Residuals that are not zero exceed float16's range.
    return ResNet(Bottleneck, [1, 1, 1, 1], zero_init_residual=True).eval()


def without_training(monkeypatch):
    """Extractors have random weights, instead of those that would be downloaded."""

    def make(weights):
        return copy.deepcopy(untrained_resnet())

    monkeypatch.setattr("torchvision.models.resnet101", make)


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


def timm_weights(path, seed=0):
    """timm's test_resnet with random weights, written to a file. -> the model"""
    torch.manual_seed(seed)
    net = timm.create_model("test_resnet").eval()
    torch.save(net.state_dict(), path)
    return net


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


def test_at_most_8_pictures_are_decoded_at_once(monkeypatch):
    """The host of a container may have many CPUs."""
    monkeypatch.setattr(os, "cpu_count", lambda: 64)

    def work(item):
        time.sleep(0.001)
        return item, threading.get_ident()

    items, threads = zip(*in_threads(work, range(3000)), strict=True)
    assert items == tuple(range(3000))
    assert 2 <= len(set(threads)) <= 8


# ---- preparation ---------------------------------------------------------------------------------


def test_features_of_the_pictures(release, monkeypatch):
    """Each extractor has a file of its own."""
    monkeypatch.setattr("data.Extractor", MeanColor)
    call = ["clevr_change", "--data_dir", str(release), "--device", "cpu"]
    data.main(call)
    data.main([*call, "--extractor", "resnet101-layer4"])
    files = {path.name for path in release.glob("features*")}
    assert files == {"features.h5", "features-resnet101-layer4.h5"}
    for extractor, channels in (("", 3), ("resnet101-layer4", 4)):
        dataset = data.load("clevr_change", release, extractor=extractor)
        names = list(dataset.paths)
        for name, x in zip(names, dataset.features.rows(names), strict=True):
            mean = np.array(read_image(dataset.paths[name])).mean()
            assert x.shape == (channels, 2, 3)
            assert x.mean().item() == pytest.approx(mean, rel=1e-3)


def test_the_authors_features(release):
    """They take the place of the extractor's. Nothing in a file is executed."""
    for name, picture in read_clevr_change(release).paths.items():
        file = authors_features(picture)
        file.parent.mkdir(exist_ok=True)
        np.save(file, np.full(GRID, float(name[-5]), np.float32))  # its scene's last digit
    right = np.load(file)
    np.save(file, np.array([{}], dtype=object))
    with pytest.raises(InputError, match=file.name):
        data.prepare("clevr_change", release, "cpu")
    assert not list(release.glob("features.h5*"))
    np.save(file, right)
    data.prepare("clevr_change", release, "cpu")
    dataset = data.load("clevr_change", release)
    assert dataset.grid == GRID
    assert (dataset.features.rows(["CLEVR_semantic_000002.png"]) == 2).all()


def test_a_replaced_picture_is_noticed(prepared):
    """A copy of the same picture, which may have another time, is as good."""
    picture = prepared / "sc_images" / "CLEVR_semantic_000004.png"
    content = picture.read_bytes()
    data.load("clevr_change", prepared)
    other_pixels = bytearray(content)
    other_pixels[-30] ^= 1
    picture.write_bytes(other_pixels)
    with pytest.raises(InputError, match="features.h5.*delete features.h5 and run: python data.py"):
        data.load("clevr_change", prepared)
    picture.write_bytes(content)  # with another time
    data.load("clevr_change", prepared)
    picture.unlink()  # features may come without pictures
    data.load("clevr_change", prepared)


def test_preparation_counts_and_notes_what_one_looks_for_first(tmp_path, monkeypatch, capsys):
    """Pairs of each split and kind; words and captions that a model does not see; copies."""
    long = " ".join(["word"] * 61)
    rows = [f"a,b,gone,train,it is gone|{long}", "e,f,gone,val,gone"]
    rows.append("c,d,no change,train,Nothing.|all as before|nothing .|gone")
    (tmp_path / "pairs.csv").write_text("\n".join(["before,after,kind,split,captions", *rows]))
    for n, name in enumerate("abcdef"):
        Image.new("RGB", (8, 8), (n, n, n)).save(tmp_path / name, "PNG")
    (tmp_path / "e").write_bytes((tmp_path / "b").read_bytes())
    monkeypatch.setattr("data.Extractor", MeanColor)
    data.prepare("pairs", tmp_path, "cpu")
    out = capsys.readouterr().out
    for line in (
        "train: 2 pairs, 1 gone, 1 no change",
        "val: 1 pairs, 1 gone, 0 no change",
        "test: 0 pairs, 0 gone, 0 no change",
        "1 training captions are cut to 60 words",
        "1 of 1 val pairs share a picture",
        "3 different captions",
        "2 nothing .\n",
        "1 gone\n",
    ):
        assert line in out
    capsys.readouterr()
    data.load("pairs", tmp_path)
    assert "1 of 1 val pairs share a picture" in capsys.readouterr().out


def test_a_timm_backbone_through_preparation_training_and_captioning(tmp_path, tiny, capsys):
    write_own_pairs(tmp_path)
    timm_weights(tmp_path / "w.pt")
    extractor = f"timm/test_resnet:{tmp_path / 'w.pt'}"
    flags = ["--data_dir", str(tmp_path), "--extractor", extractor]
    data.main(["pairs", *flags, "--device", "cpu"])
    run = str(tmp_path / "run")
    scorer_cbr.main([*tiny, "--dataset", "pairs", *flags, "--out_dir", run, "--steps", "1"])
    pictures = [str(tmp_path / "train.png"), str(tmp_path / "b.png")]
    caption_with = ["--caption", *pictures, "--checkpoint", f"{run}/best.pt", "--device", "cpu"]
    capsys.readouterr()
    scorer_cbr.main(caption_with)
    assert capsys.readouterr().out.count("\n") == 1
    moved = (tmp_path / "w.pt").rename(tmp_path / "moved.pt")
    with pytest.raises(InputError, match=r"w.pt.*--extractor"):
        scorer_cbr.main(caption_with)
    scorer_cbr.main([*caption_with, "--extractor", f"timm/test_resnet:{moved}"])
    caption, _ = scorer_cbr.load(f"{run}/best.pt", "cpu", f"timm/test_resnet:{moved}")(*pictures)
    assert capsys.readouterr().out == f"{caption}\n"
    for other in ("timm/test_resnet", "resnet101-layer3"):
        with pytest.raises(InputError, match=r"best.pt"):
            scorer_cbr.main([*caption_with, "--extractor", other])
    timm_weights(tmp_path / "w.pt", seed=1)
    with pytest.raises(InputError, match=r"w.pt.*best.pt"):  # other weights of the same name
        scorer_cbr.main(caption_with)
    with pytest.raises(FileNotFoundError):
        data.load("pairs", tmp_path, extractor=extractor)


# ---- feature files -------------------------------------------------------------------------------


def write(path, blocks):
    """A feature file of the images "a" to "e"."""
    files = dict.fromkeys("abcde", Path(__file__))  # that they are said to be made from
    write_features(path, files, blocks, "resnet101-layer3", "how")


FEATURES = np.random.default_rng(0).random((5, *GRID)).astype(np.float32)


def test_feature_file_round_trip(tmp_path, monkeypatch):
    write(tmp_path / "f.h5", [FEATURES[:2], FEATURES[2:]])
    read = Features(tmp_path / "f.h5", "make it", "resnet101-layer3")
    expected = torch.from_numpy(FEATURES[[3, 0, 3]]).half()
    torch.testing.assert_close(read.rows(["d", "a", "d"]), expected)
    monkeypatch.delattr(os, "posix_fadvise", raising=False)  # as on macOS and Windows
    torch.testing.assert_close(read.rows(["d", "a", "d"]), expected)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the file would fill the disk")
def test_a_feature_file_may_be_larger_than_memory(tmp_path):
    """As that of CLEVR-Change, 48 GB, often is. Nothing is written but the last row."""
    memory = Path("/proc/meminfo").read_text()
    kilobytes = re.findall(r"^(?:MemTotal|SwapTotal): +(\d+)", memory, re.MULTILINE)
    grid = (2**12, 32, 32)  # 8 MiB
    count = sum(map(int, kilobytes)) * 1024 * 5 // 4 // 2**23
    names = [str(n) for n in range(count)]
    path = tmp_path / "f.h5"
    with h5py.File(path, "w") as f:
        f.attrs.update(extractor="resnet101-layer3", preprocessing="how")
        f["image_ids"] = names
        f["stamps"] = np.zeros((count, 3), np.int64)
        f.create_dataset("features", (count, *grid), "float16", fill_time="never")[-1] = 2
    assert path.stat().st_blocks * 512 < 100e6
    features = Features(path, "make it", "resnet101-layer3")
    assert (features.rows(names[-1:]) == 2).all()


@pytest.mark.parametrize("factor", [1e6, np.nan])
def test_features_that_float16_cannot_hold_are_named(factor, tmp_path):
    with pytest.raises(InputError, match="'b'"):
        write(tmp_path / "f.h5", [FEATURES[:1], FEATURES[1:] * factor])
    assert not list(tmp_path.iterdir())  # never half a file
