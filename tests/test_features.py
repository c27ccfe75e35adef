"""Pictures, extractors, feature files."""

import itertools
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from test_readers import write_picture

import data
import mini
import scorer_cbr


def test_bicubic_preprocessing_against_loop():
    """OpenCV's bicubic: half-pixel centres, a = -0.75, border repeated, no antialiasing, rounded to
    bytes."""
    image = Image.fromarray(
        np.random.default_rng(0).integers(0, 255, (300, 280, 3), dtype=np.uint8)
    )
    x, pixels = data.preprocess_resnet(image), np.array(image).astype(float)

    def weight(d, a=-0.75):
        d = abs(d)
        return (
            (a + 2) * d**3 - (a + 3) * d**2 + 1
            if d <= 1
            else a * (d**3 - 5 * d**2 + 8 * d - 4)
            if d < 2
            else 0.0
        )

    for row, col in ((0, 0), (100, 37), (223, 223)):
        y, z = (row + 0.5) * 300 / 224 - 0.5, (col + 0.5) * 280 / 224 - 0.5
        value = sum(
            weight(y - i) * weight(z - j) * pixels[np.clip(i, 0, 299), np.clip(j, 0, 279)]
            for i in range(int(np.floor(y)) - 1, int(np.floor(y)) + 3)
            for j in range(int(np.floor(z)) - 1, int(np.floor(z)) + 3)
        )
        byte = np.clip(np.round(value), 0, 255) / 255
        expected = (byte - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.224]
        np.testing.assert_allclose(
            x[:, row, col], expected, atol=0.02
        )  # a tie may round the other way: 1/255/.224


def test_resnet_extractor_has_the_papers_shape(tmp_path, monkeypatch):
    monkeypatch.setattr(
        torch.hub,
        "load_state_dict_from_url",
        lambda *a, **k: pytest.fail("nothing may be downloaded"),
    )
    state = random_resnet()
    Image.new("RGB", (30, 20), "red").save(tmp_path / "a.png")
    Image.new("P", (20, 20)).save(tmp_path / "b.gif")
    extractor = data.Extractor("resnet101-layer3", state)
    x = extractor([tmp_path / "a.png", tmp_path / "b.gif"])
    assert (
        x.shape == (2, 1024, 14, 14)
        and x.dtype == torch.float16
        and (x >= 0).all()
        and x.isfinite().all()
    )
    with pytest.raises(ValueError, match="unknown feature extractor"):
        data.Extractor("vgg")


def random_resnet(name="resnet101-layer3"):
    """Weights of the extractor's architecture, not trained."""
    from torchvision.models import resnet101

    torch.manual_seed(0)
    net = resnet101(
        weights=None, zero_init_residual=True
    )  # else 30 residual blocks pass float16's range
    layers = "conv1 bn1 relu maxpool layer1 layer2 layer3 layer4".split()[
        : 8 if "layer4" in name else 7
    ]
    return torch.nn.Sequential(*(getattr(net, layer) for layer in layers)).state_dict()


@pytest.mark.parametrize("name, side", [("resnet101-layer4", 224), ("resnet101-layer3-256", 256)])
def test_the_other_resnet_extractors(name, side, tmp_path):
    """torchvision's own preprocessing and layers; LEVIR-CC's 16 x 16 cells averaged to 14 x 14."""
    from torchvision.models import resnet101
    from torchvision.transforms import Compose, Normalize, Resize, ToTensor

    picture = Image.fromarray(
        np.random.default_rng(0).integers(0, 255, (300, 280, 3), dtype=np.uint8)
    )
    picture.save(tmp_path / "a.png")
    extractor = data.Extractor(name, random_resnet(name))
    x = Compose(
        [Resize((side, side)), ToTensor(), Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])]
    )(picture)
    torch.testing.assert_close(extractor.preprocess(picture), x)
    assert str(side) in extractor.preprocessing and ".225" in extractor.preprocessing
    net = resnet101().eval()
    parts = [
        getattr(net, part) for part in "conv1 bn1 relu maxpool layer1 layer2 layer3 layer4".split()
    ]
    trunk = torch.nn.Sequential(*parts[: 8 if side == 224 else 7])
    trunk.load_state_dict(extractor.state)
    with torch.no_grad():
        expected = trunk(x[None])
    expected = torch.nn.functional.adaptive_avg_pool2d(expected, 14) if side == 256 else expected
    assert expected.shape == ((1, 2048, 7, 7) if side == 224 else (1, 1024, 14, 14))
    torch.testing.assert_close(
        extractor([tmp_path / "a.png"]).float(), expected, atol=2e-3, rtol=2e-3
    )


def test_any_picture_is_read_by_its_content(tmp_path):
    """A name says nothing: a TIFF in .png, a GIF in .jpg; palette, grey of 8 and 16 bits,
    transparency, animation."""
    rgb = Image.fromarray(np.random.default_rng(0).integers(0, 255, (12, 16, 3), dtype=np.uint8))
    plain = np.array(rgb)
    rgb.save(tmp_path / "tiff.png", "TIFF")
    rgb.save(tmp_path / "no_suffix", "PNG")
    for name in ("tiff.png", "no_suffix"):
        assert np.array_equal(data.read_image(tmp_path / name), plain)
    rgb.convert("RGBA").save(tmp_path / "alpha.png")
    assert np.array_equal(data.read_image(tmp_path / "alpha.png"), plain)
    grey = np.arange(192, dtype=np.uint8).reshape(12, 16)
    Image.fromarray(grey).save(tmp_path / "grey.png")
    Image.fromarray(grey.astype(np.uint16) * 256 + 255).save(tmp_path / "grey16.png")
    Image.fromarray(grey.astype(np.uint16) * 256).save(tmp_path / "grey16.tif")
    for name in ("grey.png", "grey16.png", "grey16.tif"):
        assert np.array_equal(data.read_image(tmp_path / name), np.stack([grey] * 3, -1)), name
    frames = [Image.new("P", (16, 12), n) for n in (1, 2)]
    for frame in frames:
        frame.putpalette([0, 0, 0, 250, 10, 20, 5, 5, 5])
    frames[0].save(tmp_path / "moving.jpg", "GIF", save_all=True, append_images=frames[1:])
    with Image.open(tmp_path / "moving.jpg") as im:
        assert im.n_frames == 2
    assert (np.array(data.read_image(tmp_path / "moving.jpg")) == [250, 10, 20]).all()


@pytest.mark.parametrize("form", ["PNG", "JPEG", "GIF", "TIFF", "BMP"])
def test_a_truncated_picture_is_named(form, tmp_path):
    path = tmp_path / "cut.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (12, 16, 3), dtype=np.uint8)).save(
        path, form
    )
    whole = path.read_bytes()
    for length in (0, 3, 20, len(whole) // 2, len(whole) * 4 // 5):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match="cut.png is not a readable image"):
            data.read_image(path)


def test_pictures_are_turned_upright(tmp_path):
    """EXIF's orientation 6: the first row of the file is the right side of the picture."""
    pixels = np.zeros((12, 16, 3), np.uint8)
    pixels[0] = 255
    exif = Image.Exif()
    exif[0x0112] = 6
    for name in ("a.png", "a.jpg"):
        Image.fromarray(pixels).save(tmp_path / name, exif=exif, quality=95)
        upright = np.array(data.read_image(tmp_path / name))
        assert upright.shape == (16, 12, 3)
        assert upright[:, -1].min() > 200 and upright[:, 0].max() < 60
        with Image.open(tmp_path / name) as picture:  # from Python
            assert np.array_equal(data.read_image(picture), upright)


def test_pictures_decoded_ahead_stay_in_order(tmp_path):
    for i in range(7):
        Image.new("RGB", (64, 64), (i * 30, 0, 0)).save(tmp_path / f"{i}.png")
    paths = [tmp_path / f"{i}.png" for i in range(7)]
    torch.manual_seed(0)
    extractor = data.Extractor("mini-cnn-x", mini.FeatureNet().state_dict())
    blocks = list(extractor.blocks(paths, 3))
    assert [len(block) for block in blocks] == [3, 3, 1]
    each = torch.cat([extractor([path]) for path in paths])
    torch.testing.assert_close(torch.cat(blocks), each, atol=1e-3, rtol=1e-2)
    began, decode, net, ahead = [], extractor.preprocess, extractor.net, threading.Event()

    def preprocess(image):
        began.append(1)
        if len(began) > 3:
            ahead.set()
        return decode(image)

    def slow(x):
        assert ahead.wait(
            10
        )  # the second block is being decoded before the network is done with the first
        return net(x)

    extractor.preprocess, extractor.net = preprocess, slow
    torch.testing.assert_close(torch.cat(list(extractor.blocks(paths, 3))), torch.cat(blocks))
    paths[5].write_bytes(b"")
    with pytest.raises(ValueError, match="5.png is not a readable image"):
        list(extractor.blocks(paths, 3))


class Quick:
    """An extractor without a network: the mean colour, on as many cells as the layer has."""

    read = 0

    def __init__(self, name, weights, device):
        self.name, self.preprocessing = name, "mean colour"
        self.grid = (4 if "layer4" in name else 3, 2, 3)

    def blocks(self, paths, batch):
        for i in range(0, len(paths), 10):
            means = [np.array(data.read_image(p)).mean() for p in paths[i : i + 10]]
            Quick.read += len(means)
            yield torch.tensor(means)[:, None, None, None].expand(-1, *self.grid).half()


class Stopped(Quick):
    def blocks(self, paths, batch):
        yield from itertools.islice(super().blocks(paths, batch), 2)
        raise KeyboardInterrupt


def test_preparation_once_whole(release, monkeypatch, capsys):
    monkeypatch.setattr(data, "Extractor", Stopped)
    call = ["clevr_change", "--data_dir", str(release), "--device", "cpu"]
    there = {*release.iterdir()}
    with pytest.raises(KeyboardInterrupt):
        data.main(call)
    assert left(release) == there  # neither half a file nor a whole one
    (release / "features.h5.partial").write_bytes(b"of a process that was killed")
    monkeypatch.setattr(data, "Extractor", Quick)
    monkeypatch.setattr(Quick, "read", 0)
    data.main(call)
    assert left(release) == there | {release / "features.h5", release / "vocab.json"}
    dataset = data.load("clevr_change", release)
    for name, x in zip(dataset.paths, dataset.features.rows(list(dataset.paths)), strict=True):
        assert x[0, 0, 0].item() == pytest.approx(
            np.array(data.read_image(dataset.paths[name])).mean(), rel=1e-3
        )
    data.main(call)
    assert Quick.read == 45 and "features.h5 is there already" in capsys.readouterr().out


def left(folder):
    """What lies in a folder, but for the lock."""
    return {path for path in folder.iterdir() if path.name != ".lock"}


def test_a_complete_folder_is_not_locked(release, monkeypatch, capsys):
    monkeypatch.setattr(data, "Extractor", Quick)
    data.main(["clevr_change", "--data_dir", str(release), "--device", "cpu"])

    def no_lock(folder):
        raise AssertionError("a complete folder may be read-only")

    monkeypatch.setattr(data, "lock", no_lock)
    data.main(["clevr_change", "--data_dir", str(release), "--device", "cpu"])
    assert "features.h5 is there already" in capsys.readouterr().out


def test_a_second_process_waits_and_looks_again(release, monkeypatch, capsys):
    """While one prepares, another waits, says so, and then finds nothing left to do."""
    started = threading.Event()

    class Slow(Quick):
        def blocks(self, paths, batch):
            started.set()
            waiting.wait(20)
            yield from super().blocks(paths, batch)

    waiting = threading.Event()
    acquire = data.FileLock.acquire

    def acquire_and_tell(self, *args, **kwargs):
        if started.is_set() and "timeout" not in kwargs:  # the second time of the second process
            waiting.set()
        return acquire(self, *args, **kwargs)

    monkeypatch.setattr(data, "Extractor", Slow)
    monkeypatch.setattr(data.FileLock, "acquire", acquire_and_tell)
    monkeypatch.setattr(Quick, "read", 0)
    first = threading.Thread(target=data.prepare, args=("clevr_change", release, "cpu"))
    first.start()
    assert started.wait(20)
    data.prepare("clevr_change", release, "cpu")
    first.join()
    assert Quick.read == 45
    assert f"another process is at work in {release}; waiting for it" in capsys.readouterr().out


def test_pictures_beside_the_file_of_pairs(tmp_path, monkeypatch):
    """From inside the folder: a relative path without a parent."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(data, "Extractor", Quick)
    lines = [
        "before,after,captions,split",
        *(f"{split}.png,b.png,it opened,{split}" for split in data.SPLITS),
    ]
    Path("pairs.csv").write_text("\n".join(lines))
    for name in (*data.SPLITS, "b"):
        write_picture(tmp_path / f"{name}.png")
    data.main(["pairs", "--data_dir", ".", "--device", "cpu"])
    assert data.load("pairs", ".").lengths == [4]


def test_a_killed_extraction_leaves_no_features(tmp_path):
    code = """
import itertools, sys, numpy, data; from pathlib import Path
def blocks():
    for n in itertools.count():
        print(n, flush=True)
        yield numpy.zeros((3, 64, 8, 8))
data.write_features(Path(sys.argv[1]), [str(i) for i in range(30000)], blocks(), "e", "p")
"""
    call, path = [sys.executable, "-c", code, str(tmp_path / "f.h5")], Path(data.__file__).parent
    with subprocess.Popen(call, stdout=subprocess.PIPE, text=True, cwd=path) as process:
        for _ in range(40):
            assert process.stdout.readline()
        process.kill()
    assert process.returncode == -signal.SIGKILL and not (tmp_path / "f.h5").exists()


def test_each_extractor_has_a_file_of_its_own(release, monkeypatch, tiny, capsys):
    monkeypatch.setattr(data, "Extractor", Quick)
    call = ["clevr_change", "--data_dir", str(release), "--device", "cpu"]
    data.main(call)
    data.main([*call, "--extractor", "resnet101-layer4"])
    assert {p.name for p in release.glob("*.h5")} == {"features.h5", "features-resnet101-layer4.h5"}
    assert data.load("clevr_change", release).grid == (3, 2, 3)
    assert data.load("clevr_change", release, extractor="resnet101-layer4").grid == (4, 2, 3)
    assert data.load("clevr_change", release, extractor="resnet101-layer3").grid == (
        3,
        2,
        3,
    )  # the data set's own
    flags = [*tiny, "--data_dir", str(release), "--extractor", "resnet101-layer4"]
    cfg, _ = scorer_cbr.parse_args(
        scorer_cbr.Config, scorer_cbr.PRESETS, "scorer_cbr", "doc", flags
    )
    assert data.open_dataset(cfg).features.extractor == "resnet101-layer4"


# ---- backbones of timm ---------------------------------------------------------------------------


def timm_weights(model, path):
    """A timm model with random weights, written to a file. -> the model"""
    torch.manual_seed(0)
    net = timm.create_model(model).eval()
    torch.save(net.state_dict(), path)
    return net


@pytest.mark.parametrize("model", ["test_resnet", "test_convnext", "test_vit"])
def test_the_last_map_of_any_timm_model(model, tmp_path):
    """With a file's weights, of the whole picture, with the model's own mean and deviation."""
    net = timm_weights(model, tmp_path / "w.pt")
    extractor = data.Extractor(f"timm/{model}:{tmp_path / 'w.pt'}")
    pixels = np.zeros((120, 200, 3), np.uint8)
    pixels[:, :2] = 255  # at the border, which a centre crop would cut off
    picture = Image.fromarray(pixels)
    x = extractor.preprocess(picture)
    assert x.shape == (3, 224, 224)
    assert x[:, :, 0].mean() > x[:, :, 20:].mean() + 0.5
    mean = torch.tensor(net.default_cfg["mean"])
    std = torch.tensor(net.default_cfg["std"])
    torch.testing.assert_close(x[:, 112, 112], -mean / std)
    grid = extractor([picture]).float()
    assert grid.shape[0] == 1 and grid.shape[1] == net.num_features
    if model != "test_vit":  # whose own size is another
        with torch.no_grad():
            expected = net.forward_features(x[None])
        torch.testing.assert_close(grid, expected, atol=5e-3, rtol=5e-3)
    other = data.Extractor(f"timm/{model}:{tmp_path / 'w.pt'}")
    assert torch.equal(other([picture]), extractor([picture]))


def test_timm_models_that_are_none(tmp_path):
    timm_weights("test_resnet", tmp_path / "w.pt")
    for name, message in (
        ("timm/no_such_net", "--extractor timm/no_such_net: timm has no such model"),
        (f"timm/test_convnext:{tmp_path / 'w.pt'}", "w.pt cannot be used .*give weights of test_"),
        (f"timm/test_resnet:{tmp_path / 'none.pt'}", "none.pt cannot be used"),
    ):
        with pytest.raises(ValueError, match=message):
            data.Extractor(name)


def test_a_timm_backbone_through_preparation_training_and_captioning(tmp_path, tiny, capsys):
    rows = [f"{split}.png,b.png,it opened,{split}" for split in data.SPLITS]
    (tmp_path / "pairs.csv").write_text("\n".join(["before,after,captions,split", *rows]))
    for name in (*data.SPLITS, "b"):
        write_picture(tmp_path / f"{name}.png")
    timm_weights("test_resnet", tmp_path / "w.pt")
    extractor = f"timm/test_resnet:{tmp_path / 'w.pt'}"
    flags = ["--data_dir", str(tmp_path), "--extractor", extractor]
    data.main(["pairs", *flags, "--device", "cpu"])
    assert len(list(tmp_path.glob("features-timm-test_resnet-*.h5"))) == 1
    run = str(tmp_path / "run")
    scorer_cbr.main([*tiny, "--dataset", "pairs", *flags, "--out_dir", run, "--steps", "1"])
    pictures = [str(tmp_path / "train.png"), str(tmp_path / "b.png")]
    capsys.readouterr()
    scorer_cbr.main(["--caption", *pictures, "--checkpoint", f"{run}/best.pt", "--device", "cpu"])
    assert capsys.readouterr().out.count("\n") == 1
    (tmp_path / "w.pt").unlink()  # captioning needs the weights to be there again
    with pytest.raises(ValueError, match=r"w.pt cannot be used"):
        scorer_cbr.load(f"{run}/best.pt", device="cpu")
