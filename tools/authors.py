"""The authors' own code beside ours. Not a test: it needs git and a clone of their repository.

    git clone https://github.com/tuyunbin/SCORER && git -C SCORER checkout 2525039
    git clone https://github.com/tuyunbin/DIRL && git -C DIRL checkout c2955e6
    git clone https://github.com/yaolinli/IDC && git -C IDC checkout 6f3aabf

    python tools/authors.py compare SCORER --seed 7    theirs with ours, --variant released
    python tools/authors.py record SCORER              make their part of tests/released.json
    python tools/authors.py train SCORER --seed 1 --steps 3600 --out_dir runs/theirs

`compare` gives both the same random weights and inputs, in float64 and without dropout. It prints
how much they deviate, and exits with 1 if this is more than rounding.

`train` trains their modules on mini, for SCORER and DIRL, with the options of our scripts. Loader,
schedule, clipping, loss weights and selection are ours; modules, initial weights, losses and greedy
decoding are theirs. A run writes what ours write.

Their files run from the clone, which stays as it is. In memory, this is changed:
- Numbers that are fixed in the text of SCORER's and DIRL's modules get our values (see Theirs).
- `.cuda()` does nothing, so that a CPU will do. In compare, `.float()` gives float64.
- IDC: our code chooses which words and cells both sides mask. [MASK] and [CLS], which our head
  lacks, and in decoding UNK, have no chance as outputs. Our LayerNorms compute what theirs do.
"""

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import released

import dirl_ccr
import idc_pretrain
import scorer_cbr
from common import END, NULL, START, UNK, InputError, is_word, learning_rate, masked_mean
from support.files import run_main, write_text
from support.run import preset

ROUNDING = 1e-8  # `compare` accepts deviations up to this

# ---- their code ----------------------------------------------------------------------------------

# Method -> repository, commit, a file that only this repository has
REPOSITORIES = {
    "SCORER": ("tuyunbin/SCORER", "2525039", "models/SCORER.py"),
    "DIRL": ("tuyunbin/DIRL", "c2955e6", "models/DIRL.py"),
    "IDC": ("yaolinli/IDC", "6f3aabf", "clver/modules_pretrain.py"),
}


def method_of(clone: Path) -> str:
    """The method whose code is in a folder. InputError if there is none, or not this commit's."""
    commands = []
    for method, (repository, commit, file) in REPOSITORIES.items():
        address = f"https://github.com/{repository}"
        commands.append(f"git clone {address} && git -C {method} checkout {commit}")
        if (clone / file).exists():
            call = ["git", "-C", str(clone), "diff", "--quiet", commit, "--", "*.py", "*.yaml"]
            if subprocess.run(call, capture_output=True).returncode == 0:
                return method
            raise InputError(f"{clone} is not as in commit {commit}; {commands[-1]}")
    raise InputError(f"{clone} is no clone of the authors' code; {' or '.join(commands)}")


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

    def __init__(self, clone: Path, cfg, vocab_size: int, grid: tuple, max_len: int):
        super().__init__()
        assert grid[1] == grid[2], "their position embeddings are for square grids"
        stay_on_cpu()
        self.clone = clone
        self.cfg = cfg
        self.sizes = (vocab_size, grid, max_len)
        # Rows and columns, width, heads of CBR and dropout, as they stand in the text.
        self.numbers = {"14": grid[1], "512": cfg.dim, "num_heads=8": f"num_heads={cfg.heads}"}
        self.numbers["0.1"] = cfg.dropout
        self.make()

    def load(self, name: str) -> ModuleType:
        return load_file(self.clone / "models" / name, self.numbers)

    def configure(self, yaml: str) -> None:
        """Their configuration, with our sizes."""
        sys.modules["utils.attr_dict"] = load_file(self.clone / "utils/attr_dict.py")
        config = load_file(self.clone / "configs/config_transformer.py")
        config.merge_cfg_from_file(self.clone / "configs/dynamic" / yaml)
        self.config = config.cfg
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

    def losses_of(self, model: nn.Module, x: dict[str, Tensor]) -> dict[str, Tensor]:
        return model(x["before"], x["after"], x["caption"])

    def total(self, losses: dict[str, Tensor]) -> Tensor:
        """The expression in their training script."""
        text = (self.clone / self.script).read_text(encoding="utf-8")
        values = {theirs: losses[name] for name, theirs in self.loss_names.items()}
        return eval(re.search("total_loss = (.*)", text)[1], values)

    def optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return load_file(self.clone / "utils/utils.py").build_optimizer(parameters, self.config)

    def rates(self) -> tuple[list[float], list[float]]:
        """Learning rates of all steps, ours and theirs."""
        epoch = {"clevr_change": 265, "clevr_dc": 319}[self.cfg.dataset]  # batches of 128
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
        self.maps = released.scorer_names()
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
    """On mini, it has the decoder of CLEVR-DC's code, as our --variant released does."""

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
    sizes = (76, (2048, 7, 7), 24)
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
        sizes = dict(ff_dim=cfg.ffn, img_embs=2048, n_hidden=cfg.dim, n_head=cfg.heads)
        sizes |= dict(n_block=cfg.layers, img_enc_block=1, vocab_size=78, dropout=0.0, max_len=24)
        if stage == "pretrain":
            sizes |= dict(tasks=[], tmp=cfg.tau_fda)
        self.model = load_file(clone / f"clver/modules_{stage}.py").Model(CLS=4, **sizes)
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

    def losses_of(self, model: nn.Module, x: dict[str, Tensor]) -> dict[str, Tensor]:
        return self(x) if model is self else released.idc_losses(model, x, self.stage)

    def total(self, losses: dict[str, Tensor]) -> Tensor:
        return sum(losses.values())

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


def all_of(method: str, clone: Path) -> Iterator[tuple[str, nn.Module]]:
    """A method's data sets or, for IDC, its stages, with their modules."""
    Their = {"SCORER": TheirSCORER, "DIRL": TheirDIRL, "IDC": TheirIDC}[method]
    for dataset in getattr(Their, "datasets", ["clevr_change"]):
        file = Their.method
        cfg = preset(file.Config, file.PRESETS, file.RELEASED, dataset, "released")
        if method == "IDC":
            cfg.tau_fda = 0.01  # at 1, FDA hardly differs from ln 7
            for stage in ("pretrain", "finetune"):
                yield stage, TheirIDC(clone, cfg, stage).eval()
        else:
            words, length, _ = released.SIZES[dataset]
            yield dataset, Their(clone, cfg, words, (1024, 14, 14), length).eval()


def named(theirs: nn.Module) -> dict[str, tuple[Tensor, object]]:
    """Their names, as in released.py, of the parameters that we have -> the parameter, its rows."""
    names = released.merged(theirs.maps)
    found = {}
    for name, p in theirs.named_parameters():
        _, _, name = name.partition(".")  # without our name of their module
        # The stages of IDC have different poolers.
        if released.parts_of(name, names) and p.shape[1:] == names[name][1][1:]:
            found[name] = (p, theirs.rows.get(name, ...))
    return found


# ---- compare -------------------------------------------------------------------------------------


def random_inputs(words: int, grid: tuple[int, int, int], length: int) -> dict[str, Tensor]:
    """Three pairs, and what else released.idc_inputs has."""
    _, height, width = grid
    before, after = torch.rand(2, 3, *grid)
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
    """The norm of the difference, divided by that of theirs or, if this is larger, by `least`."""
    if ours.shape != theirs.shape:
        return float("inf")
    return ((ours - theirs).norm() / theirs.norm().clamp(min=least)).item()


def compare(theirs: nn.Module) -> Iterator[tuple[str, float]]:
    """What is compared with our model, and the deviation."""
    ours = theirs.Ours(theirs.cfg, *theirs.sizes).eval()
    names = released.merged(theirs.maps)
    of_ours = dict(ours.named_parameters())
    of_theirs = named(theirs)

    def values(read: Callable[[Tensor], Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
        """What `read` reads of each parameter: ours, theirs."""
        result = {}
        for name, (p, rows) in of_theirs.items():
            parts = [read(of_ours[part]).flatten() for part in released.parts_of(name, names)]
            result[name] = (torch.cat(parts), read(p)[rows].flatten())
        return result

    for p in ours.parameters():
        noise = torch.randn_like(p)
        p.data = noise * (p.numel() / p.shape[0]) ** -0.5 if p.ndim > 1 else p.data + 0.1 * noise
    for name, (value, _) in values(lambda p: p.data).items():
        p, rows = of_theirs[name]
        p.data[rows] = value.view_as(p.data[rows])
    trained = {}
    for model in (ours, theirs):
        trained[model] = [p for p in model.parameters() if p.requires_grad]
        model.requires_grad_(True)  # CBR's gradients are compared, too
    our_rates, their_rates = theirs.rates()
    optimizers = {ours: torch.optim.Adam(trained[ours], max(our_rates))}
    optimizers[theirs] = theirs.optimizer(trained[theirs])
    totals = {ours: partial(theirs.method.total_loss, cfg=theirs.cfg), theirs: theirs.total}

    x = random_inputs(*theirs.sizes)
    our_losses = theirs.losses_of(ours, x)
    for name, loss in theirs.losses_of(theirs, x).items():
        yield f"loss {name}", deviation(our_losses[name], loss)
        for model, loss_of in {ours: our_losses[name], theirs: loss}.items():
            model.zero_grad()
            loss_of.backward(retain_graph=True)
        gradients = values(lambda p: torch.zeros_like(p) if p.grad is None else p.grad)
        # Where a gradient should be 0, both are rounding.
        least = 1e-6 * max(g.norm().item() for _, g in gradients.values())
        worst = max(deviation(*pair, least) for pair in gradients.values())
        yield f"gradients of {name}, worst of {len(gradients)} tensors", worst

    start = values(lambda p: p.data.clone())
    for _ in range(10):
        x = random_inputs(*theirs.sizes)
        for model, optimizer in optimizers.items():
            model.zero_grad()
            totals[model](theirs.losses_of(model, x)).backward()
            optimizer.step()
            if theirs.method is scorer_cbr:
                model.clamp_scales()
    changes = []
    for name, pair in values(lambda p: p.data).items():
        changes.append(torch.stack(pair) - torch.stack(start[name]))
    yield "changes of the weights in ten steps", deviation(*torch.cat(changes, 1))
    if theirs.writes:
        differ = ours.generate(x["before"], x["after"]) != theirs.generate(x["before"], x["after"])
        yield "greedy captions, share of different words", differ.double().mean().item()
    different = deviation(torch.tensor(our_rates), torch.tensor(their_rates))
    yield f"learning rates of {len(their_rates)} steps", different


# ---- record and train ----------------------------------------------------------------------------


def rounded(x: Tensor, digits: int) -> float | list[float]:
    return [round(v, digits) for v in x.tolist()] if x.ndim else round(x.item(), digits)


def record(method: str, clone: Path) -> None:
    """Compute what released.json has of a method, with the weights and inputs of the tests."""
    content = json.loads(released.RECORDED.read_text(encoding="utf-8"))
    for title, theirs in all_of(method, clone):
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
        losses = theirs.losses_of(theirs, x)
        released.total(losses).backward()
        old = content[method][title]
        new = {name: rounded(v, 6 if v.ndim else 3) for name, v in theirs.seen.items()}
        digits = 7 if method == "IDC" else 6
        new["losses"] = {name: rounded(loss, digits) for name, loss in losses.items()}
        norms = {name: found[name][0].grad.norm() for name in old["gradients"]}
        new["gradients"] = {name: rounded(norm, 6) for name, norm in norms.items()}
        if theirs.writes:
            ids = theirs.generate(x["before"], x["after"])
            new["ids"] = ids[0, : len(old["ids"])].tolist()
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
    for title, theirs in all_of(method, args.clone):
        print(f"{method}, {title}, seed {args.seed}")
        torch.manual_seed(args.seed)
        for what, value in compare(theirs):
            print(f"  {what:50} {value:.1e}", flush=True)
            worst = max(worst, value)
    if not worst <= ROUNDING:
        print(f"This is not rounding: a deviation is {worst:.1e}.")
        sys.exit(1)


if __name__ == "__main__":
    run_main(main)
