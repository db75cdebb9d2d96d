"""Hugging Face: `Trainer(..., callbacks=[Compress(codec="lm4")])`.

The Trainer gives callbacks neither the DistributedDataParallel model nor the checkpoint it resumes
from. Its method train(), which calls them, knows both.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zcomm.integrations.registration import Registration, expect_ddp
from zcomm.transport.channels import group_timeout_s
from zcomm.transport.handshake import Caller, agree

try:
    from transformers import Trainer, TrainerCallback
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
except ImportError as error:
    raise ImportError(
        "zcomm.integrations.transformers: expected the packages transformers and accelerate, got "
        "none; use pip install 'zcomm[transformers]'"
    ) from error


class Compress(Registration, TrainerCallback):  # type: ignore[misc]
    """Compresses the gradients of `Trainer.train`; see Registration for the arguments.

    Each rank saves its residuals in the checkpoint's folder: `zcomm_rank0.pt` and so on.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        trainer, checkpoint = _training()
        model = trainer.model_wrapped
        remedy = "start the script with torchrun, without FSDP and DeepSpeed"
        expect_ddp(model, f"{type(model).__name__} ({args.parallel_mode})", remedy)
        self.register(model, trainer.accelerator.scaler)
        if checkpoint is not None and self.resume:
            self.load(_saved_in(Path(checkpoint)))

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if args.save_only_model or state.is_hyper_param_search:
            return  # nobody resumes from such a checkpoint
        folder = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        folder.mkdir(parents=True, exist_ok=True)  # each host has its own if they share no disk
        path = _file_in(folder, dist.get_rank())
        unfinished = path.with_suffix(".unfinished")
        torch.save(self.handle.state_dict(), unfinished)
        unfinished.replace(path)


def _training() -> tuple[Any, str | None]:
    """The Trainer whose train() is running in this thread, and the checkpoint it resumes from."""
    frame = inspect.currentframe()
    while frame is not None:
        trainer, name = frame.f_locals.get("self"), "resume_from_checkpoint"
        if isinstance(trainer, Trainer) and name in frame.f_locals:
            return trainer, frame.f_locals[name] or None
        frame = frame.f_back
    raise RuntimeError(
        "Compress: expected to be called by transformers.Trainer.train(), got a call from "
        "elsewhere; with another training loop use zcomm.compress(ddp)"
    )


def _file_in(folder: Path, rank: int) -> Path:
    return folder / f"zcomm_rank{rank}.pt"


def _saved_in(folder: Path) -> Any:
    """This rank's state; None if the checkpoint was saved without zcomm.

    A new rank takes rank 0's, which fits if it has no residuals.
    """
    candidates = (_file_in(folder, rank) for rank in (dist.get_rank(), 0))
    path = next((path for path in candidates if path.exists()), None)
    found = "there" if path else "not there"
    caller = Caller("Compress", None, group_timeout_s(None))
    agree({f"file of zcomm in {folder.name}": found}, [caller], dist.get_rank())
    return torch.load(path, map_location="cpu", weights_only=True) if path else None
