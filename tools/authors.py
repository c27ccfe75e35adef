"""The authors' own code beside ours. Not a test: it needs git and a clone of their repository.

    git clone https://github.com/tuyunbin/SCORER && git -C SCORER checkout 2525039
    git clone https://github.com/tuyunbin/DIRL && git -C DIRL checkout c2955e6
    git clone https://github.com/yaolinli/IDC && git -C IDC checkout 6f3aabf

    python tools/authors.py compare SCORER --seed 7    theirs with ours, --variant released
    python tools/authors.py record SCORER              make their part of tests/released.json
    python tools/authors.py train SCORER --seed 1 --steps 3600 --out_dir runs/theirs

`compare` gives both the same random weights and inputs, in float64 and without dropout. It prints
how much they deviate, and exits with 1 if this is more than rounding. Their modules have the sizes
of their configuration, so ours must have them, too. Our ten steps are those of `train`, and theirs
have the optimiser and the total of their script; IDC's are steps of Adam.

`train` trains their modules on mini, for SCORER and DIRL, with our scripts' options for data and
training. Loader, schedule, clipping, loss weights and selection are ours; modules, initial weights,
losses and greedy decoding are theirs. A run writes what ours write. `compare` also compares these.

Their files run from the clone, which stays as it is. In memory, this is changed:
- `.cuda()` does nothing, so that a CPU will do. In compare, `.float()` gives float64.
- On mini, their sizes, learning rate and loss weights become ours. Some sizes are fixed in the text
  of a module (see Theirs).
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
from typing import NamedTuple
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
            # Unless told that it is safe, git refuses a clone of another owner.
            call = ["git", "-c", "safe.directory=*", "-C", str(clone), "diff", "--quiet", commit]
            call += ["--", "*.py", "*.yaml", ":(glob)**/config/*.json"]
            if subprocess.run(call, capture_output=True).returncode == 0:
                return method
            raise InputError(f"{clone} is not as in commit {commit}; {how_to_clone(method)}")
    commands = " or ".join(map(how_to_clone, REPOSITORIES))
    raise InputError(f"{clone} is no clone of the authors' code; {commands}")


def load_file(file: Path, replaced: dict | None = None) -> ModuleType:
    """A file of the clone as a module. replaced: what stands in its text -> what replaces it."""
    text = file.read_text(encoding="utf-8")
    for old, new in (replaced or {}).items():
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

    rows = {}  # their parameter -> its rows that we have; no entry: all
    writes = True  # captions
    batches = 2  # of a step: changed pairs, and distractor pairs

    def __init__(self, clone: Path, cfg, vocab_size: int, grid: tuple, max_len: int):
        super().__init__()
        assert grid[1] == grid[2], "their position embeddings are for square grids"
        self.clone = clone
        self.cfg = cfg
        self.sizes = (vocab_size, grid, max_len)
        self.resized = cfg.dataset not in self.datasets  # mini
        self.replaced = {}  # in the text of their modules
        if self.resized:
            self.replaced = {
                "14": grid[1],  # rows and columns
                "512": cfg.dim,
                "num_heads=8": f"num_heads={cfg.heads}",  # of CBR
                "0.1": cfg.dropout,
            }
        self.make()

    def load(self, name: str) -> ModuleType:
        return load_file(self.clone / "models" / name, self.replaced)

    def configure(self, yaml: str) -> None:
        """Their configuration; on mini, with our sizes and learning rate."""
        sys.modules["utils.attr_dict"] = load_file(self.clone / "utils/attr_dict.py")
        config = load_file(self.clone / "configs/config_transformer.py")
        config.merge_cfg_from_file(self.clone / "configs/dynamic" / yaml)
        self.config = config.cfg
        if not self.resized:
            return
        cfg = self.cfg
        words, (channels, _, _), max_len = self.sizes
        both = {"att_dim": cfg.dim, "att_head": cfg.heads}
        encoder = {"feat_dim": channels + 2 * cfg.use_coords, "emb_dim": cfg.dim}
        encoder["att_layer"] = cfg.layers
        decoder = {"vocab_size": words, "seq_length": max_len, "word_dim": cfg.word_dim}
        decoder["att_layer"] = cfg.decoder_layers
        self.config.model.transformer_encoder.update(both | encoder)
        self.config.model.transformer_decoder.update(both | decoder)
        self.config.train.optim.lr = cfg.lr

    def detect(self, before: Tensor, after: Tensor) -> tuple:
        return self.detector(self.add_coords(before), self.add_coords(after))

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
        if self.resized:
            return self.module.total_loss(losses, self.cfg)
        text = (self.clone / self.script).read_text(encoding="utf-8")
        values = {theirs: losses[name] for name, theirs in self.loss_names.items()}
        return eval(re.search("total_loss = (.*)", text)[1], values)

    def our_steps(self, ours: nn.Module, steps: list[list[dict]]) -> None:
        """Our `train`, with these inputs: for each step those of its two batches."""
        batches = []
        for inputs in steps:
            both = [data.Batch(x["before"], x["after"], x["caption"], [], []) for x in inputs]
            batches.append(tuple(both))
        words, grid, max_len = self.sizes
        dataset = SimpleNamespace(vocab=range(words), grid=grid, max_len=max_len, state=dict)
        dataset.train_batches = lambda *_: batches
        dataset.eval_batches = lambda *_: ()
        dataset.results = lambda *_, **__: {}
        # Mini's schedule and clipping are not in their code. The rate drops once.
        cfg = dataclasses.replace(self.cfg, steps=STEPS, schedule="step", lr_drop=STEPS // 2)
        cfg = dataclasses.replace(cfg, warmup=0, grad_clip=0)
        with (
            torch.random.fork_rng(devices=[]),  # `train` sets the seed
            tempfile.TemporaryDirectory() as folder,
            contextlib.redirect_stdout(io.StringIO()),
            patch.object(self.module, self.Ours.__name__, lambda *_: ours),
        ):
            cfg.out_dir = f"{folder}/run"
            self.module.train(cfg, dataset)

    def their_steps(self, steps: list[list[dict]]) -> None:
        """The same steps with their optimiser and total; the rate drops as in our_steps."""
        optimizer = self.optimizer([p for p in self.parameters() if p.requires_grad])
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, STEPS // 2, 0.1)
        for inputs in steps:
            losses = {}
            for x in inputs:
                for name, loss in self.losses(x).items():
                    losses[name] = losses.get(name, 0) + loss / len(inputs)
            optimizer.zero_grad()
            self.total(losses).backward()
            optimizer.step()
            self.after_step()
            schedule.step()

    def after_step(self) -> None:
        """What their script does after a step of its optimiser."""

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
    module = scorer_cbr
    Ours = scorer_cbr.SCORER
    datasets = ("clevr_change",)
    n_differences = 1  # of what the detector returns, so much goes to the speaker
    script = "train.py"
    loss_names = {"caption": "speaker_loss", "match": "sim_loss", "cbr": "cycle_loss"}

    def make(self) -> None:
        """Load their modules, and map their parameters' names to ours."""
        self.maps = released.scorer_names(self.cfg.layers)
        self.configure("transformer.yaml")
        encoder = self.load("SCORER.py")
        cbr = self.load("CBR.py")
        self.add_coords = encoder.AddSpatialInfo() if self.cfg.use_coords else nn.Identity()
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

    def after_step(self) -> None:
        for scale in (self.detector.scorer[-1].attention.logit_scale, self.cbr.contra.logit_scale):
            scale.data.clamp_(max=math.log(100))

    clamp_scales = after_step  # as our `train` calls it


class TheirDIRL(Theirs):
    """On mini, it has the decoder of CLEVR-DC's code, as our --variant released has."""

    module = dirl_ccr
    Ours = dirl_ccr.DIRL
    datasets = ("clevr_change", "clevr_dc")
    n_differences = 2
    loss_names = {"caption": "speaker_loss", "dirl": "dirl_loss", "ccr": "ccr_loss"}

    def make(self) -> None:
        """Load their modules, and map their parameters' names to ours."""
        of_dc = self.cfg.input_norm
        self.configure("transformer_dc.yaml" if of_dc else "transformer_clevr_change.yaml")
        encoder = self.config.model.transformer_encoder
        self.maps = released.dirl_names(self.sizes[0], encoder.feat_dim, of_dc)
        self.script = "train.py" if of_dc else "train_clevr_change.py"
        encoder = self.load("DIRL.py")
        self.add_coords = encoder.AddSpatialInfo() if self.cfg.use_coords else nn.Identity()
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

    module = idc_pretrain
    maps = released.idc_names()
    resized = False
    batches = 1  # both sorts of pairs
    sizes = (76, (2048, 7, 7), 40)
    seen = {}
    # Our ids NULL, UNK, START, END, the words, [MASK], [CLS] -> theirs.
    their_ids = torch.tensor([0, 3, 1, 2, *range(6, 78), 5, 4])
    # In our order. The six types are those of [IMG1], [IMG2], [CLS], both images and the text.
    rows = {
        "word_embedding.weight": their_ids,
        "output_layer.weight": their_ids[:76],
        "output_layer.bias": their_ids[:76],
        "position_encoding.type_pe.weight": torch.tensor([1, 3, 5, 2, 4, 6]),
    }

    def __init__(self, clone: Path, cfg, stage: str):
        super().__init__()
        self.clone = clone
        self.cfg = cfg
        self.stage = stage
        self.writes = stage == "finetune"
        file = clone / f"clver/config/{stage}_clver.json"
        self.config = SimpleNamespace(**json.loads(file.read_text(encoding="utf-8")))
        options = {"n_hidden": self.config.n_embs, "ff_dim": self.config.dim_ff}
        for name in ("img_embs", "n_head", "n_block", "dropout", "max_len"):
            options[name] = getattr(self.config, name)
        options |= {"img_enc_block": 1, "vocab_size": 78, "CLS": 4}  # the first is their default
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

    def losses(self, x: dict[str, Tensor]) -> dict[str, Tensor]:
        """x as released.idc_inputs has it -> the losses of the stage, reduced as in pretrain.py:161
        and finetune.py:155-162 of clver."""
        batch = self.images(x["before"], x["after"])
        batch["cap"] = self.their_ids[x["ids"]]
        batch["cap_label"] = self.their_ids[x["target"]].masked_fill(x["target"] == NULL, -1)
        if self.stage == "finetune":
            words, judge = self.model(batch | {"diff_label": x["changed"].long()})
            return {"caption": words.sum(), "judge": judge.sum()}
        mlm, _ = self.model(batch, "mlm")
        captions = torch.cat([x["caption"][:, None], x["rewritten"]], 1)
        fda, _ = self.model(batch | {"caps": self.their_ids[captions]}, "fda")
        batch["cap"] = self.their_ids[x["caption"]]
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
        unk = self.their_ids[UNK]
        hook = head.register_forward_hook(lambda _, args, y: y.index_fill(-1, unk, -1e9))
        ids = self.model.greedy(*self.images(before, after).values())
        hook.remove()
        return cut(self.their_ids.argsort()[ids])  # argsort inverts their_ids

    def our_losses(self, ours: nn.Module, x: dict[str, Tensor]) -> dict[str, Tensor]:
        return released.idc_losses(ours, x, self.stage)

    def our_steps(self, ours: nn.Module, steps: list[list[dict]]) -> None:
        """Our `train` draws a task for each step, and masks. So these are steps of Adam alone."""
        decay = self.cfg.weight_decay
        optimizer = torch.optim.Adam(ours.parameters(), self.config.lr, weight_decay=decay)
        for (x,) in steps:
            optimizer.zero_grad()
            idc_pretrain.total_loss(self.our_losses(ours, x), self.cfg).backward()
            optimizer.step()

    def their_steps(self, steps: list[list[dict]]) -> None:
        decay = self.config.weight_decay
        optimizer = torch.optim.Adam(self.parameters(), self.config.lr, weight_decay=decay)
        for (x,) in steps:
            optimizer.zero_grad()
            sum(self.losses(x).values()).backward()
            optimizer.step()

    def rates(self) -> tuple[list[float], list[float]]:
        # As it is loaded, their file parses a command line, and seeds Python's and NumPy's numbers.
        sys.modules["para"] = SimpleNamespace(parse_args=lambda: SimpleNamespace(seed=0))
        rate = load_file(self.clone / "clver/utils.py").get_lr_sched
        first = self.stage == "pretrain"
        count = self.cfg.pretrain_steps if first else self.cfg.steps
        ours = [idc_pretrain.rate_of(self.cfg, self.stage, step) for step in range(count)]
        theirs = range(self.config.total_train_steps)
        return ours, [rate(step, self.config, pretrain=first) for step in theirs]


THEIRS = {"SCORER": TheirSCORER, "DIRL": TheirDIRL}


def cases(method: str, clone: Path) -> Iterator[tuple[str, nn.Module]]:
    """A method's data sets with released code, and mini, or IDC's stages; and their modules."""
    if method == "IDC":
        cfg = released_config(idc_pretrain, "clevr_change")
        cfg.tau_fda = 0.01
        for stage in ("pretrain", "finetune"):
            yield stage, TheirIDC(clone, cfg, stage).eval()
        return
    Their = THEIRS[method]
    for dataset in (*Their.datasets, "mini"):
        sizes = MINI
        if dataset != "mini":
            words, length, _ = released.SIZES[dataset]
            sizes = (words, (1024, 14, 14), length)
        yield dataset, Their(clone, released_config(Their.module, dataset), *sizes).eval()


def released_config(module: ModuleType, dataset: str):
    """The Config of a method's --variant released."""
    cfg = preset(module.Config, module.PRESETS, module.RELEASED, dataset, "released")
    cfg.device = "cpu"
    return cfg


class Shared(NamedTuple):
    """A parameter of theirs that we have, too."""

    parameter: Tensor
    rows: object  # those that we have, in our order; ... stands for all
    ours: list[str]  # our names of its parts


def shared(theirs: nn.Module) -> dict[str, Shared]:
    """Their parameters that we have, by their names, as in released.py."""
    names = released.merged(theirs.maps)
    found = {}
    for full_name, p in theirs.named_parameters():
        _, _, name = full_name.partition(".")  # without our name of their module
        parts = released.parts_of(name, names)
        of_judge = name.startswith("pooler") and not theirs.writes  # pre-training has another one
        if parts and not of_judge:
            found[name] = Shared(p, theirs.rows.get(name, ...), parts)
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
        of_pair[:, 2] = UNK
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
        self.shared = shared(theirs)

    def values(self, read: Callable[[Tensor], Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
        """What `read` reads of each parameter: its name in their code -> ours, theirs."""
        of_ours = dict(self.ours.named_parameters())
        result = {}
        for name, (p, rows, parts) in self.shared.items():
            ours = torch.cat([read(of_ours[part]).flatten() for part in parts])
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
            p, rows, _ = self.shared[name]
            p.data[rows] = value.view_as(p.data[rows])

    def compare_losses(self) -> Iterator[tuple[str, float]]:
        """Each loss, and its gradients in all parameters, also in those that are not trained."""
        x = random_inputs(*self.theirs.sizes)
        parameters = [*self.ours.parameters(), *self.theirs.parameters()]
        frozen = [p for p in parameters if not p.requires_grad]
        for p in frozen:
            p.requires_grad_(True)
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
        for p in frozen:
            p.requires_grad_(False)

    def compare_steps(self) -> Iterator[tuple[str, float]]:
        """What steps of training change."""
        for p in [*self.ours.parameters(), *self.theirs.parameters()]:
            if p.ndim == 0:  # a temperature
                p.data.fill_(4.7)  # above its limit, ln 100 = 4.6
        start = self.values(lambda p: p.data.clone())
        sizes = self.theirs.sizes
        steps = []
        for _ in range(STEPS):
            steps.append([random_inputs(*sizes) for _ in range(self.theirs.batches)])
        self.theirs.our_steps(self.ours, steps)
        self.theirs.their_steps(steps)
        changes = []
        for name, pair in self.values(lambda p: p.data).items():
            changes.append(torch.stack(pair) - torch.stack(start[name]))
        ours, theirs = torch.cat(changes, 1)
        yield f"changes of the weights in {STEPS} steps", deviation(ours, theirs)

    def compare_captions(self) -> Iterator[tuple[str, float]]:
        """Greedy captions, and SCORER's and DIRL's attention. END takes the place of an id that
        stands nowhere first, so a caption has words and ends. UNK would be the likeliest word."""
        x = random_inputs(*self.theirs.sizes)
        pair = (x["before"], x["after"])
        later = set()
        while not later:
            self.draw_weights()
            ids = self.theirs.generate(*pair)[:, 1:]
            later = set(ids.flatten().tolist()) - set(ids[:, 0].tolist())
        word = max(later)
        head = getattr(self.ours, "decoder", self.ours).head
        for p in head.parameters():
            p.data[[word, END]] = p.data[[END, word]]
        head.bias.data[UNK] = 9
        self.copy_weights()
        ids = self.theirs.generate(*pair)
        differ = self.ours.generate(*pair) != ids
        yield "greedy captions, share of different words", differ.double().mean().item()
        if self.theirs.module is not idc_pretrain:
            ours = self.ours.attention_map(*pair, ids)["attention"]
            theirs = self.theirs.attention_map(*pair, ids)["attention"]
            yield "attention over cells", deviation(ours, theirs)


def compare(theirs: nn.Module) -> Iterator[tuple[str, float]]:
    """What is compared with our model, and the deviation."""
    both = Both(theirs)
    both.draw_weights()
    yield from both.compare_losses()
    yield from both.compare_steps()
    if theirs.writes:
        yield from both.compare_captions()
    if not theirs.resized:
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
    models = [(title, theirs) for title, theirs in cases(method, clone) if not theirs.resized]
    torch.set_default_dtype(torch.float64)  # not earlier: their tables of positions are float32
    for title, theirs in models:
        found = shared(theirs.double())
        for name, value in released.streams(theirs.maps):
            if name in found:
                found[name].parameter.data[found[name].rows] = value
        if method == "IDC":
            x = released.idc_inputs()
        else:
            words, _, length = theirs.sizes
            x = dict(
                zip(("before", "after", "caption"), released.inputs(words, length), strict=True)
            )
        losses = theirs.losses(x)
        released.total(losses).backward()
        new = {name: rounded(v, 6 if v.ndim else 3) for name, v in theirs.seen.items()}
        digits = 7 if method == "IDC" else 6
        new["losses"] = {name: rounded(loss, digits) for name, loss in losses.items()}
        names = released.GRADIENTS[method, title]
        norms = {name: found[name].parameter.grad.norm() for name in names}
        new["gradients"] = {name: rounded(norm, 6) for name, norm in norms.items()}
        if theirs.writes:
            new["ids"] = theirs.generate(x["before"], x["after"])[0, : released.IDS].tolist()
        content[method][title] = new
    write_text(released.RECORDED, json.dumps(content, indent=1) + "\n")


def train(method: str, clone: Path, flags: list[str]) -> None:
    """Run our script of the method. Their modules stand in for our class."""
    if method not in THEIRS:
        raise InputError("train is for SCORER and DIRL; the two stages of IDC are two models")
    module = THEIRS[method].module
    setattr(module, method, partial(THEIRS[method], clone))
    module.main([*flags, "--variant", "released", "--device", "cpu"])


# ---- command line --------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    uses = parser.add_subparsers(dest="use", required=True)
    for use in ("compare", "record", "train"):
        text = "folder of a clone of the authors' repository"
        uses.add_parser(use, allow_abbrev=False).add_argument("clone", type=Path, help=text)
    text = "of weights and inputs (default: 1)"
    uses.choices["compare"].add_argument("--seed", type=int, default=1, help=text)
    args, flags = parser.parse_known_args(argv)
    if flags and args.use != "train":  # train's are those of our script
        parser.error(f"unknown: {' '.join(flags)}")
    method = method_of(args.clone)
    stay_on_cpu()
    if args.use == "train":
        train(method, args.clone, flags)
        return
    if args.use == "record":
        record(method, args.clone)
        return
    torch.set_default_dtype(torch.float64)
    torch.Tensor.float = torch.Tensor.double
    worst = 0.0
    for title, theirs in cases(method, args.clone):
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
