"""The authors' own code beside ours. Not a test: it needs git and a clone of their repository.

    git clone https://github.com/tuyunbin/SCORER && git -C SCORER checkout 2525039
    git clone https://github.com/tuyunbin/DIRL && git -C DIRL checkout c2955e6
    git clone https://github.com/yaolinli/IDC && git -C IDC checkout 6f3aabf

    python tools/authors.py compare SCORER --seed 7    theirs with ours, --variant released
    python tools/authors.py record SCORER              make their part of tests/released.json
    python tools/authors.py train SCORER --seed 1 --steps 3600 --out_dir runs/theirs

`compare` gives both the same random weights and inputs, in float64 and without dropout. It prints
how much they deviate, and exits with 1 if this is more than rounding. Their modules have the sizes
of their configuration, so ours must have them, too. Ten steps are those of our `train` and of their
optimiser, but IDC's are of Adam on the sum of its losses.

`train` trains their modules on mini, for SCORER and DIRL, with the options of our scripts. Loader,
schedule, clipping, loss weights and selection are ours; modules, initial weights, losses and greedy
decoding are theirs. A run writes what ours write. On mini, `compare` has these modules, too.

Their files run from the clone, which stays as it is. In memory, this is changed:
- `.cuda()` does nothing, so that a CPU will do. In compare, `.float()` gives float64.
- On mini, their sizes, learning rate and loss weights become ours, also where they are fixed in the
  text of a module (see Theirs).
- IDC: our code chooses which words and cells both sides mask. [MASK] and [CLS], which our head
  lacks, and in decoding UNK, have no chance as outputs. Our LayerNorms compute what theirs do. The
  temperature of FDA is 0.01, because at 1, theirs, the loss is near ln 7 whatever the model does.
"""

import argparse
import contextlib
import dataclasses
import io
import json
import math
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import patch

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import released

import data
import dirl_ccr
import idc_pretrain
import scorer_cbr
from common import END, NULL, START, UNK, InputError, is_word, learning_rate, masked_mean
from support.files import run_main, write_text
from support.run import preset

ROUNDING = 1e-8  # `compare` accepts deviations up to this
STEPS = 10  # of Adam, in `compare`
MINI = (67, (128, 8, 8), 20)  # words, grid, ids of a caption

# ---- their code ----------------------------------------------------------------------------------

# Method -> repository, commit, a file that only this repository has
REPOSITORIES = {
    "SCORER": ("tuyunbin/SCORER", "2525039", "models/SCORER.py"),
    "DIRL": ("tuyunbin/DIRL", "c2955e6", "models/DIRL.py"),
    "IDC": ("yaolinli/IDC", "6f3aabf", "clver/modules_pretrain.py"),
}


def how_to_clone(method: str) -> str:
    repository, commit, _ = REPOSITORIES[method]
    return f"git clone https://github.com/{repository} && git -C {method} checkout {commit}"


def method_of(clone: Path) -> str:
    """The method whose code is in a folder. InputError if there is none, or not this commit's."""
    for method, (_, commit, file) in REPOSITORIES.items():
        if (clone / file).exists():
            call = ["git", "-C", str(clone), "diff", "--quiet", commit, "--"]
            call += ["*.py", "*.yaml", ":(glob)**/config/*.json"]
            if subprocess.run(call, capture_output=True).returncode == 0:
                return method
            raise InputError(f"{clone} is not as in commit {commit}; {how_to_clone(method)}")
    commands = " or ".join(map(how_to_clone, REPOSITORIES))
    raise InputError(f"{clone} is no clone of the authors' code; {commands}")


def load_file(file: Path, numbers: dict | None = None) -> ModuleType:
    """A file of the clone as a module. numbers: what stands in its text -> what replaces it."""
    text = file.read_text(encoding="utf-8")
    for old, new in (numbers or {}).items():
        text = re.sub(rf"\b{re.escape(old)}\b", str(new), text)
    module = ModuleType(file.stem)
    exec(compile(text, str(file), "exec"), module.__dict__)
    return module


def stay_on_cpu() -> None:
    """In this process, `.cuda()` does nothing."""
    torch.Tensor.cuda = lambda x, *args, **kwargs: x
    nn.Module.cuda = lambda module, *args, **kwargs: module


def cut(ids: Tensor) -> Tensor:
    """ids (B, L) -> the same with NULL from the first END or NULL on, where their texts end."""
    ended = ((ids == END) | (ids == NULL)).cumsum(1) > 0
    return ids.masked_fill(ended, NULL)


class Theirs(nn.Module):
    """SCORER's or DIRL's modules, with the methods that our `train` and `evaluate` call."""

    rows = {}  # as in TheirIDC
    writes = True
    batches = 2  # of a step: changed pairs, and distractor pairs

    def __init__(self, clone: Path, cfg, vocab_size: int, grid: tuple, max_len: int):
        super().__init__()
        assert grid[1] == grid[2], "their position embeddings are for square grids"
        stay_on_cpu()
        self.clone = clone
        self.cfg = cfg
        self.sizes = (vocab_size, grid, max_len)
        self.on_mini = cfg.dataset == "mini"
        self.numbers = {}  # what stands in the text of their modules -> our number
        if self.on_mini:  # rows and columns, width, heads of CBR, dropout
            self.numbers = {"14": grid[1], "512": cfg.dim, "num_heads=8": f"num_heads={cfg.heads}"}
            self.numbers["0.1"] = cfg.dropout
        self.make()

    def load(self, name: str) -> ModuleType:
        return load_file(self.clone / "models" / name, self.numbers)

    def configure(self, yaml: str) -> None:
        """Their configuration; on mini, with our sizes and learning rate."""
        sys.modules["utils.attr_dict"] = load_file(self.clone / "utils/attr_dict.py")
        config = load_file(self.clone / "configs/config_transformer.py")
        config.merge_cfg_from_file(self.clone / "configs/dynamic" / yaml)
        self.config = config.cfg
        if not self.on_mini:
            return
        encoder = self.config.model.transformer_encoder
        decoder = self.config.model.transformer_decoder
        for part in (encoder, decoder):
            part.att_dim = self.cfg.dim
            part.att_head = self.cfg.heads
        decoder.vocab_size, grid, decoder.seq_length = self.sizes
        encoder.feat_dim = grid[0] + 2 * self.cfg.use_coords
        encoder.emb_dim = self.cfg.dim
        encoder.att_layer = self.cfg.layers
        decoder.att_layer = self.cfg.decoder_layers
        decoder.word_dim = self.cfg.word_dim
        self.config.train.optim.lr = self.cfg.lr

    def detect(self, before: Tensor, after: Tensor) -> tuple:
        if self.cfg.use_coords:
            return self.detector(self.add_coords(before), self.add_coords(after))
        return self.detector(before, after)

    def labels(self, caption: Tensor) -> tuple[Tensor, Tensor]:
        """What their loaders give with caption (B, L): next words, -1 for padding; a mask, 1 at
        START, words and END."""
        following = F.pad(caption[:, 1:], (0, 1))
        return following.masked_fill(following == NULL, -1), (caption != NULL).float()

    @torch.no_grad()
    def generate(self, before: Tensor, after: Tensor) -> Tensor:
        differences = self.detect(before, after)[: self.n_differences]
        ids, _ = self.speaker.sample(*differences, sample_max=1)
        return cut(ids)

    @torch.no_grad()
    def attention_map(self, before: Tensor, after: Tensor, ids: Tensor) -> dict[str, Tensor]:
        """Their last layer's attention, averaged as in our files."""
        self(before, after, ids)
        over_cells = masked_mean(self.weight[:, :-1], is_word(ids[:, 1:]))
        return {"attention": over_cells.unflatten(1, before.shape[2:])}

    # for `compare` and `record`

    def losses(self, x: dict[str, Tensor]) -> dict[str, Tensor]:
        return self(x["before"], x["after"], x["caption"])

    def our_losses(self, ours: nn.Module, x: dict[str, Tensor]) -> dict[str, Tensor]:
        return ours(x["before"], x["after"], x["caption"])

    def total(self, losses: dict[str, Tensor]) -> Tensor:
        """The expression in their training script; on mini, ours."""
        if self.on_mini:
            return self.method.total_loss(losses, self.cfg)
        text = (self.clone / self.script).read_text(encoding="utf-8")
        values = {theirs: losses[name] for name, theirs in self.loss_names.items()}
        return eval(re.search("total_loss = (.*)", text)[1], values)

    def our_steps(self, ours: nn.Module, steps: list[list[dict]]) -> None:
        """Our `train`, with these inputs: for each step those of its two batches."""
        batches = []
        for inputs in steps:
            both = [data.Batch(x["before"], x["after"], x["caption"], [], []) for x in inputs]
            batches.append(tuple(both))
        # Mini's schedule and clipping are not in their code.
        cfg = dataclasses.replace(self.cfg, steps=STEPS, schedule="step", warmup=0, grad_clip=0)
        with (
            tempfile.TemporaryDirectory() as folder,
            contextlib.redirect_stdout(io.StringIO()),
            patch.object(self.method, self.Ours.__name__, lambda *_: ours),
        ):
            cfg.out_dir = f"{folder}/run"
            self.method.train(cfg, GivenBatches(self.sizes, batches))

    def optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return load_file(self.clone / "utils/utils.py").build_optimizer(parameters, self.config)

    def rates(self) -> tuple[list[float], list[float]]:
        """Learning rates of all steps, ours and theirs."""
        # Batches of 128. Their scripts count them in the data, which we take from the papers.
        epoch = {"clevr_change": 265, "clevr_dc": 319}[self.cfg.dataset]
        optimizer = self.optimizer([nn.Parameter(torch.zeros(1))])
        optim = self.config.train.optim
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, optim.step_size, optim.gamma)
        theirs = []
        for step in range(self.config.train.max_iter):
            optimizer.step()  # without a gradient; if there is no step, the schedule warns
            theirs.append(schedule.get_last_lr()[0])
            if (step + 1) % epoch == 0:
                schedule.step()
        return [learning_rate(self.cfg, step) for step in range(self.cfg.steps)], theirs


class TheirSCORER(Theirs):
    method = scorer_cbr
    Ours = scorer_cbr.SCORER
    datasets = ("clevr_change",)
    n_differences = 1  # of what the detector returns, so much goes to the speaker
    script = "train.py"
    loss_names = {"caption": "speaker_loss", "match": "sim_loss", "cbr": "cycle_loss"}

    def make(self) -> None:
        self.maps = released.scorer_names(self.cfg.layers)
        self.configure("transformer.yaml")
        encoder = self.load("SCORER.py")
        cbr = self.load("CBR.py")
        self.add_coords = encoder.AddSpatialInfo()
        self.detector = encoder.ChangeDetector(self.config)
        self.speaker = self.load("transformer_decoder.py").Speaker(self.config)
        self.cbr = cbr.CBR(self.config).requires_grad_(False)  # not in their optimiser
        self.nce = cbr.CrossEn()
        # Their module returns scores. The weights of attention are what its dropout gets.
        dropout = self.speaker.core.layer[-1].dec_enc_attention.dropout
        dropout.register_forward_pre_hook(self.keep_weight)

    def keep_weight(self, module: nn.Module, args: tuple) -> None:
        self.weight = args[0].detach().mean(1)  # (B, L, N)

    def forward(self, before: Tensor, after: Tensor, caption: Tensor) -> dict[str, Tensor]:
        following, mask = self.labels(caption)
        difference, bef_to_aft, aft_to_bef, x_bef, x_aft = self.detect(before, after)
        loss, _, scores, hidden = self.speaker._forward(difference, caption, mask, following)
        match = (self.nce(bef_to_aft) + self.nce(aft_to_bef)) / 2
        cbr = self.cbr(x_bef, hidden, x_aft, mask)
        self.seen = {"x_bef": x_bef.abs().sum(), "difference": difference.abs().sum()}
        self.seen |= {"bef_to_aft": bef_to_aft[0], "aft_to_bef": aft_to_bef[0]}
        self.seen["scores"] = scores[0, 0, :3]
        return {"caption": loss, "match": match, "cbr": cbr}

    def clamp_scales(self) -> None:
        """What their script does after each step."""
        for scale in (self.detector.scorer[-1].attention.logit_scale, self.cbr.contra.logit_scale):
            scale.data.clamp_(max=torch.tensor(100.0).log().item())


class TheirDIRL(Theirs):
    """On mini, it has the decoder of CLEVR-DC's code, as our --variant released has."""

    method = dirl_ccr
    Ours = dirl_ccr.DIRL
    datasets = ("clevr_change", "clevr_dc")
    n_differences = 2
    loss_names = {"caption": "speaker_loss", "dirl": "dirl_loss", "ccr": "ccr_loss"}

    def make(self) -> None:
        of_dc = self.cfg.input_norm
        self.configure("transformer_dc.yaml" if of_dc else "transformer_clevr_change.yaml")
        encoder = self.config.model.transformer_encoder
        self.maps = released.dirl_names(self.sizes[0], encoder.feat_dim, of_dc)
        self.script = "train.py" if of_dc else "train_clevr_change.py"
        encoder = self.load("DIRL.py")
        self.add_coords = encoder.AddSpatialInfo()
        self.detector = encoder.DIRL(self.config)
        self.speaker = self.load("CCR.py" if of_dc else "CCR_no_init.py").CCR(self.config)

    def forward(self, before: Tensor, after: Tensor, caption: Tensor) -> dict[str, Tensor]:
        following, mask = self.labels(caption)
        bef, aft, dirl = self.detect(before, after)
        loss, weight, ccr = self.speaker._forward(bef, aft, caption, mask, following)
        self.weight = weight.detach()
        self.seen = {"before": bef.abs().sum(), "after": aft.abs().sum(), "map": weight[0, 0, :3]}
        return {"caption": loss, "dirl": dirl, "ccr": ccr}


class TheirIDC(nn.Module):
    """IDC's modules of a stage, "pretrain" or "finetune"."""

    method = idc_pretrain
    maps = released.idc_names()
    on_mini = False
    batches = 1  # both sorts of pairs
    sizes = (76, (2048, 7, 7), 40)
    seen = {}
    # Our ids NULL, UNK, START, END, the words, [MASK], [CLS] -> theirs.
    numbers = torch.tensor([0, 3, 1, 2, *range(6, 78), 5, 4])
    # Their parameter -> its rows that we have, in our order. The six types are those of [IMG1],
    # [IMG2], [CLS], both images and the text.
    rows = {
        "word_embedding.weight": numbers,
        "output_layer.weight": numbers[:76],
        "output_layer.bias": numbers[:76],
        "position_encoding.type_pe.weight": torch.tensor([1, 3, 5, 2, 4, 6]),
    }

    def __init__(self, clone: Path, cfg, stage: str):
        super().__init__()
        stay_on_cpu()
        self.clone = clone
        self.cfg = cfg
        self.stage = stage
        self.writes = stage == "finetune"
        file = clone / f"clver/config/{stage}_clver.json"
        self.config = SimpleNamespace(**json.loads(file.read_text(encoding="utf-8")))
        options = {
            "n_hidden": self.config.n_embs,
            "ff_dim": self.config.dim_ff,
            "img_enc_block": 1,  # their default
            "vocab_size": 78,
            "CLS": 4,
        }
        for name in ("img_embs", "n_head", "n_block", "dropout", "max_len"):
            options[name] = getattr(self.config, name)
        if stage == "pretrain":
            options |= {"tasks": [], "tmp": cfg.tau_fda}
        self.model = load_file(clone / f"clver/modules_{stage}.py").Model(**options)
        self.model.output_layer.bias.data[[4, 5]] = -1e9

    def Ours(self, cfg, *sizes) -> nn.Module:
        ours = idc_pretrain.IDC(cfg, *sizes)
        for module in ours.modules():
            if isinstance(module, nn.LayerNorm):
                module.__class__ = released.ReleasedNorm
        return ours

    def images(self, before: Tensor, after: Tensor) -> dict[str, Tensor]:
        return {"img1": before.flatten(2).mT, "img2": after.flatten(2).mT}

    def forward(self, x: dict[str, Tensor]) -> dict[str, Tensor]:
        """x as released.idc_inputs has it -> the losses of the stage."""
        batch = self.images(x["before"], x["after"])
        batch["cap"] = self.numbers[x["ids"]]
        batch["cap_label"] = self.numbers[x["target"]].masked_fill(x["target"] == NULL, -1)
        if self.stage == "finetune":
            words, judge = self.model(batch | {"diff_label": x["changed"].long()})
            return {"caption": words.sum(), "judge": judge.sum()}
        mlm, _ = self.model(batch, "mlm")
        captions = torch.cat([x["caption"][:, None], x["rewritten"]], 1)
        fda, _ = self.model(batch | {"caps": self.numbers[captions]}, "fda")
        batch["cap"] = self.numbers[x["caption"]]
        batch["img_label"] = torch.cat([batch["img1"], batch["img2"]], 1)  # (B, 2N, C)
        batch["img_mask"] = torch.zeros(batch["img_label"].shape[:2], dtype=torch.bool)
        batch["img_mask"].view(-1)[x["places"]] = True
        shown = batch["img_label"].masked_fill(batch["img_mask"][..., None], 0)
        batch["img1"], batch["img2"] = shown.chunk(2, 1)
        mvcl, _ = self.model(batch, "mvm_contrst")
        return {"mlm": mlm.mean(), "mvcl": mvcl.mean(), "fda": fda}

    @torch.no_grad()
    def generate(self, before: Tensor, after: Tensor) -> Tensor:
        head = self.model.output_layer
        unk = self.numbers[UNK]
        hook = head.register_forward_hook(lambda _, args, y: y.index_fill(-1, unk, -1e9))
        ids = self.model.greedy(*self.images(before, after).values())
        hook.remove()
        return cut(self.numbers.argsort()[ids])

    def losses(self, x: dict[str, Tensor]) -> dict[str, Tensor]:
        return self(x)

    def our_losses(self, ours: nn.Module, x: dict[str, Tensor]) -> dict[str, Tensor]:
        return released.idc_losses(ours, x, self.stage)

    def total(self, losses: dict[str, Tensor]) -> Tensor:
        return sum(losses.values())

    def our_steps(self, ours: nn.Module, steps: list[list[dict]]) -> None:
        """Our `train` draws a task for each step, and masks. So these are steps of Adam alone."""
        decay = self.cfg.weight_decay
        optimizer = torch.optim.Adam(ours.parameters(), self.config.lr, weight_decay=decay)
        for inputs in steps:
            optimizer.zero_grad()
            self.total(self.our_losses(ours, *inputs)).backward()
            optimizer.step()

    def optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        decay = self.config.weight_decay
        return torch.optim.Adam(parameters, self.config.lr, weight_decay=decay)

    def rates(self) -> tuple[list[float], list[float]]:
        # Their file parses a command line as it is loaded.
        sys.modules["para"] = SimpleNamespace(parse_args=lambda: SimpleNamespace(seed=0))
        rate = load_file(self.clone / "clver/utils.py").get_lr_sched
        first = self.stage == "pretrain"
        steps = self.cfg.pretrain_steps if first else self.cfg.steps
        ours = [idc_pretrain.released_rate(self.cfg, self.stage, step) for step in range(steps)]
        steps = range(self.config.total_train_steps)
        return ours, [rate(step, self.config, pretrain=first) for step in steps]


class GivenBatches:
    """What our `train` reads of a data set: batches, and no pairs for validation."""

    def __init__(self, sizes: tuple, batches: list[tuple]):
        words, self.grid, self.max_len = sizes
        self.vocab = range(words)
        self.batches = batches

    def train_batches(self, *_) -> list[tuple]:
        return self.batches

    def eval_batches(self, *_) -> tuple:
        return ()

    def results(self, *_, **__) -> dict:
        return {}

    def state(self) -> dict:
        return {}


def released_cases(method: str, clone: Path) -> Iterator[tuple[str, nn.Module]]:
    """A method's data sets with released code or, for IDC, its stages, and their modules."""
    if method == "IDC":
        cfg = released_config(idc_pretrain, "clevr_change")
        cfg.tau_fda = 0.01
        for stage in ("pretrain", "finetune"):
            yield stage, TheirIDC(clone, cfg, stage).eval()
        return
    Their = {"SCORER": TheirSCORER, "DIRL": TheirDIRL}[method]
    for dataset in Their.datasets:
        words, length, _ = released.SIZES[dataset]
        cfg = released_config(Their.method, dataset)
        yield dataset, Their(clone, cfg, words, (1024, 14, 14), length).eval()


def mini_cases(method: str, clone: Path) -> Iterator[tuple[str, nn.Module]]:
    """What `train` trains."""
    if method != "IDC":
        Their = {"SCORER": TheirSCORER, "DIRL": TheirDIRL}[method]
        yield "mini", Their(clone, released_config(Their.method, "mini"), *MINI).eval()


def released_config(file: ModuleType, dataset: str):
    """The Config of a method's --variant released."""
    cfg = preset(file.Config, file.PRESETS, file.RELEASED, dataset, "released")
    cfg.device = "cpu"
    return cfg


# Their parameters that nothing reads, or that our model has only in another stage
LEFT_OUT = ("detector.scorer.0.attention.logit_scale", "model.pooler.0.weight")


def named(theirs: nn.Module) -> dict[str, tuple[Tensor, object]]:
    """Their names, as in released.py, of the parameters that we have -> the parameter, its rows."""
    names = released.merged(theirs.maps)
    found = {}
    for full_name, p in theirs.named_parameters():
        _, _, name = full_name.partition(".")  # without our name of their module
        target, shape = names[name]
        if target and (theirs.on_mini or p.shape[1:] == shape[1:]):
            found[name] = (p, theirs.rows.get(name, ...))
        else:
            assert full_name in LEFT_OUT, full_name
    return found


# ---- compare -------------------------------------------------------------------------------------


def random_inputs(words: int, grid: tuple[int, int, int], length: int) -> dict[str, Tensor]:
    """Three pairs, and what else released.idc_inputs has."""
    _, height, width = grid
    channels = torch.rand(2, 3, grid[0], 1, 1)  # so that images differ in all their cells
    before, after = channels * torch.rand(2, 3, *grid)
    caption = torch.randint(END + 1, words, (3, 7, length))  # each pair's, then its rewrites
    for of_pair in caption:
        end = int(torch.randint(5, length, ()))
        of_pair[:, 0] = START
        of_pair[:, end] = END
        of_pair[:, end + 1 :] = NULL
    ids, target = idc_pretrain.released_mask_words(caption[:, 0], words, 0.15)
    x = {"before": before, "after": after, "caption": caption[:, 0], "rewritten": caption[:, 1:]}
    x |= {"ids": ids, "target": target, "changed": torch.tensor([True, False, True])}
    return x | {"places": idc_pretrain.mask_cells(3, 2, height * width, 0.15, "cpu")}


def deviation(ours: Tensor, theirs: Tensor, least: float = 1e-300) -> float:
    """The norm of the difference, divided by that of theirs or, if this is larger, by `least`.
    Infinite if there is none, because shapes differ or a number is not finite."""
    if ours.shape != theirs.shape:
        return math.inf
    value = ((ours - theirs).norm() / theirs.norm().clamp(min=least)).item()
    return value if math.isfinite(value) else math.inf


class Both:
    """Our model and theirs."""

    def __init__(self, theirs: nn.Module):
        self.theirs = theirs
        self.ours = theirs.Ours(theirs.cfg, *theirs.sizes).eval()
        self.names = released.merged(theirs.maps)
        self.of_ours = dict(self.ours.named_parameters())
        self.of_theirs = named(theirs)

    def values(self, read: Callable[[Tensor], Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
        """What `read` reads of each parameter: its name in their code -> ours, theirs."""
        result = {}
        for name, (p, rows) in self.of_theirs.items():
            parts = released.parts_of(name, self.names)
            ours = torch.cat([read(self.of_ours[part]).flatten() for part in parts])
            result[name] = (ours, read(p)[rows].flatten())
        return result

    def draw_weights(self) -> None:
        """Random weights, the same in both."""
        for p in self.ours.parameters():
            noise = torch.randn_like(p)
            if p.ndim > 1:
                p.data = noise * (p.numel() / p.shape[0]) ** -0.5
            else:
                p.data += 0.1 * noise
        self.copy_weights()

    def copy_weights(self) -> None:
        """Our weights into theirs."""
        for name, (value, _) in self.values(lambda p: p.data).items():
            p, rows = self.of_theirs[name]
            p.data[rows] = value.view_as(p.data[rows])

    def compare_losses(self) -> Iterator[tuple[str, float]]:
        """Each loss, and its gradients in all parameters, also in those that are not trained."""
        trained = [p for model in (self.ours, self.theirs) for p in model.parameters()]
        trained = [p for p in trained if p.requires_grad]
        self.ours.requires_grad_(True)
        self.theirs.requires_grad_(True)
        x = random_inputs(*self.theirs.sizes)
        our_losses = self.theirs.our_losses(self.ours, x)
        for name, loss in self.theirs.losses(x).items():
            yield f"loss {name}", deviation(our_losses[name], loss)
            for model, loss_of in ((self.ours, our_losses[name]), (self.theirs, loss)):
                model.zero_grad()
                loss_of.backward(retain_graph=True)
            gradients = self.values(lambda p: torch.zeros_like(p) if p.grad is None else p.grad)
            # Where a gradient should be 0, both are rounding.
            least = 1e-6 * max(g.norm().item() for _, g in gradients.values())
            worst = max(deviation(*pair, least) for pair in gradients.values())
            yield f"gradients of {name}, worst of {len(gradients)} tensors", worst
        self.ours.requires_grad_(False)
        self.theirs.requires_grad_(False)
        for p in trained:
            p.requires_grad_(True)

    def compare_steps(self) -> Iterator[tuple[str, float]]:
        """What steps of training change."""
        for p in [*self.ours.parameters(), *self.theirs.parameters()]:
            if p.ndim == 0:  # a temperature
                p.data.fill_(4.7)  # above its limit, ln 100 = 4.6
        start = self.values(lambda p: p.data.clone())
        steps = []
        for _ in range(STEPS):
            sizes = self.theirs.sizes
            steps.append([random_inputs(*sizes) for _ in range(self.theirs.batches)])
        self.theirs.our_steps(self.ours, steps)
        their_steps(self.theirs, steps)
        changes = []
        for name, pair in self.values(lambda p: p.data).items():
            changes.append(torch.stack(pair) - torch.stack(start[name]))
        ours, theirs = torch.cat(changes, 1)
        yield f"changes of the weights in {STEPS} steps", deviation(ours, theirs)

    def compare_captions(self) -> Iterator[tuple[str, float]]:
        """Greedy captions of more than one word, at least one of which ends."""
        x = random_inputs(*self.theirs.sizes)
        pair = (x["before"], x["after"])
        later = set()  # words that stand later in a caption, but nowhere first
        while not later:
            self.draw_weights()
            ids = self.theirs.generate(*pair)[:, 1:]
            later = set(ids.flatten().tolist()) - set(ids[:, 0].tolist())
        word = max(later)  # END takes its place
        head = self.ours.head if self.theirs.method is idc_pretrain else self.ours.decoder.head
        for p in head.parameters():
            p.data[[word, END]] = p.data[[END, word]]
        self.copy_weights()
        differ = self.ours.generate(*pair) != self.theirs.generate(*pair)
        yield "greedy captions, share of different words", differ.double().mean().item()


def their_steps(theirs: nn.Module, steps: list[list[dict]]) -> None:
    """The steps of their training script."""
    optimizer = theirs.optimizer([p for p in theirs.parameters() if p.requires_grad])
    for inputs in steps:
        losses = {}
        for x in inputs:
            for name, loss in theirs.losses(x).items():
                losses[name] = losses.get(name, 0) + loss / len(inputs)
        optimizer.zero_grad()
        theirs.total(losses).backward()
        optimizer.step()
        if theirs.method is scorer_cbr:
            theirs.clamp_scales()


def compare(theirs: nn.Module) -> Iterator[tuple[str, float]]:
    """What is compared with our model, and the deviation."""
    both = Both(theirs)
    both.draw_weights()
    yield from both.compare_losses()
    yield from both.compare_steps()
    if theirs.writes:
        yield from both.compare_captions()
    if not theirs.on_mini:
        our_rates, their_rates = theirs.rates()
        different = deviation(torch.tensor(our_rates), torch.tensor(their_rates))
        yield f"learning rates of {len(their_rates)} steps", different


# ---- record and train ----------------------------------------------------------------------------


def rounded(x: Tensor, digits: int) -> float | list[float]:
    return [round(v, digits) for v in x.tolist()] if x.ndim else round(x.item(), digits)


def record(method: str, clone: Path) -> None:
    """Compute what released.json has of a method, with the weights and inputs of the tests."""
    content = json.loads(released.RECORDED.read_text(encoding="utf-8"))
    content[method] = {}
    for title, theirs in released_cases(method, clone):
        found = named(theirs.double())
        for name, value in released.streams(theirs.maps):
            if name in found:
                p, rows = found[name]
                p.data[rows] = value
        x = released.idc_inputs()
        if method != "IDC":
            words, _, length = theirs.sizes
            x["before"], x["after"], x["caption"] = released.inputs(words, length)
        torch.set_default_dtype(torch.float64)  # not earlier: their tables of positions are float32
        losses = theirs.losses(x)
        released.total(losses).backward()
        new = {name: rounded(v, 6 if v.ndim else 3) for name, v in theirs.seen.items()}
        digits = 7 if method == "IDC" else 6
        new["losses"] = {name: rounded(loss, digits) for name, loss in losses.items()}
        norms = {name: found[name][0].grad.norm() for name in released.GRADIENTS[method, title]}
        new["gradients"] = {name: rounded(norm, 6) for name, norm in norms.items()}
        if theirs.writes:
            new["ids"] = theirs.generate(x["before"], x["after"])[0, : released.IDS].tolist()
        content[method][title] = new
        torch.set_default_dtype(torch.float32)
    write_text(released.RECORDED, json.dumps(content, indent=1) + "\n")


def train(method: str, clone: Path, flags: list[str]) -> None:
    """Run our script of the method. Their modules stand in for our class."""
    flags = [*flags, "--variant", "released", "--device", "cpu"]
    if method == "SCORER":
        scorer_cbr.SCORER = partial(TheirSCORER, clone)
        scorer_cbr.main(flags)
    elif method == "DIRL":
        dirl_ccr.DIRL = partial(TheirDIRL, clone)
        dirl_ccr.main(flags)
    else:
        raise InputError("train is for SCORER and DIRL; the two stages of IDC are two models")


# ---- command line --------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("use", choices=["compare", "record", "train"])
    parser.add_argument("clone", type=Path, help="folder of a clone of the authors' repository")
    args, flags = parser.parse_known_args(argv)
    method = method_of(args.clone)
    if args.use == "train":
        train(method, args.clone, flags)
        return
    parser.add_argument("--seed", type=int, default=1, help="of weights and inputs to compare")
    args = parser.parse_args(argv)
    if args.use == "record":
        record(method, args.clone)
        return
    torch.set_default_dtype(torch.float64)
    torch.Tensor.float = torch.Tensor.double
    worst = 0.0
    for title, theirs in [*released_cases(method, args.clone), *mini_cases(method, args.clone)]:
        print(f"{method}, {title}, seed {args.seed}", flush=True)
        torch.manual_seed(args.seed)
        for what, value in compare(theirs):
            print(f"  {what:50} {value:.1e}", flush=True)
            worst = max(worst, value)
    if worst > ROUNDING:
        print(f"This is not rounding: a deviation is {worst:.1e}.")
        sys.exit(1)


if __name__ == "__main__":
    run_main(main)
