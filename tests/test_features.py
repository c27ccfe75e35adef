"""Pictures, extractors, preparation."""

import copy
import functools
import io
import itertools
import os
import re
import shutil
import struct
import zlib

import numpy as np
import pytest
import timm
import torch
from conftest import GRID, MeanColor, write_own_pairs, write_picture
from PIL import Image
from torchvision.models import resnet101
from torchvision.transforms import Compose, Normalize, Resize, ToTensor

import data
import scorer_cbr
from common import InputError


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


@pytest.mark.parametrize("row, col", [(0, 0), (100, 37), (223, 223)])
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
    x = data.preprocess_resnet(image)
    # A tie may be rounded the other way: 1/255/.224.
    np.testing.assert_allclose(x[:, row, col], expected, atol=0.02)


@functools.cache
def untrained_resnet():
    torch.manual_seed(0)
    return resnet101(zero_init_residual=True).eval()  # otherwise residuals exceed float16's range


def without_training(monkeypatch):
    """Extractors have random weights, instead of those that would be downloaded."""

    def make(weights):
        return copy.deepcopy(untrained_resnet())

    monkeypatch.setattr(data, "resnet101", make)


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
    extractor = data.Extractor(name)
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
    found = extractor([picture])
    assert found.shape == (1, *grid)
    assert found.dtype == torch.float16
    torch.testing.assert_close(found.float(), expected, atol=2e-3, rtol=2e-3)


# ---- pictures ------------------------------------------------------------------------------------


def test_any_picture_is_read_by_its_content(tmp_path):
    """The name is ignored: a TIFF in .png, a GIF in .jpg. An animation gives its first frame."""
    rgb = noise(12, 16)
    rgb.save(tmp_path / "tiff.png", "TIFF")
    rgb.save(tmp_path / "no_suffix", "PNG")
    for name in ("tiff.png", "no_suffix"):
        assert np.array_equal(data.read_image(tmp_path / name), np.array(rgb))
    rgb.convert("CMYK").save(tmp_path / "cmyk.tif")
    expected = np.array(rgb.convert("CMYK").convert("RGB"))
    assert np.array_equal(data.read_image(tmp_path / "cmyk.tif"), expected)
    frames = [Image.new("RGB", (16, 12), color) for color in ("blue", "red")]
    frames[0].save(tmp_path / "moving.jpg", "GIF", save_all=True, append_images=frames[1:])
    assert (np.array(data.read_image(tmp_path / "moving.jpg")) == [0, 0, 255]).all()


@pytest.mark.parametrize("form, mode", [("PNG", "RGBA"), ("PNG", "LA"), ("GIF", "RGBA")])
def test_what_is_transparent_lies_on_white(form, mode, tmp_path):
    picture = Image.new("RGBA", (16, 12), (40, 40, 40, 255))
    picture.paste((200, 200, 200, 0), (8, 0, 16, 12))
    picture.convert(mode).save(tmp_path / "a.png", form)
    pixels = np.array(data.read_image(tmp_path / "a.png"))
    assert (pixels[:, :8] == 40).all()
    assert (pixels[:, 8:] == 255).all()
    grey = Image.new("LA", (4, 4), (100, 51))  # a fifth of 100, the rest of 255
    assert (np.array(data.read_image(grey)) == 224).all()


def test_a_colour_may_be_transparent(tmp_path):
    for mode, black in (("RGB", (0, 0, 0)), ("L", 0)):
        Image.new(mode, (16, 12)).save(tmp_path / "a.png", transparency=black)
        assert (np.array(data.read_image(tmp_path / "a.png")) == 255).all()


def write_tiff(path, bits, sign, bands, planes=1):
    """A TIFF of 4 x 4 pixels. sign: 1 unsigned, 2 signed, 3 float; planes: 2 if bands follow each
    other."""
    tags = {256: 4, 257: 4, 258: bits, 259: 1, 262: 2 if bands > 2 else 1, 277: bands, 278: 4}
    tags |= {273: 8, 279: 16 * bands * bits // 8, 284: planes, 339: sign}
    content = bytes(range(256))[: tags[279]] + bytes(max(0, tags[279] - 256))
    directory = struct.pack("<H", len(tags))
    for tag in sorted(tags):
        directory += struct.pack("<HHIHH", tag, 3, 1, tags[tag], 0)
    head = b"II*\0" + struct.pack("<I", 8 + len(content))
    path.write_bytes(head + content + directory + bytes(4))


@pytest.mark.parametrize(
    "bits, sign, bands, said",
    [
        (16, 1, 3, "3 bands of 16 unsigned"),
        (16, 1, 1, "1 bands of 16 unsigned"),
        (8, 2, 1, "1 bands of 8 signed"),
        (32, 3, 1, "1 bands of 32 float"),
        (8, 1, 8, "8 bands of 8 unsigned"),
        (8, 1, 2, "2 bands of 8 unsigned"),
    ],
)
@pytest.mark.parametrize("planes", [1, 2])
def test_the_tags_of_a_tiff_decide(bits, sign, bands, said, planes, tmp_path):
    write_tiff(tmp_path / "a.tif", bits, sign, bands, planes)
    content = (tmp_path / "a.tif").read_bytes()
    for picture in (tmp_path / "a.tif", io.BytesIO(content)):
        with pytest.raises(InputError, match=f"{said} bits.*8 bits a channel.*gdal_translate"):
            data.read_image(picture)


@pytest.mark.parametrize("mode", ["L", "RGB", "P", "CMYK"])
def test_tiffs_of_8_bits_are_read(mode, tmp_path):
    picture = noise(12, 16).convert(mode)
    picture.save(tmp_path / "a.tif")
    expected = np.array(picture.convert("RGB"))
    assert np.array_equal(data.read_image(tmp_path / "a.tif"), expected)


def test_the_fourth_band_of_a_tiff_is_not_transparency(tmp_path):
    """Satellite pictures have near infrared there."""
    Image.new("RGBA", (16, 12), (40, 50, 60, 70)).save(tmp_path / "a.tif")
    assert (np.array(data.read_image(tmp_path / "a.tif")) == [40, 50, 60]).all()


def png_of_16_bits():
    """A PNG of RGB with 16 bits a channel, which Pillow cannot write."""

    def chunk(name, content):
        checksum = zlib.crc32(name + content)
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", checksum)

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 16, 12, 16, 2, 0, 0, 0))
    rows = chunk(b"IDAT", zlib.compress((b"\0" + bytes(range(96))) * 12))
    return b"\x89PNG\r\n\x1a\n" + header + rows + chunk(b"IEND", b"")


def test_values_of_more_than_8_bits_are_refused(tmp_path):
    """11-bit values stored in 16 bits would turn black, larger ones white."""
    values = np.random.default_rng(0).random((12, 16))
    Image.fromarray((values * 2047).astype(np.uint16)).save(tmp_path / "grey.png")
    (tmp_path / "rgb.png").write_bytes(png_of_16_bits())
    for name in ("grey.png", "rgb.png"):
        with pytest.raises(InputError, match=f"{name}.*8 bits a channel"):
            data.read_image(tmp_path / name)
    for array in (values.astype(np.float32), (values * 255).astype(np.int32)):
        with pytest.raises(InputError, match="8 bits a channel"):
            data.read_image(Image.fromarray(array))


def test_other_formats_are_refused_by_name(tmp_path):
    noise(12, 16).save(tmp_path / "a.png", "PPM")
    with pytest.raises(InputError, match="a.png.*PNG, JPEG, WEBP, GIF, BMP or TIFF"):
        data.read_image(tmp_path / "a.png")


def test_pictures_from_python(tmp_path):
    picture = noise(12, 16)
    content = io.BytesIO()
    picture.save(content, "BMP")
    assert np.array_equal(data.read_image(content), np.array(picture))
    assert np.array_equal(data.read_image(picture), np.array(picture))
    with pytest.raises(TypeError, match="fromarray"):
        data.read_image(np.array(picture))


def test_a_users_limit_of_pixels_stands(tmp_path, monkeypatch):
    noise(12, 16).save(tmp_path / "a.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 80)  # Pillow refuses more than twice as many
    with pytest.raises(InputError, match="a.png"):
        data.read_image(tmp_path / "a.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    data.read_image(tmp_path / "a.png")
    assert Image.MAX_IMAGE_PIXELS is None


def test_a_broken_picture_is_named(tmp_path):
    path = tmp_path / "cut.jpg"
    noise(120, 160).save(path)
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(InputError, match="cut.jpg"):
        data.read_image(path)


def test_pictures_are_turned_upright(tmp_path):
    """EXIF orientation 6: the first row of the file is the right side of the picture."""
    pixels = np.zeros((12, 16, 3), np.uint8)
    pixels[0] = 255
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(pixels).save(tmp_path / "a.jpg", exif=exif, quality=95)
    upright = np.array(data.read_image(tmp_path / "a.jpg"))
    assert upright.shape == (16, 12, 3)
    assert upright[:, -1].min() > 200
    assert upright[:, 0].max() < 60
    with Image.open(tmp_path / "a.jpg") as picture:  # from Python
        assert np.array_equal(data.read_image(picture), upright)


def test_features_stay_in_the_order_of_the_pictures(tmp_path):
    paths = []
    for i in range(7):
        paths.append(tmp_path / f"{i}.png")
        Image.new("RGB", (64, 64), (i * 30, 0, 0)).save(paths[i])
    extractor = data.Extractor("mini-cnn")
    blocks = list(extractor.blocks(paths, 3))
    assert [len(block) for block in blocks] == [3, 3, 1]
    each = torch.cat([extractor([path]) for path in paths])
    torch.testing.assert_close(torch.cat(blocks), each, atol=1e-3, rtol=1e-2)
    paths[5].write_bytes(b"")
    with pytest.raises(InputError, match="5.png"):
        list(extractor.blocks(paths, 3))


# ---- preparation ---------------------------------------------------------------------------------


def small_maps(monkeypatch, grid):
    """Declares that CLEVR-Change's extractor gives maps of (C, H, W) = grid."""
    preprocess, words, _ = data.RESNETS["resnet101-layer3"]
    monkeypatch.setitem(data.RESNETS, "resnet101-layer3", (preprocess, words, grid))


def write_maps(root, grid):
    """The authors' .npy files of a CLEVR-Change release: a map holds its scene's last digit."""
    for name, picture in data.read_clevr_change(root).paths.items():
        file = data.authors_features(picture, root)
        file.parent.mkdir(exist_ok=True)
        np.save(file, np.full(grid, float(name[-5]), np.float32))
    return file


def test_preparation_from_images_and_from_the_authors_features(release, monkeypatch):
    monkeypatch.setattr(data, "Extractor", MeanColor)
    call = ["clevr_change", "--data_dir", str(release), "--device", "cpu"]
    data.main(call)
    check_prepared(release)
    small_maps(monkeypatch, (4, 2, 3))
    write_maps(release, (4, 2, 3))
    before = (release / "features.h5").read_bytes()
    data.main(call)
    assert (release / "features.h5").read_bytes() == before  # features that are there are kept
    (release / "features.h5").unlink()
    data.main(call)
    packed = data.load("clevr_change", release)
    assert packed.grid == (4, 2, 3)
    assert (packed.features.rows(["CLEVR_semantic_000002.png"]) == 2).all()


def test_the_authors_features_are_checked(release, monkeypatch):
    """Nothing in a file is executed, and a file that is no feature map is named."""
    small_maps(monkeypatch, GRID)
    file = write_maps(release, GRID)
    rows_first = np.zeros((2, 3, 8), np.float32)  # (H, W, C)
    for wrong in (np.array([{}], dtype=object), rows_first):
        np.save(file, wrong)
        with pytest.raises(InputError, match=file.name):
            data.prepare("clevr_change", release, "cpu")
    assert not list(release.glob("features.h5*"))


def test_arrays_beside_own_pictures_are_not_taken(tmp_path, monkeypatch):
    """They belong to the user, and may not even be features."""
    monkeypatch.setattr(data, "Extractor", MeanColor)
    (tmp_path / "features").mkdir()
    rows = ["before,after,split,captions"]
    for split in data.SPLITS:
        name = f"{split}.png"
        write_picture(tmp_path / "images" / name)
        np.save(tmp_path / "features" / f"{name}.npy", np.zeros((1024, 14, 14), np.float32))
        rows.append(f"images/{name},images/train.png,{split},it opened")
    (tmp_path / "pairs.csv").write_text("\n".join(rows))
    data.prepare("pairs", tmp_path, "cpu")
    assert data.load("pairs", tmp_path).grid == (3, 2, 3)


# ---- files that change after features were made --------------------------------------------------


def is_stale(root):
    """Is the feature file of a folder refused, with the command that makes it anew?"""
    try:
        data.load("clevr_change", root)
    except InputError as e:
        assert "features.h5" in str(e) and "remove it and run: python data.py" in str(e)
        return True
    return False


def test_pictures_that_were_replaced(prepared):
    picture = prepared / "sc_images" / "CLEVR_semantic_000004.png"
    content = picture.read_bytes()
    other_pixels = bytearray(content)
    other_pixels[-30] ^= 1
    assert not is_stale(prepared)
    for replaced in (content + b"x", other_pixels):  # of another size, of the same
        picture.write_bytes(replaced)
        assert is_stale(prepared)
        with pytest.raises(InputError, match=picture.name):
            data.prepare("clevr_change", prepared, "cpu")
    picture.write_bytes(content)  # with another time
    assert not is_stale(prepared)
    picture.unlink()  # features may come without pictures
    assert not is_stale(prepared)


def test_a_copied_folder_is_as_good(prepared, tmp_path):
    """Copied files may have new times, so features.h5 may be older or newer than the pictures."""
    copy = tmp_path / "copy"
    shutil.copytree(prepared, copy, copy_function=shutil.copy)
    os.utime(copy / "features.h5", (0, 0))
    assert not is_stale(copy)
    for picture in copy.glob("*images/*.png"):  # all replaced by others of the same size
        picture.write_bytes(bytes(picture.stat().st_size))
    assert is_stale(copy)


def test_the_authors_files_that_were_replaced(release, monkeypatch):
    small_maps(monkeypatch, GRID)
    file = write_maps(release, GRID)
    data.prepare("clevr_change", release, "cpu")
    for picture in release.glob("*images/*.png"):
        picture.write_bytes(b"not what features were made from")
    assert not is_stale(release)
    np.save(file, np.ones(GRID, np.float32))
    assert is_stale(release)


# ---- preparation, stopped and repeated -----------------------------------------------------------


def test_other_counts_than_published_are_told_before_features_are_made(
    release, monkeypatch, capsys
):
    (release / "images" / "CLEVR_default_000004.png").unlink()
    with pytest.raises(FileNotFoundError, match="CLEVR_default_000004.png"):
        data.prepare("clevr_change", release, "cpu")
    notes = capsys.readouterr().out
    for part, found, published in (("train", 8, 33830), ("color", 3, 7958), ("words", 22, 76)):
        assert re.search(rf"\b{part}\b.* {found},.* {published}\n", notes)
    settings = data.Settings(data.read_clevr_change, published={"train": 8, "drop": 3})
    monkeypatch.setitem(data.DATASETS, "clevr_change", settings)
    with pytest.raises(FileNotFoundError):
        data.prepare("clevr_change", release, "cpu")
    assert not capsys.readouterr().out


def check_prepared(root):
    """Asserts that the features in a folder are those of its pictures."""
    dataset = data.load("clevr_change", root)
    for name, x in zip(dataset.paths, dataset.features.rows(list(dataset.paths)), strict=True):
        mean = np.array(data.read_image(dataset.paths[name])).mean()
        assert x.mean().item() == pytest.approx(mean, rel=1e-3)


def test_preparation_may_be_stopped_and_repeated(release, monkeypatch):
    class Stopped(MeanColor):
        def blocks(self, paths, batch):
            yield from itertools.islice(super().blocks(paths, batch), 20)
            raise KeyboardInterrupt

    there = set(release.iterdir())
    monkeypatch.setattr(data, "Extractor", Stopped)
    with pytest.raises(KeyboardInterrupt):
        data.prepare("clevr_change", release, "cpu")
    assert set(release.iterdir()) == there
    monkeypatch.setattr(data, "Extractor", MeanColor)
    data.prepare("clevr_change", release, "cpu")
    assert set(release.iterdir()) == there | {release / "features.h5"}
    check_prepared(release)


def test_each_extractor_has_a_file_of_its_own(release, monkeypatch):
    monkeypatch.setattr(data, "Extractor", MeanColor)
    call = ["clevr_change", "--data_dir", str(release), "--device", "cpu"]
    data.main(call)
    data.main([*call, "--extractor", "resnet101-layer4"])
    files = {path.name for path in release.glob("*.h5")}
    assert files == {"features.h5", "features-resnet101-layer4.h5"}
    flags = {"dataset": "clevr_change", "data_dir": str(release), "device": "cpu"}
    for extractor, channels in (("", 3), ("resnet101-layer3", 3), ("resnet101-layer4", 4)):
        cfg = scorer_cbr.Config(**flags, extractor=extractor)
        assert data.open_dataset(cfg).grid == (channels, 2, 3)


# ---- backbones of timm ---------------------------------------------------------------------------


def timm_weights(model, path, seed=0):
    """A timm model with random weights, written to a file. -> the model"""
    torch.manual_seed(seed)
    net = timm.create_model(model).eval()
    torch.save(net.state_dict(), path)
    return net


def test_the_last_map_of_a_timm_model(tmp_path):
    """It is made with the weights of a file, from the whole picture, and with the model's own mean
    and standard deviation."""
    net = timm_weights("test_resnet", tmp_path / "w.pt")
    extractor = data.Extractor(f"timm/test_resnet:{tmp_path / 'w.pt'}")
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
    torch.testing.assert_close(extractor([picture]).float(), expected, atol=5e-3, rtol=5e-3)


def test_weights_may_be_wrapped_and_have_another_classifier(tmp_path, capfd):
    net = timm_weights("test_resnet", tmp_path / "w.pt")
    weights = net.state_dict()
    other_classes = weights | {
        "fc.weight": torch.zeros(3, net.num_features),
        "fc.bias": torch.zeros(3),
    }
    without = {key: value for key, value in weights.items() if not key.startswith("fc.")}
    picture = noise(64, 64)
    expected = data.Extractor(f"timm/test_resnet:{tmp_path / 'w.pt'}")([picture])
    for wrapped in (
        {"state_dict": weights},
        {f"module.{key}": value for key, value in weights.items()},
        other_classes,
        without,
    ):
        torch.save(wrapped, tmp_path / "other.pt")
        extractor = data.Extractor(f"timm/test_resnet:{tmp_path / 'other.pt'}")
        assert torch.equal(extractor([picture]), expected)
    assert capfd.readouterr().err == ""  # no remarks on the classifier


def test_timm_models_that_are_none(tmp_path):
    timm_weights("test_resnet", tmp_path / "w.pt")
    for name, named in (
        ("timm/no_such_net", "--extractor timm/no_such_net"),
        (f"timm/test_convnext:{tmp_path / 'w.pt'}", "w.pt.*timm's names.*stem.0.weight.*conv1"),
        (f"timm/test_resnet:{tmp_path / 'none.pt'}", "none.pt"),
        ("timm/resnet18.nosuchtag", "--extractor timm/resnet18.nosuchtag"),
    ):
        with pytest.raises(InputError, match=named):
            data.Extractor(name)


def test_a_timm_backbone_through_preparation_training_and_captioning(tmp_path, tiny, capsys):
    write_own_pairs(tmp_path)
    timm_weights("test_resnet", tmp_path / "w.pt")
    extractor = f"timm/test_resnet:{tmp_path / 'w.pt'}"
    flags = ["--data_dir", str(tmp_path), "--extractor", extractor]
    data.main(["pairs", *flags, "--device", "cpu"])
    assert len(list(tmp_path.glob("features-timm-test_resnet-*.h5"))) == 1
    run = str(tmp_path / "run")
    scorer_cbr.main([*tiny, "--dataset", "pairs", *flags, "--out_dir", run, "--steps", "1"])
    pictures = [str(tmp_path / "train.png"), str(tmp_path / "b.png")]
    caption_with = ["--caption", *pictures, "--checkpoint", f"{run}/best.pt", "--device", "cpu"]
    capsys.readouterr()
    scorer_cbr.main(caption_with)
    assert capsys.readouterr().out.count("\n") == 1
    timm_weights("test_resnet", tmp_path / "w.pt", seed=1)
    with pytest.raises(InputError, match=r"best.pt.*w.pt"):  # other weights of the same name
        scorer_cbr.main(caption_with)


def test_weights_are_known_by_their_content(tmp_path):
    write_own_pairs(tmp_path)
    file = tmp_path / "w.pt"
    extractor = f"timm/test_resnet:{file}"
    timm_weights("test_resnet", file)
    data.prepare("pairs", tmp_path, "cpu", extractor)
    trained = data.load("pairs", tmp_path, extractor=extractor).state()
    file.rename(tmp_path / "moved.pt")
    moved = data.load("pairs", tmp_path, extractor=f"timm/test_resnet:{tmp_path / 'moved.pt'}")
    moved.check_state(trained)  # the same weights
    timm_weights("test_resnet", file, seed=1)
    with pytest.raises(FileNotFoundError, match="--extractor timm/test_resnet:.*w.pt"):
        data.load("pairs", tmp_path, extractor=extractor)
    data.prepare("pairs", tmp_path, "cpu", extractor)
    other = data.load("pairs", tmp_path, extractor=extractor)
    with pytest.raises(InputError, match="--extractor"):
        other.check_state(trained)
